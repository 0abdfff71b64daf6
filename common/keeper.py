"""What every family of models needs to hold its components: a check that they fit, a clock, and a word to the user."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.backend import Array, Engine
from qwenimg.common.errors import DoesNotFit, NumericsError
from qwenimg.common.precision import BYTES, Precision
from qwenimg.common.probes import first_non_finite

Notify = Callable[[str, str], None]


class Keeper:
    """Loads within the memory there is. `timing` sums seconds by stage."""

    def __init__(self, engine: Engine, precision: Precision, notify: Notify):
        self.engine, self.precision, self.notify = engine, precision, notify
        self.timing: dict[str, float] = {}

    @contextmanager
    def loading(self, component: str, weights: int, more: int = 0) -> Iterator[None]:
        """Tells, checks that `weights` and `more` bytes are free, and times."""
        self.notify("stage", f"loading {component} ({weights / 1e9:.1f} GB)")
        self.check_fit(f"the {component}", weights + more)
        with self.timed(f"load {component}"):
            yield

    def check_fit(self, what: str, need: int) -> None:
        """Raises DoesNotFit before anything is allocated."""
        free = self.engine.free_memory()
        if need > free:
            raise DoesNotFit(
                f"{what} takes {need / 1e9:.1f} GB in {self.precision.name}, {free / 1e9:.1f} GB are free on "
                f"{self.engine.device}; choose a smaller size, close other programs, or use --precision bf16, not fp32"
            )

    def check_encoding(self, pixels: NDArray[np.float32], width: int) -> None:
        """Raises DoesNotFit where the encoder's first level, of `width` channels, does not fit for [1, 3, H, W]."""
        height, across = pixels.shape[2:]
        itemsize = BYTES[self.precision.compute_dtype("vae")]
        need = int(self.engine.decode_buffers * width * height * across * itemsize)
        self.check_fit(f"encoding a picture of {across}x{height}", need)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.timing[stage] = self.timing.get(stage, 0.0) + time.perf_counter() - start

    def way_out(self, component: str) -> str:
        """What to do about a value that is not finite."""
        dtype = self.precision.compute_dtype(component)
        if dtype == "float16":
            return "float16 does not hold this model, use --precision bf16 or fp32"
        return "try --precision fp32" if dtype == "bfloat16" else "the weights or the input are at fault"

    def check_finite(self, array: Array, title: str, component: str, again: Callable[[], Array]) -> None:
        """Raises NumericsError that names block and operation where `array`, the result of `again`, is not finite."""
        if not self.engine.finite(array):
            where = first_non_finite(self.engine, again)
            raise NumericsError(f"{title}: non-finite value at {where}; {self.way_out(component)}")
