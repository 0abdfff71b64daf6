"""Passports recorded on one backend and checked on another: by the command line, where each has to pass, and in this
process."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import qwenimg
from qwenimg.common.parity import check as checking
from qwenimg.common.parity import record as recording
from qwenimg.common.parity.passport import passport_file
from qwenimg.common.parity.passport.passport import Passport
from support.cli_runner import cli
from support.tiny_sd import write_tiny_sd


def record(model: Path, passport: Path, backend: str, *asked: str) -> None:
    ran = cli("parity", "record", str(model), "--backend", backend, "--steps", "2", *asked, "-o", str(passport))
    assert ran.code == 0, ran.err


def check(model: Path, passport: Path, backend: str, *options: str) -> str:
    """Return what the check printed."""
    ran = cli("parity", "check", str(passport), str(model), "--backend", backend, *options)
    print(backend, ran.out.decode(), sep="\n")
    assert ran.code == 0, ran.err
    return ran.out.decode()


class RecordedRun:
    """A passport of a model, recorded on torch, written and read, and what the call named."""

    def __init__(self, folder: Path, path: Path, asked: Mapping[str, Any]):
        """Record the call `asked` of the model in `folder` to the file `path`."""
        self.folder = folder
        self.networks = tuple(dict.fromkeys(one.network for one in asked.get("control", ())))
        self.embeddings = tuple(asked.get("embedding", ()))
        with closing(qwenimg.load(self.folder, "cpu", "fp32")) as pipe:
            made = recording.record(pipe, asked, exact=pipe.engine, sampled=True, notify=lambda text: None)
        passport_file.write(path, made, overwrite=False)
        self.passport = passport_file.read(path)

    def judged(self, backend: str, passport: Passport) -> tuple[list[checking.Judged], checking.RedrawnImage]:
        """Return the verdicts on the blocks of `passport` and on its picture."""
        with closing(qwenimg.load(self.folder, backend, "fp32")) as pipe:
            controls = () if passport.picture is None else passport.picture.controls
            names = dict.fromkeys(one.fingerprint for one in controls)
            by_print = {pipe.controls.fingerprint(name): name for name in self.networks}
            assert names.keys() == by_print.keys()
            here = (), [by_print[one.fingerprint] for one in controls], self.embeddings
            checking.check_run(passport, pipe, *here)
            return list(checking.blocks(passport, pipe, *here)), checking.picture(passport, pipe, *here)


def of_tiny_sd(place: Path, kind: str, name: str, asked: Mapping[str, Any]) -> RecordedRun:
    """Return the record of the call `asked` of the tiny Stable Diffusion `kind`, whose folder is in `place`, in the
    file `name`."""
    folder = place / kind
    if not folder.exists():
        write_tiny_sd(folder, kind)
    return RecordedRun(folder, place / f"{name}.safetensors", asked)
