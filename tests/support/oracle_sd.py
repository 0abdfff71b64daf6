"""diffusers' Stable Diffusion pipelines as the reference, their known defects worked around in this one place.

- `clip_skip` of SD 1.x and 2.x looks for an attribute that transformers 5 no longer has: it is given.
- PNDM starts image-to-image with the wrong entries of its list of times: other schedulers are used there.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image


@cache
def pipeline(folder: Path, class_name: str, dtype: torch.dtype = torch.float32) -> Any:
    import diffusers
    import transformers

    transformers.logging.set_verbosity_error()
    diffusers.utils.logging.set_verbosity_error()
    pipe = getattr(diffusers, class_name).from_pretrained(folder)
    pipe.to(dtype)
    pipe.set_progress_bar_config(disable=True)
    if getattr(pipe, "text_encoder", None) is not None and not hasattr(pipe.text_encoder, "text_model"):
        pipe.text_encoder.__dict__["text_model"] = pipe.text_encoder  # not as a part, which would be a circle
    return pipe


def generate(folder: Path, class_name: str, *, seed: int = 0, **asked: Any) -> tuple[np.ndarray, np.ndarray]:
    """diffusers' final latents [1, C, h, w] and pixels [H, W, 3] as uint8 values in float64. `image` and `mask_image`
    are uint8 arrays."""
    pipe = pipeline(folder, class_name)
    for name in ("image", "mask_image"):
        if isinstance(asked.get(name), np.ndarray):
            asked[name] = Image.fromarray(asked[name])
    generator = torch.Generator().manual_seed(seed)
    final = pipe(generator=generator, output_type="latent", **asked).images
    config = pipe.vae.config
    with torch.no_grad():
        z = final / config.scaling_factor + (config.shift_factor or 0)
        pixels = pipe.vae.decode(z, return_dict=False)[0]
    image = pipe.image_processor.postprocess(pixels, output_type="np")[0]
    return final.numpy(), (image * 255).round().astype(np.float64)
