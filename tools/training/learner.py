"""The gradients of a stage on torch, for the one loop of `common/training/loop.py`.

- Parameters, their averages and the optimizer stay float32; a phase's dtype is the dtype of its products, by autocast.
- A batch is made in a thread while the step before it runs. On a CPU, threads take a part of each batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from qwenimg.backends.torch.ops import DTYPES
from qwenimg.common.training.optimizer import Arrays
from training.config import ShapesConfig
from training.optimizer import Optimizer
from training.threads import Workers

AT_ONCE = 4  # the most parts of a step on a CPU: with more, Python itself takes longer than the products

Part = tuple[float, Callable[[], Tensor]]
"""A share of a step's batch, and a function that computes its mean loss."""


class TrainingStage(Protocol):
    @property
    def model(self) -> torch.nn.Module: ...
    def blocks(self) -> list[torch.nn.Module]: ...
    def optimizer(self, parameters: Mapping[str, torch.nn.Parameter]) -> Optimizer: ...
    def count(self, step: int) -> int: ...
    def batch(self, step: int) -> Any: ...
    def loss(self, batch: Any, rows: slice) -> Tensor: ...
    def write(self, weights: Mapping[str, Tensor]) -> None: ...


class StageLearner:
    """The parameters of a stage's model and their gradients: a `Learner` of `common/training/loop.py`."""

    def __init__(self, config: ShapesConfig, stage: TrainingStage, device: torch.device):
        self.config, self.stage, self.device = config, stage, device
        threads = config.threads or torch.get_num_threads()
        self.at_once = min(threads, AT_ONCE) if device.type == "cpu" else 1
        self.maker = Workers(1, cores=1)
        self.workers = Workers(self.at_once, cores=threads // self.at_once) if self.at_once > 1 else None
        torch.set_num_threads(threads)
        self.parameters: Arrays = dict(stage.model.named_parameters())
        self.kept: dict[str, int] = {}  # bytes of activations for the backward, by dtype
        self._batches: dict[int, Future[Any]] = {}
        if config.checkpointing:
            _checkpoint_blocks(stage.blocks())

    # As `Learner`

    def put(self, parameters: Arrays) -> None:
        with torch.no_grad():
            for name, p in self.parameters.items():
                if parameters[name] is not p:
                    p.copy_(parameters[name])

    def gradients(self, step: int, dtype: str, scale: float) -> tuple[float, Arrays]:
        compute = partial(self._part, dtype, scale)
        parts = self._parts(step)
        results = map(compute, parts) if self.workers is None else self.workers.map(compute, parts)
        total, largest, gradients = 0.0, 0, Arrays()
        for loss, found, size in results:  # in the order of the parts, so that sums are the same each time
            total, largest = total + loss, max(largest, size)
            for name, gradient in zip(self.parameters, found, strict=True):
                if gradient is not None:
                    gradients[name] = gradients[name].add_(gradient) if name in gradients else gradient
        at_once = 1 if self.workers is None else min(self.workers.count, len(parts))
        self.kept.setdefault(dtype, largest * at_once)
        return total, gradients

    def evaluated(self, arrays: Arrays) -> Arrays:
        return arrays

    def array(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    def numpy(self, array: Tensor) -> np.ndarray:
        values: np.ndarray = array.detach().cpu().numpy()
        return values

    def stop(self) -> None:
        """Stop the threads."""
        for threads in (self.maker, self.workers):
            if threads is not None:
                threads.stop()

    # One step

    def _batch(self, step: int) -> Any:
        """Return the batch of a step, while that of the next is made."""
        self._batches = {number: made for number, made in self._batches.items() if number >= step}
        for number in range(step, min(step + 2, self.config.steps)):
            if number not in self._batches:
                self._batches[number] = self.maker.submit(self.stage.batch, number)
        return self._batches[step].result()

    def _parts(self, step: int) -> list[Part]:
        """Split the batch into parts of about one size: `accumulate` of them, times the parts that run at once."""
        batch, count = self._batch(step), self.stage.count(step)
        parts = min(count, self.config.accumulate * self.at_once)
        edges = [count * i // parts for i in range(parts + 1)]
        rows = [slice(a, b) for a, b in pairwise(edges)]
        return [((r.stop - r.start) / count, partial(self.stage.loss, batch, r)) for r in rows]

    def _part(self, dtype: str, scale: float, part: Part) -> tuple[float, Sequence[Tensor | None], int]:
        """Return loss and gradients of one part, times its share, and, the first time that a dtype is used, the bytes
        of activations that its forward keeps for the backward."""
        share, compute = part
        storages: dict[int, int] = {}

        def count(x: Tensor) -> Tensor:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        counted = torch.autograd.graph.saved_tensors_hooks(count, lambda x: x)
        autocast = torch.autocast(self.device.type, DTYPES[dtype], enabled=dtype != "float32")
        with nullcontext() if dtype in self.kept else counted, autocast:
            loss = compute()
        parameters = list(self.parameters.values())
        gradients = torch.autograd.grad(loss * (share * scale), parameters, allow_unused=True)
        return share * loss.item(), gradients, sum(storages.values())


def _checkpoint_blocks(blocks: list[torch.nn.Module]) -> None:
    """Make each block keep only its input, and run again in the backward."""
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
