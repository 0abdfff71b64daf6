"""The calls of a denoiser as CUDA graphs: recorded once, then replayed by one launch in place of hundreds.

A graph is of one whole call of a network. It reads its inputs (latents, texts, modulation or time, RoPE, mask) from
memory of its own, which every call fills first, and the result is copied out of it. torch has ready forms of this, and
neither fits. `torch.compile(mode="reduce-overhead")` needs the compiler, makes a graph of every block, and fails where
blocks that are compiled by themselves give to each other (pytorch issue 152887). `make_graphed_callables` takes tensors
only, for one shape, and keeps what autograd needs.

Nothing here has run on a card, so every graph has to show itself: a call in which an input changes for the first time
(the latents in the second call, the text with the next prompt) is also computed kernel by kernel, and where the bits
differ the run goes on without graphs and says so.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from qwenimg.common.base.text import clean
from qwenimg.common.runtime.observers import observed

MOST = 4  # graphs of a model: of guidance in turn, its end, and one more size; each keeps what a call takes
Call = Callable[[], Tensor]


class Graph(Protocol):
    nbytes: int  # that it keeps

    def capture(self, call: Call) -> tuple[Tensor, Tensor]:
        """What `call` gives now, and the memory in which every replay leaves what `call` would give then."""
        ...

    def replay(self) -> None: ...


class CudaGraph:
    """In a memory pool of its own: torch lets graphs share one only where they are replayed in the order in which they
    were captured."""

    def __init__(self) -> None:
        self._graph, self.nbytes = torch.cuda.CUDAGraph(), 0

    def capture(self, call: Call) -> tuple[Tensor, Tensor]:
        """The first call is on a side stream, as torch asks for: what libraries set up when they are first used, and
        what layers keep, must not be in the capture."""
        here, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            first = call()
        here.wait_stream(side)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        with torch.cuda.stream(here), torch.cuda.graph(self._graph):  # a capture that fails leaves its stream on
            made = call()
        self.nbytes = torch.cuda.memory_reserved() - before
        return first, made

    def replay(self) -> None:
        self._graph.replay()


class Recorded:
    """The forward of a model, in place of its own. Weights are where they were when a graph was captured: whoever
    replaces them calls `forget`."""

    def __init__(self, model: torch.nn.Module, make: Callable[[], Graph], tell: Callable[[str], None]):
        """tell: gets one line where it is given up."""
        self._model, self._make, self._tell = weakref.ref(model), make, tell
        self._tapes: dict[Any, Tape] = {}  # the one used last at the end
        self._on = True
        model.forward = self

    @property
    def nbytes(self) -> int:
        return sum(tape.graph.nbytes for tape in self._tapes.values())

    def forget(self) -> None:
        self._tapes.clear()

    def __call__(self, *given: Any) -> Tensor:
        model = self._model()
        assert model is not None
        eager: Callable[..., Tensor] = partial(type(model).forward, model)
        if not self._on or observed():
            return eager(*given)
        try:
            return self._replayed(eager, given)
        except RuntimeError as error:  # of torch, or of the driver
            self._give_up(clean(error, 120))
            return eager(*given)

    def _replayed(self, eager: Callable[..., Tensor], given: tuple[Any, ...]) -> Tensor:
        key = tuple(x if x is None else (x.shape, x.stride(), x.dtype) for x in _leaves(given))
        tape = self._tapes.pop(key, None)
        if tape is None:
            while len(self._tapes) >= MOST:
                del self._tapes[next(iter(self._tapes))]
            tape = self._tapes[key] = Tape(self._make(), given)
            return tape.capture(eager)
        self._tapes[key] = tape
        unseen, made = tape.changed(given), tape(given)
        if unseen:
            right = eager(*given)
            if not torch.equal(made, right):
                self._give_up("a replay gave other bits than the same kernels one by one")
            return right
        return made

    def _give_up(self, reason: str) -> None:
        self._on = False
        self.forget()
        self._tell(f"no CUDA graphs from here on: {reason}; --graphs off asks for none")


class Tape:
    """A call of some shapes: what it reads, what it makes, and the graph between."""

    def __init__(self, graph: Graph, given: tuple[Any, ...]):
        self.graph = graph
        self.inputs = _mapped(_own, given)
        self.fill(given)
        self._last = [weakref.ref(x) for x in _leaves(given) if x is not None]
        self._moved: set[int] = set()  # which of them have changed

    def capture(self, call: Callable[..., Tensor]) -> Tensor:
        """What `call` makes of the inputs that are there."""
        first, self._made = self.graph.capture(lambda: call(*self.inputs))
        return first

    def fill(self, given: tuple[Any, ...]) -> None:
        """Puts `given` where the graph reads: one kernel for all of a dtype, where they are dense."""
        into, what = _tensors(self.inputs), _tensors(given)
        for dtype in {x.dtype for x in into}:
            those = [i for i, x in enumerate(into) if x.dtype == dtype]
            torch._foreach_copy_([into[i] for i in those], [what[i] for i in those])

    def __call__(self, given: tuple[Any, ...]) -> Tensor:
        self.fill(given)
        self.graph.replay()
        return self._made.clone()

    def changed(self, given: tuple[Any, ...]) -> bool:
        """Whether an input of `given` has another value than in the call before, for the first time; before `fill`.

        Values are compared, and the device waited for, only where a tensor is not the one of the call before: the same
        latents come as a new tensor with the other branch of guidance."""
        now, held = ([x for x in _leaves(tree) if x is not None] for tree in (given, self.inputs))
        left = [i for i, x in enumerate(now) if i not in self._moved and x is not self._last[i]()]
        new = {i for i in left if not torch.equal(now[i], held[i])}
        self._last = [weakref.ref(x) for x in now]
        self._moved |= new
        return bool(new)


def _leaves(tree: Any) -> Iterator[Tensor | None]:
    if isinstance(tree, (tuple, list)):
        for part in tree:
            yield from _leaves(part)
    else:
        yield tree


def _tensors(tree: Any) -> list[Tensor]:
    """Each without its broadcast axes."""
    return [_once(x) for x in _leaves(tree) if x is not None]


def _mapped(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    if isinstance(tree, (tuple, list)):
        return type(tree)(_mapped(change, part) for part in tree)
    return None if tree is None else change(tree)


def _own(x: Tensor) -> Tensor:
    """Memory for tensors like x, broadcast where x is."""
    return torch.empty_like(_once(x)).expand(x.shape)


def _once(x: Tensor) -> Tensor:
    return x[tuple(slice(1) if step == 0 else slice(None) for step in x.stride())]
