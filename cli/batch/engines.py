"""The engines of a batch, which start its workers. The driver treats all engines alike."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Protocol, TypeAlias

from qwenimg.cli.serve.messages import FromWorker, Settings
from qwenimg.cli.serve.orders import PictureOrder
from qwenimg.cli.serve.workers import Lost, Worker
from qwenimg.common.base.errors import BackendMissing

NAMES = ("local", "ray")


class BatchWorker(Protocol):
    """A process that draws on one device. After its end another one is started in its place."""

    backend: str
    order: PictureOrder | None  # the one in work

    def start(self) -> asyncio.Queue[FromWorker | Lost]:
        """Start the process. Return the queue of its messages, the last of which is Lost."""
        ...

    def draw(self, order: PictureOrder) -> None: ...

    async def close(self) -> None:
        """End the process."""
        ...


MakeWorker: TypeAlias = Callable[[str, Settings], BatchWorker]


def check(name: str) -> None:
    """Raise BackendMissing for an engine that is not installed."""
    if name == "ray" and find_spec("ray") is None:
        raise BackendMissing("--engine ray needs ray; in the clone of qwenimg: pip install '.[ray]' (docs/batch.md)")


@contextmanager
def opened(name: str, settings: Settings) -> Iterator[MakeWorker]:
    """Yield the function that makes the workers of engine `name`. Raises BackendMissing and UsageError."""
    if name == "local":
        yield Worker
        return
    from qwenimg.cli.batch import ray_engine

    with ray_engine.cluster(settings) as make_worker:
        yield make_worker
