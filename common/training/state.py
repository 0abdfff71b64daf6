"""Checkpoints of a training run: parameters, optimizer's state, step and loss scaler, whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.atomic_files import write_atomic
from qwenimg.common.base.config import parse
from qwenimg.common.base.errors import NumericsError
from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.shape import Shape
from qwenimg.common.base.text import clean
from qwenimg.common.formats.safetensors import entry, head
from qwenimg.common.formats.stored import Header
from qwenimg.common.training.files import FORMAT, RunOptions, State, open_checkpoint, run_of
from qwenimg.common.training.scaler import LossScaler

Values = Mapping[str, NDArray[np.float32]]


@dataclass
class Progress:
    """The state of a run: the number of steps done, and the loss scaler."""

    step: int
    scaler: LossScaler


def check_finite(step: int, tensors: Values) -> None:
    """Raise NumericsError that names the first of `tensors` with a value that is not finite."""
    for name, value in tensors.items():
        if not np.isfinite(value).all():
            raise NumericsError(f"step {step}: {name} is not finite, and is not written")


def save_checkpoint(path: Path, config: RunOptions, progress: Progress, tensors: Values) -> None:
    """Save a checkpoint of finite tensors. Raises DoesNotFit for a full disk; the old checkpoint stays then."""
    header = {"step": progress.step, "run": run_of(config), "scaler": asdict(progress.scaler)}
    write_atomic(path, _encoded(tensors, {FORMAT: json.dumps(header)}), overwrite=True)


def _encoded(tensors: Values, metadata: Mapping[str, str]) -> bytes:
    """Return a safetensors file of float32 tensors."""
    entries, end = {}, 0
    for name, value in tensors.items():
        entries[name] = entry("F32", value.shape, end, end + value.nbytes)
        end += value.nbytes
    parts = (np.ascontiguousarray(value, "<f4").tobytes() for value in tensors.values())
    return b"".join([head(entries, metadata), *parts])


def load_checkpoint(path: Path, config: RunOptions, shapes: Mapping[str, Shape]) -> tuple[Progress, Values]:
    """Return the checkpoint's progress and its tensors, which have the names and `shapes` of the run's. Raises
    ModelError."""
    state = open_checkpoint(path, config)
    with closing(state.header.file):
        progress = Progress(state.step, _scaler(path, state))
        _check_tensors(path, state.header, shapes)
        values = {name: _read(state, name) for name in shapes}
        state.header.file.check_unchanged()
    return progress, values


def _scaler(path: Path, state: State) -> LossScaler:
    if state.scaler.keys() != {field.name for field in fields(LossScaler)}:
        raise bad(path, f"its loss scaler has fields {clean(', '.join(state.scaler), 80)}; move it away")
    return parse(LossScaler, state.scaler, source=path)


def _check_tensors(path: Path, header: Header, shapes: Mapping[str, Shape]) -> None:
    """Raise ModelError unless the checkpoint has these tensors."""
    missing, extra = shapes.keys() - header.tensors.keys(), header.tensors.keys() - shapes.keys()
    for what, names in (("lacks", missing), ("holds unknown", extra)):
        if names:
            raise bad(path, f"{what} tensor '{clean(min(names), 80)}': use the --out of its own run, or move it away")
    for name, shape in shapes.items():
        stored = header.tensors[name]
        if (stored.dtype, stored.shape) != ("F32", tuple(shape)):
            actual = f"{stored.dtype} {clean(list(stored.shape), 60)}, expected F32 {list(shape)}"
            raise bad(path, f"tensor '{clean(name, 80)}' is {actual}: use the --out of its own run, or move it away")


def _read(state: State, name: str) -> NDArray[np.float32]:
    file, stored = state.header.file, state.header.tensors[name]
    value = np.frombuffer(bytearray(file.read(stored.begin, stored.end - stored.begin)), "<f4").astype(np.float32)
    if fault := _fault(name, value):
        raise bad(file.path, f"tensor '{clean(name, 80)}' {fault}; move it away and start again, or from a copy")
    return value.reshape(stored.shape)


def _fault(name: str, value: NDArray[np.float32]) -> str | None:
    """Return a fault that no run can have written: values that are not finite or not possible for this name; else
    None."""
    if not np.isfinite(value).all():
        return f"has {int((~np.isfinite(value)).sum())} non-finite values"
    least, most = (float(value.min()), float(value.max())) if value.size else (0.0, 0.0)
    if name.startswith("exp_avg_sq.") and least < 0:
        return f"is a mean of squares and reaches {least:.3g}"
    if name.startswith("largest.") and least < 0:
        return f"is the largest of some sizes and reaches {least:.3g}"
    if name.startswith("codes.") and not (least >= 0 and most < 2**24 and (value == np.floor(value)).all()):
        return f"has codes of {least:g} to {most:g}, which are not whole numbers of 24 bits"
    return None
