"""The upscalers that jobs name by `upscale` and `upscale_with`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qwenimg.common.hub.model_folders import read_folders
from qwenimg.common.hub.network_search import find_upscaler, read_upscaler, upscaling
from qwenimg.common.jobs.image_options import is_enlarged
from qwenimg.common.jobs.job import Job
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.upscaling.network_file import Upscaler
from qwenimg.common.upscaling.record import Enlargement
from qwenimg.common.upscaling.upscaling import Upscaling


class JobUpscalers:
    """The upscalers of the jobs of a run, each opened once; one at a time is in memory."""

    def __init__(self, models_dir: Sequence[Path]) -> None:
        """models_dir: the folders of --models-dir, looked into once a job has an upscaler."""
        self._models_dir = models_dir
        self._places: dict[str | None, Path] = {}
        self._opened: dict[Path, Upscaler] = {}
        self._loaded: dict[Path, Upscaling] = {}

    def check(self, job: Job) -> None:
        """Read the file of a job's upscaler, if it has one, but no weight. Raises UsageError and ModelError."""
        if is_enlarged(job.options):
            self._open(self._find(job))

    def enlargement(self, job: Job, runtime: Runtime) -> Enlargement | None:
        """Return how the image of a job is made larger, on the engine of a model's `runtime`; None without an upscaler.
        Raises UsageError, ModelError and NumericsError."""
        if not is_enlarged(job.options):
            return None
        path = self._find(job)
        upscaler, by = self._open(path), job.get("upscale")
        if path not in self._loaded:
            self.free()
            self._loaded[path] = upscaling(upscaler, runtime.engine, "fp32", runtime.max_memory, runtime.notify)
        for other in self._loaded.keys() - {path}:
            self._loaded[other].residents.free()
        loaded = self._loaded[path]
        loaded.runtime.interrupt = runtime.interrupt
        by = upscaler.scale if by is None else by
        loaded.passes(by)
        return Enlargement(upscaling=loaded, by=by)

    def _find(self, job: Job) -> Path:
        name = job.get("upscale_with")
        if name not in self._places:
            self._places[name] = find_upscaler(name, read_folders(self._models_dir), "--upscale-with")
        return self._places[name]

    def _open(self, path: Path) -> Upscaler:
        if path not in self._opened:
            self._opened[path] = read_upscaler(path)
        return self._opened[path]

    def free(self) -> None:
        """Free the memory of every upscaler."""
        for one in self._loaded.values():
            one.residents.free()

    def close(self) -> None:
        self.free()
        for one in self._opened.values():
            one.close()
