"""What tests of several rooms share of `test_metadata`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from qwenimg.common.pictures.png import encode_png
from qwenimg.common.pictures.texts import read_texts
from qwenimg.common.request.recipe import XMP, Recipe, recipe_from_texts

PIXELS = np.random.default_rng(0).integers(0, 256, (3, 5, 3), dtype=np.uint8)
RECIPE: Recipe = {
    "format": 1,
    "version": "0.1.0",
    "model": "Qwen/Qwen-Image",
    "backend": "torch",
    "device": "CPU (torch, 2 threads)",
    "precision": {"text": "bfloat16", "transformer": "bfloat16", "vae": "float32", "residual": "float32"},
    "versions": {"python": "3.11.9", "numpy": "2.4.6", "torch": "2.13.0"},
    "rng": "torch-cpu",
    "prompt": "a red circle",
    "negative_prompt": " ",
    "seed": 1,
    "width": 1328,
    "height": 1336,
    "steps": 20,
    "guidance": 4.0,
    "sampler": "euler",
    "schedule": "model",
    "sigmas_sha256": "0a" * 32,
    "noise_sha256": "b1" * 32,
    "tf32": False,
    "warnings": [],
}


def recipe(**changes: Any) -> Recipe:
    return {**RECIPE, **changes}  # type: ignore[typeddict-item]


def saved(path: Path, text: dict[str, str]) -> Path:
    path.write_bytes(encode_png(PIXELS, text, XMP))
    return path


def recipe_from_png(path: Path) -> Recipe:
    """Return the recipe in the PNG, JPEG or WebP at `path`."""
    return recipe_from_texts(read_texts(path), path)
