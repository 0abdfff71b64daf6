"""The axes of a grid: the values of one option each, and the options of each cell."""

from __future__ import annotations

import json
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.strict_json import strict_json
from qwenimg.common.base.text import by_name, clean
from qwenimg.common.jobs.image_options import (
    SIZES,
    TEXT_OPTIONS,
    Options,
    check,
    merged,
    parse,
    parse_json,
    parse_seeds,
    plain,
)
from qwenimg.common.request.option import Option

MOST_CELLS = 100
MAX_TEXT = 8_000  # characters of an axis
MAX_RECORD = 1 << 22  # characters of the axes in a sheet, with two prompts
KEY = "qwenimg-grid"  # the keyword of a sheet's text with its axes
FILES = (
    "lora",
    "embedding",
    "control",
    "hires_with",
    "upscale_with",
)  # options whose values may name files of one machine
_WITHOUT = ("num_images",)
# What most grids compare, for the message about another name
_USUAL = (
    "prompt", "steps", "guidance", "seed", "sampler", "schedule", "strength", "size", "lora", "variation", "few-steps",
    "clip-skip", "negative-prompt", "hires",
)  # fmt: skip
# Words of other programs' axes that are like no name here
_FOREIGN = by_name({
    "all cells have one model; run the grid once for each":
        "model models checkpoint ckpt vae backend precision quantize",
    "a cell is one picture; give seeds, as seed=1-4": "num-images n batch-size batch-count count",
    "did you mean strength?": "denoise denoising denoising-strength",
    "did you mean prompt?": "prompt-s/r prompt-sr search-replace text",
    "did you mean schedule?": "scheduler schedule-type noise-schedule",
})  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The values of one option."""

    flag: str  # --x or --y
    text: str  # as it was written, steps=4,8
    name: str
    values: tuple[str, ...]
    options: tuple[Options, ...]  # of each value; of `prompt` empty, for its values replace the first one

    def labels(self) -> list[str]:
        """Return each value with the option's name, without the folders of files."""
        names = [value.rpartition("/")[2] if self.name in FILES else value for value in self.values]
        if self.name == "prompt":
            return [clean(name, 60) for name in names]
        return [clean(f"{self.name.replace('_', '-')} {name}", 60) for name in names]

    def check(self, prompt: str) -> None:
        """Raise UsageError if the text that the axis replaces is not in `prompt`."""
        if self.name == "prompt" and self.values[0] not in prompt:
            found = f"{clean(self.values[0], 40)!r} is not in the prompt"
            raise UsageError(f"{self.flag} prompt: {found}; the first value is the text that the others replace")

    def cell(self, index: int, prompt: str) -> Options:
        """Return the options that the value at `index` sets."""
        replaces = self.name == "prompt"
        return {"prompt": prompt.replace(self.values[0], self.values[index])} if replaces else self.options[index]


def parse_axis(flag: str, text: str, *, files: bool = True) -> Axis:
    """Parse `name=value,value`; with a `|` in it, the values stand between these and may have commas. files: a value
    may name a file of this machine. Raises UsageError."""
    shown = f"{flag} {clean(text, 60)}"
    name, equals, listed = text.partition("=")
    if not equals or not name.strip() or len(text) > MAX_TEXT:
        raise UsageError(f"{shown}: expected an option and its values, such as {flag} steps=4,8,20")
    one = _option(name.strip(), shown)
    if not files and one.name in FILES:
        raise UsageError(f"{shown}: names files, and a name in a picture is never opened")
    if "|" in listed:
        values = [value.strip() for value in listed.removesuffix("|").split("|")]
    else:
        values = [value.strip() for value in listed.split(",")]
    if not all(values):
        raise UsageError(f"{shown}: a value is empty; give values between commas, or between | if they have commas")
    if one.name == "seed":
        values = _seeds(values, shown)
    if len(values) > MOST_CELLS:
        raise UsageError(f"{shown}: {len(values)} values; a grid has at most {MOST_CELLS} cells")
    if twice := sorted(value for value in {*values} if values.count(value) > 1):
        raise UsageError(f"{shown}: the value {clean(twice[0], 40)!r} is there twice; leave one out")
    options = [Options() if one.name == "prompt" else _parsed(one, value, flag, files) for value in values]
    return Axis(flag=flag, text=text, name=one.name, values=tuple(values), options=tuple(options))


def _option(name: str, shown: str) -> Option:
    plain_name = name.lower().lstrip("-").replace("_", "-").replace(" ", "-")
    for one in TEXT_OPTIONS.values():
        if one.name not in _WITHOUT and plain_name in (one.dashed, *one.aliases, "seeds" if one.name == "seed" else ""):
            return one
    raise UsageError(f"{shown}: no option of a picture that a grid compares: {_meant(plain_name)}")


def _meant(name: str) -> str:
    names = [known for one in TEXT_OPTIONS.values() if one.name not in _WITHOUT for known in (one.dashed, *one.aliases)]
    if (advice := _FOREIGN.get(name)) is not None:
        return advice
    if near := get_close_matches(name[:100], names, n=1, cutoff=0.75):
        return f"did you mean {near[0]}?"
    return f"there are {', '.join(_USUAL)}; all: qwenimg grid --help"


def _seeds(values: list[str], shown: str) -> list[str]:
    """Return each seed of the texts, ranges too."""
    numbers: list[str] = []
    for value in values:
        listed = parse_seeds(value)
        if listed is None:
            raise UsageError(f"{shown}: a grid has no random seed; give numbers, as seed=1-4")
        if len(numbers) + len(listed) > MOST_CELLS:
            raise UsageError(f"{shown}: more than {MOST_CELLS} seeds; a grid has at most {MOST_CELLS} cells")
        numbers += [str(number) for number in listed]
    return numbers


def _parsed(one: Option, value: str, flag: str, files: bool) -> Options:
    where = f"{flag} {one.dashed}"
    typed: object = value
    try:
        if one.kind in (int, float) and not one.several and one.parse is None:
            typed = one.kind(value) if value.isascii() and "_" not in value else None
            if typed is None:
                raise ValueError
    except ValueError:
        raise UsageError(f"{where}: {clean(value, 40)!r} is not {one.expected}") from None
    try:
        options = parse(parse_json({one.name: typed}), files=files)
        check(options)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    return options


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A prompt, its options, and one or two axes."""

    base: Options
    x: Axis
    y: Axis | None = None

    def __post_init__(self) -> None:
        """Raises UsageError for axes that do not go together."""
        count = len(self.x.values) * (1 if self.y is None else len(self.y.values))
        if count > MOST_CELLS:
            raise UsageError(f"the grid would have {count} cells; at most {MOST_CELLS} are drawn, so give fewer values")
        names = [axis.name for axis in self.axes]
        sized = [name for name in names if name in SIZES]
        if len(sized) == 2 and {*sized} != {"width", "height"}:
            raise UsageError(f"--x {sized[0]} and --y {sized[1]} both give the size; take one of them")
        if len({*names}) < len(names) and names[0] != "prompt":
            raise UsageError(f"--x and --y are both of {names[0].replace('_', '-')}; give another option to one")

    @property
    def axes(self) -> tuple[Axis, ...]:
        return (self.x,) if self.y is None else (self.x, self.y)

    def cells(self) -> list[tuple[tuple[str, ...], Options]]:
        """Return the labels and the options of each cell, row by row. Raises UsageError."""
        prompt = str(self.base["prompt"])
        for axis in self.axes:
            axis.check(prompt)
        columns = self.x.labels()
        rows = [None] if self.y is None else self.y.labels()
        cells: list[tuple[tuple[str, ...], Options]] = []
        for row, below in enumerate(rows):
            for column, label in enumerate(columns):
                more = self.x.cell(column, prompt)
                if self.y is not None:
                    more = more | self.y.cell(row, more.get("prompt", prompt))
                options = merged(self.base, more)
                check(options)
                cells.append(((label,) if below is None else (label, below), options))
        return cells


# The text of a sheet


def to_text(grid: Grid, seed: int) -> str:
    """Return the text that a sheet carries: all that `from_text` needs, without names of files."""
    base = {name: value for name, value in plain(grid.base).items() if name not in (*FILES, "aspect", "seed")}
    aspect = grid.base.get("aspect")
    more = {} if aspect is None else {"aspect": f"{aspect.numerator}:{aspect.denominator}"}
    axes = {"x": grid.x.text} | ({} if grid.y is None else {"y": grid.y.text})
    return json.dumps(
        {"format": 1, **axes, "options": base | more | {"seed": str(seed)}}, ensure_ascii=False, sort_keys=True
    )


def from_text(texts: dict[str, str], path: Path) -> tuple[dict[str, str], Options]:
    """Return the axes' texts by `x` and `y`, and the options, in the texts of the sheet at `path`. No value names a
    file. Raises ModelError."""
    text = texts.get(KEY)
    if text is None:
        raise bad(path, "has no axes of a grid; give the sheet that `qwenimg grid` wrote, or --x and --y")
    if len(text) > MAX_RECORD:
        raise bad(path, f"its grid has {len(text):,} characters; at most {MAX_RECORD:,} are read")
    value = strict_json(text.encode("utf-8", "surrogatepass"), path, depth=3, values=400)
    if not isinstance(value, dict) or value.get("format") != 1 or not isinstance(value.get("options"), dict):
        raise bad(path, "its grid is not of format 1; draw it again with --x and --y")
    axes = {name: value[name] for name in ("x", "y") if name in value}
    if fields := sorted(value["options"].keys() & {*FILES}):
        raise bad(path, f"its grid names files ({', '.join(fields)}), and a name in a picture is never opened")
    if "x" not in axes or not all(isinstance(axis, str) for axis in axes.values()):
        raise bad(path, "its grid has no axes in words; give --x and --y")
    try:
        options = parse(parse_json(value["options"]), files=False)
        check(options)
    except UsageError as error:
        raise bad(path, f"its grid has a bad option: {error}") from None
    return axes, options
