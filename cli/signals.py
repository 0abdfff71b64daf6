"""Ctrl-C, SIGTERM and SIGHUP: the first ends the run at the next step, the second ends the process.

While pictures are drawn a signal is a flag that is looked at after each step. Elsewhere it is an exception, raised in
the main thread wherever that is; where such a place swallows exceptions (a destructor, a callback) it is raised again.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STOPPING = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143}
REPEAT = 0.3  # seconds in which a signal is the first one over again: `timeout` and terminals may send it twice
UNWIND = 0.25  # seconds that a run which is already ending gets, after the second signal, to remove temporary files
TELL = 0.5  # seconds after which a run that has no steps and has not ended says that it is stopping
AGAIN = 0.02  # seconds between two tries to raise an exception that was swallowed
LOST = 0  # the byte that asks for it; no signal has this number


class Stopped(BaseException):
    """Raised in the main thread by the first signal."""


class Stop:
    """Which signal came, if one did, and what it may interrupt."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.raises = False  # whether the handler may raise, wherever the main thread is
        self.lost = False  # whether it did, where no thread noticed
        self.working = False  # whether a command runs, which may take long to stop
        self.drawing = False
        self._begun = time.monotonic()  # of what runs now
        self._steps: list[float] = []  # seconds of those that are done
        self._left = 1  # of the picture that is drawn

    @property
    def exit_code(self) -> int | None:
        return None if self.number is None else STOPPING[signal.Signals(self.number)]

    def check(self) -> None:
        """Raises Stopped if a signal came."""
        if self.number is not None:
            raise Stopped

    @contextmanager
    def waits(self) -> Iterator[None]:
        """While this is open a signal waits for `check` or for the end of a step."""
        before, self.raises, self.drawing = self.raises, False, True
        try:
            yield
        finally:
            self.raises, self.drawing = before, False

    def step(self, index: int, total: int, seconds: float) -> None:
        """Step `index` of `total` is done and took `seconds`."""
        self._begun, self._left = time.monotonic(), total - index
        self._steps.append(seconds)

    def check_step(self) -> None:
        """Raises Stopped if a signal came, but after the last step: that picture is decoded and written first."""
        if self._left:
            self.check()

    def picture(self) -> None:
        """A picture is written. Raises Stopped if a signal came."""
        self._begun, self._left = time.monotonic(), 1
        self.check()

    def words(self) -> str:
        """What happens now, for the one who sent the signal."""
        if not self.drawing:
            return "stopping; again to stop at once (what runs now has no steps: how long it takes is not known)"
        if not self._left:
            return "stopping when this picture is decoded and written; again to stop at once"
        return f"stopping after this step; again to stop at once ({self._how_long()})"

    def _how_long(self) -> str:
        if not self._steps:
            return "no step is done yet: how long one takes is not known"
        mean, count = sum(self._steps) / len(self._steps), len(self._steps)
        left = max(0.0, mean - (time.monotonic() - self._begun))
        done = "1 step so far took" if count == 1 else f"{count} steps so far took, each,"
        return f"in about {left:.0f} s: {done} {mean:.3g} s"

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first = self.number is None
        if first:
            self.number = number
        if self.raises and (first or self.lost):  # another exception would interrupt the cleaning up after the first
            self.lost = False
            raise Stopped


@contextmanager
def watched(*, process: bool = False) -> Iterator[Stop]:
    """Handles the signals while the context is open, in the main thread; those that are ignored stay so.

    `process`: nothing but the end of the process follows, where Ctrl-C shall show no traceback."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    numbers = [n for n in STOPPING if signal.getsignal(n) != signal.SIG_IGN]
    before = {n: signal.getsignal(n) for n in numbers}
    inlet, outlet = os.pipe()
    os.set_blocking(outlet, False)
    wakeup = signal.set_wakeup_fd(outlet, warn_on_full_buffer=False)
    unraisable = sys.unraisablehook
    sys.unraisablehook = _hook(stop, outlet)
    thread = threading.Thread(target=_watch, args=(inlet, stop, frozenset(numbers)), daemon=True)
    thread.start()
    for number in numbers:
        signal.signal(number, stop._handle)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if process else handler)
        signal.set_wakeup_fd(wakeup)
        sys.unraisablehook = unraisable
        os.close(outlet)
        thread.join()
        os.close(inlet)


def _hook(stop: Stop, outlet: int):  # type: ignore[no-untyped-def]  # `sys.UnraisableHookArgs` has no name at run time
    """For `sys.unraisablehook`: a Stopped that a destructor or a callback swallowed is asked for again."""
    before = sys.unraisablehook

    def hook(unraisable) -> None:  # type: ignore[no-untyped-def]
        if unraisable.exc_type is not Stopped:
            before(unraisable)
            return
        stop.raises, stop.lost = False, True
        with suppress(OSError):
            os.write(outlet, bytes([LOST]))
        stop.raises = True  # the last thing here: what is raised in a hook is swallowed as well

    return hook


def _watch(inlet: int, stop: Stop, numbers: frozenset[int]) -> None:
    """Tells what the first signal does, raises again what was swallowed, and ends the process at the second signal, but
    for one that comes within REPEAT of the first.

    Python runs handlers between its own instructions only, so the main thread may sit in one evaluation for minutes;
    the byte that the interpreter writes for each signal reaches this thread at once."""
    poll = select.poll()
    poll.register(inlet, select.POLLIN)
    first, printed, ours = None, False, 0
    while True:
        late = first is not None and time.monotonic() - first >= TELL
        if first is not None and not printed and (stop.drawing or (late and stop.working and stop.raises)):
            printed = True
            _print(f"qwenimg: {stop.words()}")
        wait = None if first is None or printed else TELL
        if stop.lost and stop.number is not None:
            wait = AGAIN
            if stop.raises and not ours:
                ours = 1
                signal.pthread_kill(threading.main_thread().ident or 0, stop.number)
        if not poll.poll(None if wait is None else wait * 1000):
            continue
        data = os.read(inlet, 64)
        if not data:
            return
        for number in data:
            if number not in numbers:
                continue
            if ours:
                ours -= 1
            elif first is None:
                first = time.monotonic()
            elif time.monotonic() - first >= REPEAT:
                time.sleep(UNWIND)
                _print("qwenimg: error: stopped at once by a second signal")
                os._exit(STOPPING[signal.Signals(number)])


def _print(line: str) -> None:
    """Past the buffer of standard error, which the main thread may hold."""
    if sys.stderr is None:  # then the descriptor may be any other file's
        return
    with suppress(OSError):
        bar = b"\r\x1b[K" if os.isatty(2) else b""
        os.write(2, bar + line.encode() + b"\n")
