"""Measurement of how far each station of a recorded image is from float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from qwenimg.common.base.errors import DoesNotFit
from qwenimg.common.parity.stations import FARTHEST, Station, output_error
from qwenimg.common.parity.tape import Tape, taped
from qwenimg.common.pipeline.models.diffusion_model import renew
from qwenimg.common.pipeline.pipeline import Pipeline
from qwenimg.common.precision.precision import bases
from qwenimg.common.runtime.runtime import Change

Notify = Callable[[str], None]


def with_own(pipe: Pipeline, asked: Mapping[str, Any], run: Sequence[Station], notify: Notify) -> tuple[Station, ...]:
    """Return `run` with the distance of each station's outputs from float32 on the same inputs. It stays unknown if
    float32 does not fit into memory, not even with streamed blocks."""
    if not pipe.precision.is_reduced:
        return tuple(replace(station, policy_error=0.0) if station.outputs else station for station in run)
    notify("drawing the same picture in float32")
    tape, reference = Tape(run), _in_float32(pipe)
    try:
        with taped(reference, tape):
            reference(**pipe.resolve(asked))  # with the paths of LoRAs
    except DoesNotFit as error:
        notify(f"float32 does not fit, so nothing of the picture can be judged: {error}")
        return tuple(run)
    finally:
        renew(reference.model, "")
    exact = {station.name: station for station in tape.stations}
    return tuple(_measured(station, exact[station.name]) for station in run)


def _in_float32(pipe: Pipeline) -> Pipeline:
    """Return a pipeline of the same open files that loads its weights in float32. Only `pipe` must be closed."""
    return Pipeline(
        pipe.model.variant(Change(precision="fp32", max_memory=_limit(pipe))),
        loras=pipe.loras,
        name=pipe.model_name,
        defaults=pipe.defaults,
        family=pipe.family,
        options=pipe.options,
        checkpoint=pipe.checkpoint,
        controls=pipe.controls,
        embeddings=pipe.embeddings,
    )


def _measured(station: Station, exact: Station) -> Station:
    if not station.outputs:
        return station
    error = output_error(exact, station)
    return replace(station, policy_error=error if error <= FARTHEST else None)


def _limit(pipe: Pipeline) -> int | None:
    """Return the limit of memory for float32 with streamed blocks, or None if its weights fit."""
    assert pipe.checkpoint is not None
    free, fp32 = pipe.engine.free_memory(), bases(pipe.precision.kind)["fp32"]
    return pipe.runtime.max_memory or (None if pipe.checkpoint.largest(fp32) < free // 2 else free)
