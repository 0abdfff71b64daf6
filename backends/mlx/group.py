"""The ranks of a run on MLX, which `mlx.launch` started: they share branches, by MLX's ring over TCP or its others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx
import numpy as np
from mlx.core import array as Array

from qwenimg.backends.mlx import ops
from qwenimg.common.base.errors import UsageError
from qwenimg.common.runtime.group import ALONE, RankLost, RankPlace, Sharing, pack, unpack

BYTES = 256  # of a message


class MLXGroup:
    """The ranks of a run as one of them sees them."""

    by_tokens = False

    def __init__(self, place: RankPlace) -> None:
        """Meet the other ranks. Raises UsageError and RankLost."""
        self.rank, self.size, self._sharing = place.rank, place.size, ALONE
        self.failing: Callable[[], None] = lambda: None  # called when an exchange has failed
        try:
            self._group = mx.distributed.init(strict=True, backend="ring")
        except (RuntimeError, ValueError) as error:
            line = " ".join(str(error).split())
            raise RankLost(f"rank {place.rank} of {place.size} does not reach the others: {line[:120]}") from None
        here = self._group.rank(), self._group.size()
        if here != (place.rank, place.size):
            raise UsageError(f"MLX says rank {here[0]} of {here[1]}, the environment rank {place.rank} of {place.size}")

    def share(self, sharing: Sharing) -> None:
        assert sharing == Sharing(branches=self.size), sharing
        self._sharing = sharing

    @property
    def branch(self) -> int:
        return self.rank

    @property
    def shares_tokens(self) -> bool:
        return False

    def gather(self, array: Array) -> list[Array]:
        with self._exchanging():
            # One array with an axis of ranks; the ring computes on the CPU
            every = mx.distributed.all_gather(array[None], group=self._group, stream=mx.cpu)
            mx.eval(every)
        return [every[rank] for rank in range(self.size)]

    def summed(self, numbers: Sequence[float]) -> list[float]:
        """Return the numbers of rank 0: each set is one rank."""
        return unpack(self.broadcast(pack(numbers)))

    def close(self) -> None:
        """Do nothing: MLX closes its sockets when the process ends."""

    def broadcast(self, data: bytes) -> bytes:
        assert len(data) < BYTES
        padded = np.frombuffer(bytes([len(data)]) + data.ljust(BYTES - 1, b"\0"), np.uint8)
        with self._exchanging():
            every = ops.numpy(mx.distributed.all_gather(mx.array(padded)[None], group=self._group, stream=mx.cpu))
        length, *rest = (int(value) for value in every[0])
        return bytes(rest[:length])

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        """Raise RankLost for an exchange that fails."""
        try:
            yield
        except RuntimeError as error:
            self.failing()
            line = " ".join(str(error).split())
            raise RankLost(f"rank {self.rank} of {self.size} no longer reaches the others: {line[:120]}") from None
