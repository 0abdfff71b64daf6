"""The parts that networks share as components: a network with its weights on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from qwenimg.backends.torch import load, ops
from qwenimg.backends.torch.ops import images
from qwenimg.common.precision.precision import Precision
from qwenimg.common.precision.residency import ALWAYS
from qwenimg.common.runtime.engine import NumpyArray
from qwenimg.common.weights.plan import LoadPlan

Config = TypeVar("Config")
Model = TypeVar("Model", bound=torch.nn.Module)


class LoadedNetwork(Generic[Config, Model]):
    """A `network`, the class of its model, with the weights that are always in memory, in the precision of `role`."""

    network: Callable[[Config, torch.dtype], Model]
    role: ClassVar[str]

    def __init__(self, config: Config, plan: LoadPlan, precision: Precision, device: torch.device):
        self.config, self.plan = config, plan
        self.device = device
        stream = ops.DTYPES[precision.residual_dtype(self.role)]
        self.table_dtype = ops.DTYPES[precision.compute_dtype(self.role)]
        self.model = load.empty(lambda: self.network(config, stream), precision, self.role)
        load.fill(self.model, plan.when(ALWAYS), device)

    def table(self, values: NumpyArray) -> Tensor:
        """Return a table that was made in numpy, on the device in the dtype of products."""
        return ops.table(values, self.table_dtype, self.device)

    def rope(self, tables: Iterable[NumpyArray]) -> Tensor:
        """Return the tables (cos, sin) of RoPE [L D/2] as `ops.rotate_pairs` takes them [L 1 D/2 2]."""
        return ops.rope_freqs(*map(self.table, tables))


class TokenDenoiser(LoadedNetwork[Config, Model]):
    """A denoiser of packed latents that computes the modulation of a step in that step. Its condition is what its
    forward takes behind the latents and the sinusoids of the time."""

    @ops.computes
    def predict(self, x: Tensor, step: NumpyArray, condition: tuple[Any, ...]) -> Tensor:
        """Predict in float32 for packed latents x [1 L in] and sinusoids of the time."""
        return ops.at_least_float32(self.model(x, self.table(step), *condition))


class ImageDenoiser(LoadedNetwork[Config, Model]):
    """The same of latents as an image."""

    @ops.computes
    def predict(self, x: Tensor, step: NumpyArray, condition: tuple[Any, ...]) -> Tensor:
        """Predict [1 C h w] in float32 for latents x [1 C h w], both in the order of the pipeline, and sinusoids of the
        time."""
        return images.to_bchw(ops.at_least_float32(self.model(images.from_bchw(x), self.table(step), *condition)))


class PixelNetwork:
    """A network from or to pixels, that `build` makes, with all its weights, in the precision of the VAE."""

    def __init__(
        self, build: Callable[[], torch.nn.Module], plan: LoadPlan, precision: Precision, device: torch.device
    ):
        self.device = device
        self.dtype = ops.DTYPES[precision.compute_dtype("vae")]
        self.model: Any = load.empty(build, precision, "vae")
        load.fill(self.model, plan, device)
