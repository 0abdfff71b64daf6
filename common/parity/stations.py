"""The stations of the run that drew a recorded picture: places where values enter a network or leave one.

A check walks the same stations and goes on from each with what was recorded there, so an error stays where it is made.
What enters a network is made by float32 arithmetic from recorded values, in 16 bit too, and has to be the same up to
its roundings. What a network makes may differ by MARGIN times the distance of the recorded policy from float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Arrays: TypeAlias = tuple[NDArray[Any], ...]

GIVEN = 1e-5  # relative, of what enters a network: measured 3e-7 at most; the smallest of the planted faults has 2e-3
FLOOR = 1e-4  # relative, of what a network makes in float32: measured 4e-6 at most
# Times a policy's own distance from float32. Healthy pairs measure 2.1 at most, the smallest of the planted faults that
# is seen by this alone 12 (docs/measured/parity.md): 4 is nearly twice the one and a third of the other.
MARGIN = 4.0
FARTHEST = 1 / MARGIN  # of a policy from float32: beyond, a network that makes nothing but zeros would pass


@dataclass(frozen=True, kw_only=True, eq=False)
class Station:
    """One place of a run."""

    name: str  # "text_encoder 1", "step 2", "vae.decode"
    given: Arrays  # what enters the network
    made: Arrays = ()  # what the network makes of it
    own: float | None = None  # `made_distance` from what float32 makes; None where that is not known

    @property
    def allowed(self) -> float | None:
        """The largest relative difference of `made` that passes; None where it cannot be judged."""
        if not self.made or self.own is None:
            return None
        return max(FLOOR, MARGIN * self.own)


@dataclass(frozen=True, kw_only=True)
class Passed:
    """A recorded station, passed again."""

    name: str
    given: float  # largest relative difference of what enters
    made: float | None  # `made_distance` of what the network makes, NaN for other shapes; None where it makes nothing
    allowed: float | None
    failures: tuple[str, ...]


def judged(recorded: Sequence[Station], now: Sequence[Station]) -> list[Passed]:
    """Hold each recorded station against the one of the same name, and refuse those that were not recorded."""
    here = {station.name: station for station in now}
    found = [_judged(station, here) for station in recorded]
    known = {station.name for station in recorded}
    return found + [_alone(station.name, "was not recorded") for station in now if station.name not in known]


def _judged(then: Station, here: Mapping[str, Station]) -> Passed:
    now = here.get(then.name)
    if now is None:
        return _alone(then.name, "was recorded, and is not in this run")
    given, made, failures = distance(now.given, then.given), None, []
    if not given <= GIVEN:
        failures.append(_other(given))
    if now.made and not then.made:
        failures.append("what it makes was not recorded")
    if then.made:
        made = made_distance(now, then)
        if then.allowed is not None and not made <= then.allowed:
            what = (
                f"differs by {made:.1e}" if math.isfinite(made) else "has another shape, or values that are not finite"
            )
            failures.append(f"{what}, at most {then.allowed:.1e}")
    named = tuple(f"{then.name}: {failure}" for failure in failures)
    return Passed(name=then.name, given=given, made=made, allowed=then.allowed, failures=named)


def _other(given: float) -> str:
    """What to say of a distance of what enters a station."""
    if given == math.inf:
        return "what enters it are other whole numbers, such as token ids"
    if given != given:
        return "what enters it has another shape, or values that are not finite"
    return f"what enters it differs by {given:.1e}, at most {GIVEN:.0e}"


def _alone(name: str, why: str) -> Passed:
    return Passed(name=name, given=0.0, made=None, allowed=None, failures=(f"{name}: {why}",))


def made_distance(now: Station, then: Station) -> float:
    """How far what a network makes is from what was recorded. Of a step that is the error of its update, as of every
    residual: relative to what is denoised it would grow with the noise level."""
    stream = then.given[0] if then.given else None

    def updates(arrays: Arrays) -> Arrays:
        return tuple(
            one.astype(np.float64) - stream if stream is not None and one.shape == stream.shape else one
            for one in arrays
        )

    return distance(updates(now.made), updates(then.made))


def distance(now: Arrays, then: Arrays) -> float:
    """The largest relative difference of arrays; NaN for other shapes and for values that are not finite, and infinite
    for whole numbers that differ, such as token ids."""
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
