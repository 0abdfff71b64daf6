"""The images of `--preview` while a picture is drawn: in the terminal, or in a file that is written anew."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from qwenimg.cli import terminal
from qwenimg.common.jobs.pace import PreviewPace

if TYPE_CHECKING:
    from qwenimg import Step
    from qwenimg.common.pictures.pixels import Uint8

ROWS = 12  # of text


def file() -> Path:
    """Return the file for previews where no terminal shows pictures."""
    from platformdirs import user_cache_path

    return user_cache_path("qwenimg") / "preview.png"


class PreviewPrinter:
    """Shows previews of a run, at a pace that costs next to nothing."""

    def __init__(self, *, in_terminal: bool) -> None:
        """Choose between the terminal and a file. in_terminal: this run prints its progress on a terminal."""
        self.terminal = terminal.find() if in_terminal else None
        self._pace = PreviewPace()
        self._number = os.getpid() % 100_000 * 1000  # of the picture in the terminal
        self._is_there = False  # True: the rows above the cursor are those of the picture

    def where(self) -> str:
        """Return a line that names the file; "" for the terminal."""
        return "" if self.terminal else f"the preview is {file()}, written anew as the picture grows"

    def step(self, step: Step) -> None:
        """Show the picture after a step, if a preview is due; never after the last step."""
        if step.index < step.total:
            self._pace.after(step.seconds, lambda: self._show(step.preview()))

    def keep(self) -> None:
        """Leave the shown picture on the terminal: other lines or another picture follow."""
        self._is_there = False

    def _show(self, pixels: Uint8) -> None:
        """Show a picture. Errors of the terminal or the disk are ignored: the run matters more."""
        with contextlib.suppress(OSError, ValueError):
            if self.terminal is None:
                _write(pixels)
                return
            if not self._is_there:
                self._number += 1
                sys.stderr.write("\r\x1b[K" + "\n" * ROWS)
                self._is_there = True
            sys.stderr.flush()
            codes = self.terminal.picture(pixels, ROWS, self._number)
            sys.stderr.buffer.write(b"\x1b7\r\x1b[%dA" % ROWS + codes + b"\x1b8")
            sys.stderr.buffer.flush()


def _write(pixels: Uint8) -> None:
    from qwenimg.common.base.atomic_files import make_folder, write_atomic
    from qwenimg.common.base.errors import QwenimgError
    from qwenimg.common.pictures.png import encode_png

    with contextlib.suppress(QwenimgError):
        make_folder(file().parent, parents=True)
        write_atomic(file(), encode_png(pixels, {}, None), overwrite=True)
