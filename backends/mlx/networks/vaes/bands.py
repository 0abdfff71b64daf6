# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""Images as bands of rows, and layers that run band by band with the result of the whole image, where the whole is too
large.

Between two layers memory then holds the image once, and inside a layer the intermediate results of one band.

A band is read with as many rows above and below as the layers see beyond it, which are cut off again. A group norm
takes its moments over the whole image: the moments of all bands are taken first, and the layers before the norm run
once more. On a card the bands between two layers are in the host's memory.

Images are [B h w C].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mlx.core import array as Array

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.ops import images
from qwenimg.common.numbers.moments import combined
from qwenimg.common.numbers.tiles import Tile, tiles

# A norm as a function of a part of its image
Normed = Callable[[Array], Array]


class NormStep(NamedTuple):
    """A norm over the whole image and the layers after it."""

    norm: Any
    run: Callable[[Array, Normed, Array], Array]  # (the norm's input, the norm, the result of `begin`)


class BandLayers(NamedTuple):
    """Layers that run over bands together: `begin`, which has no norm over the whole image, then `steps`."""

    begin: Callable[[Array], Array]
    reach: int  # rows of the input that the layers see above and below a band
    up: int = 1  # rows of the output for `down` rows of the input
    down: int = 1
    steps: Sequence[NormStep] = ()

    def after(self, first: BandLayers) -> BandLayers:
        """Return `first` and these layers as one. `first` has no steps, and returns `first.up` rows for one."""
        return BandLayers(
            begin=lambda x: self.begin(first.begin(x)),
            reach=first.reach + -(-self.reach // first.up),
            up=first.up * self.up,
            down=self.down,
            steps=self.steps,
        )

    def run(self, x: Array, norms: Sequence[Normed]) -> Array:
        """Run the steps up to `norms` on a band x. Return the last step's result, or the input of the next norm."""
        value = beginning = self.begin(x)
        for step, normed in zip(self.steps, norms, strict=False):
            value = step.run(value, normed, beginning)
        return value


class Bands:
    """An image of `height` rows as bands, in the order in which they were added."""

    def __init__(self, height: int):
        self.height = height
        self._bands: list[tuple[int, int, Array]] = []  # first row, row behind the last one, values

    def add(self, band: Array) -> None:
        """Add a band below the others."""
        start = self._bands[-1][1] if self._bands else 0
        self._bands.append((start, start + images.height(band), band))

    def rows(self, start: int, stop: int, like: Array) -> Array:
        """Return the rows of the image from `start` to before `stop`, on the device of `like`."""
        pieces = [
            images.window(band, slice(max(start - first, 0), min(stop, last) - first), slice(None))
            for first, last, band in self._bands
            if first < stop and start < last
        ]
        return images.rows_joined([ops.here(piece, like) for piece in pieces])

    def free(self, stop: int) -> None:
        """Free the bands that have no row from `stop` on."""
        self._bands = [band for band in self._bands if band[1] > stop]


def run(layers: Sequence[BandLayers], x: Array, rows: int) -> Array:
    """Run `layers` on an image x, in bands of `rows` rows of their results."""
    image = Bands(images.height(x))
    image.add(x)
    for part in layers:
        image = _through(part, image, rows, x)
    return image.rows(0, image.height, x)


def _through(part: BandLayers, image: Bands, rows: int, like: Array) -> Bands:
    """Return the result of `part` for `image`, and free the bands of `image` on the way."""
    bands = tiles(image.height, max(1, rows * part.down // part.up), part.reach)
    norms: list[Normed] = []
    for step in part.steps:
        norms.append(step.norm.by(combined([step.norm.moments(_band(part, image, b, norms, like)) for b in bands])))
    result = Bands(image.height * part.up // part.down)
    for band in bands:
        result.add(ops.away(_band(part, image, band, norms, like)))
        image.free(band.keep_stop - part.reach)
    return result


def _band(part: BandLayers, image: Bands, band: Tile, norms: Sequence[Normed], like: Array) -> Array:
    """Return `part` of a band, up to `norms`, without the extra rows that were read for it."""
    x = part.run(image.rows(band.read_start, band.read_stop, like), norms)
    above = _rows_out(part, band.read_start, band.keep_start)
    return images.window(x, slice(above, above + _rows_out(part, band.keep_start, band.keep_stop)), slice(None))


def _rows_out(part: BandLayers, start: int, stop: int) -> int:
    """Return the number of rows that `part` returns for those from `start` to before `stop`, `start` being a
    multiple of its `down`."""
    return (stop - start) * part.up // part.down
