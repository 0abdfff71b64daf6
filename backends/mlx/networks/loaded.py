# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""The parts that networks share as components: a network with its weights on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Generic, TypeVar

import mlx.core as mx
import mlx.nn
from mlx.core import array as Array

from qwenimg.backends.mlx import load, ops
from qwenimg.backends.mlx.ops import images
from qwenimg.common.precision.precision import Precision
from qwenimg.common.precision.residency import ALWAYS
from qwenimg.common.runtime.engine import NumpyArray
from qwenimg.common.weights.plan import LoadPlan

Config = TypeVar("Config")
Model = TypeVar("Model", bound=mlx.nn.Module)


class LoadedNetwork(Generic[Config, Model]):
    """A `network`, the class of its model, with the weights that are always in memory, in the precision of `role`."""

    network: Callable[[Config, mx.Dtype], Model]
    role: ClassVar[str]

    def __init__(self, config: Config, plan: LoadPlan, precision: Precision):
        self.config, self.plan = config, plan
        stream = ops.DTYPES[precision.residual_dtype(self.role)]
        self.table_dtype = ops.DTYPES[precision.compute_dtype(self.role)]
        self.model = load.empty(lambda: self.network(config, stream), precision, self.role)
        load.fill(self.model, plan.when(ALWAYS))

    def table(self, values: NumpyArray) -> Array:
        """Return a table that was made in numpy, on the device in the dtype of products."""
        return ops.table(values, self.table_dtype)

    def rope(self, tables: Iterable[NumpyArray]) -> Array:
        """Return the tables (cos, sin) of RoPE [L D/2] as `ops.rotate_pairs` takes them [L 1 D/2 2]."""
        return ops.rope_freqs(*map(self.table, tables))


class TokenDenoiser(LoadedNetwork[Config, Model]):
    """A denoiser of packed latents that computes the modulation of a step in that step. Its condition is what its
    forward takes behind the latents and the sinusoids of the time."""

    @ops.computes
    def predict(self, x: Array, step: NumpyArray, condition: tuple[Any, ...]) -> Array:
        """Predict in float32 for packed latents x [1 L in] and sinusoids of the time."""
        return ops.at_least_float32(self.model(x, self.table(step), *condition))


class ImageDenoiser(LoadedNetwork[Config, Model]):
    """The same of latents as an image."""

    @ops.computes
    def predict(self, x: Array, step: NumpyArray, condition: tuple[Any, ...]) -> Array:
        """Predict [1 C h w] in float32 for latents x [1 C h w], both in the order of the pipeline, and sinusoids of the
        time."""
        return images.to_bchw(ops.at_least_float32(self.model(images.from_bchw(x), self.table(step), *condition)))


class PixelNetwork:
    """A network from or to pixels, that `build` makes, with all its weights, in the precision of the VAE."""

    def __init__(self, build: Callable[[], mlx.nn.Module], plan: LoadPlan, precision: Precision):
        self.dtype = ops.DTYPES[precision.compute_dtype("vae")]
        self.model: Any = load.empty(build, precision, "vae")
        load.fill(self.model, plan)
