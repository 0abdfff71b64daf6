"""Streams blocks through memory, from outside of the network: a block's weights are put in place before it computes and
taken away after it, when it is evaluated. They are read from the file by a thread, ahead; what is read for the first
time is checked as every weight is.
"""

from __future__ import annotations

import weakref
from typing import Any

import mlx.core as mx
import mlx.nn

from qwenimg.backends.mlx import load
from qwenimg.common.runtime.read_ahead import Order, ReadAhead
from qwenimg.common.weights import streaming
from qwenimg.common.weights.plan import LoadPlan


class Stream:
    """The blocks of `model` that `plan` streams. Holds the model no more than its blocks hold this: what is no longer
    used is freed at once."""

    def __init__(self, model: mlx.nn.Module, plan: LoadPlan):
        self._model, self.order = weakref.ref(model), Order()
        self.renew(plan)
        modules = dict(model.named_modules())
        for path in self.blocks:
            self._hook(modules[path], path)

    @property
    def model(self) -> mlx.nn.Module:
        model = self._model()
        assert model is not None
        return model

    def renew(self, plan: LoadPlan) -> None:
        """Takes the entries of another plan of the same parameters, whose values may be others."""
        blocks = self.blocks = streaming.streamed_blocks(plan)
        self.branches, self._checked = streaming.branches(plan), set[str]()
        self._ahead: ReadAhead[list[list[mx.array]]] = ReadAhead(
            lambda path: [load.fetched_again(entry) for entry in blocks[path]]
        )

    def _hook(self, block: mlx.nn.Module, path: str) -> None:
        """Gives `block` a class of its own, whose call streams: MLX has no hooks."""
        own: Any = type(block)
        found = weakref.ref(self)

        def call(block: mlx.nn.Module, *arguments: Any) -> Any:
            stream = found()
            assert stream is not None
            stream._enter(path)
            made = own.__call__(block, *arguments)
            mx.eval(made)
            load.drop(stream.model, [entry.name for entry in stream.blocks[path]])
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
