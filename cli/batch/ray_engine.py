"""Workers that Ray starts, on this machine or on the machines of a cluster.

An actor is never restarted by Ray: one that restarts refuses calls meanwhile, and the picture that ended it would be
tried without end. The driver starts a new one, as it does with a local process.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from qwenimg.cli.signals import STOPPING
from qwenimg.cli.workers.messages import Draw, FromWorker, Start, Stepped
from qwenimg.cli.workers.process import Lost
from qwenimg.common.base.errors import BackendMissing, UsageError

STORE = 200 << 20  # bytes of Ray's store of objects on this machine: a finished picture of each worker
ENDED = 1  # the exit code of an actor that has ended: Ray does not say which signal it was


class Drawer:
    """The actor: a drawing process whose messages are returned by its methods."""

    def __init__(self, start: Start) -> None:
        """Create a worker that may open the models of `start`."""
        from qwenimg.cli.workers.drawing_process import DrawingProcess

        self.messages: list[FromWorker] = []
        self.process = DrawingProcess(self, start)

    def send(self, message: FromWorker) -> None:
        if not isinstance(message, Stepped):
            self.messages.append(message)

    def begin(self) -> list[FromWorker]:
        """Open the first model. Return the worker's messages, the last of which is Ready or Unusable."""
        self.process.begin()
        return self._taken()

    def draw(self, task: Draw) -> list[FromWorker]:
        """Draw. Return the worker's messages, the last of which is Finished."""
        self.process.draw(task)
        return self._taken()

    def _taken(self) -> list[FromWorker]:
        messages, self.messages = self.messages, []
        return messages


class RayWorker:
    """An actor as a worker of the driver. After its end `start` makes a new one."""

    def __init__(self, settings: Start) -> None:
        self.settings = settings
        self._actor: Any = None
        self._inbox: asyncio.Queue[FromWorker | Lost] = asyncio.Queue()
        self._calls: set[asyncio.Task[None]] = set()

    @property
    def backend(self) -> str:
        return self.settings.backend

    def start(self) -> asyncio.Queue[FromWorker | Lost]:
        import ray

        threads = self.settings.threads
        actor = ray.remote(
            max_restarts=0,
            max_task_retries=0,
            num_cpus=0,  # a batch that asks for more workers than cores still has all of them
            num_gpus=int(self.backend == "cuda"),
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(threads)}} if threads else {},
            scheduling_strategy="SPREAD",
        )(Drawer)
        self._inbox, self._actor = asyncio.Queue(), actor.remote(self.settings)
        self._call(self._actor.begin.remote())
        return self._inbox

    def send(self, message: Draw) -> None:
        self._call(self._actor.draw.remote(message))

    async def close(self) -> None:
        import ray

        if self._actor is not None:
            with suppress(Exception):  # it has ended
                ray.kill(self._actor, no_restart=True)
        for call in list(self._calls):
            call.cancel()

    def _call(self, result: Any) -> None:
        """Put the messages of a call into the inbox when they arrive, or Lost if the actor has ended."""

        async def received() -> None:
            try:
                for message in await result:
                    self._inbox.put_nowait(message)
            except ray_errors():
                self._inbox.put_nowait(Lost(ENDED))

        task = asyncio.get_running_loop().create_task(received())
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)


def ray_errors() -> type[Exception]:
    """Return the base class of Ray's errors: the actor or its machine is lost, or a call failed."""
    import ray

    return ray.exceptions.RayError  # type: ignore[no-any-return]


@contextmanager
def cluster(backends: Sequence[str]) -> Iterator[Callable[[Start], RayWorker]]:
    """Connect to the cluster of RAY_ADDRESS, or start Ray on this machine, for the length of the context. Yield the
    constructor of workers on it. Raises BackendMissing if Ray does not start, and UsageError for more workers than
    GPUs."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    here = {"include_dashboard": False, "_node_ip_address": "127.0.0.1", "object_store_memory": STORE}
    handlers = {number: signal.getsignal(number) for number in STOPPING}
    try:
        ray.init(**quiet, **({} if os.environ.get("RAY_ADDRESS") else here))
    except (ConnectionError, ValueError, RuntimeError) as error:
        line = " ".join(str(error).split())[:120]
        raise BackendMissing(f"Ray does not start: {line}") from None
    finally:
        for number, handler in handlers.items():  # Ray has its own, which raise in the main thread
            signal.signal(number, handler)
    try:
        gpus = int(ray.cluster_resources().get("GPU", 0))
        auto = "cuda" if gpus else "auto"
        check([auto if backend == "auto" else backend for backend in backends], gpus)
        yield lambda start: RayWorker(replace(start, backend=auto if start.backend == "auto" else start.backend))
    finally:
        ray.shutdown()


def check(backends: Sequence[str], gpus: int) -> None:
    """Raise UsageError for more GPU workers than the cluster has GPUs: they would wait for ever."""
    for backend in backends:
        if ":" in backend:
            raise UsageError(f"--backend {backend}: Ray chooses the GPU of each worker; give --backend cuda")
    if (wanted := backends.count("cuda")) > gpus:
        raise UsageError(f"--workers {wanted}: this Ray cluster has {gpus} GPUs; give as many, or --backend cpu")
