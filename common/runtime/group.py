"""The ranks of a run: processes that draw one image together, each on a device of its own with the whole model.

Ranks share an evaluation of the network in two ways. Each set of ranks predicts branches of guidance of its own. Within
a set, each rank has a part of the image's tokens and all of the text's, and in an attention all tokens of some heads
(S. A. Jacobs et al., "DeepSpeed Ulysses", 2023).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, Protocol, TypeAlias

from qwenimg.common.base.errors import QwenimgError, UsageError

Array: TypeAlias = Any  # of the backend


class RankLost(QwenimgError):
    """An exchange failed because another rank has ended."""


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """The place of this process among the ranks of a run."""

    rank: int
    size: int  # ranks in all
    local: int = 0  # its number on its machine, and that of its GPU
    neighbours: int = 1  # ranks on its machine, with itself
    host: str = "127.0.0.1"  # the machine of rank 0
    port: int = 0  # of the store on that machine, for torch


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """The division of a run among its ranks."""

    branches: int = 1  # sets of ranks, each of which predicts branches of its own
    tokens: int = 1  # ranks of a set, which share the tokens of an image

    @property
    def ranks(self) -> int:
        return self.branches * self.tokens

    def part(self, tokens: int) -> int:
        """Return the most tokens that a rank gets of `tokens`."""
        return -(-tokens // self.tokens)

    def exchanged(self, width: int, tokens: int) -> int:
        """Return the bytes of queries, keys and values on their way between ranks: sent and received, in float32."""
        return 0 if self.tokens == 1 else 24 * width * self.part(tokens)

    def operations(self, branches: Iterable[float]) -> float:
        """Return the operations of the busiest rank, for the operations of each branch."""
        each = list(branches)
        firsts = range(0, len(each), self.branches)
        return sum(max(each[first : first + self.branches]) for first in firsts) / self.tokens

    @property
    def text(self) -> str:
        """The work of each device, in words; "" for one device."""
        if self.ranks == 1:
            return ""
        shares = {"branches of guidance": self.branches, "image's tokens": self.tokens}
        parts = " and ".join(f"1/{count} of the {name}" for name, count in shares.items() if count > 1)
        return f"each of {self.ranks} devices has the whole model, and computes {parts}"

    def as_json(self) -> dict[str, int]:
        return {"branches": self.branches, "tokens": self.tokens}


ALONE = Sharing()


class Ranks(Protocol):
    """The number of ranks, and what they can share."""

    @property
    def size(self) -> int: ...

    @property
    def by_tokens(self) -> bool:
        """True: they can share tokens too; else only branches."""
        ...


@dataclass(frozen=True)
class PaperRanks:
    """The ranks of a plan."""

    size: int
    by_tokens: bool


class Group(Ranks, Protocol):
    """The ranks of a run as one of them sees them. All ranks call the same methods in the same order."""

    rank: int
    failing: Callable[[], None]  # called when an exchange has failed, before RankLost is raised

    def share(self, sharing: Sharing) -> None:
        """Set how the next run is shared."""
        ...

    @property
    def branch(self) -> int:
        """The number of this rank's set."""
        ...

    @property
    def shares_tokens(self) -> bool:
        """True: a call of the network in this run is one of all ranks of the set."""
        ...

    def gather(self, array: Array) -> list[Array]:
        """Return the arrays of all sets of ranks, which have one shape, in the order of the sets. Raises RankLost."""
        ...

    def summed(self, numbers: Sequence[float]) -> list[float]:
        """Return the sums of `numbers` over the ranks of the first set, the same on all ranks. Raises RankLost."""
        ...

    def broadcast(self, data: bytes) -> bytes:
        """Return the `data` of rank 0, at most 200 bytes. Raises RankLost."""
        ...

    def close(self) -> None:
        """Leave the other ranks."""
        ...


def pack(numbers: Sequence[float]) -> bytes:
    """Return the bytes of `numbers`, in float64, which not every device computes."""
    return struct.pack(f"<{len(numbers)}d", *numbers)


def unpack(data: Iterable[int]) -> list[float]:
    """Return the numbers of the bytes that `pack` made."""
    return [number for (number,) in struct.iter_unpack("<d", bytes(data))]


def sharing(group: Ranks | None, branches: int, heads: int) -> Sharing:
    """Return how the ranks of `group` divide a network with `heads` attention heads that runs `branches` branches of
    guidance. heads: 0 if its tokens cannot be divided. Raises UsageError."""
    if group is None:
        return ALONE
    ranks = group.size
    sets = gcd(ranks, branches) if group.by_tokens and heads else ranks
    parts = ranks // sets
    if sets > branches:
        raise UsageError(
            f"--devices {ranks}: here devices share only the branches of guidance, and this picture has "
            + ("one: give a guidance that is on, or one device" if branches == 1 else f"{branches}: give as many")
        )
    if parts > 1 and heads % parts:
        raise UsageError(
            f"--devices {ranks}: {parts} devices cannot share the {heads} attention heads of this model evenly; "
            f"give {_fitting(ranks, branches, heads)}"
        )
    return Sharing(branches=sets, tokens=parts)


def _fitting(ranks: int, branches: int, heads: int) -> int:
    """Return the largest smaller number of ranks that works."""
    return next(n for n in range(ranks - 1, 0, -1) if heads % (n // gcd(n, branches)) == 0)
