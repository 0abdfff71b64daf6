"""A job: the images that a command line, a line of a prompt file or a request asks for. `run` draws them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwenimg.common.base.atomic_files import check_output
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.safe_files import absolute, bad
from qwenimg.common.jobs.image_options import MAX_PICTURES, Options, check, merged, of_request, seeds
from qwenimg.common.jobs.naming import check_distinct, output_path
from qwenimg.common.jobs.prompt_file import Line
from qwenimg.common.numbers import variation
from qwenimg.common.pictures import layer_files
from qwenimg.common.prompts.check import check_not_blank
from qwenimg.common.prompts.wildcards import TEMPLATES, Wildcards
from qwenimg.common.request.request import enlarged

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from qwenimg.common.request.control_text import Control


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFiles:
    """Files of the pictures of a job: paths of this machine, or bytes."""

    images: tuple[Path | bytes, ...] = ()  # the initial image, or all that the model sees
    mask: Path | bytes | None = None
    mask_alpha: bool = False  # True: a mask's transparent parts are drawn anew, else its white ones
    controls: tuple[bytes, ...] = ()  # the controls among a job's options have their numbers, from 1 on


NO_FILES = InputFiles()


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One image, or several that differ by their seeds."""

    options: Options  # without seed and number
    seeds: tuple[int, ...]  # an image for each
    files: InputFiles = NO_FILES
    where: str = ""  # its line in a prompt file, `prompts.txt:3`
    index: int = 1  # of its first image in the run
    path: Path | None = None  # of the file of its one image, absolute; None if the image goes elsewhere
    layers: int = 0  # that a model with layers makes, each in a file of its own; 0 for other models
    views: tuple[str, ...] = ()  # of all layers, in files beside them: stack, sheet

    @property
    def prompt(self) -> str:
        return str(self.options["prompt"])

    @property
    def seed(self) -> int:
        """The seed of its first image."""
        return self.seeds[0]

    @property
    def texts(self) -> str:
        """Its prompts and their templates: the long texts of its recipe."""
        return "".join(self.get(name) or "" for name in (*TEMPLATES, *TEMPLATES.values()))

    @property
    def outputs(self) -> list[Path]:
        """The paths of the image: one file, or the layers and then the views; none for standard output. Raises
        UsageError for a name that layers cannot have."""
        if self.path is None:
            return []
        if not self.layers:
            return [self.path]
        views = (layer_files.named(self.path, view) for view in self.views)
        return [*layer_files.numbered(self.path, self.layers), *views]

    def get(self, name: str) -> Any:
        """Return the value of the option `name`; None leaves it to the model."""
        return self.options.get(name)

    def split(self, wildcards: Wildcards) -> list[Job]:
        """Return a job for each image, with the texts that its seed chooses; each further image of one seed has the
        next variation of it, if there are any. Raises UsageError and ModelError."""
        times: Counter[int] = Counter()
        jobs: list[Job] = []
        for index, seed in enumerate(self.seeds, self.index):
            options = wildcards.chosen(self.options, seed)
            if options.get("variation") and times[seed]:
                options = options | {"variation": str(variation.parse(options["variation"]).next(times[seed]))}
            times[seed] += 1
            jobs.append(replace(self, options=options, seeds=(seed,), index=index))
        return jobs


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The arrays that jobs start from."""

    images: tuple[NDArray[np.uint8], ...] = ()  # [H, W, 3] each: the initial image, or all that the model sees
    mask: NDArray[np.uint8] | Path | None = None  # [H, W], white where the image is regenerated, or its file
    controls: tuple[Control, ...] = ()  # with their pictures; else those of each job, whose files are read
    noise: NDArray[np.float32] | None = None  # [N, C, h, w], `noise_rows` for each image or these for all
    noise_rows: int = 1

    def size(self, job: Job) -> tuple[int, int]:
        """Return width and height of the file of a `completed` job; with `only_masked`, the first image's."""
        first = next((one for one in (*self.images, *(one.picture for one in self.controls)) if one is not None), None)
        if job.get("only_masked") is None or first is None:
            return enlarged(job.get("width"), job.get("height"), job.get("hires"))
        return first.shape[1], first.shape[0]

    def call(self, job: Job) -> dict[str, Any]:
        """Return the arguments of `Pipeline.stream` for a `completed` job of one image."""
        i, noise, rows = job.index - 1, self.noise, self.noise_rows
        latents = noise if noise is None or len(noise) == rows else noise[i * rows : (i + 1) * rows]
        controls = {"control": self.controls} if self.controls else {}
        images = {"image": self.images or None, "mask": self.mask, "latents": latents}
        return of_request(job.options) | {"seed": job.seed} | images | controls


def jobs_of(
    base: Options,
    lines: Sequence[Line],
    wildcards: Wildcards,
    chance: Callable[[Options], int],
    *,
    files: InputFiles = NO_FILES,
    most: float = MAX_PICTURES,
) -> tuple[list[Job], list[ModelError]]:
    """Return a job for each seed of each of `lines`, whose options override `base`, with the texts that the seed
    chooses, and the faults of lines. A fault of a line without a place is raised: UsageError or ModelError.

    chance: returns the seed of options without one. files: of each job; with images or controls a prompt may be empty,
    since some models describe a picture, or take one as text. most: images."""
    check(base)
    seeds(base, 0)
    jobs: list[Job] = []
    faults: list[ModelError] = []
    for where, line in lines:
        if isinstance(line, ModelError):
            faults.append(line)
            continue
        try:
            options = merged(base, line)
            if "prompt" not in options:
                raise UsageError("no prompt")
            check(options)
            rest = {name: value for name, value in options.items() if name not in ("seed", "num_images")}
            made = Job(options=rest, seeds=seeds(options, chance(rest)), files=files, where=where).split(wildcards)
            for job in () if files.images or "control" in rest else made:
                check_not_blank(job.prompt)
            jobs += made
        except (UsageError, ModelError) as error:
            if not where:
                raise
            faults.append(bad(where, str(error)))
        if len(jobs) > most:
            raise UsageError(f"more than {most} pictures; run several times")
    return jobs, faults


def with_paths(jobs: Sequence[Job], pattern: str | None, *, overwrite: bool) -> list[Job]:
    """Return jobs of one image with their numbers and the paths of their files by `pattern`, the value of -o. Raises
    UsageError."""
    now, several = datetime.now(), len(jobs) > 1
    same_seeds = len({job.seed for job in jobs}) < len(jobs)
    placed: list[Job] = []
    for index, job in enumerate(jobs, 1):
        names: dict[str, Any] = {"seed": job.seed, "index": index, "prompt": job.prompt}
        path = None
        if pattern != "-":
            path = absolute(output_path(pattern, **names, now=now, several=several, same_seeds=same_seeds))
        placed.append(replace(job, index=index, path=path))
    paths = [job.path for job in placed if job.path is not None]
    check_distinct(paths)
    for path in paths:
        check_output(path, overwrite=overwrite, new_folder=makes_folder(pattern))
    return placed


def makes_folder(pattern: str | None) -> bool:
    """Return whether a missing folder of `-o` is made: if `-o` ends in a slash, or has a field such as {index}."""
    return pattern is not None and (pattern.endswith("/") or "{" in pattern)
