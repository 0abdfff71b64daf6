"""The server's end of a worker: the process, and the thread that reads from its pipe."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import queue
import subprocess
import sys
import threading
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal

from qwenimg.cli.serve.messages import End, FromWorker, Halt, ModelFacts, Settings, Start, ToWorker
from qwenimg.cli.serve.orders import PictureOrder
from qwenimg.common.base.safe_files import closed_on_error

_CODE = "import sys; from qwenimg.cli.serve.drawing_process import main; main(int(sys.argv[1]))"

_GRACE = 5.0  # seconds for a worker to end by itself


@dataclass(frozen=True)
class Lost:
    """The end of a worker's process."""

    code: int  # negative: minus the number of the signal that ended it


class Worker:
    """A process that draws, on one device. It is started anew after its end by who reads its messages."""

    def __init__(self, backend: str, settings: Settings) -> None:
        self.backend, self._threads = backend, settings.threads
        self.state: Literal["loading", "ready", "down"] = "loading"
        self.order: PictureOrder | None = None  # that it draws, even if that has ended for its client
        self.model: ModelFacts | None = None  # the open one
        self.headline = ""
        self.peak = 0  # bytes
        self._start = Start(models=settings.models, backend=backend)
        self._outbox: queue.SimpleQueue[ToWorker | None] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> asyncio.Queue[FromWorker | Lost]:
        """Start the process, and return the queue that gets all that it says. The last is Lost. Raises OSError."""
        inbox: asyncio.Queue[FromWorker | Lost] = asyncio.Queue()
        ours, theirs = multiprocessing.Pipe()
        descriptor = theirs.fileno()
        command = [sys.executable, "-c", _CODE, str(descriptor)]
        environment = os.environ | ({"OMP_NUM_THREADS": str(self._threads)} if self._threads else {})
        self.state, self.order, self.model = "loading", None, None
        with closing(theirs), closed_on_error(ours):
            self._process = process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=(descriptor,), env=environment
            )
        self._outbox = queue.SimpleQueue()
        self._send(self._start)
        writer = threading.Thread(target=_write, args=(ours, self._outbox), daemon=True)
        writer.start()
        news = _News(asyncio.get_running_loop(), inbox)
        threading.Thread(target=_read, args=(ours, process, news, self._outbox, writer), daemon=True).start()
        return inbox

    def draw(self, order: PictureOrder) -> None:
        self.order = order
        self._send(order.draw())

    def halt(self, order: PictureOrder, *, skip: bool = False) -> None:
        self._send(Halt(order=order.id, skip=skip))

    def end(self) -> None:
        """Have the process end by itself."""
        self._send(End())

    async def close(self) -> None:
        """End the process. A kill while a GPU works may leak its memory, so it is the last resort."""
        if self._process is None:
            return
        self.end()
        try:
            await asyncio.to_thread(self._process.wait, _GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _send(self, message: ToWorker) -> None:
        assert self._outbox is not None
        self._outbox.put(message)


def _write(pipe: Connection, outbox: queue.SimpleQueue[ToWorker | None]) -> None:
    """Send all of `outbox` to a worker, in a thread: one that does not read, as a stopped one, stops nobody else."""
    with suppress(OSError):  # it has ended, and Lost will say so
        while (message := outbox.get()) is not None:
            pipe.send(message)


def _read(
    pipe: Connection,
    process: subprocess.Popen[bytes],
    news: _News,
    outbox: queue.SimpleQueue[ToWorker | None],
    writer: threading.Thread,
) -> None:
    """Put all that a worker says into `news`, until its end."""
    with suppress(RuntimeError):  # the loop is closed: the server has ended
        try:
            while True:
                news.put(pipe.recv())
        except (EOFError, OSError):
            outbox.put(None)
            writer.join()
            pipe.close()
            news.put(Lost(process.wait()))


@dataclass(frozen=True)
class _News:
    """The inbox of a worker, for a thread."""

    loop: asyncio.AbstractEventLoop
    inbox: asyncio.Queue[FromWorker | Lost]

    def put(self, message: FromWorker | Lost) -> None:
        self.loop.call_soon_threadsafe(self.inbox.put_nowait, message)
