"""What makes a picture fit: fewer bits, none of them and streamed blocks, a smaller size, a larger limit, or two of
these together. Each is computed as the picture itself is, by a model as a run with these options has it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain, combinations, count, islice, product
from math import floor, log10

from qwenimg.common.base.amounts import size_text
from qwenimg.common.memory.memory_plan import MemoryPlan
from qwenimg.common.pipeline import start
from qwenimg.common.pipeline.diffusion_model import DiffusionModel
from qwenimg.common.precision import precision as policies
from qwenimg.common.precision.precision import Precision
from qwenimg.common.request.request import MULTIPLE, Request
from qwenimg.common.runtime.runtime import Change, limit_for

BITS = ("8", "6", "4")  # that weights may be kept in
SHARES = (0.75, 0.5)  # of both sides, of smaller pictures that are tried; then halves of these, and so on
ORDER = ("--precision", "-q", "--max-memory", "--size")  # of options, as they are said
ENOUGH = 2  # ways, where there are so many
MEGABYTE, GIGABYTE = 10**6, 10**9


@dataclass(frozen=True, kw_only=True)
class Way:
    """`options` to give in place of those that the command has, `without` one, and what the picture then needs of
    `room` bytes under `precision`."""

    options: str
    without: str = ""
    needs: MemoryPlan
    room: int
    precision: Precision
    raised: int | None = None  # the limit, where it is a larger one

    @property
    def fits(self) -> bool:
        return self.needs.fits(self.room)

    @property
    def text(self) -> str:
        """`with -q 4`, `without -q and with --max-memory 12GB`"""
        return " and ".join(
            f"{word} {said}" for word, said in (("without", self.without), ("with", self.options)) if said
        )


@dataclass(frozen=True)
class _Move:
    """One thing that may be otherwise; more than one way to say it is more than one move of a kind."""

    options: str
    change: Change = field(default_factory=Change)
    size: tuple[int, int] | None = None
    raises: bool = False  # the limit, to the least that the others then take


class Ways:
    """Of a picture that may take `room` bytes. counted: as `DiffusionModel.needs` has it. limited: whether it is the
    user's limit that leaves so few, which may then be raised."""

    def __init__(
        self, model: DiffusionModel, request: Request, room: int, *, counted: bool = True, limited: bool = True
    ):
        self.model, self.request, self.room, self.counted = model, request, room, counted
        self.raises = limited and model.runtime.max_memory is not None
        self._known: dict[tuple[_Move, ...], Way | None] = {}
        self._models: dict[Change, DiffusionModel] = {Change(): model}

    def listed(self) -> list[Way]:
        """All that take less by their weights, from the most bytes on, also where it fits as it is or they do not; then
        what else makes it fit."""
        as_it_is = needs(self.model, self.request, self.counted)
        most, found = as_it_is.largest.peak, list[Way]()
        for moves in (self._fewer(), self._plain(), () if self.raises else self._limits()):
            least = most
            for move in moves:
                way = self._way((move,))
                if way is not None and way.needs.largest.peak < least:
                    found.append(way)
                    least = way.needs.largest.peak
        more = [] if as_it_is.fits(self.room) else self.out()
        return found + [way for way in more if all(way is not other for other in found)]

    def out(self) -> list[Way]:
        """Of those that fit the first of each kind; where these are not enough, two or three kinds together, and where
        that gives a single one, another that takes less."""
        found: list[Way] = []
        for together in (1, 2, 3):
            for kinds in combinations(self._kinds(), together):
                if together == 1 or len(found) < ENOUGH:
                    found += self._first(kinds)
        return found + self._other(found[0]) if len(found) == 1 else found

    def sentence(self) -> str:
        """What makes it fit, for a message."""
        if ways := self.out():
            return "it fits " + " or ".join(f"{way.text} ({size_text(way.needs.largest.peak)})" for way in ways)
        total, limit = self.model.runtime.engine.machine()
        every = [needs(self.model, self.request, self.counted), *(way.needs for way in self._known.values() if way)]
        if min(one.largest.peak for one in every) > total:
            return "no bits and no size make it fit: it takes another machine"
        return "no bits and no size make it fit: close other programs" + (f" or raise {limit}" if limit else "")

    def _other(self, first: Way) -> list[Way]:
        """One that has another limit and reads less than half of what `first` streams: in fewer bits; or takes less
        than it altogether: a smaller picture, which does not fit without that limit."""
        limit = _Move("--max-memory", raises=True)
        fewer = (self._way((bits, limit)) for bits in self._fewer())
        reads_less = (way for way in fewer if way and way.fits and 2 * way.needs.streamed < first.needs.streamed)
        return [*islice(chain(reads_less, self._smaller_than(first, limit)), 1)]

    def _smaller_than(self, first: Way, limit: _Move) -> Iterator[Way]:
        """The largest picture, with its bits and without, that is smaller than that of `first` and takes less."""

        def takes_less(moves: tuple[_Move, ...]) -> bool:
            way = self._way(moves)
            return way is not None and way.fits and (way.raised or 0) < first.needs.largest.peak

        sizes = [*self._smaller()]
        its = next((i for i, size in enumerate(sizes) if first.options.endswith(size.options)), -1)
        for bits in ((), tuple(self._plain())):
            size = self._largest((*bits, limit), sizes[its + 1 :], takes_less)
            if size and (way := self._needed((*bits, limit, size), [(*bits, size)])):
                yield way

    def _kinds(self) -> list[list[_Move]]:
        kinds = [list(kind) for kind in (self._fewer(), self._plain(), self._smaller(), self._limits())]
        return [kind for kind in kinds if kind]

    def _first(self, kinds: Sequence[list[_Move]]) -> list[Way]:
        """Of all that the `kinds` make together the one of the largest size, and of those the first."""
        sizes = next((kind for kind in kinds if kind[0].size), [])
        others, found = product(*(kind for kind in kinds if kind is not sizes)), list[Way]()
        if not sizes:
            return [*islice((way for moves in others if (way := self._needed(moves, _parts(moves)))), 1)]
        for moves in others:
            if size := self._largest(moves, sizes, self._helps):
                whole = (*moves, size)
                if way := self._needed(whole, _parts(whole)):
                    found, sizes = [way], sizes[: sizes.index(size)]
        return found

    def _helps(self, moves: tuple[_Move, ...]) -> bool:
        """Whether `moves`, the last of which is a size, fit, and to a lower limit than any of the others without
        it."""
        *others, _ = moves
        return self._needed(moves, [*_parts(tuple(others)), tuple(others)]) is not None

    def _largest(
        self, moves: tuple[_Move, ...], sizes: list[_Move], suffices: Callable[[tuple[_Move, ...]], bool]
    ) -> _Move | None:
        """The first of `sizes`, which get smaller, that suffices with `moves`, as all behind it then do."""
        if not sizes or not suffices((*moves, sizes[-1])):
            return None
        return sizes[bisect_left(sizes, True, key=lambda size: suffices((*moves, size)))]

    def _needed(self, moves: tuple[_Move, ...], parts: Iterable[tuple[_Move, ...]]) -> Way | None:
        """With these `moves`, where that fits and none of the `parts` does with no larger limit."""
        whole = self._way(moves)
        if whole is None or not whole.fits:
            return None
        ways = (self._way(part) for part in parts if part)
        needless = any(way and way.fits and (way.raised or 0) <= (whole.raised or 0) for way in ways)
        return None if needless else whole

    def _model(self, change: Change) -> DiffusionModel:
        """What weights are under a policy is found once for all limits."""
        if change not in self._models:
            weights = replace(change, max_memory=None)
            limited = Change(max_memory=change.max_memory)
            self._models[change] = (
                self.model.variant(change) if change == weights else self._model(weights).variant(limited)
            )
        return self._models[change]

    def _way(self, moves: tuple[_Move, ...]) -> Way | None:
        """With these `moves`; None where they contradict each other, or the machine has no more to give."""
        if moves not in self._known:
            self._known[moves] = self._computed(moves)
        return self._known[moves]

    def _computed(self, moves: tuple[_Move, ...]) -> Way | None:
        change = _joined([move.change for move in moves])
        size = next((move.size for move in moves if move.size), None)
        request = self.request if size is None else replace(self.request, width=size[0], height=size[1])
        if change is None:
            return None
        said = [move.options for move in moves if not move.raises]
        limit = None
        if len(said) < len(moves):
            limit = self._least_limit(change, request)
            if limit is None:
                return None
            change = replace(change, max_memory=limit)
            said.append(f"--max-memory {amount_text(limit)}")
        model = self._model(change)
        found = needs(model, request, self.counted)
        room = self.room if limit is None else found.budget
        without = "-q" if change.quantize == "" else ""
        options = " ".join(sorted(filter(None, said), key=_place))
        return Way(
            options=options,
            without=without,
            needs=found,
            room=room,
            precision=model.runtime.precision,
            raised=limit,
        )

    def _least_limit(self, change: Change, request: Request) -> int | None:
        """The least --max-memory that suffices, in two digits; None where there is less, or it is below that of the
        run, which is to be larger."""
        tight = self._model(replace(change, max_memory=1))
        least = limit_for(needs(tight, request, self.counted).largest.peak)
        room = tight.runtime.free(0) if self.raises else self.room
        limit = min(rounded_up(least), room // MEGABYTE * MEGABYTE)
        own = self.model.runtime.max_memory if self.raises else None
        return limit if max(least, own or 0) <= limit else None

    def _fewer(self) -> Iterator[_Move]:
        """The family's smallest policy, then codes."""
        now = self.model.runtime.precision
        small = policies.parse(now.kind.presets["memory"], on_gpu=False, kind=now.kind)
        if small.name != now.name:
            yield _Move(f"--precision {small.name}", Change(precision=small.name))
        for bits in BITS:
            if bits != self.model.runtime.quantize:
                yield _Move(f"-q {bits}", Change(quantize=bits))

    def _plain(self) -> Iterator[_Move]:
        """Without the bits that were asked for: codes that are made while loading are not streamed."""
        if self.model.runtime.quantize is not None:
            yield _Move("", Change(quantize=""))

    def _limits(self) -> Iterator[_Move]:
        """A larger limit, or where the run has none, one of what is free: its blocks are then streamed."""
        if self.raises:
            yield _Move("--max-memory", raises=True)
        elif (amount := self.room // MEGABYTE * MEGABYTE) > 0:
            yield _Move(f"--max-memory {amount_text(amount)}", Change(max_memory=amount))

    def _smaller(self) -> Iterator[_Move]:
        """Smaller pictures of about its shape, from the largest on, down to the smallest that the model draws."""
        sides = last = (self.request.width, self.request.height)
        shares = (share / 2**halves for halves in count() for share in SHARES)
        while self.request.latents is None and max(last) > MULTIPLE:
            share = next(shares)
            width, height = (min(side, max(MULTIPLE, int(side * share) // MULTIPLE * MULTIPLE)) for side in sides)
            if (width, height) != last and start.is_drawn(self.model, width, height):
                yield _Move(f"--size {width}x{height}", size=(width, height))
            last = (width, height)


def needs(model: DiffusionModel, request: Request, counted: bool = True) -> MemoryPlan:
    """What the picture takes; counted: as `DiffusionModel.needs` has it."""
    stages = model.stages(request, model.plan(request), start.latent_shape(model, request), counted)
    return model.residents.plan(stages)


def amount_text(amount: int) -> str:
    """An option's value: `12GB`, `1300MB`."""
    whole = amount % GIGABYTE == 0
    return f"{amount // GIGABYTE}GB" if whole else f"{amount // MEGABYTE}MB"


def rounded_up(amount: int) -> int:
    """To two digits, of megabytes at least."""
    unit = max(MEGABYTE, int(10.0 ** (floor(log10(amount)) - 1)))
    return -(-amount // unit) * unit


def _parts(moves: tuple[_Move, ...]) -> list[tuple[_Move, ...]]:
    return [part for few in range(1, len(moves)) for part in combinations(moves, few)]


def _joined(changes: list[Change]) -> Change | None:
    """All of them; None where two are of one option."""
    said: dict[str, str | int] = {}
    for change in changes:
        own = {one.name: value for one in fields(change) if (value := getattr(change, one.name)) is not None}
        if said.keys() & own.keys():
            return None
        said |= own
    return Change(**said)  # type: ignore[arg-type]


def _place(option: str) -> int:
    return ORDER.index(option.split(" ", 1)[0])
