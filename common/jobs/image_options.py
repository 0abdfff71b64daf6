"""The options of an image: the same for the command line, a configuration, a recipe and the lines of a prompt file.

There are more than in a `Request`: a size can be given in three ways, and a line can ask for several images.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeAlias

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.numbers.seeds import MAX_SEED
from qwenimg.common.numbers.sizes import parse_aspect, parse_size
from qwenimg.common.request import control_text, ip_adapter_text
from qwenimg.common.request.control_text import Control
from qwenimg.common.request.option import Option, option, options_of
from qwenimg.common.request.request import OPTIONS

FEW = ("steps", "guidance", "sampler", "schedule", "few_steps")  # the options that `few_steps` sets
SIZES = ("width", "height", "size", "aspect")  # the options of which one way gives the size
MAX_PICTURES = 10_000  # images of one run

Options: TypeAlias = dict[str, Any]
"""Values of options by the names of `TEXT_OPTIONS`, each of its own type; a missing one is left to the model. `size` is
converted to the sides, `aspect` is a Fraction, and `seed` a text as after --seed."""


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    size: str = option("", Option(
        help="width and height in pixels, such as 1664x928, or 512 for 512x512; default the model's", section="Picture",
        metavar="WxH", checks=parse_size,
        config=True,
    ))  # fmt: skip
    aspect: str = option("", Option(
        help="the ratio of width to height, such as 16:9, at about the model's usual area", section="Picture",
        metavar="W:H", checks=parse_aspect, config=True,
    ))  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Numbers:
    num_images: int = option(1, Option(
        help="draw N pictures, each with the next seed, or the next variation of one", section="Picture", metavar="N",
        flags=("-N",),
        aliases=("batch-count", "n-images", "num-images-per-prompt"), least=1, most=MAX_PICTURES,
    ))  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Adapters:
    ip_adapter: tuple[Control, ...] = option((), Option(
        help="take the --ip-image pictures as a prompt, by an IP-Adapter of Stable Diffusion or FLUX.1 Redux; SCALE is "
        "a number, or by part style=1,layout=0.5 (FLUX.1: tokens=1,pooled=1)", section="Control",
        metavar="FILE[:SCALE[:START-END]]", longest=8_000,
        parse=ip_adapter_text.parse,
    ))  # fmt: skip
    ip_image: tuple[str, ...] = option((), Option(
        help="a picture that --ip-adapter takes as a prompt; may be repeated", section="Control", metavar="PICTURE",
        aliases=("ip-adapter-image",), longest=8_000, parse=ip_adapter_text.parse_pictures,
    ))  # fmt: skip
    ip_mask: tuple[str, ...] = option((), Option(
        help="the part of the image, white, in which the --ip-image picture counts; one for each, in their order",
        section="Control", metavar="PICTURE", longest=8_000, parse=ip_adapter_text.parse_masks,
    ))  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Enlarging:
    upscale: int | None = option(None, Option(
        help="make each picture so many times as wide and high, {bounds}, by an upscaler", section="Output",
        metavar="2|4", least=1, most=16,
    ))  # fmt: skip
    upscale_with: str = option("", Option(
        help="the upscaler of --upscale: a file (ESRGAN), or its name in the folders of models", section="Output",
        metavar="FILE",
    ))  # fmt: skip


_ADAPTERS, _ENLARGING = options_of(_Adapters), options_of(_Enlarging)
ALL = options_of(_Sizes) | OPTIONS | _ADAPTERS | options_of(_Numbers) | _ENLARGING
"""Every option of an image."""
TEXT_OPTIONS = {name: ALL[name] for name in ALL if ALL[name].kind is not None}
"""The options whose value is a number or a text, not an array or a file."""


class OptionFault(UsageError):
    """A fault of one option in JSON."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


def parse_json(data: Mapping[str, Any]) -> Options:
    """Return the options in `data`, a JSON object, once their names and types are checked. Raises OptionFault."""
    for key, value in data.items():
        if key not in TEXT_OPTIONS:
            raise OptionFault(key, f"unknown field {clean(key, 40)!r}; {_meant(key)}")
        if not isinstance(value, TEXT_OPTIONS[key].types) or isinstance(value, bool):
            raise OptionFault(key, f"{key} is {clean(value, 40)!r}; expected {TEXT_OPTIONS[key].expected}")
        try:
            TEXT_OPTIONS[key].check_length(value)
        except UsageError as error:
            raise OptionFault(key, str(error)) from None
    return dict(data) | ({"seed": str(data["seed"])} if "seed" in data else {})


def _meant(key: str) -> str:
    """Return what to write in place of the field `key`, which is not known."""
    if key in ALL:
        return f"give --{ALL[key].dashed} outside the file, for all lines"
    names = {word.replace("-", "_"): one.name for one in TEXT_OPTIONS.values() for word in (one.name, *one.aliases)}
    near = get_close_matches(key[:100].lower().replace("-", "_"), names, n=1, cutoff=0.75)
    return f"did you mean {names[near[0]]}?" if near else "qwenimg generate --help --json lists the known ones"


def of_request(options: Options) -> Options:
    """Return `options` without those that make a finished picture larger, which a `Request` does not have."""
    return {name: value for name, value in options.items() if name not in _ENLARGING}


def is_enlarged(options: Options) -> bool:
    """Return whether an upscaler makes the finished picture larger."""
    return not options.keys().isdisjoint(_ENLARGING)


def sides(
    width: int | None = None, height: int | None = None, size: str | None = None, aspect: str | None = None
) -> Options:
    """Return the sides or the aspect that one of the three ways gives. Raises UsageError for several of them."""
    if (size is not None) + (aspect is not None) + (width is not None or height is not None) > 1:
        raise UsageError("the size is given twice; give --size, or --aspect, or --width and --height")
    if size is not None:
        width, height = parse_size(size)
    values = {"aspect": None if aspect is None else parse_aspect(aspect), "width": width, "height": height}
    return {name: value for name, value in values.items() if value is not None}


def parse(values: Mapping[str, Any], *, files: bool = True) -> Options:
    """Return the options among `values`, by the names of TEXT_OPTIONS, each of its own type, with the size as sides or
    aspect; None, and a repeated option that is not given, are left out. files: a text may name a file of this machine.
    Raises UsageError."""
    size = sides(**{name: values.get(name) for name in SIZES})
    rest = {name: values[name] for name in TEXT_OPTIONS if name not in SIZES and values.get(name) not in (None, ())}
    return with_adapters(typed(rest, files=files)) | size


def with_adapters(options: Options) -> Options:
    """Return `options` with IP-Adapters and their pictures as controls. Raises UsageError."""
    if not options.keys() & _ADAPTERS.keys():
        return options
    rest = {name: value for name, value in options.items() if name not in _ADAPTERS}
    added = ip_adapter_text.controls(*(options.get(name, ()) for name in _ADAPTERS))
    every = (*rest.get("control", ()), *added)
    control_text.check(every)
    return rest | {"control": every}


def typed(values: Options, *, files: bool = True) -> Options:
    """Return `values` with texts parsed to typed values, such as LoRAs, and other programs' values as ours. files: as
    for `parse`. Raises UsageError."""
    known = {name: TEXT_OPTIONS[name] for name in values if name in TEXT_OPTIONS}
    parsed = [name for name, one in known.items() if one.parse is not None or one.spellings]
    return values | {name: TEXT_OPTIONS[name].converted(values[name], files=files) for name in parsed}


def plain(options: Options) -> Options:
    """Return `options` as JSON values; `typed` reads them back."""
    return {name: TEXT_OPTIONS[name].plain(value) if name in TEXT_OPTIONS else value for name, value in options.items()}


def merged(base: Options, more: Options) -> Options:
    """Return `base` overridden by `more`. An aspect replaces the sides, a side the aspect, few steps the options that
    they set, a step cache the calls that another one chose, and several seeds a number of images, or a number them."""
    replaced = {"width", "height"} if "aspect" in more else {"aspect"} if more.keys() & {"width", "height"} else set()
    replaced |= set(FEW) if more.get("few_steps") else set()
    replaced |= {"cached_calls"} if "step_cache" in more else set()
    replaced |= {"num_images"} if is_several(more.get("seed", "")) else set()
    replaced |= {"seed"} if "num_images" in more and is_several(base.get("seed", "")) else set()
    return {name: value for name, value in base.items() if name not in replaced} | more


def check(options: Options) -> None:
    """Raise UsageError for a text or a number that no model accepts; `seeds` checks the seed."""
    for name, one in TEXT_OPTIONS.items():
        if name in options and name not in ("seed", "aspect"):
            one.check(options[name])


def option_in(text: str, others: Container[str] = ()) -> str | None:
    """Return the first word of a prompt that is an option of an image or one of `others`, such as `--steps`, or
    None."""
    words = (word.replace("_", "-") for word in re.findall(r"(?<!\S)--[a-z][a-z0-9_-]*", text))
    return next((word for word in words if word in others or _is_option(word)), None)


def _is_option(word: str) -> bool:
    return any(word[2:] in (one.dashed, *one.aliases) or word in one.flags for one in ALL.values())


def seeds(options: Options, chance: int) -> tuple[int, ...]:
    """Return the seeds for one prompt. `chance`: the random seed, for -1 or no seed. Raises UsageError."""
    listed = parse_seeds(options["seed"]) if "seed" in options else None
    count = options.get("num_images")
    if count is None:
        return listed or (chance,)
    if listed and len(listed) > 1:
        raise UsageError("several seeds and a number of images; --num-images counts up from one seed")
    first: int = listed[0] if listed else chance
    if options.get("variation"):  # which counts up in place of the seed, see `Job.split`
        return (first,) * int(count)
    if first + count - 1 > MAX_SEED:
        raise UsageError(f"seed {first} and {count} images go beyond the largest seed, {MAX_SEED}")
    return tuple(range(first, first + count))


def is_several(text: str) -> bool:
    """Return whether the text of a seed is a list or a range."""
    return "," in text or "-" in text.strip()[1:]


def parse_seeds(text: str) -> tuple[int, ...] | None:
    """Return the seeds of `7`, `1,2,3`, `1-4` or a mix; None for -1, a random one. Raises UsageError."""
    TEXT_OPTIONS["seed"].check_length(text)
    if text.strip() == "-1":
        return None
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,20})\s*(?:-\s*([0-9]{1,20})\s*)?", part)
        if match is None and numbers and text.rstrip().endswith(","):  # a shell splits `1, 2, 3`
            raise UsageError(f"seed {clean(text, 60)!r} ends with a comma; write a list without spaces: 1,2,3")
        if match is None:
            raise UsageError(f"seed {clean(text, 60)!r} is not a number, a list 1,2,3, a range 1-4, or -1 for random")
        first, last = int(match[1]), int(match[2] or match[1])
        if last > MAX_SEED or first > last:
            raise UsageError(f"seed {clean(part, 60)!r} is outside 0 to {MAX_SEED}, or its range runs backwards")
        if len(numbers) + last - first >= MAX_PICTURES:
            raise UsageError(f"seed {clean(text, 60)!r} is more than {MAX_PICTURES} seeds; run several times")
        numbers.extend(range(first, last + 1))
    return tuple(numbers)
