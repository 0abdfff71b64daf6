"""Passports as files: plain safetensors, with the passport as JSON in the metadata, which refers to arrays by name.

The metadata: `format`, `schema`, `passport` (the JSON) and `sha256`, of everything else. Files of a schema that is
listed here stay readable in all later versions.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base import atomic_files
from qwenimg.common.base.config import exactly
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.strict_json import strict_json
from qwenimg.common.base.text import clean
from qwenimg.common.codes.bits import widened
from qwenimg.common.formats.safetensors import entry, head, read_header
from qwenimg.common.formats.stored import Header
from qwenimg.common.parity import inputs, run_file
from qwenimg.common.parity.passport.passport import (
    Argument,
    Figure,
    Model,
    Passport,
    Recorded,
    RecordedControl,
    RecordedImage,
    RecordedResult,
    Side,
)
from qwenimg.common.parity.passport.passport_schema import (
    ARGUMENTS,
    LARGEST,
    BlockJson,
    DrawnJson,
    FigureJson,
    NamedJson,
    PassportJson,
    PictureJson,
    ResultJson,
    SideJson,
)
from qwenimg.common.parity.sample import PROJECTIONS, Drawn
from qwenimg.common.runtime.traced import Dtype, Values

FORMAT, SCHEMA = "qwenimg-parity", "1"
MAX_BYTES = 96 << 20  # bytes of a file
DEPTH, VALUES = 24, 2_000_000  # limits of the JSON
NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "U8": "u1"}
STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "bool": "U8"}

_GIVEN = ("parts", "prediction", "lora", "lora_fingerprints")  # fields of a model that are written if not empty

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
    document = {
        "version": passport.version,
        "created": passport.created,
        "model": {key: value for key, value in asdict(passport.model).items() if value or key not in _GIVEN},
        "precision": passport.precision,
        "places": passport.places,
        "picture": None if passport.picture is None else _drawn(passport.picture, arrays),
        "blocks": [_block(block, arrays) for block in passport.blocks],
        "sides": [_written(side) for side in passport.sides],
    }
    if passport.run:
        document["run"] = run_file.written(passport.run, arrays.name)
    text = json.dumps(document, allow_nan=False)
    table, at = dict[str, object](), 0
    for name, (dtype, shape, data) in arrays.tensors.items():
        table[name] = entry(dtype, shape, at, at + len(data))
        at += len(data)
    body = b"".join(data for _, _, data in arrays.tensors.values())
    return head(table, {"format": FORMAT, "schema": SCHEMA, "passport": text, "sha256": _sum(text, table, body)}) + body


def _drawn(picture: RecordedImage, arrays: _Arrays) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "asked": picture.asked,
        "sigmas": list(picture.sigmas),
        "noise": picture.noise,
        "latents": arrays.name(picture.latents, "F32"),
        "pixels": arrays.name(picture.pixels, "U8"),
    }
    if picture.controls:
        fields["controls"] = [vars(one) | {"picture": arrays.name(one.picture, "U8")} for one in picture.controls]
    if picture.mask is not None:
        fields["mask"] = arrays.name(picture.mask, "U8")
    return fields


def _written(side: Side) -> dict[str, Any]:
    """Return a side as JSON. It has null for NaN, an error that could not be computed."""
    fields = asdict(side)
    for figure in (figure for block in fields["figures"] for figure in block):
        figure |= {key: figure[key] if math.isfinite(figure[key]) else None for key in ("error", "allowed")}
    return fields


def _sum(text: str, table: Mapping[str, object], body: bytes) -> str:
    whole = hashlib.sha256(text.encode())
    whole.update(json.dumps(table, sort_keys=True).encode())
    whole.update(body)
    return whole.hexdigest()


def _block(block: Recorded, arrays: _Arrays) -> dict[str, Any]:
    return {
        "component": block.component,
        "block": block.block,
        "path": block.path,
        "name": block.name,
        "arguments": [_given(argument, arrays) for argument in block.arguments],
        "results": [_kept(result, arrays) for result in block.results],
        "operations": block.operations,
    }


def _given(given: Argument, arrays: _Arrays) -> Any:
    if isinstance(given, tuple):
        return [_given(part, arrays) for part in given]
    if isinstance(given, Dtype):
        return {"named": given.name}
    if isinstance(given, Drawn):
        return {"drawn": asdict(given)}
    if isinstance(given, Values):
        return {"array": arrays.name(given.array, STORED[given.dtype]), "dtype": given.dtype}
    return given


def _kept(kept: RecordedResult, arrays: _Arrays) -> dict[str, Any]:
    """Return a result as JSON. Float64 is stored as its difference from the backend's result, in float32, which is
    precise enough beside an error."""
    fields: dict[str, Any] = {
        "dtype": kept.dtype,
        "shape": list(kept.shape),
        "seed": kept.seed,
        "gain": kept.gain,
        "lacks": None,
    }
    if kept.seed is not None:
        fields["values"] = arrays.name(kept.values, "F64")
        fields["lacks"] = None if kept.exact is None else arrays.name(kept.exact - kept.values, "F64")
    else:
        fields["values"] = arrays.name(kept.values, STORED[kept.dtype])
        if kept.exact is not None:
            fields["lacks"] = arrays.name((kept.exact - kept.values).astype(np.float32), "F32")
    return fields


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
        return _passport(exactly(PassportJson, document), arrays)
    except ValueError as error:
        raise bad(path, f"is no passport as expected ({clean(error, 120)}): record it again") from None


def _checked_text(header: Header) -> str:
    """Return the JSON after a check of its schema and of the sum. Raises ModelError."""
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


Arrays = dict[str, FileTensor]


def _array(header: Header, name: str) -> FileTensor:
    tensor = header.tensors[name]
    if tensor.dtype not in NUMPY:
        raise bad(header.file.path, f"tensor '{clean(name, 60)}' is {tensor.dtype}, which no passport has")
    data = header.file.read(tensor.begin, tensor.end - tensor.begin)
    array = np.frombuffer(data, NUMPY[tensor.dtype]).reshape(tensor.shape)
    return FileTensor(tensor.dtype, widened(array) if tensor.dtype in ("BF16", "F16") else array)


def _tensor(arrays: Arrays, name: str, dtype: str) -> NDArray[Any]:
    """Return the array `name`. Raises ValueError unless the file has it in `dtype`."""
    if name not in arrays or arrays[name].dtype != dtype:
        there = arrays[name].dtype if name in arrays else "not in the file"
        raise ValueError(f"tensor {clean(name, 30)!r} is {there}, expected {dtype}")
    return arrays[name].array


def _passport(data: PassportJson, arrays: Arrays) -> Passport:
    model = vars(data.model) | {"lora_fingerprints": list(data.model.lora_fingerprints)}
    return Passport(
        version=data.version,
        created=data.created,
        model=Model(**model),
        precision=data.precision,
        places=data.places,
        picture=None if data.picture is None else _picture(data.picture, arrays),
        blocks=tuple(_recorded(block, arrays) for block in data.blocks),
        sides=tuple(_side(side) for side in data.sides),
        run=run_file.parsed(data.run, {name: one.array for name, one in arrays.items()}),
    )


def _picture(data: PictureJson, arrays: Arrays) -> RecordedImage:
    latents, pixels = _tensor(arrays, data.latents, "F32"), _tensor(arrays, data.pixels, "U8")
    if latents.ndim != 4 or not np.isfinite(latents).all():
        raise ValueError(f"latents of shape {clean(latents.shape, 40)}, expected four axes of finite numbers")
    if pixels.shape not in [(data.asked.height, data.asked.width, channels) for channels in (3, 4)]:
        raise ValueError(f"pixels of shape {clean(pixels.shape, 40)}, which is not the size that was asked for")
    picture = RecordedImage(
        asked=data.asked.said(),
        sigmas=data.sigmas,
        noise=data.noise,
        latents=latents,
        pixels=pixels,
        controls=tuple(
            RecordedControl(**vars(one) | {"picture": _tensor(arrays, one.picture, "U8")}) for one in data.controls
        ),
        mask=None if data.mask is None else _tensor(arrays, data.mask, "U8"),
    )
    inputs.check_call(picture)
    return picture


def _recorded(data: BlockJson, arrays: Arrays) -> Recorded:
    return Recorded(
        component=data.component,
        block=data.block,
        path=data.path,
        name=data.name,
        arguments=tuple(_read_given(argument, arrays) for argument in data.arguments),
        results=tuple(_read_kept(one, arrays) for one in data.results),
        operations=data.operations,
    )


def _read_given(given: object, arrays: Arrays) -> Argument:
    """Return an argument of a block. Raises ValueError."""
    if given is None or isinstance(given, bool):
        return given
    if isinstance(given, int | float) and abs(given) <= LARGEST:
        return given
    if isinstance(given, list):
        return tuple(_read_given(part, arrays) for part in given)
    kind = next((ARGUMENTS[key] for key in given if key in ARGUMENTS), None) if isinstance(given, dict) else None
    if kind is None:
        raise ValueError(f"an argument is {clean(given, 30)!r}")
    data = exactly(kind, given, "an argument")
    if isinstance(data, NamedJson):
        return Dtype(data.named)
    if isinstance(data, DrawnJson):
        return Drawn(**vars(data.drawn))
    if data.dtype not in STORED:
        raise ValueError(f"an argument is of {clean(data.dtype, 30)!r}")
    array = _tensor(arrays, data.array, STORED[data.dtype])
    return Values(data.dtype, array.astype(bool) if data.dtype == "bool" else array)


def _read_kept(data: ResultJson, arrays: Arrays) -> RecordedResult:
    whole = data.seed is None
    values = _tensor(arrays, data.values, STORED[data.dtype] if whole else "F64")
    lacks = None if data.lacks is None else _tensor(arrays, data.lacks, "F32" if whole else "F64")
    shape = data.shape if whole else (PROJECTIONS,)
    if values.shape != shape or (lacks is not None and lacks.shape != shape):
        raise ValueError(f"a result of shape {clean(values.shape, 40)}, expected {clean(shape, 40)}")
    return RecordedResult(
        dtype=data.dtype,
        shape=data.shape,
        values=values,
        seed=data.seed,
        exact=None if lacks is None else values.astype(np.float64) + lacks,
        gain=data.gain,
    )


def _side(data: SideJson) -> Side:
    figures = tuple(tuple(map(_figure, block)) for block in data.figures)
    return Side(**vars(data) | {"figures": figures})


def _figure(data: FigureJson) -> Figure:
    error, allowed = (math.nan if value is None else value for value in (data.error, data.allowed))
    return Figure(error=error, allowed=allowed, failures=data.failures)


def needs_exact(path: Path, passport: Passport) -> None:
    """Raise ModelError if a result was recorded without float64."""
    if not all(result.exact is not None for block in passport.blocks for result in block.results):
        raise ModelError(
            f"{clean(path, 120)}: was recorded without float64, so nothing can be held against it: "
            f"record it again where the backend cpu is installed"
        )
