"""What tests of several rooms share of `test_cli`."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import qwenimg
from qwenimg.cli.main import run
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.shapes import builtin
from support.fake_pipeline import FakePipeline

MAX_LINE = 300  # characters of an error


@dataclass
class Ran:
    code: int
    out: bytes
    err: str

    @property
    def paths(self) -> list[Path]:
        return [Path(line) for line in self.out.decode().splitlines()]

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]

    def refused(self, code: int, *words: str) -> None:
        """Asserts a clean failure: `code`, one printable line that has `words`, and no output."""
        assert self.code == code, self
        lines = self.err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("qwenimg: error: "), self.err
        assert len(lines[0]) <= MAX_LINE and lines[0].isprintable() and "Traceback" not in self.err
        assert all(word in lines[0] for word in words), self.err
        assert self.out == b""


def cli(*args: str, stdin: bytes = b"") -> Ran:
    return captured(run, args, stdin)


def captured(command: Callable[[list[str]], int], args: Sequence[str], stdin: bytes = b"") -> Ran:
    """Run a command in this process, such as `main` of a tool; return its exit code and what it wrote."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = command(list(args))
        out.flush()
        err.flush()
    return Ran(code, out.buffer.getvalue(), err.buffer.getvalue().decode())  # type: ignore[attr-defined]


@dataclass
class Library:
    """What `qwenimg.open_pipeline` was called with, and what it gave."""

    faults: dict[int, BaseException] = field(default_factory=dict)
    fails: BaseException | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)
    pipes: list[FakePipeline] = field(default_factory=list)
    openings: list[LoadOptions] = field(default_factory=list)

    def open_pipeline(self, opening: LoadOptions, notify: Callable[[str, str], None]) -> FakePipeline:
        notify("warning", "the built-in model draws shapes")
        if self.fails is not None:
            raise self.fails
        given = {"model": opening.model, "backend": opening.backend, "precision": opening.precision}
        self.calls.append(given | {"offline": opening.offline})
        self.openings.append(opening)
        pipe = FakePipeline(**given, notify=notify, faults=self.faults)
        self.pipes.append(pipe)
        return pipe

    @property
    def asked(self) -> list[dict[str, Any]]:
        return self.pipes[-1].asked


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Library:
    found = Library()
    monkeypatch.setattr(qwenimg, "open_pipeline", found.open_pipeline)
    monkeypatch.setattr(builtin, "folder", lambda: tmp_path / "nowhere")  # its words are tested in test_builtin
    monkeypatch.chdir(tmp_path)
    return found
