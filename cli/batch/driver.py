"""The driver of a batch: it holds the list, and each worker has one picture at a time."""

from __future__ import annotations

import asyncio
import math
import signal
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from qwenimg.cli.batch.engines import BatchWorker, MakeWorker
from qwenimg.cli.batch.record import BatchJournal
from qwenimg.cli.batch.tasks import BatchTask
from qwenimg.cli.serve.messages import Finished, PictureDrawn, Ready, Settings, Unusable
from qwenimg.cli.serve.orders import PictureOrder
from qwenimg.cli.serve.workers import Lost
from qwenimg.common.base.errors import UsageError

TRIES = 3  # workers that one picture may end
STARTS = 3  # losses of a worker without a picture to draw, after which it is not started again
PAUSE = 0.5  # seconds before a lost worker is started again

Report = Callable[[BatchTask, str, float], None]
"""Called with each picture that has ended, its error or "", and its seconds."""


@dataclass
class BatchOutcome:
    """The end of a batch."""

    done: int = 0
    failed: list[int] = field(default_factory=list)  # exit codes
    unusable: Unusable | None = None  # a model that does not open
    left: int = 0  # pictures that were not begun


class Driver:
    """The run of a batch. Its methods run in one event loop."""

    def __init__(
        self,
        tasks: Sequence[BatchTask],
        replaced: frozenset[str],
        journal: BatchJournal,
        settings: Settings,
        report: Report,
        say: Callable[[str], None],
        make_worker: MakeWorker,
    ) -> None:
        """Create a driver for the pictures that are still to be drawn. replaced: the keys of pictures whose file is
        there and differs from the journal's. say: prints a line. make_worker: makes a worker of the engine."""
        self.waiting, self.replaced, self.journal = deque(tasks), replaced, journal
        self.report, self.say = report, say
        self.outcome = BatchOutcome()
        self.is_stopping = False
        self.workers = [make_worker(backend, settings) for backend in settings.backends[: len(tasks)]]
        self._model = next(iter(settings.models))
        self._tries: Counter[str] = Counter()
        self._warned: set[str] = set()  # lines, each of which is printed once
        self._closing: list[asyncio.Task[None]] = []

    def stop(self) -> None:
        """Begin no more pictures."""
        self.is_stopping = True
        idle = [worker for worker in self.workers if worker.order is None]
        self._closing += [asyncio.create_task(worker.close()) for worker in idle]

    async def run(self) -> BatchOutcome:
        """Draw all pictures, or until `stop`. Raises DoesNotFit for a full disk."""
        tending = [asyncio.create_task(self._tend(worker)) for worker in self.workers]
        try:
            await asyncio.gather(*tending)
        finally:
            for task in tending:
                task.cancel()
            await asyncio.gather(*tending, return_exceptions=True)
            await asyncio.gather(*self._closing, *(worker.close() for worker in self.workers))
        self.outcome.left = len(self.waiting)
        return self.outcome

    async def _tend(self, worker: BatchWorker) -> None:
        """Let a worker draw until nothing is left, and start it again when it is lost."""
        losses = 0
        while self.waiting and not self.is_stopping and losses < STARTS:
            inbox, task = worker.start(), None
            while not isinstance(message := await inbox.get(), Lost):
                match message:
                    case Unusable():
                        self.outcome.unusable = message
                        self.stop()
                    case PictureDrawn() if task is not None:
                        await self._publish(task, message)
                    case Ready() | Finished():
                        if isinstance(message, Finished) and message.error and task is not None:
                            self._give_up(task, message.error, message.exit_code, 1)
                        task = self._begin(worker)
                        if task is None:
                            return
            worker.order = None
            if task is not None:
                self._retry(task, message.code)
            elif not self.is_stopping:
                losses += 1
                self.say(f"the worker on {worker.backend} has ended before it was ready")
            await asyncio.sleep(PAUSE)

    def _begin(self, worker: BatchWorker) -> BatchTask | None:
        """Give a worker the next picture, and return it; None if there is none."""
        worker.order = None
        if not self.waiting or self.is_stopping:
            return None
        task = self.waiting.popleft()
        worker.draw(
            PictureOrder(
                model=self._model,
                job=task.job,
                kind="job",
                deadline=math.inf,
                id=task.key[:16],
            )
        )
        return task

    async def _publish(self, task: BatchTask, drawn: PictureDrawn) -> None:
        replace = task.key in self.replaced
        try:
            await asyncio.to_thread(self.journal.publish, task, drawn.data, drawn.seconds, replace=replace)
        except UsageError as error:  # such as a folder under the picture's name
            self._give_up(task, str(error), error.exit_code, 1)
            return
        for line in drawn.recipe.get("warnings", ()):
            if line not in self._warned:
                self._warned.add(line)
                self.say(f"warning: {task.job.where}: {line}")
        self.outcome.done += 1
        self.report(task, "", drawn.seconds)

    def _retry(self, task: BatchTask, code: int) -> None:
        """Put a picture whose worker has ended at the end of the line, unless it has ended several."""
        self._tries[task.key] += 1
        tries = self._tries[task.key]
        how = "was killed, most likely since memory ran out" if code == -signal.SIGKILL else "has ended"
        self.say(f"{task.job.where}: its worker {how}; try {tries} of {TRIES}")
        if tries < TRIES:
            self.waiting.append(task)
        else:
            self._give_up(task, f"its worker {how}, {tries} times", 1, tries)

    def _give_up(self, task: BatchTask, error: str, code: int, tries: int) -> None:
        self.journal.add(task, "failed", error=error, exit=code, tries=tries)
        self.outcome.failed.append(code)
        self.report(task, error, 0.0)
