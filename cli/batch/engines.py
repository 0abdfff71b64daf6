"""The engines of a batch: ways to start its workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Protocol, TypeAlias

from qwenimg.cli.workers.messages import Draw, FromWorker, Start
from qwenimg.cli.workers.process import Lost
from qwenimg.cli.workers.worker import Worker
from qwenimg.common.base.errors import BackendMissing

NAMES = ("local", "ray")


class BatchWorker(Protocol):
    """A process that draws on one device. After its end it can be started again."""

    @property
    def backend(self) -> str: ...

    def start(self) -> asyncio.Queue[FromWorker | Lost]:
        """Start the process. Return the queue of its messages, the last of which is Lost."""
        ...

    def send(self, message: Draw) -> None: ...

    async def close(self) -> None:
        """End the process."""
        ...


MakeWorker: TypeAlias = Callable[[Start], BatchWorker]


def check(name: str) -> None:
    """Raise BackendMissing for an engine that is not installed."""
    if name == "ray" and find_spec("ray") is None:
        raise BackendMissing("--engine ray needs ray; in the clone of qwenimg: pip install '.[ray]' (docs/batch.md)")


@contextmanager
def opened(name: str, backends: Sequence[str]) -> Iterator[MakeWorker]:
    """Yield the constructor of workers of engine `name`, for these backends. Raises BackendMissing and UsageError."""
    if name == "local":
        yield Worker
        return
    from qwenimg.cli.batch import ray_engine

    with ray_engine.cluster(backends) as make_worker:
        yield make_worker
