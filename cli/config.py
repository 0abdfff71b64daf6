"""The user's defaults: `config.toml` in the configuration folder. Options and the environment override them."""

from __future__ import annotations

import contextlib
import os
import re
import tomllib
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from qwenimg.common.base.arguments import home
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.families.load_options import LOAD_OPTIONS
from qwenimg.common.jobs import image_options
from qwenimg.common.jobs.image_options import TEXT_OPTIONS
from qwenimg.common.request.parts import PARTS

MAX_BYTES = 64 << 10
# Seeds, prompts and files belong to one run.
KEYS: Mapping[str, tuple[type, ...]] = {
    **{name: LOAD_OPTIONS[name].types for name in LOAD_OPTIONS if LOAD_OPTIONS[name].config},
    **{name: TEXT_OPTIONS[name].types for name in TEXT_OPTIONS if TEXT_OPTIONS[name].config},
    "output": (str,),
    "no_metadata": (bool,),
    "quiet": (bool,),
}
MAY_BE_EMPTY = ("negative_prompt",)
SIZES = {"size", "aspect", "width", "height"}
PROMPTS = {"words", "prompt", "prompt_file"}
RECIPE = {"model", "preset", "precision", *PARTS, *TEXT_OPTIONS}  # options that a repeated image's recipe sets


def path() -> Path:
    """Return the path of config.toml, whether or not it exists."""
    from platformdirs import user_config_path

    return user_config_path("qwenimg", appauthor=False) / "config.toml"


def defaults() -> dict[str, Any]:
    """Read the file: its values by click's names of the options, {} without a file. Raises UsageError."""
    file = path()
    raw = _read(file)
    _check_plain(file, raw)
    try:
        data = tomllib.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # also of a number with thousands of digits
        raise UsageError(f"{clean(file)}: is not TOML: {clean(error, 80)}") from None
    values: dict[str, Any] = {}
    for key, value in data.items():
        name = key.replace("-", "_")
        if name not in KEYS:
            raise UsageError(f"{clean(file)}: unknown option {clean(key, 40)!r}; known are {', '.join(KEYS)}")
        if type(value) not in KEYS[name]:
            kinds = " or ".join(kind.__name__ for kind in KEYS[name])
            raise UsageError(f"{clean(file)}: {name} is {clean(value, 40)!r}; expected {kinds}")
        if value == "" and name not in MAY_BE_EMPTY:
            raise UsageError(f"{clean(file)}: {name} is empty; give a value, or leave the line out")
        values[name] = value
    try:
        _check(values)
    except UsageError as error:
        raise UsageError(f"{clean(file)}: {error}") from None
    return values


def _check(values: Mapping[str, Any]) -> None:
    """Raise UsageError for a value that its option would refuse."""
    from qwenimg.backends import NAMES, known

    backend = values.get("backend", "auto")
    if not isinstance(backend, str) or not known(backend):
        raise UsageError(f"backend is {clean(backend, 40)!r}; choose one of {', '.join(NAMES)}")
    image_options.check(image_options.parse(values))
    for name in (name for name in LOAD_OPTIONS if name in values):
        LOAD_OPTIONS[name].check(_as_option(name, values[name]))
    if "output" in values:
        from qwenimg.common.jobs.naming import output_path

        now = datetime.now()
        output_path(values["output"], seed=0, index=1, prompt="", now=now, several=False, same_seeds=False)


def apply_defaults(ctx: click.Context, given: dict[str, Any]) -> None:
    """Merge the file's values into `given`, and drop values that a stronger source replaces by another option.
    Precedence: command line, environment, the recipe of --from, file. Raises UsageError for a broken file."""
    source = {name: ctx.get_parameter_source(name) for name in given}
    typed = {name for name in given if source[name] is ParameterSource.COMMANDLINE and given[name] not in (None, ())}
    for group in (SIZES, PROMPTS):
        if typed & group:
            for name in group - typed:
                given[name] = () if name == "words" else None
    # A seed and a number go together; several seeds and a number do not.
    if {"seed", "num_images"} & typed and image_options.is_several(given["seed"] or ""):
        for name in {"seed", "num_images"} - typed:
            given[name] = None
    sized = any(given[name] is not None for name in SIZES)
    few = given["few_steps"] is not None
    for name, value in defaults().items():
        if name not in source or (few and name in image_options.FEW):
            continue
        if name in PARTS and source["model"] in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT):
            continue  # they are parts of the file's own model
        replayed = given.get("replay") is not None and name in RECIPE
        unsaid = source[name] in (None, ParameterSource.DEFAULT)
        if unsaid and not replayed and not (sized and name in SIZES):
            given[name] = _as_option(name, value)


def _as_option(name: str, value: Any) -> Any:
    if name in LOAD_OPTIONS and LOAD_OPTIONS[name].several:
        return folders(value)
    return Path(home(value)) if name in LOAD_OPTIONS and LOAD_OPTIONS[name].kind is Path else value


def folders(text: str) -> tuple[Path, ...]:
    """Split the value of an option that takes several folders, separated by colons."""
    return tuple(Path(folder) for folder in text.split(os.pathsep) if folder)


# A text or comment; one without an end goes on to the end of the file, so that no byte is read twice.
_TEXT = re.compile(
    rb'"""(?:[^\\"]|\\.|"(?!""))*+(?:"""|\\?\Z)|' + rb"'''(?:[^']|'(?!''))*+(?:'''|\Z)"
    rb'|"(?:[^\\"\n]|\\.)*+"?|' + rb"'[^'\n]*+'?|#[^\n]*+",
    re.DOTALL,
)
_STRUCTURE = re.compile(rb"[\[{]|^[^=\n]*\.", re.MULTILINE)


def _check_plain(file: Path, raw: bytes) -> None:
    """Refuse tables, lists and dotted keys: no option takes one, and for a dotted key of 40 kB tomllib takes 24 s and
    1.5 GB."""
    outside = _TEXT.sub(lambda text: b"0" + b"\n" * text[0].count(b"\n"), raw)
    match = _STRUCTURE.search(outside)
    if match:
        line = outside.count(b"\n", 0, match.end()) + 1
        shown = clean(raw.splitlines()[line - 1].strip().decode("utf-8", "replace"), 40)
        raise UsageError(
            f"{clean(file)}: line {line}, {shown!r}: TOML's tables, lists and dotted keys are no options; "
            f"write option = value, of {', '.join(KEYS)}"
        )


def _read(file: Path) -> bytes:
    """Return the bytes of the file; b"" if it does not exist."""
    from qwenimg.common.base.safe_files import kind, open_regular

    try:
        if kind(file) is None and not os.path.lexists(file):
            return b""
        with contextlib.closing(open_regular(file)) as opened:
            if opened.size > MAX_BYTES:
                raise UsageError(f"{clean(file)}: has {opened.size} bytes; at most {MAX_BYTES} are read")
            return opened.read(0, opened.size)
    except ModelError as error:  # the file is a setting, not an input of this run
        raise UsageError(str(error)) from None
