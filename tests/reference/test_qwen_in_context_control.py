"""Control of Qwen-Image by a LoRA, whose picture the transformer sees beside the image: against diffusers' classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import oracle_control
from support.relative import relative
from support.tiny_control import write_control_lora, write_controlnet
from support.tiny_model import tiny_dit

import qwenimg
from qwenimg import Pipeline
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.families.qwen_image.control import ControlNetworks
from qwenimg.common.numbers import rope
from qwenimg.common.pipeline import control_pictures
from qwenimg.common.pipeline.controls import Controls

BACKENDS = ("cpu", "mlx")
LATENTS = 1e-4  # relative L2 of the final latents; measured 5e-6
PIXELS = 2  # of 255
START = "Context_Control. "
SEED, NEGATIVE = 7, "blue things that nobody wants, everywhere"
RNG = np.random.default_rng(5)
WIDE, HIGH = (RNG.integers(0, 256, (h, w, 3), np.uint8) for h, w in ((30, 50), (70, 40)))
CASES: dict[str, dict[str, Any]] = {
    "guided": {"picture": WIDE, "size": (80, 48)},
    "weaker": {"picture": HIGH, "size": (48, 112), "scale": 0.6, "guidance": 1.0},
}


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_control_lora(tmp_path_factory.mktemp("lora") / "model.safetensors", tiny_dit())


@pytest.fixture(scope="module")
def opened(tiny_folder: Path) -> dict[str, Pipeline]:
    return {name: qwenimg.load(tiny_folder, backend=name, precision="fp32") for name in BACKENDS}


def ours(
    pipe: Pipeline,
    lora: Path,
    case: dict[str, Any],
    prompt: str = "a red circle",
    *,
    beside: Sequence[Any] = (),
    loras: str = "",
) -> Any:
    """The picture of a case; beside: other controls; loras: those of --lora."""
    width, height = case["size"]
    controls = [(lora, case["picture"], case.get("scale", 1.0)), *beside]
    asked = {"steps": 3, "guidance": case.get("guidance", 4.0), "negative_prompt": NEGATIVE, "seed": SEED}
    return pipe(prompt, control=controls, lora=loras, width=width, height=height, **asked)


def theirs(folder: Path, lora: Path, case: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    return oracle_control.in_context(folder, lora, f"{START}a red circle", seed=SEED, negative_prompt=NEGATIVE, **case)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(1)
def test_equals_diffusers_classes(tiny_folder: Path, lora: Path, opened: dict[str, Pipeline], name: str) -> None:
    latents, pixels = theirs(tiny_folder, lora, CASES[name])
    assert pixels.std() > 10, "a constant picture would prove nothing"
    for backend, pipe in opened.items():
        result = ours(pipe, lora, CASES[name])
        error, worst = relative(result.latents, latents), np.abs(result.pixels - pixels).max()
        print(f"{backend} {name}: latents {error:.1e} ({LATENTS}), pixels {worst:.0f} ({PIXELS})")
        assert error <= LATENTS and worst <= PIXELS
        assert result.recipe["prompt"] == f"{START}a red circle"


def test_the_start_of_the_prompt_is_said_once(lora: Path, opened: dict[str, Pipeline]) -> None:
    short, long = (ours(opened["cpu"], lora, CASES["guided"], text) for text in ("a circle", f"{START}a circle"))
    assert np.array_equal(short.latents, long.latents) and short.recipe["prompt"] == long.recipe["prompt"]


def test_it_leaves_nothing_behind(lora: Path, opened: dict[str, Pipeline]) -> None:
    pipe, plain = opened["cpu"], {"steps": 2, "seed": SEED, "width": 80, "height": 48}
    before = pipe("a circle", **plain)
    controlled = pipe("a circle", control=(lora, WIDE), **plain)
    off = pipe("a circle", control=(lora, WIDE, 0.0), **plain)
    assert np.array_equal(before.latents, off.latents) and any("has no effect" in line for line in off.warnings)
    assert not np.array_equal(before.latents, controlled.latents)
    assert controlled.recipe["control"] == "model.safetensors=a picture:1" and "lora" not in controlled.recipe
    assert np.array_equal(before.latents, pipe("a circle", **plain).latents)


@pytest.mark.sample(0)
def test_beside_a_network_and_another_lora(
    tmp_path: Path, tiny_folder: Path, lora: Path, opened: dict[str, Pipeline]
) -> None:
    """Each of them moves the picture, on both backends alike."""
    net, case = write_controlnet(tmp_path / "net"), CASES["guided"]
    style = write_control_lora(tmp_path / "style.safetensors", tiny_dit(), 99)
    results = {
        name: ours(pipe, lora, case, beside=[(net, HIGH)], loras=f"{style}:0.5") for name, pipe in opened.items()
    }
    error = relative(results["mlx"].latents, results["cpu"].latents)
    print(f"both backends: {error:.1e}")
    assert error <= LATENTS
    for less in ({"loras": f"{style}:0.5"}, {"beside": [(net, HIGH)]}, {}):
        moved = np.abs(ours(opened["cpu"], lora, case, **less).pixels.astype(int) - results["cpu"].pixels).max()
        print(f"with {sorted(less)} alone: {moved} of 255")
        assert moved > 8


def test_refused_in_one_line(tmp_path: Path, lora: Path, opened: dict[str, Pipeline]) -> None:
    pipe = opened["cpu"]
    for control, said in (
        ([(lora, WIDE), (lora, HIGH)], "sees the pictures of 2 controls .*; one is taken"),
        ([(lora, WIDE, 1.0, (0.0, 0.5))], "holds for all steps: leave out START-END"),
    ):
        with pytest.raises(UsageError, match=said):
            pipe.check("x", control=control)
    wide = write_control_lora(tmp_path / "wide.safetensors", tiny_dit(num_attention_heads=4))
    with pytest.raises(ModelError, match="not a LoRA for this model"):
        pipe.check("x", control=(wide, WIDE))


def test_the_plan_counts_the_tokens(lora: Path, opened: dict[str, Pipeline]) -> None:
    pipe, asked = opened["cpu"], {"width": 160, "height": 160, "steps": 2}
    plain = pipe.estimate("a circle", **asked).memory
    memory = pipe.estimate("a circle", control=(lora, WIDE), **asked).memory
    print(f"planned: {plain:,} and with the picture {memory:,} bytes")
    assert memory > plain


# Planted faults


def _at_the_image(patch: pytest.MonkeyPatch) -> None:
    """The picture has the frame of the image."""
    positions = rope.image_positions
    patch.setattr(rope, "image_positions", lambda shapes, layered: positions(shapes, layered) * [0, 1, 1])


def _lora_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Controls, "loras", lambda self, request: ((), "auto"))


def _picture_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ControlNetworks, "seen", lambda self, request: [])


def _start_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Controls, "prompt", lambda self, text, control: text)


def _a_sample(patch: pytest.MonkeyPatch) -> None:
    from qwenimg.common.parts.control_net import ControlLora

    patch.setattr(ControlLora, "samples", property(lambda _: True, lambda *_: None))


def _as_it_is(patch: pytest.MonkeyPatch) -> None:
    """The picture is 0..1 and not -1..1."""
    made = control_pictures.pixels.from_uint8
    patch.setattr(control_pictures.pixels, "from_uint8", lambda picture: made(picture) / 2 + 0.5)


FAULTS = {
    "frame of the image": _at_the_image,
    "LoRA ignored": _lora_ignored,
    "picture ignored": _picture_ignored,
    "start of the prompt ignored": _start_ignored,
    "a sample in place of the mean": _a_sample,
    "picture in 0..1": _as_it_is,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.sample(0)
def test_planted_faults_are_caught(tiny_folder: Path, lora: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    latents, _ = theirs(tiny_folder, lora, CASES["guided"])
    FAULTS[fault](monkeypatch)
    with qwenimg.load(tiny_folder, backend="cpu", precision="fp32") as pipe:
        error = relative(ours(pipe, lora, CASES["guided"]).latents, latents)
    print(f"{fault}: {error:.1e} (limit {LATENTS})")
    assert error > 10 * LATENTS
