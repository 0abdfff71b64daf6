"""Whether a picture fits and about how long it takes, and the ways out where it does not fit: each is computed as the
picture itself is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median

from qwenimg.common.base.amounts import size_text
from qwenimg.common.base.errors import DoesNotFit
from qwenimg.common.memory.estimate import Estimate
from qwenimg.common.memory.needs import Needs
from qwenimg.common.pipeline import start
from qwenimg.common.pipeline.diffusion_model import DiffusionModel
from qwenimg.common.precision import precision as policies
from qwenimg.common.precision.precision import Precision
from qwenimg.common.request.request import Request

BITS = ("8", "6", "4")  # that weights may be kept in
SHARES = (0.75, 0.5, 0.375, 0.25)  # of both sides, of smaller pictures that are tried
MEGABYTE = 10**6
MUCH_LESS = 0.8  # of what was planned: what is named where that did not suffice
# Of the matrices that the rate is measured with: a GPU's fill it, and a CPU's are those of small networks, soon done.
GPU_SIDE, CPU_SIDE, WARM_SIDE = 4096, 512, 256
RATE_SECONDS = 0.1  # that are measured


@dataclass(frozen=True, kw_only=True)
class Way:
    """`options` to add to the command, and what the picture then needs."""

    options: str
    needs: Needs


class Fit:
    """Of the pictures of one model, before anything is loaded for them."""

    def __init__(self, model: DiffusionModel):
        self.model, self.runtime, self.engine = model, model.runtime, model.runtime.engine
        self._rates: dict[str, float] = {}  # seconds of an operation, by dtype
        self._last: tuple[Request, Needs] | None = None

    def check(self, request: Request) -> Needs:
        """Raises DoesNotFit, with what would fit."""
        found = needs(self.model, request)
        self._last = (request, found)
        self.engine.expect(found.largest.peak)
        room, stage = found.room, found.largest
        if not found.fits(room):
            raise DoesNotFit(
                f"{stage.title} takes {size_text(stage.peak)} in {self.runtime.precision.name}, "
                f"{self.runtime.room_text(room)} ({size_text(stage.weights)} are weights); "
                f"{_ways_out(self.model, request, room)}"
            )
        return found

    def ran_out(self) -> DoesNotFit:
        """Why the last picture ended: what was planned for it, and what takes much less."""
        if self._last is None:
            return DoesNotFit("memory ran out; close other programs")
        request, found = self._last
        stage = found.largest
        room = min(self.runtime.room(sum(found.loaded.values())), int(MUCH_LESS * stage.peak))
        return DoesNotFit(
            f"memory ran out on {self.engine.device}: {stage.title} was planned with {size_text(stage.peak)} in "
            f"{self.runtime.precision.name} ({size_text(stage.weights)} are weights); close other programs; "
            f"{_ways_out(self.model, request, room)}"
        )

    def estimate(self, request: Request) -> Estimate:
        """Memory and time. Raises DoesNotFit."""
        found, rate = self.check(request), self._seconds_of_operation()
        return Estimate(
            memory=found.largest.peak,
            seconds=(found.steps + found.decoding) * rate,
            step=found.steps * rate / self.model.plan(request).steps,
        )

    def _seconds_of_operation(self) -> float:
        """At the rate of a product in the transformer's dtype, the middle one of some: other programs slow the run down
        too. The first product of a process is much slower than the next."""
        dtype = self.runtime.precision.compute_dtype("transformer")
        if dtype not in self._rates:
            side = GPU_SIDE if self.engine.on_gpu else CPU_SIDE
            self.engine.product_seconds(WARM_SIDE, dtype)
            found: list[float] = []
            while sum(found) < RATE_SECONDS:
                found.append(self.engine.product_seconds(side, dtype))
            self._rates[dtype] = median(found) / (2 * side**3)
        return self._rates[dtype]


def needs(model: DiffusionModel, request: Request, counted: bool = True) -> Needs:
    """What the picture takes; counted: as `DiffusionModel.needs` has it."""
    return model.needs(request, model.plan(request), start.latent_shape(model, request), counted)


def weights(model: DiffusionModel, request: Request, counted: bool = True) -> Iterator[Way]:
    """The picture with the model's weights kept otherwise, from the most bytes on, where that takes less."""
    least = needs(model, request, counted).largest.peak
    for text, precision, bits in _kept(model.runtime.precision):
        found = needs(model.variant(precision, bits, model.runtime.max_memory), request, counted)
        if found.largest.peak < least:
            yield Way(options=text, needs=found)
            least = found.largest.peak


def _kept(now: Precision) -> Iterator[tuple[str, Precision, str | None]]:
    """Options, policy and bits: the family's smallest policy, then codes."""
    small = policies.parse(now.kind.presets["memory"], on_gpu=False, kind=now.kind)
    if small.name != now.name:
        yield f"--precision {small.name}", small, None
    for bits in BITS:
        yield f"-q {bits}", now, bits


def streamed(model: DiffusionModel, request: Request, free: int, counted: bool = True) -> Iterator[Way]:
    """The picture with blocks streamed so that it stays below `free` bytes, where that takes less. None where a run has
    a limit already."""
    if model.runtime.max_memory is not None:
        return
    amount = max(1, free // MEGABYTE)
    found = needs(model.variant(model.runtime.precision, None, amount * MEGABYTE), request, counted)
    if found.largest.peak < needs(model, request, counted).largest.peak:
        yield Way(options=f"--max-memory {amount}MB", needs=found)


def smaller(model: DiffusionModel, request: Request) -> Iterator[Way]:
    """Smaller pictures of about its shape, from the largest on."""
    for share in SHARES:
        width, height = (max(16, int(side * share) // 16 * 16) for side in (request.width, request.height))
        if width < request.width and height < request.height and request.latents is None:
            found = needs(model, replace(request, width=width, height=height))
            yield Way(options=f"--size {width}x{height}", needs=found)


def _ways_out(model: DiffusionModel, request: Request, free: int) -> str:
    """The first ways that fit, each of its own kind: other weights, streamed ones, a smaller picture; or
    the first and the last together."""
    others = list(weights(model, request))
    kinds = (others, streamed(model, request, free), smaller(model, request))
    found = [next(_fitting(kind, free), None) for kind in kinds]
    named = [way for way in found if way is not None]
    if len(named) < 2 and others:
        precision, bits = next((p, b) for text, p, b in _kept(model.runtime.precision) if text == others[-1].options)
        both = (
            replace(way, options=f"{others[-1].options} {way.options}")
            for way in smaller(model.variant(precision, bits, model.runtime.max_memory), request)
        )
        named += list(_fitting(both, free))[:1]
    if not named:
        return "no bits and no size make it fit: it takes another machine"
    return "it fits with " + " or with ".join(f"{way.options} ({size_text(way.needs.largest.peak)})" for way in named)


def _fitting(ways: Iterator[Way] | list[Way], free: int) -> Iterator[Way]:
    return (way for way in ways if way.needs.fits(free))
