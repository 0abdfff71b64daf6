"""Every family on a device that is not the CPU: nothing is made in the wrong place, and the pictures are the CPU's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo
from support.family_cases import ASKED, PROMPT, STARTING, TASKS, opener, places, see_few_pixels
from support.in_bands import in_bands
from support.pretend_device import DEVICE, Shell, WrongDeviceError, pretend_engine, pretending
from support.relative import relative
from support.toy_family import add_toy, write_toy

from qwenimg import Pipeline, backends
from qwenimg.backends.torch import compile, ops

LATENTS = 1e-5  # relative L2 of the final latents, float32: the same kernels, but for what depends on a weight's device


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with pretending():
        yield


# Nothing is placed on a device by these that is not by others of their family.
LIKE_OTHERS = ("sd21", "sdxl")


@pytest.fixture(params=[pytest.param(k, marks=[pytest.mark.slow] if k in LIKE_OTHERS else []) for k in STARTING])
def pipes(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tiny: dict[str, Path],
    tmp_path: Path,
) -> list[Pipeline]:
    """The same model on the CPU and on the pretend device."""
    add_toy(monkeypatch, tmp_path / "networks")
    see_few_pixels(monkeypatch)
    kind, found = request.param, places(tiny, write_toy(tmp_path / "toy"))
    load = opener(kind, found[kind], tiny)
    on_cpu = load("cpu")
    monkeypatch.setattr(backends, "load", lambda name: pretend_engine())
    return [on_cpu, load("cpu")]


@pytest.mark.sample(1)
def test_every_family_draws_what_the_cpu_draws(pipes: list[Pipeline]) -> None:
    for task in ("text", "mask"):
        expected, made = (pipe(PROMPT, **ASKED, **TASKS[task]) for pipe in pipes)
        error = relative(made.latents, expected.latents)
        print(f"{task}: {error:.1e} (limit {LATENTS}) on {pipes[1].device}")
        assert error <= LATENTS and np.abs(made.pixels.astype(int) - expected.pixels).max() <= 1
    assert isinstance(pipes[1].engine.array(np.zeros(2, np.float32)), Shell)


@pytest.mark.parametrize("pipes", ["qwen", "sd15"], indirect=True)
@pytest.mark.sample(0)
def test_images_between_bands_are_kept_by_the_host(pipes: list[Pipeline], monkeypatch: pytest.MonkeyPatch) -> None:
    """The picture is that of the whole VAE on the CPU."""
    expected = pipes[0](PROMPT, **ASKED, **TASKS["mask"])
    in_bands(monkeypatch)
    kept, away = list[torch.Tensor](), ops.away

    def listed(x: torch.Tensor) -> torch.Tensor:
        assert isinstance(x, Shell)
        kept.append(away(x))
        return kept[-1]

    monkeypatch.setattr(ops, "away", listed)
    made = pipes[1](PROMPT, **ASKED, **TASKS["mask"])
    error, apart = relative(made.latents, expected.latents), np.abs(made.pixels.astype(int) - expected.pixels).max()
    print(f"{len(kept)} bands, latents {error:.1e} (limit {LATENTS}), pixels {apart} of 255")
    assert len(kept) > 20 and all(band.device.type == "cpu" for band in kept)
    assert error <= LATENTS and apart <= 1


@pytest.mark.slow
@pytest.mark.parametrize(("pipes", "guidance"), [("qwen", 1.0), ("sd15", 3.0)], indirect=["pipes"])
def test_compiled_blocks_draw_what_the_cpu_draws(
    pipes: list[Pipeline], guidance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced for the device, and run as traced. torch's tracer does not take all that the stand-in has: no mask
    of two texts in Qwen-Image and no batch of one in a UNet; on the CPU `tests/networks/test_compile.py` has both."""
    traced = partial(compile.compile, backend="eager")
    monkeypatch.setattr(compile, "compile", traced)
    monkeypatch.setattr(compile, "missing", lambda on_gpu: "")
    torch._dynamo.reset()  # of what other tests have traced
    torch._dynamo.utils.counters.clear()
    assert pipes[1].compile("on").on
    expected, made = (pipe(PROMPT, **(ASKED | {"guidance": guidance})) for pipe in pipes)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    error = relative(made.latents, expected.latents)
    print(f"{error:.1e} (limit {LATENTS}) on {pipes[1].device}, {graphs} graphs, {breaks} breaks")
    assert error <= LATENTS and graphs > 0 and breaks == 0


@pytest.mark.parametrize("pipes", ["qwen", "sd15", "toy"], indirect=True)
def test_a_tensor_in_the_wrong_place_is_caught(pipes: list[Pipeline], monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes from numpy to the device stays on the CPU, as where `device=` was forgotten."""
    monkeypatch.setattr(ops, "table", lambda values, dtype, device: torch.from_numpy(values).to(dtype))
    with pytest.raises(WrongDeviceError, match="found cpu and pretend"):
        pipes[1](PROMPT, **ASKED)


def test_the_device_itself() -> None:
    here, there = torch.ones(2, 3), torch.ones(2, 3, device=DEVICE)
    assert there.device == DEVICE and (there + there).device == DEVICE and (2.0 * there).device == DEVICE
    assert torch.equal((there @ there.T).cpu(), here @ here.T)
    assert (there + torch.tensor(1.0)).device == DEVICE  # a number has no place
    assert torch.empty_like(here).copy_(there).device.type == "cpu"
    for mixed in (lambda: here + there, lambda: torch.cat([here, there]), lambda: there[torch.tensor([0])] + here):
        with pytest.raises(WrongDeviceError, match="one device"):
            mixed()
