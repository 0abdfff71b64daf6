"""Pictures in a terminal, by the first protocol that it reports to support: kitty's, iTerm2's or sixel."""

from __future__ import annotations

import contextlib
import os
import re
import select
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from qwenimg.common.pictures.pixels import Uint8

Protocol = Literal["kitty", "iterm", "sixel"]

WAIT = 0.5  # seconds for the terminal's answer
CELL = 20  # pixels of a row of text, where the terminal does not say
# Does it know kitty's pictures? What is its name? How high is a row? What is it? Every terminal answers the last one.
_ASK = b"\x1b_Gi=31,s=1,v=1,a=q,t=d,f=24;AAAA\x1b\\\x1b[>q\x1b[16t\x1b[c"
_IDENTITY = re.compile(rb"\x1b\[\?([\d;]*)c")
_CELL = re.compile(rb"\x1b\[6;(\d{1,4});\d{1,4}t")


@dataclass(frozen=True)
class Terminal:
    """A terminal that shows pictures."""

    protocol: Protocol
    cell: int = CELL  # pixels of a row of text

    def picture(self, pixels: Uint8, rows: int, number: int) -> bytes:
        """Return the escape codes that show pixels [h, w, 3] in `rows` text rows from the cursor on. number: an id; a
        picture of the same id is replaced."""
        from qwenimg.common.pictures import in_terminal

        if self.protocol == "kitty":
            return in_terminal.kitty(pixels, rows, number)
        if self.protocol == "iterm":
            return in_terminal.iterm(pixels, rows)
        return in_terminal.sixel(pixels, rows * self.cell)


def find() -> Terminal | None:
    """Return the terminal of this process, if it can show pictures and the process is in its foreground."""
    with contextlib.suppress(OSError, termios.error):
        descriptor = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            if os.tcgetpgrp(descriptor) == os.getpgrp():  # in the background, asking would stop the process
                return parse_answer(ask(descriptor))
        finally:
            os.close(descriptor)
    return None


def parse_answer(answer: bytes) -> Terminal | None:
    """Parse the `answer` of a terminal; None if it cannot show pictures."""
    cell = _CELL.search(answer)
    height = int(cell[1]) if cell and int(cell[1]) else CELL
    identity = _IDENTITY.search(answer)
    if b"\x1b_Gi=31;OK" in answer:
        return Terminal("kitty", height)
    if re.search(rb">\|(iTerm2|WezTerm)\b", answer):
        return Terminal("iterm", height)
    if identity and b"4" in identity[1].split(b";")[1:]:
        return Terminal("sixel", height)
    return None


def ask(descriptor: int) -> bytes:
    """Query the terminal and return its answer, empty if none comes in time."""
    answer = b""
    with _unbuffered(descriptor):
        os.write(descriptor, _ASK)
        until = time.monotonic() + WAIT
        while not _IDENTITY.search(answer):
            left = until - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                break
            answer += os.read(descriptor, 1024)
    return answer


@contextlib.contextmanager
def _unbuffered(descriptor: int) -> Iterator[None]:
    """Turn off line buffering and echo of the terminal in this context."""
    before = termios.tcgetattr(descriptor)
    changed = [*before]
    changed[3] = before[3] & ~(termios.ICANON | termios.ECHO)
    termios.tcsetattr(descriptor, termios.TCSANOW, changed)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)
