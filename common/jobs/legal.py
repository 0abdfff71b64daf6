"""Checks of jobs before a model is opened, and reading of their initial images and noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from qwenimg.common.base.amounts import counted
from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.safe_files import OpenFile, in_memory, open_regular
from qwenimg.common.base.text import clean, short
from qwenimg.common.jobs.image_options import Options, check, seeds
from qwenimg.common.jobs.job import InputFiles, Inputs, Job
from qwenimg.common.jobs.naming import output_path
from qwenimg.common.jobs.replay import Replay, check_model
from qwenimg.common.pictures import latents as latents_
from qwenimg.common.request import control_text
from qwenimg.common.request.control_text import Control
from qwenimg.common.request.parts import PARTS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RECORDED = {
    "image_sha256": "-i",
    "more_images_sha256": "several -i",
    "mask_sha256": "--mask",
    **{name: f"--{PARTS[name].dashed}" for name in PARTS},
}
"""Keys of a recipe for inputs that it names and does not contain, and the options for these; those of `_LAST` come
last."""
_LAST = {"lora": "--lora", "embedding": "--embedding", "control": "--control", "hires_with": "--hires-with"}


def check_forms(options: Options, pattern: str | None, latents: Path | None, save_latents: Path | None) -> None:
    """Check the values of `options` and the names of files; open no file. Raises UsageError.

    pattern: the value of -o. latents: a file to start from. save_latents: a file to write."""
    check(options)
    seeds(options, 0)
    if pattern != "-":
        output_path(pattern, seed=0, index=1, prompt="", now=datetime.now(UTC), several=False, same_seeds=False)
    if latents is not None:
        latents_.kind_of(latents)
        if options.get("variation"):
            raise UsageError("--variation turns the noise of a seed, --latents is noise of a file; leave one out")
    if save_latents is not None and save_latents.suffix.lower() not in latents_.SUFFIXES:
        raise UsageError(f"--save-latents {clean(save_latents, 120)}: let the name end in .npy or .safetensors")


def check_cache(jobs: Sequence[Job]) -> None:
    """Raise UsageError if no image uses a step cache, so that there is nothing to measure."""
    if not any(job.get("step_cache") or job.get("cached_calls") for job in jobs):
        raise UsageError("--step-cache-check compares what --step-cache draws; give both")


def check_replay(replay: Replay, given: Mapping[str, object], model: str | None) -> None:
    """Check that `given` has every input that a recipe names and does not contain, by the keys of RECORDED and
    _LAST, `latents` and `seed`; and that the model is known. Raises UsageError and ModelError."""
    if replay.noise_given and given["latents"] is None and given["seed"] is None:
        raise UsageError("--from: the noise of that picture was given with --latents; give the same file, or a seed")
    for key, option in (RECORDED | _LAST).items():
        if key in replay.used and given[key] is None:
            what = "" if key.endswith("sha256") else f" ({clean(replay.used[key], 60)})"
            other = ", or --hires-with lanczos" if key == "hires_with" else ""
            if key == "control" and replay.controls:
                asked = f"which it does not contain: {control_text.options_text(replay.controls)}"
                raise UsageError(short(f"--from: that picture was made with controls; give their pictures, {asked}"))
            raise UsageError(f"--from: that picture was made with {option}{what}; give the same{other}")
    check_model(replay, model)


def read_noise(path: Path, jobs: Sequence[Job]) -> NDArray[np.float32]:
    """Return the latents [N, C, h, w] in a file: the same number of rows for each image, or one row for all prompts.
    Raises UsageError."""
    noise = latents_.read_latents(path)
    if len(noise) != 1 and len(noise) % len(jobs):
        raise UsageError(
            f"--latents {clean(path, 120)}: has {counted(len(noise), 'row')} of latents, "
            f"this run makes {counted(len(jobs), 'picture')}"
        )
    # Another sampler may draw noise in its steps, from the seed.
    drawn = any(job.get("sampler") for job in jobs)
    if len(noise) < len(jobs) and len({job.prompt for job in jobs}) < len(jobs) and not drawn:
        raise UsageError("--latents takes the place of the seed: several seeds would make one picture; give one")
    return noise


def check_pictures(files: InputFiles, options: Options, *, controlled: bool) -> None:
    """Check that a mask and a strength come with a picture. controlled: a control is given, whose picture a mask may
    belong to. Raises UsageError."""
    strength = options.get("strength")
    if options.get("only_masked") is not None and files.mask is None:
        raise UsageError("--only-masked draws what a mask covers: give one, as in -i PICTURE --mask MASK")
    if options.get("outpaint") and not files.images:
        raise UsageError("--outpaint needs the picture that it extends; give it with -i")
    if files.images or (controlled and strength is None):
        return
    for option, value in (("--mask", files.mask), ("--strength", strength)):
        if value is not None:
            raise UsageError(f"{option} needs the picture that it is for; give it with -i")


def read_pictures(files: InputFiles, controls: Sequence[Control] = ()) -> tuple[Inputs, list[str]]:
    """Read the pictures of a job; return them and a line for each conversion. controls: the controls whose pictures are
    in `files`. Without images and controls the mask stays a file. Raises ModelError."""
    if not (files.images or files.controls):
        return Inputs(mask=files.mask if isinstance(files.mask, Path) else None), []
    from qwenimg.common.pictures import input, pixels

    images = [input.read_image(_source("image", one)) for one in files.images]
    pictures = [input.read_image(_source("control_image", one)) for one in files.controls]
    mask, notes = None, [line for _, lines in (*images, *pictures) for line in lines]
    if files.mask is not None:
        like = (images or pictures)[0][0]
        mask, more = input.read_mask(_source("mask", files.mask), like, transparent=files.mask_alpha)
        notes += more
    seen = tuple(replace(one, picture=pixels.over_white(pictures[int(one.file) - 1][0])) for one in controls)
    return Inputs(images=tuple(image for image, _ in images), mask=mask, controls=seen), notes


def read_files(files: InputFiles) -> InputFiles:
    """Return `files` with the bytes of each in place of its path, for another process. Raises ModelError."""
    mask = None if files.mask is None else _bytes(files.mask)
    return replace(files, images=tuple(map(_bytes, files.images)), mask=mask)


def _bytes(file: Path | bytes) -> bytes:
    if isinstance(file, bytes):
        return file
    with closing(open_regular(file)) as opened:
        return opened.read(0, opened.size)


def _source(name: str, file: Path | bytes) -> Path | OpenFile:
    return file if isinstance(file, Path) else in_memory(name, file)
