"""The parts that networks share as components: a network with its weights on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import torch

from qwenimg.backends.torch import load, ops
from qwenimg.common.precision.precision import Precision
from qwenimg.common.precision.residency import ALWAYS
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


class PixelNetwork:
    """A network from or to pixels, that `build` makes, with all its weights, in the precision of the VAE."""

    def __init__(
        self, build: Callable[[], torch.nn.Module], plan: LoadPlan, precision: Precision, device: torch.device
    ):
        self.device = device
        self.dtype = ops.DTYPES[precision.compute_dtype("vae")]
        self.model: Any = load.empty(build, precision, "vae")
        load.fill(self.model, plan, device)
