"""What a run leaves on the disk while it goes: checkpoints, and the loss as a table and a curve.

A checkpoint is one safetensors file, written beside the old one, synced and renamed: kill -9 at any moment leaves a
whole one. It holds parameters, their average and the optimiser's moments; its header says which run it belongs to.
There are no states of random generators to keep, since each step makes its own from (seed, step).
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from qwenimg.backends.torch.training.precision import LossScaler
from qwenimg.common.errors import ModelError, clean
from qwenimg.common.files import write_atomic
from qwenimg.common.training import TrainConfig

FORMAT = "qwenimg-training-1"
SAME = ("stage", "batch", "sizes", "seed", "accumulate", "simple", "size")
"""Options that a resumed run must have in common with its checkpoint; steps and precision may change."""
COLUMNS = ("step", "loss", "rate", "gradient", "dtype", "scale", "growths", "back_offs", "images_per_second")


@dataclass
class Progress:
    """Where a run is: the number of steps done, and the loss scaler's state."""

    step: int
    scaler: LossScaler


# Checkpoints


def save_checkpoint(path: Path, config: TrainConfig, progress: Progress, tensors: Mapping[str, Tensor]) -> None:
    """Raises DoesNotFit where the disk is full; the old checkpoint is then still there."""
    header = {"step": progress.step, "run": _run(config), "scaler": asdict(progress.scaler)}
    values = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomic(path, save(values, metadata={FORMAT: json.dumps(header)}), overwrite=True)


def load_checkpoint(path: Path, config: TrainConfig, tensors: Mapping[str, Tensor]) -> Progress:
    """Copies the checkpoint's values into `tensors`, all of them or none. Raises ModelError."""
    try:
        with safe_open(path, "pt") as file:
            header = _header(path, file.metadata() or {}, config)
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            progress = Progress(header["step"], _scaler(header["scaler"]))
    except FileNotFoundError:
        raise ModelError(f"{clean(path)}: no checkpoint here to resume; start without --resume") from None
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{clean(path)}: is not a whole checkpoint: {clean(error, 80)}; move it away") from None
    if {n: tuple(t.shape) for n, t in found.items()} != {n: tuple(t.shape) for n, t in tensors.items()}:
        raise ModelError(f"{clean(path)}: holds other tensors than this model's; use the --out of its own run")
    for name, tensor in tensors.items():
        with torch.no_grad():
            tensor.copy_(found[name])
    return progress


def _run(config: TrainConfig) -> dict[str, Any]:
    values = asdict(config)
    return json.loads(json.dumps({name: values[name] for name in SAME}))


def _header(path: Path, metadata: Mapping[str, str], config: TrainConfig) -> dict[str, Any]:
    if FORMAT not in metadata:
        raise ModelError(f"{clean(path)}: is not a checkpoint of `qwenimg train`; move it away or choose another --out")
    header: dict[str, Any] = json.loads(metadata[FORMAT])
    theirs, ours = header["run"], _run(config)
    different = [name for name in SAME if theirs.get(name) != ours[name]]
    if different:
        name = different[0]
        found = f"{name} was {clean(theirs.get(name), 60)}, now it is {clean(ours[name], 60)}"
        raise ModelError(f"{clean(path)}: is of another run: {found}; give the same options, or another --out")
    return header


def _scaler(values: dict[str, Any]) -> LossScaler:
    return LossScaler(**{field.name: values[field.name] for field in fields(LossScaler)})


# The loss


class Log:
    """Rows of figures; `write` replaces the table `.csv` and the curve `.png`."""

    def __init__(self, stem: Path, start: int):
        self.stem = stem
        self.rows: list[list[str]] = []
        table = stem.with_suffix(".csv")
        if start and table.exists():
            lines = table.read_text(encoding="utf-8").splitlines()[1:]
            rows = [line.split(",") for line in lines]
            self.rows = [row for row in rows if len(row) == len(COLUMNS) and int(row[0]) <= start]

    def row(self, **figures: object) -> None:
        self.rows.append([str(figures[name]) for name in COLUMNS])

    def write(self) -> None:
        lines = [",".join(row) for row in [list(COLUMNS), *self.rows]]
        write_atomic(self.stem.with_suffix(".csv"), ("\n".join(lines) + "\n").encode(), overwrite=True)
        points = [(float(row[0]), float(row[1])) for row in self.rows]
        if len(points) > 1:
            write_atomic(self.stem.with_suffix(".png"), curve(points), overwrite=True)


def curve(points: list[tuple[float, float]], width: int = 640, height: int = 400) -> bytes:
    """A PNG of loss over steps; the loss on a logarithmic axis, with its ends written on it."""
    import math

    from PIL import Image, ImageDraw

    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    left, right, top, bottom = 70, width - 20, 20, height - 40
    steps = [step for step, _ in points]
    levels = [math.log(max(loss, 1e-12)) for _, loss in points]
    low, high = min(levels), max(max(levels), min(levels) + 1e-6)
    last = max(steps[-1], 1)

    def place(step: float, level: float) -> tuple[float, float]:
        return left + (right - left) * step / last, bottom - (bottom - top) * (level - low) / (high - low)

    draw.rectangle((left, top, right, bottom), outline="gray")
    draw.line([place(step, level) for step, level in zip(steps, levels, strict=True)], fill=(30, 70, 220), width=2)
    for level in (low, (low + high) / 2, high):
        draw.text((8, place(0, level)[1] - 6), f"{math.exp(level):.4g}", fill="black")
    draw.text((left, bottom + 10), "0", fill="black")
    draw.text((right - 60, bottom + 10), f"step {int(last)}", fill="black")
    draw.text((left + 8, top + 4), "loss, logarithmic", fill="black")
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()
