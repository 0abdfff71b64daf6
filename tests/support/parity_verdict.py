"""Several backends judged together: each against the reference, and in 16 bits their errors against each other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.parity import parity
from qwenimg.common.parity.parity import RATIO, Case, Figures, Output, update_of

NOTHING = 0.05  # u: errors far below one rounding say nothing about the policy, so they are not compared


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The figures of every backend and what is wrong with them; nothing wrong means that they pass."""

    case: Case
    figures: Mapping[str, Figures]
    allowed: float
    allowed_largest: float
    mutual: float
    failures: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.failures

    @property
    def worst(self) -> float:
        """The largest relative error in units of what is allowed; NaN where one cannot be computed."""
        errors = [figures.relative for figures in self.figures.values()]
        return math.nan if any(map(math.isnan, errors)) else max(errors, default=math.nan) / self.allowed

    def k(self, backend: str) -> float:
        """The backend's constant of the law above."""
        return self.figures[backend].relative / (self.case.unit * math.sqrt(self.case.blocks))

    def row(self, label: str = "") -> str:
        """One line of a table: every error in units of roundoff."""
        unit = self.case.unit
        sides = "  ".join(
            f"{name} {f.relative / unit:8.3g} u (max {f.largest / unit:8.3g} u)" for name, f in self.figures.items()
        )
        limit = f"limit {self.allowed / unit:.3g} u (max {self.allowed_largest / unit:.3g} u)"
        verdict = "ok" if self.ok else "FAILED: " + "; ".join(self.failures)
        what = f"{self.case.component:<22} {label:<26} {self.case.dtype:<8}"
        return f"{what} {sides}  mutual {self.mutual / unit:8.3g} u  {limit}  {verdict}"


def judge(
    case: Case, reference: NDArray[Any], outputs: Mapping[str, Output], stream: NDArray[Any] | None = None
) -> Verdict:
    """Hold every backend's output against `reference`, as `parity.judge` does one."""
    each = {name: parity.judge(case, reference, output, stream) for name, output in outputs.items()}
    first, figures = next(iter(each.values())), {name: one.figures for name, one in each.items()}
    failures = [f"reference: {why}" for why in first.reference_faults]
    failures += [f"{name}: {why}" for name, one in each.items() for why in one.failures]
    return Verdict(
        case=case,
        figures=figures,
        allowed=first.allowed,
        allowed_largest=first.allowed_largest,
        mutual=_mutual(list(outputs.values()), update_of(np.asarray(reference, np.float64), stream)),
        failures=(*failures, *_uneven(case, figures)),
    )


def _mutual(outputs: list[Output], update: NDArray[np.float64]) -> float:
    """The difference of the first two, relative to the reference: for information."""
    if len(outputs) < 2 or outputs[0].values.shape != outputs[1].values.shape:
        return math.nan
    a, b = (np.asarray(output.values, np.float64) for output in outputs[:2])
    length = float(np.linalg.norm(update))
    return float(np.linalg.norm(a - b)) / length if length else math.nan


def _uneven(case: Case, figures: Mapping[str, Figures]) -> list[str]:
    """In 16 bits, whether one backend's error is more than `RATIO` times another's."""
    if case.dtype not in ("bfloat16", "float16"):
        return []
    floor = NOTHING * case.unit
    errors = {name: f.relative + floor for name, f in figures.items() if not math.isnan(f.relative)}
    if not errors or max(errors.values()) <= RATIO * min(errors.values()):
        return []
    worst, best = max(errors, key=errors.__getitem__), min(errors, key=errors.__getitem__)
    return [f"{worst}'s error is {errors[worst] / errors[best]:.2f} times {best}'s, at most {RATIO:g}"]
