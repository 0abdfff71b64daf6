"""Texts of errors as clients may read them: a file of this machine is not named to them."""

from __future__ import annotations

import re

from qwenimg.cli.serve.messages import Settings

_PATH = re.compile(r"""(?:^|[\s'"(=:])(?:~|\.{0,2}/|…)[^\s'"]*[/.]""")


def public(text: str, settings: Settings) -> str:
    """Return `text` with LoRAs by their served names, or a text without it if another file is named in it."""
    for name, file in settings.loras.items():
        text = text.replace(file, name)
    return "this cannot be drawn; the server's log says why" if _PATH.search(text) else text
