"""The line of a pipeline without a pipeline: who waits gets the turn in the order of arrival, whatever ends a run."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from qwenimg import PipelineBusy, UsageError
from qwenimg.common.pipeline.fair_lock import FairLock

WAIT = 60  # seconds, for a test that hangs; nothing is measured with it
FOREVER = float("inf")


def until(true: Callable[[], bool]) -> None:
    """Wait for a state of another thread."""
    for _ in range(WAIT * 1000):
        if true():
            return
        threading.Event().wait(0.001)
    raise AssertionError("it did not happen")


class Line:
    """FairLock, and threads that stand in line in the order in which they are sent."""

    def __init__(self, pool: ThreadPoolExecutor):
        self.lock: FairLock[int] = FairLock()
        self.pool = pool
        self.order: list[str] = []

    def send(self, name: str, patience: float = FOREVER) -> Future[None]:
        before = [*self.lock._line]
        future = self.pool.submit(self.run, name, patience)
        until(lambda: any(turn not in before for turn in [*self.lock._line]) or future.done())
        return future

    def run(self, name: str, patience: float) -> None:
        with self.lock.acquired(patience):
            self.order.append(name)


@pytest.fixture
def line() -> Iterator[Line]:
    with ThreadPoolExecutor(8) as pool:
        yield Line(pool)


def test_those_who_wait_are_served_in_the_order_of_arrival(line: Line) -> None:
    names = [f"number {i}" for i in range(6)]
    with line.lock.acquired():
        waiting = [line.send(name) for name in names]
        assert line.order == []
    for future in waiting:
        future.result(WAIT)
    assert line.order == names and line.lock._line == []


def test_a_run_that_fails_passes_the_turn_on(line: Line) -> None:
    with pytest.raises(ZeroDivisionError), line.lock.acquired():
        waiting = line.send("next")
        raise ZeroDivisionError
    waiting.result(WAIT)
    assert line.order == ["next"]


def test_who_waits_no_longer_leaves_the_line_to_the_others(line: Line) -> None:
    with line.lock.acquired():
        impatient, patient = line.send("impatient", 0.01), line.send("patient")
        with pytest.raises(PipelineBusy, match=r"still after 0\.01 s of waiting"):
            impatient.result(WAIT)
        assert not patient.done()
    patient.result(WAIT)
    assert line.order == ["patient"]


def test_without_patience_a_call_is_refused_at_once(line: Line) -> None:
    with line.lock.acquired():
        with pytest.raises(PipelineBusy, match="wait for it"):
            line.send("at once", 0).result(WAIT)
        assert len(line.lock._line) == 1


def test_a_thread_that_draws_does_not_wait_for_itself(line: Line) -> None:
    with line.lock.acquired():
        with pytest.raises(PipelineBusy, match="this same thread"), line.lock.acquired(FOREVER):
            pass
        waiting = line.send("next")
    waiting.result(WAIT)


def test_closing_comes_before_those_who_wait(line: Line) -> None:
    closed: list[bool] = []

    def close() -> None:
        with line.lock.closing(FOREVER) as was_open:
            closed.append(was_open)

    with line.lock.acquired():
        waiting = [line.send("first"), line.send("second")]
        with pytest.raises(PipelineBusy), line.lock.closing(0):
            pass
        closer = line.pool.submit(close)
        until(lambda: len(line.lock._line) == 4)
    closer.result(WAIT)
    for future in waiting:
        with pytest.raises(UsageError, match="closed"):
            future.result(WAIT)
    assert closed == [True] and line.order == [] and line.lock._line == []
    with line.lock.closing(0) as was_open:
        assert not was_open


@contextmanager
def raising(number: int) -> Iterator[type[Exception]]:
    class Signalled(Exception):
        pass

    def handle(number: int, frame: Any) -> None:
        raise Signalled

    before = signal.signal(number, handle)
    try:
        yield Signalled
    finally:
        signal.signal(number, before)


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals reach the main thread")
def test_a_signal_takes_the_one_who_waits_out_of_the_line(line: Line) -> None:
    go_on, main = threading.Event(), threading.main_thread().ident
    assert main is not None

    def draw() -> None:
        with line.lock.acquired():
            assert go_on.wait(WAIT)

    def interrupt() -> None:
        until(lambda: len(line.lock._line) == 2)
        signal.pthread_kill(main, signal.SIGUSR1)

    drawing = line.pool.submit(draw)
    until(lambda: len(line.lock._line) == 1)
    with raising(signal.SIGUSR1) as signalled:
        line.pool.submit(interrupt)
        with pytest.raises(signalled), line.lock.acquired(FOREVER):
            pass
    assert len(line.lock._line) == 1
    waiting = line.send("next")
    go_on.set()
    drawing.result(WAIT)
    waiting.result(WAIT)
    assert line.order == ["next"]


def numbers() -> Generator[int, None, None]:
    yield from (1, 2, 3)


@pytest.mark.parametrize("end", ["close", "drop", "cycle"])
@pytest.mark.sample(1)
def test_a_stream_that_is_given_up_passes_the_turn_on(line: Line, end: str) -> None:
    stream: Any = line.lock.run(numbers(), 0)
    assert next(stream) == 1
    waiting = line.send("next")
    if end == "close":
        stream.close()
    elif end == "cycle":  # which only the garbage collector frees, inside of any statement
        holder = [stream]
        holder.append(holder)
        del holder
    del stream
    gc.collect()
    waiting.result(WAIT)
    assert line.order == ["next"]


def test_a_stream_may_be_driven_by_one_thread_after_another(line: Line) -> None:
    """The thread that began it may wait for its turn then: it is not the one that it waits for."""
    stream = line.lock.run(numbers(), 0)
    assert next(stream) == 1

    def go_on() -> list[int]:
        found = [next(stream)]
        until(lambda: len(line.lock._line) == 2)
        return [*found, *stream]

    rest = line.pool.submit(go_on)
    until(lambda: line.lock._line[0].thread != threading.get_ident())
    with line.lock.acquired(FOREVER):
        assert rest.result(WAIT) == [2, 3]


def test_only_a_stream_of_this_thread_is_ended(line: Line) -> None:
    mine = line.lock.run(numbers(), 0)
    next(mine)
    line.pool.submit(line.lock.end_mine).result(WAIT)
    assert next(mine) == 2
    line.lock.end_mine()
    assert list(mine) == [] and line.lock._line == []
