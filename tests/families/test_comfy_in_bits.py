"""ComfyUI's files in rotated 8 and 4 bits draw what a folder with their values draws, which are computed by the
published formulas in float64; and their weights stay in 8 bits, with LoRAs, streamed and converted."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file
from support.comfy_files import comfy
from support.family_cases import ASKED, BACKENDS, PROMPT, given_a_picture
from support.folder_tensors import tensors

import qwenimg
from qwenimg import Pipeline, Result

KINDS = ("qwen", "qwen-2511", "qwen21", "z-image", "flux2-klein", "flux-dev", "sd3")
PARTS = ("transformer", "text_encoder", "text_encoder_2")


def written(folder: Path, out: Path, layout: str) -> tuple[Path, Path]:
    """The model with two of three matrices of each part in this layout, and with the values that these have."""
    coded, plain = out / "coded", out / "plain"
    for copy in (coded, plain):
        shutil.copytree(folder, copy)
    for part in (part for part in PARTS if (folder / part).is_dir()):
        stem = "diffusion_pytorch_model" if part == "transformer" else "model"
        weights = {name: value.float() for name, value in tensors(folder / part).items()}
        made = comfy(weights, layout, lambda name: "embed" not in name and "shared" not in name)
        for copy, held in ((coded, made.tensors), (plain, made.values)):
            for path in (*(copy / part).glob("*.safetensors"), *(copy / part).glob("*.index.json")):
                path.unlink()
            save_file(held, copy / part / f"{stem}.safetensors", {"format": "pt"})
    return coded, plain


def drawn(folder: Path, backend: str, **options: Any) -> tuple[Result, Pipeline]:
    pipe = qwenimg.load(folder, backend=backend, **{"precision": "fp32"} | options)
    pipe = given_a_picture(pipe) if pipe.model.images[0] else pipe
    return pipe(PROMPT, **ASKED), pipe


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_picture_is_that_of_the_values(tiny: dict[str, Path], tmp_path: Path, kind: str, backend: str) -> None:
    coded, plain = written(tiny[kind], tmp_path, "convrot")
    (one, _), (other, _) = (drawn(folder, backend) for folder in (coded, plain))
    pixels = np.abs(one.pixels.astype(int) - other.pixels.astype(int)).max()
    most = np.abs(one.latents - other.latents).max() / np.abs(other.latents).max()
    print(f"{kind} on {backend}: pixels {pixels}, latents {most:.1e}")
    assert pixels <= 1
