"""Stable Diffusion under ControlNets, from a prompt and pictures to pixels, on both backends, against diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import oracle_sd
from support.relative import relative
from support.tiny_controlnet import write_authors_file, write_controlnet
from support.tiny_sd import _SMALL, UNETS

import qwenimg
from qwenimg.common.base.errors import UsageError

BACKENDS = ("cpu", "mlx")
LATENTS = 1e-4  # relative L2 after all steps, float32
PIXELS = 2  # of 255: a value on a rounding edge may go either way
MOVES = 8  # levels of 255 by which a control must move some pixel: a fault in it would show

RNG = np.random.default_rng(5)
WIDE, HIGH, START = (RNG.integers(0, 256, (h, w, 3), np.uint8) for h, w in ((30, 50), (70, 40), (72, 88)))
MASK = np.zeros((72, 88), np.uint8)
MASK[16:56, 24:60] = 255
SIZE = {"width": 88, "height": 72}
PROMPT, NEGATIVE = "a photo of a red circle, a small dog", "a blue square"
XL = {"sd15": "", "sd21": "", "sdxl": "XL"}
CASES: dict[str, dict[str, Any]] = {
    "one": {"pictures": [WIDE], "scales": [0.8]},
    "one-without-guidance": {"pictures": [HIGH], "scales": [1.0], "guidance": 1.0},
    "one-in-the-middle": {"pictures": [WIDE], "windows": [(0.3, 0.7)], "scales": [1.3], "steps": 5},
    "two": {"pictures": [WIDE, HIGH], "windows": [(0, 0.5), (0.3, 1)], "scales": [0.5, 1]},
    "control-leads": {"pictures": [WIDE], "scales": [1.0], "mode": "control"},
}  # fmt: skip
SEED = 7


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Two ControlNets of each kind."""
    folder = tmp_path_factory.mktemp("nets")
    return {
        kind: [write_controlnet(folder / f"{kind}-{seed}", UNETS[kind] | _SMALL, seed) for seed in (11, 12)]
        for kind in XL
    }


def whole(case: dict[str, Any]) -> dict[str, Any]:
    return {"windows": [(0.0, 1.0)] * len(case["pictures"]), "steps": 3, "guidance": 5.0, "mode": "balanced"} | case


def one_or_all(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def theirs(folder: Path, kind: str, nets: list[Path], case: dict[str, Any], ending: str = "", **more: Any) -> Any:
    full = whole(case)
    count = len(full["pictures"])
    pictures = {"control_image" if ending else "image": one_or_all(full["pictures"])}
    return oracle_sd.controlled(
        folder, f"StableDiffusion{XL[kind]}ControlNet{ending}Pipeline", nets[:count], seed=SEED, prompt=PROMPT,
        negative_prompt=NEGATIVE if full["guidance"] > 1 else None, num_inference_steps=full["steps"],
        guidance_scale=full["guidance"], guess_mode=full["mode"] == "control",
        controlnet_conditioning_scale=one_or_all([float(scale) for scale in full["scales"]]),
        control_guidance_start=one_or_all([start for start, _ in full["windows"]]),
        control_guidance_end=one_or_all([end for _, end in full["windows"]]), **SIZE, **pictures, **more,
    )  # fmt: skip


def ours(pipe: qwenimg.Pipeline, nets: list[Path], case: dict[str, Any], **more: Any) -> qwenimg.Result:
    full = whole(case)
    each = zip(nets, full["pictures"], full["scales"], full["windows"], strict=False)
    asked = {name: full[name] for name in ("steps", "guidance")}
    return pipe(
        PROMPT, control=[*each], control_mode=full["mode"], seed=SEED, negative_prompt=NEGATIVE, **SIZE, **asked, **more
    )  # fmt: skip


def compare(name: str, made: qwenimg.Result, expected: Any) -> None:
    latents, pixels = expected
    assert pixels.std() > 10, "a constant picture would prove nothing"
    error, worst = relative(made.latents, latents), np.abs(made.pixels.astype(float) - pixels).max()
    print(f"{name}: latents {error:.1e} ({LATENTS}), pixels {worst:.0f} ({PIXELS})")
    assert error <= LATENTS and worst <= PIXELS


# PNDM evaluates its first step twice, which diffusers counts as two steps of a window
WINDOWS = {("sd15", name) for name in CASES if "windows" in CASES[name]}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in XL for name in CASES if (kind, name) not in WINDOWS]
)
@pytest.mark.sample(1)
def test_equals_diffusers(folders, nets, kind: str, name: str) -> None:
    expected = theirs(folders[kind], kind, nets[kind], CASES[name])
    for backend in BACKENDS:
        with qwenimg.load(folders[kind], backend=backend, precision="fp32") as pipe:
            made = ours(pipe, nets[kind], CASES[name])
            compare(f"{kind}, {name}, {backend}", made, expected)
            asked = {key: whole(CASES[name])[key] for key in ("steps", "guidance")}
            plain = pipe(PROMPT, seed=SEED, negative_prompt=NEGATIVE, **SIZE, **asked)
            assert np.abs(made.pixels.astype(int) - plain.pixels).max() >= MOVES


def strongly(pipe: qwenimg.Pipeline, made: qwenimg.Result, **asked: Any) -> None:
    """Check that the control moves the picture."""
    plain = pipe(PROMPT, seed=SEED, negative_prompt=NEGATIVE, **SIZE, **asked)
    assert np.abs(made.pixels.astype(int) - plain.pixels).max() >= MOVES


@pytest.mark.parametrize("kind", ["sd21", "sdxl"])
@pytest.mark.sample(0)
def test_with_a_picture_to_start_from(folders, nets, kind: str) -> None:
    case = {"pictures": [WIDE], "scales": [0.7], "steps": 4}
    expected = theirs(folders[kind], kind, nets[kind], case, "Img2Img", image=START, strength=0.6)
    for backend in BACKENDS:
        with qwenimg.load(folders[kind], backend=backend, precision="fp32") as pipe:
            made = ours(pipe, nets[kind], case, image=START, strength=0.6)
            compare(f"{kind}, {backend}", made, expected)
            strongly(pipe, made, image=START, strength=0.6, steps=4, guidance=5.0)


@pytest.mark.sample(0)
def test_one_that_paints_within_a_mask(folders, tmp_path: Path) -> None:
    """Its pixels within the mask are -1; nothing but its name says that it is one."""
    net = write_controlnet(tmp_path / "control_v11p_sd15_inpaint", UNETS["sd21"] | _SMALL)
    case = {"pictures": [START], "scales": [1.0], "steps": 4}
    hole = np.where(MASK[..., None] > 127, np.float32(-1), START.astype(np.float32) / 255)
    seen = torch.from_numpy(hole.transpose(2, 0, 1)[None])
    expected = theirs(
        folders["sd21"], "sd21", [net], case | {"pictures": [seen]}, "Inpaint", image=START, mask_image=MASK,
        strength=0.8,
    )  # fmt: skip
    for backend in BACKENDS:
        with qwenimg.load(folders["sd21"], backend=backend, precision="fp32") as pipe:
            compare(backend, ours(pipe, [net], case, image=START, mask=MASK, strength=0.8), expected)
            with pytest.raises(UsageError, match="paints within a mask: give it with --mask"):
                ours(pipe, [net], case)


@pytest.mark.parametrize("prefix", ["control_model.", ""])
@pytest.mark.parametrize("kind", XL)
@pytest.mark.sample(0)
def test_a_file_with_its_authors_names_draws_what_the_folder_draws(
    folders, nets, tmp_path: Path, kind: str, prefix: str
) -> None:
    file = write_authors_file(tmp_path / "control.safetensors", UNETS[kind] | _SMALL, 11, prefix)
    with qwenimg.load(folders[kind], backend="cpu", precision="fp32") as pipe:
        made, expected = (ours(pipe, [net], CASES["one"]) for net in (file, nets[kind][0]))
    assert (made.pixels == expected.pixels).all() and (made.latents == expected.latents).all()


@pytest.mark.sample(0)
def test_before_a_refiner(folders, nets) -> None:
    """SDXL's base under a ControlNet up to 0.6, its refiner, which is not controlled, from there on."""
    asked = {"prompt": PROMPT, "negative_prompt": NEGATIVE, "num_inference_steps": 10, "guidance_scale": 4.0}
    half, _ = oracle_sd.controlled(
        folders["sdxl"], "StableDiffusionXLControlNetPipeline", nets["sdxl"][:1], seed=SEED, image=WIDE,
        controlnet_conditioning_scale=0.8, denoising_end=0.6, **SIZE, **asked,
    )  # fmt: skip
    expected = oracle_sd.generate(
        folders["refiner"],
        "StableDiffusionXLImg2ImgPipeline",
        image=torch.from_numpy(half),
        denoising_start=0.6,
        **asked,
    )
    settings = {"negative_prompt": NEGATIVE, "steps": 10, "guidance": 4.0, "seed": SEED, "refine_at": 0.6, **SIZE}
    for backend in BACKENDS:
        refiner = folders["refiner"]
        with qwenimg.load(folders["sdxl"], backend=backend, precision="fp32", refiner=refiner) as pipe:
            made = pipe(PROMPT, control=(nets["sdxl"][0], WIDE, 0.8), **settings)
            compare(f"sdxl + refiner under a ControlNet, {backend}", made, expected)
            strongly(pipe, made, steps=10, guidance=4.0, refine_at=0.6)
