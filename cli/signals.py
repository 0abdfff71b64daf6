"""Ctrl-C, SIGTERM and SIGHUP: the first ends the run at the next step, the second ends the process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STOPPING = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143}
REPEAT = 0.3  # seconds in which a signal is the first one over again: `timeout` and terminals may send it twice
UNWIND = 0.25  # seconds that a run which is already ending gets, after the second signal, to remove temporary files


class Stopped(BaseException):
    """Raised in the main thread by the first signal."""


class Stop:
    """Which signal came, if one did."""

    number: int | None = None

    @property
    def exit_code(self) -> int | None:
        return None if self.number is None else STOPPING[signal.Signals(self.number)]

    def check(self) -> None:
        """Raises Stopped if a signal came whose exception was lost, as one raised in a destructor is."""
        if self.number is not None:
            raise Stopped

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.number is None:  # a second exception would interrupt the cleaning up after the first
            self.number = number
            raise Stopped


@contextmanager
def watched() -> Iterator[Stop]:
    """Handles the signals while the context is open, in the main thread; those that are ignored stay so."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    numbers = [n for n in STOPPING if signal.getsignal(n) != signal.SIG_IGN]
    before = {n: signal.getsignal(n) for n in numbers}
    inlet, outlet = os.pipe()
    os.set_blocking(outlet, False)
    wakeup = signal.set_wakeup_fd(outlet, warn_on_full_buffer=False)
    thread = threading.Thread(target=_watch, args=(inlet, frozenset(numbers)), daemon=True)
    thread.start()
    for number in numbers:
        signal.signal(number, stop._handle)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        os.close(outlet)
        thread.join()
        os.close(inlet)


def _watch(inlet: int, numbers: frozenset[int]) -> None:
    """Ends the process at the second signal, but for one that comes within REPEAT of the first.

    Python runs handlers between its own instructions only, so the main thread may sit in one evaluation for minutes;
    the byte that the interpreter writes for each signal reaches this thread at once."""
    first = None
    while data := os.read(inlet, 64):
        for number in data:
            if number not in numbers:
                continue
            now = time.monotonic()
            if first is None:
                first = now
            elif now - first >= REPEAT:
                time.sleep(UNWIND)
                with suppress(OSError):
                    os.write(2, b"qwenimg: error: stopped at once by a second signal\n")
                os._exit(STOPPING[signal.Signals(number)])
