"""What a picture will take: memory stage by stage, what makes it fit, and about how long a step takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from qwenimg.cli import parts, places, streams
from qwenimg.cli.generate import generate
from qwenimg.common.base.errors import UsageError

if TYPE_CHECKING:
    from qwenimg import Pipeline
    from qwenimg.common.memory.needs import Needs
    from qwenimg.common.pipeline.ways import Way
    from qwenimg.common.precision.precision import Precision
    from qwenimg.common.request.request import Request
    from qwenimg.common.runtime.paper import OnPaper

_F = TypeVar("_F", bound=Callable[..., Any])
PROMPT = "a picture"  # where none is given; its tokens are then not counted


@dataclass(frozen=True, kw_only=True)
class _Took:
    """What was found of a picture, as it is or in another way: `title` of how, on a device that gives it `room`."""

    title: str
    needs: Needs
    fits: bool
    steps: int
    seconds: float | None  # of a step, where the rate of the device is known

    @property
    def peak(self) -> int:
        return self.needs.largest.peak

    @property
    def streamed(self) -> float:
        """Bytes that a step reads anew."""
        return self.needs.streamed / self.steps

    def as_json(self) -> dict[str, object]:
        return {
            "peak_bytes": self.peak,
            "fits": self.fits,
            "step_operations": self.needs.steps / self.steps,
            "step_streamed_bytes": self.streamed,
            "step_seconds": self.seconds,
        }


def _options_of_generate(command: _F) -> _F:
    """The same options, of which those that change no bytes are not looked at."""
    taken = [param for param in generate.params if isinstance(param, click.Option) and param.name != "version"]
    command.__click_params__ = [*reversed(taken), *getattr(command, "__click_params__", [])]  # type: ignore[attr-defined]
    return command


@click.command("plan", context_settings={**generate.context_settings, "help_option_names": ["-h", "--help"]})
@click.argument("what", metavar="MODEL", required=False)
@click.option("--memory", metavar="AMOUNT", allow_from_autoenv=False, help="For so much, as 24GB; else what is free.")
@click.option("--on", metavar="MACHINE", allow_from_autoenv=False, help="One that is not here: 4090, h100, m4-max, ...")
@_options_of_generate
@click.pass_context
def plan(ctx: click.Context, /, what: str | None, memory: str | None, on: str | None, **given: Any) -> int:
    """Prints what a picture by MODEL takes, from the headers of its files alone, in under a second.

    Takes the options of generate. Bytes are over what the framework takes when it is idle. MACHINE is one that
    bench --on-paper knows; the time of a step is then that of its published rate.
    """
    from qwenimg.backends.paper import on_paper
    from qwenimg.cli import config, environment
    from qwenimg.common.base.amounts import parse_bytes
    from qwenimg.common.hub.model_folders import read_folders
    from qwenimg.common.hub.part_files import located
    from qwenimg.common.measure.machines import machine
    from qwenimg.common.pipeline.ways import Ways, needs

    _check(ctx, what, given)
    config.settle(ctx, given)
    environment.check(ctx, given)
    parts.taken(given)
    places.take_texts(given)
    given["model"] = what or given["model"]
    given |= located(read_folders(given["models_dir"]), given)
    amount = None if memory is None else parse_bytes(memory, "--memory")
    engine = on_paper(given["backend"], amount, None if on is None else machine(on, "--on").title)
    pipe, here = _opened(given["model"], engine, given)
    with closing(pipe):
        request, counted = _request(pipe, given)
        counted = counted and here  # by a tokenizer
        if given["cache_prompts"] and counted:
            pipe.runtime.keep_prompts()
        found = needs(pipe.model, request, counted)
        every = Ways(pipe.model, request, found.room, counted=counted)
        ways = every.listed()
        now, others = _as_it_is(pipe, request, found), [(way, _other(pipe, request, way)) for way in ways]
        fits = now.fits or any(took.fits for _, took in others)
        if given["json"]:
            text = _as_json(pipe, request, here, now, others)
        else:
            text = _text(pipe, request, here, now, others, "" if fits else every.sentence())
        streams.put(text.encode() + b"\n")
    return 0


def _check(ctx: click.Context, what: str | None, given: dict[str, Any]) -> None:
    """Raises UsageError."""
    source = ctx.get_parameter_source("model")
    if what is not None and source is ParameterSource.COMMANDLINE:
        raise UsageError("two models: MODEL and that of -m; give one")
    if given["prompt_file"] is not None and ctx.get_parameter_source("prompt_file") is ParameterSource.COMMANDLINE:
        raise UsageError("--prompt-file: a plan is of one picture; give its options")
    given["words"] = ()


def _opened(model: str | None, engine: OnPaper, given: dict[str, Any]) -> tuple[Pipeline, bool]:
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


def _as_it_is(pipe: Pipeline, request: Request, found: Needs) -> _Took:
    return _took(pipe, request, "as it is", found, found.fits(found.room), pipe.precision)


def _other(pipe: Pipeline, request: Request, way: Way) -> _Took:
    return _took(pipe, request, way.text, way.needs, way.fits, way.precision)


def _took(pipe: Pipeline, request: Request, title: str, found: Needs, fits: bool, precision: Precision) -> _Took:
    from qwenimg.common.memory.estimate import steps_seconds

    steps, rate = pipe.model.plan(request).steps, _rate(pipe, precision)
    seconds = None if rate is None else steps_seconds(found, 1 / rate, pipe.engine.facts) / steps
    return _Took(title=title, needs=found, fits=fits, steps=steps, seconds=seconds)


def _rate(pipe: Pipeline, precision: Precision) -> float | None:
    """Operations a second: measured here, or what products reach on a card or chip that `bench --on-paper` knows."""
    from qwenimg.common.measure.machines import of_device

    measured: float | None = pipe.engine.rate  # type: ignore[attr-defined]
    machine = of_device(pipe.device)
    if measured is not None or machine is None:
        return measured
    return machine.peak(precision.compute_dtype("transformer")) * machine.products


def _request(pipe: Pipeline, given: dict[str, Any]) -> tuple[Request, bool]:
    """The picture that `generate` would make of the same options, and whether it has a prompt. Raises UsageError and
    ModelError."""
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
    counted = "prompt" in asked
    asked.setdefault("prompt", PROMPT)
    said_.check(asked)
    job = Job(image=None if given["image"] is None else read_image(given["image"])[0])
    known = {name: asked[name] for name in OPTIONS if name in asked and name != "seed"}
    picture = completed(Picture(index=1, where="", asked=known, aspect=asked.get("aspect"), path=None), pipe, job)
    return pipe.check(**picture.asked, image=job.image), counted


def _as_json(pipe: Pipeline, request: Request, here: bool, now: _Took, others: Sequence[tuple[Way, _Took]]) -> str:
    about = {
        "model": pipe.model_name,
        "here": here,
        "backend": pipe.backend,
        "device": pipe.device,
        "precision": pipe.precision.name,
        "size": [request.width, request.height],
        "memory_bytes": now.needs.room,
        **now.as_json(),
        "stages": [stage.as_json() for stage in now.needs.stages],
        "ways": [{"options": way.options, "without": way.without, **took.as_json()} for way, took in others],
    }
    return json.dumps(about)


def _text(
    pipe: Pipeline, request: Request, here: bool, now: _Took, others: Sequence[tuple[Way, _Took]], closing: str
) -> str:
    """closing: what is said where nothing fits."""
    from qwenimg.common.base.amounts import counted, duration, size_text
    from qwenimg.common.base.text import aligned

    lines = [f"{pipe.headline()} · {request.width}x{request.height}, {counted(now.steps, 'step')}"]
    if not here:
        lines.append(f"{pipe.model_name} is not here: planned from its published configuration, for the longest prompt")
    lines.append("")
    rows: list[tuple[str, ...]] = [("stage", "weights", "activations", "peak", "")]
    for stage in now.needs.stages:
        rows.append((stage.name, *map(size_text, (stage.weights, stage.activations, stage.peak)), stage.about))
    lines += [*aligned(rows), ""]
    every = [now, *(took for _, took in others)]
    verdicts: list[tuple[str, ...]] = [(f"of {size_text(now.needs.room)}", "peak", "", "a step")]
    for took in every:
        step = "" if took.seconds is None else duration(took.seconds)
        verdicts.append((took.title, size_text(took.peak), "fits" if took.fits else "does not fit", step))
    closing_lines = [closing, ""] if closing else []
    return "\n".join([*lines, *aligned(verdicts), "", *closing_lines, *_about_steps(pipe, every)])


def _about_steps(pipe: Pipeline, every: Sequence[_Took]) -> list[str]:
    """Of what the times are made."""
    from qwenimg.common.base.amounts import size_text
    from qwenimg.common.memory.estimate import streaming_rate

    now = every[0]
    unknown = "; the rate of this device is not known: name one with --on" if now.seconds is None else ""
    lines = [f"a step: {now.needs.steps / now.steps / 1e12:.3g} x 10^12 operations{unknown}"]
    if most := max(took.streamed for took in every):
        rate = size_text(streaming_rate(pipe.engine.facts))
        lines.append(f"streamed: up to {size_text(most)} a step, read at {rate} a second while others compute")
    return lines
