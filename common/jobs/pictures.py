"""The list of images to generate, each with its file, from options and the lines of a prompt file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

from qwenimg.common.base.atomic_files import check_output
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.safe_files import absolute, bad
from qwenimg.common.jobs.fields import MAX_PICTURES, Fields, check, merged, seeds
from qwenimg.common.jobs.naming import check_distinct, output_path
from qwenimg.common.jobs.prompt_file import Line
from qwenimg.common.pictures import layer_files
from qwenimg.common.prompts.check import check_said
from qwenimg.common.prompts.wildcards import TEMPLATES, Wildcards
from qwenimg.common.request.request import OPTIONS, random_seed


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One image to generate."""

    index: int  # from 1
    where: str  # its line in a prompt file, `prompts.txt:3`, or ""
    asked: Fields  # arguments of a pipeline's call by name, with prompt and seed, without None
    aspect: Fraction | None  # in place of width and height
    path: Path | None  # absolute; None for standard output
    layers: int = 0  # that a model with layers makes, each in a file of its own; 0 for other models
    views: tuple[str, ...] = ()  # of all layers, in files beside them: stack, sheet

    @property
    def prompt(self) -> str:
        return str(self.asked["prompt"])

    @property
    def texts(self) -> str:
        """Its prompts and their templates: the long texts of its recipe."""
        return "".join(self.said(name) or "" for name in (*TEMPLATES, *TEMPLATES.values()))

    @property
    def seed(self) -> int:
        return int(self.asked["seed"])

    @property
    def files(self) -> list[Path]:
        """The files of the image: one, or those of the layers and then of the views, or none for standard output.
        Raises UsageError for a name that cannot be that of layers."""
        if self.path is None:
            return []
        if not self.layers:
            return [self.path]
        views = (layer_files.named(self.path, view) for view in self.views)
        return [*layer_files.numbered(self.path, self.layers), *views]

    def said(self, name: str) -> Any:
        """Return the value of the option `name`; None leaves it to the model."""
        return self.asked.get(name)


def pictures(
    base: Fields,
    lines: Sequence[Line] | None,
    output: str | None,
    wildcards: Wildcards,
    *,
    overwrite: bool,
    unsaid: bool = False,
) -> tuple[list[Picture], list[ModelError]]:
    """Return an image for every prompt with every seed, which chooses among what the prompt has, and the faults of
    `lines`, which override `base`. unsaid: a prompt may be empty. Raises UsageError and ModelError."""
    chance = random_seed()
    check(base)
    seeds(base, chance)
    wanted: list[tuple[Fields, int, str]] = []
    faults: list[ModelError] = []
    for where, line in lines if lines is not None else [("", {})]:
        if isinstance(line, ModelError):
            faults.append(line)
            continue
        fields = merged(base, line)
        try:
            if "prompt" not in fields:
                raise UsageError("no prompt")
            check(fields)
            chosen = [(wildcards.chosen(fields, seed), seed, where) for seed in seeds(fields, chance)]
            for each, _, _ in () if unsaid else chosen:
                check_said(each["prompt"])
            wanted += chosen
        except (UsageError, ModelError) as error:
            if not where:
                raise
            faults.append(bad(where, str(error)))
        if len(wanted) > MAX_PICTURES:
            raise UsageError(f"more than {MAX_PICTURES} pictures; run several times")
    now = datetime.now()
    same_seeds = len({seed for _, seed, _ in wanted}) < len(wanted)
    several = len(wanted) > 1
    images = [_picture(*each, i, several, same_seeds, output, now) for i, each in enumerate(wanted, 1)]
    paths = [picture.path for picture in images if picture.path is not None]
    check_distinct(paths)
    for path in paths:
        check_output(path, overwrite=overwrite, new_folder=makes_folder(output))
    return images, faults


def makes_folder(output: str | None) -> bool:
    """Return whether a missing folder of `-o` is made: if `-o` ends in a slash, or has a field such as {index}."""
    return output is not None and (output.endswith("/") or "{" in output)


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
    path = None
    if output != "-":
        names = {"seed": seed, "index": index, "prompt": fields["prompt"]}
        path = absolute(output_path(output, **names, now=now, several=several, same_seeds=same_seeds))
    asked = {name: fields[name] for name in (*OPTIONS, *TEMPLATES.values()) if name in fields} | {"seed": seed}
    return Picture(index=index, where=where, asked=asked, aspect=fields.get("aspect"), path=path)
