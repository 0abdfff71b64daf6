"""What the options mean: seeds, sizes and limits, the same for flags, recipes and the lines of a prompt file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypedDict, cast

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean

if TYPE_CHECKING:
    from fractions import Fraction

MAX_PICTURES = 10_000  # of one run
MAX_SEED = 2**64 - 1
DEBUG = ("timing", "shapes")

# Names that other tools use, where every tool that knows the name means the same; they are not in the help.
ALIASES = {
    "num-inference-steps": "steps",
    "true-cfg-scale": "guidance",
    "batch-count": "num-images",
    "n-images": "num-images",
    "num-images-per-prompt": "num-images",
    "init-img": "image",
    "init-image": "image",
    "image-path": "image",
    "mask-image": "mask",
    "sampling-method": "sampler",
    "disable-metadata": "no-metadata",
    "disable-image-metadata": "no-metadata",
}


class Fields(TypedDict, total=False):
    """What is said about a picture. Those that are not there are left to the model."""

    prompt: str
    negative_prompt: str
    width: int  # pixels
    height: int
    aspect: Fraction  # instead of the two
    steps: int
    guidance: float
    seed: str  # as after --seed
    num_images: int
    sampler: str
    schedule: str
    strength: float
    clip_skip: int
    guidance_rescale: float
    refine_at: float


def known_name(name: str) -> str:
    """The option's own name for an alias, and for one that is spelled with underscores."""
    plain = name.replace("_", "-") if len(name) > 1 else name
    return ALIASES.get(plain, plain)


def sides(
    width: int | None = None, height: int | None = None, size: str | None = None, aspect: str | None = None
) -> Fields:
    """The sides that were asked for, by one of the three ways. Raises UsageError."""
    from qwenimg.common.numbers.sizes import parse_aspect, parse_size

    if (size is not None) + (aspect is not None) + (width is not None or height is not None) > 1:
        raise UsageError("the size is given twice; give --size, or --aspect, or --width and --height")
    if size is not None:
        width, height = parse_size(size)
    found = Fields()
    if aspect is not None:
        found["aspect"] = parse_aspect(aspect)
    if width is not None:
        found["width"] = width
    if height is not None:
        found["height"] = height
    return found


def merged(base: Fields, more: Fields) -> Fields:
    """`more` over `base`, where an aspect takes the place of the sides, and a side that of an aspect."""
    replaced = {"width", "height"} if "aspect" in more else {"aspect"} if more.keys() & {"width", "height"} else set()
    return cast(Fields, {name: value for name, value in base.items() if name not in replaced} | more)


def check(fields: Fields) -> None:
    """Raises UsageError for a text or a number that no model takes."""
    from qwenimg.common.numbers.sizes import MAX_SIDE
    from qwenimg.common.pipeline.request import MAX_CLIP_SKIP, MAX_GUIDANCE
    from qwenimg.common.prompts.check import check_prompt
    from qwenimg.common.sampling.flow_match import MAX_STEPS

    for text in (fields.get("prompt"), fields.get("negative_prompt")):
        if text is not None:
            check_prompt(text)
    if not fields.get("prompt", "x").strip():
        raise UsageError("the prompt is empty; say what to draw")
    _between(fields.get("width"), "width", 1, MAX_SIDE)
    _between(fields.get("height"), "height", 1, MAX_SIDE)
    _between(fields.get("steps"), "steps", 1, MAX_STEPS)
    _between(fields.get("guidance"), "guidance", 0, MAX_GUIDANCE)
    _between(fields.get("num_images"), "num-images", 1, MAX_PICTURES)
    _between(fields.get("clip_skip"), "clip-skip", 0, MAX_CLIP_SKIP)
    for name in ("strength", "guidance_rescale", "refine_at"):
        _between(cast("dict[str, float]", fields).get(name), name.replace("_", "-"), 0, 1)
    if "sampler" in fields:
        from qwenimg.common.sampling import table

        table.find(fields["sampler"])
    if "schedule" in fields:
        from qwenimg.common.sampling.schedules import check_name

        check_name(fields["schedule"])


def _between(value: float | None, name: str, least: int, most: int) -> None:
    if value is not None and not least <= value <= most:  # not a number fails as well
        raise UsageError(f"{name} is {clean(value, 40)}; choose {least} to {most}")


def seeds(fields: Fields, chance: int) -> tuple[int, ...]:
    """The seeds for one prompt; `chance` is what -1 or no seed stands for. Raises UsageError."""
    given = parse_seeds(fields["seed"]) if "seed" in fields else None
    count = fields.get("num_images")
    if count is None:
        return given or (chance,)
    if given and len(given) > 1:
        raise UsageError("several seeds and a number of images; --num-images counts up from one seed")
    first = given[0] if given else chance
    if first + count - 1 > MAX_SEED:
        raise UsageError(f"seed {first} and {count} images go beyond the largest seed, {MAX_SEED}")
    return tuple(range(first, first + count))


def parse_seeds(text: str) -> tuple[int, ...] | None:
    """Seeds from `7`, `1,2,3`, `1-4` or a mix; None for -1, one at random. Raises UsageError."""
    if text.strip() == "-1":
        return None
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,20})\s*(?:-\s*([0-9]{1,20})\s*)?", part)
        if match is None:
            raise UsageError(f"seed {clean(text, 60)!r} is not a number, a list 1,2,3, a range 1-4, or -1 for random")
        first, last = int(match[1]), int(match[2] or match[1])
        if last > MAX_SEED or first > last:
            raise UsageError(f"seed {clean(part, 60)!r} is outside 0 to {MAX_SEED}, or its range runs backwards")
        if len(found) + last - first >= MAX_PICTURES:
            raise UsageError(f"seed {clean(text, 60)!r} is more than {MAX_PICTURES} seeds; run several times")
        found.extend(range(first, last + 1))
    return tuple(found)


def parse_debug(text: str | None) -> tuple[str, ...]:
    """What --debug names. Raises UsageError."""
    parts = tuple(part.strip() for part in text.split(",")) if text is not None else ()
    for part in parts:
        if part not in DEBUG:
            raise UsageError(f"--debug {clean(part, 40)!r} is not one of {', '.join(DEBUG)}")
    return parts
