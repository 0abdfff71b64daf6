"""Components on an engine: checked to fit before they are loaded, timed, and probed where a value is not finite."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.amounts import size_text
from qwenimg.common.base.errors import DoesNotFit, NumericsError
from qwenimg.common.runtime import memory
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.runtime.engine import VAE, Array, Engine
from qwenimg.common.runtime.probe import first_non_finite
from qwenimg.common.weights.plan import LoadPlan
from qwenimg.common.weights.precision import BYTES, Precision

Notify = Callable[[str, str], None]


class Clock:
    """Seconds by stage since it was last cleared."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, stage: str, seconds: float) -> None:
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.add(stage, time.perf_counter() - start)

    def clear(self) -> None:
        self.seconds = {}


class Runtime:
    """An engine with a precision: loads within the memory there is. `notify(kind, text)` reports stages."""

    def __init__(self, engine: Engine, precision: Precision, notify: Notify):
        self.engine, self.precision, self.notify = engine, precision, notify
        self.clock = Clock()

    # Loading

    def open(self, component: Component, title: str, more: int = 0, *, resident: LoadPlan | None = None) -> Any:
        """`component` on the engine, once it is known that its weights and `more` bytes fit. `resident`: the part of
        its weights that stays, where that is not all. Raises DoesNotFit."""
        weights = self.weight_bytes(component, resident)
        self.notify("stage", f"loading {title} ({size_text(weights)})")
        self.check_fit(f"the {title}", weights + more)
        with self.clock.timed(f"load {title}"):
            return self.engine.open(component.network, component.config, component.plan, self.precision)

    def weight_bytes(self, component: Component, resident: LoadPlan | None = None) -> int:
        return memory.weight_bytes(resident or component.plan, self.precision, component.role)

    def check_fit(self, what: str, need: int) -> None:
        """Raises DoesNotFit before anything is allocated."""
        free = self.engine.free_memory()
        if need > free:
            raise DoesNotFit(
                f"{what} takes {size_text(need)} in {self.precision.name}, {size_text(free)} are free on "
                f"{self.engine.device}; choose a smaller size, close other programs, or use --precision bf16, not fp32"
            )

    # The VAE, the same for every family

    def decoding(self, vae: Component, shape: tuple[int, int], beside: int) -> dict[str, int]:
        """The fewest bytes for decoding latents of `shape`, `beside` what the model keeps, by what takes them."""
        itemsize, engine = BYTES[self.precision.compute_dtype("vae")], self.engine
        least = memory.decode_least(vae.config, *shape, itemsize, engine.decode_buffers, engine.score_bytes)
        height, width = (side * vae.config.scale for side in shape)
        return {f"decoding a picture of {width}x{height}": beside + self.weight_bytes(vae) + least}

    def check_encoding(self, height: int, across: int, width: int) -> None:
        """Raises DoesNotFit where the encoder's first level, of `width` channels, does not fit for so many pixels."""
        itemsize = BYTES[self.precision.compute_dtype("vae")]
        need = int(self.engine.decode_buffers * width * height * across * itemsize)
        self.check_fit(f"encoding a picture of {across}x{height}", need)

    def encode(self, vae: VAE, pixels: NDArray[np.float32], width: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Mean and deviation [1, z, h, w] in the VAE's own statistics of pixels [1, 3, H, W]. `width`: channels of the
        encoder's first level."""
        self.check_encoding(pixels.shape[2], pixels.shape[3], width)
        with self.clock.timed("encode image"):
            mean, log_variance = np.split(vae.encode(pixels), 2, axis=1)
        return mean, np.exp(0.5 * np.clip(log_variance, -30, 20))

    def decode(self, vae: VAE, config: memory.VAEConfig, z: NDArray[np.float32]) -> NDArray[Any]:
        """Pixels [1, 3, H, W], about -1 to 1, all finite, of latents in the VAE's own statistics; in tiles where the
        whole does not fit. Raises NumericsError."""
        engine = self.engine
        engine.release()
        itemsize = BYTES[self.precision.compute_dtype("vae")]
        height, width = z.shape[2:]
        tile = memory.decode_tile(config, height, width, itemsize, engine.free_memory(), engine.decode_buffers)
        self.notify("stage", "decoding" if tile is None else f"decoding in tiles of {tile * config.scale} pixels")
        with self.clock.timed("decode"):
            pixels = vae.decode(z, tile)
        if not np.isfinite(pixels).all():
            where = first_non_finite(engine, lambda: engine.array(vae.decode(z, tile)))
            raise NumericsError(f"vae: non-finite value at {where}; {self._cure('vae')}")
        return pixels

    # Values that are not finite

    def check_finite(self, array: Array, title: str, role: str, again: Callable[[], Array]) -> None:
        """Raises NumericsError that names block and operation where `array`, the result of `again`, is not finite."""
        if not self.engine.finite(array):
            where = first_non_finite(self.engine, again)
            raise NumericsError(f"{title}: non-finite value at {where}; {self._cure(role)}")

    def explain(self, title: str, step: int, calls: Iterable[Callable[[], Array]]) -> NumericsError:
        """Runs a step's `calls` of the denoiser again with probes: component, block and operation."""
        for again in calls:
            where = first_non_finite(self.engine, again)
            if where:
                cure = self._cure("transformer")
                return NumericsError(f"{title}, step {step}: non-finite value at {where}; {cure}")
        return NumericsError(f"step {step}: non-finite latents after guidance; lower --guidance")

    def _cure(self, role: str) -> str:
        """What to do about a value that is not finite."""
        dtype = self.precision.compute_dtype(role)
        if dtype == "float16":
            return "float16 does not hold this model, use --precision bf16 or fp32"
        return "try --precision fp32" if dtype == "bfloat16" else "the weights or the input are at fault"
