"""diffusers' modular pipeline of Anima as the reference for the whole way, one prompt and one image at a time.

- The transformer resizes its mask of padding by torchvision: zeros of another size stand for that.
- Its norms have float32 steps inside, and its RoPE is float32: a model in float64 stays there with those of here.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from diffusers.models.transformers import transformer_cosmos

from qwenimg.common.numbers.timesteps import sinusoids
from support import peer


def _resized(mask: torch.Tensor, size: list[int], interpolation: object) -> torch.Tensor:
    assert not mask.any()
    return mask.new_zeros(*mask.shape[:2], *size)


transformer_cosmos.transforms = SimpleNamespace(  # type: ignore[attr-defined]
    functional=SimpleNamespace(resize=_resized), InterpolationMode=SimpleNamespace(NEAREST=None)
)


class ExactTimes(torch.nn.Module):
    """Sinusoids of float32 times, made in float64."""

    def __init__(self, channels: int):
        super().__init__()
        self.channels = channels

    def forward(self, times: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.from_numpy(sinusoids(float(time), self.channels)) for time in times])


def exact(transformer: Any) -> Any:
    """With sinusoids from float64."""
    channels = transformer.config.num_attention_heads * transformer.config.attention_head_dim
    transformer.time_embed.time_proj = ExactTimes(channels)
    return transformer


@cache
def pipeline(folder: Path) -> Any:
    from transformers import AutoTokenizer, Qwen2Tokenizer, Qwen3Model

    diffusers = peer.quiet()
    pipe = diffusers.modular_pipelines.anima.AnimaAutoBlocks().init_pipeline()
    pipe.update_components(
        vae=diffusers.AutoencoderKLQwenImage.from_pretrained(folder / "vae").eval(),
        text_encoder=Qwen3Model.from_pretrained(folder / "text_encoder").eval(),
        text_conditioner=diffusers.AnimaTextConditioner.from_pretrained(folder / "text_conditioner").eval(),
        tokenizer=Qwen2Tokenizer.from_pretrained(folder / "tokenizer"),
        t5_tokenizer=AutoTokenizer.from_pretrained(folder / "t5_tokenizer"),
        transformer=exact(diffusers.CosmosTransformer3DModel.from_pretrained(folder / "transformer").eval()),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler"),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def guided(folder: Path, guidance: float) -> Any:
    """The pipeline with this scale of guidance; 1 is none."""
    from diffusers.guiders import ClassifierFreeGuidance

    pipe = pipeline(folder)
    pipe.update_components(guider=ClassifierFreeGuidance(guidance_scale=guidance, enabled=guidance > 1))
    return pipe


def generate(
    folder: Path,
    prompt: str,
    latents: np.ndarray,
    *,
    steps: int,
    guidance: float,
    negative_prompt: str = "",
    **asked: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """diffusers' final latents [1, C, h, w] and pixels [H, W, 3] as uint8 values in float64, for noise [1, C, h, w]."""
    state = guided(folder, guidance)(
        prompt=prompt,
        negative_prompt=negative_prompt,
        width=latents.shape[3] * 8,
        height=latents.shape[2] * 8,
        num_inference_steps=steps,
        latents=torch.from_numpy(latents)[:, :, None],
        output_type="np",
        **asked,
    )
    return state.get("latents")[:, :, 0].numpy(), (state.get("images")[0] * 255).round().astype(np.float64)
