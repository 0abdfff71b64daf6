"""An order: pictures that one request asks for, from its arrival to its end; and what is wrong with a request."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from qwenimg.cli.serve.messages import Draw, PictureDrawn
from qwenimg.common.base.text import short
from qwenimg.common.jobs.job import Job

State = Literal["waiting", "drawing", "done", "failed", "cancelled"]


class Fault(Exception):
    """A request that is not answered as asked, with the HTTP status that says so."""

    def __init__(
        self,
        status: int,
        text: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        after: float | None = None,
    ) -> None:
        """Create a fault. kind: OpenAI's type. param: the field that is wrong. after: seconds until another try may
        succeed; without it the same request would fail again."""
        text = short(text)
        super().__init__(text)
        self.status, self.text, self.kind, self.param, self.code, self.after = status, text, kind, param, code, after

    @property
    def headers(self) -> dict[str, str]:
        """The headers by which clients decide whether they try again."""
        if self.after is not None:
            return {"retry-after": str(max(1, min(120, round(self.after))))}
        return {"x-should-retry": "false"}


@dataclass(frozen=True)
class Event:
    """News of an order, for those who watch it."""

    name: Literal["state", "step", "picture", "end"]
    data: dict[str, Any]


@dataclass(eq=False, kw_only=True)
class PictureOrder:
    """The pictures of one request."""

    model: str
    job: Job
    suffix: str = ".png"
    preview_suffix: str = ""
    partial: int = 0
    kind: Literal["images", "sdapi", "job"]  # the API that it came by
    client: str = ""
    deadline: float  # seconds: of a job from the first step on, else from the arrival on
    id: str = field(default_factory=lambda: secrets.token_hex(8))

    state: State = "waiting"
    created: float = field(default_factory=time.time)
    arrived: float = field(default_factory=time.monotonic)
    index: int = 0  # of the picture that is drawn
    step: int = 0
    steps: int = 0
    preview: bytes = b""  # the last one of the picture that is drawn
    size: tuple[int, int] = (0, 0)  # of the pictures, once a step is done
    pictures: list[PictureDrawn] = field(default_factory=list)  # of a job, those that are kept are not here
    first: int = 0  # the number of pictures of a job that are in the gallery, or were and are removed
    finished: float | None = None  # the time of its end
    fault: Fault | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    timer: asyncio.TimerHandle | None = None
    watchers: set[asyncio.Queue[Event]] = field(default_factory=set)
    listener: Callable[[PictureOrder, Event], None] | None = None  # of a job, for who watches all of them

    @property
    def is_kept(self) -> bool:
        """True for a job: its pictures go to the gallery, and it outlives its client and the server."""
        return self.kind == "job"

    @property
    def fingerprint(self) -> str:
        """A name for what is asked, the same whenever it is asked again."""
        files = self.job.files
        data = (*files.images, files.mask or b"", *files.controls)
        hashes = [hashlib.sha256(one).hexdigest() for one in data if isinstance(one, bytes)]
        return hashlib.sha256(repr((self.model, sorted(self.job.options.items()), hashes)).encode()).hexdigest()

    @property
    def share(self) -> float:
        """The share of the steps that are done, 0 to 1."""
        whole = len(self.job.seeds) * max(1, self.steps)
        return min(1.0, (self.index * self.steps + self.step) / whole)

    def draw(self) -> Draw:
        """Return the message that has a worker draw it."""
        return Draw(
            order=self.id,
            model=self.model,
            job=self.job,
            first=self.first,
            suffix=self.suffix,
            preview_suffix=self.preview_suffix,
            thumbnail=self.is_kept,
            partial=self.partial,
        )

    def tell(self, name: Literal["state", "step", "picture", "end"], **data: Any) -> None:
        """Send an event to all who watch. One who does not read them is dropped."""
        event = Event(name, data)
        for watcher in [*self.watchers]:
            try:
                watcher.put_nowait(event)
            except asyncio.QueueFull:
                self.watchers.discard(watcher)
        if self.listener is not None:
            self.listener(self, event)

    def enter(self, state: State) -> None:
        """Begin a state that is not the last."""
        self.state = state
        self.tell("state", state=state)

    def end(self, state: State, fault: Fault | None = None) -> None:
        """Begin the last state; a second call does nothing."""
        if self.ended.is_set():
            return
        self.state, self.fault, self.finished = state, fault, time.time()
        if self.timer is not None:
            self.timer.cancel()
        self.ended.set()
        self.tell("end", state=state, **({} if fault is None else {"error": fault.text}))
