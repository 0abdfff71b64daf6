"""The queue of jobs, and the workers that draw them, write their texts and train their LoRAs."""

from __future__ import annotations

import asyncio
import base64
import sqlite3
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, ParamSpec, TypeVar

from qwenimg.cli.serve.http_error import HttpError
from qwenimg.cli.serve.image_job import ImageJob, ProgressEvent, State
from qwenimg.cli.serve.journal import Journal
from qwenimg.cli.serve.metrics import Metrics
from qwenimg.cli.serve.public import HIDDEN, public
from qwenimg.cli.serve.settings import Settings
from qwenimg.cli.serve.workers import ServerWorker
from qwenimg.cli.workers.messages import (
    Finished,
    ModelOpened,
    PictureDrawn,
    Ready,
    Start,
    Stepped,
    TextPart,
    TextWritten,
    Trained,
    TrainingNote,
    TrainingSamples,
    TrainingStep,
    Unusable,
)
from qwenimg.cli.workers.process import Lost
from qwenimg.common.base.amounts import duration
from qwenimg.common.base.errors import QwenimgError
from qwenimg.common.base.text import clean

_P = ParamSpec("_P")
_T = TypeVar("_T")

PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # seconds before a lost worker is started again
MANY, WITHIN = 3, 300.0  # so many losses within so many seconds, and a worker is not started again
DEADLY = 2  # losses of workers by one request, before it is refused
AGAIN, EVERY = 60.0, 0.5  # seconds for which a change that fails is tried again, and between two tries
TURN = 60.0  # seconds that jobs of other models may be drawn before the oldest job
_BUSY = "server_error"


class Dispatcher:
    """The queue of jobs, shared by all workers. All methods run in the event loop."""

    def __init__(self, settings: Settings, journal: Journal, metrics: Metrics, say: Callable[[str], None]) -> None:
        """Create a dispatcher. say: prints a line of the log."""
        self.settings, self.journal, self.metrics, self.say = settings, journal, metrics, say
        self.waiting: list[ImageJob] = []
        self._entering: list[ImageJob] = []  # jobs that are being written into the journal
        self._ending: dict[ImageJob, asyncio.Task[None]] = {}  # jobs whose end is being written
        self.workers = [ServerWorker(Start(models=settings.models, backend=name)) for name in settings.backends]
        self.is_stopping = False
        self.unusable: asyncio.Future[Unusable] = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(self._supervise(worker)) for worker in self.workers]
        for task in self._tasks:
            task.add_done_callback(self._report_bug)
        self._seconds: deque[float] = deque(maxlen=20)  # of the last jobs
        self._deaths: Counter[str] = Counter()  # of workers, by the fingerprints of jobs
        self._once_ready = False
        self.schema: Mapping[str, Any] = {}  # of a request, once a worker is ready
        self.defaults: Mapping[str, Mapping[str, Any]] = {}  # of each model, once a worker is ready
        self.watchers: set[asyncio.Queue[tuple[ImageJob, ProgressEvent]]] = set()  # of all jobs
        self.streams: set[object] = set()  # of events, to clients
        for job in journal.unfinished():
            job.listener = self._notify
            if job.model not in settings.models:
                self._end(job, "failed", HttpError(404, f"the model {job.model} is not served any more"))
            elif job.training is not None and not settings.training:
                self._end(job, "failed", HttpError(403, "no LoRAs are trained here any more: start with --training"))
            else:
                if job.training is not None:
                    job.training = replace(job.training, folder=settings.training, continues=True)
                self.waiting.append(job)

    # Orders

    @property
    def is_ready(self) -> bool:
        """True if jobs are accepted."""
        return not self.is_stopping and any(worker.state == "ready" for worker in self.workers)

    @property
    def drawing(self) -> list[ImageJob]:
        """The jobs that are being drawn."""
        return [worker.job for worker in self.workers if worker.job is not None and not worker.job.ended.is_set()]

    @property
    def training(self) -> ImageJob | None:
        """The job that is being trained: one at a time, so that other workers draw."""
        return next((job for job in self.drawing if job.training is not None), None)

    def behind(self, job: ImageJob | None) -> list[ImageJob]:
        """Return the trainings that come before a waiting job, or before one that comes now: None."""
        before = self.waiting if job is None else self.waiting[: self.waiting.index(job)]
        trainings = [one for one in (self.training, *before) if one is not None and one.training is not None]
        others = sum(worker.state == "ready" for worker in self.workers) > 1
        return [] if others and (job is None or job.training is None) else trainings

    @property
    def jobs(self) -> list[ImageJob]:
        """The jobs that have not ended, and those whose end is not in the journal yet."""
        return [*self.drawing, *self.waiting, *self._ending]

    @property
    def unfinished(self) -> list[ImageJob]:
        """The jobs that have not ended."""
        return [*self.drawing, *self.waiting, *self._entering]

    def job(self, name: str) -> ImageJob | None:
        """Find a job in `jobs` by its id."""
        return next((job for job in self.jobs if job.id == name), None)

    def position(self, job: ImageJob) -> int:
        """Return the position of a job in the queue, from 1; 0 for a running job."""
        return self.waiting.index(job) + 1 if job in self.waiting else 0

    async def submit(self, job: ImageJob) -> None:
        """Add a job to the queue; a kept job after it was stored."""
        self._check_room(job)
        if job.is_kept:
            self._entering.append(job)
            try:
                await self._retried("a job cannot be stored", self.journal.add, job)
            except (OSError, sqlite3.Error):
                raise HttpError(
                    503, "the job cannot be stored: the server's log says why", kind=_BUSY, after=5.0
                ) from None
            finally:
                self._entering.remove(job)
        self.waiting.append(job)
        if job.is_kept:
            job.listener = self._notify
            job.notify("state", state=job.state)
        else:
            self._set_timer(job)
        self._assign()

    def _check_room(self, job: ImageJob) -> None:
        """Raise HttpError if the job is not accepted now."""
        if not self.is_ready:
            raise self.not_ready()
        if self._deaths and self._deaths[job.fingerprint] >= DEADLY:
            raise HttpError(507, f"this request has ended a worker {DEADLY} times and is refused", kind=_BUSY)
        left = sum(one.progress.left or 0.0 for one in self.behind(None))
        if not job.is_kept and left > job.deadline:
            text = f"a LoRA is trained here, for {duration(left)} more: come then, or hand in a job, which waits"
            raise HttpError(503, text, kind=_BUSY, code="training", after=left)
        line = [*self.waiting, *self._entering]
        is_idle = any(worker.state == "ready" and worker.job is None for worker in self.workers)
        if len(line) >= self.settings.queue + (is_idle and not self._entering):
            after = (fmean(self._seconds) if self._seconds else 10.0) * (len(line) + 1)
            text = f"{len(line)} requests are waiting already; try again later"
            raise HttpError(429, text, kind="rate_limit_error", code="queue_full", after=after)
        mine = sum(job.client == other.client for other in line)
        if job.client and mine >= self.settings.share:
            text = f"{mine} requests of yours are waiting already; try again later"
            raise HttpError(429, text, kind="rate_limit_error", code="client_limit", after=10.0)

    async def _retried(self, what: str, change: Callable[_P, _T], *given: _P.args, **named: _P.kwargs) -> _T:
        """Make a change of the journal. If it fails (too many open files, a lock of another program, a full disk) it is
        repeated for a minute, then the error is raised: QwenimgError, OSError or sqlite3.Error."""
        loop = asyncio.get_running_loop()
        until, is_reported = loop.time() + AGAIN, False
        while True:
            try:
                return await self.journal.writing(change, *given, **named)
            except (QwenimgError, OSError, sqlite3.Error) as error:
                if not is_reported:
                    self.say(f"error: {what}: {clean(error, 200)}; it is tried again for {AGAIN:g} seconds")
                is_reported = True
                if loop.time() >= until:
                    raise
            await asyncio.sleep(EVERY)

    def _notify(self, job: ImageJob, event: ProgressEvent) -> None:
        """Send an event of a kept job to all watchers. A watcher that does not read is dropped, and connects again."""
        for watcher in [*self.watchers]:
            try:
                watcher.put_nowait((job, event))
            except asyncio.QueueFull:
                self.watchers.discard(watcher)

    def cancel(self, job: ImageJob, error: HttpError | None = None) -> None:
        """End a job: for its client at once, on its worker after the current step. A training ends for its client too
        when its checkpoint is written."""
        if job.ended.is_set():
            return
        if job in self.waiting:
            self.waiting.remove(job)
        elif job.training is not None:
            if job.state == "training":
                self._worker_of(job).halt(job)
                job.enter("stopping")
            return
        else:
            self._worker_of(job).halt(job)
        self._end(job, "cancelled" if error is None else "failed", error)

    def halt(self, job: ImageJob, *, skip: bool) -> None:
        """Stop a job after the current step; with `skip` only its current picture. Finished pictures are returned."""
        if job in self.waiting:
            self.waiting.remove(job)
            self._end(job, "done")
        elif not job.ended.is_set():
            self._worker_of(job).halt(job, skip=skip)

    # The end

    def stop(self) -> None:
        """Accept no more jobs. Waiting requests are refused, kept jobs are left to the next server."""
        if self.is_stopping:
            return
        self.is_stopping = True
        for job in [job for job in self.waiting if not job.is_kept]:
            self.waiting.remove(job)
            self._end(job, "failed", self.not_ready())
        for job in self.waiting:
            job.notify("end", state="waiting")
        if self.training is not None:  # it writes its checkpoint, and the next server goes on from that
            self._worker_of(self.training).halt(self.training)

    async def close(self) -> None:
        """Wait for the running jobs, and end the workers."""
        self.stop()
        running = [asyncio.create_task(job.ended.wait()) for job in self.drawing]
        if running:
            await asyncio.wait(running, timeout=self.settings.patience)
        for task in [*self._tasks, *running]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._ending:
            await asyncio.wait([*self._ending.values()], timeout=self.settings.patience)
        for task in self._ending.values():  # the next server notes it: it has nothing left to draw
            task.cancel()
        await asyncio.gather(*(worker.close() for worker in self.workers))

    # Workers

    async def _supervise(self, worker: ServerWorker) -> None:
        """Run a worker, and restart it when it is lost, unless that happens too often."""
        losses: list[float] = []
        while True:
            self._handle_loss(worker, await self._watch(worker))
            now = time.monotonic()
            losses = [at for at in losses if now - at < WITHIN] + [now]
            if len(losses) >= MANY:
                worker.state = "down"
                self.say(
                    f"the worker on {worker.backend} ended {MANY} times in {WITHIN / 60:.0f} minutes; it stays down"
                )
                return
            await asyncio.sleep(PAUSES[min(len(losses), len(PAUSES)) - 1])
            self.metrics.restarts.inc()

    async def _watch(self, worker: ServerWorker) -> Lost:
        """Start a worker and handle its messages until its end."""
        try:
            inbox = worker.start()
        except OSError as error:
            self.say(f"error: a worker cannot be started: {clean(error.strerror or error, 80)}")
            return Lost(1)
        while not isinstance(message := await inbox.get(), Lost):
            await self._receive(worker, message)
        return message

    def _report_bug(self, task: asyncio.Task[None]) -> None:
        """Make a bug in this class end the server, and not one worker silently."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.unusable.done():
            self.unusable.set_exception(error)

    async def _receive(self, worker: ServerWorker, message: object) -> None:
        job = worker.job
        match message:
            case ModelOpened():
                worker.model, worker.headline = message.model, message.headline
            case Ready():
                worker.state, self._once_ready, self.schema = "ready", True, message.schema
                self.defaults = message.defaults
                self.say(f"ready: {worker.headline}")
                self._assign()
            case Unusable():
                if self._once_ready:  # it opened its model before: it may do so again
                    self.say(f"error: the worker on {worker.backend} cannot open its model: {message.text}")
                    worker.end()
                elif not self.unusable.done():
                    self.unusable.set_result(message)
            case Stepped() if job is not None:
                job.index, job.step, job.steps = message.index, message.step, message.steps
                job.preview, job.size = message.preview or job.preview, message.size
                job.notify("step", picture=message.index, step=message.step, steps=message.steps, **_seen(message))
            case PictureDrawn() if job is not None and not job.ended.is_set():
                await self._store(job, message)
            case TextPart() if job is not None:
                job.text += message.text
                job.notify("text", text=message.text)
            case TextWritten() if job is not None:
                job.written = message
                self.metrics.texts.inc()
                self.metrics.tokens.inc(message.tokens)
            case TrainingNote() if job is not None:
                if (text := public(message.text, self.settings)) == HIDDEN:
                    self.say(message.text)
                else:
                    job.progress.note = text
                    job.notify("note", text=text)
            case TrainingStep() if job is not None:
                job.step, job.steps = message.step, message.steps
                job.progress.add_step(message)
                self.metrics.training_steps.inc(message.made)
                names = ("step", "steps", "loss", "rate", "left")
                job.notify("step", **{name: getattr(message, name) for name in names})
            case TrainingSamples() if job is not None:
                samples = job.progress.add_samples(message)
                previews = [base64.b64encode(picture).decode() for picture in message.pictures]
                about = {"step": message.step, "learnt": message.learnt, "held_out": message.held_out}
                job.notify("samples", **about, samples=samples, previews=previews)
            case Trained() if job is not None:
                job.progress.is_written = True
                self.settings.loras[Path(message.path).stem] = message.path
                self.metrics.loras.inc()
            case Finished() if job is not None:
                self._finish(worker, job, message)

    async def _store(self, job: ImageJob, drawn: PictureDrawn) -> None:
        """Store a picture in the gallery, or add it to the job of a waiting client."""
        self.metrics.pictures.inc()
        self.metrics.seconds.observe(drawn.seconds)
        job.index, job.step, job.preview = drawn.index + 1, 0, b""
        if not job.is_kept:
            job.pictures.append(drawn)
            job.notify("picture", index=drawn.index)
            return
        try:
            kept = await self._retried("a picture cannot be stored", self.journal.keep, job, drawn)
        except (QwenimgError, OSError, sqlite3.Error):
            self.say(f"error: a picture was not stored within {AGAIN:g} seconds: it is given up")
            self.cancel(job, HttpError(507, "the picture cannot be stored: the server's log says why", kind=_BUSY))
            return
        job.first = drawn.index + 1
        job.notify("picture", **kept.described())

    def _finish(self, worker: ServerWorker, job: ImageJob, message: Finished) -> None:
        worker.job, worker.peak = None, max(worker.peak, message.peak)
        if job.training is None:
            self._seconds.append(time.monotonic() - job.arrived)
        what = "this picture cannot be drawn" if job.training is None else "this LoRA cannot be trained"
        error = _http_error(message, self.settings, what) if message.error else None
        if error is not None and error.text == HIDDEN and error.status != 500:  # else the worker has printed it
            self.say(f"error: {message.error}")
        if job.training is not None and error is None and not job.progress.is_written:
            self._end_stopped(job)
        else:
            self._end(job, "done" if error is None else "failed", error)
        self._assign()

    def _end_stopped(self, job: ImageJob) -> None:
        """End a training that was stopped at a step; one that a client did not cancel is left to the next server."""
        if job.state == "stopping":
            self._end(job, "cancelled")
        else:
            job.enter("waiting")
            job.ended.set()
            job.notify("end", state="waiting")

    def _handle_loss(self, worker: ServerWorker, lost: Lost) -> None:
        """Handle the job of a lost worker: a kept job is drawn again, unless it has ended workers repeatedly; other
        jobs fail."""
        worker.state, job, worker.job, worker.model = "loading", worker.job, None, None
        if self.is_stopping and job is None:
            return
        self.say(f"the worker on {worker.backend} has ended ({lost.reason})")
        if job is None or job.ended.is_set():
            return
        if job.is_kept and self.is_stopping:  # it is left to the next server
            job.ended.set()
            return
        self._deaths[job.fingerprint] += 1
        if job.training is not None:
            text = f"the worker {lost.predicate} while it trained; with resume it goes on from the last checkpoint"
            self._end(job, "failed", HttpError(507 if lost.is_out_of_memory else 500, text, kind=_BUSY))
            return
        if job.is_kept and self._deaths[job.fingerprint] < DEADLY:
            job.enter("waiting")
            self.waiting.insert(0, job)
        elif lost.is_out_of_memory:
            text = f"the worker {lost.predicate}; ask for a smaller picture"
            self._end(job, "failed", HttpError(507, text, kind=_BUSY))
        else:
            self._end(job, "failed", HttpError(500, f"the worker {lost.predicate} while it drew this", kind=_BUSY))

    def _assign(self) -> None:
        """Give each idle worker a job."""
        for worker in self.workers:
            if worker.state == "ready" and worker.job is None and not self.is_stopping:
                job = self._next(worker)
                if job is None:
                    continue
                self.waiting.remove(job)
                worker.draw(job)
                job.enter("drawing" if job.training is None else "training")
                if job.is_kept and job.training is None:
                    self._set_timer(job)
        self.metrics.waiting.set(len(self.waiting))

    def _next(self, worker: ServerWorker) -> ImageJob | None:
        """Return the oldest job of the worker's open model, or the oldest of all if it has waited for TURN seconds.
        A training waits for the end of the one before."""
        trains = self.training is not None
        waiting = [job for job in self.waiting if job.training is None or not trains]
        if not waiting:
            return None
        oldest = waiting[0]
        if worker.model is None or time.monotonic() - oldest.arrived > TURN:
            return oldest
        return next((job for job in waiting if job.model == worker.model.name), oldest)

    def _worker_of(self, job: ImageJob) -> ServerWorker:
        return next(worker for worker in self.workers if worker.job is job)

    # Ends of jobs

    def _set_timer(self, job: ImageJob) -> None:
        """Cancel the job at its deadline."""
        if job.timer is not None:
            job.timer.cancel()
        late = HttpError(504, f"not done within {job.deadline:g} seconds", kind=_BUSY, code="deadline")
        job.timer = asyncio.get_running_loop().call_later(job.deadline, self.cancel, job, late)

    def _end(self, job: ImageJob, state: State, error: HttpError | None = None) -> None:
        if job.ended.is_set():
            return
        job.end(state, error)
        self.metrics.jobs.labels(state).inc()
        self.metrics.waiting.set(len(self.waiting))
        if job.is_kept:
            self._ending[job] = asyncio.create_task(self._note_end(job))

    async def _note_end(self, job: ImageJob) -> None:
        """Write the end of a job into the journal, and repeat that until it succeeds."""
        is_noted = False
        while not is_noted:
            try:
                await self._retried("the end of a job cannot be stored", self.journal.end, job)
                is_noted = True
            except (OSError, sqlite3.Error):
                await asyncio.sleep(EVERY)
        del self._ending[job]

    def not_ready(self) -> HttpError:
        """Return the error that says why jobs are not accepted."""
        if self.is_stopping:
            return HttpError(503, "the server is stopping", kind=_BUSY, after=10.0)
        if all(worker.state == "down" for worker in self.workers):
            return HttpError(503, "no worker runs; the server's log says why", kind=_BUSY)
        return HttpError(503, "the model is loading: ask again when /ready answers 200", kind=_BUSY, after=5.0)


def _http_error(finished: Finished, settings: Settings, what: str) -> HttpError:
    """Convert the error of a worker. what: has failed."""
    if finished.refused:
        return HttpError(400, public(finished.error, settings))
    if finished.exit_code == 4:
        return HttpError(507, public(finished.error, settings), kind=_BUSY, code="does_not_fit")
    if finished.exit_code == 6:
        return HttpError(500, public(finished.error, settings), kind=_BUSY, code="not_finite")
    return HttpError(500, f"{what}; the server's log says why", kind=_BUSY)


def _seen(message: Stepped) -> dict[str, str]:
    return {"preview": base64.b64encode(message.preview).decode()} if message.preview else {}
