"""diffusers' Qwen-Image-Edit pipelines as the reference, with their defects worked around in this one place.

- The pipelines do not hand on `mm_token_type_ids`, without which transformers 5 gives pictures the positions of text.
- The processor needs torchvision: a stand-in of its Pillow variant's image processor and the tokenizer takes its place.
- RoPE's frequencies, as in `oracle`.
- The inpainting pipeline draws a sample of the picture's latents; ours takes their mean, as the others do.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from qwenimg.common.numbers.packing import pack, unpack
from support import oracle, peer

PAD = "<|image_pad|>"


class Processor:
    """The part of Qwen2VLProcessor that the pipelines use."""

    def __init__(self, tokenizer: Any) -> None:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self.tokenizer = tokenizer
        self.images = Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 12_845_056})

    def __call__(self, text: list[str], images: Any, padding: bool, return_tensors: str) -> Any:
        from transformers import BatchFeature

        images = images if isinstance(images, list) else [images]
        seen = self.images(images=images, return_tensors="pt")
        [filled] = text
        for grid in seen["image_grid_thw"]:
            filled = filled.replace(PAD, "<|placeholder|>" * (int(grid.prod()) // 4), 1)
        filled = filled.replace("<|placeholder|>", PAD)
        tokens = self.tokenizer([filled], padding=padding, return_tensors=return_tensors)
        return BatchFeature({**tokens, **seen})


def _with_positions(encoder: Any) -> None:
    forward = encoder.forward

    def wrapped(*args: Any, **given: Any) -> Any:
        if given.get("pixel_values") is not None:
            given["mm_token_type_ids"] = (given["input_ids"] == encoder.config.image_token_id).int()
        return forward(*args, **given)

    encoder.forward = wrapped


@cache
def pipeline(folder: Path, name: str = "") -> Any:
    pipe = peer.opened(name or "DiffusionPipeline", folder, torch_dtype=torch.float32, processor=None)
    oracle.compute_frequencies(pipe.text_encoder)
    _with_positions(pipe.text_encoder)
    pipe.processor = Processor(pipe.tokenizer)
    return pipe


def generate(
    folder: Path,
    prompt: str,
    images: list[np.ndarray],
    latents: np.ndarray,
    *,
    negative_prompt: str = " ",
    steps: int = 3,
    guidance: float = 4.0,
) -> tuple[np.ndarray, np.ndarray]:
    """diffusers' final latents [1, C, h, w] and pixels [H, W, 3] as uint8 values in float64, for noise [1, C, h, w]."""
    pictures = [Image.fromarray(image) for image in images]
    return oracle.drawn(
        pipeline(folder),
        prompt,
        (latents.shape[3] * 8, latents.shape[2] * 8),
        negative_prompt=negative_prompt,
        steps=steps,
        guidance=guidance,
        image=pictures if len(pictures) > 1 else pictures[0],
        latents=torch.from_numpy(pack(latents)),
    )


SMALLER = 36  # by which areas are divided in tests: a picture is seen in 171 x 171 pixels, and its copy in 64 x 64


def make_pictures_small(patch: Any) -> None:
    """Let theirs and ours see pictures in a small area; `patch` is a pytest.MonkeyPatch."""
    from diffusers.pipelines.qwenimage import (
        pipeline_qwenimage_edit,
        pipeline_qwenimage_edit_inpaint,
        pipeline_qwenimage_edit_plus,
    )

    from qwenimg.common.numbers import sizes

    for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_inpaint, pipeline_qwenimage_edit_plus):
        theirs = module.calculate_dimensions
        patch.setattr(module, "calculate_dimensions", lambda area, ratio, theirs=theirs: theirs(area / SMALLER, ratio))
    ours = sizes.of_area
    patch.setattr(sizes, "of_area", lambda area, *size: ours(area // SMALLER, *size))


def inpaint(
    folder: Path, prompt: str, image: np.ndarray, mask: np.ndarray, *, seed: int, steps: int, strength: float
) -> np.ndarray:
    """The inpainting pipeline's final latents [1, C, h, w], for an image of the size in which it is seen."""
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_inpaint as module

    pipe = pipeline(folder, "QwenImageEditInpaintPipeline")
    sample = module.retrieve_latents
    module.retrieve_latents = lambda *args, **given: sample(*args, **(given | {"sample_mode": "argmax"}))
    try:
        height, width = image.shape[:2]
        final = pipe(
            image=Image.fromarray(image),
            mask_image=Image.fromarray(mask),
            prompt=prompt,
            negative_prompt=" ",
            true_cfg_scale=4.0,
            height=height,
            width=width,
            strength=strength,
            num_inference_steps=steps,
            generator=torch.Generator().manual_seed(seed),
            output_type="latent",
        ).images
    finally:
        module.retrieve_latents = sample
    return unpack(final.float().numpy(), height // 8, width // 8)
