"""Streams blocks through memory, from outside of the network: a block's weights are put in place before it computes and
taken away after it, when it is evaluated. They are read from the file by a thread, ahead; what is read for the first
time is checked as every weight is.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn

from qwenimg.backends.mlx import load
from qwenimg.common.runtime.read_ahead import Order, ReadAhead
from qwenimg.common.weights import streaming
from qwenimg.common.weights.plan import LoadPlan


class Stream:
    """The blocks of `model` that `plan` streams."""

    def __init__(self, model: mlx.nn.Module, plan: LoadPlan):
        self.model, self.order = model, Order()
        self.renew(plan)
        modules = dict(model.named_modules())
        for path in self.blocks:
            self._hook(modules[path], path)

    def renew(self, plan: LoadPlan) -> None:
        """Takes the entries of another plan of the same parameters, whose values may be others."""
        self.blocks, self._checked = streaming.streamed_blocks(plan), set[str]()
        self.branches = streaming.branches(plan)
        self._ahead: ReadAhead[list[list[mx.array]]] = ReadAhead(self._read)

    def _read(self, path: str) -> list[list[mx.array]]:
        return [load.fetched_again(entry) for entry in self.blocks[path]]

    def _hook(self, block: mlx.nn.Module, path: str) -> None:
        """Gives `block` a class of its own, whose call streams: MLX has no hooks."""
        own: Any = type(block)

        def call(block: mlx.nn.Module, *arguments: Any) -> Any:
            self._enter(path)
            made = own.__call__(block, *arguments)
            mx.eval(made)
            load.drop(self.model, [entry.name for entry in self.blocks[path]])
            return made

        block.__class__ = type(own.__name__, (own,), {"__call__": call})

    def _enter(self, path: str) -> None:
        following = self.order.next(path)
        if path in self._checked:
            found = self._ahead.take(path)
            for entry in self.blocks[path]:
                load.put(self.model, entry, load.converted(entry, found.pop(0)))
        else:
            self._checked.add(path)
            for entry in self.blocks[path]:
                load.fill_one(self.model, entry)
        if path in self.branches:
            load.branch(self.model, self.branches[path])
        if following in self._checked:
            self._ahead.start(following)
