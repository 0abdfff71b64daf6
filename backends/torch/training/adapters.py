"""LoRA factors that train beside frozen networks, on torch: `common/runtime/engine.py` explains the methods."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from qwenimg.backends.torch.ops import Linear
from qwenimg.backends.torch.ops.cpu import differentiable, is_small, threads_for
from qwenimg.backends.torch.ops.layers import rotate
from qwenimg.common.runtime import factor_names
from qwenimg.common.runtime.factor_names import DOWN, UP


class TorchAdapters:
    def __init__(
        self,
        values: Mapping[str, np.ndarray],
        recomputed: re.Pattern[str] | None,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ):
        """Set the factors. dtype: float64 for a reference."""
        self.parameters = {name: torch.from_numpy(one.copy()).to(device, dtype) for name, one in values.items()}
        self._recomputed, self._layers = recomputed, dict[str, Linear]()
        self._loaded: dict[str, tuple[Tensor, Tensor] | None] = {}  # the branches of LoRAs that the model has
        self._blocks: list[torch.nn.Module] = []  # of the denoiser
        self._opened = dict[str, Any]()  # the network of each part
        self._small = False

    def put(self, parameters: dict[str, Tensor]) -> None:
        self.parameters = parameters
        self._branch(parameters)

    @contextmanager
    def learning(self) -> Iterator[None]:
        with differentiable(), torch.no_grad():
            yield

    def attach(self, opened: Any, part: str = "") -> None:
        if self._opened.get(part) is opened:
            return
        self._detach(part)
        modules = dict(opened.model.named_modules())
        for name in factor_names.layers(self.parameters, part):
            layer = self._layers[name] = modules[factor_names.split(name)[1]]
            self._loaded[name] = layer.branch
        if self._recomputed is not None and not part:
            self._blocks = [module for path, module in modules.items() if self._recomputed.fullmatch(path)]
            for block in self._blocks:
                block.forward = partial(_recomputing, block.forward)
        self._opened[part] = opened
        self._small = all(is_small(one.model) for one in self._opened.values())
        self._branch(self.parameters)

    def gradients(self, loss: Callable[[], Tensor], scale: float = 1.0) -> tuple[float, dict[str, Tensor]]:
        leaves = {name: one.detach().requires_grad_() for name, one in self.parameters.items()}
        with torch.enable_grad(), threads_for(self._small):
            self._branch(leaves)
            value = loss()
            found = torch.autograd.grad(value * scale, list(leaves.values()), allow_unused=True)
        pairs = zip(leaves.items(), found, strict=True)  # the last block's text has no use
        gradients = {name: torch.zeros_like(leaf) if one is None else one for (name, leaf), one in pairs}
        self._branch(self.parameters)
        return value.item(), gradients

    def value(self, loss: Callable[[], Tensor]) -> float:
        with threads_for(self._small):
            return loss().item()

    def detach(self) -> None:
        for part in [*self._opened]:
            self._detach(part)

    def _detach(self, part: str) -> None:
        if self._opened.pop(part, None) is None:
            return
        for name in factor_names.layers(self.parameters, part):
            self._layers.pop(name).branch = self._loaded.pop(name)
        for block in [] if part else self._blocks:
            del block.forward

    def evaluated(self, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
        return arrays

    def _branch(self, factors: Mapping[str, Tensor]) -> None:
        """Make these factors the branches of the layers, each in its layer's dtype, beside those that are loaded."""
        for name, layer in self._layers.items():
            down, up = factors[name + DOWN], factors[name + UP]
            turned = rotate(down, layer.rotation) if layer.rotation else down
            down, up = turned.to(layer.dtype), up.to(layer.dtype)
            loaded = self._loaded[name]
            layer.branch = (
                (down, up) if loaded is None else (torch.cat((loaded[0], down)), torch.cat((loaded[1], up), dim=1))
            )


def _recomputing(forward: Callable[..., Any], *arguments: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*arguments)
    return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=False)
