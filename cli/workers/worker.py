"""A worker, as a server or the driver of a batch uses it."""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import suppress

from qwenimg.cli.workers import process
from qwenimg.cli.workers.channel import START, LeaderChannel
from qwenimg.cli.workers.messages import End, FromWorker, Start, ToWorker
from qwenimg.cli.workers.process import Lost, Process

PROGRAM = "qwenimg.cli.workers.drawing_process"


class Worker:
    """A process that draws on one device. After its end it can be started again."""

    def __init__(self, settings: Start) -> None:
        self.settings = settings
        self._process: Process | None = None
        self._channel: LeaderChannel | None = None

    @property
    def backend(self) -> str:
        return self.settings.backend

    def start(self) -> asyncio.Queue[FromWorker | Lost]:
        """Start the process, and return the queue of its messages, the last of which is Lost. Raises OSError."""
        inbox: asyncio.Queue[FromWorker | Lost] = asyncio.Queue()
        threads = {"OMP_NUM_THREADS": str(self.settings.threads)} if self.settings.threads else {}
        self._process, pipe = process.start(PROGRAM, environment=os.environ | threads)
        self._channel = LeaderChannel(pipe, START)
        self.send(self.settings)
        loop = asyncio.get_running_loop()
        threading.Thread(target=_read, args=(self._process, self._channel, loop, inbox), daemon=True).start()
        return inbox

    def send(self, message: ToWorker) -> None:
        assert self._channel is not None
        self._channel.send(message)

    async def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self.send(End())
            await asyncio.to_thread(process.end, self._process)


def _read(
    child: Process,
    channel: LeaderChannel,
    loop: asyncio.AbstractEventLoop,
    inbox: asyncio.Queue[FromWorker | Lost],
) -> None:
    """Put all messages of a worker into `inbox`, until its end. Runs in a thread."""

    def put(message: FromWorker | Lost) -> None:
        loop.call_soon_threadsafe(inbox.put_nowait, message)

    with suppress(RuntimeError):  # the loop is closed: this process ends
        is_silent = False
        try:
            while True:
                put(channel.receive())
        except TimeoutError:
            is_silent = True
            child.kill()
        except EOFError:
            pass
        code = child.wait()
        channel.close()
        put(Lost(code, is_silent))
