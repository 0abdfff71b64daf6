"""The command `plan`: the memory of an image stage by stage, options that make it fit, and about how long it takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from os.path import lexists
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from qwenimg.cli import places, streams
from qwenimg.cli.commands.generate import generate
from qwenimg.common.base.errors import UsageError

if TYPE_CHECKING:
    from qwenimg import Pipeline
    from qwenimg.common.families.load_options import LoadOptions
    from qwenimg.common.hub.forecast import FitForecast, Times
    from qwenimg.common.hub.model_folders import ModelFolders
    from qwenimg.common.memory.memory_plan import MemoryPlan
    from qwenimg.common.pipeline.fit_options import OptionChange
    from qwenimg.common.pipeline.models.diffusion_model import DiffusionModel
    from qwenimg.common.request.lora_text import Lora
    from qwenimg.common.request.request import Request
    from qwenimg.common.runtime.paper import OnPaper

_F = TypeVar("_F", bound=Callable[..., Any])
LONG = 600  # seconds of an image, from which on faster models are named
OTHERS = 2  # the most other models that are named if one does not fit or takes long
SURE = "times: {}; expect half to twice of them, and loading beside"


@dataclass(frozen=True, kw_only=True)
class _Row:
    """The needs of an image with some choice of options."""

    title: str  # the options
    needs: MemoryPlan
    fits: bool
    steps: int
    times: Times
    lora_bytes: int = 0  # of a LoRA that is not here and would stay unmerged

    @property
    def peak(self) -> int:
        return self.needs.largest.peak + self.lora_bytes

    @property
    def streamed(self) -> float:
        """Bytes of streamed blocks that are read again in each step."""
        return self.needs.streamed / self.steps

    def as_json(self) -> dict[str, object]:
        return {
            "peak_bytes": self.peak,
            "fits": self.fits,
            "steps": self.steps,
            "step_operations": self.needs.steps / self.steps,
            "step_streamed_bytes": self.streamed,
            **self.times.as_json(),
        }


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Everything that `plan` prints."""

    pipe: Pipeline
    request: Request
    here: bool  # True: the model's files are on this machine
    now: _Row
    ways: Sequence[tuple[OptionChange, _Row]]
    few: Mapping[str, _Row]  # by option
    converted: _Row | None  # converted to 8 bits and streamed, if 8 bits do not fit otherwise
    others: Sequence[FitForecast]  # models that fit while this one does not, or are faster
    sentence: str  # the message if nothing fits
    left_out: Sequence[Lora] = ()  # LoRAs that are not here

    @property
    def rows(self) -> list[_Row]:
        converted = [self.converted] if self.converted else []
        return [self.now, *(row for _, row in self.ways), *converted, *self.few.values()]


def _options_of_generate(command: _F) -> _F:
    """Add the options of generate, including those that change no memory."""
    declared = [param for param in generate.params if isinstance(param, click.Option) and param.name != "version"]
    command.__click_params__ = [*reversed(declared), *getattr(command, "__click_params__", [])]  # type: ignore[attr-defined]
    return command


@click.command("plan", context_settings={**generate.context_settings, "help_option_names": ["-h", "--help"]})
@click.argument("what", metavar="MODEL", required=False)
@click.option(
    "--memory",
    metavar="AMOUNT",
    allow_from_autoenv=False,
    help="The free memory, such as 24GB; with --on, the machine's whole memory.",
)
@click.option(
    "--on",
    metavar="MACHINE",
    allow_from_autoenv=False,
    help="Plan for another machine: 4090, m4-max, ...; --on list names all.",
)
@click.option("--all", "every", is_flag=True, allow_from_autoenv=False, help="Without MODEL: list all known models.")
@_options_of_generate
@click.pass_context
def plan(ctx: click.Context, /, what: str | None, memory: str | None, on: str | None, every: bool, **given: Any) -> int:
    """Print the needs of an image by MODEL: memory by stage, options that make it fit, and the time.

    Reads only the headers of files. Without MODEL it lists ten known models, best first for this machine or for that of
    --on. Takes the options of generate. Times come from a machine's published rate, or from this CPU's measured one.
    """
    from qwenimg.cli import config, environment
    from qwenimg.common.families.load_options import load_options_of
    from qwenimg.common.hub import missing
    from qwenimg.common.hub.open_model import plan_pipeline
    from qwenimg.common.hub.part_files import located
    from qwenimg.common.jobs import image_options
    from qwenimg.common.precision import machines
    from qwenimg.common.request import lora_text
    from qwenimg.common.request.loras import in_cache

    if on is not None and on.strip().lower() == machines.LIST:
        return _put(machines.lines())
    _check(ctx, what, given)
    config.apply_defaults(ctx, given)
    environment.check(ctx, given)
    keep_policy = given["preset"] is None and given["precision"] is None
    folders, opening = located(load_options_of(places.pop_opening(given) | ({} if what is None else {"model": what})))
    loras = folders.loras(lora_text.parse(given["lora"]))
    left_out = [one for one in loras if not in_cache(one.source) and missing.missing(one.source) is not None]
    given["lora"] = tuple(one for one in loras if one not in left_out)
    if given["replay"] is not None:
        opening = _recorded(opening, given["replay"], folders, keep_policy=keep_policy)
    engine = _engine(opening, memory, on, given["devices"])
    if not (opening.model or opening.parts or opening.refiner or given["replay"]):
        return _put_all(engine, every, as_json=given["json"])
    missing.check(opening, image_options.parse(given), folders, planned=True)
    pipe, here = plan_pipeline(opening, engine)
    given["cache_prompts"] = opening.cache_prompts
    with closing(pipe):
        if given["preview"] or opening.preview_with is not None:
            pipe.plan_preview()
        planned = replace(_planned(pipe, here, engine, given, folders), left_out=left_out)
        return _put([json.dumps(_as_json(planned))] if given["json"] else _lines(planned, engine))


def _put(lines: Sequence[str]) -> int:
    streams.put("\n".join(lines).encode() + b"\n")
    return 0


def _check(ctx: click.Context, what: str | None, given: dict[str, Any]) -> None:
    """Check that the options describe one image by one model."""
    source = ctx.get_parameter_source("model")
    if what is not None and source is ParameterSource.COMMANDLINE:
        raise UsageError("two models: MODEL and that of -m; give one")
    if given["prompt_file"] is not None and ctx.get_parameter_source("prompt_file") is ParameterSource.COMMANDLINE:
        raise UsageError("--prompt-file: a plan is of one picture; give its options")
    given["words"] = ()


def _recorded(opening: LoadOptions, picture: Path, folders: ModelFolders, *, keep_policy: bool) -> LoadOptions:
    """Return `opening` with the model, parts, bits and, if `keep_policy`, the precision of the recipe in `picture`, as
    generate takes them; a known model need not be here."""
    from qwenimg.common.families import catalog
    from qwenimg.common.hub import origin
    from qwenimg.common.jobs.replay import check_model, read_replay

    replay = read_replay(picture)
    opening = origin.with_recorded_model(opening, replay, folders)
    check_model(replay, opening.model)

    def known(name: str | None) -> str | None:
        return name if name and catalog.find(name) and not lexists(name) else None

    model, refiner = opening.model or known(replay.model), opening.refiner or known(replay.used.get("refiner"))
    opening = replace(opening, model=model, refiner=refiner)
    return origin.replayed(opening, replay, picture, folders, keep_policy=keep_policy)


def _engine(opening: LoadOptions, memory: str | None, on: str | None, devices: int) -> OnPaper:
    """Return an engine without a device, for one of `devices` ranks, with the given memory."""
    from qwenimg.backends.paper import on_paper
    from qwenimg.cli.ranks.lead import check
    from qwenimg.common.base.amounts import parse_bytes
    from qwenimg.common.precision.machines import machine
    from qwenimg.common.runtime.group import PaperRanks

    amount = None if memory is None else parse_bytes(memory, "--memory")
    engine = on_paper(opening.backend, amount, None if on is None else machine(on))
    if devices == 1:
        return engine
    check(opening)
    free = engine.free if engine.on_gpu or amount else engine.free // devices
    return replace(engine, free=free, group=PaperRanks(devices, by_tokens=engine.name != "mlx"))


# All models


def _put_all(engine: OnPaper, every: bool, *, as_json: bool) -> int:
    """Print how each known model fits."""
    from qwenimg.common.base.text import aligned
    from qwenimg.common.hub import forecast

    forecasts = forecast.forecast_all(engine)
    if as_json:
        about = {"backend": engine.name, "device": engine.device, "memory_bytes": engine.free}
        return _put([json.dumps({**about, "models": [one.as_json() for one in forecasts]})])
    head = f"{engine.name} on {engine.device}: {_budget_text(engine, engine.free)}"
    first, more = forecast.shown(forecasts, every)
    return _put([head, "", *aligned(forecast.rows(first)), *more, "", *_about_times(engine, forecasts[0].times)])


# One picture


def _planned(pipe: Pipeline, here: bool, engine: OnPaper, given: dict[str, Any], folders: ModelFolders) -> _Plan:
    from qwenimg.common.pipeline.fit_options import FitOptions, plan_memory

    request, counted = _request(pipe, given)
    pipe.model.adapt(pipe.loras.deltas(*pipe.controls.loras(request)))  # unmerged LoRAs take memory
    pipe.controls.give(pipe.model, request)
    counted = counted and here and not _missing(pipe)  # else there is no tokenizer
    if given["cache_prompts"] and counted:
        pipe.runtime.keep_prompts()
    memory = plan_memory(pipe.model, request, counted)
    if given["upscale"] is not None or given["upscale_with"] is not None:
        _add_upscaling(memory, pipe, request, given, folders)
    search = FitOptions(pipe.model, request, memory.budget, counted=counted)
    row = partial(_row, counted=counted)
    now = row(pipe.model, request, "as it is", memory, memory.fits(memory.budget))
    ways = [(way, row(way.model, request, way.text, way.needs, way.fits)) for way in search.all_changes()]
    few = _few(pipe, given, row, counted=counted)
    in_eight = any(row.fits and way.options in ("", "-q 8") for way, row in ways)
    converted = None if now.fits or in_eight else _converted(pipe, request, row, counted=counted)
    every = [now, *(row for _, row in ways), *few.values()]
    fits = [row for row in every if row.fits]
    fast = any((row.times.picture or 0) < LONG for row in fits)
    return _Plan(
        pipe=pipe,
        request=request,
        here=here,
        now=now,
        ways=ways,
        few=few,
        converted=converted,
        others=[] if fast else _others(pipe, engine, fits),
        sentence="" if fits else search.message(),
    )


def _missing(pipe: Pipeline) -> list[str]:
    """Return a line for each small file that a run needs and that is not here."""
    from qwenimg.common.runtime.checkpoint import MISSING

    return [text for kind, text in pipe.model.checkpoint.reports if kind == MISSING]


def _add_upscaling(
    memory: MemoryPlan, pipe: Pipeline, request: Request, given: dict[str, Any], folders: ModelFolders
) -> None:
    """Add the stages of --upscale, beside the networks that are in memory then. Raises UsageError, ModelError and
    DoesNotFit."""
    from qwenimg.common.hub.network_search import find_upscaler, read_upscaler
    from qwenimg.common.runtime.runtime import Runtime
    from qwenimg.common.upscaling.upscaling import Upscaling, policy

    path = find_upscaler(given["upscale_with"], folders, "--upscale-with")
    runtime = Runtime(pipe.engine, policy("fp32"), lambda kind, text: None, max_memory=pipe.runtime.max_memory)
    with closing(read_upscaler(path)) as upscaler:
        by = upscaler.scale if given["upscale"] is None else given["upscale"]
        width, height = request.enlarged_size
        larger, beside = Upscaling(runtime, upscaler).plan(height, width, by), memory.stages[-1].weights
        for stage in larger.stages:
            memory.add(replace(stage, weights=beside + stage.weights))
        memory.decoding += larger.steps


def _row(
    model: DiffusionModel,
    request: Request,
    title: str,
    memory: MemoryPlan,
    fits: bool,
    lora_bytes: int = 0,
    *,
    counted: bool,
) -> _Row:
    """Return a row. counted: whether `memory` is of the request's prompt, and not of the longest one."""
    from qwenimg.common.hub.forecast import take_usual_prompt, times
    from qwenimg.common.pipeline import second_pass

    if not counted:
        take_usual_prompt(model, request, memory)
    steps, seconds = second_pass.steps(model, request), times(model, request, memory)
    return _Row(title=title, needs=memory, fits=fits, steps=steps, times=seconds, lora_bytes=lora_bytes)


def _few(pipe: Pipeline, given: dict[str, Any], row: Callable[..., _Row], *, counted: bool) -> dict[str, _Row]:
    """Return a row for each published few-step LoRA of the model, in the most bits that fit; none if the options set
    the number of steps."""
    from qwenimg.common.hub.forecast import FEW, fitting

    chosen = any(given[name] for name in ("few_steps", "steps", "sampler", "lora", "replay"))
    recipe = pipe.model.few_steps.get(FEW)
    rows = dict[str, _Row]()
    for count in () if chosen or recipe is None else recipe.steps:
        request, _ = _request(pipe, {**given, "few_steps": f"{FEW}:{count}"})
        best = fitting(pipe, request, counted=counted, few=True)
        shown = " ".join(filter(None, (f"--few-steps {FEW}:{count}", best.options)))
        lora_bytes = best.peak - best.needs.largest.peak
        rows[shown] = row(best.model, request, f"with {shown}", best.needs, best.fits, lora_bytes)
    return rows


def _converted(pipe: Pipeline, request: Request, row: Callable[..., _Row], *, counted: bool) -> _Row | None:
    """Return the row for the model after `qwenimg convert -q 8`, streamed (weights that are quantized while loading
    cannot be streamed). None if the options choose bits or a memory limit."""
    from qwenimg.common.pipeline.fit_options import MEGABYTE, amount_text, plan_memory
    from qwenimg.common.runtime.runtime import Change

    limit = pipe.engine.free_memory() // MEGABYTE * MEGABYTE
    if pipe.runtime.quantize is not None or pipe.runtime.max_memory is not None or limit <= 0:
        return None
    model = pipe.model.variant(Change(quantize="8", converted=True, max_memory=limit))
    memory = plan_memory(model, request, counted)
    title = f"converted by -q 8, --max-memory {amount_text(limit)}"
    return row(model, request, title, memory, memory.fits(memory.budget))


def _others(pipe: Pipeline, engine: OnPaper, fits: Sequence[_Row]) -> list[FitForecast]:
    """Return smaller known models that fit, if this one does not; otherwise faster ones."""
    from qwenimg.common.families import catalog
    from qwenimg.common.hub.forecast import forecast_all

    known = catalog.find(pipe.model_name)
    smaller = [one for one in forecast_all(engine, known.bytes) if one.fits] if known else []
    least = min((row.times.picture or 0 for row in fits), default=None)
    return [one for one in smaller if least is None or (one.times.picture or 0) < least / 2][:OTHERS]


def _request(pipe: Pipeline, given: dict[str, Any]) -> tuple[Request, bool]:
    """Return the request that `generate` would make, and whether it has a prompt."""
    from qwenimg.common.hub.forecast import PROMPT, without_missing_loras
    from qwenimg.common.jobs import image_options
    from qwenimg.common.jobs.job import InputFiles, Job
    from qwenimg.common.jobs.legal import read_pictures
    from qwenimg.common.jobs.replay import read_replay
    from qwenimg.common.jobs.run import completed
    from qwenimg.common.pipeline import masked_area

    options = image_options.parse(given)
    recorded = {} if given["replay"] is None else read_replay(given["replay"]).options
    if given["mask"] is None:  # the part is then unknown, and what is drawn has the recorded size
        recorded.pop("only_masked", None)
    options = image_options.merged(recorded, options)
    counted = "prompt" in options
    options.setdefault("prompt", "" if given["image"] and pipe.model.inputs.describe else PROMPT)
    image_options.check(options)
    inputs, _ = read_pictures(InputFiles(images=tuple(given["image"])))
    images = {name: one for name, one in pipe.model.inputs.placeholder().items() if name not in options}
    images |= {"image": inputs.images} if inputs.images else {}
    masked = given["mask"] is not None and (inputs.images or options.get("control"))
    images |= {"mask": given["mask"]} if masked else {}
    known = image_options.of_request(options)
    known = {name: value for name, value in known.items() if name not in ("seed", "num_images")}
    options = completed(pipe, Job(options=known, seeds=(0,)), inputs).options
    if given["few_steps"] and not given["lora"]:
        options = without_missing_loras(options)
    return masked_area.split(pipe.check(**options, **images)).drawn, counted


def _as_json(planned: _Plan) -> dict[str, object]:
    pipe, request = planned.pipe, planned.request
    return {
        "model": pipe.model_name,
        "here": planned.here,
        "missing": [*_missing(pipe), *(one.source for one in planned.left_out)],
        "backend": pipe.backend,
        "device": pipe.device,
        "precision": pipe.precision.name,
        "devices": pipe.model.sharing(request).as_json(),
        "size": [request.width, request.height],
        "memory_bytes": planned.now.needs.budget,
        **planned.now.as_json(),
        "stages": [stage.as_json() for stage in planned.now.needs.stages],
        "ways": [{"options": way.options, "without": way.without, **row.as_json()} for way, row in planned.ways],
        "converted": None
        if planned.converted is None
        else {"options": planned.converted.title, **planned.converted.as_json()},
        "few_steps": [{"options": option, **row.as_json()} for option, row in planned.few.items()],
        "others": [one.as_json() for one in planned.others],
    }


def _lines(planned: _Plan, engine: OnPaper) -> list[str]:
    from qwenimg.common.base.amounts import counted, size_text
    from qwenimg.common.base.text import aligned, clean

    pipe, request, now = planned.pipe, planned.request, planned.now
    size = f"{request.width}x{request.height}"
    if request.hires is not None:
        size += f", then {'x'.join(map(str, request.enlarged_size))}"
    lines = [f"{pipe.headline()} · {size}, {counted(now.steps, 'step')}"]
    if shared := pipe.model.sharing(request).text:
        lines.append(shared)
    if not planned.here:
        lines.append(f"{pipe.model_name} is not here: planned from its published configuration, for the longest prompt")
    lines += [f"before it draws: {text}" for text in _missing(pipe)]
    if planned.left_out:
        loras = ", ".join(clean(one.source, 80) for one in planned.left_out)
        pulls = "; ".join(f"qwenimg pull {clean(one.source, 80)}" for one in planned.left_out)
        lines.append(f"planned without LoRAs that are not here, {loras}: {pulls}")
    stages: list[tuple[str, ...]] = [("stage", "weights", "activations", "peak", "")]
    for stage in now.needs.stages:
        stages.append((stage.name, *map(size_text, (stage.weights, stage.activations, stage.peak)), stage.about))
    verdicts: list[tuple[str, ...]] = [(_budget_text(engine, now.needs.budget), "peak", "", "a step", "a picture")]
    for row in planned.rows:
        fits = "fits" if row.fits else "does not fit"
        verdicts.append((row.title, size_text(row.peak), fits, *row.times.texts()))
    lines += ["", *aligned(stages), "", *aligned(verdicts), ""]
    if cost := pipe.runtime.precision.kind.in_4_bits:
        lines += [cost, ""]
    if planned.sentence:
        lines += [planned.sentence, ""]
    if planned.others:
        names = (
            f"{one.model.name} ({size_text(one.peak)}, {one.times.texts()[1]} a picture)" for one in planned.others
        )
        lines += [f"other models that fit: {' or '.join(names)}; all of them: qwenimg plan", ""]
    return [*lines, *_about_steps(planned, engine)]


def _budget_text(engine: OnPaper, budget: int) -> str:
    from qwenimg.common.base.amounts import size_text

    return engine.about if engine.about and budget == engine.free else f"{size_text(budget)} of memory free"


def _about_steps(planned: _Plan, engine: OnPaper) -> list[str]:
    """Return the parts of a step's time."""
    from qwenimg.common.base.amounts import size_text
    from qwenimg.common.memory.estimate import streaming_rate

    now = planned.now
    lines = [f"a step: {now.needs.steps / now.steps / 1e12:.3g} x 10^12 operations"]
    if most := max(row.streamed for row in planned.rows):
        rate = size_text(streaming_rate(planned.pipe.engine.facts))
        lines.append(f"streamed: up to {size_text(most)} a step, read at {rate} a second while others compute")
    if engine.group is not None:
        lines.append("times leave out what the devices send each other")
    return [*lines, *_about_times(engine, now.times)]


def _about_times(engine: OnPaper, times: Times) -> list[str]:
    """Return how reliable the times are."""
    if times.step is None:
        return ["times: the rate of this device is not known; name one with --on"]
    if engine.rate is not None:
        return [SURE.format("by the measured rate of a layer on this CPU")]
    return [SURE.format("by published rates, measured on no such machine")]
