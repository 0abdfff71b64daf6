"""What the references by diffusers' pipelines share: a pipeline that says nothing, the pixels of its latents, and how a
picture is compared with its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from support.relative import relative


def quiet() -> Any:
    """Return diffusers, which says nothing but errors from now on; nor does transformers."""
    import diffusers
    import transformers

    transformers.logging.set_verbosity_error()
    diffusers.utils.logging.set_verbosity_error()
    return diffusers


def opened(name: str, folder: Path, **options: Any) -> Any:
    pipe = getattr(quiet(), name).from_pretrained(folder, **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def decoded(pipe: Any, final: torch.Tensor) -> np.ndarray:
    """Pixels [H, W, 3] of final latents [1, C, h, w], by the VAE's scale and shift, as uint8 values in float64."""
    config = pipe.vae.config
    with torch.no_grad():
        z = final / config.scaling_factor + (config.shift_factor or 0)
        return pixels(pipe, pipe.vae.decode(z, return_dict=False)[0])


def pixels(pipe: Any, decoded: torch.Tensor) -> np.ndarray:
    """What the VAE makes, as uint8 values in float64."""
    image = pipe.image_processor.postprocess(decoded, output_type="np")[0]
    return (image * 255).round().astype(np.float64)


def check_picture(label: str, made: Any, expected: tuple[np.ndarray, np.ndarray], most: float, apart: int) -> None:
    """Check that a result's latents differ by at most `most` (relative L2), and its pixels by at most `apart`."""
    error, worst = relative(made.latents, expected[0]), np.abs(made.pixels - expected[1]).max()
    print(f"{label}: latents {error:.1e} (limit {most}), pixels {worst:.0f} (limit {apart})")
    assert error <= most and worst <= apart
