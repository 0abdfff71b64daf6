"""What the options of the command line are called, and those that have values of their own."""

from __future__ import annotations

import click

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.jobs.fields import ALL

DEBUG = ("timing", "shapes")


class _Texts(click.types.StringParamType):
    """A text that may be given again; in a variable of the environment, several are parted by semicolons."""

    envvar_list_splitter = ";"


TEXTS = _Texts()

# Names that other tools use, where every tool that knows the name means the same; they are not in the help.
ALIASES = {
    "disable-metadata": "no-metadata",
    "disable-image-metadata": "no-metadata",
    **{alias: ALL[name].dashed for name in ALL for alias in ALL[name].aliases},
}


def known_name(name: str) -> str:
    """The option's own name for an alias, and for one that is spelled with underscores."""
    plain = name.replace("_", "-") if len(name) > 1 else name
    return ALIASES.get(plain, plain)


def parse_debug(text: str | None) -> tuple[str, ...]:
    """What --debug names. Raises UsageError."""
    parts = tuple(part.strip() for part in text.split(",")) if text is not None else ()
    for part in parts:
        if part not in DEBUG:
            raise UsageError(f"--debug {clean(part, 40)!r} is not one of {', '.join(DEBUG)}")
    return parts
