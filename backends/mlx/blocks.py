"""A network whose blocks are called one at a time, in the dtypes of the policy or in float32."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from qwenimg.backends.mlx import load
from qwenimg.backends.mlx.ops import crossing
from qwenimg.common.base.block import Block
from qwenimg.common.precision.residency import ALWAYS, ONCE
from qwenimg.common.runtime.traced import Tree
from qwenimg.common.weights.plan import LoadPlan


class NetworkBlocks:
    def __init__(self, opened: Any, plan: LoadPlan, wide: bool):
        """Wrap `opened`, a component whose weights are not loaded. plan: where they are. wide: compute in float32,
        with the weights as `plan` stores them."""
        self.model, self.plan, self.wide = opened.model, plan, wide

    def call(self, path: str, block: Block, arguments: Sequence[Tree], seed: int | None = None) -> Tree:
        """Load the block at `path`, call it on `arguments` and free it."""
        assert seed is None, "weights are moved in float64, which is another backend's"
        plan = self.plan.under(path).when(ONCE if block.once else ALWAYS)
        load.fill(self.model, plan)
        inputs = [crossing.inward(one, block.image and i == 0, self.wide) for i, one in enumerate(arguments)]
        with load.widened(self.model, path) if self.wide else nullcontext():
            module = dict(self.model.named_modules())[path]
            outputs = crossing.outward(getattr(module, block.method or "__call__")(*inputs), block.image)
        load.drop(self.model, plan.entries)
        return outputs
