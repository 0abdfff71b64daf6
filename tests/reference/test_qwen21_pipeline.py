"""Qwen-Image-2.1 from a prompt and pictures to pixels, on both backends, against diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from support import mutants_qwen21, oracle_qwen21
from support.mutant import Backend, Patch, Plant
from support.relative import relative
from support.tiny_qwen21 import TURBO

import qwenimg
from qwenimg import Result
from qwenimg.backends.torch.networks.encoders import qwen3_vl_vision
from qwenimg.common.base.errors import UsageError
from qwenimg.common.families import catalog, registry
from qwenimg.common.networks.denoisers import qwen21_conditioning
from qwenimg.common.networks.denoisers.qwen21_conditioning import TokenRun
from qwenimg.common.numbers import noise
from qwenimg.common.sampling.flow_match import flow_schedule

BACKENDS = ("cpu", "mlx")
LATENTS = 1e-4  # relative L2 of the final latents
PIXELS = 2  # of 255: a value on a rounding edge may go either way

CASES = [
    # prompt, negative prompt, width, height, steps, guidance
    ("a red circle", None, 96, 64, 4, 1.0),
    ("a star above a ring, 3 hearts; 背景", "低质量, blurry", 64, 128, 3, 2.5),
    ("a blue square " * 20, "", 64, 64, 2, 4.0),
]


def picture(width: int, height: int, seed: int, alpha: bool = False) -> np.ndarray:
    """A smooth picture, with soft alpha or none."""
    rng = np.random.default_rng(seed)
    values = np.asarray(Image.fromarray(rng.integers(0, 256, (4, 5, 4), np.uint8)).resize((width, height)))
    return np.ascontiguousarray(values if alpha else values[..., :3])


class Asked(NamedTuple):
    prompt: str
    negative: str | None
    images: list[np.ndarray]
    size: tuple[int, int]
    steps: int
    guidance: float


def theirs(folder: Path, one: Asked, seed: int = 7) -> tuple[np.ndarray, np.ndarray]:
    initial = noise.normal((1, 12, one.size[1] // 16, one.size[0] // 16), seed=seed)
    return oracle_qwen21.generate(
        folder, one.prompt, one.images, initial, negative_prompt=one.negative, steps=one.steps, guidance=one.guidance
    )


def ours(folder: Path, one: Asked, backend: str, **more: Any) -> Result:
    pipe = qwenimg.load(folder, backend=backend, precision="fp32")
    width, height = one.size
    asked = {"width": width, "height": height, "steps": one.steps, "guidance": one.guidance, "seed": 7} | more
    return pipe(one.prompt, negative_prompt=one.negative or "", image=one.images or None, **asked)


def compared(name: str, result: Result, expected: tuple[np.ndarray, np.ndarray]) -> tuple[float, float]:
    error, worst = relative(result.latents, expected[0]), float(np.abs(result.pixels - expected[1]).max())
    print(f"{name}: latents {error:.2e} (limit {LATENTS}), pixels {worst:.0f} (limit {PIXELS})")
    return error, worst


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[2]}x{case[3]}-{case[4]}-{case[5]}")
@pytest.mark.sample(1)
def test_text_alone(tiny_qwen21: dict[str, Path], case: Any) -> None:
    prompt, negative, width, height, steps, guidance = case
    one, folder = Asked(prompt, negative, [], (width, height), steps, guidance), tiny_qwen21["qwen21"]
    expected = theirs(folder, one)
    assert expected[1].std() > 10, "a constant picture would prove nothing"
    for backend in BACKENDS:
        result = ours(folder, one, backend)
        error, worst = compared(backend, result, expected)
        assert result.pixels.shape == (height, width, 4) and error <= LATENTS and worst <= PIXELS


EDITS = {
    "one picture": Asked("make it winter", None, [picture(300, 200, 1)], (96, 64), 3, 1.0),
    "two, of which one has alpha": Asked(
        "the hat of <image2> on <image1>",
        "blurry",
        [picture(120, 200, 2), picture(333, 111, 3, True)],
        (64, 96),
        3,
        3.0,
    ),
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.sample(0)
def test_references(tiny_qwen21: dict[str, Path], name: str) -> None:
    one, folder = EDITS[name], tiny_qwen21["qwen21"]
    expected = theirs(folder, one)
    for backend in BACKENDS:
        error, worst = compared(f"{backend} {name}", ours(folder, one, backend), expected)
        assert error <= LATENTS and worst <= PIXELS


@pytest.mark.sample(0)
def test_every_input_moves_the_picture(tiny_qwen21: dict[str, Path]) -> None:
    """The prompt, each picture, its alpha, and their order."""
    one, folder = EDITS["two, of which one has alpha"], tiny_qwen21["qwen21"]
    first, second = one.images
    opaque = np.concatenate((second[..., :3], np.full_like(second[..., :1], 255)), axis=2)
    before = ours(folder, one, "cpu").pixels.astype(float)
    for other in (
        one._replace(prompt="the hat of <image1> on <image2>"),
        one._replace(images=[first, opaque]),
        one._replace(images=[second, first]),
        one._replace(images=[first]),
    ):
        moved = np.abs(ours(folder, other, "cpu").pixels - before).max()
        print(f"{moved:.0f} levels")
        assert moved > 8


# Planted faults


def _half_a_token(patch: Patch) -> None:
    layout = qwen21_conditioning.layout

    def wrong(*given: Any) -> Any:
        made = layout(*given)
        context = made.context.astype(np.float64)
        for start, end, causal in made.runs:
            context[start:end, 1:] += 0 if causal else 0.5
        return made._replace(context=context)

    patch.set(qwen21_conditioning, "layout", wrong)


def _one_block(patch: Patch) -> None:
    """All tokens between the first and the last picture see each other."""
    layout = qwen21_conditioning.layout

    def wrong(*given: Any) -> Any:
        made = layout(*given)
        images = [run for run in made.runs if not run.causal]
        whole = TokenRun(images[0].start, images[-1].end, False)
        rest = [run for run in made.runs if run.end <= whole.start or run.start >= whole.end]
        return made._replace(runs=tuple(sorted([whole, *rest])))

    patch.set(qwen21_conditioning, "layout", wrong)


def _after_the_norm(patch: Patch) -> None:
    """States as transformers returns them. A norm without gain would not show: the transformer begins with one."""
    states = qwen3_vl_vision.Qwen3PictureEncoder.states
    gain = torch.linspace(0.5, 1.5, 60)
    patch.set(qwen3_vl_vision.Qwen3PictureEncoder, "states", lambda *given: gain * states(*given))


FAULTS: dict[str, Plant] = {
    "deepstack dropped": mutants_qwen21.deep_slots_dropped,
    "references off by half a token": _half_a_token,
    "time 0 ignored": mutants_qwen21.context_at_the_time_of_the_image,
    "pictures are one block": _one_block,
    "states after the norm": _after_the_norm,
    "no alpha": mutants_qwen21.reference_on_white,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.sample(1)
def test_planted_faults_are_caught(tiny_qwen21: dict[str, Path], monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    one, folder = EDITS["two, of which one has alpha"]._replace(steps=2), tiny_qwen21["qwen21"]
    expected = theirs(folder, one)
    FAULTS[fault](Patch(monkeypatch, Backend("cpu")))
    error, _ = compared(fault, ours(folder, one, "cpu"), expected)
    assert error > 30 * LATENTS


# Noise levels


def test_levels_of_the_published_model() -> None:
    """Golden numbers: 4 steps at three sizes, and Turbo's own at every size."""
    plain, turbo = (registry.published(catalog.KNOWN[name]) for name in ("qwen-image-2.1", "qwen-image-2.1-turbo"))
    assert plain is not None and turbo is not None
    golden = {
        (1024, 1024): (1, 0.766709, 0.455614, 0.02, 0),
        (2048, 2048): (1, 0.819420, 0.534826, 0.02, 0),
        (1536, 1024): (1, 0.777316, 0.470332, 0.02, 0),
    }
    for (width, height), levels in golden.items():
        made = flow_schedule(plain.checkpoint.scheduler, 4, width * height // 256)
        assert np.allclose(made, levels, atol=5e-7), (width, height)
        assert np.allclose(flow_schedule(turbo.checkpoint.scheduler, 8, width * height // 256), (*TURBO, 0), atol=5e-7)
    assert (plain.defaults().steps, turbo.defaults().steps) == (40, 8)


@pytest.mark.sample(0)
def test_turbo(tiny_qwen21: dict[str, Path]) -> None:
    """Its levels are its own, whatever the number of steps in diffusers; ours says so. Guidance has no effect."""
    folder = tiny_qwen21["qwen21-turbo"]
    one = Asked("a red circle", None, [], (64, 64), 8, 1.0)
    expected = theirs(folder, one)
    for backend in BACKENDS:
        error, worst = compared(f"{backend} turbo", ours(folder, one, backend), expected)
        assert error <= LATENTS and worst <= PIXELS
    pipe = qwenimg.load(folder, backend="cpu", precision="fp32")
    assert pipe.defaults.steps == 8
    with pytest.raises(UsageError, match="this model draws in 8 steps only"):
        pipe("a red circle", width=64, height=64, steps=4)
    result = pipe("a red circle", width=64, height=64, seed=7, guidance=3.0)
    assert any("guidance has no effect" in line for line in result.warnings)
    assert np.array_equal(result.latents, ours(folder, one, "cpu").latents)


AGAIN = "image was made with this seed at this size"


@pytest.mark.sample(0)
def test_an_edit_from_the_same_noise_is_warned_about(tiny_qwen21: dict[str, Path], tmp_path: Path) -> None:
    """By the noise in the recipe of the picture's file, or of a PIL image; the way out is another seed or size."""
    pipe = qwenimg.load(tiny_qwen21["qwen21"], backend="cpu", precision="fp32")
    size = {"width": 64, "height": 64, "steps": 2}
    file = pipe("a red circle", seed=7, **size).save(tmp_path / "a.png")

    def warned(image: Any, **asked: Any) -> bool:
        return any(AGAIN in line for line in pipe("make it blue", image=image, **(size | {"seed": 7} | asked)).warnings)

    with Image.open(file) as opened:
        assert warned(file) and warned([file, np.asarray(opened)]) and warned(opened)
        assert not warned(np.asarray(opened)), "nothing tells what it was made of"
    assert not warned(file, seed=8) and not warned(file, width=96)
    plain = tmp_path / "b.png"
    pipe("a red circle", seed=7, **size).save(plain, metadata=False)
    assert not warned(plain)
