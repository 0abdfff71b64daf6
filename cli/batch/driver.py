"""The driver of a batch: it has the queue of pictures, and gives each worker one at a time."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from qwenimg.cli.batch.engines import BatchWorker, MakeWorker
from qwenimg.cli.batch.record import BatchJournal
from qwenimg.cli.batch.tasks import BatchTask
from qwenimg.cli.workers.messages import Draw, Finished, PictureDrawn, Ready, Start, Unusable
from qwenimg.cli.workers.process import Lost
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
    """Draws the pictures of a batch. All methods run in one event loop."""

    def __init__(
        self,
        tasks: Sequence[BatchTask],
        replaced: frozenset[str],
        journal: BatchJournal,
        starts: Sequence[Start],
        report: Report,
        say: Callable[[str], None],
        make_worker: MakeWorker,
    ) -> None:
        """Create a driver for the pictures that are still to be drawn. replaced: the keys of pictures whose file is
        there and differs from the journal's. starts: the settings of each worker. say: prints a line. make_worker:
        makes a worker of the engine."""
        self.waiting, self.replaced, self.journal = deque(tasks), replaced, journal
        self.report, self.say = report, say
        self.outcome = BatchOutcome()
        self.is_stopping = False
        self.workers = [make_worker(start) for start in starts[: len(tasks)]]
        self._model = next(iter(starts[0].models))
        self._drawing: dict[BatchWorker, BatchTask] = {}
        self._tries: Counter[str] = Counter()
        self._warned: set[str] = set()  # lines, each of which is printed once
        self._closing: list[asyncio.Task[None]] = []

    def stop(self) -> None:
        """Start no more pictures."""
        self.is_stopping = True
        idle = [worker for worker in self.workers if worker not in self._drawing]
        self._closing += [asyncio.create_task(worker.close()) for worker in idle]

    async def run(self) -> BatchOutcome:
        """Draw all pictures, or until `stop`. Raises DoesNotFit for a full disk."""
        running = [asyncio.create_task(self._run_worker(worker)) for worker in self.workers]
        try:
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await asyncio.gather(*self._closing, *(worker.close() for worker in self.workers))
        self.outcome.left = len(self.waiting)
        return self.outcome

    async def _run_worker(self, worker: BatchWorker) -> None:
        """Run a worker until no picture is left, and restart it when it is lost."""
        losses = 0
        while self.waiting and not self.is_stopping and losses < STARTS:
            inbox = worker.start()
            while not isinstance(message := await inbox.get(), Lost):
                task = self._drawing.get(worker)
                match message:
                    case Unusable():
                        self.outcome.unusable = message
                        self.stop()
                    case PictureDrawn() if task is not None:
                        await self._publish(task, message)
                    case Ready() | Finished():
                        if isinstance(message, Finished) and message.error and task is not None:
                            self._give_up(task, message.error, message.exit_code, 1)
                        if not self._begin(worker):
                            return
            task = self._drawing.pop(worker, None)
            if task is not None:
                self._retry(task, message)
            elif not self.is_stopping:
                losses += 1
                self.say(f"the worker on {worker.backend} has ended before it was ready")
            await asyncio.sleep(PAUSE)

    def _begin(self, worker: BatchWorker) -> bool:
        """Give a worker the next picture; return False if there is none."""
        self._drawing.pop(worker, None)
        if not self.waiting or self.is_stopping:
            return False
        self._drawing[worker] = task = self.waiting.popleft()
        worker.send(Draw(id=task.key[:16], model=self._model, job=task.job))
        return True

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

    def _retry(self, task: BatchTask, lost: Lost) -> None:
        """Put a picture back at the end of the queue after its worker was lost, at most TRIES times."""
        self._tries[task.key] += 1
        tries = self._tries[task.key]
        self.say(f"{task.job.where}: its worker {lost.predicate}; try {tries} of {TRIES}")
        if tries < TRIES:
            self.waiting.append(task)
        else:
            self._give_up(task, f"its worker {lost.predicate}, {tries} times", 1, tries)

    def _give_up(self, task: BatchTask, error: str, code: int, tries: int) -> None:
        self.journal.add(task, "failed", error=error, exit=code, tries=tries)
        self.outcome.failed.append(code)
        self.report(task, error, 0.0)
