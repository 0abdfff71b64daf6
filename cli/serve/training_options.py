"""The options of a LoRA that is trained: those of `qwenimg train lora`, in a request or a row of the journal."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import click

from qwenimg.cli import lora_training
from qwenimg.cli.serve.apis import body
from qwenimg.cli.serve.http_error import HttpError
from qwenimg.cli.serve.image_job import ImageJob
from qwenimg.cli.workers.messages import Training
from qwenimg.common.base.text import clean
from qwenimg.common.jobs.job import Job

TRAINING = "training"  # the kind of a job
_HERE = ("opening", "only_plan", "quiet")  # not of a request
_REQUIRED = {"data": "a folder of pictures", "output": "the LoRA that is written"}
MOST_TEXTS = 8  # LoRAs, or prompts of samples
MOST_CHARACTERS = 10_000  # of a text
_OUTPUT = re.compile(r"[^\W_][\w .-]{0,79}(?<![ .])")


@functools.cache
def _options() -> Mapping[str, tuple[click.Option, Any]]:
    """Return the options that a request may have, with their defaults, by the names of their flags."""
    from qwenimg.cli.commands.train import train_lora

    defaults = train_lora.make_context("lora", [f"--{name}=x" for name in _REQUIRED]).params
    names = {one.name for one in fields(lora_training.Wanted)} - {*_HERE} | {"quantize"}
    options = [one for one in train_lora.params if isinstance(one, click.Option) and one.name in names]
    flags = {max(one.opts, key=len)[2:].replace("-", "_"): one for one in options}
    return {flag: (one, None if flag in _REQUIRED else defaults[str(one.name)]) for flag, one in flags.items()}


def parse_training(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of a training, as JSON has them, with the values in `data`. Raises HttpError."""
    options = _options()
    for name in data:
        if name not in options:
            raise body.unknown_field(name, options)
    for name, what in _REQUIRED.items():
        if data.get(name) is None:
            raise HttpError(400, f"{name} is missing: the name of {what}, in the server's folder", param=name)
    values = {
        name: _value(name, one, data[name]) if data.get(name) is not None else default
        for name, (one, default) in options.items()
    }
    values["output"] = _output(values["output"])
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def training_job(model: str, options: Mapping[str, Any], folder: str = "", **more: Any) -> ImageJob:
    """Return the job of a training. It has no deadline: it may take days."""
    nothing = Job(options={"prompt": ""}, seeds=(0,))
    order = Training(folder=folder, options=options)
    return ImageJob(model=model, spec=nothing, kind="job", deadline=1.0, training=order, **more)


def _output(name: str) -> str:
    """Return the name of a LoRA without its suffix."""
    stem = name.removesuffix(lora_training.SUFFIX)
    if not _OUTPUT.fullmatch(stem):
        text = f"output is {clean(name, 40)!r}; give at most 80 letters, digits, blanks, - _ and ., without a folder"
        raise HttpError(400, text, param="output")
    return stem


def _value(name: str, option: click.Option, value: object) -> Any:
    """Return a value in the type of its option."""
    if option.multiple:
        listed = value if isinstance(value, list) else [value]
        if len(listed) > MOST_TEXTS:
            raise HttpError(400, f"{name}: {len(listed)} texts; at most {MOST_TEXTS} are taken", param=name)
        return [_text(name, one) for one in listed]
    if option.is_flag:
        if not isinstance(value, bool):
            raise HttpError(400, f"{name} is {clean(value, 40)}; give true or false", param=name)
        return value
    kind = {click.IntRange: int, click.FloatRange: float}.get(_range(option))  # type: ignore[arg-type]
    if kind is None:
        text = _text(name, str(value) if name == "quantize" and type(value) is int else value)
        return _converted(name, option, text) if isinstance(option.type, click.Choice) else text
    number = body.number(value, kind)
    if isinstance(number, bool) or not isinstance(number, (int, kind)):
        what = "a whole number" if kind is int else "a number"
        raise HttpError(400, f"{name} is {clean(value, 40)}; give {what}", param=name)
    return _converted(name, option, number)


def _range(option: click.Option) -> type | None:
    return next((kind for kind in (click.IntRange, click.FloatRange) if isinstance(option.type, kind)), None)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or len(value) > MOST_CHARACTERS:
        what = f"has more than {MOST_CHARACTERS:,} characters" if isinstance(value, str) else "is no text"
        raise HttpError(400, f"{name} {what}", param=name)
    return value


def _converted(name: str, option: click.Option, value: object) -> Any:
    try:
        return option.type.convert(value, None, None)
    except click.BadParameter as error:
        raise HttpError(400, f"{name}: {clean(error.message, 160)}", param=name) from None
