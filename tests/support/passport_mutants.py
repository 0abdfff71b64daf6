"""Passports with one fault in their JSON and a right sum over it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from qwenimg.common.parity.passport import passport_file
from qwenimg.common.parity.passport.passport import Passport
from support.refusals import safetensors_bytes

WRONG: tuple[Any, ...] = (
    None, True, 0, 3, -1, 2**32, 10**19, 10**400, -0.5, 1e30, 1e308, "", "x", "../\x1b[31m", [], ["x"], [[]], {},
    {"x": 1}, {"array": "t0", "dtype": "x"},
)  # fmt: skip
TEXTS = ("NaN", "Infinity", "1e999", "-0", "1" * 5000, "[" * 5000, "nul", '"\\ud800"')  # what no value is written as
RARE = 17  # one place of so many is written as these


class Text(str):
    """JSON as it stands, in place of a value."""


class Mutant(NamedTuple):
    place: str  # in the document
    text: str


def cut(found: Passport, names: tuple[str, ...]) -> Passport:
    """The passport with the blocks of these names alone."""
    kept = [i for i, block in enumerate(found.blocks) if block.name in names]
    assert len(kept) == len(names), [block.name for block in found.blocks]
    sides = tuple(replace(side, figures=tuple(side.figures[i] for i in kept)) for side in found.sides)
    return replace(found, blocks=tuple(found.blocks[i] for i in kept), sides=sides)


class Original:
    """A valid passport, of which mutants are made."""

    def __init__(self, path: Path):
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        self.table = json.loads(data[8:end])
        self.metadata, self.body = self.table.pop("__metadata__"), data[end:]
        self.document: dict[str, Any] = json.loads(self.metadata["passport"])

    def write(self, path: Path, text: str) -> Path:
        """The file whose JSON is `text`, with a right sum."""
        sum_ = passport_file._sum(text, self.table, self.body)
        metadata = self.metadata | {"passport": text, "sha256": sum_}
        path.write_bytes(safetensors_bytes({"__metadata__": metadata, **self.table}, self.body))
        return path

    def changed(self, keys: tuple[str | int, ...], value: object) -> Mutant:
        """The document with `value` at the place that `keys` lead to."""
        text = json.dumps(_with(self.document, keys, "@" if isinstance(value, Text) else value))
        return Mutant(_shown(keys), text.replace('"@"', value) if isinstance(value, Text) else text)

    def mutants(self) -> Iterator[Mutant]:
        """Every value in the place of every value, keys left out, written twice and unknown, items more and fewer."""
        for number, (keys, value) in enumerate(places(self.document, ())):
            for wrong in WRONG:
                if json.dumps(wrong) != json.dumps(value):
                    yield self.changed(keys, wrong)
            for text in TEXTS if number % RARE == 0 else ():
                yield self.changed(keys, Text(text))
            if isinstance(value, dict):
                yield self.changed(keys, value | {"unknown": 1})
                for key in value:
                    yield self.changed(keys, {name: one for name, one in value.items() if name != key})
                    twice = f"{json.dumps(value)[:-1]}, {json.dumps(key)}: {json.dumps(value[key])}}}"
                    yield self.changed(keys, Text(twice))
            if isinstance(value, list) and value:
                yield self.changed(keys, [*value, value[0]])
                yield self.changed(keys, value[:-1])


def places(value: Any, keys: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Where every value of a JSON document is, and the value; of those that are alike, in a list or a table of texts,
    the first and the last."""
    if keys:
        yield keys, value
    if isinstance(value, dict):
        names = list(value)
        alike = len(names) > 2 and all(isinstance(one, str) for one in value.values())
        for key in (names[0], names[-1]) if alike else names:
            yield from places(value[key], (*keys, key))
    if isinstance(value, list):
        for i in sorted({0, len(value) - 1} & {*range(len(value))}):
            yield from places(value[i], (*keys, i))


def _with(held: Any, keys: tuple[str | int, ...], value: object) -> Any:
    """`held` with another value at a place; only what leads there is copied."""
    if not keys:
        return value
    changed = copy.copy(held)
    changed[keys[0]] = _with(held[keys[0]], keys[1:], value)
    return changed


def _shown(keys: tuple[str | int, ...]) -> str:
    return ".".join(map(str, keys))
