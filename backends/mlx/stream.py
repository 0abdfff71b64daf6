"""Streams blocks through memory, from outside of the network: a block's weights are put in place before it computes and
taken away after it, when it is evaluated. They are read from the file by a thread, ahead, into two pieces of memory
where they can be used as they are read; what is read for the first time is checked as every weight is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn

from qwenimg.backends.mlx import load
from qwenimg.backends.mlx.ops import writable
from qwenimg.backends.mlx.ops.functions import on_gpu
from qwenimg.backends.workspaces import MLX_CPU
from qwenimg.common.runtime.read_ahead import Order, ReadAhead
from qwenimg.common.weights import streaming
from qwenimg.common.weights.again import PlacedArray, TwoPieces
from qwenimg.common.weights.plan import Entry, LoadPlan


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
        self.blocks = streaming.streamed_blocks(plan)
        self.branches, self._checked = streaming.branches(plan), set[str]()
        plain = _shared() and all(
            streaming.straight(entry, MLX_CPU.moved) for block in self.blocks.values() for entry in block
        )
        self._pieces = TwoPieces(self.blocks, lambda size: writable((size,), "u1")) if plain else None
        self._ahead = ReadAhead(partial(_read, self.blocks, self._pieces))

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
            if self._pieces and not self._ahead.has(path):
                self._pieces.turn()
            made = self._ahead.take(path)
            for entry in self.blocks[path]:
                load.put(self.model, entry, made(entry))
        else:
            self._checked.add(path)
            for entry in self.blocks[path]:
                load.fill_one(self.model, entry)
        if path in self.branches:
            load.branch(self.model, self.branches[path])
        if following in self._checked:
            if self._pieces:
                self._pieces.turn()
            self._ahead.start(following)


def _shared() -> bool:
    """Whether what computes sees memory that numpy writes: a card has its own."""
    return not on_gpu() or mx.metal.is_available()


def _read(blocks: streaming.Blocks, pieces: TwoPieces[mx.array] | None, path: str) -> Callable[[Entry], list[mx.array]]:
    """In a thread; what it gives makes the arrays of an entry, in the order of the block."""
    if pieces is not None:
        memory, parts = pieces.read(path)
        left = iter(parts)
        return lambda entry: [_part(memory, part) for part in next(left)]
    found = [load.fetched_again(entry) for entry in blocks[path]]
    return lambda entry: load.converted(entry, found.pop(0))


def _part(memory: mx.array, part: PlacedArray) -> mx.array:
    """No copy: of a stretch of bytes."""
    return memory[part.begin : part.end].view(getattr(mx, part.dtype)).reshape(part.shape)
