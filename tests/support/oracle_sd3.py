"""diffusers' Stable Diffusion 3 pipelines as the reference for the whole way, one prompt and one image at a time.

The inpainting pipeline forgets the shift of the latents when it decodes: pixels are decoded here.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image


@cache
def pipeline(folder: Path, task: str) -> Any:
    import diffusers
    import transformers

    transformers.logging.set_verbosity_error()
    diffusers.utils.logging.set_verbosity_error()
    names = ("text_encoder_3", "tokenizer_3", "image_encoder", "feature_extractor")
    absent = {name: None for name in names if not (folder / name).exists()}
    pipe = getattr(diffusers, f"StableDiffusion3{task}Pipeline").from_pretrained(folder, **absent)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(folder: Path, prompt: str, *, seed: int = 0, **asked: Any) -> tuple[np.ndarray, np.ndarray]:
    """diffusers' final latents [1, C, h, w] and pixels [H, W, 3] as uint8 values in float64. `image` and `mask_image`
    are uint8 arrays."""
    pipe = pipeline(folder, "Inpaint" if "mask_image" in asked else "Img2Img" if "image" in asked else "")
    for name in ("image", "mask_image"):
        if name in asked:
            asked[name] = Image.fromarray(asked[name])
    final = pipe(prompt, generator=torch.Generator().manual_seed(seed), output_type="latent", **asked).images
    config = pipe.vae.config
    with torch.no_grad():
        pixels = pipe.vae.decode(final / config.scaling_factor + config.shift_factor, return_dict=False)[0]
    image = pipe.image_processor.postprocess(pixels, output_type="np")[0]
    return final.numpy(), (image * 255).round().astype(np.float64)
