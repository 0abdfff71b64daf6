"""The run of a job: generate and write each image, and report to a listener, such as a command line or a server.

Backends are imported only here: a wrong option is refused without them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from qwenimg.common.base import atomic_files
from qwenimg.common.base.errors import (
    DoesNotFit,
    ModelError,
    NumericsError,
    UsageError,
    disk_full,
    out_of_memory,
)
from qwenimg.common.base.safe_files import bad
from qwenimg.common.jobs.naming import check_distinct
from qwenimg.common.jobs.pictures import Picture
from qwenimg.common.jobs.replay import Replay, differences
from qwenimg.common.pictures import latents, layer_files
from qwenimg.common.request.control_text import Control
from qwenimg.common.request.request import OPTIONS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from qwenimg.common.memory.estimate import Estimate
    from qwenimg.common.pipeline.pipeline import Pipeline
    from qwenimg.common.pipeline.result import Result, Step


@dataclass(frozen=True, kw_only=True)
class Job:
    """The inputs of a run's images, and how they are written."""

    images: tuple[NDArray[np.uint8], ...] = ()  # [H, W, 3] each: the initial image, or all that the model sees
    mask: NDArray[np.uint8] | Path | None = None  # [H, W], white where the image is regenerated, or its file
    controls: tuple[Control, ...] = ()  # with their pictures; else those of each image, whose files are read
    noise: NDArray[np.float32] | None = None  # [N, C, h, w], `noise_rows` for each image or these for all
    noise_rows: int = 1
    replay: Replay | None = None  # the recipe that is repeated
    notes: tuple[str, ...] = ()  # warnings about its inputs, for the recipe of every image
    overwrite: bool = False
    metadata: bool = True
    check_cache: bool = False  # measure the effect of a step cache by generating without it too
    new_folder: bool = False  # make the folder of an image if it is missing
    save_latents: Path | None = None  # a file for the latents of all images
    keep_control: bool = False  # write the pictures of preprocessors beside each image
    put: Callable[[bytes], object] | None = None  # receives an image without a path
    views: tuple[str, ...] = ()  # of all layers of an image: `stack`, one over the other, and `sheet`, side by side

    def size(self, picture: Picture) -> tuple[int, int]:
        """Return width and height of the file of a `completed` picture: with `only_masked` those of the first image."""
        first = next((one for one in (*self.images, *(one.picture for one in self.controls)) if one is not None), None)
        if picture.said("only_masked") is None or first is None:
            return picture.said("width"), picture.said("height")
        return first.shape[1], first.shape[0]

    def asked(self, picture: Picture) -> dict[str, Any]:
        """Return the arguments of `Pipeline.stream` for `picture`."""
        i, noise, rows = picture.index - 1, self.noise, self.noise_rows
        latents = noise if noise is None or len(noise) == rows else noise[i * rows : (i + 1) * rows]
        controls = {"control": self.controls} if self.controls else {}
        return picture.asked | {"image": self.images or None, "mask": self.mask, "latents": latents} | controls


class Listener(Protocol):
    """A receiver of a run's reports. `begin` and `step` may raise a BaseException to end it, as after a signal."""

    def notify(self, kind: str, text: str) -> None: ...

    def begin(self, picture: Picture) -> None: ...

    def step(self, picture: Picture, step: Step) -> None: ...

    def image(self, picture: Picture, result: Result, seconds: float) -> None: ...

    def failure(self, picture: Picture, error: Exception) -> None: ...


@dataclass(kw_only=True)
class Outcome:
    """The result of a run."""

    written: int = 0  # images
    failed: list[Exception] = field(default_factory=list)  # one for each image that was not generated
    fatal: bool = False  # whether the last of these ended the run


# Before the first picture


def completed(picture: Picture, pipe: Pipeline, job: Job) -> Picture:
    """Return `picture` with the model's defaults for missing options, except the negative prompt."""
    d = pipe.defaults
    if picture.said("few_steps") or picture.said("true_cfg"):
        picture = replace(picture, asked=pipe.settled(picture.asked))
    if picture.aspect is not None:
        width, height = d.size(picture.aspect)
    else:
        part, given = picture.said("only_masked") is not None, (picture.said("width"), picture.said("height"))
        width, height = d.sides(*given, job.images, only_masked=part)
    usual = {"steps": d.steps, "guidance": d.guidance}
    layers = (picture.said("layers") or OPTIONS["layers"].default) if "layers" in pipe.model.options else 0
    asked = usual | picture.asked | {"width": width, "height": height}
    return replace(picture, asked=asked, layers=layers, views=job.views)


def check_files(job: Job, wanted: Sequence[Picture]) -> None:
    """Check the names of the files of `completed` pictures, whose layers are known. Raises UsageError."""
    for picture in wanted:
        if picture.layers and picture.path is None:
            raise UsageError(f"-o -: standard output takes one picture, this model makes {picture.layers} layers")
        if picture.layers:
            continue
        if job.views:
            raise UsageError(f"--{job.views[0]} is for a model that makes layers")
        if layer_files.FIELD in str(picture.path):
            raise UsageError(f"-o: {layer_files.FIELD} is for a model that makes layers; leave it out")
    layered = [path for picture in wanted if picture.layers for path in picture.files]
    check_distinct(layered)
    for path in layered:
        atomic_files.check_output(path, overwrite=job.overwrite, new_folder=job.new_folder)


def passing(wanted: Sequence[Picture], check: Callable[[Picture], object]) -> tuple[list[Picture], list[ModelError]]:
    """Return the images of `wanted` that pass `check`, and the faults of the others, one for each line of a prompt
    file. Raises UsageError and ModelError for an image that is not from a prompt file."""
    passed: list[Picture] = []
    faults: dict[str, ModelError] = {}
    for picture in wanted:
        try:
            check(picture)
            passed.append(picture)
        except (UsageError, ModelError) as error:
            if not picture.where:
                raise
            faults.setdefault(picture.where, bad(picture.where, str(error)))
    return passed, list(faults.values())


def estimated(pipe: Pipeline, job: Job, picture: Picture) -> Estimate:
    """Return the estimate for a `completed` picture. Raises QwenimgError if it cannot be generated or written."""
    from qwenimg.common.pipeline import encode

    if picture.path is not None:
        texts = picture.texts if job.metadata else ""
        encode.check(picture.path.suffix, *job.size(picture), texts)
    return pipe.estimate(**job.asked(picture))


def _scale(pipe: Pipeline, picture: Picture) -> float:
    """Return the scale of guidance by a negative prompt of a `completed` picture."""
    name = pipe.model.guidance.name.replace("-", "_")
    value = picture.said(name)
    return float(OPTIONS[name].default if value is None else value)


def prepare(pipe: Pipeline, wanted: Sequence[Picture], job: Job) -> None:
    """Announce every text of `wanted` to the model, each once."""
    texts: dict[str, None] = {}
    for picture in wanted:
        controls = job.controls or picture.said("control")
        texts[pipe.controls.prompt(picture.prompt, controls) if controls else picture.prompt] = None
        if _scale(pipe, picture) > pipe.model.guidance.off:
            negative = picture.said("negative_prompt")
            texts[pipe.defaults.negative_prompt if negative is None else negative] = None
    skips = {picture.said("clip_skip") or 0 for picture in wanted}
    first = {name: value for name in ("lora", "lora_mode") if (value := wanted[0].said(name))} if wanted else {}
    first |= {"image": _seen(pipe, job, wanted[0])} if job.images and wanted else {}
    pipe.prepare(list(texts), max(skips) if len(skips) == 1 else 0, **first)


def _seen(pipe: Pipeline, job: Job, picture: Picture) -> Sequence[NDArray[np.uint8]]:
    """Return the images of `picture` as the model sees them: the masked part of the first, if only that is drawn."""
    from qwenimg.common.pipeline import masked_area

    if picture.said("only_masked") is None:
        return job.images
    return masked_area.split(pipe.check(**job.asked(picture))).drawn.images


# The run


def run(pipe: Pipeline, job: Job, wanted: Sequence[Picture], listener: Listener) -> Outcome:
    """Generate and write each of `wanted` in order. A failure is reported, and the next image is generated unless it
    must fail too."""
    outcome, all_latents = Outcome(), list[Any]()
    for picture in wanted:
        listener.begin(picture)
        start, drawn = time.monotonic(), False
        try:
            result = _draw(pipe, job, picture, listener)
            drawn = True
            if job.check_cache and "step_cache_effect" in result.recipe:
                _check_cache(pipe, job, picture, listener, result)
            result.warn([*job.notes, *differences(job.replay, picture, result.recipe)])
            _write(job, picture, result)
            listener.image(picture, result, time.monotonic() - start)
            outcome.written += 1
            all_latents += [result.latents] if job.save_latents is not None else []
            if job.save_latents is not None and len(all_latents) == len(wanted):
                latents.write_latents(job.save_latents, latents.join_latents(all_latents), overwrite=job.overwrite)
        except Exception as error:
            listener.failure(picture, error)
            outcome.failed.append(error)
            if pipe.engine.group is not None:  # the other ranks may be in the midst of this picture
                outcome.fatal = True
                break
            if isinstance(error, DoesNotFit) or out_of_memory(error) or disk_full(error):
                if drawn or not outcome.written:  # a full disk stays full, memory that never sufficed will not suffice
                    break
            elif not isinstance(error, (UsageError, NumericsError)):
                outcome.fatal = True
                break
    return outcome


def _draw(pipe: Pipeline, job: Job, picture: Picture, listener: Listener) -> Result:
    from qwenimg.common.pipeline.result import Result

    for event in pipe.stream(**job.asked(picture)):
        if isinstance(event, Result):
            return event
        listener.step(picture, event)
    raise AssertionError("the stream ended without a picture")


def _check_cache(pipe: Pipeline, job: Job, picture: Picture, listener: Listener, result: Result) -> None:
    """Generate `result` without its step cache too, and add the difference to its recipe."""
    from qwenimg.common.pictures.pixels import psnr

    listener.notify("stage", "step cache: drawing the whole run to compare")
    whole = _draw(pipe, job, replace(picture, asked=picture.asked | {"step_cache": 0.0, "cached_calls": ""}), listener)
    seconds, ratio = (one.timing["steps"] for one in (result, whole)), psnr(result.pixels, whole.pixels)
    took = " of ".join(f"{one:.1f}" for one in seconds)
    effect = "the same pixels" if math.isinf(ratio) else f"PSNR {ratio:.1f} dB"
    result.recipe["step_cache_effect"] += f"; against the whole run {effect}, {took} s"
    listener.notify("stage", f"step cache: {result.recipe['step_cache_effect']}")


def _write(job: Job, picture: Picture, result: Result) -> None:
    """Write the image, or its layers and what shows all of them, in the format of the suffix, or pass a PNG to `put`.
    Raises UsageError and DoesNotFit."""
    import numpy as np

    from qwenimg.common.pipeline import encode

    recipe = result.recipe if job.metadata else None
    if picture.path is None:
        assert job.put is not None
        job.put(encode.encode(result.pixels, recipe, ".png"))
        return
    views = {"stack": result.pixels, "sheet": np.asarray(result.sheet())} if picture.views else {}
    images = [*(result.layers or (result.pixels,)), *(views[view] for view in picture.views)]
    for path, pixels in zip(picture.files, images, strict=True):
        if job.new_folder:
            atomic_files.make_folder(path.parent)
        atomic_files.write_atomic(path, encode.encode(pixels, recipe, path.suffix), overwrite=job.overwrite)
    kept = kept_controls(picture) if job.keep_control else ()
    for name, pixels in zip(kept, result.control_pictures, strict=False):
        if name is not None:
            atomic_files.write_atomic(name, encode.encode(pixels, None, ".png"), overwrite=job.overwrite)


def kept_controls(picture: Picture) -> list[Path | None]:
    """Return the file of each control's picture beside the image: `a.canny.png` beside `a.png`; None for one without a
    preprocessor."""
    assert picture.path is not None
    paths: list[Path | None] = []
    for control in picture.said("control") or ():
        ends = (f".{control.preprocessor}{f'-{i}' * (i > 1)}.png" for i in range(1, len(paths) + 2))
        names = (picture.path.with_suffix(end) for end in ends)
        paths.append(next(name for name in names if name not in paths) if control.preprocessor else None)
    return paths
