"""Parsing of requests: JSON, with the field names of several APIs, becomes a job."""

from __future__ import annotations

import asyncio
import base64
import binascii
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from starlette.requests import Request as HttpRequest

from qwenimg.cli import foreign_words
from qwenimg.cli.serve.http_error import HttpError
from qwenimg.cli.serve.settings import Settings
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.strict_json import strict_json
from qwenimg.common.base.text import clean
from qwenimg.common.jobs import image_options
from qwenimg.common.jobs.image_options import TEXT_OPTIONS, OptionFault, Options
from qwenimg.common.jobs.job import NO_FILES, InputFiles, Job
from qwenimg.common.prompts import templates
from qwenimg.common.prompts.wildcards import TEMPLATES
from qwenimg.common.request import control_text
from qwenimg.common.request.control_text import Control
from qwenimg.common.request.embedding_text import Embedding
from qwenimg.common.request.lora_text import Lora
from qwenimg.common.request.names import is_upscaler
from qwenimg.common.request.request import random_seed

_OURS = {"guidance_scale": "guidance"}  # names of other servers that are no alias on the command line
IMAGES = 16  # of a request
LARGE = 64 << 10  # bytes of a body that is parsed apart
_WHOLE = re.compile(r"-?[0-9]{1,20}", re.ASCII)
_NUMBER = re.compile(r"-?(?:[0-9]{1,20}(?:\.[0-9]{0,20})?|\.[0-9]{1,20})(?:[eE][+-]?[0-9]{1,3})?", re.ASCII)
CONTROL_IMAGE = "control_image"  # the field with the pictures of `control`
SIMILAR = 0.78  # difflib's similarity of an unknown field with a known one, from which on that is suggested
_OPTION = re.compile(r"give (?:-\w, )?--([a-z-]+)")  # the start of a message about an option
_DATA_URL = re.compile(r"data:image/[\w.+-]{1,40};base64,")


async def json_object(request: HttpRequest) -> dict[str, Any]:
    """Return the body, a JSON object, without members that are null."""
    body = await request.body()
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and (body or kind):
        raise HttpError(415, "the content type is application/json here", code="content_type")
    try:
        data = await _parsed(request, body or b"{}")
    except ModelError as error:
        raise HttpError(400, str(error)) from None
    if not isinstance(data, dict):
        raise HttpError(400, "the request is not a JSON object")
    return {name: value for name, value in data.items() if value is not None}


async def _parsed(request: HttpRequest, body: bytes) -> object:
    """Parse JSON; a large text in a thread, one at a time, so that other requests are answered meanwhile."""
    parsing = functools.partial(strict_json, body, "the request", depth=8, values=10_000, halves=False)
    if len(body) <= LARGE:
        return parsing()
    async with request.app.state.large:
        return await asyncio.to_thread(parsing)


def option_names() -> dict[str, str]:
    """Return the name of each option by all names that requests may give it."""
    names = dict(_OURS)
    for name, one in TEXT_OPTIONS.items():
        others = (*one.aliases, *(flag[2:] for flag in one.flags if flag.startswith("--")))
        names |= dict.fromkeys((name, *(other.replace("-", "_") for other in others)), name)
    return names


def meant(field: str, known: Iterable[str]) -> str | None:
    """Return the one of the `known` fields that an unknown `field` stands for: by other programs' words for options, or
    misspelled."""
    plain, names = field[:100].lower().replace("-", "_"), [*known]
    advice = foreign_words.OPTIONS.get(f"--{plain.replace('_', '-')}", "")
    option = match[1].replace("-", "_") if (match := _OPTION.match(advice)) else ""
    return option if option in names else misspelled(plain, names)


def misspelled(field: str, known: Iterable[str]) -> str | None:
    """Return the one of the `known` fields that is written nearly as `field`; None if there is none."""
    return next(iter(get_close_matches(field[:100].lower(), [*known], 1, SIMILAR)), None)


def unknown_field(field: str, known: Iterable[str], what: str = "field") -> HttpError:
    """Return the refusal of an unknown `field` of a request that takes those `known`."""
    name = meant(field, known)
    text = f"unknown {what} {clean(field, 40)!r}" + (f"; did you mean {name}?" if name else "")
    return HttpError(400, text, param=clean(field, 40), code="unknown_parameter")


def options(data: Mapping[str, Any], others: Sequence[str] = ()) -> Options:
    """Return the options in `data` by our names; a number may be a text, as in a form. others: the other fields of such
    a request, for the message about an unknown one. Raises HttpError for an unknown name, a value of another type, and
    two names of one option with two values."""
    names, values, origin = option_names(), dict[str, Any](), dict[str, str]()
    for key, value in data.items():
        if key not in names:
            raise unknown_field(key, [*names, *others])
        name = names[key]
        if not TEXT_OPTIONS[name].several:
            value = number(value, TEXT_OPTIONS[name].kind)
        if name in values and values[name] != value:
            raise HttpError(400, f"{origin[name]} and {key} say different things", param=key)
        values[name], origin[name] = value, key
    try:
        return image_options.parse_json(values)
    except OptionFault as error:
        raise HttpError(400, str(error), param=origin[error.name]) from None


def job_of(values: Options, settings: Settings, files: InputFiles = NO_FILES, *, most: int) -> Job:
    """Return the job of a request with the `values` of options and with `files`, once all is checked that needs no
    model. most: its images."""
    # Some models describe a picture, or take one as text
    if not (values.get("prompt", "").strip() or files.images or "control" in values):
        raise HttpError(400, "a prompt is missing", param="prompt")
    if values.get("only_masked") is not None and files.mask is None:
        raise HttpError(400, "only_masked draws what a mask covers: send one as mask", param="only_masked")
    if values.get("outpaint") and not files.images:
        raise HttpError(400, "outpaint extends a picture: send one as image", param="outpaint")
    values = Options({"prompt": ""} | values)
    for name, value in values.items():
        try:
            if name in TEMPLATES and settings.reads_templates:
                image_options.check({name: value})
                templates.parse(value)
            values |= image_options.typed({name: value}, files=False)
            image_options.check({name: values[name]})
            if name == "seed":
                image_options.parse_seeds(value)
            if name == "aspect":
                TEXT_OPTIONS[name].check(value)
        except UsageError as error:
            raise HttpError(400, str(error), param=name) from None
    try:
        options = image_options.parse(values, files=False)
        seeds = image_options.seeds(options, random_seed())
    except UsageError as error:
        raise HttpError(400, str(error)) from None
    if len(seeds) > most:
        raise HttpError(400, f"{len(seeds)} pictures; at most {most} at once here", param="num_images")
    if options.get("lora"):
        options["lora"] = loras(options["lora"], settings)
    if options.get("embedding"):
        options["embedding"] = _embeddings(options["embedding"], settings)
    if files.controls or options.get("control"):
        options["control"] = _controls(options.get("control", ()), len(files.controls), settings)
    if (enlarger := options.get("hires_with")) is not None and is_upscaler(enlarger):
        options["hires_with"] = upscaler_named(enlarger, settings, "hires_with")
    if image_options.is_enlarged(options):
        options["upscale_with"] = _upscaler_of(options, settings)
    rest = {name: value for name, value in options.items() if name not in ("seed", "num_images")}
    return Job(options=rest, seeds=seeds, files=files)


def model_named(name: object, settings: Settings) -> str:
    """Return the model that a request names."""
    if isinstance(name, str) and (name in settings.models or name in settings.aliases):
        return settings.aliases.get(name, name)
    served = ", ".join([*settings.models, *settings.aliases])
    text = f"no model {clean(name, 60)!r} here; served are {served}"
    raise HttpError(404, text, param="model", code="model_not_found")


def pictures(data: dict[str, Any], name: str) -> tuple[bytes, ...]:
    """Take the files of the field `name`, a text in base64 or a list of these, out of `data`."""
    value = data.pop(name, [])
    listed = value if isinstance(value, list) else [value]
    check_count(len(listed), name)
    return tuple(picture_bytes(one, name) for one in listed)


def check_count(count: int, name: str) -> None:
    """Raise HttpError for too many pictures of the field `name`."""
    most = control_text.MOST if name == CONTROL_IMAGE else IMAGES
    if count > most:
        raise HttpError(400, f"{count} images; at most {most} are taken", param=name)


def picture_bytes(value: object, name: str) -> bytes:
    """Return the file in base64, with or without the head of a data URL. Nothing is ever fetched."""
    if not isinstance(value, str):
        raise HttpError(400, f"{name} is not a text in base64", param=name)
    head = _DATA_URL.match(value)
    try:
        data = base64.b64decode(value[head.end() :] if head else value, validate=True)
    except (binascii.Error, ValueError):
        raise HttpError(400, f"{name} is no picture in base64; addresses are not fetched", param=name) from None
    if not data:
        raise HttpError(400, f"{name} is empty", param=name)
    return data


def number(value: object, kind: type | None) -> Any:
    """Convert a text to a number of type `kind`, and a whole float to an int where an int is wanted. Any other value is
    returned unchanged, to be refused by the check of its option."""
    if kind not in (int, float):
        return value
    if isinstance(value, str) and (_NUMBER if kind is float else _WHOLE).fullmatch(value.strip()[:100]):
        return kind(value)
    return int(value) if kind is int and isinstance(value, float) and value.is_integer() else value


def loras(given: Sequence[Lora], settings: Settings) -> tuple[Lora, ...]:
    """Replace the served names of LoRAs by the paths of their files."""
    for one in given:
        if one.source not in settings.loras:
            served = ", ".join(settings.loras) or "none; start with --lora FILE"
            raise HttpError(400, f"no LoRA {clean(one.source, 60)!r} here; served are {served}", param="lora")
    return tuple(replace(one, source=settings.loras[one.source]) for one in given)


def _embeddings(embeddings: Sequence[Embedding], settings: Settings) -> tuple[Embedding, ...]:
    """Replace the served names of embeddings by the paths of their files."""
    for one in embeddings:
        if one.source not in settings.embeddings:
            served = clean(", ".join([*settings.embeddings][:8]), 160) or "none; start with --models-dir"
            raise HttpError(400, f"no embedding {clean(one.source, 60)!r} here; served are {served}", param="embedding")
    return tuple(Embedding(settings.embeddings[one.source], one.name or one.source) for one in embeddings)


def upscaler_named(name: str, settings: Settings, param: str) -> str:
    """Return the file of the upscaler that a request names. Raises HttpError."""
    if name not in settings.upscalers:
        served = ", ".join([*settings.upscalers][:8]) or "none; start with --models-dir, which has upscale_models"
        raise HttpError(400, f"no upscaler {clean(name, 60)!r} here; served are {clean(served, 160)}", param=param)
    return settings.upscalers[name]


def _upscaler_of(options: Options, settings: Settings) -> str:
    """Return the file of the upscaler that makes finished pictures larger: the one that is named, else the only one
    here. Raises HttpError."""
    if "upscale_with" not in options and len(settings.upscalers) > 1:
        served = clean(", ".join([*settings.upscalers][:8]), 160)
        raise HttpError(400, f"several upscalers are here: choose one of {served}", param="upscale_with")
    if not settings.upscalers:
        param = "upscale" if "upscale" in options else "upscale_with"
        told = "no upscalers are here; start the server with --models-dir, which has upscale_models"
        raise HttpError(400, told, param=param)
    return upscaler_named(options.get("upscale_with", next(iter(settings.upscalers))), settings, "upscale_with")


def _controls(controls: Sequence[Control], count: int, settings: Settings) -> tuple[Control, ...]:
    """Replace the served names of control networks by paths, and check that each control has one of the `count`
    pictures and each picture a control."""
    for one in controls:
        if not re.fullmatch("[1-9]", one.file):
            form = (
                f"NETWORK=NUMBER, with :SCALE or :SCALE:START-END, or NUMBER for a model that sees it itself; NUMBER "
                f"counts the pictures in {CONTROL_IMAGE}"
            )
            raise HttpError(400, f"control {clean(one, 60)!r}: write {form}", param="control")
        if one.network and one.network not in settings.controls:
            served = ", ".join(settings.controls) or "none; start with --control NETWORK"
            text = f"no control network {clean(one.network, 60)!r} here; served are {served}"
            raise HttpError(400, text, param="control")
        if int(one.file) > count:
            raise HttpError(400, f"control names picture {one.file} of {count} in {CONTROL_IMAGE}", param=CONTROL_IMAGE)
    if (used := len({one.file for one in controls})) < count:
        raise HttpError(400, f"{count} pictures, of which control names {used}", param=CONTROL_IMAGE)
    return tuple(replace(one, network=settings.controls.get(one.network, "")) for one in controls)
