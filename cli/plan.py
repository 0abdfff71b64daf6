"""What a picture will take: memory stage by stage, what makes it fit, and about how long a step takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from qwenimg.cli import parts, places, streams
from qwenimg.cli.generate import generate
from qwenimg.common.base.errors import UsageError

if TYPE_CHECKING:
    from qwenimg import Pipeline
    from qwenimg.common.memory.needs import Needs
    from qwenimg.common.pipeline.fit import Way
    from qwenimg.common.request.request import Request
    from qwenimg.common.runtime.paper import OnPaper

_F = TypeVar("_F", bound=Callable[..., Any])
PROMPT = "a picture"  # where none is given; its tokens are then not counted


def _options_of_generate(command: _F) -> _F:
    """The same options, of which those that change no bytes are not looked at."""
    taken = [param for param in generate.params if isinstance(param, click.Option) and param.name != "version"]
    command.__click_params__ = [*reversed(taken), *getattr(command, "__click_params__", [])]  # type: ignore[attr-defined]
    return command


@click.command("plan", context_settings={**generate.context_settings, "help_option_names": ["-h", "--help"]})
@click.argument("what", metavar="MODEL", required=False)
@click.option("--memory", metavar="AMOUNT", allow_from_autoenv=False, help="For so much, as 24GB; else what is free.")
@_options_of_generate
@click.pass_context
def plan(ctx: click.Context, /, what: str | None, memory: str | None, **given: Any) -> int:
    """Prints what a picture by MODEL takes, from the headers of its files alone, in less than a second.

    Takes the options of generate. Bytes are over what the framework takes when it is idle.
    """
    from qwenimg.backends.paper import on_paper
    from qwenimg.cli import config, environment
    from qwenimg.common.base.amounts import parse_bytes
    from qwenimg.common.hub.model_folders import read_folders
    from qwenimg.common.pipeline import fit

    _check(ctx, what, given)
    config.settle(ctx, given)
    environment.check(ctx, given)
    parts.taken(given)
    places.take_texts(given)
    given["model"] = what or given["model"]
    given |= read_folders(given["models_dir"]).options(given)
    amount = None if memory is None else parse_bytes(memory, "--memory")
    engine = on_paper(given["backend"], amount)
    with closing(_opened(given["model"], engine, given)) as pipe:
        request, counted = _request(pipe, given), given["prompt"] is not None
        found = fit.needs(pipe.model, request, counted)
        room = pipe.runtime.room(0)
        others = [*fit.weights(pipe.model, request, counted), *fit.streamed(pipe.model, request, room, counted)]
        rate = engine.rate or _published_rate(pipe)
        seconds = None if rate is None else found.steps / pipe.model.plan(request).steps / rate
        show = _as_json if given["json"] else _text
        streams.put(show(pipe, request, room, found, others, seconds).encode() + b"\n")
    return 0


def _check(ctx: click.Context, what: str | None, given: dict[str, Any]) -> None:
    """Raises UsageError."""
    source = ctx.get_parameter_source("model")
    if what is not None and source is ParameterSource.COMMANDLINE:
        raise UsageError("two models: MODEL and that of -m; give one")
    if given["prompt_file"] is not None and ctx.get_parameter_source("prompt_file") is ParameterSource.COMMANDLINE:
        raise UsageError("--prompt-file: a plan is of one picture; give its options")
    given["words"] = ()


def _opened(model: str | None, engine: OnPaper, given: dict[str, Any]) -> Pipeline:
    from qwenimg.common.base.amounts import parse_max
    from qwenimg.common.families.choices import Choices
    from qwenimg.common.hub.planned import planned

    choices = Choices(**{one.name: given[one.name] for one in fields(Choices) if one.name in given})
    return planned(
        model,
        engine,
        precision=given["precision"] or "auto",
        preset=given["preset"] or "auto",
        choices=choices,
        refiner=given["refiner"],
        max_memory=parse_max(given["max_memory"]),
        offline=given["offline"],
    )


def _published_rate(pipe: Pipeline) -> float | None:
    """Operations a second that products reach on the card or chip, where `bench --on-paper` knows it."""
    from qwenimg.common.measure.machines import of_device

    if (machine := of_device(pipe.device)) is None:
        return None
    return machine.peak(pipe.precision.compute_dtype("transformer")) * machine.products


def _request(pipe: Pipeline, given: dict[str, Any]) -> Request:
    """The picture that `generate` would make of the same options. Raises UsageError and ModelError."""
    from qwenimg.common.jobs import fields as said_
    from qwenimg.common.jobs.pictures import Picture
    from qwenimg.common.jobs.replay import read_replay
    from qwenimg.common.jobs.run import Job, completed
    from qwenimg.common.pictures.input import read_image
    from qwenimg.common.request.request import OPTIONS

    if (steps := given["lightning"]) is not None:
        given["few_steps"] = f"lightning:{steps}"
    said = {name: given[name] or None if given[name] == () else given[name] for name in said_.SAID}
    asked = said_.fields({**said, "seed": None, "num_images": None})
    asked = said_.merged({} if given["replay"] is None else read_replay(given["replay"]).fields, asked)
    asked.setdefault("prompt", PROMPT)
    said_.check(asked)
    job = Job(image=None if given["image"] is None else read_image(given["image"])[0])
    known = {name: asked[name] for name in OPTIONS if name in asked and name != "seed"}
    picture = completed(Picture(index=1, where="", asked=known, aspect=asked.get("aspect"), path=None), pipe, job)
    return pipe.check(**picture.asked, image=job.image)


def _as_json(
    pipe: Pipeline, request: Request, free: int, found: Needs, others: Sequence[Way], seconds: float | None
) -> str:
    ways = [{"options": w.options, "peak_bytes": w.needs.largest.peak, "fits": w.needs.fits(free)} for w in others]
    about = {
        "model": pipe.model_name,
        "backend": pipe.backend,
        "device": pipe.device,
        "precision": pipe.precision.name,
        "size": [request.width, request.height],
        "memory_bytes": free,
        "fits": found.fits(free),
        "peak_bytes": found.largest.peak,
        "stages": [stage.as_json() for stage in found.stages],
        "ways": ways,
        "step_operations": found.steps / pipe.model.plan(request).steps,
        "step_seconds": seconds,
    }
    return json.dumps(about)


def _text(
    pipe: Pipeline, request: Request, free: int, found: Needs, others: Sequence[Way], seconds: float | None
) -> str:
    from qwenimg.common.base.amounts import counted, duration, size_text
    from qwenimg.common.base.text import aligned

    steps = pipe.model.plan(request).steps
    lines = [f"{pipe.headline()} · {request.width}x{request.height}, {counted(steps, 'step')}", ""]
    rows: list[tuple[str, ...]] = [("stage", "weights", "activations", "peak", "")]
    for stage in found.stages:
        rows.append((stage.name, *map(size_text, (stage.weights, stage.activations, stage.peak)), stage.about))
    lines += [*aligned(rows), ""]
    verdicts: list[tuple[str, ...]] = [(f"of {size_text(free)}", "peak", "")]
    for name, needs in [("as it is", found), *((way.options, way.needs) for way in others)]:
        verdict = "fits" if needs.fits(free) else "does not fit"
        verdicts.append((name, size_text(needs.largest.peak), verdict))
    lines += [*aligned(verdicts), ""]
    took = "the rate of this device is not known" if seconds is None else duration(seconds)
    return "\n".join([*lines, f"a step: {found.steps / steps / 1e12:.3g} x 10^12 operations, {took}"])
