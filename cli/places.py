"""The options of opening a model, for all commands that open one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from qwenimg.backends import NAMES
from qwenimg.cli.options import FILE, Backend, described
from qwenimg.common.base.errors import UsageError
from qwenimg.common.families.load_options import LOAD_OPTIONS, load_options_of
from qwenimg.common.request.option import Option
from qwenimg.common.request.parts import PARTS

_F = TypeVar("_F", bound=Callable[..., Any])
# Values that no room of common knows.
_MORE: dict[str, dict[str, Any]] = {"backend": {"type": Backend(NAMES), "metavar": "|".join(NAMES)}}
WEIGHTS = (*PARTS, "tokenizer", "prediction", "variant", "quantize")
OF_WORKERS = (
    *WEIGHTS,
    "refiner",
    "models_dir",
    "wildcards",
    "preset",
    "precision",
    "compile",
    "fallback",
    "max_memory",
)
"""The options of commands whose workers open models."""
_COUNTS = {1: "one text encoder", 2: "two text encoders", 3: "three text encoders"}


def declared(*names: str, **more: Any) -> Callable[[_F], _F]:
    """Declare the options `names` of `LoadOptions`, in this order. more: settings of click for this command."""

    def decorated(command: _F) -> _F:
        for name in reversed(names):
            command = _declared(LOAD_OPTIONS[name], more)(command)
        return command

    return decorated


def _declared(one: Option, more: dict[str, Any]) -> Callable[[_F], _F]:
    """Return click's option for an option of `LoadOptions`; None is the value of an option that was not given."""
    spelled, shown = described(one)
    if one.again:
        shown |= {"hidden": True, "allow_from_autoenv": False}
    if one.kind is bool:
        return click.option(one.name, *spelled, is_flag=True, help=shown["help"])
    repeats = one.several or any(other.again == one.name for other in PARTS.values())
    if one.words:
        shown |= {"type": click.Choice(one.words), "metavar": "|".join(one.words)}
    else:
        shown |= {"type": FILE if one.kind is Path else one.kind, "multiple": repeats}
    return click.option(one.name, *spelled, **shown | _MORE.get(one.name, {}) | more)


def weights(command: _F) -> _F:
    """Declare the options that choose a model's weights."""
    return declared(*WEIGHTS)(command)


def take_texts(given: dict[str, Any]) -> None:
    """Replace the several files of --text-encoder by one option each. Raises UsageError for too many."""
    for first in [name for name in PARTS if any(other.again == name for other in PARTS.values())]:
        places = [first, *(name for name, other in PARTS.items() if other.again == first)]
        value = given[first]
        files = [*(value if isinstance(value, Sequence) else [value]), *(given[name] for name in places[1:])]
        files = [file for file in files if file is not None]
        if len(files) > len(places):
            raise UsageError(f"--{PARTS[first].dashed}: {len(files)} files; a model has {_COUNTS[len(places)]} at most")
        given |= dict.fromkeys(places) | dict(zip(places, files, strict=False))


def pop_opening(given: dict[str, Any]) -> dict[str, Any]:
    """Remove the options that open a model from `given` and return them. Raises UsageError for too many text
    encoders."""
    if "text_encoder" in given:
        take_texts(given)
    return {name: given.pop(name) for name in LOAD_OPTIONS if name in given}


def with_opening(command: Callable[..., Any]) -> Callable[..., Any]:
    """Declare --models-dir for `command`, and call it with `LoadOptions`. Names that are found in the folders are
    replaced by paths, also the argument `file`."""

    @functools.wraps(command)
    def located(**given: Any) -> Any:
        return command(**_located(given))

    return declared("models_dir")(located)


def _located(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with the opening."""
    from qwenimg.common.hub import part_files

    options = pop_opening(given)
    folders, place = part_files.located(
        load_options_of(options | {"models_dir": options["models_dir"] or _config_folders()})
    )
    if "file" in given:
        given["file"] = Path(folders.of_any_kind(str(given["file"])))
    return given | {"opening": place}


def _config_folders() -> tuple[Path, ...]:
    from qwenimg.cli import config

    text = config.defaults().get("models_dir")
    return () if text is None else config.folders(text)
