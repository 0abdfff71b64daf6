"""Computes what a passport recorded again, on another backend or machine, and judges it block by block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np

from qwenimg.common.base.errors import ModelError, QwenimgError
from qwenimg.common.base.text import clean
from qwenimg.common.formats.fingerprint import fingerprint
from qwenimg.common.parity import given, parity
from qwenimg.common.parity.blocks import parts, shapes_sum
from qwenimg.common.parity.judged import figures, returned
from qwenimg.common.parity.lookups import are_inside
from qwenimg.common.parity.passport import Figure, Passport, Recorded
from qwenimg.common.parity.record import operations, side, values, with_loras
from qwenimg.common.pipeline.pipeline import Pipeline
from qwenimg.common.runtime.engine import Engine
from qwenimg.common.runtime.traced import leaves

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
    """Each recorded block, in order, on the engine of `pipe`, with `lora` as the recorded picture had it. Raises
    ModelError where the passport does not fit the model."""
    found, engine = parts(with_loras(pipe, _asked(passport, lora)), pipe.precision), pipe.engine
    components = {name: part.open(engine) for name, part in found.items()}
    own = passport.sides[0].figures if passport.sides else ()
    for i, recorded in enumerate(passport.blocks):
        part = found.get(recorded.component)
        block = part.block(recorded.block, recorded.path) if part else None
        if part is None or block is None:
            raise ModelError(f"the passport's block {clean(recorded.name, 80)} is not in the model: record it again")
        if not are_inside(part, recorded):
            raise _unfit(recorded)
        with operations(engine) as seen:
            made = leaves(_called(components[recorded.component], recorded, block))
        if len(made) != len(recorded.results):
            raise _unfit(recorded)
        dtype, before = part.dtype(block, recorded.path, returned(recorded)), own[i] if i < len(own) else ()
        judged = figures(part, recorded, made)
        judged = tuple(_compared(now, then, dtype) for now, then in zip_longest(judged, before))
        if recorded.operations and (why := _others(seen, recorded.operations)):
            judged = (replace(judged[0], failures=(*judged[0].failures, why)), *judged[1:])
        yield Judged(name=recorded.name, dtype=dtype, figures=judged, recorded=before)


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


def _called(component: Any, recorded: Recorded, block: Any) -> Any:
    try:
        return component.call(recorded.path, block, [values(given) for given in recorded.arguments])
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError, ArithmeticError) as error:
        if isinstance(error, QwenimgError):
            raise
        raise _unfit(recorded) from None


def _unfit(recorded: Recorded) -> ModelError:
    return ModelError(f"the passport's arguments for {clean(recorded.name, 80)} do not fit it: record it again")


def stamped(passport: Passport, engine: Engine, tf32: bool, judged: Iterable[Judged]) -> Passport:
    """The passport with this side's figures added, in place of any of the same backend and device."""
    mine = side(engine, tf32, [one.figures for one in judged])
    others = [one for one in passport.sides[1:] if (one.backend, one.device) != (mine.backend, mine.device)]
    return replace(passport, sides=(*passport.sides[:1], *others, mine))


# The whole picture


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """The recorded picture, drawn again."""

    latents: float  # relative difference
    pixels: int  # largest difference of 255
    failures: tuple[str, ...]


def picture(passport: Passport, pipe: Pipeline, lora: str = "") -> Drawn:
    """Draws it with `pipe` and `lora`. Noise and noise levels must be the same bits; in float32 the picture nearly."""
    recorded = passport.picture
    assert recorded is not None
    asked = _asked(passport, lora)
    result = pipe(**asked)
    failures = []
    if result.recipe["noise_sha256"] != recorded.noise:
        failures.append("the initial noise is another one")
    if pipe.model.plan(pipe.check(**asked)).sigmas != recorded.sigmas:
        failures.append("the noise levels are others")
    if result.latents.shape != recorded.latents.shape or result.pixels.shape != recorded.pixels.shape:
        return Drawn(latents=float("nan"), pixels=255, failures=(*failures, "it has another size"))
    exact = recorded.latents.astype(np.float64)
    latents = float(np.linalg.norm(result.latents - exact) / np.linalg.norm(exact))
    pixels = int(np.abs(result.pixels.astype(int) - recorded.pixels).max())
    if passport.precision.startswith("fp32") and not (latents <= LATENTS and pixels <= PIXELS):
        failures.append(f"latents differ by {latents:.1e}, at most {LATENTS:.0e}; pixels by {pixels}, at most {PIXELS}")
    return Drawn(latents=latents, pixels=pixels, failures=tuple(failures))
