"""A worker without a process: the test says what it says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwenimg.cli.serve import dispatcher as module
from qwenimg.cli.serve import journal as journal_module
from qwenimg.cli.serve.dispatcher import Dispatcher
from qwenimg.cli.serve.image_job import ImageJob
from qwenimg.cli.serve.journal import Journal
from qwenimg.cli.serve.metrics import Metrics
from qwenimg.cli.serve.settings import Settings
from qwenimg.cli.serve.training_options import parse_training, training_job
from qwenimg.cli.serve.workers import ServerWorker
from qwenimg.cli.workers.messages import (
    Draw,
    End,
    Finished,
    Halt,
    ModelFacts,
    ModelOpened,
    PictureDrawn,
    Ready,
    Start,
    Stepped,
    ToWorker,
    TrainingStep,
)
from qwenimg.cli.workers.process import Lost
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.jobs.job import InputFiles, Job
from qwenimg.common.pictures.png import encode_png

PNG = encode_png(np.full((2, 2, 3), 200, np.uint8), {"parameters": "a ring"}, None)  # a picture
FILES = ("images", "mask", "mask_alpha", "controls")
SETTINGS = Settings(models={"one": LoadOptions(), "two": LoadOptions()}, queue=2, deadline=600.0)


class FakeWorker(ServerWorker):
    """A worker of a server or a batch."""

    def __init__(self, settings: Start) -> None:
        super().__init__(settings)
        self.starts = 0
        self.task: Draw | None = None  # that it draws
        self.drawn: list[str] = []  # the ids of jobs
        self.halts: list[tuple[str, bool]] = []
        self.closed = False
        self.ends = 0

    def start(self) -> asyncio.Queue[Any]:
        self.starts += 1
        self.state, self.job, self.model, self.task = "loading", None, None, None
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        return self.inbox

    def send(self, message: ToWorker) -> None:
        match message:
            case Draw():
                self.task = message
                self.drawn.append(message.id)
            case Halt():
                self.halts.append((message.id, message.skip))
            case End():
                self.ends += 1

    async def close(self) -> None:
        self.closed = True

    # What the test has it say

    async def say(self, *messages: object) -> None:
        for message in messages:
            self.inbox.put_nowait(message)
        await settle()

    async def get_ready(self, model: str = "one") -> None:
        facts = ModelFacts(name=model, family="toy", defaults={}, options=())
        await self.say(ModelOpened(model=facts, headline="toy"), Ready())

    async def step(self, step: int = 1, steps: int = 4, index: int = 0) -> None:
        assert self.task is not None
        await self.say(Stepped(id=self.task.id, index=index, step=step, steps=steps, seconds=0.1))

    async def picture(self, index: int = 0) -> None:
        assert self.task is not None
        job = self.task.job
        recipe = {"prompt": job.prompt, "seed": job.seeds[index], "width": 8, "height": 8}
        await self.say(PictureDrawn(id=self.task.id, index=index, data=PNG, recipe=recipe, seconds=0.1))

    async def train(self, step: int, steps: int = 10, left: float = 100.0) -> None:
        assert self.task is not None
        await self.say(
            TrainingStep(id=self.task.id, step=step, steps=steps, made=1, loss=1 / step, rate=1e-4, left=left)
        )

    async def finish(self, error: str = "", exit_code: int = 0, *, refused: bool = False) -> None:
        assert self.task is not None
        name, self.task = self.task.id, None
        await self.say(Finished(id=name, error=error, exit_code=exit_code, refused=refused, peak=7))

    async def die(self, code: int = -9, *, is_silent: bool = False) -> None:
        self.task = None
        await self.say(Lost(code, is_silent))


async def settle() -> None:
    """Let every task run as far as it can without news."""
    for _ in range(30):
        await asyncio.sleep(0)


async def at_once(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """In place of `asyncio.to_thread`."""
    return function(*given, **named)


async def unthreaded(thread: object, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """In place of `journal.in_thread`."""
    return function(*given, **named)


@asynccontextmanager
async def dispatching(
    folder: Path, monkeypatch: pytest.MonkeyPatch, **changed: Any
) -> AsyncIterator[tuple[Dispatcher, list[FakeWorker]]]:
    """A dispatcher over fake workers, with a journal in `folder`, and pauses of no time before a worker's new start."""
    monkeypatch.setattr(module, "ServerWorker", FakeWorker)
    monkeypatch.setattr(module, "PAUSES", (0.0,))
    monkeypatch.setattr(module, "AGAIN", 0.0)
    monkeypatch.setattr(module, "EVERY", 0.0)
    monkeypatch.setattr(asyncio, "to_thread", at_once)
    monkeypatch.setattr(journal_module, "in_thread", unthreaded)
    journal, lines = Journal(folder), list[str]()
    dispatcher = Dispatcher(replace(SETTINGS, **changed), journal, Metrics(), lines.append)
    dispatcher.lines = lines  # type: ignore[attr-defined]
    await settle()
    workers: Any = dispatcher.workers
    try:
        yield dispatcher, workers
    finally:
        for job in dispatcher.drawing:
            job.ended.set()
        await dispatcher.close()
        journal.close()


def image_job(prompt: str = "x", seeds: tuple[int, ...] = (1,), **changed: Any) -> ImageJob:
    files = InputFiles(**{name: changed.pop(name) for name in FILES if name in changed})
    spec = Job(options={"prompt": prompt}, seeds=seeds, files=files)
    usual: dict[str, Any] = {"model": "one", "spec": spec, "kind": "images", "deadline": 600.0}
    return ImageJob(**{**usual, **changed})


def training(output: str = "my", **given: Any) -> ImageJob:
    return training_job("one", parse_training({"data": "pets", "output": output, **given}), "/nowhere")
