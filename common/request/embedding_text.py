"""An embedding of a request, and the text of `--embedding`: `[NAME=]FILE`, several separated by semicolons."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from qwenimg.common.base.arguments import home, path_text
from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean

NONE = "none"  # no embedding, also if a configuration has some
MOST = 32
MAX_NAME = 100  # characters


@dataclass(frozen=True)
class Embedding:
    """One embedding, checked on construction. Raises UsageError."""

    source: str  # a file, a folder with one, a hub id, or a name in the folders of --models-dir
    name: str = ""  # in prompts; that of the file if it is empty

    def __post_init__(self) -> None:
        if ";" in f"{self.source}{self.name}" or "=" in self.name:
            shown = clean(self.source, 80)
            raise UsageError(f"embedding {shown}: a semicolon parts embeddings, and = a name from its file")
        if len(self.name) > MAX_NAME or not self.name.isprintable() or self.name != self.name.strip():
            raise UsageError(f"embedding {clean(self.name, 60)!r}: a name has at most {MAX_NAME} printable characters")

    def __str__(self) -> str:
        """Return the text that `parse` reads back as this embedding."""
        return f"{self.name}={self.source}" if self.name or "=" in self.source else self.source


def parse(value: object, files: bool = True) -> tuple[Embedding, ...]:
    """Return the embeddings of a text, a path, or a list of these, in order. files: a file that is there by the whole
    text, with its equals signs, is that file; without it none is looked for. Raises UsageError."""
    values = value if isinstance(value, (list, tuple)) else [value]
    parts = [part for one in values for part in (_texts(one) if isinstance(one, str) else [one])]
    check(parts)
    return tuple(_one(part, files) for part in parts)


def check(embeddings: Sequence[object]) -> None:
    """Raise UsageError for more embeddings than are taken."""
    if len(embeddings) > MOST:
        raise UsageError(f"--embedding: {len(embeddings)} embeddings; at most {MOST} are taken")


def _texts(text: str) -> list[str]:
    return [part.strip() for part in text.split(";") if part.strip() not in ("", NONE)]


def _one(part: object, files: bool) -> Embedding:
    if isinstance(part, Embedding):
        return part
    text = path_text(part)
    if text is None:
        raise UsageError(f"embedding has {clean(type(part).__name__, 40)}; expected FILE, NAME=FILE or a path")
    name, equals, source = text.partition("=")
    if not equals or (files and os.path.lexists(home(text))):
        return Embedding(text)
    if not source.strip():
        raise UsageError(f"--embedding {clean(text, 80)}: no file after the equals sign; write FILE or NAME=FILE")
    return Embedding(source.strip(), name.strip())
