"""Checks of a job before a model is opened, and reading of its initial images and noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwenimg.common.base.amounts import counted
from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.jobs.fields import Fields, check, fields, seeds
from qwenimg.common.jobs.naming import output_path
from qwenimg.common.jobs.pictures import Picture
from qwenimg.common.jobs.replay import Replay, check_model
from qwenimg.common.pictures import latents as latents_
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
"""Keys of a recipe for inputs that it names and does not contain, and the options for these; `lora` and `control` come
last."""


def check_forms(said: Fields, output: str | None, latents: Path | None, save_latents: Path | None) -> Fields:
    """Check the values of `said`, options of an image, and the names of files; open no file. Return them as `fields`
    does. Raises UsageError.

    output: as after -o. latents: a file to start from. save_latents: a file to write."""
    values = fields(said)
    check(values)
    seeds(values, 0)
    if output != "-":
        output_path(output, seed=0, index=1, prompt="", now=datetime.now(UTC), several=False, same_seeds=False)
    if latents is not None:
        latents_.kind_of(latents)
    if save_latents is not None and save_latents.suffix.lower() not in latents_.SUFFIXES:
        raise UsageError(f"--save-latents {clean(save_latents, 120)}: let the name end in .npy or .safetensors")
    return values


def check_cache(wanted: Sequence[Picture]) -> None:
    """Check that some image has a step cache, whose effect is to be measured. Raises UsageError."""
    if not any(one.said("step_cache") or one.said("cached_calls") for one in wanted):
        raise UsageError("--step-cache-check compares what --step-cache draws; give both")


def check_replay(replay: Replay, given: Mapping[str, object], model: str | None) -> None:
    """Check that `given` has every input that a recipe names and does not contain, by the keys of RECORDED, `lora`,
    `latents` and `seed`; and that the model is known. Raises UsageError and ModelError."""
    if replay.noise_given and given["latents"] is None and given["seed"] is None:
        raise UsageError("--from: the noise of that picture was given with --latents; give the same file, or a seed")
    for key, option in (RECORDED | {"lora": "--lora", "control": "--control"}).items():
        if key in replay.used and given[key] is None:
            what = "" if key.endswith("sha256") else f" ({clean(replay.used[key], 60)})"
            raise UsageError(f"--from: that picture was made with {option}{what}; give the same")
    check_model(replay, model)


def read_noise(path: Path, wanted: Sequence[Picture]) -> NDArray[np.float32]:
    """Return the latents [N, C, h, w] in a file: the same number of rows for each image, or one row for all prompts.
    Raises UsageError."""
    noise = latents_.read_latents(path)
    if len(noise) != 1 and len(noise) % len(wanted):
        raise UsageError(
            f"--latents {clean(path, 120)}: has {counted(len(noise), 'row')} of latents, "
            f"this run makes {counted(len(wanted), 'picture')}"
        )
    # Another sampler may draw noise in its steps, from the seed.
    drawn = any(picture.said("sampler") for picture in wanted)
    if len(noise) < len(wanted) and len({picture.prompt for picture in wanted}) < len(wanted) and not drawn:
        raise UsageError("--latents takes the place of the seed: several seeds would make one picture; give one")
    return noise


def read_pictures(
    images: Sequence[Path],
    mask: Path | None,
    strength: object,
    *,
    controlled: bool = False,
    only_masked: bool = False,
) -> tuple[Any, Any, list[str]]:
    """Return the images and the mask of the first as arrays, and a line for each conversion. controlled: there is a
    control; without images the mask is its picture's, and the file is returned. only_masked: some image is drawn
    where the mask is alone. Raises UsageError and ModelError."""
    if only_masked and mask is None:
        raise UsageError("--only-masked draws what a mask covers: give one, as in -i PICTURE --mask MASK")
    if not images:
        if controlled and strength is None:
            return (), mask, []
        for option, value in (("--mask", mask), ("--strength", strength)):
            if value is not None:
                raise UsageError(f"{option} needs the picture that it is for; give it with -i")
        return (), None, []
    from qwenimg.common.pictures import input

    pixels, notes = zip(*map(input.read_image, images), strict=True)
    grey, more = (None, []) if mask is None else input.read_mask(mask, pixels[0])
    return pixels, grey, [*chain(*notes), *more]
