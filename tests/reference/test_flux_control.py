"""FLUX.1 Canny and Depth, and the LoRAs that make dev see a control picture, from a picture to pixels: both backends
against diffusers on tiny models that it wrote, and one step in float64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from support import flux_loras, oracle_flux, peer
from support.tiny_flux import write_tiny_flux

import qwenimg
from qwenimg.common.numbers import packing
from qwenimg.common.pipeline.result import Result

BACKENDS = ("cpu", "mlx")
LATENTS = 1e-5  # relative L2 of the final latents; measured at most 2e-6
PIXELS = 2  # of 255: a value on a rounding edge may go either way
RNG = np.random.default_rng(5)
EDGES = RNG.integers(0, 256, (61, 90, 3), np.uint8)
PICTURE = RNG.integers(0, 256, (64, 80, 3), np.uint8)
HOLE = np.zeros((64, 80), np.uint8)
HOLE[16:48, 32:] = 255  # edges between latents
Loras = Sequence[tuple[Path, float]]
CASES: dict[str, dict[str, Any]] = {
    "control": {"prompt": "a red circle", "width": 80, "height": 64, "steps": 3, "guidance": 30.0},
    "control-image": {"prompt": "a dog", "width": 80, "height": 64, "steps": 4, "guidance": 10.0, "strength": 0.6},
    "control-mask": {"prompt": "a ring", "width": 80, "height": 64, "steps": 4, "guidance": 10.0, "strength": 1.0},
}


@pytest.fixture(scope="module")
def canny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flux") / "flux-canny"
    write_tiny_flux(folder, "canny")
    return folder


def with_pictures(task: str) -> dict[str, Any]:
    pictures = {"control": {}, "control-image": {"image": PICTURE}, "control-mask": {"image": PICTURE, "mask": HOLE}}
    return CASES[task] | pictures[task]


def ours(folder: Path, backend: str, asked: dict[str, Any], **more: Any) -> Result:
    with qwenimg.load(folder, backend=backend, precision="fp32", **more) as pipe:
        return pipe(**({"control": ("", EDGES)} | asked), seed=7)


def theirs(folder: Path, task: str, loras: Loras = ()) -> tuple[np.ndarray, np.ndarray]:
    """diffusers' picture, with LoRAs at their strengths. Its inpainting first draws a sample of the masked picture,
    which this transformer does not see: it is left out, so that both draw the same."""
    asked = CASES[task]
    renamed = {"steps": "num_inference_steps", "guidance": "guidance_scale"}
    given = {renamed.get(name, name): value for name, value in asked.items()}
    given["control_image"] = Image.fromarray(EDGES)
    if task != "control":
        given["image"] = Image.fromarray(PICTURE)
    if task == "control-mask":
        inside = np.repeat((HOLE[::8, ::8] >= 128)[None, None].astype(np.float32), 16, axis=1)
        mask = torch.from_numpy(packing.pack(inside))
        oracle_flux.pipeline(folder, task).prepare_mask_latents = lambda *some: (mask, None)
        given["mask_image"] = Image.fromarray(HOLE)
    if not loras:
        return oracle_flux.generate(folder, task, seed=7, length=512, **given)  # type: ignore[no-any-return]
    pipe = oracle_flux.made(folder, task)  # of its own: it does not take all of a LoRA away again
    for i, (file, _) in enumerate(loras):
        pipe.load_lora_weights(str(file), adapter_name=f"lora{i}")
    pipe.set_adapters([f"lora{i}" for i in range(len(loras))], [strength for _, strength in loras])
    return oracle_flux.generated(pipe, seed=7, length=512, **given)  # type: ignore[no-any-return]


@pytest.mark.parametrize("task", CASES)
@pytest.mark.sample(1)
def test_canny_equals_diffusers(canny: Path, task: str) -> None:
    expected = theirs(canny, task)
    assert expected[1].std() > 10, "a constant picture would prove nothing"
    for backend in BACKENDS:
        made = ours(canny, backend, with_pictures(task))
        peer.check_picture(f"{backend} {task}", made, expected, LATENTS, PIXELS)
        assert made.recipe["control"] == "a picture:1"


# LoRAs


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("loras")
    save_file(flux_loras.control_lora(pooled_projection_dim=60), place / "canny-lora.safetensors")
    save_file(flux_loras.style_lora(), place / "style.safetensors")
    return {name: place / f"{name}.safetensors" for name in ("canny-lora", "style")}


LORA_CASES: dict[str, tuple[str, float, float]] = {  # the task, the strength, and that of a second LoRA
    "alone": ("control", 1.0, 0.0),
    "weaker": ("control", 0.7, 0.0),
    "with a second one": ("control", 0.85, 0.8),
    "from a picture": ("control-image", 1.0, 0.0),
}


def with_lora(loras: dict[str, Path], case: str, *, fuse: bool = True) -> dict[str, Any]:
    task, strength, second = LORA_CASES[case]
    style = {"lora": f"{loras['style']}:{second}"} if second else {}
    mode = {} if fuse else {"lora_mode": "side"}
    return with_pictures(task) | {"control": (loras["canny-lora"], EDGES, strength)} | style | mode


@pytest.mark.parametrize("case", LORA_CASES)
@pytest.mark.sample(1)
def test_a_lora_equals_diffusers(tiny_flux: dict[str, Path], loras: dict[str, Path], case: str) -> None:
    task, strength, second = LORA_CASES[case]
    files = [(loras["canny-lora"], strength), *([(loras["style"], second)] if second else [])]
    expected = theirs(tiny_flux["dev"], task, files)
    assert expected[1].std() > 10, "a constant picture would prove nothing"
    for backend in BACKENDS:
        for fuse in (True, False) if case == "with a second one" else (True,):
            made = ours(tiny_flux["dev"], backend, with_lora(loras, case, fuse=fuse))
            peer.check_picture(f"{backend} {case}", made, expected, LATENTS, PIXELS)
        assert made.recipe["control"] == f"canny-lora.safetensors=a picture:{strength:g}"
