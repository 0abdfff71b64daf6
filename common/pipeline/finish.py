"""The end of a run: images from latents."""

from __future__ import annotations

from typing import Any, TypeAlias

from numpy.typing import NDArray

from qwenimg.common.parts.vae import VAEHalves
from qwenimg.common.pictures import pixels
from qwenimg.common.pictures.pixels import Uint8
from qwenimg.common.pipeline.steps.inpaint import Latents
from qwenimg.common.request.request import Request

Decoded: TypeAlias = list[NDArray[Any]]


def frames(latents: Latents) -> list[Latents]:
    """Return the latents [1, C, h, w] of each image in [F, C, h, w]: of the only frame, or of all but the first,
    which is the composite of the others."""
    return [latents[i : i + 1] for i in range(1 if len(latents) > 1 else 0, len(latents))]


def decoded(vae: VAEHalves, latents: Latents) -> Decoded:
    """Decode each image of latents [F, C, h, w] to [1, C, H, W], about -1 to 1. Raises DoesNotFit and NumericsError."""
    return [vae.decode(one) for one in frames(latents)]


def images(
    request: Request, decoded: Decoded, *, layered: bool, origin: tuple[int, int] = (0, 0)
) -> tuple[Uint8, tuple[Uint8, ...]]:
    """Return the pixels [H, W, C] of the image in the size of the request, and its layers, () without. An image of
    layers has them one over the other. origin: its left and top in what is decoded. Raises NumericsError."""
    every = tuple(pixels.crop(pixels.to_uint8(one[0]), request.width, request.height, *origin) for one in decoded)
    return (pixels.composed(every), every) if layered else (every[0], ())
