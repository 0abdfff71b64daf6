"""The speed of a backend's layers on this device, in each dtype: what estimates of time are made from.

A rate is measured once and kept for later runs, so that plans, reports and runs tell the same time.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from math import prod
from pathlib import Path
from statistics import median
from typing import Literal, Protocol

from qwenimg.common.memory import own_cache
from qwenimg.common.precision.precision import Precision

Layer = Literal["matmul", "conv2d"]
Shapes = tuple[tuple[int, ...], tuple[int, ...]]  # of the input and the weight
# A GPU is filled by a product of this size; a CPU's layers are those of small networks, and quick
GPU: Shapes = ((4096, 4096), (4096, 4096))
CPU: dict[Layer, Shapes] = {
    "matmul": ((512, 1024), (1024, 1024)),
    "conv2d": ((1, 256, 32, 32), (256, 256, 3, 3)),
}
# A network of fewer parameters runs on one thread of a CPU, and its layers end before they are at full speed.
SMALL = 2**24
SMALL_CPU: dict[Layer, Shapes] = {
    "matmul": ((256, 128), (128, 128)),
    "conv2d": ((1, 32, 64, 64), (32, 32, 3, 3)),
}
SECONDS = 0.1  # how long a measurement goes on
USUAL = 48e9  # operations a second of one core of a CPU in float32
_FILE = "rates.json"


class Measurable(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def on_gpu(self) -> bool: ...

    def layer_seconds(self, layer: Layer, dtype: str, shapes: Shapes, small: bool) -> float: ...


class Rates:
    """The multiplications and additions a second of the layers of one backend, kept by the name of the machine."""

    def __init__(self, backend: str, engine: Callable[[], Measurable], device: str = ""):
        """Name the machine by the backend with its version, and a GPU as its `device` or else the processor. engine:
        called when the first rate must be measured."""
        self._engine, self._machine = engine, f"{backend} on {device or _processor()}"
        self._found: dict[str, float] = {}

    def __call__(self, layer: Layer, dtype: str, small: bool = False) -> float:
        """Return the rate of a `layer` with weights in `dtype`; small: of a network with few parameters."""
        name = self._name(layer, dtype, small)
        if name not in self._found:
            kept = own_cache.number(_FILE, name)
            self._found[name] = self.again(layer, dtype, small) if kept is None else kept
        return self._found[name]

    def kept(self, layer: Layer, dtype: str, small: bool = False) -> float | None:
        """Return the rate if it was measured before."""
        name = self._name(layer, dtype, small)
        return self._found.get(name) or own_cache.number(_FILE, name)

    def expected(self, layer: Layer, dtype: str, small: bool = False) -> float:
        """Return the rate that was measured before, or a usual one: for hints, which measure nothing."""
        return self.kept(layer, dtype, small) or USUAL * _cores()

    def again(self, layer: Layer, dtype: str, small: bool = False) -> float:
        """Measure the rate, and keep it in place of an older one."""
        name, rate = self._name(layer, dtype, small), measure(self._engine(), layer, dtype, small)
        self._found[name] = rate
        own_cache.keep(_FILE, {name: rate})
        return rate

    def _name(self, layer: Layer, dtype: str, small: bool) -> str:
        return f"{'small ' if small else ''}{layer} in {dtype}, {self._machine}"


def measure(engine: Measurable, layer: Layer, dtype: str, small: bool = False) -> float:
    """Return the multiplications and additions a second of a `layer` with weights in `dtype`: on all cores of a CPU, or
    for a `small` network on one.

    The median of some runs: the first of a process is much slower than the next, and does not count. On a GPU
    convolutions count as products, whose rate they reach about.
    """
    layer, shapes = ("matmul", GPU) if engine.on_gpu else (layer, (SMALL_CPU if small else CPU)[layer])
    engine.layer_seconds(layer, dtype, shapes, small)
    times: list[float] = []
    while sum(times) < SECONDS / 2 or len(times) < 3:
        times.append(engine.layer_seconds(layer, dtype, shapes, small))
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


def _processor() -> str:
    """Return the name of this processor and how many of its cores a run may use."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    threads = os.environ.get("OMP_NUM_THREADS") or _cores()
    return f"{name or platform.processor() or platform.machine()}, {threads} threads"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
