"""The sizes of Stable Cascade's arrays: an embedding of the image, and latents of 4 pixels a side made from it. And the
picture of which an embedding is encoded."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.networks.denoisers.cascade_names import PATCH
from qwenimg.common.networks.vaes import effnet
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.pictures import pixels

RATIO = 10.67  # latents to a value of the embedding along a side
SCALE = 4  # pixels to a latent
MULTIPLE = PATCH * SCALE  # pixels of a token: as many of an embedding's values are drawn for each size between two


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


def in_embedding(hole: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return `hole` [H, W] as [1, 1, h, w] for the values of an embedding: 1 for each of whose pixels one is in it."""
    rows, columns = (embedding_side(side) for side in hole.shape)
    whole = pixels.extend(hole, SCALE * latent_side(columns), SCALE * latent_side(rows))
    touched: NDArray[np.bool_] = pixels.shares(whole.astype(np.float64), rows, columns) > 0
    return touched[None, None].astype(np.float32)


def seen(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return pixels [1, 3, H, W] in -1..1 as the encoder takes them: extended to all pixels that the decoder makes of
    an embedding, scaled to those of the embedding's values, and normalized."""
    picture = pixels.to_uint8(values[0])
    rows, columns = (embedding_side(side) for side in picture.shape[:2])
    whole = pixels.extend(picture, SCALE * latent_side(columns), SCALE * latent_side(rows))
    unit = pixels.zero_to_one(pixels.fit(whole, effnet.SCALE * columns, effnet.SCALE * rows))
    mean, std = (np.array(three, np.float32)[:, None, None] for three in (effnet.MEAN, effnet.STD))
    normalized: NDArray[np.float32] = (unit - mean) / std
    return normalized
