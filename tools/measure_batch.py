"""The most pictures a second that the driver of a batch takes from its workers: these draw nothing and answer at once.

    python tools/measure_batch.py --pictures 2000 --workers 64 --bytes 2000000

It prints what a picture costs the driver in all, and in its parts: the file, the journal and the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qwenimg.cli.batch.driver import Driver
from qwenimg.cli.batch.record import BatchJournal
from qwenimg.cli.batch.tasks import BatchTask
from qwenimg.cli.serve.messages import Finished, PictureDrawn, Ready, Settings
from qwenimg.cli.serve.orders import PictureOrder
from qwenimg.common.families.opening import Opening


class IdleWorker:
    """A worker without a process, which has `data` for every picture at once."""

    data = b""

    def __init__(self, backend: str, settings: Settings) -> None:
        self.backend, self.order = backend, None
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()

    def start(self) -> asyncio.Queue[Any]:
        self.inbox.put_nowait(Ready())
        return self.inbox

    def draw(self, order: PictureOrder) -> None:
        self.order = order
        self.inbox.put_nowait(PictureDrawn(order=order.id, index=0, data=self.data, recipe={}, seconds=0.1))
        self.inbox.put_nowait(Finished(order=order.id))

    async def close(self) -> None: ...


def timed(seconds: dict[str, float], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, whose time is added under `name`."""

    def run(*given: Any, **named: Any) -> Any:
        begun = time.perf_counter()
        try:
            return function(*given, **named)
        finally:
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begun

    return run


def measure(folder: Path, pictures: int, workers: int) -> tuple[float, dict[str, float]]:
    """Return the seconds of a batch, and those of its parts, summed over threads."""
    tasks = [
        BatchTask(key=f"{i:064x}", where=f"r:{i}", fields={"prompt": f"a red circle {i}"}, seed=i)
        for i in range(pictures)
    ]
    settings = Settings(models={"model": Opening()}, backends=("cpu",) * workers)
    journal, seconds = BatchJournal(folder, (0, 1)), dict[str, float]()
    journal.publish = timed(seconds, "publish", journal.publish)  # type: ignore[method-assign]
    journal.add = timed(seconds, "journal", journal.add)  # type: ignore[method-assign]

    async def run() -> None:
        outcome = await Driver(tasks, frozenset(), journal, settings, lambda *ended: None, print, IdleWorker).run()
        assert outcome.done == pictures

    begun = time.perf_counter()
    asyncio.run(run())
    whole = time.perf_counter() - begun
    journal.close()
    return whole, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--bytes", type=int, default=2_000_000)
    parser.add_argument("--folder", type=Path, help="where the pictures are written; default a temporary folder")
    asked = parser.parse_args()
    IdleWorker.data = bytes(asked.bytes)
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        whole, parts = measure(Path(folder), asked.pictures, asked.workers)
    journal, publish = (1000 * parts[name] / asked.pictures for name in ("journal", "publish"))
    print(
        f"{asked.pictures / whole:.0f} pictures/s with {asked.workers} workers and {asked.bytes} bytes each: "
        f"{1000 * whole / asked.pictures:.2f} ms a picture; in its thread {publish - journal:.2f} ms for the file and "
        f"{journal:.2f} ms for the journal, waiting for others included"
    )


if __name__ == "__main__":
    main()
