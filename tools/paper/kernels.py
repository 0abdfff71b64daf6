"""What a forward asks of a device: its kernels with their bytes and operations, in order; and what fusing makes of it.

`torch_kernels.py` and `mlx_kernels.py` count them without computing anything. Views are no kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

from qwenimg.common.precision.precision import Precision

Kind = Literal["product", "attention", "memory"]


class Span(NamedTuple):
    """A part of a buffer that a kernel reads or writes; what is broadcast counts once."""

    buffer: int
    begin: int  # below 0 where the same is read for a second time
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Kernel:
    name: str
    kind: Kind  # of `product` are matrix products and convolutions; `memory` is bound by what it moves
    dtype: str
    shape: tuple[int, ...]  # of its first result
    given: tuple[tuple[int, ...], ...] = ()  # shapes of what it reads, in the framework's order
    flops: float = 0.0
    reads: tuple[Span, ...]
    writes: tuple[Span, ...]
    region: int  # kernels of one region may be fused
    launches: int = 1

    @property
    def nbytes(self) -> int:
        return sum(span.nbytes for span in (*self.reads, *self.writes))

    @property
    def looks_twice(self) -> bool:
        """As a group norm does: for its moments, and for its use."""
        return any(span.begin < 0 for span in self.reads)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a network is run on."""

    height: int  # in latents
    width: int
    text: int = 0  # tokens of the text
    branches: int = 1  # of guidance, in one batch


class Counts(Protocol):
    """What counts the kernels of one call of a network: a denoiser's prediction, a VAE's decoding."""

    def __call__(self, network: str, config: object, precision: Precision, case: Case) -> list[Kernel]: ...


def fused(kernels: Sequence[Kernel]) -> list[Kernel]:
    """`kernels` with those merged that a compiler makes one of: memory-bound kernels of one region of which one reads
    what the other wrote, with no product or attention in between, or which mostly read the same. A merged kernel reads
    what comes from outside once, and writes what is used outside."""
    kernels = _inlined(kernels)
    groups = _groups(kernels)
    readers: dict[int, set[int]] = {}
    for i, kernel in enumerate(kernels):
        for span in kernel.reads:
            readers.setdefault(span.buffer, set()).add(groups[i])
    members: dict[int, list[Kernel]] = {}
    for i, kernel in enumerate(kernels):
        members.setdefault(groups[i], []).append(kernel)
    return [_merged(group, those, readers) if len(those) > 1 else those[0] for group, those in members.items()]


def _inlined(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Without the memory-bound kernels on what a region is given, such as a gain plus one or a table in another dtype:
    a compiler makes them anew in each kernel that reads them."""
    readers: dict[int, list[Kernel]] = {}
    for kernel in kernels:
        for span in kernel.reads:
            readers.setdefault(span.buffer, []).append(kernel)
    written: dict[int, int] = {}
    sources: dict[int, tuple[Span, ...]] = {}
    left = []
    for kernel in kernels:
        reads = tuple(dict.fromkeys(span for read in kernel.reads for span in _sources(read, sources)))
        kernel = replace(kernel, reads=reads)
        buffers = {span.buffer for span in kernel.writes}
        users = [user for buffer in buffers for user in readers.get(buffer, ())]
        given = all(written.get(span.buffer) != kernel.region for span in reads)
        alike = all(user.kind == "memory" and user.region == kernel.region for user in users)
        if kernel.kind == "memory" and not kernel.looks_twice and users and given and alike:
            sources |= dict.fromkeys(buffers, reads)
        else:
            left.append(kernel)
            written |= dict.fromkeys(buffers, kernel.region)
    return left


def _sources(read: Span, sources: dict[int, tuple[Span, ...]]) -> tuple[Span, ...]:
    """What is read in the place of `read`; a second time, where that is a second time."""
    found = sources.get(read.buffer)
    if found is None:
        return (read,)
    return tuple(_again(span) for span in found) if read.begin < 0 else found


def _again(span: Span) -> Span:
    return span._replace(begin=-1 - span.begin)


def _groups(kernels: Sequence[Kernel]) -> list[int]:
    """Of each kernel the first one of its group. `depth` is how many products and attentions lie on the way to it, so
    that a group never waits for one that waits for it."""
    parent = list(range(len(kernels)))

    def first(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    writer: dict[int, int] = {}
    reader: dict[Span, int] = {}  # the last one that reads mostly this
    depth: list[int] = []
    for i, kernel in enumerate(kernels):
        before = {writer[span.buffer] for span in kernel.reads if span.buffer in writer}
        depth.append(max((depth[j] + (kernels[j].kind != "memory") for j in before), default=0))
        mostly = max(kernel.reads, key=lambda span: span.nbytes, default=None)
        beside = {reader[mostly]} if mostly in reader else set[int]()
        for j in before | beside:
            alike = kernels[j].kind == kernel.kind == "memory" and kernels[j].region == kernel.region
            if alike and depth[j] == depth[i]:
                low, high = sorted((first(i), first(j)))
                parent[high] = low
        if mostly is not None and kernel.kind == "memory":
            reader[mostly] = i
        writer |= dict.fromkeys((span.buffer for span in kernel.writes), i)
    return [first(i) for i in range(len(kernels))]


def _merged(group: int, kernels: Sequence[Kernel], readers: dict[int, set[int]]) -> Kernel:
    made: set[int] = set()
    reads, writes = list[Span](), list[Span]()
    for kernel in kernels:
        reads += [span for span in kernel.reads if span.buffer not in made]
        if kernel.looks_twice and any(span.buffer in made for span in kernel.reads):
            # what is made on the way is made anew each time, and what that reads is read twice too
            reads += [_again(span) for span in reads]
        writes += [span for span in kernel.writes if readers.get(span.buffer, set()) != {group}]
        made |= {span.buffer for span in kernel.writes}
    last = kernels[-1]
    return Kernel(
        name="+".join(kernel.name for kernel in kernels),
        kind="memory",
        dtype=last.dtype,
        shape=last.shape,
        reads=tuple(dict.fromkeys(reads)),
        writes=tuple(dict.fromkeys(writes)),
        region=last.region,
        launches=max(kernel.launches for kernel in kernels),
    )
