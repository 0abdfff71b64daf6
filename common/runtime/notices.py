"""Messages of the library to its user, of which the warnings are also kept for recipes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

MOST = 50  # warnings that a recipe has


class Notices:
    """A function of messages, (kind, text), that passes them on and keeps the warnings: those of a picture while it is
    drawn, and those in between, which hold for every later picture, such as the ones of opening a model."""

    def __init__(self, notify: Callable[[str, str], None]) -> None:
        self._notify = notify
        self._lasting: dict[str, None] = {}
        self._of_picture: dict[str, None] | None = None  # None: none is drawn

    def __call__(self, kind: str, text: str) -> None:
        if kind == "warning":
            kept = self._lasting if self._of_picture is None else self._of_picture
            if len(kept) < MOST:
                kept[text] = None
        self._notify(kind, text)

    @contextmanager
    def of_picture(self) -> Iterator[None]:
        """Keep the warnings in the context for one picture alone."""
        self._of_picture = {}
        try:
            yield
        finally:
            self._of_picture = None

    @property
    def warnings(self) -> list[str]:
        """The warnings that hold for the picture that is drawn, each once."""
        return [*(self._lasting | (self._of_picture or {}))][:MOST]
