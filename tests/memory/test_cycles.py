"""Arrays are freed by their references alone: the command line lets Python search for garbage rarely."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import qwenimg
from qwenimg.common.base.errors import QwenimgError
from qwenimg.common.pipeline.result import Step

ARRAYS = {"Tensor", "Parameter", "array", "ndarray"}


@pytest.fixture
def garbage() -> Iterator[list[object]]:
    """What only a search for garbage finds, kept by it."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield gc.garbage
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_no_array_is_in_a_cycle(backend: str, garbage: list[object]) -> None:
    """A picture, one from a picture, one with a step cache, one that is refused, and one that is stopped."""
    drawn: dict[str, Any] = {"width": 96, "height": 96, "steps": 2}
    pipe = qwenimg.load("shapes", backend, "fp32")
    pipe("a red circle", **drawn)
    pipe("a ring", image=np.zeros((96, 96, 3), np.uint8), strength=0.5, **drawn)
    pipe("a blue square", step_cache=0.2, width=96, height=96, steps=6)
    with pytest.raises(QwenimgError):
        pipe("a ring", steps=2, width=-1)
    stopped = pipe.stream("a ring", **drawn)
    next(event for event in stopped if isinstance(event, Step))
    stopped.close()
    pipe.close()
    del pipe, stopped
    gc.collect()
    held = [one for one in garbage if type(one).__name__ in ARRAYS]
    print(backend, len(garbage), "objects in cycles, arrays:", len(held))
    assert not held
    garbage.append(np.zeros(3))  # the check would see one
    assert [one for one in garbage if type(one).__name__ in ARRAYS]
