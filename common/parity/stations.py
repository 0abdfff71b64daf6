"""The stations of the run of a recorded image: the calls at which values enter a network or leave one.

A check visits the same stations and continues from each with the recorded outputs, so that an error stays where it is
made. The inputs of a network come from recorded values by float32 arithmetic, in 16 bit too, and must be equal up to
its roundings. Its outputs may differ by MARGIN times the distance of the recorded policy from float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Arrays: TypeAlias = tuple[NDArray[Any], ...]

INPUT_LIMIT = 1e-5  # relative error of inputs: measured 3e-7 at most; the smallest of the planted faults has 2e-3
FLOOR = 1e-4  # relative error of outputs in float32: measured 4e-6 at most
# Times a policy's own distance from float32. Healthy pairs measure 2.1 at most, the smallest planted fault that only
# this limit catches 12 (docs/measured/parity.md): 4 is nearly twice the one and a third of the other.
MARGIN = 4.0
FARTHEST = 1 / MARGIN  # the largest error of a policy: with a larger one, a network that returns zeros would pass


@dataclass(frozen=True, kw_only=True, eq=False)
class Station:
    """One call of a network in a run."""

    name: str  # "text_encoder 1", "step 2", "vae.decode"
    inputs: Arrays
    outputs: Arrays = ()
    policy_error: float | None = None  # `output_error` of the policy against float32; None if it is not known

    @property
    def allowed(self) -> float | None:
        """The largest error of the outputs that passes; None if it cannot be judged."""
        if not self.outputs or self.policy_error is None:
            return None
        return max(FLOOR, MARGIN * self.policy_error)


@dataclass(frozen=True, kw_only=True)
class Passed:
    """The comparison of a station with the recorded one."""

    name: str
    input_error: float  # largest relative difference of the inputs
    output_error: float | None  # of the outputs, NaN for other shapes; None without outputs
    allowed: float | None
    failures: tuple[str, ...]


def judged(recorded: Sequence[Station], now: Sequence[Station]) -> list[Passed]:
    """Compare each recorded station with the station of the same name now. A station without a record fails."""
    here = {station.name: station for station in now}
    passed = [_judged(station, here) for station in recorded]
    known = {station.name for station in recorded}
    return passed + [_alone(station.name, "was not recorded") for station in now if station.name not in known]


def _judged(then: Station, here: Mapping[str, Station]) -> Passed:
    now = here.get(then.name)
    if now is None:
        return _alone(then.name, "was recorded, and is not in this run")
    before, after, failures = distance(now.inputs, then.inputs), None, []
    if not before <= INPUT_LIMIT:
        failures.append(_other(before))
    if now.outputs and not then.outputs:
        failures.append("what it makes was not recorded")
    if then.outputs:
        after = output_error(now, then)
        if then.allowed is not None and not after <= then.allowed:
            what = (
                f"differs by {after:.1e}"
                if math.isfinite(after)
                else "has another shape, or values that are not finite"
            )
            failures.append(f"{what}, at most {then.allowed:.1e}")
    named = tuple(f"{then.name}: {failure}" for failure in failures)
    return Passed(name=then.name, input_error=before, output_error=after, allowed=then.allowed, failures=named)


def _other(error: float) -> str:
    """Return the message for inputs of the relative difference `error`."""
    if error == math.inf:
        return "what enters it are other whole numbers, such as token ids"
    if error != error:
        return "what enters it has another shape, or values that are not finite"
    return f"what enters it differs by {error:.1e}, at most {INPUT_LIMIT:.0e}"


def _alone(name: str, why: str) -> Passed:
    return Passed(name=name, input_error=0.0, output_error=None, allowed=None, failures=(f"{name}: {why}",))


def output_error(now: Station, then: Station) -> float:
    """Return the relative difference of a network's outputs from the recorded ones. For a step it is the error of its
    update, as for every residual: relative to the whole output it would depend on the noise level."""
    stream = then.inputs[0] if then.inputs else None

    def updates(arrays: Arrays) -> Arrays:
        return tuple(
            one.astype(np.float64) - stream if stream is not None and one.shape == stream.shape else one
            for one in arrays
        )

    return distance(updates(now.outputs), updates(then.outputs))


def distance(now: Arrays, then: Arrays) -> float:
    """Return the largest relative difference of arrays; NaN for other shapes and for values that are not finite, and
    infinity for whole numbers that differ, such as token ids."""
    if [array.shape for array in now] != [array.shape for array in then]:
        return math.nan
    return max((_relative(*pair) for pair in zip(now, then, strict=True)), key=_order, default=0.0)


def _order(value: float) -> float:
    return math.inf if value != value else value


def _relative(now: NDArray[Any], then: NDArray[Any]) -> float:
    if then.dtype.kind in "iub":
        return 0.0 if np.array_equal(now, then) else math.inf
    exact = then.astype(np.float64)
    change, length = float(np.linalg.norm(now - exact)), float(np.linalg.norm(exact))
    return change / length if length else change
