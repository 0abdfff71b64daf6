"""The ranks of a run on torch: NCCL between NVIDIA GPUs, gloo between processes on CPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from qwenimg.backends.torch import ops
from qwenimg.common.base.errors import UsageError
from qwenimg.common.runtime.group import ALONE, RankLost, RankPlace, Sharing, pack, unpack

PATIENCE = 120.0  # seconds until all ranks have come
HOURS = 12.0  # for one exchange: ranks are lost by their end, not by how long they take
BYTES = 256  # of a message


class TorchGroup:
    """The ranks of a run, seen from one of them, and the ranks with which it shares tokens."""

    by_tokens = True

    def __init__(self, place: RankPlace, device: torch.device, store: Store | None = None) -> None:
        """Meet the other ranks. store: rank 0's, if it is open already. Raises UsageError for ranks that do not fit
        together, and RankLost if some do not come."""
        self.rank, self.size, self._device = place.rank, place.size, device
        self.failing: Callable[[], None] = lambda: None  # called when an exchange has failed
        self._compiles = False
        self._sharing, self._store = ALONE, store or open_store(place)
        _check(self._store, place)
        with self._exchanging():
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=PrefixStore("group", self._store),
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(hours=HOURS),
            )

    def share(self, sharing: Sharing) -> None:
        assert sharing.ranks == self.size, sharing
        self._sharing = sharing
        self._settle()

    def compiled(self) -> None:
        """Note that blocks of a network are compiled."""
        self._compiles = True
        self._settle()

    def _settle(self) -> None:
        """Call nothing compiled in a run that shares tokens: an exchange amid a block is no part of its graph."""
        if self._compiles:
            torch.compiler.set_stance("force_eager" if self.shares_tokens else "default")

    @property
    def branch(self) -> int:
        return self.rank // self._sharing.tokens

    @property
    def shares_tokens(self) -> bool:
        return self._sharing.tokens > 1

    @property
    def tokens(self) -> TokenRanks | None:
        """The ranks that share tokens in the next run; None if each has all."""
        return None if self._sharing.tokens == 1 else TokenRanks(self)

    def gather(self, array: Tensor) -> list[Tensor]:
        sets = self._sharing.branches
        if sets == 1:
            return [array]
        with self._exchanging():
            array = array.contiguous()
            results = [torch.empty_like(array) for _ in range(sets)]
            dist.all_gather([_raw(one) for one in results], _raw(array), group=self._with_my_tokens())
        return results

    def summed(self, numbers: Sequence[float]) -> list[float]:
        sent = ops.placed(list(pack(numbers)), self._device)
        every = [torch.empty_like(sent) for _ in range(self.size)]
        with self._exchanging():
            dist.all_gather(every, sent)
        first_set = [unpack(map(int, one.cpu())) for one in every[: self._sharing.tokens]]
        return [sum(each) for each in zip(*first_set, strict=True)]

    def close(self) -> None:
        dist.destroy_process_group()

    def broadcast(self, data: bytes) -> bytes:
        assert len(data) <= BYTES
        with self._exchanging():
            if self.rank == 0:
                self._store.set("broadcast", data.hex())
            return bytes.fromhex(self._store.get("broadcast").decode())

    def swap(self, parts: list[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Exchange parts with the ranks that share tokens, as `TokenRanks.swap`."""
        sent = torch.cat([_raw(part.contiguous()).reshape(-1) for part in parts])
        sizes = [part.numel() * part.element_size() for part in parts]
        dtype = parts[0].dtype
        got = [torch.Size(shape).numel() * dtype.itemsize for shape in shapes]
        received = torch.empty(sum(got), dtype=torch.uint8, device=sent.device)
        with self._exchanging():
            dist.all_to_all_single(received, sent, got, sizes, group=self._with_my_branches())
        return [piece.view(dtype).reshape(shape) for piece, shape in zip(received.split(got), shapes, strict=True)]

    def _with_my_branches(self) -> dist.ProcessGroup | None:
        """Return the ranks of this one's set."""
        parts = self._sharing.tokens
        return _subgroup(tuple(tuple(range(i, i + parts)) for i in range(0, self.size, parts)))

    def _with_my_tokens(self) -> dist.ProcessGroup | None:
        """Return the ranks of all sets that have the same tokens as this one."""
        parts = self._sharing.tokens
        return _subgroup(tuple(tuple(range(i, self.size, parts)) for i in range(parts)))

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        """Raise RankLost for an exchange that fails."""
        try:
            with torch.inference_mode():
                yield
        except RuntimeError as error:  # of gloo, of NCCL and of the store, all of this one class
            self.failing()
            line = " ".join(str(error).split())
            raise RankLost(f"rank {self.rank} of {self.size} no longer reaches the others: {line[:120]}") from None


class TokenRanks:
    """The ranks that share tokens with this one."""

    def __init__(self, group: TorchGroup) -> None:
        parts = group._sharing.tokens
        self.rank, self.size, self.swap = group.rank % parts, parts, group.swap


@cache
def _subgroup(sets: tuple[tuple[int, ...], ...]) -> Any:
    """Return the group of this rank's set, one of `sets`. All ranks create all groups."""
    if len(sets) == 1:
        return None
    mine, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in sets], timeout=timedelta(hours=HOURS))
    return mine


def _raw(x: Tensor) -> Tensor:
    """Return the bytes of x: not every library moves 16-bit numbers."""
    return x.reshape(-1).view(torch.uint8)


# Meeting


def open_store(place: RankPlace) -> Store:
    """Open the store by which ranks meet, on rank 0 as its server unless the launcher has one there. Raises
    UsageError and RankLost."""
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = TCPStore(
            place.host,
            place.port,
            is_master=place.rank == 0 and not served,
            timeout=timedelta(seconds=PATIENCE),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        text = " ".join(str(error).split())
        if "EADDRINUSE" in text or "already in use" in text:
            raise UsageError(f"port {place.port} is in use: give another one as MASTER_PORT") from None
        raise RankLost(f"rank 0 does not answer at {place.host}:{place.port}: {text[:80]}") from None
    return _of_this_start(store)


def local_store() -> tuple[Store, int]:
    """Return a store of this machine alone, and its port, which the system chooses."""
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=PATIENCE), wait_for_workers=False)
    return _of_this_start(store), store.port


def _of_this_start(store: Store) -> Store:
    """Return the section of the store for this start of the ranks: torchrun may start them again."""
    return PrefixStore(f"qwenimg-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _check(store: Store, place: RankPlace) -> None:
    """Check that all ranks have come, each once and with the same number of ranks."""
    try:
        if store.add(f"rank {place.rank}", 1) > 1:
            raise UsageError(f"two processes are rank {place.rank}: each has its own RANK")
        if place.rank == 0:
            store.set("size", str(place.size))
        store.wait(["size"], timedelta(seconds=PATIENCE))
        size = int(store.get("size"))
        if size != place.size:
            raise UsageError(f"rank {place.rank} is one of {place.size} ranks, rank 0 one of {size}: start all alike")
        store.wait([f"rank {rank}" for rank in range(size)], timedelta(seconds=PATIENCE))
    except RuntimeError as error:
        line = " ".join(str(error).split())
        raise RankLost(f"not all {place.size} ranks have come within {PATIENCE:.0f} s ({line[:80]})") from None
