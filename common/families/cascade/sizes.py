"""The sizes of Stable Cascade's arrays: an embedding of the image, and latents of 4 pixels a side made from it."""

from __future__ import annotations

from qwenimg.common.networks.denoisers.cascade_names import PATCH
from qwenimg.common.numbers.latent_shape import LatentShape

RATIO = 10.67  # latents to a value of the embedding along a side
SCALE = 4  # pixels to a latent


def latent_side(count: int) -> int:
    """Return the latents along a side of `count` values: a multiple of a token's, which diffusers' own is for pictures
    of multiples of 128 pixels alone."""
    return int(RATIO * count) // PATCH * PATCH


def embedding_side(pixels: int) -> int:
    """Return the fewest values of the embedding for a side of at least `pixels`."""
    count = max(1, int(pixels / (RATIO * SCALE)))
    while SCALE * latent_side(count) < pixels:
        count += 1
    return count


def latents_of(embedding: LatentShape) -> LatentShape:
    """Return the shape of the latents that are made from an embedding."""
    return LatentShape(1, latent_side(embedding.rows), latent_side(embedding.columns))
