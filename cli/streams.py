"""Standard output for results, standard error for messages. Neither can end a run that makes pictures."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO

from qwenimg.common.base.text import clean

MAX_LINE = 300  # characters
NAMES_OF_STDOUT = ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")  # that a file's name stands for


def put(data: bytes) -> None:
    """Writes `data` to standard output at once.

    A reader that has gone is no error, for the pictures are in files. Raises OSError for any other failure."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        silence(sys.stdout)


def say(text: str) -> None:
    """One printable line on standard error; nothing where there is none."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(clean(text, MAX_LINE) + "\n")
        sys.stderr.flush()


def show(text: str) -> None:
    """Lines of ours on standard error."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text + "\n")


def flush() -> None:
    """Writes out what is buffered for standard output. Raises OSError, but not for a reader that has gone."""
    put(b"")


def forget_unwritten() -> None:
    """Drops what could not be written: Python would try again as it exits, fail, and end with a code of its own."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            silence(stream)


def silence(stream: TextIO | None) -> None:
    """Sends `stream` to nowhere: what is still in its buffer would fail again when Python exits."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        assert stream is not None
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def make_safe() -> None:
    """Text that the terminal's encoding cannot show is escaped instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
