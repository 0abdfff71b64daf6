"""The files of a running training: checkpoints, and the loss as a table.

A checkpoint is one safetensors file, written next to the old one, synced and renamed: kill -9 at any moment leaves a
whole one. It holds parameters, their average and the optimizer's moments; its header identifies its run. It needs no
states of random generators, since each step makes its own from (seed, step)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from qwenimg.backends.torch.training.precision import LossScaler
from qwenimg.common.base.atomic_files import write_atomic
from qwenimg.common.base.config import parse
from qwenimg.common.base.errors import NumericsError
from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.text import clean
from qwenimg.common.formats.stored import Header
from qwenimg.common.training.config import TrainConfig
from qwenimg.common.training.files import COLUMNS, FORMAT, State, open_checkpoint, read_table, run_of


@dataclass
class Progress:
    """The state of a run: the number of steps done, and the loss scaler."""

    step: int
    scaler: LossScaler


# Checkpoints


def check_finite(step: int, tensors: Mapping[str, Tensor]) -> None:
    """Raise NumericsError that names the first of `tensors` with a value that is not finite."""
    for name, value in tensors.items():
        if not is_finite(value):
            raise NumericsError(f"step {step}: {name} is not finite, and is not written")


def is_finite(x: Tensor) -> bool:
    """Return whether all values are finite, without the memory of a mask of x."""
    return x.numel() == 0 or bool(torch.isfinite(torch.stack(torch.aminmax(x.detach()))).all())


def save_checkpoint(path: Path, config: TrainConfig, progress: Progress, tensors: Mapping[str, Tensor]) -> None:
    """Save a checkpoint. Raises NumericsError, and DoesNotFit for a full disk; the old checkpoint stays then."""
    check_finite(progress.step, tensors)
    header = {"step": progress.step, "run": run_of(config), "scaler": asdict(progress.scaler)}
    values = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomic(path, save(values, metadata={FORMAT: json.dumps(header)}), overwrite=True)


def load_checkpoint(path: Path, config: TrainConfig, tensors: Mapping[str, Tensor]) -> Progress:
    """Copy the checkpoint's values into `tensors`, all of them or none. Raises ModelError."""
    state = open_checkpoint(path, config)
    with closing(state.header.file):
        progress = Progress(state.step, _scaler(path, state))
        _check_tensors(path, state.header, tensors)
        values = {name: _read(state, name) for name in tensors}
        state.header.file.check_unchanged()
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(values[name])
    return progress


def _scaler(path: Path, state: State) -> LossScaler:
    if state.scaler.keys() != {field.name for field in fields(LossScaler)}:
        raise bad(path, f"its loss scaler has fields {clean(', '.join(state.scaler), 80)}; move it away")
    return parse(LossScaler, state.scaler, source=path)


def _check_tensors(path: Path, header: Header, tensors: Mapping[str, Tensor]) -> None:
    """Raise ModelError unless the checkpoint has the names, dtypes and shapes of `tensors`."""
    missing, extra = tensors.keys() - header.tensors.keys(), header.tensors.keys() - tensors.keys()
    for what, names in (("lacks", missing), ("holds unknown", extra)):
        if names:
            raise bad(path, f"{what} tensor '{clean(min(names), 80)}': use the --out of its own run, or move it away")
    for name, tensor in tensors.items():
        stored = header.tensors[name]
        if (stored.dtype, stored.shape) != ("F32", tuple(tensor.shape)):
            actual = f"{stored.dtype} {clean(list(stored.shape), 60)}, expected F32 {list(tensor.shape)}"
            raise bad(path, f"tensor '{clean(name, 80)}' is {actual}: use the --out of its own run, or move it away")


def _read(state: State, name: str) -> Tensor:
    file, stored = state.header.file, state.header.tensors[name]
    value = torch.frombuffer(bytearray(file.read(stored.begin, stored.end - stored.begin)), dtype=torch.float32)
    if fault := _fault(name, value, state.step):
        raise bad(file.path, f"tensor '{clean(name, 80)}' {fault}; move it away and start again, or from a copy")
    return value.view(stored.shape)


def _fault(name: str, value: Tensor, steps: int) -> str | None:
    """Return a fault that no run can have written: values that are not finite or not possible for this name; else
    None."""
    if not is_finite(value):
        return f"has {int((~torch.isfinite(value)).sum())} non-finite values"
    least, most = (float(x) for x in torch.aminmax(value))
    if name.startswith("exp_avg_sq.") and least < 0:
        return f"is a mean of squares and reaches {least:.3g}"
    if name.startswith("step.") and not (0 <= least <= most <= steps and most == round(most)):
        return f"counts {most:g} steps of the run's {steps}"
    return None


# The loss


class Log:
    """Rows of numbers; `write` replaces the table `.csv`."""

    def __init__(self, stem: Path, start: int):
        self.stem = stem
        self.rows = read_table(stem.with_suffix(".csv"), start) if start else []

    def row(self, **figures: object) -> None:
        self.rows.append(",".join(str(figures[name]) for name in COLUMNS))

    def write(self) -> None:
        text = "\n".join([",".join(COLUMNS), *self.rows]) + "\n"
        write_atomic(self.stem.with_suffix(".csv"), text.encode(), overwrite=True)
