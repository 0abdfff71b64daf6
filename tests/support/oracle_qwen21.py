"""diffusers' Qwen-Image-2.1 pipeline as the reference for the whole way, one prompt at a time: padding would shift the
positions of the image.

- The processor needs torchvision: a stand-in of its Pillow variant's image processor and the tokenizer takes its place.
- A picture is seen in `AREA` pixels, as ours is in tests.
- RoPE's frequencies, as in `oracle`.
- The sinusoid of the time is in float32 there, whose angles of up to 1000 radians are worth more than all else.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from qwenimg.common.numbers import packing
from qwenimg.common.numbers.timesteps import timestep_features
from support import oracle, peer
from support.tiny_qwen21 import AREA, LEAST

PAD = "<|image_pad|>"


class Processor:
    """The part of Qwen3VLProcessor that the pipeline uses."""

    def __init__(self, tokenizer: Any) -> None:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self.tokenizer = tokenizer
        half = [0.5, 0.5, 0.5]
        size = {"shortest_edge": LEAST, "longest_edge": 4096 * 4096}
        self.images = Qwen2VLImageProcessorPil(size=size, patch_size=16, image_mean=half, image_std=half)

    def apply_chat_template(self, message: Any, tokenize: bool, return_dict: bool) -> list[list[int]]:
        return [[0] * 14]  # as many tokens as the system's message has with Qwen's vocabulary

    def __call__(self, text: list[str], images: Any = None, **given: Any) -> Any:
        from transformers import BatchFeature

        [filled] = text
        seen = self.images(images=images, return_tensors="pt") if images else {}
        for grid in seen["image_grid_thw"] if images else ():
            filled = filled.replace(PAD, "<|placeholder|>" * (int(grid.prod()) // 4), 1)
        tokens = self.tokenizer([filled.replace("<|placeholder|>", PAD)], padding=True, return_tensors="pt")
        pad = self.tokenizer.encode(PAD)[0]
        more = {"mm_token_type_ids": (tokens["input_ids"] == pad).int()} if images else {}
        return BatchFeature({**tokens, **seen, **more})


@cache
def pipeline(folder: Path) -> Any:
    from diffusers.pipelines.qwenimage21 import pipeline_qwenimage21
    from transformers import Qwen2Tokenizer, Qwen3VLForConditionalGeneration

    from qwenimg.common.families.qwen_image_21.checkpoint import sample_sigmas

    theirs = pipeline_qwenimage21.calculate_dimensions
    pipeline_qwenimage21.calculate_dimensions = lambda area, ratio: theirs(AREA, ratio)
    diffusers = peer.quiet()
    pipe = diffusers.QwenImage21Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler"),
        vae=diffusers.AutoencoderKLQwenImage21.from_pretrained(folder / "vae"),
        text_encoder=Qwen3VLForConditionalGeneration.from_pretrained(folder / "text_encoder").eval(),
        processor=Processor(Qwen2Tokenizer.from_pretrained(folder / "processor")),
        transformer=diffusers.QwenImage21Transformer2DModel.from_pretrained(folder / "transformer"),
        sample_sigmas=list(sample_sigmas(folder / "model_index.json")) or None,
    )
    pipe.set_progress_bar_config(disable=True)
    oracle.compute_frequencies(pipe.text_encoder)
    pipe.transformer.time_text_embed.time_proj.forward = lambda t: torch.stack(
        [torch.from_numpy(timestep_features(1000 * float(one))).float() for one in t]
    )
    return pipe


def generate(
    folder: Path,
    prompt: str,
    images: list[np.ndarray],
    latents: np.ndarray,
    *,
    negative_prompt: str | None = None,
    steps: int = 3,
    guidance: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """diffusers' final latents [1, C, h, w] and pixels [H, W, 4] as uint8 values in float64, for noise [1, C, h, w]."""
    pipe = pipeline(folder)
    h, w = latents.shape[2:]
    final = pipe(
        image=[Image.fromarray(image) for image in images] or None,
        prompt=prompt,
        negative_prompt=negative_prompt,
        true_cfg_scale=guidance,
        height=h * 16,
        width=w * 16,
        num_inference_steps=steps,
        latents=torch.from_numpy(np.ascontiguousarray(packing.tokens(latents))),
        output_type="latent",
    ).images
    final = packing.image(final.float().numpy(), h, w)
    config = pipe.vae.config
    mean, std = (torch.tensor(v)[None, :, None, None] for v in (config.latents_mean, config.latents_std))
    with torch.no_grad():
        made = pipe.vae.decode((torch.from_numpy(final) * std + mean)[:, :, None], return_dict=False)[0][:, :, 0]
    return final, peer.pixels(pipe, made)
