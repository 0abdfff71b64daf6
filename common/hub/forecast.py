"""Predictions for known models on a machine, from their published configurations: which fit, with which options, and
about how long an image takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from qwenimg.common.base.amounts import duration, size_text
from qwenimg.common.base.config import data_folder, read_json
from qwenimg.common.base.errors import NotHere
from qwenimg.common.families import catalog
from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.hub import listing
from qwenimg.common.hub.open_model import plan_pipeline
from qwenimg.common.memory.memory_plan import MemoryPlan
from qwenimg.common.parts.texts.template_texts import LONG_PROMPT, USUAL, TemplateTexts
from qwenimg.common.pipeline import second_pass
from qwenimg.common.pipeline.fit import seconds
from qwenimg.common.pipeline.fit_options import BITS, MEGABYTE, amount_text, plan_memory
from qwenimg.common.pipeline.models.diffusion_model import DiffusionModel
from qwenimg.common.pipeline.pipeline import Pipeline
from qwenimg.common.precision import machines
from qwenimg.common.request.loras import in_cache
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.paper import OnPaper
from qwenimg.common.runtime.rates import Layer
from qwenimg.common.runtime.runtime import Change
from qwenimg.common.shapes import builtin

PROMPT = "a picture"  # used if none is given
FEW = "lightning"  # the distilled models that get a row of their own
# Seconds of an image: quick ones are listed first, and those that take longer than LONG last, the fastest first.
QUICK, LONG = 300, 1200
# A distilled LoRA of Qwen-Image stays beside quantized weights: rank 64 on 720 layers, in bfloat16.
LORA_BYTES = 850 * 10**6
OPERATIONS = "operations.json"  # written by tools/write_operations.py
LAYERS: tuple[Layer, ...] = ("matmul", "conv2d")
DTYPES = ("float32", "bfloat16", "float16")
ROWS = 10  # of the forecast that are printed, unless all are asked for
NO_MODELS = ("sdxl-refiner",)  # models that generate nothing alone


@dataclass(frozen=True, kw_only=True)
class Times:
    """The expected seconds of an image: None if the speed of the device is not known."""

    step: float | None
    picture: float | None  # steps and decoding, without loading

    def as_json(self) -> dict[str, float | None]:
        return {"step_seconds": self.step, "picture_seconds": self.picture}

    def texts(self) -> tuple[str, str]:
        """Return both times for a table."""
        step, picture = ("" if one is None else duration(one) for one in (self.step, self.picture))
        return step, picture


@dataclass(frozen=True, kw_only=True)
class FitForecast:
    """One known model on a machine, with the options with which it fits best, or takes least if it never fits."""

    model: KnownModel
    options: str  # of `generate`, besides -m
    size: tuple[int, int]  # width and height, pixels
    steps: int
    peak: int  # bytes
    fits: bool
    times: Times
    operations: float = 0.0  # multiplications and additions of the image

    @property
    def command(self) -> str:
        return " ".join(filter(None, (f"qwenimg PROMPT -m {self.model.name}", self.options)))

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model.name,
            "options": self.options,
            "size": list(self.size),
            "steps": self.steps,
            "peak_bytes": self.peak,
            "fits": self.fits,
            **self.times.as_json(),
        }


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A model as it runs with further `options`, and the needs of an image."""

    options: str
    model: DiffusionModel
    needs: MemoryPlan
    peak: int  # bytes, with those of a LoRA that is not in `needs`

    @property
    def fits(self) -> bool:
        return self.peak <= self.needs.budget


def times(model: DiffusionModel, request: Request, plan: MemoryPlan) -> Times:
    """Return the expected times of an image by `model` with the plan `plan`."""
    expected = seconds(model, plan)
    if expected is None:
        return Times(step=None, picture=None)
    steps, decoding = expected
    return Times(step=steps / second_pass.steps(model, request), picture=steps + decoding)


def take_usual_prompt(model: DiffusionModel, request: Request, plan: MemoryPlan) -> None:
    """Give the plan of a request without a prompt the operations of a prompt of usual length, while its memory is that
    of the longest: for a small picture that is most of the work. Published rates were compared with long prompts."""
    texts, measured = getattr(model, "texts", None), model.engine.rate is not None
    if isinstance(texts, TemplateTexts):
        with texts.of_usual_length(USUAL if measured else LONG_PROMPT):
            plan.steps = plan_memory(model, request, counted=False).steps


def forecast_all(engine: OnPaper, below: int | None = None) -> list[FitForecast]:
    """Return the known models on `engine`, best first. below: only smaller models, in bytes."""
    chosen = _models() if below is None else [known for known in _models() if 0 < known.bytes < below]
    return sorted((one for known in chosen for one in of_model(known, engine)), key=order)


def first(engine: OnPaper) -> FitForecast | None:
    """Return the first row of `forecast_all` that is a model to download and fits. Few models are opened: in the order
    in which they would be if all fitted, and their operations were computed at the highest rate of the device; and no
    more where the smallest does not fit, which takes least memory."""
    models = [known for known in _models() if known.repo is not None]
    bounds = {known.name: min(map(order, _bounds(known, engine))) for known in models}
    best: FitForecast | None = None
    for known in sorted(models, key=lambda known: bounds[known.name]):
        if best is not None and order(best) <= bounds[known.name]:
            break
        found = of_model(known, engine)
        if best is None and not _any_fits(found) and not _any_fits(of_model(catalog.smallest(), engine)):
            return None
        best = min(found if best is None else [best, *found], key=order)
    return best


def _any_fits(rows: Sequence[FitForecast]) -> bool:
    return any(one.fits for one in rows)


def _models() -> list[KnownModel]:
    """Return the known models that draw alone, the built-in one where it is installed."""
    models = (known for known in catalog.KNOWN.values() if known.name not in NO_MODELS)
    return [known for known in models if known is not catalog.BUILT_IN or builtin.present()]


def _bounds(known: KnownModel, engine: OnPaper) -> list[FitForecast]:
    """Return rows of `known` that come no later than those of `of_model`."""
    machine = machines.of_device(engine.device) if engine.on_gpu else None
    rates = [1e30]
    if machine is not None:
        rates = [machine.rate(dtype, quantized) for dtype in DTYPES for quantized in (False, True)]
    elif engine.rate is not None:
        rates = [engine.rate(layer, dtype, False) for layer in LAYERS for dtype in DTYPES]
    size = (known.width, known.height)
    return [
        FitForecast(
            model=known,
            options="",
            size=size,
            steps=0,
            peak=0,
            fits=True,
            times=Times(step=None, picture=operations / max(rates)),
        )
        for operations in _operations().get(known.name, [0.0])
    ]


@cache
def _operations() -> dict[str, list[float]]:
    """Return the multiplications and additions of an image by each known model, at least: with its default steps, and
    with those of its distilled LoRA."""
    return cast(dict[str, list[float]], read_json(data_folder(OPERATIONS)))


def order(one: FitForecast) -> tuple[float, ...]:
    """Return the place of a model among others: those that fit first; of them quick ones, then those that take up to
    LONG, in each case first the model to pull first, then those that anybody may download, those with a gate or large
    by their text encoder alone, and the built-in one, large ones before small ones; then slow ones, the fastest
    first."""
    (width, height), known, seconds = one.size, one.model, one.times.picture or 0.0
    behind = known.gated or known.mostly_text
    later = 0 if known.name == catalog.FIRST else 3 if known.repo is None else 1 + behind
    speed = (2, seconds) if seconds > LONG else (int(seconds > QUICK), 0.0)
    return not one.fits, *speed, later, -known.bytes, -width * height, one.steps


def hint(engine: OnPaper) -> str:
    """Return the commands that download a real model, for a message: the first of the forecast, and the smallest."""
    best, smallest = first(engine), catalog.smallest()
    if best is None:
        return f"none fits here; the smallest: {pull_text(smallest.name)}; what each takes: qwenimg plan"
    name = best.model.name
    ways = [f"{f'-m {name}' if listing.is_here(name) else pull_text(name)}{_duration(best)}"]
    if best.model is not smallest:
        ways.append(f"the smallest: {pull_text(smallest.name)}")
    return f"{'; '.join(ways)}; all that fit: qwenimg plan"


def instead(name: str, engine: OnPaper) -> str:
    """Return the end of a message about the model `name`, which is not here: the first of the forecast, if it is
    another one; else ""."""
    best = first(engine)
    if best is None or best.model.name == name:
        return ""
    return (
        f"; of all models the best for this machine: {best.model.name} ({size_text(best.model.bytes)}{_duration(best)})"
    )


def _duration(one: FitForecast) -> str:
    picture = one.times.texts()[1]
    return f", a picture in {picture}" if picture else ""


def pull_text(name: str) -> str:
    """Return the command that downloads the known model `name`, with its size."""
    return f"qwenimg pull {name} ({size_text(catalog.KNOWN[name].bytes)})"


def editor(masked: bool, engine: Callable[[], OnPaper], options: Mapping[str, Any]) -> str:
    """Return the name of the best model on this machine that edits, or that draws within a mask if `masked`: one that
    fits before others. engine: called if several are here, or none. options: of opening it. Raises NotHere if none
    is here."""
    names = catalog.INPAINTERS if masked else catalog.EDITORS
    here = [name for name in names if listing.is_here(name)]
    if len(here) > 1:
        return next((name for name in here if _fits(LoadOptions(model=name, **options), engine())), here[0])
    if here:
        return here[0]
    what = "draws within a mask" if masked else "edits pictures"
    best = _best(names, engine())
    raise NotHere(f"no model that {what} is here; get one: {pull_text(best)}", best, chosen=True)


def _fits(opening: LoadOptions, engine: OnPaper) -> bool:
    """Return whether a picture fits on `engine` as a run would draw it."""
    with closing(plan_pipeline(opening, engine)[0]) as pipe:
        plan = plan_memory(pipe.model, pipe.check(PROMPT, **pipe.model.inputs.placeholder()), False)
        return plan.fits(plan.budget)


def _best(names: Iterable[str], engine: OnPaper) -> str:
    """Return the first of `names` in the forecast of `engine`."""

    rows = [one for name in names for one in of_model(catalog.KNOWN[name], engine)]
    return min(rows, key=order).model.name


def of_model(known: KnownModel, engine: OnPaper) -> list[FitForecast]:
    """Return how `known` runs on `engine` with its default steps, and with few steps if it is a Qwen-Image that has a
    distilled LoRA."""
    pipe, _ = plan_pipeline(LoadOptions(model=known.name), engine, published=True)
    with closing(pipe):
        has_few = known.family == "qwen-image" and FEW in pipe.model.few_steps
        return [_forecast(known, pipe, few) for few in ((False, True) if has_few else (False,))]


def _forecast(known: KnownModel, pipe: Pipeline, few: bool) -> FitForecast:
    """Return how `known` runs in the most bits that fit. few: with the few steps of its distilled LoRA."""
    asked = without_missing_loras(pipe.resolve({"few_steps": FEW})) if few else {}
    request = pipe.check(PROMPT, **asked, **pipe.model.inputs.placeholder())
    best = fitting(pipe, request, counted=False, few=few)
    take_usual_prompt(best.model, request, best.needs)
    steps = pipe.model.plan(request).steps
    return FitForecast(
        model=known,
        options=" ".join(filter(None, (f"--few-steps {FEW}:{steps}" if few else "", best.options))),
        size=(request.width, request.height),
        steps=steps,
        peak=best.peak,
        fits=best.fits,
        times=times(best.model, request, best.needs),
        operations=best.needs.steps + best.needs.decoding,
    )


def fitting(pipe: Pipeline, request: Request, *, counted: bool, few: bool) -> Variant:
    """Return the first variant of the model with which the image fits, else the one that takes least. few: count the
    bytes of its distilled LoRA if that is not in the cache."""
    tried: list[Variant] = []
    for options, model in _variants(pipe):
        plan = plan_memory(model, request, counted)
        beside = few and not request.loras and model.runtime.quantize  # else it is merged into the weights
        peak = plan.largest.peak + (LORA_BYTES if beside else 0)
        tried.append(Variant(options=options, model=model, needs=plan, peak=peak))
        if tried[-1].fits:
            return tried[-1]
    return min(tried, key=lambda one: one.peak)


def _variants(pipe: Pipeline) -> Iterator[tuple[str, DiffusionModel]]:
    """Yield the model unchanged, in fewer bits, and streamed, each with its option."""
    yield "", pipe.model
    for bits in BITS if pipe.runtime.quantize is None else ():
        yield f"-q {bits}", pipe.model.variant(Change(quantize=bits))
    limit = pipe.engine.free_memory() // MEGABYTE * MEGABYTE
    if pipe.runtime.max_memory is None and limit > 0:
        yield f"--max-memory {amount_text(limit)}", pipe.model.variant(Change(max_memory=limit))


def policies(name: str, engine: OnPaper) -> list[tuple[str, ...]]:
    """Return a table of the known model `name` under each precision policy: memory, and time of an image."""
    known = catalog.find(name)
    assert known is not None, name
    lines: list[tuple[str, ...]] = [("policy", "peak", "", "a step", "a picture")]
    with closing(plan_pipeline(LoadOptions(model=known.name), engine)[0]) as pipe:
        auto = pipe.precision.name
        for policy in pipe.precision.kind.bases:
            model = pipe.model.variant(Change(precision=policy))
            request = pipe.check(PROMPT, **pipe.model.inputs.placeholder())
            plan = plan_memory(model, request, counted=False)
            fits = "fits" if plan.fits(plan.budget) else "does not fit"
            texts = times(model, request, plan).texts()
            lines.append((f"{policy} (auto)" if policy == auto else policy, size_text(plan.largest.peak), fits, *texts))
    return lines


def without_missing_loras(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return `asked` without LoRAs of the hub that are not in the cache."""
    missing = [one for one in asked.get("lora") or () if not in_cache(one.source)]
    return {name: value for name, value in asked.items() if name != "lora" or not missing}


def shown(forecasts: Sequence[FitForecast], all_rows: bool) -> tuple[Sequence[FitForecast], list[str]]:
    """Return the forecasts to print, the first ROWS unless `all_rows`, and a line about the others."""
    if all_rows or len(forecasts) <= ROWS:
        return forecasts, []
    return forecasts[:ROWS], [f"{len(forecasts) - ROWS} more: --all lists them"]


def rows(forecasts: Sequence[FitForecast]) -> list[tuple[str, ...]]:
    """Return a table: model, size, steps, peak, fit, time of a picture and the command."""
    head = ("model", "size", "steps", "peak", "", "a picture", "command")
    lines: list[tuple[str, ...]] = [head]
    for one in forecasts:
        width, height = one.size
        fits, picture = "fits" if one.fits else "does not fit", one.times.texts()[1]
        lines.append(
            (one.model.name, f"{width}x{height}", str(one.steps), size_text(one.peak), fits, picture, one.command)
        )
    return lines
