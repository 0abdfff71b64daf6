"""diffusers' Z-Image pipeline as the reference for the whole way, one prompt and one image at a time.

Its control network changes the streams behind the refiner blocks for itself alone: its authors' and ComfyUI's code
change the transformer's too. Here the transformer goes on from the stream that the control network made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from support import peer


@cache
def pipeline(folder: Path, task: str = "") -> Any:
    """diffusers' pipeline for text, or for the `task` Img2Img or Inpaint."""
    return peer.opened(f"ZImage{task}Pipeline", folder, torch_dtype=torch.float32)


def generate(
    folder: Path,
    prompt: str,
    latents: np.ndarray,
    *,
    negative_prompt: str = "",
    steps: int = 8,
    guidance: float = 0.0,
    **more: float,
) -> tuple[np.ndarray, np.ndarray]:
    """diffusers' final latents [1, C, h, w] and pixels [H, W, 3] as uint8 values in float64."""
    pipe = pipeline(folder)
    final = pipe(
        prompt=prompt,
        negative_prompt=negative_prompt,
        guidance_scale=guidance,
        width=latents.shape[3] * 8,
        height=latents.shape[2] * 8,
        num_inference_steps=steps,
        latents=torch.from_numpy(latents),
        output_type="latent",
        **more,
    ).images
    return final.numpy(), peer.decoded(pipe, final)


def from_picture(
    folder: Path, prompt: str, picture: np.ndarray, *, mask: np.ndarray | None, seed: int, **asked: Any
) -> tuple[np.ndarray, np.ndarray]:
    """The same for a `picture` [H, W, 3] to start from, and where there is a `mask` [H, W], of what is drawn anew."""
    pipe = pipeline(folder, "Img2Img" if mask is None else "Inpaint")
    final = pipe(
        prompt,
        image=Image.fromarray(picture),
        **({} if mask is None else {"mask_image": Image.fromarray(mask)}),
        height=picture.shape[0],
        width=picture.shape[1],
        generator=torch.Generator().manual_seed(seed),
        output_type="latent",
        **asked,
    ).images
    return final.numpy(), peer.decoded(pipe, final)


def controlled(
    folder: Path,
    net: torch.nn.Module,
    prompt: str,
    picture: np.ndarray,
    latents: np.ndarray,
    *,
    filled: tuple[np.ndarray, np.ndarray] | None = None,
    **asked: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """The same under control by `picture` [H, W, 3]; `filled`: a second one and its mask [H, W]."""
    import diffusers

    base = pipeline(folder)
    net.from_transformer(net, base.transformer)
    cls = diffusers.ZImageControlNetInpaintPipeline if filled else diffusers.ZImageControlNetPipeline
    pipe = cls(**base.components, controlnet=net)
    pipe.set_progress_bar_config(disable=True)
    more = dict(zip(("image", "mask_image"), map(Image.fromarray, filled), strict=True)) if filled else {}
    with _refined_by(net, base.transformer):
        final = pipe(
            prompt=prompt,
            control_image=Image.fromarray(picture),
            width=latents.shape[3] * 8,
            height=latents.shape[2] * 8,
            latents=torch.from_numpy(latents),
            output_type="latent",
            **more,
            **asked,
        ).images
    return final.numpy(), peer.decoded(base, final)


@contextmanager
def _refined_by(net: Any, transformer: Any) -> Iterator[None]:
    """Have `transformer` go on from the stream of `net` behind the refiner blocks, which they share."""
    seen: list[torch.Tensor] = []
    forward = transformer.forward

    def goes_on(*arguments: Any, **named: Any) -> Any:
        last = transformer.noise_refiner[-1]
        hook = last.register_forward_hook(lambda module, given, made: seen[-1][:, : made.shape[1]])
        try:
            return forward(*arguments, **named)
        finally:
            hook.remove()

    noted = net.control_layers[0].register_forward_pre_hook(lambda module, given: seen.append(given[1]))
    transformer.forward = goes_on
    try:
        yield
    finally:
        noted.remove()
        del transformer.forward
