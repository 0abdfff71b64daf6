"""The choice of the next token of a text by its scores: one code for every backend, in float64, on the CPU.

Unusual here:

- the order is that of transformers: penalty, temperature, top-k, top-p, draw; but tokens of equal scores are taken by
  their ids, the lowest first, so that top-k never keeps more than k and the same scores give the same token everywhere;
- the random number of a step follows from the seed and the number of the step alone: a text that is written among
  others, or begun again, is the same.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.numbers.choices import SeededChoices
from qwenimg.common.numbers.seeds import check_seed

MOST = 2048  # tokens of a text
HOTTEST = 2.0
PENALTIES = (0.5, 2.0)


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """The rule by which each token of a text is chosen. Raises UsageError for a value out of its range."""

    temperature: float = 0.0  # 0: always the token of the highest score
    top_k: int = 0  # of how many tokens one is drawn; 0: all
    top_p: float = 1.0  # the share of the probability that those tokens have at least
    penalty: float = 1.0  # by which scores of tokens that the text has already are lowered
    penalizes_prompt: bool = False  # True: also of tokens that the prompt has, as published models do
    limit: int = 300  # tokens of the text
    seed: int = 0

    def __post_init__(self) -> None:
        low, high = PENALTIES
        _check("temperature", self.temperature, 0 <= _number(self.temperature) <= HOTTEST, f"from 0 to {HOTTEST:g}")
        _check("top-k", self.top_k, type(self.top_k) is int and self.top_k >= 0, "a whole number, 0 for all tokens")
        _check("top-p", self.top_p, 0 < _number(self.top_p) <= 1, "above 0, at most 1")
        _check("penalty", self.penalty, low <= _number(self.penalty) <= high, f"from {low:g} to {high:g}")
        _check("limit", self.limit, type(self.limit) is int and 0 < self.limit <= MOST, f"from 1 to {MOST} tokens")
        check_seed(self.seed)


def next_token(
    scores: NDArray[np.floating[Any]],
    allowed: NDArray[np.bool_] | None,
    earlier: Collection[int],
    how: Decoding,
    step: int,
) -> int:
    """Return the token that follows as number `step` (from 0), by the `scores` [V] of all tokens. allowed [V]: the
    tokens that may follow, None: all. earlier: the tokens whose scores the penalty lowers."""
    values = penalized(scores.astype(np.float64), earlier, how.penalty)
    if allowed is not None:
        values[~allowed] = -np.inf
    if how.temperature == 0:
        return int(np.argmax(values))  # the first of several
    tokens, shares = kept(values, how)
    summed = np.cumsum(shares)
    drawn = SeededChoices(how.seed, f"token {step}").share() * summed[-1]
    return int(tokens[min(int(np.searchsorted(summed, drawn, side="right")), len(tokens) - 1)])


def penalized(values: NDArray[np.float64], earlier: Collection[int], penalty: float) -> NDArray[np.float64]:
    """Return `values` [V] with those of `earlier` tokens divided by `penalty`, or multiplied if they are negative
    (N. S. Keskar et al., "CTRL", 2019)."""
    if penalty != 1 and earlier:
        again = sorted(earlier)
        values[again] = np.where(values[again] < 0, values[again] * penalty, values[again] / penalty)
    return values


def kept(values: NDArray[np.float64], how: Decoding) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Return the tokens of which one is drawn, from the highest of `values` [V] on, and their probabilities: at most
    top-k, and of these as few as have the share top-p together (A. Holtzman et al., 2019)."""
    tokens = _first(values, how.top_k)
    shares = np.exp((values[tokens] - values[tokens[0]]) / how.temperature)
    shares /= shares.sum()
    count = len(tokens) if how.top_p == 1 else 1 + int(np.count_nonzero(np.cumsum(shares)[:-1] < how.top_p))
    return tokens[:count], shares[:count] / shares[:count].sum()


def _first(values: NDArray[np.float64], most: int) -> NDArray[np.intp]:
    """Return the tokens of the `most` highest values that are not -inf (0: of all), the highest first, of equal ones
    the lowest id."""
    least = np.partition(values, -most)[-most] if 0 < most < len(values) else -np.inf
    chosen = np.flatnonzero((values >= least) & (values > -np.inf))
    ordered = chosen[np.argsort(-values[chosen], kind="stable")]
    return ordered[:most] if most else ordered


def _number(value: object) -> float:
    """Return `value`, and NaN, which is in no range, for one that is no finite number."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if number else math.nan  # type: ignore[arg-type]


def _check(name: str, value: object, fits: bool, expected: str) -> None:
    if not fits:
        raise UsageError(f"{name} is {clean(value, 40)}; give {expected}")
