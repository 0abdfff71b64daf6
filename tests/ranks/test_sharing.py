"""How ranks share a run: the rule, its refusals, and the passes of each rank; no framework."""

from __future__ import annotations

from typing import Any

import pytest

from qwenimg.common.base.errors import UsageError
from qwenimg.common.pipeline.steps.evaluation import parallel, serial, strategy
from qwenimg.common.runtime.group import ALONE, PaperRanks, Sharing, sharing


@pytest.mark.parametrize(
    ("ranks", "branches", "heads", "expected"),
    [
        (2, 2, 24, (2, 1)), (2, 1, 24, (1, 2)), (4, 2, 24, (2, 2)), (3, 2, 24, (1, 3)), (8, 2, 24, (2, 4)),
        (6, 3, 24, (3, 2)), (2, 3, 24, (1, 2)), (24, 1, 24, (1, 24)), (2, 2, 0, (2, 1)), (2, 3, 0, (2, 1)),
    ],
)  # fmt: skip
def test_the_rule(ranks: int, branches: int, heads: int, expected: tuple[int, int]) -> None:
    found = sharing(PaperRanks(ranks, by_tokens=True), branches, heads)
    assert (found.branches, found.tokens) == expected and found.ranks == ranks
    assert found.text.startswith(f"each of {ranks} devices")


def test_one_device() -> None:
    assert sharing(None, 2, 24) == ALONE and ALONE.ranks == 1 and ALONE.text == ""
    assert ALONE.part(7) == 7 and ALONE.exchanged(64, 7) == 0 and strategy(None, ALONE) is serial


@pytest.mark.parametrize(
    ("ranks", "by_tokens", "branches", "heads", "words"),
    [
        (2, False, 1, 24, "this picture has one: give a guidance that is on"),
        (3, False, 2, 24, "this picture has 2: give as many"),
        (4, True, 2, 0, "this picture has 2: give as many"),
        (4, True, 1, 30, "4 devices cannot share the 30 attention heads of this model evenly; give 3"),
        (8, True, 2, 30, "4 devices cannot share the 30 attention heads of this model evenly; give 6"),
        (5, True, 1, 3, "5 devices cannot share the 3 attention heads of this model evenly; give 3"),
    ],
)
def test_refusals(ranks: int, by_tokens: bool, branches: int, heads: int, words: str) -> None:
    with pytest.raises(UsageError, match=f"--devices {ranks}: .*{words}"):
        sharing(PaperRanks(ranks, by_tokens=by_tokens), branches, heads)


def test_what_is_advised_works() -> None:
    for heads in range(1, 40):
        for ranks in range(2, 12):
            for branches in (1, 2, 3):
                try:
                    sharing(PaperRanks(ranks, by_tokens=True), branches, heads)
                except UsageError as error:
                    advised = int(str(error).rpartition(" ")[2])
                    assert advised == 1 or sharing(PaperRanks(advised, by_tokens=True), branches, heads)


def test_operations_are_those_of_the_set_with_the_most() -> None:
    assert ALONE.operations([1.0, 0.5]) == 1.5
    assert Sharing(branches=2).operations([1.0, 0.5]) == 1.0
    assert Sharing(branches=2).operations([1.0, 0.5, 0.2]) == 1.2
    assert Sharing(branches=2, tokens=3).operations([3.0, 1.5]) == 1.0 and Sharing(tokens=3).part(7) == 3


class Recorder:
    """A rank whose exchange gives what each set computes, by the passes that it was seen to take."""

    rank, size, by_tokens = 0, 4, True

    def __init__(self, branch: int, others: list[list[str]]) -> None:
        self.branch, self.others, self.shared = branch, others, ALONE

    def share(self, sharing: Sharing) -> None:
        self.shared = sharing

    def gather(self, array: str) -> list[str]:
        for position, results in enumerate(self.others):
            if position == self.branch:
                results.append(array)
        return list(map(str, range(len(self.others))))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("sets", [2, 3])
def test_each_set_takes_every_so_many_th_pass(count: int, sets: int) -> None:
    """The k-th exchange has a pass of each set, in their order; where passes are missing, the last one again."""
    passes: Any = [lambda x, sigma, control, i=i: f"{i} of {x} at {sigma}, {control}" for i in range(count)]
    rounds = -(-count // sets)
    for branch in range(sets):
        taken: list[list[str]] = [[] for _ in range(sets)]
        group: Any = Recorder(branch, taken)
        results = parallel(group, sets)(passes, "x", 0.5, "changed")
        numbers = [min(first + branch, count - 1) for first in range(0, count, sets)]
        assert taken[branch] == [f"{i} of x at 0.5, changed" for i in numbers] and len(numbers) == rounds
        assert results == (list(map(str, range(sets))) * rounds)[:count]


def test_the_strategy_shares_the_run() -> None:
    group: Any = Recorder(0, [[]])
    assert strategy(group, Sharing(tokens=4)) is serial and group.shared == Sharing(tokens=4)
    assert strategy(group, Sharing(branches=4)) is not serial and group.shared == Sharing(branches=4)
