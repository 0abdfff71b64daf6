"""One run at a time on a pipeline: a call that finds it busy is refused at once, or waits in line for its turn.

A dropped stream releases its turn from the garbage collector, which may run within any statement of any thread. So
nothing here holds a lock while it changes the line: each change is one operation on a list.
"""

from __future__ import annotations

import inspect
import math
import os
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from threading import Lock, get_ident
from typing import Generic, TypeVar
from weakref import WeakSet

from qwenimg.common.base import forked
from qwenimg.common.base.errors import PipelineBusy, UsageError

E = TypeVar("E")
BUSY = "this pipeline is busy with another picture"


@dataclass(eq=False)
class Turn:
    """A place in the queue. `thread` runs it; `gate` opens when the place reaches the head."""

    thread: int = field(default_factory=get_ident)
    gate: Lock = field(default_factory=Lock)


class FairLock(Generic[E]):
    """The line of a pipeline: its head runs, the others wait. Its streams yield `E`."""

    def __init__(self) -> None:
        self.closed, self._process = False, os.getpid()
        self._line: list[Turn] = []
        self._streams: WeakSet[Generator[E, None, None]] = WeakSet()

    def check_process(self) -> None:
        """Raise UsageError in a forked child, where no framework has threads to compute with."""
        forked.check(self._process)

    def check_open(self) -> None:
        """Raise UsageError once the pipeline is closed."""
        if self.closed:
            raise UsageError("this pipeline is closed; load the model again with qwenimg.load")

    def check_free(self) -> None:
        """Raise PipelineBusy during a run, and UsageError once the pipeline is closed or in a forked child."""
        self.check_process()
        if self._line:
            raise PipelineBusy(f"{BUSY}: wait for it (wait=True), close its stream, or load a second pipeline")
        self.check_open()

    @contextmanager
    def acquired(self, timeout: float = 0.0) -> Iterator[Turn]:
        """Hold the turn, after at most `timeout` seconds of waiting. Raises PipelineBusy, and UsageError once the
        pipeline is closed."""
        if not timeout:
            self.check_free()
        with self._placed(timeout, overtakes=False) as turn:
            self.check_open()
            yield turn

    def run(self, events: Generator[E, None, None], timeout: float) -> Generator[E, None, None]:
        """Return `events` as a stream that holds the turn from its first event to its end."""
        stream = self._run(events, timeout)
        self._streams.add(stream)
        return stream

    def end_mine(self) -> None:
        """Close the stream that holds the turn if the calling thread runs it."""
        if self._is_mine():
            for stream in list(self._streams):
                if inspect.getgeneratorstate(stream) == inspect.GEN_SUSPENDED:
                    stream.close()

    @contextmanager
    def closing(self, timeout: float) -> Iterator[bool]:
        """Hold the turn, before all that wait, and leave the pipeline closed. Yields whether it was open. Raises
        PipelineBusy."""
        if self._line and not timeout:
            self.check_free()
        with self._placed(timeout, overtakes=True):
            was_open, self.closed = not self.closed, True
            yield was_open

    def _run(self, events: Generator[E, None, None], timeout: float) -> Generator[E, None, None]:
        with self.acquired(timeout) as turn, closing(events):
            for event in events:
                yield event
                turn.thread = get_ident()

    def _is_mine(self) -> bool:
        """Return whether the calling thread runs the head of the line."""
        return [head.thread for head in self._line[:1]] == [get_ident()]

    @contextmanager
    def _placed(self, timeout: float, *, overtakes: bool) -> Iterator[Turn]:
        """Wait in the queue, at its end (or right after its head), and hold the lock when its turn comes."""
        self.check_process()
        turn = Turn()
        turn.gate.acquire()
        try:
            if overtakes:
                self._line.insert(1, turn)
            else:
                self._line.append(turn)
            self._await(turn, timeout)
            yield turn
        finally:
            self._leave(turn)

    def _await(self, turn: Turn, timeout: float) -> None:
        end = time.monotonic() + timeout
        while self._line[0] is not turn:
            if self._is_mine():
                raise PipelineBusy(f"{BUSY}, which this same thread draws: end or close its stream first")
            rest = -1 if math.isinf(timeout) else max(0.0, end - time.monotonic())
            if not turn.gate.acquire(timeout=rest) and self._line[0] is not turn:
                raise PipelineBusy(f"{BUSY}, still after {timeout:g} s of waiting")

    def _leave(self, turn: Turn) -> None:
        """Take `turn` out of the line, and open the gate of the place that is at the head now."""
        with suppress(ValueError):  # interrupted before it stood in line
            self._line.remove(turn)
        with suppress(IndexError, RuntimeError):  # nobody waits; the gate is open already
            self._line[0].gate.release()
