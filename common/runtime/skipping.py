"""Calls of a denoiser that skip its cached blocks, from outside the network: a block's class is replaced by one whose
calls come here first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from qwenimg.common.base.block import CachedBlocks

Array: TypeAlias = Any  # of the backend
OwnCall: TypeAlias = Callable[..., Any]  # of a hooked block
Reused: TypeAlias = Callable[[Array], "Array | None"]
"""From the update of the block before the cached ones, their output to reuse, or None to compute it."""


@dataclass
class _Call:
    reused: Reused
    threshold: float | None  # the largest change of the first block at which the output is reused; None: no such rule
    first: Array = None  # the stream behind the first block
    last: Array = None  # the stream behind the last block that has run
    output: Array | None = None  # the output of the cached blocks that is reused
    result: Any = None  # of the first block and of all skipped ones, if the output is reused


class Skipping:
    """Hooks on the blocks of one model. They keep no reference to it."""

    def __init__(
        self, model: Any, cached: CachedBlocks, bchw: Callable[[Array], Array], started: Callable[[Array], Array]
    ):
        """Set the hooks. bchw: converts feature maps to [B C h w]; started: starts the computation of an array."""
        self._cached, self._bchw, self._started = cached, bchw, started
        self._tokens = getattr(model, "tokens", None)  # of a network whose tokens ranks may share
        self._call: _Call | None = None
        modules = dict(model.named_modules())
        _hook(modules[cached.after], self._first)
        for path in cached.paths:
            _hook(modules[path], self._other)

    def run(self, predict: Callable[[], Array], reused: Reused, threshold: float | None = None) -> tuple[Array, Array]:
        """Run `predict`, and return the prediction and the output of the cached blocks. They are skipped if
        `reused(update)`, called with the update of the block before them, returns an output to reuse. threshold: its
        rule's, for a comparison with the whole call."""
        self._call = call = _Call(reused, threshold)
        try:
            result = predict()
        finally:
            self._call = None
        if call.output is None:
            call.output = self._started(call.last - call.first if self._cached.adds else call.last)
        return result, call.output

    @property
    def skipped(self) -> bool:
        """True if the present call has skipped the cached blocks."""
        return self._call is not None and self._call.result is not None

    @property
    def threshold(self) -> float | None:
        return None if self._call is None else self._call.threshold

    def whole(self, predict: Callable[[], Array]) -> Array:
        """Run `predict` within a call, or outside of one, with all of its blocks."""
        call, self._call = self._call, None
        try:
            return predict()
        finally:
            self._call = call

    def _first(self, block: OwnCall, *arguments: Any) -> Any:
        result, call = block(*arguments), self._call
        if call is None:
            return result
        call.first = call.last = stream = _stream(result)
        update = stream - arguments[0]
        update = self._bchw(update) if self._cached.image else update
        call.output = call.reused(update if self._tokens is None else self._tokens.once(update))
        if call.output is None:
            return result
        stream = stream + call.output if self._cached.adds else call.output
        call.result = (stream, *result[1:]) if isinstance(result, tuple) else stream
        return call.result

    def _other(self, block: OwnCall, *arguments: Any) -> Any:
        if self._call is None:
            return block(*arguments)
        if self._call.result is not None:
            return self._call.result
        result = block(*arguments)
        self._call.last = _stream(result)
        return result


def _stream(result: Any) -> Array:
    return result[0] if isinstance(result, tuple) else result


def _hook(block: Any, function: Callable[..., Any]) -> None:
    """Have `function` called in place of `block`, with the block's own call as its first argument. Blocks of one class
    stay of one class, and so share compiled code."""
    plain: Any = type(block)
    if "hooked" not in vars(plain):

        def call(block: Any, *arguments: Any) -> Any:
            return block.hook(partial(plain.__call__, block), *arguments)

        plain.hooked = type(plain.__name__, (plain,), {"__call__": call})
    block.__class__, block.hook = plain.hooked, function
