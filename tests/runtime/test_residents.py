"""The rule by which components stay in memory, are streamed and are freed, with components of given sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from qwenimg.common.runtime.residents import Occupancy, Residents
from qwenimg.common.runtime.stages import Split, Stage

BUDGET = 100


@dataclass(frozen=True)
class Part:
    """A component of so many bytes, of which `streamed` are not in memory, and `least` have to be."""

    size: int
    role: str = "vae"
    streamed: int = 0
    least: int = 0


class Sizes:
    """What a runtime is asked about components, on a device of so many free bytes."""

    def __init__(self, streams: bool = False):
        self.streams, self.told = streams, list[str]()

    def weight_bytes(self, part: Part) -> int:
        return part.size - part.streamed

    opened_bytes = weight_bytes

    def streamed_bytes(self, part: Part) -> int:
        return part.streamed

    def loading_bytes(self, part: Part) -> int:
        return 0

    def with_streaming(self, part: Part, budget: int) -> Part:
        if not self.streams or part.size <= budget:
            return part
        return replace(part, streamed=min(part.size - budget, part.size - part.least))

    def budget(self, loaded: int) -> int:
        return BUDGET

    def notify(self, kind: str, text: str) -> None:
        self.told.append(text)

    def open(self, part: Part, title: str, more: int) -> Any:
        return object()

    def check_fit(self, what: str, need: int) -> None: ...

    @property
    def engine(self) -> Any:
        return self

    def release(self) -> None: ...


def stage(name: str, part: Part, *sizes: int, **more: Any) -> Stage:
    splits = tuple(Split(activations=size, size=i) for i, size in enumerate(sizes))
    return Stage(**({"name": name, "resident": name, "component": part, "splits": splits} | more))


def alone(part: Part, *sizes: int, budget: int = BUDGET, streams: bool = True) -> tuple[int | None, int]:
    """The split that is chosen and the bytes that are streamed, with nothing else in memory."""
    memory = Occupancy(Sizes(streams), lambda loaded: budget, lambda names: None)  # type: ignore[arg-type]
    way = memory.place(stage("unet", part, *sizes))
    return way.split.size, way.component.streamed  # type: ignore[attr-defined]


def test_which_split_is_chosen() -> None:
    """All weights in memory come first, then large pieces; where nothing fits, what takes the least."""
    unet = Part(60, least=20)
    assert alone(unet, 40, 10) == (0, 0)
    assert alone(unet, 41, 10) == (1, 0), "smaller pieces rather than streamed blocks"
    assert alone(unet, 70, 50) == (0, 30), "the largest of those that fit with streamed blocks"
    assert alone(unet, 90, 70) == (1, 30)
    assert alone(unet, 90, 85) == (1, 40), "nothing fits"
    assert alone(unet, 70, 41, streams=False) == (1, 0)


def test_a_split_may_ask_for_more_than_it_takes() -> None:
    part, splits = Part(10), (Split(activations=30, required=60, size=1), Split(activations=50, size=2))
    for budget, size in ((70, 1), (69, 2)):
        memory = Occupancy(Sizes(), lambda loaded, budget=budget: budget, lambda names: None)  # type: ignore
        way = memory.place(stage("decode", part, 0, splits=splits))
        assert (way.split.size, way.activations) == (size, {1: 30, 2: 50}[size])


def test_what_stays_and_what_makes_room() -> None:
    residents = Residents(Sizes())  # type: ignore[arg-type]
    stages = [
        stage("encode", Part(5), 1),
        stage("text", Part(60), 10, keeps=False),
        stage("denoise", Part(50, "transformer"), 20),
        stage("decode", Part(10), 30),  # beside the UNet: 5 + 50 + 10 + 30
        stage("text", Part(60), 10, keeps=False),  # not beside it
        stage("denoise", Part(50, "transformer"), 60),  # not at all
    ]
    plan = residents.plan(stages)
    assert [(s.weights, s.activations) for s in plan.stages] == [
        (5, 1),
        (65, 10),
        (55, 20),
        (65, 30),
        (60, 10),
        (50, 60),
    ]
    assert not plan.fits(plan.budget) and residents.weights == 0
    for one in stages[:5]:
        residents.acquire(one)
    told = residents.runtime.told  # type: ignore[attr-defined]
    assert told == ["freeing the denoise, since what comes next does not fit beside it"] and residents.weights == 0


def test_results_stay_and_are_not_freed() -> None:
    residents = Residents(Sizes())  # type: ignore[arg-type]
    transformer = Part(40, "transformer")
    plan = residents.plan(
        [
            stage("modulation", transformer, resident="transformer", splits=(Split(activations=30, results=25),)),
            stage("denoise", transformer, 10, resident="transformer"),
            stage("decode", Part(20), 50),  # the transformer makes room, the modulation does not
        ]
    )
    assert [(s.weights, s.activations) for s in plan.stages] == [(40, 30), (65, 10), (45, 50)]


def test_a_stage_frees_others_only_for_what_it_wants() -> None:
    """A VAE runs in bands beside the UNet rather than free it."""
    residents = Residents(Sizes())  # type: ignore[arg-type]
    unet = stage("denoise", Part(50, "transformer"), 20)
    for wanted, expected in ((10, (60, 30, 1)), (None, (10, 80, 0))):
        plan = residents.plan([unet, stage("decode", Part(10), 80, 30, 10, wanted=wanted)])
        last = plan.stages[-1]
        assert (last.weights, last.activations) == expected[:2]


def test_of_stages_with_one_name_in_a_row_the_largest_counts() -> None:
    plan = Residents(Sizes()).plan(  # type: ignore[arg-type]
        [stage("text", Part(size), 10, keeps=False) for size in (20, 50, 30)] + [stage("decode", Part(1), 1)]
    )
    assert [(s.name, s.weights) for s in plan.stages] == [("text", 50), ("decode", 1)]


@pytest.mark.parametrize("role", ["vae", ""])
def test_free_by_role(role: str) -> None:
    residents = Residents(Sizes())  # type: ignore[arg-type]
    first = residents.acquire(stage("denoise", Part(30, "transformer"), 1))[0]
    residents.acquire(stage("decode", Part(20), 1))
    assert residents.weights == 50
    residents.free(role)
    assert residents.weights == (30 if role else 0)
    again = residents.acquire(stage("denoise", Part(30, "transformer"), 1))[0]
    assert (again is first) == bool(role)
