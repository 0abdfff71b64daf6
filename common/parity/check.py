"""Computes what a passport recorded again, on another backend or machine, and judges it block by block."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np

from qwenimg.common.base.amounts import counted
from qwenimg.common.base.errors import ModelError, QwenimgError
from qwenimg.common.base.text import clean
from qwenimg.common.formats.fingerprint import fingerprint
from qwenimg.common.parity import given, parity
from qwenimg.common.parity.blocks import ComponentPolicy, parts, shapes_sum
from qwenimg.common.parity.judged import figures, returned
from qwenimg.common.parity.lookups import are_inside
from qwenimg.common.parity.passport import Figure, Passport, Recorded
from qwenimg.common.parity.record import operations, side, values, with_loras
from qwenimg.common.parity.stations import Passed
from qwenimg.common.parity.stations import judged as stations_judged
from qwenimg.common.parity.tape import DECODE, Tape, taped
from qwenimg.common.pipeline.pipeline import Pipeline
from qwenimg.common.pipeline.result import Result
from qwenimg.common.runtime.engine import Engine
from qwenimg.common.runtime.traced import Blocks, Values, leaves

PIXELS = 2  # of 255, by which a float32 picture may differ
LATENTS = 1e-4  # relative, by which its latents may


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One recorded block on this backend."""

    name: str
    dtype: str
    figures: tuple[Figure, ...]
    recorded: tuple[Figure, ...]  # of the backend that recorded it

    @property
    def failures(self) -> list[str]:
        return [failure for figure in self.figures for failure in figure.failures]

    def as_json(self) -> dict[str, Any]:
        rows = [{"error": one.error, "allowed": one.allowed, "failures": list(one.failures)} for one in self.figures]
        return {"name": self.name, "dtype": self.dtype, "ok": not self.failures, "results": rows}


def check_model(passport: Passport, pipe: Pipeline, lora: str = "") -> list[str]:
    """Raises ModelError for another model, part or LoRA than the recorded one; the components whose files are others,
    though they hold the same parameters."""
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
    others = [part for part, found in prints.items() if found != recorded.fingerprints[part]]
    given.check_files(recorded, others, pipe.loras, lora)
    return others


def blocks(passport: Passport, pipe: Pipeline, lora: str = "") -> Iterator[Judged]:
    """Each recorded block, in order, on the engine of `pipe`, with `lora` as the recorded picture had it; one in 16 bit
    in float32 too, where faults are not below a rounding. Raises ModelError where the passport does not fit the
    model."""
    found, engine = parts(with_loras(pipe, _asked(passport, lora)), pipe.precision), pipe.engine
    components = {name: part.open(engine) for name, part in found.items()}
    widened = {} if pipe.tf32 else {name: part.open(engine, "float32") for name, part in found.items()}
    own = passport.sides[0].figures if passport.sides else ()
    for i, recorded in enumerate(passport.blocks):
        part = found.get(recorded.component)
        block = part.block(recorded.block, recorded.path) if part else None
        if part is None or block is None:
            raise ModelError(f"the passport's block {clean(recorded.name, 80)} is not in the model: record it again")
        if not are_inside(part, recorded):
            raise ModelError(f"the passport's arguments for {clean(recorded.name, 80)} do not fit it: record it again")
        dtype, before = part.dtype(block, recorded.path, returned(recorded)), own[i] if i < len(own) else ()
        wide = widened.get(recorded.component) if dtype in ("bfloat16", "float16") else None
        try:
            judged = _judged(part, recorded, _Called(components[recorded.component], wide, engine), before, dtype)
        except _CannotRun as error:
            judged = (Figure(error=math.nan, allowed=math.nan, failures=(str(error),)),)
        yield Judged(name=recorded.name, dtype=dtype, figures=judged, recorded=before)


@dataclass(frozen=True)
class _Called:
    """What computes a block: as the policy says, in float32 where that is to be judged too, and on which engine."""

    policy: Blocks
    wide: Blocks | None
    engine: Engine


class _CannotRun(Exception):
    """A block that does not take the recorded arguments, though the model has the recorded parameters: what computes it
    here is another program's."""


def _judged(
    part: ComponentPolicy, recorded: Recorded, called: _Called, before: tuple[Figure, ...], dtype: str
) -> tuple[Figure, ...]:
    block = part.block(recorded.block, recorded.path)
    with operations(called.engine) as seen:
        made = _results(called.policy, recorded, block)
    judged = figures(part, recorded, made)
    judged = tuple(_compared(now, then, dtype) for now, then in zip_longest(judged, before))
    if recorded.operations and (why := _others(seen, recorded.operations)):
        judged = _failed(judged, [why])
    if called.wide is not None:
        wide = figures(part, recorded, _results(called.wide, recorded, block), wide=True)
        judged = _failed(judged, [f"in float32: {why}" for figure in wide for why in figure.failures])
    return judged


def _failed(judged: tuple[Figure, ...], failures: list[str]) -> tuple[Figure, ...]:
    return (replace(judged[0], failures=(*judged[0].failures, *failures)), *judged[1:]) if failures else judged


def _asked(passport: Passport, lora: str) -> dict[str, Any]:
    """What the recorded picture asked for, `lora` being how its LoRAs are called here."""
    recorded = passport.picture
    return ({} if recorded is None else recorded.asked) | {"lora": lora}


def _others(seen: Mapping[str, int], recorded: Mapping[str, int]) -> str:
    """What of the operations and their dtypes is not as it was recorded: a float32 place that was lost, say."""
    names = sorted(name for name in {*seen, *recorded} if seen.get(name, 0) != recorded.get(name, 0))
    found = (f"{seen.get(name, 0)} of {clean(name, 40)}, recorded {recorded.get(name, 0)}" for name in names[:2])
    return f"operations: {'; '.join(found)}" if names else ""


def _compared(now: Figure, then: Figure | None, dtype: str) -> Figure:
    """In 16 bit, where most faults are below a rounding, an error far above the recording backend's is one too."""
    if dtype == "float32" or then is None or now.error <= max(parity.LIMIT[dtype], parity.RATIO * then.error):
        return now
    text = f"error {now.error:.3g} u, where it was recorded {then.error:.3g} u"
    return replace(now, failures=(*now.failures, text))


def _results(component: Blocks, recorded: Recorded, block: Any) -> list[Values]:
    """Return what the block makes of the recorded arguments. Raises _CannotRun."""
    try:
        made = leaves(component.call(recorded.path, block, [values(given) for given in recorded.arguments]))
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError, ArithmeticError) as error:
        if isinstance(error, QwenimgError):
            raise
        raise _CannotRun(f"is computed in other shapes than when it was recorded: {clean(error, 120)}") from None
    if len(made) != len(recorded.results):
        raise _CannotRun(f"gives {counted(len(made), 'result')}, recorded {len(recorded.results)}")
    return made


def stamped(passport: Passport, engine: Engine, tf32: bool, judged: Iterable[Judged]) -> Passport:
    """The passport with this side's figures added, in place of any of the same backend and device."""
    mine = side(engine, tf32, [one.figures for one in judged])
    others = [one for one in passport.sides[1:] if (one.backend, one.device) != (mine.backend, mine.device)]
    return replace(passport, sides=(*passport.sides[:1], *others, mine))


# The whole picture


@dataclass(frozen=True, kw_only=True)
class RedrawnImage:
    """The recorded picture, drawn again."""

    latents: float  # relative difference; of stations that of what enters the VAE
    pixels: int  # largest difference of 255
    failures: tuple[str, ...]
    stations: tuple[Passed, ...] = ()

    @property
    def unjudged(self) -> list[str]:
        """The stations whose results were not judged."""
        return [one.name for one in self.stations if one.made is not None and one.allowed is None]


def picture(passport: Passport, pipe: Pipeline, lora: str = "") -> RedrawnImage:
    """Draw the recorded picture with `pipe` and `lora`, from station to station where the passport has them. Noise,
    noise levels and the pixels of the recorded values are to be the same bits."""
    recorded, asked, tape = passport.picture, _asked(passport, lora), Tape(passport.run)
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
    latents = next((one.given for one in stations if one.name == DECODE), float("nan"))
    return RedrawnImage(latents=latents, pixels=pixels, failures=tuple(failures), stations=stations)


def _start(passport: Passport, pipe: Pipeline, asked: dict[str, Any], result: Result) -> list[str]:
    """Return what of noise and noise levels is not the recorded one, bit for bit."""
    recorded, failures = passport.picture, []
    assert recorded is not None
    if result.recipe["noise_sha256"] != recorded.noise:
        failures.append("the initial noise is another one")
    if pipe.model.plan(pipe.check(**asked)).sigmas != recorded.sigmas:
        failures.append("the noise levels are others")
    return failures


def _whole(passport: Passport, pipe: Pipeline, asked: dict[str, Any]) -> RedrawnImage:
    """Draw a picture that was recorded without stations: its latents and pixels are judged in float32 alone."""
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
