"""Passports of runs with a tiny VAE: both backends hold them, and faults in its forward are named."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support import passport_runs, tiny_autoencoder
from support.mutant import Patch, side
from support.passport_mutants import cut
from support.tiny_flux2 import write_tiny_flux2
from support.tiny_model import write_tiny_model
from support.tiny_sd import write_tiny_sd

import qwenimg
from qwenimg.common.parity import check, record, summary
from qwenimg.common.parity.passport import passport_file
from qwenimg.common.parity.passport.passport import Passport

BACKENDS = ("cpu", "mlx")
MODELS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "taesd": ("sd15", lambda place: write_tiny_sd(place, "sd15")),
    "taef2": ("flux2-klein", lambda place: write_tiny_flux2(place, distilled=False)),
    "taew2_1": ("qwen", write_tiny_model),
}
ASKED: dict[str, Any] = {"prompt": "a ring", "width": 48, "height": 32, "steps": 2, "seed": 3}


class Recorded:
    """A model, its tiny VAE, and the passport of a run with both, recorded on a backend under a policy."""

    def __init__(self, place: Path, name: str, backend: str = "cpu", policy: str = "fp32"):
        kind, write = MODELS[name]
        self.folder = place / kind
        write(self.folder)
        self.vae, _, _ = tiny_autoencoder.write_for(place / "tiny", name, self.folder)
        with closing(self.opened(backend, policy)) as pipe, closing(self.opened("cpu", policy)) as exact:
            self.passport = record.record(pipe, ASKED, exact=exact.engine, notify=lambda text: None)

    def opened(self, backend: str, policy: str) -> Any:
        return qwenimg.load(self.folder, backend, policy, vae=self.vae)

    def judged(self, backend: str, passport: Passport) -> tuple[list[check.Judged], check.RedrawnImage]:
        with closing(self.opened(backend, passport.precision)) as pipe:
            return list(check.blocks(passport, pipe)), check.picture(passport, pipe)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recorded]:
    return {name: Recorded(tmp_path_factory.mktemp(name), name) for name in MODELS}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sample(0)
def test_it_holds_on_mlx(recorded: dict[str, Recorded], name: str) -> None:
    one = recorded[name]
    judged, drawn = one.judged("mlx", one.passport)
    print(*summary.lines(judged, drawn), sep="\n")
    assert summary.verdict(judged, drawn) == ""
    blocks = [block.block for block in one.passport.blocks if block.component == "vae"]
    layers = len({path.rpartition(".conv.")[0] or path.rpartition(".")[0] for path in _weights(one)})
    assert {"encode", "decode"} <= {*blocks} and blocks.count("layer") >= layers


def _weights(one: Recorded) -> list[str]:
    with closing(one.opened("cpu", "fp32")) as pipe:
        return [name for name in pipe.checkpoint["vae"].plan.entries if ".pool." not in name]


@pytest.mark.parametrize("policy", ["fp32", "bf16,vae=bf16"])
@pytest.mark.sample(0)
def test_it_holds_on_torch(tmp_path: Path, policy: str) -> None:
    one = Recorded(tmp_path, "taesd", "mlx", policy)
    judged, drawn = one.judged("cpu", one.passport)
    print(*summary.lines(judged, drawn), sep="\n")
    assert summary.verdict(judged, drawn) == ""


def test_by_the_command_and_with_a_decoder_alone(tmp_path: Path) -> None:
    write_tiny_sd(tmp_path / "sd15", "sd15")
    path, _, _ = tiny_autoencoder.write_for(tmp_path / "tiny", "taesd", tmp_path / "sd15", ("decoder",))
    passport = tmp_path / "p.safetensors"
    passport_runs.record(tmp_path / "sd15", passport, "cpu", "--size", "32x32", "--vae", str(path))
    passport_runs.check(tmp_path / "sd15", passport, "mlx", "--vae", str(path))
    blocks = {block.name for block in passport_file.read(passport).blocks if block.component == "vae"}
    assert "vae.decode" in blocks and not any(name.startswith("vae.enc") for name in blocks)


# Faults


def clamp_left_out(patch: Patch) -> None:
    patch.set(patch.backend.ops, "tanh", lambda x: x)


def larger_after_the_convolution(patch: Patch) -> None:
    upsample = patch.backend.images.upsample
    patch.set(patch.backend.images, "upsample", lambda x: x)

    def change(layer: Any, x: Any, y: Any) -> Any:
        biased = "bias" in layer if not patch.backend.torch else layer.bias is not None
        return upsample(y) if not biased and layer.weight.shape[-2] == 3 and layer.stride in (1, (1, 1)) else y

    patch.layer("Conv2d", change)


def frame_before_is_this_one(patch: Patch) -> None:
    patch.set(patch.backend.images, "frames_before", lambda x: x)


FAULTS = [
    ("taesd", clamp_left_out, "vae.decode"),
    ("taesd", larger_after_the_convolution, "vae.decode"),
    ("taef2", clamp_left_out, "vae.decode"),
    ("taew2_1", clamp_left_out, "vae.decode"),
    ("taew2_1", larger_after_the_convolution, "vae.decode"),
    ("taew2_1", frame_before_is_this_one, "vae.decoder.3"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "fault", "block"), FAULTS, ids=lambda one: getattr(one, "__name__", str(one)))
@pytest.mark.sample(2)
def test_a_fault_is_named_where_it_is_made(
    recorded: dict[str, Recorded], monkeypatch: pytest.MonkeyPatch, name: str, fault: Any, block: str, backend: str
) -> None:
    one = recorded[name]
    passport = cut(one.passport, (block,))
    with closing(one.opened(backend, "fp32")) as pipe:
        [clean] = check.blocks(passport, pipe)
        fault(Patch(monkeypatch, side(backend)))
        [judged] = check.blocks(passport, pipe)
    print(block, [figure.error for figure in clean.figures], [figure.error for figure in judged.figures])
    assert not clean.failures and any("error" in failure for failure in judged.failures), judged.failures
