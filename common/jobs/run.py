"""The run of jobs: generate and write each image, and report to a listener, such as a command line or a server.

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
    QwenimgError,
    UsageError,
    disk_full,
    out_of_memory,
)
from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.text import clean, shown_path
from qwenimg.common.jobs.image_options import of_request
from qwenimg.common.jobs.job import Inputs, Job
from qwenimg.common.jobs.naming import check_distinct
from qwenimg.common.pictures import latents, layer_files
from qwenimg.common.request import embedding_text, outpaint_text
from qwenimg.common.request.control_text import PREPROCESSORS
from qwenimg.common.request.recipe import XMP, png_text
from qwenimg.common.request.request import OPTIONS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from qwenimg.common.memory.estimate import Estimate
    from qwenimg.common.pipeline.pipeline import Pipeline
    from qwenimg.common.pipeline.result import Result, Step
    from qwenimg.common.request.recipe import Recipe
    from qwenimg.common.upscaling.record import Enlargement


@dataclass(frozen=True, kw_only=True)
class Output:
    """The writing of a run's images, and the notes in their recipes."""

    overwrite: bool = False
    metadata: bool = True
    new_folder: bool = False  # make the folder of an image if it is missing
    save_latents: Path | None = None  # a file for the latents of all images
    keep_control: bool = False  # write the pictures of preprocessors beside each image
    put: Callable[[bytes], object] | None = None  # receives an image without a path
    larger: Callable[[Job], Enlargement | None] = lambda job: None  # returns how an image is made larger before writing
    views: tuple[str, ...] = ()  # of all layers of an image: `stack`, one over the other, and `sheet`, side by side
    check_cache: bool = False  # measure the effect of a step cache by generating without it too
    notes: Callable[[Job, Recipe], Sequence[str]] = lambda job, recipe: ()  # more warnings about an image


class Listener(Protocol):
    """A receiver of a run's reports. `begin` and `step` may raise a BaseException to end it, as after a signal."""

    def notify(self, kind: str, text: str) -> None: ...

    def begin(self, job: Job) -> None: ...

    def step(self, job: Job, step: Step) -> None: ...

    def image(self, job: Job, result: Result, seconds: float) -> None: ...

    def failure(self, job: Job, error: Exception) -> None: ...


@dataclass(kw_only=True)
class Outcome:
    """The result of a run."""

    written: int = 0  # images
    failed: list[Exception] = field(default_factory=list)  # one for each image that was not generated
    fatal: bool = False  # whether the last of these ended the run


# Before the first picture


def completed(pipe: Pipeline, job: Job, inputs: Inputs, views: tuple[str, ...] = ()) -> Job:
    """Return a job with the model's defaults for missing options, except the negative prompt. views: of layers."""
    d = pipe.defaults
    options = of_request(job.options)
    options = pipe.resolve(options) if job.get("few_steps") or job.get("true_cfg") else options
    aspect = options.pop("aspect", None)
    if aspect is None:
        options |= outpaint_text.sides(options, inputs.images)
    if aspect is not None:
        width, height = d.size(aspect)
    else:
        sides = options.get("width"), options.get("height")
        width, height = d.sides(*sides, inputs.images, only_masked=options.get("only_masked") is not None)
    usual = {"steps": d.steps, "guidance": d.guidance}
    layers = (options.get("layers") or OPTIONS["layers"].default) if "layers" in pipe.model.options else 0
    rest = {name: job.options[name] for name in job.options.keys() - of_request(job.options).keys()}
    every = usual | options | rest | {"width": width, "height": height}
    return replace(job, options=every, layers=layers, views=views)


def check_files(jobs: Sequence[Job], output: Output) -> None:
    """Check the file names of `completed` jobs, whose layers are known. Raises UsageError."""
    for job in jobs:
        if job.layers and job.path is None:
            raise UsageError(f"-o -: standard output takes one picture, this model makes {job.layers} layers")
        if job.layers:
            continue
        if output.views:
            raise UsageError(f"--{output.views[0]} is for a model that makes layers")
        if layer_files.FIELD in str(job.path):
            raise UsageError(f"-o: {layer_files.FIELD} is for a model that makes layers; leave it out")
    layered = [path for job in jobs if job.layers for path in job.outputs]
    check_distinct(layered)
    for path in layered:
        atomic_files.check_output(path, overwrite=output.overwrite, new_folder=output.new_folder)


def passing(jobs: Sequence[Job], check: Callable[[Job], object]) -> tuple[list[Job], list[ModelError]]:
    """Return the jobs that pass `check`, and the faults of the others, one for each line of a prompt file. Raises
    UsageError and ModelError for a job that is not from a prompt file."""
    passed: list[Job] = []
    faults: dict[str, ModelError] = {}
    for job in jobs:
        try:
            check(job)
            passed.append(job)
        except (UsageError, ModelError) as error:
            if not job.where:
                raise
            faults.setdefault(job.where, bad(job.where, str(error)))
    return passed, list(faults.values())


def estimated(pipe: Pipeline, job: Job, inputs: Inputs, output: Output) -> Estimate:
    """Return the estimate for a `completed` job. Raises QwenimgError if it cannot be generated or written."""
    from qwenimg.common.pipeline import encode

    larger = output.larger(job)
    if job.path is not None:
        by, (width, height) = 1 if larger is None else larger.by, inputs.size(job)
        encode.check(job.path.suffix, by * width, by * height, job.texts if output.metadata else "")
    return pipe.estimate(**inputs.call(job))


def _scale(pipe: Pipeline, job: Job) -> float:
    """Return the scale of guidance by a negative prompt of a `completed` job."""
    name = pipe.model.guidance.name.replace("-", "_")
    value = job.get(name)
    return float(OPTIONS[name].default if value is None else value)


def prepare(pipe: Pipeline, jobs: Sequence[Job], inputs: Inputs) -> None:
    """Announce every text of `completed` jobs to the model, each once."""
    texts, rewritten = dict[str, None](), dict[str, int]()
    for job in jobs:
        controls = inputs.controls or job.get("control")
        if (rewrite := job.get("rewrite")) is not None:
            rewritten[job.prompt] = rewrite
        else:
            texts[pipe.controls.prompt(job.prompt, controls) if controls else job.prompt] = None
        if _scale(pipe, job) > pipe.model.guidance.off:
            negative = job.get("negative_prompt")
            texts[pipe.defaults.negative_prompt if negative is None else negative] = None
    skips = {job.get("clip_skip") or 0 for job in jobs}
    first: dict[str, Any] = (
        {name: value for name in ("lora", "lora_mode") if (value := jobs[0].get(name))} if jobs else {}
    )
    first |= {"image": _seen(pipe, jobs[0], inputs)} if inputs.images and jobs else {}
    embeddings = tuple(dict.fromkeys(one for job in jobs for one in job.get("embedding") or ()))
    first |= {"embedding": embeddings} if 0 < len(embeddings) <= embedding_text.MOST else {}
    first |= {"rewrite": rewritten} if rewritten and pipe.engine.group is None else {}
    pipe.prepare(list(texts), max(skips) if len(skips) == 1 else 0, **first)


def _seen(pipe: Pipeline, job: Job, inputs: Inputs) -> Sequence[NDArray[np.uint8]]:
    """Return the images of a job as the model sees them: the masked part of the first, if only that is drawn."""
    from qwenimg.common.pipeline import masked_area

    if job.get("only_masked") is None:
        return inputs.images
    return masked_area.split(pipe.check(**inputs.call(job))).drawn.images


# The run


def run(pipe: Pipeline, jobs: Sequence[Job], inputs: Inputs, output: Output, listener: Listener) -> Outcome:
    """Generate and write the image of each of `completed` jobs in order. A failure is reported, and the next image is
    generated unless it must fail too."""
    outcome, all_latents = Outcome(), list[Any]()
    for job in jobs:
        listener.begin(job)
        start, drawn = time.monotonic(), False
        try:
            result = _draw(pipe, job, inputs, listener)
            drawn = True
            if output.check_cache and "step_cache_effect" in result.recipe:
                _check_cache(pipe, job, inputs, listener, result)
            result.warn(output.notes(job, result.recipe))
            if (fault := _write(job, output, result)) is not None:
                listener.failure(job, fault)
                outcome.failed.append(fault)
                continue
            listener.image(job, result, time.monotonic() - start)
            outcome.written += 1
            all_latents += [result.latents] if output.save_latents is not None else []
            if output.save_latents is not None and len(all_latents) == len(jobs):
                latents.write_latents(
                    output.save_latents, latents.join_latents(all_latents), overwrite=output.overwrite
                )
        except Exception as error:
            listener.failure(job, error)
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


def _draw(pipe: Pipeline, job: Job, inputs: Inputs, listener: Listener) -> Result:
    from qwenimg.common.pipeline.result import Result

    for event in pipe.stream(**inputs.call(job)):
        if isinstance(event, Result):
            return event
        listener.step(job, event)
    raise AssertionError("the stream ended without a picture")


def _check_cache(pipe: Pipeline, job: Job, inputs: Inputs, listener: Listener, result: Result) -> None:
    """Generate `result` without its step cache too, and add the difference to its recipe."""
    from qwenimg.common.pictures.pixels import psnr

    listener.notify("stage", "step cache: drawing the whole run to compare")
    uncached = replace(job, options=job.options | {"step_cache": 0.0, "cached_calls": ""})
    whole = _draw(pipe, uncached, inputs, listener)
    seconds, ratio = (one.timing["steps"] for one in (result, whole)), psnr(result.pixels, whole.pixels)
    took = " of ".join(f"{one:.1f}" for one in seconds)
    effect = "the same pixels" if math.isinf(ratio) else f"PSNR {ratio:.1f} dB"
    result.recipe["step_cache_effect"] += f"; against the whole run {effect}, {took} s"
    listener.notify("stage", f"step cache: {result.recipe['step_cache_effect']}")


def _write(job: Job, output: Output, result: Result) -> QwenimgError | None:
    """Write the image, or its layers and what shows all of them, in the format of the suffix, or pass a PNG to `put`.
    Return the error of an image that could not be made larger, and is written at its own size. Raises UsageError and
    DoesNotFit."""
    import numpy as np

    from qwenimg.common.pipeline import encode

    recipe, fault, larger = result.recipe if output.metadata else None, None, output.larger(job)
    if job.path is None:
        assert output.put is not None
        data, fault = encoded(result.pixels, recipe, ".png", larger)
        output.put(data)
        return kept(fault, "the picture is there at its own size")
    views = {"stack": result.pixels, "sheet": np.asarray(result.sheet())} if job.views else {}
    images = [*(result.layers or (result.pixels,)), *(views[view] for view in job.views)]
    for path, pixels in zip(job.outputs, images, strict=True):
        if output.new_folder:
            atomic_files.make_folder(path.parent)
        data, error = encoded(pixels, recipe, path.suffix, larger)
        atomic_files.write_atomic(path, data, overwrite=output.overwrite)
        fault = fault or error
    controls = control_outputs(job) if output.keep_control else ()
    for name, pixels in zip(controls, result.control_pictures, strict=False):
        if name is not None:
            atomic_files.write_atomic(name, encode.encode(pixels, None, ".png"), overwrite=output.overwrite)
    return kept(fault, f"{shown_path(job.path, 60)} has the picture at its own size")


def kept(fault: QwenimgError | None, where: str) -> QwenimgError | None:
    """Return the error of an image that could not be made larger, with the place where it is."""
    return None if fault is None else type(fault)(f"not made larger, {where}: {clean(str(fault), 180)}")


def encoded(
    pixels: NDArray[np.uint8], recipe: Recipe | None, suffix: str, larger: Enlargement | None
) -> tuple[bytes, QwenimgError | None]:
    """Return the file of an image, made larger by `larger`; or at its own size, with the error. Raises UsageError."""
    from qwenimg.common.pipeline import encode

    fault: QwenimgError | None = None
    if larger is not None:
        try:
            enlarged, texts = larger(pixels, {} if recipe is None else png_text(recipe))
            return encode.encode_texts(enlarged, texts, XMP, suffix), None
        except QwenimgError as error:
            fault = error
        except Exception as error:
            if not out_of_memory(error):
                raise
            fault = DoesNotFit("memory ran out; close other programs")
    return encode.encode(pixels, recipe, suffix), fault


def control_outputs(job: Job) -> list[Path | None]:
    """Return the path of each control's preprocessed picture, such as `a.canny.png` for `a.png`; None for a picture as
    it is."""
    assert job.path is not None
    paths: list[Path | None] = []
    for control in job.get("control") or ():
        ends = (f".{control.preprocessor}{f'-{i}' * (i > 1)}.png" for i in range(1, len(paths) + 2))
        names = (job.path.with_suffix(end) for end in ends)
        made = control.preprocessor in PREPROCESSORS
        paths.append(next(name for name in names if name not in paths) if made else None)
    return paths
