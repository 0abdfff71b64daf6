"""The description of an option, in the metadata of its field in `Request` or `LoadOptions`.

The command line, the configuration file, the prompt file, a request in JSON, an image's recipe, the keywords of
`qwenimg.load` and every check are made from it: a new option is one field, and its use. Nothing here imports numpy, for
`qwenimg --help` reads it.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, SupportsFloat

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean

_KINDS: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool, "Path": Path}
_WORDS = {int: "a whole number", float: "a number", str: "a text"}


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option. `name`, `kind` (None: an array) and `default` come from its field."""

    help: str  # a phrase for the command line; {bounds} and {default} are filled in
    call: str = ""  # the same for a call from Python, if it takes other values
    python: str = ""  # the type for such a call, if it is wider than the field's
    section: str = ""  # section of the command line's help
    metavar: str = ""
    flags: tuple[str, ...] = ()  # on the command line, besides --its-name
    aliases: tuple[str, ...] = ()  # names in other programs, accepted on the command line and not in its help
    title: str = ""  # its name in messages, if that is another one
    least: float | None = None
    most: float | None = None
    open: Literal["", "least", "both"] = ""  # the bounds that the value must not reach
    longest: int = 2_000  # characters of a text
    several: bool = (
        False  # True: a text may hold several values, such as the seeds 1-4; a path or array may be repeated
    )
    parse: Callable[[object, bool], tuple[Any, ...]] | None = None
    """Makes the values of a text, or of a list of texts. Its flag: a text may name a file. Raises UsageError."""
    checks: Callable[[Any], object] | None = None  # raises UsageError
    names: Callable[[], Sequence[str]] | None = None  # returns all values
    spellings: Mapping[str, str] = field(default_factory=dict)  # ours for other programs' values, in any case
    words: tuple[str, ...] = ()  # all values, if the command line itself refuses others
    bare: int | None = None  # its value if the command line gives it without one
    again: str = ""  # the option whose second use gives this one, which is then not in the help
    config: bool = False  # True: config.toml may set it
    recorded: Literal["", "always", "changed", "used"] = ""
    """When a recipe has it: always, if it is not the default, or if the run has what it `needs`."""
    needs: Literal["", "control", "guidance", "image", "mask", "refiner", "hires"] = ""  # without this it has no effect
    # Of an option that only some families take, see `FamilyOptions`
    unsupported: str = ""  # why it has no effect on other models
    after: str = ""  # the option that it follows in help and recipes

    name: str = ""  # if it is not that of its field
    field: str = ""  # of the dataclass
    kind: type | None = str
    default: Any = None

    def __post_init__(self) -> None:
        assert (self.least is None) == (self.most is None), "an option has both bounds or none"

    @property
    def dashed(self) -> str:
        """The name on the command line, without the two dashes before it."""
        return self.name.replace("_", "-")

    @property
    def label(self) -> str:
        """The name in messages."""
        return self.title or self.dashed

    @property
    def expected(self) -> str:
        """The kind of value, for a message: a text, a number, ..."""
        assert self.kind is not None
        more = {self.several: "a whole number or a text", self.parse is not None: "a text or a list of texts"}
        return more.get(True, _WORDS[self.kind])

    @property
    def types(self) -> tuple[type, ...]:
        """The types that are accepted in TOML and JSON."""
        assert self.kind is not None
        if self.parse is not None:
            return (str, list)
        if self.kind is Path:
            return (str,)
        return (int, str) if self.several else (int, float) if self.kind is float else (self.kind,)

    @property
    def bounds(self) -> str:
        """The accepted numbers, in words."""
        if self.open == "both":
            return f"between {self.least} and {self.most}"
        return f"{'above ' if self.open else ''}{self.least} to {self.most}"

    def format_help(self, text: str) -> str:
        """Return `text` with the bounds and the default filled in."""
        return text.replace("{bounds}", self.bounds).replace("{default}", str(self.default))

    def converted(self, value: object, *, files: bool = True) -> object:
        """Return `value` as an int, a float, a text or values that are parsed; an array unchanged, and None if it is
        the default. files: a text may name a file of this machine. Raises UsageError."""
        if value is None and self.default is None:
            return None
        self.check_length(value)
        if self.kind is int:
            return as_integer(self.name, value)
        if self.kind is float:
            return as_number(self.name, value)
        if self.parse is not None:
            return self.parse(value, files)
        if self.kind is str and not isinstance(value, str):
            raise UsageError(f"{self.name} is {type(value).__name__}; expected a text")
        plain = value.strip().lower() if isinstance(value, str) else None
        return next((ours for theirs, ours in self.spellings.items() if theirs.lower() == plain), value)

    def plain(self, value: Any) -> Any:
        """Return `value` as JSON has it: parsed values as one text."""
        return value if self.parse is None else "; ".join(map(str, value))

    def check_length(self, value: object) -> None:
        """Raise UsageError for a text, or a list of texts, that is longer than its schema says. Every way in calls it
        before anything reads the text."""
        texts = value if isinstance(value, (list, tuple)) else (value,)
        length = sum(len(text) for text in texts if isinstance(text, str))
        if length > self.longest:
            raise UsageError(f"{self.label} has {length:,} characters; at most {self.longest:,} are taken")

    def check(self, value: Any) -> None:
        """Raise UsageError for a value, of the right type, that no model accepts."""
        self.check_length(self.plain(value))
        if self.checks is not None:
            self.checks(value)
        if self.least is None or self.most is None or value is None:  # None is the default
            return
        above = value > self.least if self.open else value >= self.least
        below = value < self.most if self.open == "both" else value <= self.most
        if not (above and below):  # NaN fails as well
            raise UsageError(f"{self.label} is {clean(value, 40)}; choose {self.bounds}")

    def fault(self, value: object) -> str | None:
        """Return what `value`, read from an image's recipe, should have been; None if it is right. Open bounds count as
        inside: another program's image may have them, and `check` says more."""
        if self.kind is str:
            right = isinstance(value, str) and len(value) <= self.longest
            return None if right else f"a text of at most {self.longest:,} characters"
        assert self.least is not None and self.most is not None
        number = type(value) is int or (self.kind is float and type(value) is float)
        if number and self.least <= value <= self.most:  # type: ignore[operator]
            return None
        return f"{'an integer' if self.kind is int else 'a number'} from {self.least} to {self.most}"


def option(default: Any, known: Option) -> Any:
    """Return a field that is an option."""
    return field(default=default, metadata={"option": known})


def required(known: Option) -> Any:
    """Return a field that is an option without a default."""
    return field(metadata={"option": known})


def options_of(cls: Any) -> dict[str, Option]:
    """Return every option of the dataclass `cls`, by its name."""
    return {
        known.name or one.name: replace(
            known,
            name=known.name or one.name,
            field=one.name,
            kind=str if known.words or known.parse is not None else _kind(str(one.type)),
            default=one.default,
        )
        for one in fields(cls)
        if (known := one.metadata.get("option")) is not None
    }


def inserted(options: Mapping[str, Option], more: Mapping[str, Option]) -> dict[str, Option]:
    """Return `options` with each of `more` placed after the option that it names in `after`."""
    names = list(options)
    for name, one in more.items():
        names.insert(names.index(one.after) + 1, name)
    known = {**options, **more}
    return {name: known[name] for name in names}


def converted_fields(request: object) -> None:
    """Convert each option of a dataclass to its own type. Raises UsageError."""
    for one in options_of(type(request)).values():
        object.__setattr__(request, one.field, one.converted(getattr(request, one.field)))


def checked_fields(request: object) -> None:
    """Raise UsageError for an option of a dataclass with a value that no model accepts."""
    for one in options_of(type(request)).values():
        value = getattr(request, one.field)
        if one.kind is not None and value != one.default:
            one.check(value)


def _kind(annotation: str) -> type | None:
    """Return the type of one value: the first that `annotation` names. None for an array."""
    first = re.match(r"(?:tuple\[)?(\w+)", annotation)
    return None if first is None else _KINDS.get(first[1])


def recorded(options: Iterable[Option], value: Callable[[Option], Any], there: frozenset[str]) -> dict[str, Any]:
    """Return the values of options for an image's recipe, except options that are parsed from text: these may contain
    paths. `value`: returns an option's value. `there`: the `needs` that the run meets."""
    values = [(one, value(one)) for one in options if one.parse is None]
    return {
        one.name: value
        for one, value in values
        if one.recorded == "always"
        or (one.recorded == "changed" and value != one.default)
        or (one.recorded == "used" and one.needs in there)
    }


def no_effect(one: Option, asked: object, taken: Collection[str], there: frozenset[str], guidance: str) -> str | None:
    """Return a warning if `asked`, the value of an option in a call, changes nothing, else None. `taken`: the options
    of some families that the model takes. `there`: the `needs` that the run has. `guidance`: why there is none, in
    words."""
    if asked is None or (one.recorded == "changed" and asked == one.default):
        return None
    if one.unsupported and one.name not in taken:
        return f"{one.label} has no effect: {one.unsupported}"
    if not one.needs or one.needs in there:
        return None
    lacking = {"guidance": guidance, "image": "without a picture to start from", "hires": "without hires"}
    return f"{one.label} has no effect {lacking.get(one.needs, f'without a {one.needs}')}"


def as_number(name: str, value: object) -> float:
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool"
    if is_bool or not isinstance(value, SupportsFloat):
        raise UsageError(f"{name} is {clean(value, 40)!r}; expected a number")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):  # an integer beyond every float, an array of several numbers
        raise UsageError(f"{name} is {clean(value, 40)}; expected a number") from None


def as_integer(name: str, value: object) -> int:
    """Return `value` as an int, NumPy's integers included. Raises UsageError for anything else."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{name} is {clean(value, 40)!r}; expected a whole number") from None
