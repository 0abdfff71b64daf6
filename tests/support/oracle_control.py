"""diffusers' control pipelines for Qwen-Image as the reference.

- RoPE's frequencies, as in `oracle`.
- The inpainting pipeline draws the sample of its control picture from torch's own generator, and not from the given
  one: it gets none, and torch's own has the seed.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import torch
from PIL import Image

from qwenimg.common.numbers.packing import unpack

PARTS = ("scheduler", "vae", "text_encoder", "tokenizer", "transformer")


@cache
def pipeline(folder: Path, net: Path, several: bool, inpaints: bool) -> Any:
    import diffusers

    base = oracle.pipeline(folder, torch.float32)
    control = diffusers.QwenImageControlNetModel.from_pretrained(net, torch_dtype=torch.float32)
    if several:
        control = diffusers.QwenImageMultiControlNetModel([control])
    cls = diffusers.QwenImageControlNetInpaintPipeline if inpaints else diffusers.QwenImageControlNetPipeline
    pipe = cls(**{name: getattr(base, name) for name in PARTS}, controlnet=control)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(
    folder: Path,
    net: Path,
    prompt: str,
    pictures: list[np.ndarray],
    *,
    mask: np.ndarray | None = None,
    size: tuple[int, int],
    seed: int,
    scales: list[float],
    windows: list[tuple[float, float]],
    negative_prompt: str = " ",
    steps: int = 3,
    guidance: float = 4.0,
) -> tuple[np.ndarray, np.ndarray]:
    """diffusers' final latents [1, C, h, w] and pixels [H, W, 3] as uint8 values in float64."""
    several, inpaints = len(pictures) > 1, mask is not None
    pipe = pipeline(folder, net, several, inpaints)
    images = [Image.fromarray(picture) for picture in pictures]
    starts, ends = ([float(window[i]) for window in windows] for i in range(2))
    width, height = size
    given: dict[str, Any] = {"generator": torch.Generator().manual_seed(seed)}
    if mask is not None:
        torch.manual_seed(seed)
        given = {"control_mask": Image.fromarray(mask)}
    final = pipe(
        prompt=prompt,
        negative_prompt=negative_prompt,
        true_cfg_scale=guidance,
        width=width,
        height=height,
        num_inference_steps=steps,
        control_image=images if several else images[0],
        controlnet_conditioning_scale=scales if several else scales[0],
        control_guidance_start=starts if several else starts[0],
        control_guidance_end=ends if several else ends[0],
        output_type="latent",
        **given,
    ).images
    latents = unpack(final.float().numpy(), height // 8, width // 8)
    return latents, oracle.decoded(pipe, latents)
