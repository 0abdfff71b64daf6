"""FLUX.2 klein KV from a prompt and pictures to pixels, on both backends, against diffusers' Flux2KleinKVPipeline on a
folder that it wrote. Theirs makes keys and values of references in the first step, together with text and image."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from support import oracle_flux2, peer
from support.relative import relative
from support.tiny_flux2 import DIT

import qwenimg
from qwenimg import Pipeline
from qwenimg.common.base.errors import UsageError
from qwenimg.common.families.flux2 import memory
from qwenimg.common.memory.memory_plan import StageMemory
from qwenimg.common.networks.denoisers import flux2_conditioning
from qwenimg.common.numbers import noise
from qwenimg.common.pipeline import fit_options, start
from qwenimg.common.runtime import group
from qwenimg.common.runtime.group import PaperRanks
from qwenimg.common.runtime.stages import Stage

BACKENDS = ("cpu", "mlx")
LATENTS = 2e-5  # relative L2 of the final latents, of which 4e-6 are found
PIXELS = 2  # of 255: a value on a rounding edge may go either way
RNG = np.random.default_rng(13)
EVEN = RNG.integers(0, 256, (64, 96, 3), np.uint8)
ODD = RNG.integers(0, 256, (83, 70, 3), np.uint8)  # cropped to 80 x 64
CASES: list[tuple[str, int, int, int, list[np.ndarray]]] = [
    ("a star above a ring, 3 hearts; 背景", 48, 112, 3, [ODD, EVEN]),
    ("a red circle", 80, 48, 4, []),
    ("x " * 700, 64, 64, 2, [EVEN]),  # more tokens than are read: no pads
    ("a blue square", 112, 64, 1, [ODD]),
]


@pytest.fixture(scope="module")
def opened(tiny_flux2: dict[str, Path]) -> dict[str, Pipeline]:
    return {one: qwenimg.load(tiny_flux2["flux2-kv"], backend=one, precision="fp32") for one in BACKENDS}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[1]}x{case[2]}-{len(case[4])}")
@pytest.mark.sample(1)
def test_equals_diffusers(tiny_flux2: dict[str, Path], opened: dict[str, Pipeline], case: Any) -> None:
    prompt, width, height, steps, pictures = case
    initial = noise.normal((1, 32, height // 16, width // 16), seed=7)
    latents, pixels = oracle_flux2.generate_kv(tiny_flux2["flux2-kv"], prompt, initial, steps=steps, images=pictures)
    assert pixels.std() > 10, "a constant picture would prove nothing"
    more = {"image": pictures} if pictures else {}
    for backend, pipe in opened.items():
        ours = pipe(prompt, width=width, height=height, steps=steps, seed=7, **more)
        peer.check_picture(f"{backend} {width}x{height}", ours, (latents, pixels), LATENTS, PIXELS)


def test_every_reference_is_seen(opened: dict[str, Pipeline]) -> None:
    """Another one, another order or none gives another result."""
    calls = [{}, {"image": ODD}, {"image": [ODD, EVEN]}, {"image": [EVEN, ODD]}]
    made = [opened["cpu"]("a star", width=48, height=48, steps=2, seed=3, **more).latents for more in calls]
    changes = [relative(made[i], made[j]) for i in range(len(made)) for j in range(i)]
    print("changes:", ", ".join(f"{change:.1e}" for change in changes))
    assert min(changes) > 10 * LATENTS


# Keys and values that are kept

ASKED: dict[str, Any] = {"width": 48, "height": 32, "steps": 3, "seed": 3, "image": [ODD, EVEN]}
ANEW = "with references computed anew in each step"
SEEN = 5 * 4 + 4 * 6  # their tokens


def denoising(pipe: Pipeline, **asked: Any) -> Stage:
    request = pipe.check("a star", **asked)
    model, shape = pipe.model, start.latent_shape(pipe.model, request)
    [stage] = [one for one in model.stages(request, model.plan(request), shape) if one.name == "denoise"]
    return stage


def planned(pipe: Pipeline) -> tuple[bool, StageMemory]:
    """Whether a picture fits, and what its steps take."""
    plan = fit_options.plan_memory(pipe.model, pipe.check("a star", **ASKED))
    return plan.fits(plan.budget), next(one for one in plan.stages if one.name == "denoise")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plan_counts_them(opened: dict[str, Pipeline], backend: str) -> None:
    """Two arrays of each block; without references there are none, and one way to run."""
    stage, config = denoising(opened[backend], **ASKED), DIT
    [kept, anew] = stage.splits
    width = config["num_attention_heads"] * config["attention_head_dim"]
    blocks = config["num_layers"] + config["num_single_layers"]
    assert kept.activations - anew.activations == 2 * blocks * SEEN * width * 4
    [alone] = denoising(opened[backend], **ASKED | {"image": None}).splits
    assert alone.activations < anew.activations


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(1)
def test_made_anew_they_change_no_bit(
    tiny_flux2: dict[str, Path], opened: dict[str, Pipeline], monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """Where they do not fit into memory, each step makes them; a step cache skips both."""
    pipe = opened[backend]
    kept, cached = pipe("a star", **ASKED), pipe("a star", cached_calls="2", **ASKED)
    assert "1 of 3 calls cached" in cached.recipe["step_cache_effect"]
    assert not np.array_equal(kept.latents, cached.latents)
    monkeypatch.setattr(memory, "known_bytes", lambda *given: 2**60)
    with qwenimg.load(tiny_flux2["flux2-kv"], backend, "fp32") as pipe:
        assert planned(pipe)[1].about == ANEW
        assert np.array_equal(kept.latents, pipe("a star", **ASKED).latents)
        assert np.array_equal(cached.latents, pipe("a star", cached_calls="2", **ASKED).latents)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(1)
def test_streamed_blocks_change_no_bit(tiny_flux2: dict[str, Path], opened: dict[str, Pipeline], backend: str) -> None:
    """Though a streamed block makes keys and values in the first step alone."""
    pipe = opened[backend]
    expected, whole = pipe("a star", **ASKED).latents, planned(pipe)[1].weights
    for limit in range(4_000_000, 12_000_000, 500_000):
        with qwenimg.load(tiny_flux2["flux2-kv"], backend, "fp32", max_memory=limit) as pipe:
            fits, stage = planned(pipe)
            if fits and stage.weights < whole and stage.about != ANEW:
                assert np.array_equal(pipe("a star", **ASKED).latents, expected)
                return
    pytest.fail("no limit streams blocks")


def test_they_keep_nothing_else(opened: dict[str, Pipeline], monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer in blocks of one stream makes the feed-forward's widths beside the values, which are a part of its
    result: nine times as much. By the memory that torch holds for each array."""
    network = import_module("qwenimg.backends.torch.networks.denoisers.flux2_kv_dit")
    conditions, plain = list[Any](), network.Runner.condition

    def noted(*given: Any) -> Any:
        conditions.append(plain(*given))
        return conditions[-1]

    monkeypatch.setattr(network.Runner, "condition", noted)
    opened["cpu"]("a star", **ASKED)
    kept = [array for pair in conditions[0].known for array in pair]
    assert len(kept) == 2 * (DIT["num_layers"] + DIT["num_single_layers"])
    assert {array.untyped_storage().nbytes() / array.nbytes for array in kept} == {1.0}


# Faults


def of_the_block_before(patch: pytest.MonkeyPatch, network: ModuleType) -> None:
    before: list[Any] = []
    for block in (network.DoubleBlock, network.SingleBlock):

        def run(self: Any, ref: Any, *own: Any, plain: Any = block.run_references) -> Any:
            ref, known = plain(self, ref, *own)
            before.append(known)
            return ref, before[-2:][0]

        patch.setattr(block, "run_references", run)


def modulated_for_the_first_step(patch: pytest.MonkeyPatch, network: ModuleType) -> None:
    plain = flux2_conditioning.time_rows
    patch.setattr(
        flux2_conditioning, "time_rows", lambda config, timestep, dtype: plain(config, timestep or 1000.0, dtype)
    )


def apart(patch: pytest.MonkeyPatch, network: ModuleType) -> None:
    """Each reference sees itself alone."""
    for block in (network.DoubleBlock, network.SingleBlock):

        def run(self: Any, ref: Any, mod: Any, rope: Any, plain: Any = block.run_references) -> Any:
            parts = (slice(0, 5 * 4), slice(5 * 4, SEEN))
            refs, pairs = zip(*(plain(self, ref[:, one], mod, rope[one]) for one in parts), strict=True)
            return torch.cat(refs, dim=1), tuple(torch.cat(both, dim=1) for both in zip(*pairs, strict=True))

        patch.setattr(block, "run_references", run)


def not_rotated(patch: pytest.MonkeyPatch, network: ModuleType) -> None:
    ones = network.DoubleBlock.run_references
    patch.setattr(network.DoubleBlock, "run_references", lambda self, ref, mod, rope: ones(self, ref, mod, rope[:1]))


PLANTED: list[Callable[[pytest.MonkeyPatch, ModuleType], None]] = [
    of_the_block_before,
    modulated_for_the_first_step,
    apart,
    not_rotated,
]


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.__name__)
@pytest.mark.sample(2)
def test_planted_faults_are_seen(
    tiny_flux2: dict[str, Path], fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each changes latents by far more than the limit against diffusers."""
    with qwenimg.load(tiny_flux2["flux2-kv"], "cpu", "fp32") as pipe:
        right = pipe("a star", **ASKED).latents
        fault(monkeypatch, import_module("qwenimg.backends.torch.networks.denoisers.flux2_kv_dit"))
        error = relative(pipe("a star", **ASKED).latents, right)
    print(f"{fault.__name__}: {error:.1e}")
    assert error > 5 * LATENTS


# What it does not do


def test_it_has_no_guidance(opened: dict[str, Pipeline]) -> None:
    plain, guided = (opened["cpu"]("a ring", width=32, height=32, steps=1, seed=1, guidance=s) for s in (1.0, 4.0))
    assert np.array_equal(plain.latents, guided.latents)
    assert guided.warnings == ["guidance has no effect: this model is distilled to draw without it"]
    assert (opened["cpu"].defaults.steps, opened["cpu"].defaults.guidance) == (4, 1.0)


def test_several_devices_do_not_share_it(opened: dict[str, Pipeline]) -> None:
    assert opened["cpu"].model.heads == 0
    with pytest.raises(UsageError, match="devices share only the branches of guidance"):
        group.sharing(PaperRanks(size=2, by_tokens=True), 1, opened["cpu"].model.heads)
