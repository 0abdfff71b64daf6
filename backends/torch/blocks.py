"""A network whose blocks are called one at a time, in the dtypes of the policy or in a wider one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from qwenimg.backends.torch import load, ops
from qwenimg.backends.torch.ops import crossing
from qwenimg.common.base.block import Block
from qwenimg.common.precision.residency import ALWAYS, ONCE
from qwenimg.common.runtime.traced import TINY, Tree
from qwenimg.common.weights.plan import LoadPlan


class NetworkBlocks:
    def __init__(self, opened: Any, plan: LoadPlan, device: torch.device, wide: torch.dtype | None):
        """Wrap `opened`, a component without weights, of `plan`. wide: the dtype to compute in, with the weights
        that `plan` keeps."""
        self.model, self.plan, self.device, self.wide = opened.model, plan, device, wide

    @ops.computes
    def call(self, path: str, block: Block, arguments: Sequence[Tree], seed: int | None = None) -> Tree:
        """Load the block at `path`, call it on `arguments` and free it. seed: of moved weights, in float64."""
        plan = self.plan.under(path).when(ONCE if block.once else ALWAYS)
        load.fill(self.model, plan, self.device)
        inputs = [
            crossing.inward(one, block.image and i == 0, self.device, self.wide) for i, one in enumerate(arguments)
        ]
        with nullcontext() if self.wide is None else load.widened(self.model, path, self.wide):
            module = self.model.get_submodule(path)
            if seed is not None:
                assert self.wide is torch.float64, "weights are moved in float64 alone"
                load.move(module, TINY, seed)
            results = getattr(module, block.method or "forward")(*inputs)
            outputs = crossing.outward(results, block.image)
        load.drop(self.model, plan.entries)
        return outputs
