"""What makes a picture fit: fewer bits, none of them and streamed blocks, a smaller size, a larger limit, or two of
these together. Each is computed as the picture itself is, by a model as a run with these options has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import combinations, count, islice, product
from math import floor, log10

from qwenimg.common.base.amounts import size_text
from qwenimg.common.memory.needs import Needs
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
    needs: Needs
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
        """Of those that fit the first of each kind; where these are not enough, two or three kinds together."""
        found: list[Way] = []
        for together in (1, 2, 3):
            for kinds in combinations(self._kinds(), together):
                if together == 1 or len(found) < ENOUGH:
                    found += self._first(kinds)
        return found

    def _kinds(self) -> list[list[_Move]]:
        kinds = [list(kind) for kind in (self._fewer(), self._plain(), self._smaller(), self._limits())]
        return [kind for kind in kinds if kind]

    def _first(self, kinds: Sequence[list[_Move]]) -> list[Way]:
        """The first that fits of all that the `kinds` make together."""
        ways = (self._way(moves) for moves in _together(kinds, self._fits) if not self._is_needless(moves))
        return [*islice((way for way in ways if way is not None and way.fits), 1)]

    def _is_needless(self, moves: tuple[_Move, ...]) -> bool:
        """Whether a part of `moves` suffices, with no larger limit."""
        whole = self._way(moves)
        parts = (self._way(part) for few in range(1, len(moves)) for part in combinations(moves, few))
        fit = [part for part in parts if part is not None and part.fits]
        return whole is None or any((part.raised or 0) <= (whole.raised or 0) for part in fit)

    def _fits(self, moves: tuple[_Move, ...]) -> bool:
        way = self._way(moves)
        return way is not None and way.fits

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
        room = self.room if limit is None else found.room
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
        """The least --max-memory that suffices, in two digits; None where the machine has less."""
        tight = needs(self._model(replace(change, max_memory=1)), request, self.counted)
        least = limit_for(tight.largest.peak)
        machine = self._model(replace(change, max_memory=2**62)).runtime.room(0) // MEGABYTE * MEGABYTE
        limit = min(rounded_up(least), machine)
        return limit if max(least, self.model.runtime.max_memory or 0) <= limit else None

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


def needs(model: DiffusionModel, request: Request, counted: bool = True) -> Needs:
    """What the picture takes; counted: as `DiffusionModel.needs` has it."""
    return model.needs(request, model.plan(request), start.latent_shape(model, request), counted)


def sentence(ways: list[Way]) -> str:
    if not ways:
        return "no bits and no size make it fit: it takes another machine"
    return "it fits " + " or ".join(f"{way.text} ({size_text(way.needs.largest.peak)})" for way in ways)


def amount_text(amount: int) -> str:
    """An option's value: `12GB`, `1300MB`."""
    whole = amount % GIGABYTE == 0
    return f"{amount // GIGABYTE}GB" if whole else f"{amount // MEGABYTE}MB"


def rounded_up(amount: int) -> int:
    """To two digits, of megabytes at least."""
    unit = max(MEGABYTE, int(10.0 ** (floor(log10(amount)) - 1)))
    return -(-amount // unit) * unit


def _together(kinds: Sequence[list[_Move]], fits: Callable[[tuple[_Move, ...]], bool]) -> Iterator[tuple[_Move, ...]]:
    """One of each kind, the largest size first; no size is tried with what does not fit with the smallest."""
    sizes = next((kind for kind in kinds if kind[0].size), [])
    others = list(product(*(kind for kind in kinds if kind is not sizes)))
    if not sizes:
        yield from others
    others = [moves for moves in others if sizes and fits((*moves, sizes[-1]))]
    yield from ((*moves, size) for size in sizes for moves in others)


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
