"""Images as bands of rows, and layers that run band by band with the result of the whole, for where the whole is too
large: what is between two layers is then in memory once, and what a layer makes on the way for one band only.

A band is read with as many rows above and below as the layers see beyond it, which are cut off again. A group norm
takes its moments over the whole image: those of all bands are taken first, and the layers before it run once more.
On a card the bands between two layers are in the memory of the host.

Images are [B C h w].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from qwenimg.backends.torch import ops
from qwenimg.backends.torch.ops import images
from qwenimg.common.numbers.moments import combined
from qwenimg.common.numbers.tiles import Tile, tiles

# A norm as a function of a part of its image.
Normed = Callable[[Tensor], Tensor]


class Step(NamedTuple):
    """A norm over the whole image and what comes behind it."""

    norm: Any
    run: Callable[[Tensor, Normed, Tensor], Tensor]  # of what the norm is given, the norm, and what the part began with


class Part(NamedTuple):
    """Layers that are run over bands together: `begin`, which has no norm over the whole image, then `steps`."""

    begin: Callable[[Tensor], Tensor]
    reach: int  # rows that the layers see above and below a band of what they are given
    up: int = 1  # rows that they make of `down` rows
    down: int = 1
    steps: Sequence[Step] = ()

    def after(self, first: Part) -> Part:
        """Return both parts as one. `first` has no steps, and makes `first.up` rows of one."""
        return Part(
            begin=lambda x: self.begin(first.begin(x)),
            reach=first.reach + -(-self.reach // first.up),
            up=first.up * self.up,
            down=self.down,
            steps=self.steps,
        )

    def run(self, x: Tensor, norms: Sequence[Normed]) -> Tensor:
        """Return what the steps as far as `norms` make of a band x: all of them, or what the next norm is given."""
        value = begun = self.begin(x)
        for step, normed in zip(self.steps, norms, strict=False):
            value = step.run(value, normed, begun)
        return value


class Bands:
    """An image of `height` rows, whose bands are kept in the order in which they were added."""

    def __init__(self, height: int):
        self.height = height
        self._bands: list[tuple[int, int, Tensor]] = []  # first row, row behind the last one, values

    def add(self, band: Tensor) -> None:
        """Add a band below the others."""
        start = self._bands[-1][1] if self._bands else 0
        self._bands.append((start, start + images.height(band), band))

    def rows(self, start: int, stop: int, like: Tensor) -> Tensor:
        """Return the rows of the image from `start` to before `stop`, where `like` is."""
        pieces = [
            images.window(band, slice(max(start - first, 0), min(stop, last) - first), slice(None))
            for first, last, band in self._bands
            if first < stop and start < last
        ]
        return images.rows_joined([ops.here(piece, like) for piece in pieces])

    def free(self, stop: int) -> None:
        """Free the bands that have no row from `stop` on."""
        self._bands = [band for band in self._bands if band[1] > stop]


def run(parts: Sequence[Part], x: Tensor, rows: int) -> Tensor:
    """Return what `parts` make of an image x, in bands that make `rows` rows each."""
    image = Bands(images.height(x))
    image.add(x)
    for part in parts:
        image = _through(part, image, rows, x)
    return image.rows(0, image.height, x)


def _through(part: Part, image: Bands, rows: int, like: Tensor) -> Bands:
    """Return the image that `part` makes of `image`, whose bands are freed on the way."""
    bands = tiles(image.height, max(1, rows * part.down // part.up), part.reach)
    norms: list[Normed] = []
    for step in part.steps:
        norms.append(step.norm.by(combined([step.norm.moments(_band(part, image, b, norms, like)) for b in bands])))
    made = Bands(image.height * part.up // part.down)
    for band in bands:
        made.add(ops.away(_band(part, image, band, norms, like)))
        image.free(band.keep_stop - part.reach)
    return made


def _band(part: Part, image: Bands, band: Tile, norms: Sequence[Normed], like: Tensor) -> Tensor:
    """Return what `part` as far as `norms` makes of a band, without the rows that it was read with."""
    x = part.run(image.rows(band.read_start, band.read_stop, like), norms)
    above = _made(part, band.read_start, band.keep_start)
    return images.window(x, slice(above, above + _made(part, band.keep_start, band.keep_stop)), slice(None))


def _made(part: Part, start: int, stop: int) -> int:
    """Return how many rows `part` makes of those from `start` to before `stop`, `start` being a multiple of its
    `down`."""
    return (stop - start) * part.up // part.down
