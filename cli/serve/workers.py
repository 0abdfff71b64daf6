"""A worker with its state for the dispatcher."""

from __future__ import annotations

import asyncio
from typing import Literal

from qwenimg.cli.serve.image_job import ImageJob
from qwenimg.cli.workers.messages import End, FromWorker, Halt, ModelFacts, Start
from qwenimg.cli.workers.process import Lost
from qwenimg.cli.workers.worker import Worker


class ServerWorker(Worker):
    """A worker of the server."""

    def __init__(self, settings: Start) -> None:
        super().__init__(settings)
        self.state: Literal["loading", "ready", "down"] = "loading"
        self.job: ImageJob | None = None  # that it draws, even if that has ended for its client
        self.model: ModelFacts | None = None  # the open one
        self.headline = ""
        self.peak = 0  # bytes

    def start(self) -> asyncio.Queue[FromWorker | Lost]:
        self.state, self.job, self.model = "loading", None, None
        return super().start()

    def draw(self, job: ImageJob) -> None:
        self.job = job
        self.send(job.message())

    def halt(self, job: ImageJob, *, skip: bool = False) -> None:
        self.send(Halt(id=job.id, skip=skip))

    def end(self) -> None:
        """Make the process end by itself."""
        self.send(End())
