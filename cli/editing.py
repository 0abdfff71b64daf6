"""The subcommands `edit` and `inpaint`, translated to options of `generate`: -i, --mask, -p and -m."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from qwenimg.common.base.arguments import home
from qwenimg.common.base.errors import ModelError, NotHere, UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.families.load_options import LOAD_OPTIONS

USAGE = {"edit": 'qwenimg edit PICTURE... "TEXT"', "inpaint": 'qwenimg inpaint PICTURE MASK "TEXT"'}
MOST = 20  # words; no model takes as many pictures
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
# Options that name a model, or files of one.
MODELS = ("model", "replay", *(name for name in ("transformer", "text_encoder", "vae") if name in LOAD_OPTIONS))
First = Callable[[Sequence[str]], int | None]


def as_run(args: Sequence[str], first: First, values: Callable[[Sequence[str]], Mapping[str, Any]]) -> list[str]:
    """Translate a subcommand such as `edit` into arguments of `generate`. first: the index of the first word that is no
    option. values: the values of its options. Raises UsageError, and ModelError if no model for it is on this
    machine."""
    rest, words = _divided(args, first)
    word = words.pop(0)
    given = values(rest)
    if {"--help", "-h", "--help-all"} & {*rest}:
        click.echo(f"Usage: {USAGE[word]} [OPTIONS]\n\nThe options are those of a picture, as without {word}:\n")
        return rest
    pictures = [one for one in words if _is_picture(one)]
    texts = [one for one in words if not _is_picture(one)]
    says = any(given.get(name) is not None for name in ("prompt", "prompt_file", "replay"))
    masks: list[str] = []
    if word == "inpaint" and given.get("mask") is None:
        if len(pictures) + len(given.get("image") or ()) < 2:
            raise UsageError(f"{word} takes a picture and its mask, in which white is drawn anew: {USAGE[word]}")
        masks = [pictures.pop()]
    if not pictures and not given.get("image"):
        shown = f"{clean(texts[0], 60)!r} is no picture: " if len(texts) > 1 else ""
        raise UsageError(f"{shown}{word} takes a picture: {USAGE[word]}; for a prompt of that word: -p {word}")
    if len(texts) > 1:
        raise UsageError(f"{clean(texts[0], 60)!r} is no picture that is here, and one text is expected: {USAGE[word]}")
    if texts and given.get("prompt") is not None:
        raise UsageError(f"two prompts: {clean(texts[0], 60)!r} and that of -p; give one")
    if not any(text.strip() for text in texts) and not says and "--" not in rest:
        raise UsageError(f"{word}: no text; say what to change: {USAGE[word]}")
    ours = [part for option, group in (("-i", pictures), ("--mask", masks), ("-p", texts)) for one in group
            for part in (option, one)]  # fmt: skip
    missing = not all(map(_is_readable, (*pictures, *masks)))  # then the run says so, whatever the model
    return [*([] if missing else _model(word, given)), *ours, *rest]


def _divided(args: Sequence[str], first: First) -> tuple[list[str], list[str]]:
    """Split `args` into options with their values, and the other words. Raises UsageError for too many words."""
    rest, left, words = list[str](), list(args), list[str]()
    while (place := first(left)) is not None:
        if len(words) == MOST:
            raise UsageError(f"{words[0]}: more than {MOST - 1} words; quote the text: {USAGE[words[0]]}")
        words.append(left[place])
        rest, left = [*rest, *left[:place]], left[place + 1 :]
    return [*rest, *left], words


def _is_picture(word: str) -> bool:
    if "\0" in word:
        return False
    spaced = any(letter.isspace() for letter in word)
    return os.path.lexists(word) or (word.lower().endswith(PICTURES) and not spaced)


def _is_readable(picture: str) -> bool:
    from qwenimg.common.pictures.input import read_size

    try:
        return os.path.lexists(picture) and read_size(Path(home(picture))) is not None
    except (ModelError, OSError):
        return False


def _model(word: str, given: Mapping[str, Any]) -> list[str]:
    """Return `-m` with a model for this work; nothing if the options, the environment or config.toml choose one. Raises
    ModelError."""
    from qwenimg.cli import config

    if any(given.get(name) for name in MODELS) or os.environ.get("QWENIMG_MODEL") or config.defaults().get("model"):
        return []
    from qwenimg.backends.paper import on_paper
    from qwenimg.common.hub import forecast

    backend = given.get("backend") or os.environ.get("QWENIMG_BACKEND") or config.defaults().get("backend") or "auto"
    options = {name: given[name] for name in ("quantize", "max_memory", "precision") if given.get(name) is not None}
    try:
        return ["-m", forecast.editor(word == "inpaint", lambda: on_paper(backend, None), options)]
    except NotHere as error:
        from qwenimg.cli.commands.pull import offer

        if not offer(error, offline=bool(given.get("offline") or given.get("json"))):
            raise
        return ["-m", error.name]
