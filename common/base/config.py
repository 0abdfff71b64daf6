"""JSON files of a model, and frozen dataclasses made from them strictly.

A configuration says how large a model is, so every number is bounded before anything is built from it, and
a key that this version does not know is refused unless its value switches something off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from qwenimg.common.base.safe_files import bad, is_file, open_regular
from qwenimg.common.base.strict_json import strict_json
from qwenimg.common.base.text import clean

MAX_BYTES = 8 << 20
MAX_DEPTH = 64
MAX_VALUES = 1_000_000
MAX_INT = 65_536  # unless the field's metadata has its own "max"
MAX_LIST = 64

T = TypeVar("T")

INDEX, MODULAR_INDEX = "model_index.json", "modular_model_index.json"
"""The indexes of folders in diffusers layout: of a pipeline, and of a modular pipeline."""


def model_index(folder: Path) -> Path:
    """Return the path of the index of a folder in diffusers layout, of a modular pipeline if it has that alone."""
    own, modular = folder / INDEX, folder / MODULAR_INDEX
    return modular if is_file(modular) and not is_file(own) else own


def has_index(folder: Path) -> bool:
    """Return whether `folder` is in diffusers layout."""
    return is_file(model_index(folder))


def data_folder(name: str) -> Path:
    """Return the folder `name` of the data that ship in this package, whether or not it exists."""
    return Path(__file__).parents[1] / "data" / name


def read_json(path: Path, *, infinities: bool = False) -> dict[str, object]:
    """Read the object in the JSON file `path`: at most 8 MiB, UTF-8, no duplicate keys. Raises ModelError.

    `infinities`: read -Infinity too, which is no JSON; diffusers writes it into the configurations of some schedulers.
    """
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
    ignored: frozenset[str] = frozenset(),
) -> T:
    """Return `data` as the frozen keyword-only dataclass `cls`.

    Fields are int, float, bool, str, tuple[int, ...], tuple[float, ...], tuple[bool, ...], or one of these `| None`.
    Integers lie between the field's metadata "min" (1) and "max" (65,536); floats are finite. Keys that start with "_"
    or are in `ignored` are skipped; any other unknown key must be null or false. A missing key takes the field's
    default. Raises ModelError.
    """
    known = {field.name: field for field in fields(cls) if field.init}  # type: ignore[arg-type]
    types = get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key.startswith("_") or key in ignored:
            continue
        if key in known:
            values[key] = _value(key, value, types[key], known[key], source)
        else:
            _check_switched_off(key, value, source)
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
    """Return `value` as a field of type `kind`. Raises ModelError that names `key`."""
    optional, kind = _without_none(kind)
    if optional and value is None:
        return None
    try:
        if get_origin(kind) is tuple:
            return _tuple(value, get_args(kind)[0], field)
        return _CONVERT[kind](value, field)
    except (ValueError, OverflowError) as error:
        raise bad(source, f"'{clean(key, 60)}' is {clean(value, 40)}: {error}") from None


def _without_none(kind: Any) -> tuple[bool, Any]:
    """Return whether `kind` takes None, and its type without None."""
    if get_origin(kind) not in (UnionType, Union):
        return False, kind
    [rest] = (each for each in get_args(kind) if each is not NoneType)
    return True, rest


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
    least, most = field.metadata.get("min", -math.inf), field.metadata.get("max", math.inf)
    if not least <= value <= most:
        raise ValueError(f"expected a number from {least:g} to {most:g}")
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


# Objects in objects


Convert = Mapping[Any, Callable[[str, object], Any]]


def exactly(cls: type[T], data: object, place: str = "", convert: Convert = MappingProxyType({})) -> T:
    """Return the JSON value `data` as the dataclass `cls`, whose fields are its keys and no others.

    Besides the types of `parse`, a field is a dataclass, a table `dict[str, X]`, a list `tuple[X, ...]` of any length,
    a row such as `tuple[int, float]`, or `object`, which is any value. Bounds are those of the field's metadata; they
    hold for each value in its list or table. `convert`: by type, functions of place and value
    for other fields. Raises ValueError that names the place, such as blocks[0].seed."""
    if not isinstance(data, dict):
        raise _unexpected(place, data, "expected an object {...}")
    known = _fields(cls)  # type: ignore[arg-type]
    for key in data:
        if key not in known:
            raise ValueError(f"{_inside(place, key)!r} is a key that this version does not know")
    for name, (_, field) in known.items():
        if name not in data and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{_inside(place, name)} is missing")
    return cls(**{key: _within(_inside(place, key), value, *known[key], convert) for key, value in data.items()})


@cache
def _fields(cls: Any) -> dict[str, tuple[Any, Field[Any]]]:
    """Return the type and the field of each name."""
    types = get_type_hints(cls)
    return {field.name: (types[field.name], field) for field in fields(cls)}


def _within(place: str, value: object, kind: Any, field: Field[Any], convert: Convert) -> Any:
    """Return `value` as a field of type `kind`. Raises ValueError that names `place`."""
    optional, kind = _without_none(kind)
    if kind is object or (optional and value is None):
        return value
    if kind in convert:
        return convert[kind](place, value)
    if is_dataclass(kind):
        return exactly(kind, value, place, convert)  # type: ignore[arg-type]
    if get_origin(kind) is dict:
        if not isinstance(value, dict):
            raise _unexpected(place, value, "expected an object {...}")
        return {key: _within(_inside(place, key), one, get_args(kind)[1], field, convert) for key, one in value.items()}
    if get_origin(kind) is tuple:
        return _listed(place, value, get_args(kind), field, convert)
    try:
        return _CONVERT[kind](value, field)
    except (ValueError, OverflowError) as error:
        raise _unexpected(place, value, str(error)) from None


def _listed(
    place: str, value: object, kinds: tuple[Any, ...], field: Field[Any], convert: Convert
) -> tuple[object, ...]:
    if not isinstance(value, list):
        raise _unexpected(place, value, "expected a list [...]")
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    if len(value) != len(kinds):
        raise _unexpected(place, value, f"expected {len(kinds)} values")
    items = enumerate(zip(value, kinds, strict=True))
    return tuple(_within(f"{place}[{i}]", one, kind, field, convert) for i, (one, kind) in items)


def _unexpected(place: str, value: object, expected: str) -> ValueError:
    shown = repr(clean(value, 30)) if isinstance(value, str) else clean(value, 30)
    return ValueError(f"{place or 'it'} is {shown}: {expected}")


def _inside(place: str, key: str) -> str:
    return f"{place}.{clean(key, 30)}" if place else clean(key, 30)
