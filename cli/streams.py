"""Standard output for results, standard error for messages. A failure of either does not end a run."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO

from qwenimg.common.base.text import clean

MAX_LINE = 300  # characters
NAMES_OF_STDOUT = ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")  # files that are standard output


def put(data: bytes) -> None:
    """Write `data` to standard output at once. A closed pipe is no error, since the images are in files. Raises
    OSError."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        silence(sys.stdout)


def say(text: str) -> None:
    """Print one line on standard error, if there is one."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(clean(text, MAX_LINE) + "\n")
        sys.stderr.flush()


def show(text: str) -> None:
    """Print several lines of our own on standard error."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text + "\n")


def can_ask() -> bool:
    """Return whether a question can be asked: a terminal reads and shows everything, and no program reads the
    output."""
    return all(stream is not None and _is_terminal(stream) for stream in (sys.stdin, sys.stdout, sys.stderr))


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def confirm(question: str, *, default: bool) -> bool:
    """Ask on standard error, and return the answer. End of input means no, an empty line `default`."""
    with contextlib.suppress(OSError, ValueError, UnicodeError):
        sys.stderr.write(f"{clean(question, MAX_LINE)} [{'Y/n' if default else 'y/N'}] ")
        sys.stderr.flush()
        answer = sys.stdin.readline()
        return default if answer.strip() == "" and answer else answer.strip().lower() in ("y", "yes")
    return False


def flush() -> None:
    """Flush standard output. Raises OSError, except if its reader has closed it."""
    put(b"")


def forget_unwritten() -> None:
    """Drop output that could not be written: Python would try again at exit and change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            silence(stream)


def silence(stream: TextIO | None) -> None:
    """Redirect `stream` to /dev/null: flushing it at exit would fail again."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        assert stream is not None
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def make_safe() -> None:
    """Make standard output and standard error escape characters that the encoding of the terminal lacks."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
