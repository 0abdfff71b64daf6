"""The choice of a token against transformers' processors, a draw against its probabilities, and wrong settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from qwenimg.common.base.errors import UsageError
from qwenimg.common.numbers.next_token import Decoding, kept, next_token, penalized

V = 3000
CASES = 400
CLOSE = 1e-6  # theirs are in float32


def case(rng: np.random.Generator) -> tuple[np.ndarray, list[int], Decoding]:
    scores = (rng.standard_normal(V) * rng.uniform(0.5, 6)).astype(np.float32)
    how = Decoding(
        temperature=float(rng.uniform(0.05, 2)),
        top_k=int(rng.choice([0, 1, 5, 40, V, 2 * V])),
        top_p=float(rng.choice([1.0, 0.05, 0.5, 0.8, 0.95, 0.999])),
        penalty=float(rng.choice([1.0, 1.05, 1.5, 0.8])),
    )
    return scores, rng.integers(0, V, rng.integers(1, 80)).tolist(), how


def theirs(scores: np.ndarray, earlier: list[int], how: Decoding) -> torch.Tensor:
    """The probabilities of transformers, in float64 from the processors' scores on."""
    steps: list[Any] = [RepetitionPenaltyLogitsProcessor(how.penalty), TemperatureLogitsWarper(how.temperature)]
    steps += [TopKLogitsWarper(how.top_k)] if how.top_k else []
    steps += [TopPLogitsWarper(how.top_p)] if how.top_p < 1 else []
    made = LogitsProcessorList(steps)(torch.tensor([earlier]), torch.from_numpy(scores)[None].double())
    return torch.softmax(made[0], 0)


def test_tokens_and_probabilities_are_those_of_transformers() -> None:
    rng, worst, sizes = np.random.default_rng(7), 0.0, list[int]()
    for _ in range(CASES):
        scores, earlier, how = case(rng)
        expected = theirs(scores, earlier, how).numpy()
        tokens, shares = kept(penalized(scores.astype(np.float64), set(earlier), how.penalty), how)
        assert set(tokens) == set(np.flatnonzero(expected)), how
        worst = max(worst, float(np.abs(shares - expected[tokens]).max()))
        sizes.append(len(tokens))
    print(f"{CASES} cases, {min(sizes)} to {max(sizes)} tokens kept, largest difference {worst:.1e}")
    assert worst < CLOSE


def test_the_best_token_is_that_of_transformers_and_of_equal_ones_the_first() -> None:
    rng = np.random.default_rng(3)
    for _ in range(CASES):
        scores, earlier, how = case(rng)
        expected = RepetitionPenaltyLogitsProcessor(how.penalty)(
            torch.tensor([earlier]), torch.from_numpy(scores.copy())[None]
        )
        assert next_token(scores, None, set(earlier), Decoding(penalty=how.penalty), 0) == int(expected.argmax())
    equal = np.zeros(V, np.float32)
    assert next_token(equal, None, (), Decoding(), 0) == 0
    tokens, _ = kept(equal.astype(np.float64), Decoding(temperature=1.0, top_k=5))
    assert tokens.tolist() == [0, 1, 2, 3, 4], "no more than five, whatever the ties"


def test_draws_follow_the_probabilities_and_the_seed_and_step_alone() -> None:
    scores = np.array([2.0, 1.0, 0.5, 0.0, -1.0, -np.inf], np.float32)
    how = Decoding(temperature=0.9)
    drawn = [next_token(scores, None, (), how, step) for step in range(6000)]
    expected = np.exp(scores.astype(np.float64) / 0.9)
    expected /= expected.sum()
    counts = np.bincount(drawn, minlength=6)
    assert counts[5] == 0
    chi = float((((counts - 6000 * expected) ** 2)[:5] / (6000 * expected[:5])).sum())
    print(f"chi squared {chi:.2f} of 4 degrees of freedom")
    assert chi < 18.5  # one in a thousand
    assert drawn[5] == next_token(scores, None, (), how, 5)
    other = [next_token(scores, None, (), Decoding(temperature=0.9, seed=1), step) for step in range(100)]
    assert other != drawn[:100]


def test_what_is_not_allowed_is_never_chosen() -> None:
    scores, allowed = np.arange(V).astype(np.float32), np.zeros(V, np.bool_)
    allowed[[4, 7]] = True
    assert next_token(scores, allowed, (), Decoding(), 0) == 7
    drawn = {next_token(scores, allowed, (), Decoding(temperature=2.0), step) for step in range(200)}
    assert drawn <= {4, 7} and 7 in drawn
    assert next_token(scores, allowed, {7}, Decoding(temperature=1.0, top_k=1, penalty=2.0), 0) == 4


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; give from 0 to 2"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": "hot"}, "temperature is hot"),
        ({"temperature": 2.1}, "temperature is 2.1"),
        ({"top_k": -1}, "top-k is -1"),
        ({"top_k": 1.5}, "top-k is 1.5"),
        ({"top_p": 0}, "top-p is 0; give above 0"),
        ({"top_p": 1.1}, "top-p is 1.1"),
        ({"top_p": True}, "top-p is True"),
        ({"penalty": 0}, "penalty is 0; give from 0.5 to 2"),
        ({"penalty": float("inf")}, "penalty is inf"),
        ({"limit": 0}, "limit is 0; give from 1 to 2048 tokens"),
        ({"limit": 2049}, "limit is 2049"),
        ({"limit": True}, "limit is True"),
        ({"seed": -1}, "seed -1"),
    ],
)
def test_wrong_settings(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        Decoding(**values)
    assert said in str(caught.value)
