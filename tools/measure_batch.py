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
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from idle_worker import SIZE, picture

from qwenimg.cli.batch import ray_engine
from qwenimg.cli.batch.driver import Driver
from qwenimg.cli.batch.engines import MakeWorker
from qwenimg.cli.batch.record import BatchJournal
from qwenimg.cli.batch.tasks import BatchTask
from qwenimg.cli.workers import worker
from qwenimg.cli.workers.messages import Draw, Finished, PictureDrawn, Ready, Start
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.jobs.job import Job


class IdleWorker:
    """A worker without a process, which has a picture of `size` bytes at once."""

    size = 0

    def __init__(self, settings: Start) -> None:
        self.backend, self.data = settings.backend, picture(self.size)
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()

    def start(self) -> asyncio.Queue[Any]:
        self.inbox.put_nowait(Ready())
        return self.inbox

    def send(self, message: Draw) -> None:
        self.inbox.put_nowait(PictureDrawn(id=message.id, index=0, data=self.data, recipe={}, seconds=0.1))
        self.inbox.put_nowait(Finished(id=message.id))

    async def close(self) -> None: ...


@contextlib.contextmanager
def opened(engine: str, backends: Sequence[str], size: int) -> Iterator[MakeWorker]:
    """Yield the function that makes workers of `engine` that draw nothing."""
    if engine == "none":
        IdleWorker.size = size
        yield IdleWorker
    elif engine == "local":
        os.environ |= {"PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}", SIZE: str(size)}
        worker.PROGRAM = "idle_worker"
        yield worker.Worker
    else:

        class IdleDrawer:
            def __init__(self, models: Any) -> None:
                self.data = picture(size)

            def begin(self) -> list[Any]:
                return [Ready()]

            def draw(self, task: Draw) -> list[Any]:
                drawn = PictureDrawn(id=task.id, index=0, data=self.data, recipe={}, seconds=0.1)
                return [drawn, Finished(id=task.id)]

        ray_engine.Drawer = IdleDrawer  # type: ignore[assignment,misc]
        with ray_engine.cluster(backends) as make_worker:
            yield make_worker


def measure(folder: Path, engine: str, pictures: int, count: int, size: int) -> float:
    """Return the seconds from the first picture to the last."""
    tasks = [
        BatchTask(key=f"{i:064x}", job=Job(options={"prompt": f"a red circle {i}"}, seeds=(i,), where=f"r:{i}"))
        for i in range(pictures)
    ]
    starts = [Start(models={"model": LoadOptions()}, backend="cpu", threads=1)] * count
    journal, ends = BatchJournal(folder, (0, 1)), list[float]()
    with opened(engine, ["cpu"] * count, size) as make_worker:

        async def run() -> None:
            outcome = await Driver(
                tasks,
                frozenset(),
                journal,
                starts,
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
