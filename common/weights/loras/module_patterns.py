"""PEFT's patterns for the names of modules, matched in bounded time.

PEFT treats the keys of `alpha_pattern` and `rank_pattern` as regular expressions: a module takes the first pattern for
which `re.match(rf"(.*\\.)?({pattern})$", module)` matches. On some patterns Python's `re` takes exponential time, and a
file is not trusted. So this module matches a pattern at all positions of a name at once: a set of positions is an
integer whose bit i stands before character i. A part that is repeated more than once may not contain such a repeat, so
each part of a pattern is tried at most once for each position. Syntax other than text, classes, groups, choices,
repeats and edges is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

from qwenimg.common.base.text import clean

MAX_PATTERN = 512  # characters; as many as a name of a tensor has
MAX_PATTERNS = 5_000
MAX_CHARACTERS = 300_000  # of all patterns; 3,000 names of modules with 80 each are 240,000
MAX_DEPTH = 20  # groups in groups
MAX_STEPS = 4_000_000  # for all names together: some seconds, as each takes a third of a microsecond

_ESCAPE = r"\\(?:[dDsSwW]|[^A-Za-z0-9])"
_CLASS = rf"\[\^?\]?(?:{_ESCAPE}|(?!--)[^\]\\\[&|~])*\]"
_TOKEN = re.compile(
    rf"(?P<atom>{_ESCAPE}|{_CLASS}|[^\\\[{{(|)*+?^$])|(?P<edge>[\^$])|(?P<open>\((?:\?:)?)(?!\?)|(?P<close>\))"
    r"|(?P<or>\|)|(?P<repeat>(?:[*+?]|\{(?P<least>\d{1,2})?(?P<comma>,)?(?P<most>\d{1,2})?\})\??)"
)
_SIMPLE = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class _Atom(NamedTuple):
    """One character, as a regular expression."""

    text: str
    compiled: re.Pattern[str]


class _Edge(NamedTuple):
    """The start or the end of a name."""

    end: bool


class _Sequence(NamedTuple):
    parts: tuple[_Part, ...]


class _Choice(NamedTuple):
    parts: tuple[_Part, ...]


class _Repeat(NamedTuple):
    part: _Part
    least: int
    most: int | None


_Part: TypeAlias = _Atom | _Edge | _Sequence | _Choice | _Repeat


class _Pattern(NamedTuple):
    """A pattern; `plain` if it is `length` single characters like a name, with at most an edge around it."""

    part: _Part
    plain: re.Pattern[str] | None
    length: int
    from_start: bool  # as in the `^name` of each module that diffusers writes


def first_matches(patterns: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """Return, for each name that some pattern matches, the first such pattern. Raises ValueError for an unreadable
    pattern, for a pattern that matches no name, and if matching takes too long."""
    patterns = tuple(patterns)
    if len(patterns) > MAX_PATTERNS:
        raise ValueError(f"has {len(patterns)} patterns; at most {MAX_PATTERNS} are read")
    if (characters := sum(map(len, patterns))) > MAX_CHARACTERS:
        raise ValueError(f"has patterns of {characters} characters together; at most {MAX_CHARACTERS} are read")
    parsed = {pattern: _parse(pattern) for pattern in patterns}
    search, places = _Search(), [_Places(name) for name in dict.fromkeys(names)]
    matches: dict[str, str] = {}
    for place in places:
        first = next((pattern for pattern, part in parsed.items() if search.matches(part, place)), None)
        if first is not None:
            matches[place.name] = first
    used = set(matches.values())
    for pattern, part in parsed.items():
        if pattern not in used and not any(search.matches(part, place) for place in places):
            raise ValueError(f"pattern '{clean(pattern, 60)}' matches none of its modules: it is of another LoRA")
    return matches


# Parsing


def _parse(pattern: str) -> _Pattern:
    """Parse a pattern. Raises ValueError if it is wrong or uses other syntax."""
    try:
        if len(pattern) > MAX_PATTERN:
            raise ValueError(f"it has {len(pattern)} characters; at most {MAX_PATTERN} are read")
        tokens = list(_tokens(pattern))
        part, rest = _choice(tokens, 0, 0)
        if rest < len(tokens):
            raise ValueError("a ')' closes no group")
    except ValueError as error:
        raise ValueError(f"pattern '{clean(pattern, 60)}' is not read: {error}") from None
    parts = part.parts if isinstance(part, _Sequence) else (part,)
    from_start = parts[:1] == (_Edge(end=False),)
    atoms = parts[from_start : -1 if parts[-1:] == (_Edge(end=True),) else None]
    plain = all(isinstance(atom, _Atom) for atom in atoms)
    return _Pattern(part, re.compile(pattern) if plain else None, len(atoms), from_start)


def _tokens(pattern: str) -> Iterator[re.Match[str]]:
    at = 0
    while at < len(pattern):
        token = _TOKEN.match(pattern, at)
        if token is None:
            raise ValueError(f"character {at}, '{clean(pattern[at : at + 3], 10)}', is no part of a plain expression")
        yield token
        at = token.end()


def _choice(tokens: list[re.Match[str]], at: int, depth: int) -> tuple[_Part, int]:
    """Parse sequences with '|' between them, from token `at` to the end of the group. Return the part and the end."""
    if depth > MAX_DEPTH:
        raise ValueError(f"it has groups more than {MAX_DEPTH} deep")
    parts = []
    while True:
        part, at = _sequence(tokens, at, depth)
        parts.append(part)
        if at == len(tokens) or tokens[at].lastgroup != "or":
            return (parts[0] if len(parts) == 1 else _Choice(tuple(parts))), at
        at += 1


def _sequence(tokens: list[re.Match[str]], at: int, depth: int) -> tuple[_Sequence, int]:
    parts: list[_Part] = []
    repeatable = False
    while at < len(tokens) and tokens[at].lastgroup not in ("or", "close"):
        token = tokens[at]
        if token.lastgroup == "atom":
            parts.append(_Atom(token[0], _compiled(token[0])))
        elif token.lastgroup == "edge":
            parts.append(_Edge(token[0] == "$"))
        elif token.lastgroup == "open":
            part, at = _choice(tokens, at + 1, depth + 1)
            if at == len(tokens):
                raise ValueError("a '(' is not closed")
            parts.append(part)
        else:
            if not repeatable:
                raise ValueError(f"'{token[0]}' repeats nothing")
            parts.append(_repeat(parts.pop(), token))
        repeatable = token.lastgroup in ("atom", "open")
        at += 1
    return _Sequence(tuple(parts)), at


def _repeat(part: _Part, token: re.Match[str]) -> _Repeat:
    simple = _SIMPLE.get(token[0][0])
    if simple is not None:
        least, most = simple
    else:
        if token["least"] is None and token["comma"] is None:
            raise ValueError(f"'{token[0]}' is no number of times")
        least = int(token["least"] or 0)
        most = int(token["most"]) if token["most"] else (None if token["comma"] else least)
    if most is not None and most < least:
        raise ValueError(f"'{token[0]}' has its numbers the wrong way round")
    if most != 1 and _loops(part):
        raise ValueError(f"'{token[0]}' repeats what has a repeat in it")
    return _Repeat(part, least, most)


def _loops(part: _Part) -> bool:
    """Return whether a part may be repeated more than once."""
    if isinstance(part, _Repeat):
        return part.most != 1 or _loops(part.part)
    return isinstance(part, (_Sequence, _Choice)) and any(map(_loops, part.parts))


def _compiled(atom: str) -> re.Pattern[str]:
    """Compile a single character. Raises ValueError for a wrong class."""
    try:
        return re.compile(atom)
    except re.error as error:
        raise ValueError(f"'{clean(atom, 30)}' is wrong: {error.msg}") from None


# Matching


class _Places:
    """A name, and the positions of its characters."""

    def __init__(self, name: str):
        self.name = name
        self.end = 1 << len(name)
        self.starts = 1 | sum(2 << i for i, character in enumerate(name) if character == ".")  # behind `(.*\.)?`
        self._of_atoms: dict[str, int] = {}

    def of(self, atom: _Atom) -> tuple[int, int]:
        """Return the positions before a character that `atom` matches, and the steps that it took to find them."""
        places = self._of_atoms.get(atom.text)
        if places is not None:
            return places, 0
        places = sum(1 << match.start() for match in atom.compiled.finditer(self.name))
        self._of_atoms[atom.text] = places
        return places, 8 + len(self.name) // 32 + places.bit_count()  # as long as so many other steps


class _Search:
    """Matching that counts its steps. Raises ValueError if they are too many."""

    def __init__(self) -> None:
        self._steps = 0

    def matches(self, pattern: _Pattern, places: _Places) -> bool:
        self._count()
        if pattern.plain is not None:
            name, start = places.name, len(places.name) - pattern.length
            begins = start == 0 or (start > 0 and name[start - 1] == "." and not pattern.from_start)
            return begins and bool(pattern.plain.fullmatch(name, start))
        return bool(self._after(pattern.part, places, places.starts) & places.end)

    def _after(self, part: _Part, places: _Places, at: int) -> int:
        """Return the positions at which `part` can end if it begins at one of `at`."""
        self._count()
        if isinstance(part, _Atom):
            of_atom, steps = places.of(part)
            self._count(steps)
            return (at & of_atom) << 1
        if isinstance(part, _Edge):
            return at & (places.end if part.end else 1)
        if isinstance(part, _Choice):
            behind = 0
            for each in part.parts:
                behind |= self._after(each, places, at)
            return behind
        if isinstance(part, _Sequence):
            for each in part.parts:
                if not at:
                    break
                at = self._after(each, places, at)
            return at
        return self._repeated(part, places, at)

    def _repeated(self, part: _Repeat, places: _Places, at: int) -> int:
        for _ in range(part.least):
            at = self._after(part.part, places, at)
        behind, times = at, part.least
        while at and times != part.most:
            at = self._after(part.part, places, at) & ~behind
            behind |= at
            times += 1
        return behind

    def _count(self, steps: int = 1) -> None:
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise ValueError("has patterns that take too long to match")
