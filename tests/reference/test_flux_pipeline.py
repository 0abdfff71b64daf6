"""Flux.1 from a prompt to pixels, on both backends, against diffusers on folders that diffusers wrote."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support import oracle_flux, peer

import qwenimg
from qwenimg.common.families.flux.model import LENGTHS, Flux
from qwenimg.common.parts import known_configs
from qwenimg.common.parts.texts.padded_texts import T5Texts
from qwenimg.common.sampling.flow_match import flow_schedule

BACKENDS = ("cpu", "mlx")

LATENTS = 1e-5  # relative L2 of the final latents; measured at most 2e-6
PIXELS = 2  # of 255: a value on a rounding edge may go either way

LONG = "a blue square with three yellow stars over a small red house, " * 40
CASES: list[tuple[str, dict[str, Any]]] = [
    ("dev", {"prompt": "a red circle", "width": 80, "height": 48, "steps": 5}),
    ("dev", {"prompt": LONG, "width": 48, "height": 112, "steps": 2, "guidance": 1.0}),
    ("dev", {"prompt": "a star; 背景", "negative_prompt": "blurry, low", "true_cfg": 2.5, "width": 64, "height": 80,
             "steps": 3, "guidance": 6.5}),
    ("dev", {"prompt": "a star", "negative_prompt": "", "true_cfg": 4.0, "width": 48, "height": 48, "steps": 2}),
    ("dev", {"prompt": "x", "width": 64, "height": 64, "steps": 1}),
    ("schnell", {"prompt": "a red circle", "width": 80, "height": 48, "steps": 4}),
    ("schnell", {"prompt": LONG, "negative_prompt": "a dog", "true_cfg": 3.0, "width": 48, "height": 64, "steps": 3}),
    ("undistilled", {"prompt": LONG, "negative_prompt": "a dog", "true_cfg": 3.0, "width": 64, "height": 48,
                     "steps": 3}),
]  # fmt: skip
PICTURE = np.random.default_rng(3).integers(0, 256, (48, 80, 3), np.uint8)
HOLE = np.zeros((48, 80), np.uint8)
HOLE[:, 32:] = 255
FROM_PICTURES: list[tuple[str, str, dict[str, Any]]] = [
    ("dev", "image", {"prompt": "a red circle", "steps": 5, "strength": 0.6}),
    ("schnell", "image", {"prompt": "a ring", "steps": 4, "strength": 0.9, "negative_prompt": "x", "true_cfg": 2.0}),
    ("dev", "mask", {"prompt": "a red circle", "steps": 5, "strength": 0.8, "guidance": 2.0}),
    ("schnell", "mask", {"prompt": "a ring", "steps": 3, "strength": 1.0}),
]


def theirs(folder: Path, variant: str, task: str, asked: dict[str, Any]) -> Any:
    renamed = {"steps": "num_inference_steps", "guidance": "guidance_scale", "true_cfg": "true_cfg_scale"}
    options = {renamed.get(name, name): value for name, value in asked.items()}
    if task != "text":
        options |= {"image": Image.fromarray(PICTURE), "width": 80, "height": 48}
    if task == "mask":
        options["mask_image"] = Image.fromarray(HOLE)
    if variant == "dev":
        options.setdefault("guidance_scale", 3.5)
    return oracle_flux.generate(folder, task, seed=7, length=256 if variant == "schnell" else 512, **options)


def compare(folder: Path, variant: str, task: str, asked: dict[str, Any]) -> None:
    latents, pixels = theirs(folder, variant, task, asked)
    assert pixels.std() > 10, "a constant picture would prove nothing"
    pictures = {"text": {}, "image": {"image": PICTURE}, "mask": {"image": PICTURE, "mask": HOLE}}[task]
    for backend in BACKENDS:
        ours = qwenimg.load(folder, backend=backend, precision="fp32")(**asked, **pictures, seed=7)
        peer.check_picture(f"{backend} {variant} {task}", ours, (latents, pixels), LATENTS, PIXELS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]['width']}x{case[1]['height']}")
@pytest.mark.sample(1)
def test_equals_diffusers(tiny_flux: dict[str, Path], case: tuple[str, dict[str, Any]]) -> None:
    variant, asked = case
    compare(tiny_flux[variant], variant, "text", asked)


@pytest.mark.parametrize("case", FROM_PICTURES, ids=lambda case: f"{case[0]}-{case[1]}")
@pytest.mark.sample(0)
def test_from_a_picture_equals_diffusers(tiny_flux: dict[str, Path], case: tuple[str, str, dict[str, Any]]) -> None:
    variant, task, asked = case
    compare(tiny_flux[variant], variant, task, asked)


# The schedule, by numbers

SIGMAS = [  # variant, pixels, levels of four steps
    ("dev", 1024, (1, 0.904531, 0.759511, 0.512844, 0)),
    ("dev", 512, (1, 0.849235, 0.652489, 0.384945, 0)),
    ("dev", 2048, (1, 0.986986, 0.961948, 0.893917, 0)),
    ("schnell", 1024, (1, 0.75, 0.5, 0.25, 0)),
    ("schnell", 256, (1, 0.75, 0.5, 0.25, 0)),
]


@pytest.mark.parametrize(("variant", "side", "levels"), SIGMAS)
def test_golden_levels(variant: str, side: int, levels: tuple[float, ...]) -> None:
    config = known_configs.scheduler(f"flux-{variant}")
    sigmas = flow_schedule(config, 4, (side // 16) ** 2)
    assert np.abs(np.subtract(sigmas, levels)).max() <= 1e-6


# Options


def test_defaults(tiny_flux: dict[str, Path]) -> None:
    for variant, expected in (("dev", (28, 3.5, "")), ("schnell", (4, 0.0, "")), ("undistilled", (28, 0.0, ""))):
        pipe = qwenimg.load(tiny_flux[variant], backend="cpu", precision="fp32")
        defaults = pipe.defaults
        assert (defaults.steps, defaults.guidance, defaults.negative_prompt) == expected
        assert pipe.check("x").true_cfg == 1.0


def warned(pipe: qwenimg.Pipeline, **asked: Any) -> list[str]:
    return list(pipe("a red circle", width=48, height=48, steps=1, seed=1, **asked).warnings)


@pytest.mark.sample(0)
def test_options_without_effect_are_told(tiny_flux: dict[str, Path]) -> None:
    dev, schnell = (qwenimg.load(tiny_flux[name], backend="cpu", precision="fp32") for name in ("dev", "schnell"))
    assert warned(dev) == warned(schnell) == warned(dev, guidance=5.0) == []
    assert warned(dev, negative_prompt="x", true_cfg=2.0) == []
    [line] = warned(dev, negative_prompt="x")
    assert line == "the negative prompt has no effect at true-cfg 1"
    [line] = warned(schnell, guidance=3.5)
    assert "guidance has no effect" in line and "true-cfg" in line


def test_a_cut_prompt_is_told(tiny_flux: dict[str, Path]) -> None:
    dev = qwenimg.load(tiny_flux["dev"], backend="cpu", precision="fp32")
    request = dev.check(LONG, negative_prompt=LONG, true_cfg=2.0, width=48, height=48)
    lines = dev.model.warnings(request)
    assert [line.partition(" is cut: the model sees its first 511 tokens")[0] for line in lines] == [
        "the prompt", "the negative prompt",
    ]  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_rounded_timesteps_round_the_guidance_too(tiny_flux: dict[str, Path], backend: str) -> None:
    """In bfloat16 diffusers sees a guidance of 3.504: 3.5 and 3.504 are one, exactly; not so with exact numbers."""
    asked: dict[str, Any] = {"width": 48, "height": 48, "steps": 1, "seed": 1}
    rounded = qwenimg.load(tiny_flux["dev"], backend=backend, precision="bf16,timestep=rounded")
    one, other, third = (rounded("a ring", **asked, guidance=g).latents for g in (3.5, 3.504, 3.55))
    assert np.array_equal(one, other) and not np.array_equal(one, third)
    exact = qwenimg.load(tiny_flux["dev"], backend=backend, precision="bf16")
    one, other = (exact("a ring", **asked, guidance=g).latents for g in (3.5, 3.504))
    assert not np.array_equal(one, other)


# The modulation, which depends on prompts and guidance


@pytest.mark.sample(0)
def test_the_modulation_is_kept_for_its_own_run_alone(tiny_flux: dict[str, Path]) -> None:
    pipe = qwenimg.load(tiny_flux["dev"], backend="cpu", precision="fp32")
    asked: dict[str, Any] = {"width": 48, "height": 48, "steps": 2, "seed": 1}
    runs: list[dict[str, Any]] = [
        {"prompt": "a ring"},
        {"prompt": "a star"},
        {"prompt": "a ring", "guidance": 5.0},
        {"prompt": "a ring", "true_cfg": 2.0, "negative_prompt": "x"},
        {"prompt": "a ring", "true_cfg": 2.0, "negative_prompt": "y"},
        {"prompt": "a ring", "steps": 3},
    ]
    alone = [qwenimg.load(tiny_flux["dev"], "cpu", "fp32")(**(asked | run)).latents for run in runs]
    for run, expected in zip([*runs, *runs[:2]], [*alone, *alone[:2]], strict=True):
        assert np.array_equal(pipe(**(asked | run)).latents, expected), run
    again = pipe(**(asked | runs[1]))
    assert "modulate" not in again.timing, "it was computed again for a run like the last"


# Faults


def without_the_guidance_of_the_negative_branch(patch: pytest.MonkeyPatch) -> None:
    def formula(engine: Any, request: Any, predictions: Any) -> Any:
        return predictions[0] + request.true_cfg * (predictions[0] - predictions[1])

    patch.setattr(Flux, "guidance", replace(Flux.guidance, formula=formula))


def text_cut_at_256(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(LENGTHS, False, 256)


def pads_left_out(patch: pytest.MonkeyPatch) -> None:
    fill = T5Texts.fill

    def without(self: Any, prompt: str) -> Any:
        full = fill(self, prompt)
        return replace(full, ids=full.ids[: full.ids.index(1) + 1])

    patch.setattr(T5Texts, "fill", without)


def rows_of_the_first_branch(patch: pytest.MonkeyPatch) -> None:
    modulation = Flux._modulation

    def of_one(self: Any, request: Any, plan: Any, transformer: Any, prompts: Any) -> Any:
        return modulation(self, request, plan, transformer, [prompts[0]] * len(prompts))

    patch.setattr(Flux, "_modulation", of_one)


@pytest.mark.parametrize(
    "fault",
    [without_the_guidance_of_the_negative_branch, text_cut_at_256, pads_left_out, rows_of_the_first_branch],
    ids=lambda fault: fault.__name__,
)
@pytest.mark.sample(0)
def test_faults_are_seen(tiny_flux: dict[str, Path], monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        compare(tiny_flux["dev"], "dev", "text", CASES[2][1])
