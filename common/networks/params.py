"""Building blocks of a manifest: each returns `{checkpoint key: shape}` for one layer, in PyTorch's convention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from qwenimg.common.base.shape import Manifest, Shape


def linear(name: str, outputs: int, inputs: int, *, bias: bool = True) -> Manifest:
    """Return the shapes of a linear layer: weight [out, in] and bias [out]."""
    return _weight_and_bias(name, (outputs, inputs), bias)


def conv(name: str, outputs: int, inputs: int, *kernel: int) -> Manifest:
    """Return the shapes of a convolution: weight [out, in, *kernel] and bias [out]."""
    return _weight_and_bias(name, (outputs, inputs, *kernel), True)


def norm(name: str, width: int) -> Manifest:
    """Return the shape of a norm with a gain and no bias: weight [width]."""
    return {f"{name}.weight": (width,)}


def affine(name: str, width: int) -> Manifest:
    """Return the shapes of a norm with gain and bias: weight and bias [width]."""
    return _weight_and_bias(name, (width,), True)


def under(prefix: str, *parts: Mapping[str, Shape]) -> Manifest:
    """Return all of `parts`, each key after `prefix` and a dot."""
    return {f"{prefix}.{key}": shape for part in parts for key, shape in part.items()}


def repeat(prefix: str, count: int, part: Mapping[str, Shape]) -> Manifest:
    """Return `part` once for each of prefix.0 .. prefix.(count-1)."""
    return dict(_repeated(prefix, count, part))


def merge(*parts: Mapping[str, Shape]) -> Manifest:
    """Return all of `parts` in order. No key may occur twice."""
    merged: Manifest = {}
    for part in parts:
        assert not merged.keys() & part.keys(), f"twice in a manifest: {merged.keys() & part.keys()}"
        merged.update(part)
    return merged


def _weight_and_bias(name: str, shape: Shape, bias: bool) -> Manifest:
    return {f"{name}.weight": shape} | ({f"{name}.bias": shape[:1]} if bias else {})


def _repeated(prefix: str, count: int, part: Mapping[str, Shape]) -> Iterator[tuple[str, Shape]]:
    for index in range(count):
        for key, shape in part.items():
            yield f"{prefix}.{index}.{key}", shape
