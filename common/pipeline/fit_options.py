"""Option changes that make an image fit: fewer bits, unquantized weights with streamed blocks, a smaller size or a
larger limit; or one of these with a smaller size. Each is planned like the image itself, by an unloaded variant of the
model."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from math import floor, log10

from qwenimg.common.base.amounts import size_text
from qwenimg.common.memory.memory_plan import MemoryPlan
from qwenimg.common.pipeline import preview, rewriting, second_pass, start
from qwenimg.common.pipeline.models.diffusion_model import DiffusionModel
from qwenimg.common.precision import precision as policies
from qwenimg.common.request.request import MULTIPLE, Request
from qwenimg.common.runtime.runtime import Change, limit_for

BITS = ("8", "6", "4")  # bits of quantized weights
SHARES = (0.75, 0.5)  # shares of both sides for smaller images that are tried; then halves of these, and so on
ENOUGH = 2  # changes that fit; with fewer, a smaller size is tried together with each
MEGABYTE, GIGABYTE = 10**6, 10**9
Size = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class OptionChange:
    """A change of options, and the memory plan of the image with it."""

    change: Change
    size: Size | None
    needs: MemoryPlan
    budget: int
    model: DiffusionModel

    @property
    def peak(self) -> int:
        return self.needs.largest.peak

    @property
    def fits(self) -> bool:
        return self.needs.fits(self.budget)

    @property
    def without(self) -> str:
        """The option to leave out."""
        return "-q" if self.change.quantize == "" else ""

    @property
    def options(self) -> str:
        limit = self.change.max_memory
        values = {
            "--precision": self.change.precision,
            "-q": self.change.quantize,
            "--max-memory": amount_text(limit) if limit else None,
            "--size": f"{self.size[0]}x{self.size[1]}" if self.size else None,
        }
        return " ".join(f"{name} {value}" for name, value in values.items() if value)

    @property
    def text(self) -> str:
        """The change in words: `with -q 4`, `without -q and with --max-memory 12GB`."""
        pairs = (("without", self.without), ("with", self.options))
        return " and ".join(f"{word} {options}" for word, options in pairs if options)


class FitOptions:
    """A search for option changes that make `request` fit into `budget` bytes.

    counted: as in `DiffusionModel.stages`. limited: True if the budget is the user's limit, which may be raised."""

    def __init__(
        self, model: DiffusionModel, request: Request, budget: int, *, counted: bool = True, limited: bool = True
    ):
        self.model, self.request, self.budget, self.counted = model, request, budget, counted
        self.may_raise_limit = limited and model.runtime.max_memory is not None
        self._models: dict[Change, DiffusionModel] = {Change(): model}
        self._planned: dict[tuple[Change, Size | None], OptionChange] = {}

    def all_changes(self) -> list[OptionChange]:
        """Return each change of weights that takes less memory than the one before, whether it fits or not; if the
        request does not fit, also the other changes that do."""
        unchanged, listed = self._plan(Change()), list[OptionChange]()
        for kind in self._kinds:
            least = unchanged.peak
            for change in () if self.may_raise_limit and kind is self._kinds[-1] else kind:
                option = self._plan(change)
                if option.peak < least:
                    listed.append(option)
                    least = option.peak
        more = [] if unchanged.fits else self.fitting_changes
        return listed + [option for option in more if option not in listed]

    @cached_property
    def fitting_changes(self) -> list[OptionChange]:
        """The first change of each kind that fits; if there are fewer than ENOUGH, also changes of weights combined
        with a smaller size."""
        sizes = [*self._smaller_sizes()]
        size = self._largest(Change(), sizes)
        fewer, unquantized, limit = (
            [option for option in map(self._plan, kind) if option.fits][:1] for kind in self._kinds
        )
        smaller = [self._plan(Change(), size)] if size else []
        single = fewer + unquantized + smaller + limit
        if len(single) >= ENOUGH:
            return single
        return single + self._with_size(sizes[: sizes.index(size)] if size else sizes)

    def message(self) -> str:
        """Return the changes that make the request fit, for a message."""
        if fitting := self.fitting_changes:
            return "it fits " + " or ".join(f"{option.text} ({size_text(option.peak)})" for option in fitting)
        total, limit = self.model.runtime.engine.machine()
        if min(option.peak for option in [self._plan(Change()), *self._planned.values()]) > total:
            return "no bits and no size make it fit: it takes another machine"
        return "no bits and no size make it fit: close other programs" + (f" or raise {limit}" if limit else "")

    def _with_size(self, sizes: Sequence[Size]) -> list[OptionChange]:
        """Return the change of weights that allows the largest of `sizes`, with that size, if both are needed."""
        best: list[OptionChange] = []
        for change in (change for kind in self._kinds for change in kind if not self._plan(change).fits):
            if size := self._largest(change, sizes):
                best, sizes = [self._plan(change, size)], sizes[: sizes.index(size)]
        return best

    def _largest(self, change: Change, sizes: Sequence[Size]) -> Size | None:
        """Return the first of `sizes`, from large to small, that fits with `change`; then all after it fit too."""
        if not sizes or not self._plan(change, sizes[-1]).fits:
            return None
        return sizes[bisect_left(sizes, True, key=lambda size: self._plan(change, size).fits)]

    def _plan(self, change: Change, size: Size | None = None) -> OptionChange:
        if (change, size) not in self._planned:
            request = replace(self.request, width=size[0], height=size[1]) if size else self.request
            model = self._model(change)
            plan = plan_memory(model, request, self.counted)
            self._planned[change, size] = OptionChange(
                change=change,
                size=size,
                needs=plan,
                budget=plan.budget if self.may_raise_limit and change.max_memory else self.budget,
                model=model,
            )
        return self._planned[change, size]

    def _model(self, change: Change) -> DiffusionModel:
        if change not in self._models:
            self._models[change] = self.model.variant(change)
        return self._models[change]

    @cached_property
    def _kinds(self) -> tuple[list[Change], list[Change], list[Change]]:
        """The changes of weights: fewer bits; unquantized weights with streamed blocks, since weights that are
        quantized while loading are not streamed; a limit."""
        runtime, free = self.model.runtime, self.budget // MEGABYTE * MEGABYTE
        precision = runtime.precision
        smallest = policies.parse(precision.kind.presets["memory"], on_gpu=False, kind=precision.kind).name
        fewer = [] if smallest == precision.name else [Change(precision=smallest)]
        fewer += [Change(quantize=bits) for bits in BITS if bits != runtime.quantize]
        limit = self._least_limit() if self.may_raise_limit else free
        unquantized = runtime.quantize is not None and (self.may_raise_limit or free > 0)
        return (
            fewer,
            [Change(quantize="", max_memory=None if self.may_raise_limit else free)] if unquantized else [],
            [Change(max_memory=limit)] if limit > 0 else [],
        )

    def _least_limit(self) -> int:
        """Return the least --max-memory, in two digits, that suffices, at most the free bytes; 0 if it is no larger
        than the present one."""
        tight = self._model(Change(max_memory=1))
        least = limit_for(plan_memory(tight, self.request, self.counted).largest.peak)
        limit = min(rounded_up(least), tight.runtime.machine_budget(0) // MEGABYTE * MEGABYTE)
        return limit if limit > (self.model.runtime.max_memory or 0) else 0

    def _smaller_sizes(self) -> Iterator[Size]:
        """Yield smaller sizes of about the same aspect, the largest first, down to the smallest that the model
        draws."""
        sides = last = (self.request.width, self.request.height)
        shares = (share / 2**halves for halves in count() for share in SHARES)
        while self.request.latents is None and max(last) > MULTIPLE:
            share = next(shares)
            width, height = (min(side, max(MULTIPLE, int(side * share) // MULTIPLE * MULTIPLE)) for side in sides)
            if (width, height) != last and start.is_drawn(self.model, width, height):
                yield width, height
            last = (width, height)


def plan_memory(model: DiffusionModel, request: Request, counted: bool = True) -> MemoryPlan:
    """Return the memory plan of the image; counted: as in `DiffusionModel.stages`."""
    request, writing = rewriting.planned(model, request)
    shape = start.latent_shape(model, second_pass.passes(request)[-1])
    stages = [*writing, *second_pass.stages(model, request, counted and not writing)]
    return model.residents.plan(preview.with_preview(model, stages, shape))


def amount_text(amount: int) -> str:
    """Return an amount as an option's value: `12GB`, `1300MB`."""
    whole = amount % GIGABYTE == 0
    return f"{amount // GIGABYTE}GB" if whole else f"{amount // MEGABYTE}MB"


def rounded_up(amount: int) -> int:
    """Round up to two digits, and to whole megabytes."""
    unit = max(MEGABYTE, int(10.0 ** (floor(log10(amount)) - 1)))
    return -(-amount // unit) * unit
