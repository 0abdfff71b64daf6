"""JSON files of a model, and frozen dataclasses made from them strictly.

A configuration says how large a model is, so every number is bounded before anything is built from it, and
a key that this version does not know is refused unless its value switches something off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from qwenimg.common.base.safe_files import bad, open_regular
from qwenimg.common.base.strict_json import strict_json
from qwenimg.common.base.text import clean

MAX_BYTES = 8 << 20
MAX_DEPTH = 64
MAX_VALUES = 1_000_000
MAX_INT = 65_536  # unless the field's metadata has its own "max"
MAX_LIST = 64

T = TypeVar("T")


def read_json(path: Path, *, infinities: bool = False) -> dict[str, object]:
    """The object in the JSON file `path`: at most 8 MiB, UTF-8, no duplicate keys. Raises ModelError.

    diffusers writes -Infinity, which is no JSON, into the configurations of some schedulers: `infinities` reads it."""
    file = open_regular(path)
    try:
        if file.size > MAX_BYTES:
            raise bad(path, f"has {file.size} bytes; at most {MAX_BYTES} are read")
        data = strict_json(file.read(0, file.size), path, depth=MAX_DEPTH, values=MAX_VALUES, infinities=infinities)
        file.check_unchanged()
    finally:
        file.close()
    if not isinstance(data, dict):
        raise bad(path, "is not a JSON object {...}")
    return data


def parse(
    cls: type[T],
    data: Mapping[str, object],
    *,
    source: Path | str,
    renamed: Mapping[str, str] | None = None,
    ignored: frozenset[str] = frozenset(),
) -> T:
    """`data` as the frozen keyword-only dataclass `cls`.

    Fields are int, float, bool, str, tuple[int, ...], tuple[float, ...], tuple[bool, ...], or one of these
    `| None`. Integers lie between the field's metadata "min" (1) and "max" (65,536); floats are finite.
    `renamed` is {key in the file: field}. Keys that start with "_" or are in `ignored` are skipped; any other
    unknown key must be null or false. A missing key takes the field's default. Raises ModelError.
    """
    known = {field.name: field for field in fields(cls) if field.init}  # type: ignore[arg-type]
    types = get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key.startswith("_") or key in ignored:
            continue
        name = (renamed or {}).get(key, key)
        if name not in known:
            _check_switched_off(key, value, source)
        elif name in values:
            raise bad(source, f"gives '{clean(name, 60)}' twice, once as '{clean(key, 60)}'")
        else:
            values[name] = _value(key, value, types[name], known[name], source)
    _check_complete(known, values, source)
    try:
        return cls(**values)
    except ValueError as error:  # from the dataclass's own checks
        raise bad(source, str(error)) from None


def _check_switched_off(key: str, value: object, source: Path | str) -> None:
    if value is not None and value is not False:
        shown = f"'{clean(key, 60)}' is {clean(value, 40)}"
        raise bad(source, f"{shown}: this version does not know what it changes")


def _check_complete(known: Mapping[str, Field[Any]], values: Mapping[str, object], source: Path | str) -> None:
    for name, field in known.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise bad(source, f"'{name}' is missing")


def _value(key: str, value: object, kind: Any, field: Field[Any], source: Path | str) -> object:
    """`value` as a field of type `kind`, or ModelError naming `key`."""
    if get_origin(kind) in (UnionType, Union):
        if value is None:
            return None
        [kind] = (k for k in get_args(kind) if k is not NoneType)
    try:
        if get_origin(kind) is tuple:
            return _tuple(value, get_args(kind)[0], field)
        return _CONVERT[kind](value, field)
    except (ValueError, OverflowError) as error:
        raise bad(source, f"'{clean(key, 60)}' is {clean(value, 40)}: {error}") from None


def _tuple(value: object, kind: Any, field: Field[Any]) -> tuple[object, ...]:
    if not isinstance(value, (list, tuple)) or len(value) > MAX_LIST:
        raise ValueError(f"expected a list of at most {MAX_LIST}")
    return tuple(_CONVERT[kind](item, field) for item in value)


def _int(value: object, field: Field[Any]) -> int:
    least, most = field.metadata.get("min", 1), field.metadata.get("max", MAX_INT)
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"expected an integer from {least} to {most}")
    return value


def _float(value: object, field: Field[Any]) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
        raise ValueError("expected a finite number")
    return float(value)  # type: ignore[arg-type]


def _bool(value: object, field: Field[Any]) -> bool:
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def _str(value: object, field: Field[Any]) -> str:
    if not isinstance(value, str):
        raise ValueError("expected a string")
    return value


_CONVERT: dict[Any, Callable[[object, Field[Any]], Any]] = {int: _int, float: _float, bool: _bool, str: _str}
