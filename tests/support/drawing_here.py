"""A server's drawing process, run in the process of a test."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from qwenimg.cli.workers.drawing_process import DrawingProcess
from qwenimg.cli.workers.messages import FromWorker, Start
from qwenimg.common.families.load_options import LoadOptions


def drawing(folder: Path, **more: Any) -> tuple[DrawingProcess, list[FromWorker]]:
    """Return one on the CPU with the model of `folder`, called "tiny", and the list of all that it sends. more:
    options of opening the model."""
    sent: list[FromWorker] = []
    models = {"tiny": LoadOptions(model=str(folder), backend="cpu", **more)}
    return DrawingProcess(SimpleNamespace(send=sent.append), Start(models=models)), sent
