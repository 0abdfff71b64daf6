"""Ranks as threads of one process: they exchange arrays through a list and a barrier, in place of gloo."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qwenimg.backends.torch.engine import TorchEngine
from qwenimg.backends.torch.group import TokenRanks
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.hub.open_model import open_pipeline
from qwenimg.common.pipeline.pipeline import Pipeline
from qwenimg.common.runtime.group import ALONE, Sharing

SECONDS = 300  # until a rank that waits for another one gives up


class Board:
    """What all ranks have put up at one exchange."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier, self.put = size, threading.Barrier(size, timeout=SECONDS), [Any] * size

    def exchanged(self, rank: int, value: object) -> list[Any]:
        self.put[rank] = value
        self.barrier.wait()
        every = list(self.put)
        self.barrier.wait()
        return every


class ThreadGroup:
    """The interface of `TorchGroup`, for one thread of several."""

    by_tokens = True

    def __init__(self, rank: int, board: Board) -> None:
        self.rank, self.size, self.board = rank, board.size, board
        self.failing: Callable[[], None] = lambda: None
        self._sharing = ALONE
        self.sent = 0  # bytes to other ranks

    def share(self, sharing: Sharing) -> None:
        assert sharing.ranks == self.size
        self._sharing = sharing

    def compiled(self) -> None:
        raise AssertionError("threads compile nothing")

    @property
    def branch(self) -> int:
        return self.rank // self._sharing.tokens

    @property
    def shares_tokens(self) -> bool:
        return self._sharing.tokens > 1

    @property
    def tokens(self) -> TokenRanks | None:
        return None if self._sharing.tokens == 1 else TokenRanks(self)  # type: ignore[arg-type]

    def gather(self, array: Tensor) -> list[Tensor]:
        every, parts = self.board.exchanged(self.rank, array.clone()), self._sharing.tokens
        return every[self.rank % parts :: parts]

    def summed(self, numbers: Sequence[float]) -> list[float]:
        every = self.board.exchanged(self.rank, list(numbers))
        return [sum(column) for column in zip(*every[: self._sharing.tokens], strict=True)]

    def swap(self, parts: list[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        count = self._sharing.tokens
        every = self.board.exchanged(self.rank, [part.clone() for part in parts])
        first, mine = self.rank - self.rank % count, self.rank % count
        got = [every[first + other][mine] for other in range(count)]
        assert [tuple(one.shape) for one in got] == [tuple(shape) for shape in shapes]
        self.sent += sum(part.nbytes for i, part in enumerate(parts) if i != mine)
        return got


def together(size: int, work: Callable[[ThreadGroup], Any]) -> list[Any]:
    """Run `work` on all ranks at once, and return what each returns. Raises the error of the first that has one."""
    board, results, errors = Board(size), [None] * size, list[BaseException]()

    def run(rank: int) -> None:
        try:
            with torch.inference_mode():
                results[rank] = work(ThreadGroup(rank, board))
        except BaseException as error:
            errors.append(error)
            board.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((one for one in errors if not isinstance(one, threading.BrokenBarrierError)), errors[0])
    return results


def opened(model: object, group: ThreadGroup | None, **options: Any) -> Pipeline:
    """A pipeline on torch's CPU backend, as one of the ranks of `group`."""
    engine = TorchEngine("cpu")
    engine._ranks = engine.group = group  # type: ignore[assignment]
    return open_pipeline(LoadOptions(model=str(model), backend="cpu", **options), lambda: engine)
