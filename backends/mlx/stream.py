"""Streaming of blocks through memory, from outside the network: a block's weights are put in place before it computes
and dropped once it is evaluated.

A thread reads them from the file ahead of time, into two pieces of memory if they need no conversion. Weights are
checked when they are read for the first time.
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
from qwenimg.common.weights.double_buffer import DoubleBuffer, PlacedArray
from qwenimg.common.weights.plan import Entry, LoadPlan


class Stream:
    """The blocks of `model` that `plan` streams. It and the model hold each other only weakly: an unused model is freed
    at once."""

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
        """Take the entries of another plan with the same parameters and possibly other values."""
        self.blocks = streaming.streamed_blocks(plan)
        self.branches, self._checked = streaming.branches(plan), set[str]()
        plain = _shared() and all(
            streaming.is_read_in_place(entry, MLX_CPU.moved) for block in self.blocks.values() for entry in block
        )
        self._buffer = DoubleBuffer(self.blocks, lambda size: writable((size,), "u1")) if plain else None
        self._ahead = ReadAhead(partial(_read, self.blocks, self._buffer))

    def _hook(self, block: mlx.nn.Module, path: str) -> None:
        """Replace the class of `block` by a subclass whose call streams: MLX has no hooks."""
        plain: Any = type(block)
        reference = weakref.ref(self)

        def call(block: mlx.nn.Module, *arguments: Any) -> Any:
            stream = reference()
            assert stream is not None
            stream._enter(path)
            result = plain.__call__(block, *arguments)
            mx.eval(result)
            load.drop(stream.model, [entry.name for entry in stream.blocks[path]])
            return result

        block.__class__ = type(plain.__name__, (plain,), {"__call__": call})

    def _enter(self, path: str) -> None:
        following = self.order.next(path)
        if path in self._checked:
            if self._buffer and not self._ahead.has(path):
                self._buffer.turn()
            arrays = self._ahead.take(path)
            for entry in self.blocks[path]:
                load.put(self.model, entry, arrays(entry))
        else:
            self._checked.add(path)
            for entry in self.blocks[path]:
                load.fill_one(self.model, entry)
        if path in self.branches:
            load.branch(self.model, self.branches[path])
        if following in self._checked:
            if self._buffer:
                self._buffer.turn()
            self._ahead.start(following)


def _shared() -> bool:
    """Return whether the device uses memory that numpy writes; a card has its own."""
    return not on_gpu() or mx.metal.is_available()


def _read(
    blocks: streaming.Blocks, buffer: DoubleBuffer[mx.array] | None, path: str
) -> Callable[[Entry], list[mx.array]]:
    """Read a block, in the reading thread. Return a function that makes the arrays of each entry, called in their
    order."""
    if buffer is not None:
        memory, parts = buffer.read(path)
        entries = iter(parts)
        return lambda entry: [_part(memory, part) for part in next(entries)]
    arrays = [load.fetched_again(entry) for entry in blocks[path]]
    return lambda entry: load.converted(entry, arrays.pop(0))


def _part(memory: mx.array, part: PlacedArray) -> mx.array:
    """Return a view of an array's bytes; nothing is copied."""
    return memory[part.begin : part.end].view(getattr(mx, part.dtype)).reshape(part.shape)
