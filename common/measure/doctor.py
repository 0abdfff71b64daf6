"""The report of `qwenimg doctor` about this machine: measurements of one backend, and the choice of `--preset auto`."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qwenimg.common.base import hf_cache
from qwenimg.common.base.amounts import size_text
from qwenimg.common.base.text import aligned
from qwenimg.common.base.version import __version__
from qwenimg.common.families import catalog, registry
from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.measure.exactness import LIMITS, Measured, measure
from qwenimg.common.memory.memory import free_ram
from qwenimg.common.precision import presets
from qwenimg.common.precision.precision import DenoiserKind, short
from qwenimg.common.precision.presets import Choice
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.engine import Engine
from qwenimg.common.runtime.paper import OnPaper


@dataclass(frozen=True, kw_only=True)
class Auto:
    """The choice of `--preset auto` for a model."""

    model: str
    choice: Choice


@dataclass(frozen=True, kw_only=True)
class DoctorReport:
    versions: dict[str, str]
    system: str
    backend: str
    device: str
    threads: int
    free_memory: int  # bytes, on the device
    free_ram: int
    cache: str
    free_disk: int | None  # bytes on the disk of the cache; None if the system does not say
    dtypes: list[Measured]
    auto: list[Auto]

    @property
    def float32(self) -> Measured:
        return next(one for one in self.dtypes if one.dtype == "float32")

    def as_json(self) -> dict[str, Any]:
        report = asdict(self)
        for row, one in zip(report["dtypes"], self.dtypes, strict=True):
            row |= {"ok": not one.faults, "verdict": one.verdict()}
        report["auto"] = [{"model": auto.model, **asdict(auto.choice)} for auto in self.auto]
        return report


def examine(engine: Engine, opened: tuple[str, DenoiserKind, Checkpoint] | None) -> DoctorReport:
    """Measure `engine` for a second or two and return the report.

    opened: the name, kind and files of a model; without one, `auto` has a choice for each family's first known
    model."""
    free, cache = engine.free_memory(), hf_cache.cache_folder()
    if opened is None:
        first = {known.family: known for known in reversed([*catalog.KNOWN.values()]) if registry.published(known)}
        auto = [_published(known, engine, free) for known in reversed([*first.values()])]
    else:
        name, kind, checkpoint = opened
        auto = [Auto(model=name, choice=_choice(kind, engine, checkpoint.largest, free))]
    return DoctorReport(
        versions={"qwenimg": __version__, "python": platform.python_version(), "numpy": np.__version__}
        | engine.versions(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        backend=engine.name,
        device=engine.device,
        threads=_threads(),
        free_memory=free,
        free_ram=free_ram(),
        cache=str(cache),
        free_disk=_free_disk(cache),
        dtypes=[measure(engine, dtype) for dtype in LIMITS],
        auto=auto,
    )


def lines(report: DoctorReport) -> list[str]:
    """Return the report as text."""
    disk = "free space unknown" if report.free_disk is None else f"{size_text(report.free_disk)} free"
    rows: list[tuple[str, ...]] = [("", "matmul", "conv2d", "attention", "product", "")]
    for one in report.dtypes:
        errors = (f"{error:.1e}" for error in one.errors.values())
        rows.append((short(one.dtype), *errors, f"{one.flops / 1e9:,.0f} GFLOP/s", one.verdict()))
    return [
        ", ".join(f"{name} {version}" for name, version in report.versions.items()),
        f"system: {report.system}, {report.threads} CPU threads, {size_text(report.free_ram)} of memory free",
        f"backend: {report.backend} on {report.device}, {size_text(report.free_memory)} free",
        f"cache of models: {report.cache}, {disk}",
        "relative error against float64, and speed:",
        *aligned(rows),
        *(f"--preset auto, {auto.model}: {auto.choice.precision}, since {auto.choice.reason}" for auto in report.auto),
    ]


def on_paper(engine: Engine, report: DoctorReport) -> OnPaper:
    """Return `engine` in the form that plans take, with its measured rates."""
    free = report.free_memory
    return OnPaper(name=engine.name, facts=engine.facts, workspace=engine.workspace, free=free, rate=engine.rate)


def _choice(kind: DenoiserKind, engine: Engine, weights: Any, free: int) -> Choice:
    return presets.choose(presets.AUTO, presets.AUTO, kind, engine.facts, weights, free)


def _published(known: KnownModel, engine: Engine, free: int) -> Auto:
    """Return the choice for a known model as it is published."""
    opened = registry.published(known)
    assert opened is not None, known.name
    return Auto(model=known.name, choice=_choice(opened.family.precision, engine, opened.checkpoint.largest, free))


def _threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _free_disk(folder: Path) -> int | None:
    """Return the free bytes of the disk that `folder` is on or would be made on, or None."""
    for place in (folder, *folder.parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:
            continue
    return None
