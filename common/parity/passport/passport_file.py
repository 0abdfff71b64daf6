"""Passports as files: plain safetensors, with the passport as JSON in the metadata, which refers to arrays by name.

The metadata: `format`, `schema`, `passport` (the JSON) and `sha256`, of everything else. Files of a schema that is
listed here stay readable in all later versions.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base import atomic_files
from qwenimg.common.base.config import exactly
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.strict_json import strict_json
from qwenimg.common.base.text import clean
from qwenimg.common.formats.safetensors import entry, head, read_header
from qwenimg.common.formats.stored import Header
from qwenimg.common.parity import inputs
from qwenimg.common.parity.passport.passport import (
    MAX_GAIN,
    MAX_NAME,
    Argument,
    Figure,
    Passport,
    Recorded,
    RecordedCall,
    RecordedResult,
)
from qwenimg.common.parity.sample import FLOATS, LARGEST, PROJECTIONS, Drawn
from qwenimg.common.parity.stations import FARTHEST, Station
from qwenimg.common.quant.bits import widened
from qwenimg.common.runtime.traced import Dtype, Values

FORMAT, SCHEMA = "qwenimg-parity", "1"
MAX_BYTES = 96 << 20  # bytes of a file
DEPTH, VALUES = 24, 2_000_000  # limits of the JSON
NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "U8": "u1"}
STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "bool": "U8"}
MAX_ARRAYS = 8  # inputs or outputs of a station

# Writing


class _Arrays:
    """The arrays of a file: an array that is used several times is stored once."""

    def __init__(self) -> None:
        self.tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
        self._names: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def name(self, array: NDArray[Any], dtype: str) -> str:
        data = _bits(array, dtype)
        key = (dtype, array.shape, hashlib.sha256(data).digest())
        if key not in self._names:
            self._names[key] = f"t{len(self._names)}"
            self.tensors[self._names[key]] = (dtype, array.shape, data)
        return self._names[key]


def _bits(array: NDArray[Any], dtype: str) -> bytes:
    if dtype == "BF16":
        array = np.ascontiguousarray(array, "<f4").view("<u4") >> 16
    return np.ascontiguousarray(array.astype(NUMPY[dtype], copy=False)).tobytes()


def write(path: Path, passport: Passport, *, overwrite: bool) -> int:
    """Write `passport` as `path` and return the file's bytes. Raises UsageError and DoesNotFit like `write_atomic`."""
    data = encoded(passport)
    if len(data) > MAX_BYTES:
        raise UsageError(
            f"a passport of {len(data):,} bytes: record it --sampled or in a smaller --size, which changes no reference"
        )
    atomic_files.write_atomic(path, data, overwrite=overwrite)
    return len(data)


def encoded(passport: Passport) -> bytes:
    arrays = _Arrays()
    text = json.dumps(_json(passport, arrays), allow_nan=False)
    table, at = dict[str, object](), 0
    for name, (dtype, shape, data) in arrays.tensors.items():
        table[name] = entry(dtype, shape, at, at + len(data))
        at += len(data)
    body = b"".join(data for _, _, data in arrays.tensors.values())
    return head(table, {"format": FORMAT, "schema": SCHEMA, "passport": text, "sha256": _sum(text, table, body)}) + body


def _sum(text: str, table: Mapping[str, object], body: bytes) -> str:
    whole = hashlib.sha256(text.encode())
    whole.update(json.dumps(table, sort_keys=True).encode())
    whole.update(body)
    return whole.hexdigest()


def _json(value: Any, arrays: _Arrays) -> Any:
    """Return a value of a passport as JSON, with its arrays by their names in `arrays`."""
    if isinstance(value, np.ndarray):
        return arrays.name(value, {"uint8": "U8", "float64": "F64"}.get(value.dtype.name, "F32"))
    if isinstance(value, Dtype):
        return {"named": value.name}
    if isinstance(value, Drawn):
        return {"drawn": asdict(value)}
    if isinstance(value, Values):
        return {"array": arrays.name(value.array, STORED[value.dtype]), "dtype": value.dtype}
    if isinstance(value, RecordedResult):
        return _result_json(value, arrays)
    if isinstance(value, Figure):  # null for NaN, an error that could not be computed
        finite = {
            key: one if math.isfinite(one) else None
            for key, one in (("error", value.error), ("allowed", value.allowed))
        }
        return {**finite, "failures": list(value.failures)}
    if isinstance(value, Station):
        given, made = ([arrays.name(one, _smallest(one)) for one in some] for some in (value.inputs, value.outputs))
        return {"name": value.name, "given": given, "made": made, "own": value.policy_error}
    if isinstance(value, tuple | list):
        return [_json(one, arrays) for one in value]
    if isinstance(value, dict):
        return {key: _json(one, arrays) for key, one in value.items()}
    if is_dataclass(value):
        named = {field: getattr(value, field.name) for field in fields(value)}
        return {
            field.name: _json(one, arrays)
            for field, one in named.items()
            if "later" not in field.metadata or isinstance(one, np.ndarray) or one
        }
    return value


def _result_json(result: RecordedResult, arrays: _Arrays) -> dict[str, Any]:
    """Return a result as JSON. Float64 values are stored as differences from the backend's result, in float32, which is
    precise enough to measure an error."""
    values, lacks = (STORED[result.dtype], "F32") if result.seed is None else ("F64", "F64")
    stored = arrays.name(result.values, values)
    return {
        "dtype": result.dtype,
        "shape": list(result.shape),
        "seed": result.seed,
        "gain": result.gain,
        "lacks": None if result.exact is None else arrays.name(result.exact - result.values, lacks),
        "values": stored,
    }


def _smallest(array: NDArray[Any]) -> str:
    """Return the smallest dtype that loses nothing: states that were 16 bit are so in the file."""
    if array.dtype.kind != "f":
        return "I64"
    if array.dtype == np.float64:
        return "F64"
    if not (np.ascontiguousarray(array, "<f4").view("<u4") & 0xFFFF).any():
        return "BF16"
    with np.errstate(over="ignore"):
        return "F16" if np.array_equal(array.astype(np.float16).astype(np.float32), array) else "F32"


# Reading


def read(path: Path) -> Passport:
    """Read and check the passport in the file `path`. Raises ModelError."""
    header = read_header(path)
    try:
        text = _checked_text(header)
        arrays = {name: _array(header, name) for name in header.tensors}
        header.file.check_unchanged()
    finally:
        header.file.close()
    document = strict_json(text.encode(), f"{path} (passport)", depth=DEPTH, values=VALUES)
    try:
        passport = exactly(Passport, document, convert=_Reader(arrays).by_type())
        if passport.picture is not None:
            inputs.check_call(passport.picture)
        return passport
    except ValueError as error:
        raise bad(path, f"is no passport as expected ({clean(error, 120)}): record it again") from None


def _checked_text(header: Header) -> str:
    """Return the JSON after a check of its schema and of the sum."""
    path, metadata = header.file.path, header.metadata
    if metadata.get("format") != FORMAT:
        raise bad(path, "is no parity passport: make one with `qwenimg parity record`")
    if metadata.get("schema") != SCHEMA:
        shown = clean(metadata.get("schema"), 20)
        raise bad(path, f"is a passport of schema {shown}, and this version reads {SCHEMA}: record it again")
    if header.file.size > MAX_BYTES:
        raise bad(path, f"has {header.file.size} bytes; a passport has at most {MAX_BYTES}")
    start = min((tensor.begin for tensor in header.tensors.values()), default=header.file.size)
    table = {name: entry(t.dtype, t.shape, t.begin - start, t.end - start) for name, t in header.tensors.items()}
    text = metadata.get("passport", "")
    body = header.file.read(start, header.file.size - start)
    if _sum(text, table, body) != metadata.get("sha256"):
        raise bad(path, "is damaged: its sum is not the one that it was written with; copy it again")
    return text


class FileTensor(NamedTuple):
    """A tensor of the file, and its dtype there."""

    dtype: str
    array: NDArray[Any]


def _array(header: Header, name: str) -> FileTensor:
    tensor = header.tensors[name]
    if tensor.dtype not in NUMPY:
        raise bad(header.file.path, f"tensor '{clean(name, 60)}' is {tensor.dtype}, which no passport has")
    data = header.file.read(tensor.begin, tensor.end - tensor.begin)
    array = np.frombuffer(data, NUMPY[tensor.dtype]).reshape(tensor.shape)
    return FileTensor(tensor.dtype, widened(array) if tensor.dtype in ("BF16", "F16") else array)


# Values of a passport whose JSON has another form


@dataclass(frozen=True, kw_only=True)
class NamedJson:
    named: str

    def __post_init__(self) -> None:
        _check_float(self.named)


@dataclass(frozen=True, kw_only=True)
class ArrayJson:
    array: str
    dtype: str


@dataclass(frozen=True, kw_only=True)
class DrawnJson:
    drawn: Drawn


@dataclass(frozen=True, kw_only=True)
class ResultJson:
    dtype: str
    shape: tuple[int, ...] = field(metadata={"min": 1, "max": 2**31 - 1})
    seed: int | None = field(metadata={"min": 0, "max": 2**32 - 1})
    gain: float = field(metadata={"min": 1, "max": MAX_GAIN})
    lacks: str | None
    values: str

    def __post_init__(self) -> None:
        _check_float(self.dtype)


@dataclass(frozen=True, kw_only=True)
class FigureJson:
    error: float | None = field(metadata={"min": 0, "max": LARGEST})
    allowed: float | None = field(metadata={"min": 0, "max": LARGEST})
    failures: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class StationJson:
    """A station of the run: names of its input and output tensors, and `own`, the policy's error, or null."""

    name: str
    given: tuple[str, ...]
    made: tuple[str, ...]
    own: float | None = field(metadata={"min": 0, "max": FARTHEST})

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= MAX_NAME:
            raise ValueError(f"a station called {clean(self.name, 30)!r}")
        if max(len(self.given), len(self.made)) > MAX_ARRAYS:
            raise ValueError(f"station {clean(self.name, 30)!r} has more than {MAX_ARRAYS} arrays")


def _check_float(dtype: str) -> None:
    if dtype not in FLOATS:
        raise ValueError(f"{clean(dtype, 30)!r} is none of {', '.join(FLOATS)}")


# An argument of a block is null, true or false, a number, a list of arguments, or an object of one of these classes.
_ARGUMENTS: dict[str, Any] = {"named": NamedJson, "array": ArrayJson, "drawn": DrawnJson}


class _Reader:
    """A converter of the JSON of one file, with its arrays. Raises ValueError."""

    def __init__(self, arrays: dict[str, FileTensor]):
        self.arrays = arrays

    def by_type(self) -> dict[Any, Callable[[str, object], Any]]:
        """Return the functions that convert the fields of a passport, by the fields' types."""
        return {
            NDArray[np.float32]: lambda place, name: self._tensor(name, "F32", place),
            NDArray[np.float64]: lambda place, name: self._tensor(name, "F64", place),
            NDArray[np.uint8]: lambda place, name: self._tensor(name, "U8", place),
            dict[str, Any]: lambda place, data: exactly(RecordedCall, data, place).keywords(),
            get_type_hints(Recorded)["arguments"]: self._arguments,
            RecordedResult: self._result,
            Figure: self._figure,
            Station: self._station,
        }

    def _tensor(self, name: object, dtype: str | None, place: str = "") -> NDArray[Any]:
        """Return the array `name`, which must be in `dtype` if that is given."""
        if not isinstance(name, str):
            raise ValueError(f"{place} is {clean(name, 30)}: expected a string")
        tensor = self.arrays.get(name)
        if tensor is None or dtype not in (None, tensor.dtype):
            there = "not in the file" if tensor is None else tensor.dtype
            raise ValueError(f"tensor {clean(name, 30)!r} is {there}, expected {dtype or 'there'}")
        return tensor.array

    def _arguments(self, place: str, data: object) -> tuple[Argument, ...]:
        if not isinstance(data, list):
            raise ValueError(f"{place} is {clean(data, 30)!r}: expected a list [...]")
        return tuple(map(self._argument, data))

    def _argument(self, given: object) -> Argument:
        if given is None or isinstance(given, bool):
            return given
        if isinstance(given, int | float) and abs(given) <= LARGEST:
            return given
        if isinstance(given, list):
            return tuple(map(self._argument, given))
        kind = next((_ARGUMENTS[key] for key in given if key in _ARGUMENTS), None) if isinstance(given, dict) else None
        if kind is None:
            raise ValueError(f"an argument is {clean(given, 30)!r}")
        data = exactly(kind, given, "an argument")
        if isinstance(data, NamedJson):
            return Dtype(data.named)
        if isinstance(data, DrawnJson):
            data.drawn.check()
            return data.drawn
        if data.dtype not in STORED:
            raise ValueError(f"an argument is of {clean(data.dtype, 30)!r}")
        array = self._tensor(data.array, STORED[data.dtype])
        return Values(data.dtype, array.astype(bool) if data.dtype == "bool" else array)

    def _result(self, place: str, value: object) -> RecordedResult:
        data = exactly(ResultJson, value, place)
        whole = data.seed is None
        values = self._tensor(data.values, STORED[data.dtype] if whole else "F64")
        lacks = None if data.lacks is None else self._tensor(data.lacks, "F32" if whole else "F64")
        shape = data.shape if whole else (PROJECTIONS,)
        if values.shape != shape or (lacks is not None and lacks.shape != shape):
            raise ValueError(f"a result of shape {clean(values.shape, 40)}, expected {clean(shape, 40)}")
        exact = None if lacks is None else values.astype(np.float64) + lacks
        return RecordedResult(
            dtype=data.dtype, shape=data.shape, values=values, seed=data.seed, exact=exact, gain=data.gain
        )

    def _figure(self, place: str, value: object) -> Figure:
        data = exactly(FigureJson, value, place)
        error, allowed = (math.nan if one is None else one for one in (data.error, data.allowed))
        return Figure(error=error, allowed=allowed, failures=data.failures)

    def _station(self, place: str, value: object) -> Station:
        data = exactly(StationJson, value, place)
        inputs, outputs = (tuple(self._tensor(name, None) for name in names) for names in (data.given, data.made))
        if not all(np.isfinite(array).all() for array in (*inputs, *outputs)):
            raise ValueError("a station of values that are not finite")
        return Station(name=data.name, inputs=inputs, outputs=outputs, policy_error=data.own)


def needs_exact(path: Path, passport: Passport) -> None:
    """Raise ModelError if a result was recorded without float64."""
    if not all(result.exact is not None for block in passport.blocks for result in block.results):
        raise ModelError(
            f"{clean(path, 120)}: was recorded without float64, so nothing can be held against it: "
            f"record it again where the backend cpu is installed"
        )
