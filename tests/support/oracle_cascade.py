"""diffusers' Stable Cascade pipelines as the reference for the whole way, one prompt and one image at a time.

- The prior and the decoder draw from one generator, as the combined pipeline does, which diffusers cannot open from a
  folder: so the two are called one after the other.
- Sinusoids of a time from 0 to 1, times 10,000, are in float32 there and differ by 6e-4 radians from those of here, so
  exact ones are given: the time is the nearest one of a run's steps.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qwenimg.common.numbers.timesteps import unet_sinusoids
from support import peer


@cache
def pipelines(folder: Path) -> tuple[Any, Any]:
    """The pipelines of the prior and of the decoder. diffusers saves the VAE's class by a name that it does not find
    again."""
    from diffusers.pipelines.deprecated.wuerstchen import PaellaVQModel

    diffusers = peer.quiet()
    prior = peer.opened("StableCascadePriorPipeline", folder.with_name(f"{folder.name}-prior"))
    decoder = diffusers.StableCascadeDecoderPipeline(
        decoder=diffusers.StableCascadeUNet.from_pretrained(folder / "decoder"),
        vqgan=PaellaVQModel.from_pretrained(folder / "vqgan"),
        tokenizer=prior.tokenizer,
        text_encoder=prior.text_encoder,
        scheduler=diffusers.DDPMWuerstchenScheduler.from_pretrained(folder / "scheduler"),
    )
    decoder.set_progress_bar_config(disable=True)
    return prior, decoder


def exact(unet: Any, steps: int) -> None:
    """Give a UNet exact sinusoids of times that are multiples of 1 / steps."""

    def rows(ratio: torch.Tensor, max_positions: int = 10000) -> torch.Tensor:
        values = [max_positions * round(float(one) * steps) / steps for one in ratio]
        channels = unet.config.timestep_ratio_embedding_dim
        return torch.from_numpy(unet_sinusoids(values, channels, cosines_first=False, shift=1)).float()

    unet.get_timestep_ratio_embedding = rows


def generate(
    folder: Path,
    prompt: str,
    *,
    negative_prompt: str = "",
    width: int,
    height: int,
    steps: int,
    guidance: float,
    decoder_steps: int = 10,
    decoder_guidance: float = 0.0,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """diffusers' final latents [1, C, h, w] and pixels [H, W, 3] as uint8 values in float64, cut to the size."""
    prior, decoder = pipelines(folder)
    exact(prior.prior, steps)
    exact(decoder.decoder, decoder_steps)
    generator = torch.Generator().manual_seed(seed)
    made = prior(
        prompt=prompt,
        negative_prompt=negative_prompt,
        width=width,
        height=height,
        num_inference_steps=steps,
        guidance_scale=guidance,
        generator=generator,
    )
    given = {"prompt": prompt, "negative_prompt": negative_prompt, "guidance_scale": decoder_guidance}
    final = decoder(
        made.image_embeddings, num_inference_steps=decoder_steps, generator=generator, output_type="latent", **given
    ).images
    with torch.inference_mode():
        pixels = decoder.vqgan.decode(decoder.vqgan.config.scale_factor * final).sample.clamp(0, 1)
    image = pixels[0].permute(1, 2, 0).numpy()[:height, :width]
    return final.numpy(), (image * 255).round().astype(np.float64)
