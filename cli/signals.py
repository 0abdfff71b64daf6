"""Ctrl-C, SIGTERM and SIGHUP: the first ends the run, after the step that runs if that is short; the second ends it at
once.

Nothing is raised where the main thread happens to be, since foreign code may catch what is raised, and Python runs a
signal's handler between its own instructions only, not within an evaluation of minutes. A thread sees each signal,
removes temporary files and ends the process: every file of ours is written so that this may happen at any moment.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

STOPPING = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143}
LONG = 10.0  # seconds: a step that takes longer is not waited for
REPEAT = 0.3  # seconds in which a signal is the first one over again: `timeout` and terminals may send it twice
STOPPED = "stopped by a signal; the pictures that were done are kept"


class Stopped(BaseException):
    """Raised by `Stop.check` once a signal has come."""


class Stop:
    """Which signal came, if one did, and how long the main thread gets to end by itself."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.event: Callable[[int], bytes] | None = None  # gives the `error` event of --json for an exit code
        self.drawing = False
        self._begun = time.monotonic()  # of the step that runs
        self._steps: list[float] = []  # seconds of those that are done
        self._expected = 0.0  # seconds of one, before any is done
        self._left = 1  # steps of the picture
        self._ending = threading.Lock()
        self._claimed = False  # whether the main thread ends the run

    @property
    def exit_code(self) -> int | None:
        return None if self.number is None else STOPPING[signal.Signals(self.number)]

    # The main thread

    def check(self) -> None:
        """Raise Stopped if a signal came."""
        if self.number is not None:
            self.claim()
            raise Stopped

    def claim(self) -> None:
        """End the run in the main thread. Does not return where the other thread is ending the process already."""
        with self._ending:
            self._claimed = True

    @contextmanager
    def waits(self, step: float = 0.0) -> Iterator[None]:
        """Let a signal wait for `check` in this context. step: seconds that one is expected to take."""
        self._begun, self._expected, self.drawing = time.monotonic(), step, True
        try:
            yield
        finally:
            self.drawing = False

    def step(self, index: int, total: int, seconds: float) -> None:
        """Note that step `index` of `total` is done and took `seconds`."""
        self._begun, self._left = time.monotonic(), total - index
        self._steps.append(seconds)

    def check_step(self) -> None:
        """Raise Stopped if a signal came, but after the last step: that picture is decoded and written first."""
        if self._left:
            self.check()

    def picture(self) -> None:
        """Note that a picture is written. Raise Stopped if a signal came."""
        self._begun, self._left = time.monotonic(), 1
        self.check()

    # The thread that watches

    def patience(self) -> float | None:
        """Return how many seconds the main thread may still take to end the run; None: as many as it needs."""
        if self._claimed or (self.drawing and not self._left):
            return None
        if not self.drawing or self._step_seconds() > LONG:
            return 0.0
        return max(0.0, LONG - (time.monotonic() - self._begun))

    def words(self) -> str:
        """Return what happens now, for the one who sent the signal; empty where the process ends at once."""
        if self.patience() == 0:
            return ""
        if not self._left:
            return "stopping when this picture is decoded and written; again to stop at once"
        return f"stopping after this step; again to stop at once ({self._how_long()})"

    def end(self, number: int) -> None:
        """End the process, with nothing temporary left behind."""
        leftovers = sys.modules.get("qwenimg.common.base.leftovers")  # an import might wait for the main thread's
        if leftovers is not None:
            leftovers.remove_all()
        code = STOPPING[signal.Signals(number)]
        _tell(f"qwenimg: error: {STOPPED}")
        if self.event is not None and sys.stdout is not None:
            _write(1, self.event(code))
        os._exit(code)

    def end_if_due(self) -> None:
        """End the process unless the main thread may still end the run."""
        with self._ending:
            if self.number is not None and self.patience() == 0:
                self.end(self.number)

    def _step_seconds(self) -> float:
        return sum(self._steps) / len(self._steps) if self._steps else self._expected

    def _how_long(self) -> str:
        seconds, count = self._step_seconds(), len(self._steps)
        if not seconds:
            return f"no step is done yet; {LONG:.0f} s at most"
        left = max(0.0, seconds - (time.monotonic() - self._begun))
        so_far = "1 step so far took" if count == 1 else f"{count} steps so far took, each,"
        return f"in about {left:.0f} s: {so_far if count else 'a step is expected to take'} {seconds:.3g} s"


@contextmanager
def watched() -> Iterator[Stop]:
    """Watch the signals of this process while the context is open; those that are ignored stay so.

    Only the end of the process may follow: Ctrl-C then shows no traceback."""
    stop = Stop()
    numbers = [number for number in STOPPING if signal.getsignal(number) != signal.SIG_IGN]
    inlet, outlet = os.pipe()
    os.set_blocking(outlet, False)
    signal.set_wakeup_fd(outlet, warn_on_full_buffer=False)
    thread = threading.Thread(target=_watch, args=(inlet, stop), daemon=True)
    thread.start()
    for number in numbers:
        signal.signal(number, lambda number, frame: None)
    try:
        yield stop
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        os.close(outlet)
        thread.join()
        os.close(inlet)


def _watch(inlet: int, stop: Stop) -> None:
    """Read each signal's number from `inlet`, where Python writes it at once, and end the process when that is due."""
    first = 0.0
    while True:
        if not select.select([inlet], [], [], None if stop.number is None else stop.patience())[0]:
            stop.end_if_due()
            continue
        number = os.read(inlet, 1)
        if not number:
            return
        if number[0] not in STOPPING:
            continue
        if stop.number is None:
            first, stop.number = time.monotonic(), number[0]
            if words := stop.words():
                _tell(f"qwenimg: {words}")
        elif time.monotonic() - first >= REPEAT:
            stop.end(number[0])


def _tell(line: str) -> None:
    if sys.stderr is not None:  # else the descriptor may be any other file's
        _write(2, (b"\r\x1b[K" if os.isatty(2) else b"") + line.encode() + b"\n")


def _write(descriptor: int, data: bytes) -> None:
    """Write past Python's buffer, which the main thread may hold, but not where that would wait for a reader."""
    with suppress(OSError):
        if select.select([], [descriptor], [], 0)[1]:
            os.write(descriptor, data)
