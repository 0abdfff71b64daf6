"""Streaming of blocks through memory, from outside the network: hooks put a block's weights in place before it computes
and drop them after it.

On a CPU a thread reads them from the file ahead of time, into two pieces of memory if they need no conversion. A GPU
gets them from the host's memory, pinned, on a CUDA stream of its own, into two buffers: one computes, the other is
filled. Weights are checked when they are read for the first time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from qwenimg.backends.torch import load
from qwenimg.backends.torch.ops.cpu import laid_out
from qwenimg.backends.workspaces import TORCH_CPU
from qwenimg.common.formats.arrays import empty
from qwenimg.common.runtime.read_ahead import Order, ReadAhead
from qwenimg.common.weights import streaming
from qwenimg.common.weights.double_buffer import ALIGNED, DoubleBuffer, PlacedArray
from qwenimg.common.weights.plan import LoadPlan

Tensors = list[torch.Tensor]
CPU = "cpu"


class Stream:
    """The blocks of `model` that `plan` streams. The model's hooks own this object, which holds the model only weakly:
    an unused model is freed at once."""

    def __init__(self, model: torch.nn.Module, plan: LoadPlan, device: torch.device):
        self._model, self.device, self.order = weakref.ref(model), device, Order()
        self.renew(plan)
        for path in self.blocks:
            module = model.get_submodule(path)
            module.register_forward_pre_hook(partial(self._enter, path))
            module.register_forward_hook(partial(self._leave, path), always_call=True)

    @property
    def model(self) -> torch.nn.Module:
        model = self._model()
        assert model is not None
        return model

    def renew(self, plan: LoadPlan) -> None:
        """Take the entries of another plan with the same parameters and possibly other values."""
        self.blocks = streaming.streamed_blocks(plan)
        self.branches = streaming.branches(plan)
        self.source = _Files(self.blocks) if self.device.type == CPU else _Host(self.blocks, self.device)

    def _enter(self, path: str, *_: object) -> None:
        following = self.order.next(path)
        for entry, tensors in zip(self.blocks[path], self.source.take(path), strict=True):
            load.put(self.model, entry, tensors)
        if path in self.branches:
            load.branch(self.model, self.branches[path], self.device)
        if following is not None:
            self.source.start(following)

    def _leave(self, path: str, *_: object) -> None:
        load.drop(self.model, [entry.name for entry in self.blocks[path]])


class _Files:
    """The blocks in their files, for a CPU."""

    def __init__(self, blocks: streaming.Blocks):
        self.blocks, self._checked = blocks, set[str]()
        plain = all(streaming.is_read_in_place(entry, TORCH_CPU.moved) for block in blocks.values() for entry in block)
        self._buffer = DoubleBuffer(blocks, _memory) if plain else None
        self._ahead = ReadAhead(partial(_read, blocks, self._buffer))

    def take(self, path: str) -> list[Tensors]:
        if path not in self._checked:
            self._checked.add(path)
            return [load.kept(entry, load.fetched(entry), torch.device(CPU)) for entry in self.blocks[path]]
        if self._buffer and not self._ahead.has(path):
            self._buffer.turn()
        return self._ahead.take(path)()

    def start(self, path: str) -> None:
        if path in self._checked:
            if self._buffer:
                self._buffer.turn()
            self._ahead.start(path)


def _memory(size: int) -> tuple[torch.Tensor, Any]:
    view = empty((size,), "u1")
    return torch.from_numpy(view), view


def _read(
    blocks: streaming.Blocks, buffer: DoubleBuffer[torch.Tensor] | None, path: str
) -> Callable[[], list[Tensors]]:
    """Read a block, in the reading thread. Return a function that makes its tensors, in the thread that uses them."""
    if buffer is not None:
        memory, parts = buffer.read(path)
        return lambda: [[_part(memory, part) for part in entry] for entry in parts]
    arrays = [load.fetched_again(entry) for entry in blocks[path]]
    return lambda: [load.kept(entry, arrays.pop(0), torch.device(CPU)) for entry in blocks[path]]


def _part(memory: torch.Tensor, part: PlacedArray) -> torch.Tensor:
    dtype = torch.int32 if part.dtype == "uint32" else getattr(torch, part.dtype)  # words of codes
    return memory[part.begin : part.end].view(dtype).view(part.shape)


class _Host:
    """The blocks in the host's memory, for a device that has its own."""

    def __init__(self, blocks: streaming.Blocks, device: torch.device):
        self.blocks, self.device = blocks, device
        self._host: dict[str, tuple[torch.Tensor, list[Tensors]]] = {}  # a block's bytes, and its tensors in them
        self._buffers: list[torch.Tensor] = []
        self._filled, self._turn = "", 0
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def take(self, path: str) -> list[Tensors]:
        if path not in self._host:
            self._host[path] = self._read(path)
        if self._filled != path:
            self.start(path)
        if self._side is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._side)
        buffer = self._buffers[self._turn]
        return [[_at(buffer, _begin(t), t) for t in tensors] for tensors in self._host[path][1]]

    def start(self, path: str) -> None:
        """Start to fill the other buffer, once its last computation is done."""
        if path not in self._host:
            return
        block, _ = self._host[path]
        if not self._buffers:
            size = max(sum(e.nbytes + 3 * ALIGNED for e in entries) for entries in self.blocks.values())
            self._buffers = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2)]
        self._filled, self._turn = path, 1 - self._turn
        buffer = self._buffers[self._turn][: len(block)]
        if self._side is None:
            buffer.copy_(block)
            return
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            buffer.copy_(block, non_blocking=True)

    def _read(self, path: str) -> tuple[torch.Tensor, list[Tensors]]:
        """Read a block into one piece of memory, each tensor in the layout of the device."""
        here = torch.device(CPU)
        read = [load.kept(entry, load.fetched(entry), here) for entry in self.blocks[path]]
        laid = [[laid_out(tensor, self.device.type) for tensor in tensors] for tensors in read]
        ends = list(accumulate(-(-t.nbytes // ALIGNED) * ALIGNED for tensors in laid for t in tensors))
        block = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=self._side is not None)
        begins = iter([0, *ends])
        return block, [[_at(block, next(begins), t).copy_(t) for t in tensors] for tensors in laid]


def _at(memory: torch.Tensor, begin: int, like: torch.Tensor) -> torch.Tensor:
    """Return the bytes of `memory` from `begin` on as a tensor with dtype, shape and strides of `like`."""
    flat = memory[begin : begin + like.nbytes].view(like.dtype)
    return flat.as_strided(like.size(), like.stride())


def _begin(tensor: torch.Tensor) -> int:
    """Return the offset of `tensor` in its memory, in bytes."""
    return int(tensor.storage_offset()) * tensor.itemsize
