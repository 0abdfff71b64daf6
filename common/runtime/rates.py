"""The speed of a backend's layers on this device, in each dtype: what estimates of time are made from."""

from __future__ import annotations

from math import prod
from statistics import median
from typing import Literal, Protocol

from qwenimg.common.precision.precision import Precision

Layer = Literal["matmul", "conv2d"]
Shapes = tuple[tuple[int, ...], tuple[int, ...]]  # of the input and the weight
# A GPU is filled by a product of this size; a CPU's layers are those of small networks, and quick
GPU: Shapes = ((4096, 4096), (4096, 4096))
CPU: dict[Layer, Shapes] = {
    "matmul": ((512, 1024), (1024, 1024)),
    "conv2d": ((1, 256, 32, 32), (256, 256, 3, 3)),
}
SECONDS = 0.1  # how long a measurement goes on


class Measurable(Protocol):
    @property
    def on_gpu(self) -> bool: ...

    def layer_seconds(self, layer: Layer, dtype: str, shapes: Shapes) -> float: ...


def measure(engine: Measurable, layer: Layer, dtype: str) -> float:
    """Return the multiplications and additions a second of a `layer` with weights in `dtype`, on all cores of a CPU.

    The median of some runs: the first of a process is much slower than the next, and does not count. On a GPU
    convolutions count as products, whose rate they reach about.
    """
    layer, shapes = ("matmul", GPU) if engine.on_gpu else (layer, CPU[layer])
    engine.layer_seconds(layer, dtype, shapes)
    times: list[float] = []
    while sum(times) < SECONDS / 2 or len(times) < 3:
        times.append(engine.layer_seconds(layer, dtype, shapes))
    return operations(layer, shapes) / median(times)


def operations(layer: Layer, shapes: Shapes) -> float:
    """Return the multiplications and additions of a linear layer of [L in] with [out in], or of a 3x3 convolution of
    [B C h w] with [O C 3 3], padded by one."""
    x, weight = shapes
    positions = prod(x) // x[-1 if layer == "matmul" else 1]
    return 2.0 * positions * prod(weight)


def denoiser_layer(precision: Precision) -> tuple[Layer, str]:
    """Return the layer that takes most of a step, with its dtype: a UNet's are convolutions."""
    layer: Layer = "conv2d" if precision.kind.denoiser == "unet" else "matmul"
    return layer, precision.compute_dtype("transformer")


def decoder_layer(precision: Precision) -> tuple[Layer, str]:
    """Return the layer that takes most of the decoding, with its dtype."""
    return "conv2d", precision.compute_dtype("vae")
