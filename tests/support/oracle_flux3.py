"""diffusers' modular pipeline of FLUX.3 as the reference for the whole way, one prompt and one image at a time.

- The processor needs torchvision: the tokenizer with a chat template takes its place.
- RoPE's frequencies, as in `oracle`.
- The sinusoid of a time is in float32 there, whose angles of up to 1000 radians are worth more than all else.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from qwenimg.common.numbers.timesteps import timestep_features
from support import oracle, peer
from support.tiny_flux3 import blocks

CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Processor:
    """The part of Qwen3VLProcessor that the pipeline uses."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def apply_chat_template(self, messages: Any, **given: Any) -> Any:
        return self.tokenizer.apply_chat_template(messages, chat_template=CHAT, **given)


def exact_sinusoids(times: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.from_numpy(timestep_features(float(time), 64)).float() for time in times])


@cache
def pipeline(folder: Path) -> Any:
    from transformers import Qwen2Tokenizer, Qwen3VLForConditionalGeneration

    diffusers = peer.quiet()
    transformer = diffusers.Flux3Transformer2DModel.from_pretrained(folder / "transformer").eval()
    transformer.time_proj.forward = exact_sinusoids
    pipe = blocks(transformer.config.flow_map).init_pipeline()
    pipe.update_components(
        vae=diffusers.AutoencoderKLFlux2.from_pretrained(folder / "vae").eval(),
        text_encoder=Qwen3VLForConditionalGeneration.from_pretrained(folder / "text_encoder").eval(),
        tokenizer=Processor(Qwen2Tokenizer.from_pretrained(folder / "text_encoder")),
        transformer=transformer,
    )
    oracle.compute_frequencies(pipe.text_encoder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def without_guidance(folder: Path) -> Any:
    from diffusers.guiders import ClassifierFreeGuidance

    pipe = pipeline(folder)
    pipe.update_components(guider=ClassifierFreeGuidance(enabled=False))
    return pipe


def generate(
    folder: Path,
    prompt: str,
    latents: np.ndarray,
    *,
    steps: int,
    guidance: float,
    negative_prompt: str = "",
    images: list[np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """diffusers' final latents [1, C, h, w], in patches and standardized, and pixels [H, W, 3] as uint8 values in
    float64, for noise [1, C, h, w] and reference `images` [H, W, 3]."""
    from diffusers.guiders import ClassifierFreeGuidance

    pipe = pipeline(folder)
    asked: dict[str, Any] = {"image": [Image.fromarray(image) for image in images]} if images else {}
    if not pipe.transformer.config.flow_map:
        pipe.update_components(guider=ClassifierFreeGuidance(guidance_scale=guidance, enabled=guidance > 1))
        asked |= {"negative_prompt": negative_prompt} if guidance > 1 else {}
    state = pipe(
        prompt=prompt,
        width=latents.shape[3] * 16,
        height=latents.shape[2] * 16,
        num_inference_steps=steps,
        latents=torch.from_numpy(latents),
        output_type="np",
        **asked,
    )
    return state.get("latents").numpy(), (state.get("images")[0] * 255).round().astype(np.float64)
