"""diffusers' Stable Cascade pipelines as the reference for the whole way, one prompt and one image at a time.

- The prior and the decoder draw from one generator, as the combined pipeline does, which diffusers cannot open from a
  folder: so the two are called one after the other.
- A picture is encoded in float64. The prior begins at the level that is left of its schedule, from the embedding with
  noise; outside a mask it gets the embedding with that noise again after each step, as diffusers' pipelines do.
- Sinusoids of a time from 0 to 1, times 10,000, are in float32 there and differ by 6e-4 radians from those of here, so
  exact ones are given: the time is the nearest one of a run's steps.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from qwenimg.common.numbers.timesteps import unet_sinusoids
from support import oracle_effnet, peer


@cache
def pipelines(folder: Path) -> tuple[Any, Any]:
    """The pipelines of the prior and of the decoder. diffusers saves the VAE's class by a name that it does not find
    again."""
    from diffusers.pipelines.deprecated.wuerstchen import PaellaVQModel

    diffusers = peer.quiet()
    prior = peer.opened("StableCascadePriorPipeline", folder.with_name(f"{folder.name}-prior"))
    # which transformers leaves as memory was, where a pretend device was there before
    places = prior.text_encoder.text_model.embeddings.position_ids
    places.copy_(torch.arange(places.shape[1])[None])
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


def prior_pipeline(folder: Path) -> Any:
    """The prior's, with exact sinusoids of any time."""
    prior, _ = pipelines(folder)

    def rows(ratio: torch.Tensor, max_positions: int = 10000) -> torch.Tensor:
        values, channels = (
            [max_positions * float(one) for one in ratio],
            prior.prior.config.timestep_ratio_embedding_dim,
        )
        return torch.from_numpy(unet_sinusoids(values, channels, cosines_first=False, shift=1)).to(ratio.dtype)

    prior.prior.get_timestep_ratio_embedding = rows
    return prior


def encoded(image: np.ndarray) -> torch.Tensor:
    """The embedding [1, 16, h, w] of a picture by the encoder of the tiny folder: of the pixels that the decoder makes
    of as many values, its last row and column repeated."""
    sides = [next(i for i in range(1, 99) if 4 * (int(10.67 * i) // 2 * 2) >= side) for side in image.shape[:2]]
    whole = [4 * (int(10.67 * side) // 2 * 2) for side in sides]
    gaps = [(0, more - side) for more, side in zip(whole, image.shape[:2], strict=True)]
    shown = Image.fromarray(np.pad(image, (*gaps, (0, 0)), mode="edge"))
    scaled = shown.resize((32 * sides[1], 32 * sides[0]), Image.Resampling.LANCZOS)
    pixels = np.asarray(scaled, np.float32).transpose(2, 0, 1)[None] / 255
    return torch.from_numpy(oracle_effnet.encoded(oracle_effnet.tiny_effnet(), pixels)).float()


def begun(
    prior: Any, embedding: torch.Tensor, generator: Any, steps: int, strength: float, inside: np.ndarray | None
) -> dict[str, Any]:
    """The arguments of the prior's pipeline for a run that begins with an embedding."""
    import diffusers

    whole = diffusers.DDPMWuerstchenScheduler.from_config(prior.scheduler.config)
    whole.set_timesteps(steps)
    left = whole.timesteps[steps - min(int(steps * strength), steps) :]

    class Part(diffusers.DDPMWuerstchenScheduler):
        def set_timesteps(self, *given: Any, **named: Any) -> None:
            self.timesteps = left

    prior.scheduler = Part.from_config(whole.config)
    noise = torch.randn(embedding.shape, generator=generator)

    def at(time: torch.Tensor) -> torch.Tensor:
        share = whole._alpha_cumprod(time[None], torch.device("cpu"))
        return share.sqrt() * embedding + (1 - share).sqrt() * noise

    def blended(pipe: Any, i: int, time: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"latents": torch.where(torch.from_numpy(inside), tensors["latents"], at(left[i + 1]))}

    first = noise if inside is not None and strength == 1 else at(left[0])
    return {"latents": first} | ({} if inside is None else {"callback_on_step_end": blended})


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
    image: np.ndarray | None = None,
    inside: np.ndarray | None = None,
    strength: float = 1.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """diffusers' final latents [1, C, h, w], pixels [H, W, 3] as uint8 values in float64, cut to the size, and the
    embedding [1, 16, h, w] that its prior made. image: uint8, of that size; inside [h, w]: the values of its embedding
    that are drawn."""
    import diffusers

    prior, decoder = pipelines(folder)
    prior.scheduler = diffusers.DDPMWuerstchenScheduler.from_config(prior.scheduler.config)  # as before `begun`
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
        **({} if image is None else begun(prior, encoded(image), generator, steps, strength, inside)),
    )
    if image is not None and inside is not None:
        embedding = encoded(image)
        made.image_embeddings = torch.where(torch.from_numpy(inside), made.image_embeddings, embedding)
    given = {"prompt": prompt, "negative_prompt": negative_prompt, "guidance_scale": decoder_guidance}
    final = decoder(
        made.image_embeddings, num_inference_steps=decoder_steps, generator=generator, output_type="latent", **given
    ).images
    with torch.inference_mode():
        pixels = decoder.vqgan.decode(decoder.vqgan.config.scale_factor * final).sample.clamp(0, 1)
    decoded = pixels[0].permute(1, 2, 0).numpy()[:height, :width]
    return final.numpy(), (decoded * 255).round().astype(np.float64), made.image_embeddings.numpy()
