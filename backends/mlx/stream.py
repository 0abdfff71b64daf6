"""Streams blocks through memory, from outside of the network: a block's weights are put in place before it computes and
taken away after it, when it is evaluated. They are read from the file by a thread, ahead; what is read for the first
time is checked as every weight is.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn

from qwenimg.backends.mlx import load
from qwenimg.common.runtime.read_ahead import ReadAhead, cycle
from qwenimg.common.weights import streaming
from qwenimg.common.weights.plan import LoadPlan


class Stream:
    """The blocks of `stack`, a list of modules of `model`, whose entries `plan` streams."""

    def __init__(self, model: mlx.nn.Module, plan: LoadPlan, stack: str):
        self.model = model
        self.renew(plan)
        for number in self.blocks:
            self._hook(model[stack][number], number)

    def renew(self, plan: LoadPlan) -> None:
        """Takes the entries of another plan of the same parameters, whose values may be others."""
        self.blocks, self._checked = streaming.streamed_blocks(plan), set[int]()
        self.branches, self.after = streaming.branches(plan), cycle(self.blocks)
        self._ahead: ReadAhead[list[list[mx.array]]] = ReadAhead(self._read)

    def _read(self, number: int) -> list[list[mx.array]]:
        return [load.fetched_again(entry) for entry in self.blocks[number]]

    def _hook(self, block: mlx.nn.Module, number: int) -> None:
        """Gives `block` a class of its own, whose call streams: MLX has no hooks."""
        own: Any = type(block)

        def call(block: mlx.nn.Module, *arguments: Any) -> Any:
            self._enter(number)
            made = own.__call__(block, *arguments)
            mx.eval(made)
            load.drop(self.model, [entry.name for entry in self.blocks[number]])
            return made

        block.__class__ = type(own.__name__, (own,), {"__call__": call})

    def _enter(self, number: int) -> None:
        if number in self._checked:
            found = self._ahead.take(number)
            for entry in self.blocks[number]:
                load.put(self.model, entry, load.converted(entry, found.pop(0)))
        else:
            self._checked.add(number)
            for entry in self.blocks[number]:
                load.fill_one(self.model, entry)
        if number in self.branches:
            load.branch(self.model, self.branches[number])
        if self.after[number] in self._checked:
            self._ahead.start(self.after[number])
