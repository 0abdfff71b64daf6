"""Observers see what their own context computes, and nothing of another thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from threading import Barrier, Event

import numpy as np
import pytest
from support.parity_cases import MLX, TORCH, Twin


@pytest.fixture(params=[TORCH, MLX], ids=["torch", "mlx"])
def twin(request: pytest.FixtureRequest) -> Twin:
    return request.param()


def step(twin: Twin, value: float) -> None:
    """One operation whose result is `value`."""
    zero, given = (twin.array(np.full((1, 2, 3), x), "float32") for x in (0.0, value))
    twin.nn.add(zero, given)


def into(twin: Twin, seen: list[tuple[str, float]]):
    """An observer that notes operation and value at once: an array of MLX belongs to the thread that made it."""
    return lambda operation, path, result: seen.append((operation, float(twin.engine.numpy(result).max())))


def test_two_threads_see_only_their_own(twin: Twin) -> None:
    """Both observe at the same time, and a third computes while they do."""
    both_observe, third_is_done = Barrier(3), Event()

    def observed(value: float) -> list[tuple[str, float]]:
        seen: list[tuple[str, float]] = []
        with twin.engine.observe(into(twin, seen)):
            both_observe.wait()
            step(twin, value)
            third_is_done.wait()
            step(twin, 10 * value)
        step(twin, 100 * value)
        return seen

    def unobserved() -> None:
        both_observe.wait()
        step(twin, 7.0)
        third_is_done.set()

    with ThreadPoolExecutor(3) as threads:
        found = [threads.submit(observed, 1.0), threads.submit(observed, 2.0)]
        threads.submit(unobserved).result()
    assert [made.result() for made in found] == [[("add", 1.0), ("add", 10.0)], [("add", 2.0), ("add", 20.0)]]


def test_observers_nest_and_leave(twin: Twin) -> None:
    outer: list[tuple[str, float]] = []
    inner: list[tuple[str, float]] = []
    with twin.engine.observe(into(twin, outer)):
        step(twin, 1.0)
        with pytest.raises(KeyError), twin.engine.observe(into(twin, inner)):
            step(twin, 2.0)
            raise KeyError
        step(twin, 3.0)
    step(twin, 4.0)
    assert (outer, inner) == ([("add", 1.0), ("add", 2.0), ("add", 3.0)], [("add", 2.0)])


def test_a_context_that_is_handed_on_takes_its_observers_along(twin: Twin) -> None:
    """What a thread of a pipeline's own would do."""
    seen: list[tuple[str, float]] = []
    with twin.engine.observe(into(twin, seen)), ThreadPoolExecutor(1) as threads:
        threads.submit(copy_context().run, step, twin, 5.0).result()
    assert seen == [("add", 5.0)]
