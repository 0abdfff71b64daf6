"""Streams blocks through memory, from outside of the network: hooks put a block's weights in place before it computes
and take them away after it.

On a CPU they are read from the file by a thread, ahead. A GPU gets them from the host's memory, pinned, on a stream of
its own, into two sets of buffers: one computes, the other is filled. What is read for the first time is checked as
every weight is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from qwenimg.backends.torch import load
from qwenimg.common.codes.affine import Coded
from qwenimg.common.runtime.read_ahead import ReadAhead, cycle
from qwenimg.common.weights import streaming
from qwenimg.common.weights.plan import LoadPlan

Tensors = list[torch.Tensor]
CPU = "cpu"


class Stream:
    """The blocks of `stack`, a list of modules of `model`, whose entries `plan` streams."""

    def __init__(self, model: torch.nn.Module, plan: LoadPlan, stack: str, device: torch.device):
        self.model, self.device = model, device
        self.renew(plan)
        layers: Any = model.get_submodule(stack)
        for number in self.blocks:
            layers[number].register_forward_pre_hook(partial(self._enter, number))
            layers[number].register_forward_hook(partial(self._leave, number), always_call=True)

    def renew(self, plan: LoadPlan) -> None:
        """Takes the entries of another plan of the same parameters, whose values may be others."""
        self.blocks = streaming.streamed_blocks(plan)
        self.branches = streaming.branches(plan)
        self.after = cycle(self.blocks)
        self.source = _Files(self.blocks) if self.device.type == CPU else _Host(self.blocks, self.device)

    def _enter(self, number: int, *_: object) -> None:
        for entry, tensors in zip(self.blocks[number], self.source.take(number), strict=True):
            load.put(self.model, entry, tensors)
        if number in self.branches:
            load.branch(self.model, self.branches[number], self.device)
        self.source.start(self.after[number])

    def _leave(self, number: int, *_: object) -> None:
        load.drop(self.model, [entry.name for entry in self.blocks[number]])


class _Files:
    """Blocks from their files, for a CPU."""

    def __init__(self, blocks: streaming.Blocks):
        self.blocks, self._checked = blocks, set[int]()
        self._ahead: ReadAhead[list[Coded | np.ndarray[Any, Any]]] = ReadAhead(
            lambda number: [load.fetched_again(entry) for entry in blocks[number]]
        )

    def take(self, number: int) -> list[Tensors]:
        here = torch.device(CPU)
        if number not in self._checked:
            self._checked.add(number)
            return [load.kept(entry, load.fetched(entry), here) for entry in self.blocks[number]]
        found = self._ahead.take(number)
        return [load.kept(entry, found.pop(0), here) for entry in self.blocks[number]]

    def start(self, number: int) -> None:
        if number in self._checked:
            self._ahead.start(number)


class _Host:
    """Blocks from the host's memory, for a device that has its own."""

    def __init__(self, blocks: streaming.Blocks, device: torch.device):
        self.blocks, self.device = blocks, device
        self._host: dict[int, list[Tensors]] = {}
        self._buffers: list[list[Tensors]] = []
        self._filled, self._turn = -1, 0
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def take(self, number: int) -> list[Tensors]:
        if number not in self._host:
            here = torch.device(CPU)
            read = (load.kept(entry, load.fetched(entry), here) for entry in self.blocks[number])
            self._host[number] = [self._pinned(tensors) for tensors in read]
        if self._filled != number:
            self.start(number)
        if self._side is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._side)
        return self._buffers[self._turn]

    def start(self, number: int) -> None:
        """Begins to fill the other set of buffers, once what computed with it is done."""
        if number not in self._host:
            return
        host = self._host[number]
        if not self._buffers:
            self._buffers = [[[torch.empty_like(t, device=self.device) for t in one] for one in host] for _ in range(2)]
        self._filled, self._turn = number, 1 - self._turn
        if self._side is None:
            self._copy(host)
            return
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            self._copy(host)

    def _copy(self, host: list[Tensors]) -> None:
        for into, tensors in zip(self._buffers[self._turn], host, strict=True):
            for there, here in zip(into, tensors, strict=True):
                there.copy_(here, non_blocking=True)

    def _pinned(self, tensors: Sequence[torch.Tensor]) -> Tensors:
        return [tensor if self._side is None else tensor.pin_memory() for tensor in tensors]
