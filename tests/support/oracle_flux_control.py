"""diffusers' control pipelines for Flux.1 as the reference. They take no embeds of sinusoids in float64: see
`oracle_flux`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from support import oracle_flux, peer

PARTS = ("scheduler", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "transformer")
CLASSES = {
    "text": "FluxControlNetPipeline",
    "image": "FluxControlNetImg2ImgPipeline",
    "mask": "FluxControlNetInpaintPipeline",
}


@cache
def pipeline(folder: Path, nets: tuple[Path, ...], task: str, several: bool) -> Any:
    import diffusers

    base = oracle_flux.pipeline(folder, "text")
    models = [diffusers.FluxControlNetModel.from_pretrained(net, torch_dtype=torch.float32) for net in nets]
    for model in models:
        model.time_text_embed.time_proj.forward = oracle_flux.exact_sinusoids
    control = diffusers.FluxMultiControlNetModel(models) if several else models[0]
    pipe = getattr(diffusers, CLASSES[task])(**{name: getattr(base, name) for name in PARTS}, controlnet=control)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(
    folder: Path,
    controls: list[tuple[Path, int | None, np.ndarray, float, tuple[float, float]]],
    *,
    width: int,
    height: int,
    seed: int,
    length: int,
    image: np.ndarray | None = None,
    mask: np.ndarray | None = None,
    lora: Path | None = None,
    **options: Any,
) -> Any:
    """diffusers' final latents [1, C, h, w] and pixels [H, W, 3] as uint8 values in float64. controls: each a network,
    the number of its picture's kind, the picture, the scale, and the shares of the steps."""
    nets, kinds, pictures, scales, windows = map(list, zip(*controls, strict=True))
    several = len(controls) > 1
    task = "text" if image is None else "image" if mask is None else "mask"
    pipe = pipeline(folder, tuple(dict.fromkeys(nets)), task, several)
    images = [Image.fromarray(picture) for picture in pictures]
    starts, ends = ([float(window[i]) for window in windows] for i in range(2))
    if image is not None:
        options["image"] = Image.fromarray(image)
    if mask is not None:
        options["mask_image"] = Image.fromarray(mask)
    if lora is not None:
        pipe.load_lora_weights(str(lora), adapter_name="it")
    try:
        final = pipe(
            control_image=images if several else images[0],
            control_mode=kinds if several else kinds[0],
            controlnet_conditioning_scale=scales if several else scales[0],
            control_guidance_start=starts if several else starts[0],
            control_guidance_end=ends if several else ends[0],
            width=width,
            height=height,
            generator=torch.Generator().manual_seed(seed),
            max_sequence_length=length,
            output_type="latent",
            **options,
        ).images
    finally:
        if lora is not None:
            pipe.unload_lora_weights()
    latents = pipe._unpack_latents(final, height, width, pipe.vae_scale_factor)
    return latents.numpy(), peer.decoded(pipe, latents)
