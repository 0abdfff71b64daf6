"""Repetition of a passport's computations on another backend or machine, judged block by block."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np

from qwenimg.common.base.amounts import counted
from qwenimg.common.base.errors import ModelError, QwenimgError, UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.formats.fingerprint import fingerprint
from qwenimg.common.parity import inputs, recorded_inputs, writing
from qwenimg.common.parity.blocks import ComponentPolicy, parts, shapes_sum
from qwenimg.common.parity.judged import compared, figures, returned
from qwenimg.common.parity.lookups import are_inside
from qwenimg.common.parity.passport.passport import Figure, Passport, Recorded
from qwenimg.common.parity.record import operations, side, values
from qwenimg.common.parity.stations import Passed
from qwenimg.common.parity.stations import judged as stations_judged
from qwenimg.common.parity.tape import DECODE, Tape, taped
from qwenimg.common.pipeline.pipeline import Pipeline
from qwenimg.common.pipeline.result import Result
from qwenimg.common.request.embedding_text import Embedding
from qwenimg.common.request.lora_text import Lora
from qwenimg.common.runtime.engine import Engine
from qwenimg.common.runtime.traced import BlockRunner, Values, leaves

PIXELS = 2  # of 255: the most by which a float32 image may differ
LATENTS = 1e-4  # the most by which its latents may differ, relative


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The results of one recorded block on this backend."""

    name: str
    dtype: str
    figures: tuple[Figure, ...]
    recorded: tuple[Figure, ...]  # the figures of the backend that recorded it

    @property
    def failures(self) -> list[str]:
        return [failure for figure in self.figures for failure in figure.failures]

    def as_json(self) -> dict[str, Any]:
        rows = [{"error": one.error, "allowed": one.allowed, "failures": list(one.failures)} for one in self.figures]
        return {"name": self.name, "dtype": self.dtype, "ok": not self.failures, "results": rows}


def check_model(passport: Passport, pipe: Pipeline, loras: tuple[Lora, ...] = ()) -> list[str]:
    """Return the components whose files are not the recorded ones, though they have the same parameters. Raises
    ModelError for another model, part or LoRA than the recorded one."""
    assert pipe.checkpoint is not None
    components, recorded = pipe.checkpoint.components, passport.model
    changed = [
        part
        for part, sum_ in recorded.shapes.items()
        if part not in components or shapes_sum(components[part].plan) != sum_
    ]
    if changed or pipe.family != recorded.family:
        which = f": its {clean(changed[0], 30)} has other parameters" if changed else ""
        raise ModelError(
            f"the passport is of {clean(recorded.name, 60)} ({clean(recorded.family, 30)}), and "
            f"{clean(pipe.model_name, 60)} is another model{which}"
        )
    prints = {part: fingerprint(components[part].plan.files) for part in recorded.fingerprints if part in components}
    others = [part for part, mark in prints.items() if mark != recorded.fingerprints[part]]
    recorded_inputs.check_files(recorded, others, pipe.loras, loras)
    return others


def check_run(
    passport: Passport,
    pipe: Pipeline,
    loras: tuple[Lora, ...] = (),
    networks: Sequence[str] = (),
    embeddings: tuple[Embedding, ...] = (),
) -> None:
    """Raise ModelError if the model cannot draw the recorded run. networks: the name of each recorded control's network
    on this machine; embeddings: as `recorded_inputs.check_embeddings`, whose UsageError is raised too."""
    if passport.picture is None:
        return
    if embeddings and not passport.picture.embeddings:
        raise UsageError("the passport was recorded without --embedding; leave it out")
    try:
        request = pipe.check(**_asked(passport, loras, networks, embeddings))
    except UsageError as error:
        raise ModelError(f"the passport's run is none for {clean(pipe.model_name, 60)}: {error}") from None
    recorded_inputs.check_embeddings(passport.picture.embeddings, inputs.recorded_embeddings(request, pipe))


def blocks(
    passport: Passport,
    pipe: Pipeline,
    loras: tuple[Lora, ...] = (),
    networks: Sequence[str] = (),
    embeddings: tuple[Embedding, ...] = (),
) -> Iterator[Judged]:
    """Yield each recorded block, in order, computed on the engine of `pipe`. `loras`, `networks`, `embeddings`: for the
    recorded LoRAs, controls and embeddings. A block in 16 bits is also computed in float32, where a fault exceeds the
    rounding. Raises ModelError if the passport does not fit the model."""
    policies = parts(inputs.weights(pipe, _asked(passport, loras, networks, embeddings)), pipe.precision)
    engine = pipe.engine
    components = {name: part.open(engine) for name, part in policies.items()}
    widened = {} if pipe.tf32 else {name: part.open(engine, "float32") for name, part in policies.items()}
    recorded_figures = passport.sides[0].figures if passport.sides else ()
    for i, recorded in enumerate(passport.blocks):
        part = policies.get(recorded.component)
        block = part.block(recorded.block, recorded.path) if part else None
        if part is None or block is None:
            raise ModelError(f"the passport's block {clean(recorded.name, 80)} is not in the model: record it again")
        if not are_inside(part, recorded):
            raise ModelError(f"the passport's arguments for {clean(recorded.name, 80)} do not fit it: record it again")
        dtype = part.dtype(block, recorded.path, returned(recorded))
        before = recorded_figures[i] if i < len(recorded_figures) else ()
        wide = widened.get(recorded.component) if dtype in ("bfloat16", "float16", "int8") else None
        try:
            judged = _judged(part, recorded, _Called(components[recorded.component], wide, engine), before, dtype)
        except _CannotRun as error:
            unknown = Figure(error=math.nan, allowed=math.nan)
            judged = _failed((unknown,) * len(recorded.results), [str(error)])
        yield Judged(name=recorded.name, dtype=dtype, figures=judged, recorded=before)


@dataclass(frozen=True)
class _Called:
    """The computations of a block: under the policy, in float32 too if that is judged, and their engine."""

    policy: BlockRunner
    wide: BlockRunner | None
    engine: Engine


class _CannotRun(Exception):
    """An error of a block that does not take the recorded arguments, though the model has the recorded parameters: the
    code that computes it is not the same."""


def _judged(
    part: ComponentPolicy, recorded: Recorded, called: _Called, before: tuple[Figure, ...], dtype: str
) -> tuple[Figure, ...]:
    block = part.block(recorded.block, recorded.path)
    with operations(called.engine) as counts:
        results = _results(called.policy, recorded, block)
    judged = figures(part, recorded, results)
    judged = tuple(compared(now, then, dtype) for now, then in zip_longest(judged, before))
    if recorded.operations and (why := _others(counts, recorded.operations)):
        judged = _failed(judged, [why])
    if called.wide is not None:
        wide = figures(part, recorded, _results(called.wide, recorded, block), wide=True)
        judged = _failed(judged, [f"in float32: {why}" for figure in wide for why in figure.failures])
    return judged


def _failed(judged: tuple[Figure, ...], failures: list[str]) -> tuple[Figure, ...]:
    return (replace(judged[0], failures=(*judged[0].failures, *failures)), *judged[1:]) if failures else judged


def _asked(
    passport: Passport, loras: tuple[Lora, ...], networks: Sequence[str], embeddings: tuple[Embedding, ...]
) -> dict[str, Any]:
    """Return the keywords of the recorded call, with the names that its LoRAs, control networks and embeddings have
    here."""
    recorded = passport.picture
    return {"lora": loras} if recorded is None else inputs.keywords(recorded, loras, networks, embeddings)


def _others(counts: Mapping[str, int], recorded: Mapping[str, int]) -> str:
    """Return a message if operations or their dtypes differ from the record, such as a lost float32 place, else ""."""
    names = sorted(name for name in {*counts, *recorded} if counts.get(name, 0) != recorded.get(name, 0))
    texts = (f"{counts.get(name, 0)} of {clean(name, 40)}, recorded {recorded.get(name, 0)}" for name in names[:2])
    return f"operations: {'; '.join(texts)}" if names else ""


def _results(component: BlockRunner, recorded: Recorded, block: Any) -> list[Values]:
    """Return the block's results for the recorded arguments. Raises _CannotRun."""
    try:
        results = leaves(component.call(recorded.path, block, [values(given) for given in recorded.arguments]))
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError, ArithmeticError) as error:
        if isinstance(error, QwenimgError):
            raise
        raise _CannotRun(f"is computed in other shapes than when it was recorded: {clean(error, 120)}") from None
    if len(results) != len(recorded.results):
        raise _CannotRun(f"gives {counted(len(results), 'result')}, recorded {len(recorded.results)}")
    return results


def stamped(passport: Passport, engine: Engine, tf32: bool, judged: Iterable[Judged]) -> Passport:
    """Return the passport with the figures of this side, which replace earlier ones of the same backend and device."""
    mine = side(engine, tf32, [one.figures for one in judged])
    others = [one for one in passport.sides[1:] if (one.backend, one.device) != (mine.backend, mine.device)]
    return replace(passport, sides=(*passport.sides[:1], *others, mine))


def written(
    passport: Passport,
    pipe: Pipeline,
    loras: tuple[Lora, ...] = (),
    networks: Sequence[str] = (),
    embeddings: tuple[Embedding, ...] = (),
) -> list[Judged]:
    """Return the verdict on the recorded text, by the whole text encoder of `pipe`; [] if none was recorded."""
    recorded = passport.writing
    if recorded is None:
        return []
    part = writing.part(inputs.weights(pipe, _asked(passport, loras, networks, embeddings)), pipe.precision)
    if part is None or part[0].name != recorded.component:
        raise ModelError("the passport's text is not one that this model's text encoder writes: record it again")
    figure = writing.judged(recorded, pipe.model.residents, *part)
    name, dtype = f"{recorded.component}.{writing.NAME}", writing.dtype_of(part[0])
    return [Judged(name=name, dtype=dtype, figures=(figure,), recorded=(recorded.figure,))]


# The whole image


@dataclass(frozen=True, kw_only=True)
class RedrawnImage:
    """The recorded image, generated again."""

    latents: float  # relative difference; with stations, that of the VAE's input
    pixels: int  # largest difference, of 255
    failures: tuple[str, ...]
    stations: tuple[Passed, ...] = ()

    @property
    def unjudged(self) -> list[str]:
        """The stations whose outputs were not compared."""
        return [one.name for one in self.stations if one.output_error is not None and one.allowed is None]


def picture(
    passport: Passport,
    pipe: Pipeline,
    loras: tuple[Lora, ...] = (),
    networks: Sequence[str] = (),
    embeddings: tuple[Embedding, ...] = (),
) -> RedrawnImage:
    """Generate the recorded image with `pipe`, `loras`, `networks` and `embeddings`, from station to station if the
    passport has stations. Noise, noise levels, and the pixels of the recorded values must have the same bits."""
    recorded, asked, tape = passport.picture, _asked(passport, loras, networks, embeddings), Tape(passport.run)
    assert recorded is not None
    if not passport.run:
        return _whole(passport, pipe, asked)
    with taped(pipe, tape):
        result = pipe(**asked)
    stations = tuple(stations_judged(passport.run, tape.stations))
    failures = [*_start(passport, pipe, asked, result), *(failure for one in stations for failure in one.failures)]
    if result.pixels.shape != recorded.pixels.shape:
        return RedrawnImage(
            latents=float("nan"), pixels=255, failures=(*failures, "it has another size"), stations=stations
        )
    pixels = int(np.abs(result.pixels.astype(int) - recorded.pixels).max())
    if pixels:
        mean = float((result.pixels.astype(int) - recorded.pixels).mean())
        failures.append(f"pixels of the same values differ by up to {pixels}, {mean:+.2f} on average")
    latents = next((one.input_error for one in stations if one.name == DECODE), float("nan"))
    return RedrawnImage(latents=latents, pixels=pixels, failures=tuple(failures), stations=stations)


def _start(passport: Passport, pipe: Pipeline, asked: dict[str, Any], result: Result) -> list[str]:
    """Return a failure for noise and for noise levels that are not the recorded ones, bit for bit."""
    recorded, failures = passport.picture, []
    assert recorded is not None
    if result.recipe["noise_sha256"] != recorded.noise:
        failures.append("the initial noise is another one")
    if pipe.model.plan(pipe.check(**asked)).sigmas != recorded.sigmas:
        failures.append("the noise levels are others")
    return failures


def _whole(passport: Passport, pipe: Pipeline, asked: dict[str, Any]) -> RedrawnImage:
    """Generate an image that was recorded without stations: its latents and pixels are judged in float32 alone."""
    recorded, result = passport.picture, pipe(**asked)
    assert recorded is not None
    failures = _start(passport, pipe, asked, result)
    if result.latents.shape != recorded.latents.shape or result.pixels.shape != recorded.pixels.shape:
        return RedrawnImage(latents=float("nan"), pixels=255, failures=(*failures, "it has another size"))
    exact = recorded.latents.astype(np.float64)
    latents = float(np.linalg.norm(result.latents - exact) / np.linalg.norm(exact))
    pixels = int(np.abs(result.pixels.astype(int) - recorded.pixels).max())
    if passport.precision.startswith("fp32") and not (latents <= LATENTS and pixels <= PIXELS):
        failures.append(f"latents differ by {latents:.1e}, at most {LATENTS:.0e}; pixels by {pixels}, at most {PIXELS}")
    return RedrawnImage(latents=latents, pixels=pixels, failures=tuple(failures))
