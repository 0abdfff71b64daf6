"""The user's own defaults: `config.toml` in the user's configuration folder. Flags and the environment come before it."""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Mapping
from pathlib import Path

import click
from click.core import ParameterSource

from qwenimg.common.errors import UsageError, clean

MAX_BYTES = 64 << 10
# Seeds, prompts and files belong to one run.
KEYS: Mapping[str, tuple[type, ...]] = {
    "model": (str,),
    "backend": (str,),
    "precision": (str,),
    "negative_prompt": (str,),
    "size": (str,),
    "aspect": (str,),
    "steps": (int,),
    "guidance": (int, float),
    "output": (str,),
    "offline": (bool,),
    "no_metadata": (bool,),
    "quiet": (bool,),
}


def path() -> Path:
    """Where the file is, whether or not it exists."""
    from platformdirs import user_config_path

    return user_config_path("qwenimg", appauthor=False) / "config.toml"


def defaults() -> dict[str, object]:
    """What the file says, by click's names of the options; nothing where there is none. Raises UsageError."""
    file = path()
    if not file.exists():
        return {}
    try:
        data = tomllib.loads(_read(file).decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{clean(file)}: is not TOML: {clean(error, 80)}") from None
    found: dict[str, object] = {}
    for key, value in data.items():
        name = key.replace("-", "_")
        if name not in KEYS:
            raise UsageError(f"{clean(file)}: unknown option {clean(key, 40)!r}; known are {', '.join(KEYS)}")
        if type(value) not in KEYS[name]:
            kinds = " or ".join(kind.__name__ for kind in KEYS[name])
            raise UsageError(f"{clean(file)}: {name} is {clean(value, 40)!r}; expected {kinds}")
        found[name] = value
    return found


def forget(ctx: click.Context, given: dict[str, object], asked: bool) -> None:
    """Takes back defaults of the file that what was `asked` for on this run replaces: a size by another way of giving
    one, and everything that a replayed recipe says."""
    from_file = {name for name in given if ctx.get_parameter_source(name) is ParameterSource.DEFAULT_MAP}
    sizes = {"size", "aspect", "width", "height"}
    other_size = any(given.get(name) is not None for name in sizes - from_file)
    for name in from_file:
        replayed = asked and name in ("model", "precision", "negative_prompt", "steps", "guidance", *sizes)
        if replayed or (other_size and name in sizes):
            given[name] = None


def _read(file: Path) -> bytes:
    from qwenimg.common.untrusted import open_regular

    with contextlib.closing(open_regular(file)) as opened:
        if opened.size > MAX_BYTES:
            raise UsageError(f"{clean(file)}: has {opened.size} bytes; at most {MAX_BYTES} are read")
        return opened.read(0, opened.size)
