"""Names of the command line's options, and types of their values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from qwenimg.backends import known
from qwenimg.cli import foreign_words
from qwenimg.common.base.arguments import home
from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.jobs.image_options import ALL
from qwenimg.common.request.option import Option

_F = TypeVar("_F", bound=Callable[..., Any])
DEBUG = ("timing", "shapes")


class _Texts(click.types.StringParamType):
    """A text that may be given several times; in an environment variable the values are separated by semicolons."""

    envvar_list_splitter = ";"


class _File(click.Path):
    """A path that may begin with `~`, which shells do not expand in `--option=~/file` nor in quotes."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(home(value) if isinstance(value, (str, Path)) else value, param, ctx)


TEXTS = _Texts()
FILE = _File(path_type=Path, readable=False)  # an unreadable file is reported later, with its exit code


class Number(click.FloatRange):
    """A number in a range. NaN and infinity are refused, which click accepts."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{clean(value, 40)} is no finite number.", param, ctx)
        return number


class Backend(click.Choice[str]):
    """The name of a backend, or of a GPU such as `cuda:1`. For other programs' names, the error suggests ours."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if known(str(value)):
            return str(value)
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            raise click.BadParameter(
                f"{error.message}{foreign_words.similar_backend(str(value))}", ctx, param
            ) from None


def of_picture(one: Option) -> Callable[[_F], _F]:
    """Return click's option for an option of an image."""
    kind = TEXTS if one.parse is not None else FILE if one.kind is None else str if one.several else one.kind
    spelled, shown = described(one)
    repeated = one.parse is not None or (one.several and kind is FILE)
    return click.option(one.name, *spelled, type=kind, multiple=repeated, **shown)


def of_pictures(*without: str) -> Callable[[_F], _F]:
    """Declare the options of an image, except `without`."""

    def decorated(command: _F) -> _F:
        for name in reversed([name for name in ALL if name not in without]):
            command = of_picture(ALL[name])(command)
        return command

    return decorated


def with_bare_values(args: Sequence[str]) -> list[str]:
    """Add the value to each option that may stand without one (`--preview`), if an option or a prompt follows. Numbers,
    an empty text and a null byte count as a value, which is checked later."""
    bare = {f"--{one.dashed}": one.bare for one in ALL.values() if one.bare is not None}
    filled, following = list[str](), [*args[1:], "x"]
    for arg, after in zip(args, following, strict=False):
        value = bare.get(f"--{known_name(arg[2:])}") if arg.startswith("--") else None
        follows = not after or "\0" in after or after.isdecimal()
        filled.append(arg if value is None or follows else f"{arg}={value}")
        if arg == "--":
            return [*filled, *args[len(filled) :]]
    return filled


def described(one: Option) -> tuple[list[str], dict[str, Any]]:
    """Return the spellings of an option, the short one first, and its metavar and help."""
    text = one.format_help(one.help)
    spelled = sorted((f"--{one.dashed}", *one.flags), key=lambda flag: flag.startswith("--"))
    return spelled, {"metavar": one.metavar, "help": f"{text[:1].upper()}{text[1:]}."}


# Other tools' names with one meaning in all of them; they are not in the help.
ALIASES = {
    "disable-metadata": "no-metadata",
    "disable-image-metadata": "no-metadata",
    "quantise": "quantize",
    "quantization": "quantize",
    "seeds": "seed",
    **{alias: ALL[name].dashed for name in ALL for alias in ALL[name].aliases},
}


def known_name(name: str) -> str:
    """Translate an alias, or a spelling with underscores, to the option's name."""
    plain = name.replace("_", "-") if len(name) > 1 else name
    return ALIASES.get(plain, plain)


def parse_debug(text: str | None) -> tuple[str, ...]:
    """Parse the value of --debug. Raises UsageError."""
    parts = tuple(part.strip() for part in text.split(",")) if text is not None else ()
    for part in parts:
        if part not in DEBUG:
            raise UsageError(f"--debug {clean(part, 40)!r} is not one of {', '.join(DEBUG)}")
    return parts
