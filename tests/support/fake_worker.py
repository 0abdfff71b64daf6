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
from qwenimg.cli.serve.journal import Journal
from qwenimg.cli.serve.messages import Finished, ModelFacts, ModelOpened, PictureDrawn, Ready, Settings, Stepped
from qwenimg.cli.serve.metrics import Metrics
from qwenimg.cli.serve.orders import PictureOrder
from qwenimg.cli.serve.workers import Lost
from qwenimg.common.families.opening import Opening
from qwenimg.common.jobs.job import InputFiles, Job
from qwenimg.common.pictures.png import encode_png

PNG = encode_png(np.full((2, 2, 3), 200, np.uint8), {"parameters": "a ring"}, None)  # a picture
FILES = ("images", "mask", "mask_alpha", "controls")
SETTINGS = Settings(models={"one": Opening(), "two": Opening()}, queue=2, deadline=600.0)


class FakeWorker:
    def __init__(self, backend: str, settings: Settings) -> None:
        self.backend, self.state, self.headline, self.peak = backend, "loading", "", 0
        self.order: PictureOrder | None = None
        self.model: ModelFacts | None = None
        self.starts = 0
        self.drawn: list[PictureOrder] = []
        self.halts: list[tuple[str, bool]] = []
        self.closed = False
        self.ends = 0

    def start(self) -> asyncio.Queue[Any]:
        self.starts += 1
        self.state, self.order, self.model = "loading", None, None
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        return self.inbox

    def draw(self, order: PictureOrder) -> None:
        self.order = order
        self.drawn.append(order)

    def halt(self, order: PictureOrder, *, skip: bool = False) -> None:
        self.halts.append((order.id, skip))

    def end(self) -> None:
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
        assert self.order is not None
        await self.say(Stepped(order=self.order.id, index=index, step=step, steps=steps, seconds=0.1))

    async def picture(self, index: int = 0) -> None:
        assert self.order is not None
        recipe = {"prompt": self.order.job.prompt, "seed": self.order.job.seeds[index], "width": 8, "height": 8}
        await self.say(PictureDrawn(order=self.order.id, index=index, data=PNG, recipe=recipe, seconds=0.1))

    async def finish(self, error: str = "", exit_code: int = 0, *, refused: bool = False) -> None:
        assert self.order is not None
        await self.say(Finished(order=self.order.id, error=error, exit_code=exit_code, refused=refused, peak=7))

    async def die(self, code: int = -9) -> None:
        await self.say(Lost(code))


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
    monkeypatch.setattr(module, "Worker", FakeWorker)
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
        for order in dispatcher.drawing:
            order.ended.set()
        await dispatcher.close()
        journal.close()


def order(prompt: str = "x", seeds: tuple[int, ...] = (1,), **changed: Any) -> PictureOrder:
    files = InputFiles(**{name: changed.pop(name) for name in FILES if name in changed})
    job = Job(options={"prompt": prompt}, seeds=seeds, files=files)
    usual: dict[str, Any] = {"model": "one", "job": job, "kind": "images", "deadline": 600.0}
    return PictureOrder(**{**usual, **changed})
