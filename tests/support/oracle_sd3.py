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

from support import peer


@cache
def pipeline(folder: Path, task: str) -> Any:
    names = ("text_encoder_3", "tokenizer_3", "image_encoder", "feature_extractor")
    absent = {name: None for name in names if not (folder / name).exists()}
    return peer.opened(f"StableDiffusion3{task}Pipeline", folder, **absent)


def generate(folder: Path, prompt: str, *, seed: int = 0, **asked: Any) -> tuple[np.ndarray, np.ndarray]:
    """diffusers' final latents [1, C, h, w] and pixels [H, W, 3] as uint8 values in float64. `image` and `mask_image`
    are uint8 arrays."""
    pipe = pipeline(folder, "Inpaint" if "mask_image" in asked else "Img2Img" if "image" in asked else "")
    for name in ("image", "mask_image"):
        if name in asked:
            asked[name] = Image.fromarray(asked[name])
    final = pipe(prompt, generator=torch.Generator().manual_seed(seed), output_type="latent", **asked).images
    return final.numpy(), peer.decoded(pipe, final)
