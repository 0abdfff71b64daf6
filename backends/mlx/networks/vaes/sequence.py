# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""Layers in one list, as tiny VAEs have them: over a whole image, and over bands of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from mlx.core import array as Array

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.networks.vaes import bands
from qwenimg.backends.mlx.networks.vaes.bands import BandLayers

Layer = Callable[[Array], Array]


def chained(layers: Iterable[Layer], x: Array) -> Array:
    """Return x after one layer after the other."""
    for layer in layers:
        x = ops.eval(layer(x))
    return x


def parts(kinds: Sequence[str], layers: Sequence[Layer], reach: Mapping[str, int]) -> list[BandLayers]:
    """Return the layers as parts that run over bands; an upsampling or an activation is one part with the convolution
    beside it."""
    made: list[BandLayers] = []
    for place, (kind, layer) in enumerate(zip(kinds, layers, strict=True)):
        part = BandLayers(begin=layer, reach=reach[kind], up=2 if kind == "up" else 1, down=2 if kind == "down" else 1)
        joins = place > 0 and (kind == "relu" or kinds[place - 1] == "up")
        made.append(part.after(made.pop()) if joins else part)
    return made


def run(made: Sequence[BandLayers], x: Array, rows: int, *, whole: bool) -> Array:
    """Run the parts on x: at once if `whole`, else in bands of `rows` rows."""
    if not whole:
        return bands.run(made, x, rows)
    for part in made:
        x = ops.eval(part.begin(x))
    return x
