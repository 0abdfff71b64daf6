"""The queue of orders, and the workers that draw them."""

from __future__ import annotations

import asyncio
import base64
import signal
import sqlite3
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any, ParamSpec, TypeVar

from qwenimg.cli.serve.journal import Journal
from qwenimg.cli.serve.messages import Finished, ModelOpened, PictureDrawn, Ready, Settings, Stepped, Unusable
from qwenimg.cli.serve.metrics import Metrics
from qwenimg.cli.serve.orders import Event, Fault, PictureOrder, State
from qwenimg.cli.serve.public import HIDDEN, public
from qwenimg.cli.serve.workers import Lost, Worker
from qwenimg.common.base.errors import QwenimgError
from qwenimg.common.base.text import clean

_P = ParamSpec("_P")
_T = TypeVar("_T")

PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # seconds before a lost worker is started again
MANY, WITHIN = 3, 300.0  # so many losses within so many seconds, and a worker is not started again
DEADLY = 2  # losses of workers by one request, before it is refused
AGAIN, EVERY = 60.0, 0.5  # seconds for which a change that fails is tried again, and between two tries
TURN = 60.0  # seconds that orders of other models may be drawn before the oldest order
_BUSY = "server_error"


class Dispatcher:
    """Orders wait in one line, and each worker takes the next one. All methods run in the event loop."""

    def __init__(self, settings: Settings, journal: Journal, metrics: Metrics, say: Callable[[str], None]) -> None:
        """Create a dispatcher. say: prints a line for who runs the server."""
        self.settings, self.journal, self.metrics, self.say = settings, journal, metrics, say
        self.waiting: list[PictureOrder] = []
        self._entering: list[PictureOrder] = []  # jobs that are being written into the journal
        self._ending: dict[PictureOrder, asyncio.Task[None]] = {}  # jobs whose end is being written
        self.workers = [Worker(backend, settings) for backend in settings.backends]
        self.is_stopping = False
        self.unusable: asyncio.Future[Unusable] = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(self._tend(worker)) for worker in self.workers]
        for task in self._tasks:
            task.add_done_callback(self._tended)
        self._seconds: deque[float] = deque(maxlen=20)  # of the last orders
        self._deaths: Counter[str] = Counter()  # of workers, by the fingerprints of orders
        self._once_ready = False
        self.schema: Mapping[str, Any] = {}  # of a request, once a worker is ready
        self.defaults: Mapping[str, Mapping[str, Any]] = {}  # of each model, once a worker is ready
        self.watchers: set[asyncio.Queue[tuple[PictureOrder, Event]]] = set()  # of all jobs
        self.streams: set[object] = set()  # of events, to clients
        for order in journal.unfinished():
            order.listener = self._tell
            if order.model in settings.models:
                self.waiting.append(order)
            else:
                self._end(order, "failed", Fault(404, f"the model {order.model} is not served any more"))

    # Orders

    @property
    def is_ready(self) -> bool:
        """True if orders are taken."""
        return not self.is_stopping and any(worker.state == "ready" for worker in self.workers)

    @property
    def drawing(self) -> list[PictureOrder]:
        """The orders that are being drawn."""
        return [worker.order for worker in self.workers if worker.order is not None and not worker.order.ended.is_set()]

    @property
    def orders(self) -> list[PictureOrder]:
        """The orders that have not ended, or whose end is not in the journal yet."""
        return [*self.drawing, *self.waiting, *self._ending]

    def order(self, name: str) -> PictureOrder | None:
        """Return the one of `orders` with this id."""
        return next((order for order in self.orders if order.id == name), None)

    def position(self, order: PictureOrder) -> int:
        """Return how many orders are drawn before this one starts; 0 if it has started."""
        return self.waiting.index(order) + 1 if order in self.waiting else 0

    async def submit(self, order: PictureOrder) -> None:
        """Put an order in line, a job once the journal has it. Raises Fault."""
        self._check_room(order)
        if order.is_kept:
            self._entering.append(order)
            try:
                await self._retried("a job cannot be stored", self.journal.add, order)
            except (OSError, sqlite3.Error):
                raise Fault(503, "the job cannot be stored: the server's log says why", kind=_BUSY, after=5.0) from None
            finally:
                self._entering.remove(order)
        self.waiting.append(order)
        if order.is_kept:
            order.listener = self._tell
            order.tell("state", state=order.state)
        else:
            self._set_timer(order)
        self._assign()

    def _check_room(self, order: PictureOrder) -> None:
        """Raise Fault for an order that is not taken now."""
        if not self.is_ready:
            raise self.not_ready()
        if self._deaths and self._deaths[order.fingerprint] >= DEADLY:
            raise Fault(507, f"this request has ended a worker {DEADLY} times and is refused", kind=_BUSY)
        line = [*self.waiting, *self._entering]
        is_idle = any(worker.state == "ready" and worker.order is None for worker in self.workers)
        if len(line) >= self.settings.queue + (is_idle and not self._entering):
            after = (fmean(self._seconds) if self._seconds else 10.0) * (len(line) + 1)
            text = f"{len(line)} requests are waiting already; try again later"
            raise Fault(429, text, kind="rate_limit_error", code="queue_full", after=after)
        mine = sum(order.client == other.client for other in line)
        if order.client and mine >= self.settings.share:
            text = f"{mine} requests of yours are waiting already; try again later"
            raise Fault(429, text, kind="rate_limit_error", code="client_limit", after=10.0)

    async def _retried(self, fault: str, change: Callable[_P, _T], *given: _P.args, **named: _P.kwargs) -> _T:
        """Return the result of a change of the journal, which is tried again for a minute while it fails, as for too
        many open files, a lock of another program, or a full disk. Raises QwenimgError, OSError and sqlite3.Error."""
        loop = asyncio.get_running_loop()
        until, is_reported = loop.time() + AGAIN, False
        while True:
            try:
                return await self.journal.writing(change, *given, **named)
            except (QwenimgError, OSError, sqlite3.Error) as error:
                if not is_reported:
                    self.say(f"error: {fault}: {clean(error, 200)}; it is tried again for {AGAIN:g} seconds")
                is_reported = True
                if loop.time() >= until:
                    raise
            await asyncio.sleep(EVERY)

    def _tell(self, order: PictureOrder, event: Event) -> None:
        """Give news of a job to all who watch. One who does not read them is dropped, and asks anew."""
        for watcher in [*self.watchers]:
            try:
                watcher.put_nowait((order, event))
            except asyncio.QueueFull:
                self.watchers.discard(watcher)

    def cancel(self, order: PictureOrder, fault: Fault | None = None) -> None:
        """End an order: at once for its client, after the current step for its worker."""
        if order.ended.is_set():
            return
        if order in self.waiting:
            self.waiting.remove(order)
        else:
            self._worker_of(order).halt(order)
        self._end(order, "cancelled" if fault is None else "failed", fault)

    def halt(self, order: PictureOrder, *, skip: bool) -> None:
        """Stop the drawing of an order after the current step, with `skip` of its current picture only. Its finished
        pictures are its answer."""
        if order in self.waiting:
            self.waiting.remove(order)
            self._end(order, "done")
        elif not order.ended.is_set():
            self._worker_of(order).halt(order, skip=skip)

    # The end

    def stop(self) -> None:
        """Take no more orders. Those that wait are refused, jobs are left to the next server."""
        if self.is_stopping:
            return
        self.is_stopping = True
        for order in [order for order in self.waiting if not order.is_kept]:
            self.waiting.remove(order)
            self._end(order, "failed", self.not_ready())
        for order in self.waiting:
            order.tell("end", state="waiting")

    async def close(self) -> None:
        """Wait for the orders that are being drawn, and end the workers."""
        self.stop()
        running = [asyncio.create_task(order.ended.wait()) for order in self.drawing]
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

    async def _tend(self, worker: Worker) -> None:
        """Start a worker, do what it says, and start it again when it is lost, until it is lost too often."""
        losses: list[float] = []
        while True:
            self._lose(worker, await self._watch(worker))
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

    async def _watch(self, worker: Worker) -> Lost:
        """Start a worker and do what it says, until its end."""
        try:
            inbox = worker.start()
        except OSError as error:
            self.say(f"error: a worker cannot be started: {clean(error.strerror or error, 80)}")
            return Lost(1)
        while not isinstance(message := await inbox.get(), Lost):
            await self._receive(worker, message)
        return message

    def _tended(self, task: asyncio.Task[None]) -> None:
        """Have a bug in this class end the server, and not its one worker in silence."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.unusable.done():
            self.unusable.set_exception(error)

    async def _receive(self, worker: Worker, message: object) -> None:
        order = worker.order
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
            case Stepped() if order is not None:
                order.index, order.step, order.steps = message.index, message.step, message.steps
                order.preview, order.size = message.preview or order.preview, message.size
                order.tell("step", picture=message.index, step=message.step, steps=message.steps, **_seen(message))
            case PictureDrawn() if order is not None and not order.ended.is_set():
                await self._take(order, message)
            case Finished() if order is not None:
                self._finish(worker, order, message)

    async def _take(self, order: PictureOrder, drawn: PictureDrawn) -> None:
        """Take a picture: to the gallery, or for the client that waits."""
        self.metrics.pictures.inc()
        self.metrics.seconds.observe(drawn.seconds)
        order.index, order.step, order.preview = drawn.index + 1, 0, b""
        if not order.is_kept:
            order.pictures.append(drawn)
            order.tell("picture", index=drawn.index)
            return
        try:
            kept = await self._retried("a picture cannot be stored", self.journal.keep, order, drawn)
        except (QwenimgError, OSError, sqlite3.Error):
            self.say(f"error: a picture was not stored within {AGAIN:g} seconds: it is given up")
            self.cancel(order, Fault(507, "the picture cannot be stored: the server's log says why", kind=_BUSY))
            return
        order.first = drawn.index + 1
        order.tell("picture", **kept.described())

    def _finish(self, worker: Worker, order: PictureOrder, message: Finished) -> None:
        worker.order, worker.peak = None, max(worker.peak, message.peak)
        self._seconds.append(time.monotonic() - order.arrived)
        fault = _fault(message, self.settings) if message.error else None
        if fault is not None and fault.text == HIDDEN and fault.status != 500:  # else the worker has said it
            self.say(f"error: {message.error}")
        self._end(order, "done" if fault is None else "failed", fault)
        self._assign()

    def _lose(self, worker: Worker, lost: Lost) -> None:
        """Answer the order of a worker that has ended. A job is drawn again, unless it ends workers repeatedly."""
        worker.state, order, worker.order, worker.model = "loading", worker.order, None, None
        if self.is_stopping and order is None:
            return
        self.say(f"the worker on {worker.backend} has ended ({_ending(lost.code)})")
        if order is None or order.ended.is_set():
            return
        if order.is_kept and self.is_stopping:  # it is left to the next server
            order.ended.set()
            return
        self._deaths[order.fingerprint] += 1
        if order.is_kept and self._deaths[order.fingerprint] < DEADLY:
            order.enter("waiting")
            self.waiting.insert(0, order)
        elif lost.code == -signal.SIGKILL:
            text = "the worker was killed, most likely since memory ran out; ask for a smaller picture"
            self._end(order, "failed", Fault(507, text, kind=_BUSY))
        else:
            self._end(order, "failed", Fault(500, "the worker has ended while it drew this", kind=_BUSY))

    def _assign(self) -> None:
        """Give each idle worker an order."""
        for worker in self.workers:
            if worker.state == "ready" and worker.order is None and self.waiting and not self.is_stopping:
                order = self._next(worker)
                self.waiting.remove(order)
                worker.draw(order)
                order.enter("drawing")
                if order.is_kept:
                    self._set_timer(order)
        self.metrics.waiting.set(len(self.waiting))

    def _next(self, worker: Worker) -> PictureOrder:
        """Return the oldest order of the worker's open model, unless another one has waited for long."""
        oldest = self.waiting[0]
        if worker.model is None or time.monotonic() - oldest.arrived > TURN:
            return oldest
        return next((order for order in self.waiting if order.model == worker.model.name), oldest)

    def _worker_of(self, order: PictureOrder) -> Worker:
        return next(worker for worker in self.workers if worker.order is order)

    # Ends of orders

    def _set_timer(self, order: PictureOrder) -> None:
        """End the order when its time is over."""
        if order.timer is not None:
            order.timer.cancel()
        late = Fault(504, f"not done within {order.deadline:g} seconds", kind=_BUSY, code="deadline")
        order.timer = asyncio.get_running_loop().call_later(order.deadline, self.cancel, order, late)

    def _end(self, order: PictureOrder, state: State, fault: Fault | None = None) -> None:
        if order.ended.is_set():
            return
        order.end(state, fault)
        self.metrics.orders.labels(state).inc()
        self.metrics.waiting.set(len(self.waiting))
        if order.is_kept:
            self._ending[order] = asyncio.create_task(self._note_end(order))

    async def _note_end(self, order: PictureOrder) -> None:
        """Write the end of a job into the journal, however long that takes."""
        is_noted = False
        while not is_noted:
            try:
                await self._retried("the end of a job cannot be stored", self.journal.end, order)
                is_noted = True
            except (OSError, sqlite3.Error):
                await asyncio.sleep(EVERY)
        del self._ending[order]

    def not_ready(self) -> Fault:
        """Return why orders are not taken."""
        if self.is_stopping:
            return Fault(503, "the server is stopping", kind=_BUSY, after=10.0)
        if all(worker.state == "down" for worker in self.workers):
            return Fault(503, "no worker runs; the server's log says why", kind=_BUSY)
        return Fault(503, "the model is loading", kind=_BUSY, after=5.0)


def _fault(finished: Finished, settings: Settings) -> Fault:
    """Return the fault of an order that a worker could not draw."""
    if finished.refused:
        return Fault(400, public(finished.error, settings))
    if finished.exit_code == 4:
        return Fault(507, public(finished.error, settings), kind=_BUSY, code="does_not_fit")
    if finished.exit_code == 6:
        return Fault(500, public(finished.error, settings), kind=_BUSY, code="not_finite")
    return Fault(500, "this picture cannot be drawn; the server's log says why", kind=_BUSY)


def _seen(message: Stepped) -> dict[str, str]:
    return {"preview": base64.b64encode(message.preview).decode()} if message.preview else {}


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by {names.get(-code, -code)}" + (", most likely out of memory" if code == -signal.SIGKILL else "")
