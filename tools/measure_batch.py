"""The most pictures a second that the driver of a batch takes from workers that draw nothing and answer at once.

    python tools/measure_batch.py --pictures 2000 --workers 64 --bytes 2000000
    python tools/measure_batch.py --engine local --workers 8        # processes, as of --engine local
    python tools/measure_batch.py --engine ray --workers 8          # actors

Without an engine the workers are objects of the driver's own process: what it takes is then the driver's alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qwenimg.cli.batch import ray_engine
from qwenimg.cli.batch.driver import Driver
from qwenimg.cli.batch.engines import MakeWorker
from qwenimg.cli.batch.record import BatchJournal
from qwenimg.cli.batch.tasks import BatchTask
from qwenimg.cli.serve import workers as processes
from qwenimg.cli.serve.messages import Draw, Finished, PictureDrawn, Ready, Settings
from qwenimg.cli.serve.orders import PictureOrder
from qwenimg.common.families.opening import Opening
from qwenimg.common.jobs.job import Job

_PROCESS = """\
import sys
from multiprocessing.connection import Connection
from qwenimg.cli.serve.messages import Draw, Finished, PictureDrawn, Ready

pipe, data = Connection(int(sys.argv[1])), bytes({bytes})
pipe.recv()
pipe.send(Ready())
while isinstance(order := pipe.recv(), Draw):
    pipe.send(PictureDrawn(order=order.order, index=0, data=data, recipe={{}}, seconds=0.1))
    pipe.send(Finished(order=order.order))
"""


class IdleWorker:
    """A worker without a process, which has a picture of `size` bytes at once."""

    size = 0

    def __init__(self, backend: str, settings: Settings) -> None:
        self.backend, self.data = backend, bytes(self.size)
        self.order: PictureOrder | None = None
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()

    def start(self) -> asyncio.Queue[Any]:
        self.inbox.put_nowait(Ready())
        return self.inbox

    def draw(self, order: PictureOrder) -> None:
        self.order = order
        self.inbox.put_nowait(PictureDrawn(order=order.id, index=0, data=self.data, recipe={}, seconds=0.1))
        self.inbox.put_nowait(Finished(order=order.id))

    async def close(self) -> None: ...


@contextlib.contextmanager
def opened(engine: str, settings: Settings, size: int) -> Iterator[MakeWorker]:
    """Yield the function that makes workers of `engine` that draw nothing."""
    if engine == "none":
        IdleWorker.size = size
        yield IdleWorker
    elif engine == "local":
        processes._CODE = _PROCESS.format(bytes=size)
        yield processes.Worker
    else:

        class IdleDrawer:
            def __init__(self, models: Any) -> None:
                self.data = bytes(size)

            def begin(self) -> list[Any]:
                return [Ready()]

            def draw(self, order: Draw) -> list[Any]:
                drawn = PictureDrawn(order=order.order, index=0, data=self.data, recipe={}, seconds=0.1)
                return [drawn, Finished(order=order.order)]

        ray_engine.Drawer = IdleDrawer  # type: ignore[assignment,misc]
        with ray_engine.cluster(settings) as make_worker:
            yield make_worker


def measure(folder: Path, engine: str, pictures: int, count: int, size: int) -> float:
    """Return the seconds from the first picture to the last."""
    tasks = [
        BatchTask(key=f"{i:064x}", job=Job(options={"prompt": f"a red circle {i}"}, seeds=(i,), where=f"r:{i}"))
        for i in range(pictures)
    ]
    settings = Settings(models={"model": Opening()}, backends=("cpu",) * count, threads=1)
    journal, ends = BatchJournal(folder, (0, 1)), list[float]()
    with opened(engine, settings, size) as make_worker:

        async def run() -> None:
            outcome = await Driver(
                tasks,
                frozenset(),
                journal,
                settings,
                lambda task, error, seconds: ends.append(time.perf_counter()),
                print,
                make_worker,
            ).run()
            assert outcome.done == pictures

        asyncio.run(run())
    journal.close()
    return ends[-1] - ends[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("none", "local", "ray"), default="none")
    parser.add_argument("--pictures", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--bytes", type=int, default=2_000_000)
    parser.add_argument("--folder", type=Path, help="where the pictures are written; default a temporary folder")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        seconds = measure(Path(folder), asked.engine, asked.pictures, asked.workers, asked.bytes)
    rate = (asked.pictures - 1) / seconds
    about = f"{asked.engine}, {asked.workers} workers, {asked.bytes} bytes"
    print(f"{about}: {rate:.0f} pictures/s, {1000 / rate:.1f} ms each")


if __name__ == "__main__":
    main()
