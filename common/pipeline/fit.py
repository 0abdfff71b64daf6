"""Whether a picture fits, and the ways out where it does not: each is computed as the picture itself is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from qwenimg.common.base.amounts import size_text
from qwenimg.common.base.errors import DoesNotFit
from qwenimg.common.memory.estimate import Needs
from qwenimg.common.pipeline import start
from qwenimg.common.pipeline.diffusion_model import DiffusionModel
from qwenimg.common.precision import precision as policies
from qwenimg.common.precision.precision import Precision
from qwenimg.common.request.request import Request

BITS = ("8", "6", "4")  # that weights may be kept in
SHARES = (0.75, 0.5, 0.375, 0.25)  # of both sides, of smaller pictures that are tried
MEGABYTE = 10**6
MUCH_LESS = 0.8  # of what was planned: what is named where that did not suffice


@dataclass(frozen=True, kw_only=True)
class Way:
    """`options` to add to the command, and what the picture then needs."""

    options: str
    needs: Needs


def needs(model: DiffusionModel, request: Request, counted: bool = True) -> Needs:
    """What the picture takes; counted: as `DiffusionModel.needs` has it."""
    return model.needs(request, model.plan(request), start.latent_shape(model, request), counted)


def fits(found: Needs, room: int) -> bool:
    """In so many bytes, those of what is loaded already among them."""
    return found.largest.peak <= room


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
    """The picture with blocks streamed so that it stays below `free` bytes, where that takes less."""
    amount = max(1, free // MEGABYTE)
    found = needs(model.variant(model.runtime.precision, None, amount * MEGABYTE), request, counted)
    if found.largest.peak < needs(model, request, counted).largest.peak:
        yield Way(options=f"--max-memory {amount}MB", needs=found)


def smaller(model: DiffusionModel, request: Request, counted: bool = True) -> Iterator[Way]:
    """Smaller pictures of about its shape, from the largest on."""
    for share in SHARES:
        width, height = (max(16, int(side * share) // 16 * 16) for side in (request.width, request.height))
        if width < request.width and height < request.height and request.latents is None:
            found = needs(model, replace(request, width=width, height=height), counted)
            yield Way(options=f"--size {width}x{height}", needs=found)


def refusal(model: DiffusionModel, request: Request, found: Needs) -> DoesNotFit:
    """Why the picture is not begun, and what would fit."""
    free, stage = model.runtime.room(found.loaded), found.largest
    return DoesNotFit(
        f"{stage.title} takes {size_text(stage.peak)} in {model.runtime.precision.name}, {size_text(free)} are free on "
        f"{model.runtime.engine.device} ({size_text(stage.weights)} are weights); {_ways_out(model, request, free)}"
    )


def ran_out(model: DiffusionModel, request: Request, found: Needs) -> DoesNotFit:
    """Why the picture ended: what was planned for it, and what takes much less."""
    stage = found.largest
    room = min(model.runtime.room(found.loaded), int(MUCH_LESS * stage.peak))
    return DoesNotFit(
        f"memory ran out on {model.runtime.engine.device}: {stage.title} was planned with {size_text(stage.peak)} in "
        f"{model.runtime.precision.name} ({size_text(stage.weights)} are weights); close other programs; "
        f"{_ways_out(model, request, room)}"
    )


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
    return (way for way in ways if fits(way.needs, free))
