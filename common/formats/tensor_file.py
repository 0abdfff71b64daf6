"""A tensor of a weight file as a safetensors file of its own, for readers that put such files straight into their
own memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from qwenimg.common.formats.arrays import THREADS, WORTH_A_THREAD
from qwenimg.common.formats.safetensors import entry, head
from qwenimg.common.formats.stored import TensorSlice, fill

NAME = "tensor"
_WHOLE = 4  # bytes of the widest number; no number is split between two threads


class TensorFile:
    """A file object in Python's sense: `read`, `readinto`, `seek`, `tell`.

    An exception here would end the process, since it would be raised in a thread that is not Python's. So errors are
    kept, and `check` raises them.
    """

    closed = False

    def __init__(self, piece: TensorSlice):
        self._piece = piece
        size = piece.end - piece.begin
        self._head = head({NAME: entry(piece.dtype, piece.shape, 0, size)})
        self._size = len(self._head) + size
        self._at = 0
        self._error: Exception | None = None
        self.largest = 0  # bits of the largest absolute value that was read

    def check(self) -> None:
        """Raise ModelError if the file changed or ended early."""
        if self._error is not None:
            raise self._error
        self._piece.file.check_unchanged()

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = (0, self._at, self._size)[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, count: int = -1) -> bytes:
        """Read bytes of the header alone."""
        end = len(self._head) if count < 0 else self._at + count
        text = self._head[self._at : end]
        self._at += len(text)
        return text

    def readinto(self, buffer: memoryview) -> int:
        view = memoryview(buffer).cast("B")
        if self._at < len(self._head):
            text = self.read(len(view))
            view[: len(text)] = text
            return len(text)
        try:
            if self._error is None:
                self._fill(view)
        except Exception as error:
            self._error = error
        self._at += len(view)
        return len(view)

    def _fill(self, view: memoryview) -> None:
        begin = self._piece.begin + self._at - len(self._head)
        step = -(-len(view) // THREADS // _WHOLE) * _WHOLE
        starts = range(0, len(view), step)
        if len(starts) < 2 or step < WORTH_A_THREAD:
            self.largest = max(self.largest, fill(self._piece, view, begin))
            return
        with ThreadPoolExecutor(len(starts)) as pool:
            parts = pool.map(lambda at: fill(self._piece, view[at : at + step], begin + at), starts)
            self.largest = max(self.largest, *parts)
