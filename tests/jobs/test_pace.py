"""The pace of previews, without a clock."""

from __future__ import annotations

import pytest

from qwenimg.common.jobs.pace import SHARE, PreviewPace, is_due


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> str:
        self.now += seconds
        return "picture"


@pytest.mark.parametrize("cost", [0.0, 0.001, 0.019, 0.099])
def test_previews_take_at_most_their_share(cost: float) -> None:
    """But for the first, which is made at once."""
    clock = Clock()
    pace = PreviewPace(clock)
    made = [pace.after(0.5, lambda: clock.work(cost)) for _ in range(100)]
    count = sum(one is not None for one in made)
    assert made[0] and count == {0.0: 100, 0.001: 100, 0.019: 50, 0.099: 10}[cost]
    assert (count - 1) * cost <= SHARE * 0.5 * 100


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 20, 50])
@pytest.mark.parametrize("wanted", [0, 1, 2, 3])
def test_a_number_of_previews_divides_the_steps(steps: int, wanted: int) -> None:
    at: list[int] = []
    for step in range(1, steps + 1):
        if is_due(step, steps, len(at), wanted):
            at.append(step)
    assert len(at) == min(wanted, steps - 1) and steps not in at
    if steps % (wanted + 1) == 0:
        assert at == [steps * i // (wanted + 1) for i in range(1, wanted + 1)]
