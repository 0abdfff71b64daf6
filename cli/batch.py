"""From flags, a recipe and a prompt file to the list of pictures to make, all checked before a model is opened."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from qwenimg.cli.options import MAX_PICTURES, Fields, check, merged, seeds, sides
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.safe_files import absolute, bad, kind, open_regular
from qwenimg.common.base.strict_json import strict_json
from qwenimg.common.base.text import short
from qwenimg.common.prompts.check import MAX_CHARACTERS

if TYPE_CHECKING:
    from fractions import Fraction

    from qwenimg.common.jobs.foreign import Foreign

NAMES = ("model", "refiner", "vae")  # of what a recipe names and does not hold
USED = ("image_sha256", "mask_sha256", "refiner", "vae", "prediction")
MAX_PROMPT_FILE = 32 << 20  # bytes
MAX_LINE = 5_000_000  # bytes: two prompts of the largest size fit, \\u-escaped
_NOTHING = re.compile(rb"(?:\s++|#[^\n]*+)*+")  # blank lines and comments, from the start of a line
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "prompt": ((str,), "a text"),
    "negative_prompt": ((str,), "a text"),
    "width": ((int,), "a whole number"),
    "height": ((int,), "a whole number"),
    "size": ((str,), "a text"),
    "aspect": ((str,), "a text"),
    "steps": ((int,), "a whole number"),
    "guidance": ((int, float), "a number"),
    "seed": ((int, str), "a whole number or a text"),
    "num_images": ((int,), "a whole number"),
    "sampler": ((str,), "a text"),
    "schedule": ((str,), "a text"),
    "strength": ((int, float), "a number"),
    "clip_skip": ((int,), "a whole number"),
    "guidance_rescale": ((int, float), "a number"),
    "refine_at": ((int, float), "a number"),
}


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One picture to make. What is None is left to the model."""

    index: int  # from 1
    where: str  # the line of a prompt file that asks for it, else ""
    prompt: str
    negative_prompt: str | None
    width: int | None
    height: int | None
    aspect: Fraction | None  # instead of the two
    steps: int | None
    guidance: float | None
    sampler: str | None
    schedule: str | None
    strength: float | None
    clip_skip: int | None
    guidance_rescale: float | None
    refine_at: float | None
    seed: int
    path: Path | None  # absolute; None for standard output


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What a picture's own recipe says about how to make it again."""

    fields: Fields
    model: str | None  # None: -m says it
    precision: str
    noise_given: bool = False  # its noise came from --latents, so that its seed says nothing
    noise_sha256: str | None = None
    fingerprints: dict[str, str] = field(default_factory=dict)  # of those of NAMES that were given as a path
    used: dict[str, str]  # what it was made with besides: picture, mask, refiner, VAE, prediction
    foreign_model: str | None = None  # what another program calls the model
    told: tuple[str, ...] = ()  # what another program's recipe has that is not made again


def read_replay(path: Path) -> Replay:
    """The recipe in the picture at `path`, ours or another program's. Raises ModelError."""
    from qwenimg.common.jobs.foreign_read import read_foreign
    from qwenimg.common.pictures.texts import read_texts
    from qwenimg.common.pipeline.recipe import recipe_from_png

    texts = read_texts(path)
    foreign = None if "qwenimg" in texts else read_foreign(texts, path)
    if foreign is not None:
        return _foreign_replay(foreign, path)
    recipe = recipe_from_png(path)
    fields = Fields(
        prompt=recipe["prompt"],
        width=recipe["width"],
        height=recipe["height"],
        steps=recipe["steps"],
        guidance=recipe["guidance"],
        seed=str(recipe["seed"]),
        sampler=recipe["sampler"],
        schedule=recipe["schedule"],
    )
    for key in ("strength", "clip_skip", "guidance_rescale", "refine_at"):
        if key in recipe:
            fields[key] = recipe[key]
    if recipe["guidance"] > 1:  # else it was not used, and is not recorded
        fields["negative_prompt"] = recipe["negative_prompt"]
    return Replay(
        fields=fields,
        model=recipe["model"],
        precision=recipe["precision"].get("name", "auto"),
        noise_given=recipe["rng"] == "given",
        noise_sha256=recipe["noise_sha256"],
        fingerprints=recipe.get("fingerprints", {}),
        used={key: str(recipe[key]) for key in USED if key in recipe},  # type: ignore[literal-required]
    )


def _foreign_replay(foreign: Foreign, path: Path) -> Replay:
    """What the recipe of another program says. Raises ModelError for one that cannot be followed."""
    from qwenimg.common.jobs.foreign import known_model

    if foreign.refused is not None:
        raise bad(path, f"its recipe of {foreign.program} is not plain: {foreign.refused}")
    seed = {"seed": str(foreign.fields["seed"])} if "seed" in foreign.fields else {}
    fields = cast(Fields, {**foreign.fields, **seed})
    if "negative_prompt" in fields and fields.get("guidance", 2) <= 1:  # it was not used
        del fields["negative_prompt"]
    model = None if foreign.model is None else known_model(foreign.model)
    if model is not None and os.path.lexists(model):  # a name of unknown origin never opens a path
        model = None
    needs = {"image_sha256": foreign.picture, "mask_sha256": foreign.mask}
    return Replay(
        fields=fields,
        model=model,
        precision="auto",
        used={key: "" for key, needed in needs.items() if needed},
        foreign_model=foreign.model or "",
        told=tuple(foreign.told()),
    )


def check_model(replay: Replay, given: str | None) -> None:
    """Raises ModelError where neither -m nor the recipe says which model is meant."""
    if given is None and replay.model is None:
        name = short(replay.foreign_model, 60)
        what = f"calls its model {name!r}, which is no name here" if name else "names no model"
        raise ModelError(f"--from: that picture's recipe {what}; say with -m which model makes it")


Line = tuple[str, Fields | ModelError]  # where it is, and what it says or what is wrong with it


def read_prompts(source: str) -> list[Line]:
    """Of each line of a prompt file (`-`: standard input) that is not left out, where it is and what it says.

    A line that starts with # is left out, one that starts with { is a JSON object, any other a prompt. Raises
    ModelError where the file as a whole cannot be used."""
    name, raw = ("standard input", _read_input()) if source == "-" else (source, _read_file(Path(source)))
    found: list[Line] = []
    for number, line in lines_with_text(raw.removeprefix(b"\xef\xbb\xbf")):
        where = f"{name}:{number}"
        if len(found) > MAX_PICTURES:
            raise bad(where, f"more than {MAX_PICTURES} prompts; split the file")
        if len(line) > MAX_LINE:
            raise bad(where, f"has more than {MAX_LINE:,} bytes; a prompt has at most {MAX_CHARACTERS:,} characters")
        try:
            found.append((where, _fields_of(line, where)))
        except ModelError as error:
            found.append((where, error))
    if not found:
        raise bad(name, "has no prompts; give one on each line")
    return found


def lines_with_text(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """The number, from 1, and the text of each line that is neither blank nor a comment, without the blanks before it.

    A file of 30 million such lines costs no list of them. A line that is too long is cut to one byte more than
    MAX_LINE."""
    number = begin = 0
    while match := _NOTHING.match(raw, begin):
        start = match.end()
        if start == len(raw):
            return
        number += raw.count(b"\n", begin, start)
        end = raw.find(b"\n", start)
        begin = len(raw) if end < 0 else end
        yield number + 1, raw[start : min(begin, start + MAX_LINE + 1)]


def pictures(
    base: Fields, lines: Sequence[Line] | None, output: str | None, *, overwrite: bool
) -> tuple[list[Picture], list[ModelError]]:
    """Every prompt with every seed, and the file of each; and the faults of `lines`, which override `base`. Raises
    UsageError."""
    from qwenimg.common.base import atomic_files

    # So far below 2^32 that counting up from it stays there.
    chance = secrets.randbelow(2**32 - MAX_PICTURES)
    check(base)
    seeds(base, chance)
    wanted: list[tuple[Fields, int, str]] = []
    faults: list[ModelError] = []
    for where, line in lines if lines is not None else [("", Fields())]:
        if isinstance(line, ModelError):
            faults.append(line)
            continue
        fields = merged(base, line)
        try:
            if "prompt" not in fields:
                raise UsageError("no prompt")
            check(fields)
            wanted += [(fields, seed, where) for seed in seeds(fields, chance)]
        except UsageError as error:
            if not where:
                raise
            faults.append(bad(where, str(error)))
        if len(wanted) > MAX_PICTURES:
            raise UsageError(f"more than {MAX_PICTURES} pictures; run several times")
    now = datetime.now()
    same_seeds = len({seed for _, seed, _ in wanted}) < len(wanted)
    several = len(wanted) > 1
    made = [_picture(*each, i, several, same_seeds, output, now) for i, each in enumerate(wanted, 1)]
    paths = [picture.path for picture in made if picture.path is not None]
    atomic_files.check_distinct(paths)
    for path in paths:
        atomic_files.check_output(path, overwrite=overwrite, new_folder=makes_folder(output))
    return made, faults


def makes_folder(output: str | None) -> bool:
    """Whether `-o` names a folder that is made if it is missing: it ends in a slash."""
    return output is not None and output.endswith("/")


def _picture(
    fields: Fields,
    seed: int,
    where: str,
    index: int,
    several: bool,
    same_seeds: bool,
    output: str | None,
    now: datetime,
) -> Picture:
    from qwenimg.common.base import atomic_files

    path = None
    if output != "-":
        path = atomic_files.output_path(
            output,
            seed=seed,
            index=index,
            prompt=fields["prompt"],
            now=now,
            several=several,
            same_seeds=same_seeds,
        )
        path = absolute(path)
    return Picture(
        index=index,
        where=where,
        prompt=fields["prompt"],
        negative_prompt=fields.get("negative_prompt"),
        width=fields.get("width"),
        height=fields.get("height"),
        aspect=fields.get("aspect"),
        steps=fields.get("steps"),
        guidance=fields.get("guidance"),
        sampler=fields.get("sampler"),
        schedule=fields.get("schedule"),
        strength=fields.get("strength"),
        clip_skip=fields.get("clip_skip"),
        guidance_rescale=fields.get("guidance_rescale"),
        refine_at=fields.get("refine_at"),
        seed=seed,
        path=path,
    )


def _fields_of(line: bytes, where: str) -> Fields:
    """Raises ModelError."""
    if line.strip().startswith(b"{"):
        return _object(line.strip(), where)
    try:
        return Fields(prompt=line.decode("utf-8").strip())
    except UnicodeDecodeError as error:
        raise bad(where, f"is not UTF-8 (byte {error.start})") from None


def _object(line: bytes, where: str) -> Fields:
    data = strict_json(line, where, depth=1, values=100)
    if not isinstance(data, dict):
        raise bad(where, "is not a JSON object")
    for key, value in data.items():
        if key not in _TYPES:
            raise bad(where, f"unknown field {short(key, 40)!r}; known are {', '.join(_TYPES)}")
        types, expected = _TYPES[key]
        if not isinstance(value, types) or isinstance(value, bool):
            raise bad(where, f"{key} is {short(value, 40)!r}; expected {expected}")
    return _fields(data, where)


def _fields(data: dict[str, Any], where: str) -> Fields:
    size = {key: data.pop(key, None) for key in ("width", "height", "size", "aspect")}
    if "seed" in data:
        data["seed"] = str(data["seed"])
    try:
        return cast(Fields, {**data, **sides(**size)})
    except UsageError as error:
        raise bad(where, str(error)) from None


def _read_file(path: Path) -> bytes:
    if kind(path) == "other" and path.is_fifo():  # as `<(command)` gives
        raise bad(path, "is a pipe; send the prompts to standard input, with `command | qwenimg --prompt-file -`")
    with contextlib.closing(open_regular(path)) as file:
        if file.size > MAX_PROMPT_FILE:
            raise bad(path, f"has {file.size:,} bytes; a prompt file has at most {MAX_PROMPT_FILE:,}")
        return file.read(0, file.size)


def _read_input() -> bytes:
    if sys.stdin is None:
        raise ModelError("--prompt-file -: there is no standard input")
    try:
        raw = sys.stdin.buffer.read(MAX_PROMPT_FILE + 1)
    except OSError as error:  # it is a folder, or open for writing only
        raise ModelError(f"standard input: cannot be read: {short(error.strerror or error, 80)}") from None
    if len(raw) > MAX_PROMPT_FILE:
        raise ModelError(f"standard input: more than {MAX_PROMPT_FILE:,} bytes of prompts")
    return raw
