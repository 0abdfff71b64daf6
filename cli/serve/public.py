"""Error messages for clients, without paths of this machine."""

from __future__ import annotations

import re
from collections.abc import Mapping

from qwenimg.cli.serve.settings import Settings

_PATH = re.compile(r"""(?:^|[\s'"(=:])(?:~|\.{0,2}/|…)[^\s'"]*[/.]""")
SHORTEST = 16  # characters of a path that a message has cut
HIDDEN = "this cannot be drawn; the server's log says why"


def public(text: str, settings: Settings) -> str:
    """Return `text` with served names in place of paths; a general text if it still names a file."""
    for files in (settings.loras, settings.embeddings, settings.controls, settings.upscalers):
        text = named(text, files)
    return HIDDEN if _PATH.search(text) else text


def named(text: str, files: Mapping[str, str]) -> str:
    """Replace the paths of `files` in `text` by their served names, longer paths first. Messages may have cut a long
    path at its start or its end."""
    for name in sorted(files, key=lambda name: -len(files[name])):
        path = files[name]
        text = text.replace(path, name)
        for length in range(len(path) - 1, SHORTEST, -1) if "…" in text else ():
            text = text.replace(f"{path[:length]}…", name).replace(f"…{path[-length:]}", name)
    return text
