"""Handling of Ctrl-C, SIGTERM and SIGHUP: the first ends the run after the current step, if that is short; the second
ends it at once.

No exception is raised at an arbitrary point of the main thread, since foreign code may catch it, and Python runs a
signal's handler only between its own instructions, not within an evaluation of minutes: a handler alone ended a process
7.5 s after the signal, when the product that it computed was done, this thread after 0.01 s (`python
tools/measure_signals.py`). The thread sees each signal, removes temporary files and ends the process: every file of
ours is written so that this may happen at any moment.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

STOPPING = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143}
LONG = 10.0  # seconds; the run does not wait for a longer step
REPEAT = 0.3  # seconds within which a second signal counts as the first: `timeout` and terminals may send it twice
STOPPED = "stopped by a signal; the pictures that were done are kept"


class Stopped(BaseException):
    """Ends the run after a signal. Raised by `Stop.check`."""


class Stop:
    """The signal that came, if any, and the time until which the main thread may end the run itself."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.event: Callable[[int, str], bytes] | None = None  # returns the `error` event of --json
        self.until = 0.0  # a time of the monotonic clock; infinite while a picture whose steps are done is written
        self.hears: Callable[[], None] | None = None  # called by the thread that watches, at the first signal
        self.waited = "what is being drawn"  # what `hears` waits for, in the message
        self.last: Callable[[], None] | None = None  # called before the end of the process by another thread
        self._claimed = False  # True: the main thread ends the run
        self._step = 0.0  # seconds of the last step, or the expected ones
        self._ending = threading.Lock()

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
        """Make the main thread end the run. Never returns if the watching thread already ends the process."""
        with self._ending:
            self.until, self._claimed = math.inf, True

    @contextmanager
    def waits(self, step: float = 0.0) -> Iterator[None]:
        """Let the main thread end the run after a signal in this context, at its next `check`. step: expected seconds
        until that."""
        self._begin(step)
        try:
            yield
        finally:
            if self.number is None:
                self.until = 0.0

    @contextmanager
    def serving(self, hears: Callable[[], None], waited: str = "what is being drawn") -> Iterator[None]:
        """Let a signal in this context call `hears` in the watching thread; the main thread may take any time to end,
        until what is `waited` for is done."""
        self.hears, self.until, self.waited = hears, math.inf, waited
        try:
            yield
        finally:
            self.hears = None
            if self.number is None:
                self.until = 0.0

    def step(self, index: int, total: int, seconds: float) -> None:
        """Record that step `index` of `total` took `seconds`. Raises Stopped after a signal, except after the last
        step: that image is decoded and written first."""
        self._begin(seconds)
        if index == total:
            self.until = math.inf
        else:
            self.check()

    def picture(self) -> None:
        """Record that an image was written. Raises Stopped after a signal."""
        self._begin(self._step)
        self.check()

    def _begin(self, step: float) -> None:
        self._step, self.until = step, 0.0 if step > LONG else time.monotonic() + LONG

    # The thread that watches

    def patience(self) -> float:
        """Return the seconds that the main thread may still take to end the run."""
        return max(0.0, self.until - time.monotonic())

    def words(self) -> str:
        """Return the message for the sender of the signal; "" if the process ends at once."""
        if not self.patience():
            return ""
        if self.hears is not None:
            return f"stopping when {self.waited} is done; again to stop at once"
        what = "after this step" if self.until < math.inf else "when this picture is decoded and written"
        return f"stopping {what}; again to stop at once"

    def end(self, number: int) -> None:
        """End the process after a signal; temporary files are removed."""
        self._end(STOPPING[signal.Signals(number)], STOPPED)

    def fail(self, code: int, text: str) -> None:
        """End the process after an error in another thread, unless the main thread already ends the run. text: empty if
        another process has printed it."""
        with self._ending:
            if not self._claimed:
                self._end(code, text)

    def _end(self, code: int, text: str) -> None:
        """End the process with `code`, even if a callback fails."""
        leftovers = sys.modules.get("qwenimg.common.base.leftovers")  # an import might wait for the main thread's
        remove = getattr(leftovers, "remove_all", None)  # the main thread may just be importing it
        try:
            if self.last is not None:
                _succeeds(self.last)
            if remove is not None:
                _succeeds(remove)
            if text:
                _tell(f"qwenimg: error: {text}")
            if (event := self.event) is not None and sys.stdout is not None:
                _succeeds(lambda: _write(1, event(code, text)))
        finally:
            os._exit(code)

    def end_if_due(self) -> None:
        """End the process unless the main thread may still end the run."""
        with self._ending:
            if self.number is not None and not self.patience():
                self.end(self.number)


@contextmanager
def watched() -> Iterator[Stop]:
    """Watch the signals of this process in this context. Ignored signals stay ignored.

    After the context the process must end: Ctrl-C then shows no traceback."""
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
    """Read signal numbers from `inlet`, where Python writes them at once, and end the process when the time is over."""
    first = 0.0
    while True:
        waits = stop.number is None or stop.until == math.inf
        if not select.select([inlet], [], [], None if waits else stop.patience())[0]:
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
            if stop.hears is not None and not _succeeds(stop.hears):
                stop.end(number[0])
        elif time.monotonic() - first >= REPEAT:
            stop.end(number[0])


def _succeeds(call: Callable[[], object]) -> bool:
    """Call a callback and print its error: it must not end this thread, which has to end the process."""
    try:
        call()
    except BaseException as error:
        _tell(f"qwenimg: error: this is a bug in qwenimg: {type(error).__name__}: {str(error)[:150]}")
        return False
    return True


def _tell(line: str) -> None:
    if sys.stderr is not None:  # else the descriptor may be any other file's
        _write(2, (b"\r\x1b[K" if os.isatty(2) else b"") + line.encode("utf-8", "replace") + b"\n")


def _write(descriptor: int, data: bytes) -> None:
    """Write without Python's buffer, whose lock the main thread may hold; skip the text if the descriptor is not
    ready."""
    with suppress(OSError):
        if select.select([], [descriptor], [], 0)[1]:
            os.write(descriptor, data)
