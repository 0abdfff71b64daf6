"""A picture made larger: by the passes of an upscaler's network, and exact resampling to the size that is wanted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.amounts import size_text
from qwenimg.common.base.errors import DoesNotFit, ModelError, NumericsError, UsageError
from qwenimg.common.memory import estimate
from qwenimg.common.memory.memory_plan import MemoryPlan
from qwenimg.common.pictures import pixels as pictures
from qwenimg.common.pictures.pixels import Uint8
from qwenimg.common.precision.precision import BYTES, DTYPES, DenoiserKind, Precision, short
from qwenimg.common.runtime import rates
from qwenimg.common.runtime.probe import first_non_finite
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.runtime.stages import Split, Stage
from qwenimg.common.upscaling import memory
from qwenimg.common.upscaling.network_file import Upscaler
from qwenimg.common.weights.values import TooLarge

Float32: TypeAlias = NDArray[np.float32]

MOST_PIXELS = 600_000_000  # of a result
WHOLE = 1 << 20  # rows: more than a picture has
_NO_DENOISER = DenoiserKind(denoiser="upscaler", places={}, bases=("fp32", "bf16", "fp16"), prefers=("fp32",), keys={})


def policy(name: str) -> Precision:
    """Return the precision of an upscaler alone: `fp32`, `bf16` or `fp16`."""
    dtype = DTYPES[name]
    return Precision(name=name, text="float32", transformer="float32", vae=dtype, kind=_NO_DENOISER)


class Upscaling:
    """An upscaler on an engine. Its network is read at its first use, if it fits."""

    def __init__(self, runtime: Runtime, upscaler: Upscaler, residents: Residents | None = None):
        """residents: the networks beside which it is in memory; None: it is there alone."""
        self.runtime, self.engine, self.upscaler = runtime, runtime.engine, upscaler
        self.residents = Residents(runtime) if residents is None else residents

    def passes(self, by: float) -> int:
        """Return how often the network runs for a picture `by` times as large. Raises UsageError for a network that
        enlarges nothing."""
        if self.upscaler.scale == 1 and by > 1:
            raise UsageError(
                f"--by {by:g}: {self.upscaler.path.name} does not enlarge (x1); give --by 1 or another file"
            )
        count, scale = 1, self.upscaler.scale
        while scale < by:
            count, scale = count + 1, scale * self.upscaler.scale
        return count

    def stage(self, height: int, width: int) -> Stage:
        """Return the stage of one pass over a picture of height x width."""
        precision, workspace, config = self.runtime.precision, self.engine.workspace, self.upscaler.component.config
        itemsize = BYTES[precision.compute_dtype("vae")]

        def split(rows: int | None) -> Split:
            size = memory.activations(config, height, width, itemsize, workspace, rows)
            about = "" if rows is None else f"in bands of {rows} rows"
            return Split(activations=size, size=rows, about=about)

        return Stage(
            name="upscale",
            resident=f"upscaler {self.upscaler.path.name}",
            component=self.upscaler.component,
            splits=tuple(split(rows) for rows in (None, *memory.ROWS)),
            title=f"enlarging a picture of {width}x{height}",
            operations=memory.operations(config, self.upscaler.component.plan.shapes, height, width),
        )

    def stages(self, height: int, width: int, by: float) -> list[Stage]:
        """Return the stage of each pass that makes a picture `by` times as large. Raises DoesNotFit for a picture that
        is too large."""
        scale = self.upscaler.scale
        sizes = [(height * scale**i, width * scale**i) for i in range(self.passes(by))]
        last = sizes[-1][0] * sizes[-1][1] * scale**2
        if last > MOST_PIXELS:
            raise DoesNotFit(
                f"a picture of {width}x{height} becomes {last / 1e6:,.0f} megapixels on the way; at most "
                f"{MOST_PIXELS // 10**6} are made; take a smaller picture"
            )
        return [self.stage(*size) for size in sizes]

    def plan(self, height: int, width: int, by: float) -> MemoryPlan:
        """Return the memory of enlarging a picture `by` times; nothing is loaded. Raises DoesNotFit for a picture that
        is too large."""
        return self.residents.plan(self.stages(height, width, by))

    def enlarged(self, pixels: Uint8, by: float) -> Uint8:
        """Return pixels [H, W, 3 or 4] `by` times as large: passes of the network, and Lanczos to the size where they
        make more. An alpha channel is enlarged by the network as a grey picture. Raises DoesNotFit and
        NumericsError."""
        height, width = pixels.shape[:2]
        needs = self.plan(height, width, by)
        if not needs.fits(needs.budget):
            taken = needs.largest
            self.runtime.check_fit(taken.title, taken.peak)  # raises if the machine lacks it
            limit = self.runtime.budget_text(needs.budget)
            raise DoesNotFit(f"{taken.title} takes {size_text(taken.peak)}, {limit}; take a smaller picture")
        seconds = self._seconds(needs) * (2 if pictures.has_alpha(pixels) else 1)
        takes = estimate.summary(needs.largest.peak, seconds)
        sides = round(width * by), round(height * by)
        self.runtime.notify("stage", f"{width}x{height} to {sides[0]}x{sides[1]} {takes}")
        self.engine.expect(needs.largest.peak)
        for _ in range(self.passes(by)):
            self.runtime.interrupt()
            pixels = self._pass(pixels)
        return pictures.fit(pixels, *sides)

    def seconds(self, height: int, width: int, by: float) -> float:
        """Return about how long it takes to make pixels [H, W, 3] `by` times as large, of which an alpha channel takes
        as long again. Raises DoesNotFit."""
        return self._seconds(self.plan(height, width, by))

    def _seconds(self, needs: MemoryPlan) -> float:
        return needs.steps / self.engine.rate(*rates.decoder_layer(self.runtime.precision))

    def _pass(self, pixels: Uint8) -> Uint8:
        colours = self._network(pixels[..., :3])
        if not pictures.has_alpha(pixels):
            return colours
        grey = self._network(np.repeat(pixels[..., 3:], 3, axis=2)).mean(axis=2)
        return np.concatenate((colours, grey.round().astype(np.uint8)[..., None]), axis=2)

    def _network(self, pixels: Uint8) -> Uint8:
        """Return the network's result for pixels [H, W, 3]."""
        height, width = pixels.shape[:2]
        with _named_dtypes():
            network, split = self.residents.acquire(self.stage(height, width))
        padded = _padded(pixels, self.upscaler.patch)
        values = np.ascontiguousarray((padded.astype(np.float32) / np.float32(255)).transpose(2, 0, 1)[None])
        about = f" {split.about}" if split.about else ""
        self.runtime.notify("stage", f"enlarging {width}x{height} with {self.upscaler.path.name}{about}")
        with self.runtime.clock.timed("upscale"):
            result = network.upscale(values, split.size or WHOLE)
        self._check_finite(result, lambda: network.upscale(values, split.size or WHOLE))
        scale = self.upscaler.scale
        return _to_uint8(result[0, :, : height * scale, : width * scale])

    def _check_finite(self, values: NDArray[Any], again: Any) -> None:
        """Raise NumericsError for the result of `again` with a value that is not finite."""
        if np.isfinite(values).all():
            return
        place = first_non_finite(self.engine, again)
        dtype = self.runtime.precision.compute_dtype("vae")
        cure = {"float16": "use --precision bf16 or fp32"}.get(
            dtype, "the file's weights are too large for any picture"
        )
        where = "" if place is None else f" at {place}, {place.maximum}"
        name = self.upscaler.path.name
        raise NumericsError(f"upscaler {name}: non-finite value{where}, in {short(dtype)}; no file was written, {cure}")

    def close(self) -> None:
        self.residents.free()
        self.upscaler.close()


@contextmanager
def _named_dtypes() -> Iterator[None]:
    """Name the precisions of an upscaler in the error for a weight that its dtype does not hold."""
    try:
        yield
    except TooLarge as error:
        raise ModelError(f"{error.what}; use --precision bf16 or fp32") from None


def _padded(pixels: Uint8, patch: int) -> Uint8:
    """Return pixels [H, W, C] with sides that are multiples of `patch`, mirrored at the lower and right edges."""
    down, right = (-side % patch for side in pixels.shape[:2])
    for axis, more in ((0, down), (1, right)):
        if more:
            mode = "reflect" if pixels.shape[axis] > more else "edge"
            width = [(0, more if i == axis else 0) for i in range(3)]
            pixels = np.pad(pixels, width, mode=mode)  # type: ignore[call-overload]
    return pixels


def _to_uint8(values: NDArray[np.float32]) -> Uint8:
    """Return values [3, H, W] in 0..1 as [H, W, 3] in 0..255, rounded half to even, clamped."""
    scaled = np.clip(values, 0.0, 1.0, dtype=np.float32)
    scaled *= np.float32(255)
    return np.ascontiguousarray(scaled.round(out=scaled).astype(np.uint8).transpose(1, 2, 0))
