"""The pictures that one request asks for, or its text or LoRA, from its arrival to its end."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from qwenimg.cli.serve.http_error import HttpError
from qwenimg.cli.workers.messages import (
    Draw,
    Enlarging,
    PictureDrawn,
    TextWritten,
    Training,
    TrainingSamples,
    TrainingStep,
    Writing,
)
from qwenimg.common.jobs.job import Job

State = Literal["waiting", "drawing", "training", "stopping", "done", "failed", "cancelled"]
EventName = Literal["state", "step", "picture", "text", "note", "samples", "end"]
POINTS = 400  # of a curve of losses, at most; then each two become one
SAMPLES = 240  # names of the newest ones


@dataclass(frozen=True)
class ProgressEvent:
    """A change of a job."""

    name: EventName
    data: dict[str, Any]


@dataclass(kw_only=True)
class TrainingProgress:
    """The progress of a training."""

    note: str = ""  # the last line about it
    rate: float = 0.0
    left: float | None = None  # seconds; None: unknown
    losses: list[tuple[int, float]] = field(default_factory=list)  # by steps
    judged: list[tuple[int, float, float | None]] = field(default_factory=list)  # on fixed noise: learnt, held out
    samples: list[str] = field(default_factory=list)  # the names of pictures
    is_written: bool = False

    def add_step(self, message: TrainingStep) -> None:
        self.rate, self.left = message.rate, message.left
        self.losses.append((message.step, message.loss))
        if len(self.losses) > POINTS:
            pairs = zip(self.losses[::2], self.losses[1::2], strict=False)
            self.losses = [(b[0], (a[1] + b[1]) / 2) for a, b in pairs] + self.losses[len(self.losses) // 2 * 2 :]

    def add_samples(self, message: TrainingSamples) -> list[str]:
        """Add losses and samples, and return the names of the samples."""
        names = [f"{message.step:07d}-{number}" for number in range(len(message.pictures))]
        self.judged.append((message.step, message.learnt, message.held_out))
        self.samples += names
        del self.samples[:-SAMPLES], self.judged[:-SAMPLES]
        return names

    def described(self) -> dict[str, Any]:
        """Return the fields for clients."""
        names = ("note", "rate", "left", "losses", "judged", "samples")
        return {name: getattr(self, name) for name in names}


@dataclass(eq=False, kw_only=True)
class ImageJob:
    """The pictures of one request."""

    model: str
    spec: Job  # what is drawn
    suffix: str = ".png"
    preview_suffix: str = ""
    partial: int = 0
    kind: Literal["images", "sdapi", "job", "texts"]  # the API that it came by
    client: str = ""
    enlarging: Enlarging | None = None
    writing: Writing | None = None
    training: Training | None = None
    progress: TrainingProgress = field(default_factory=TrainingProgress)  # of the training
    deadline: float  # seconds: of a kept job from the first step on, else from the arrival on
    id: str = field(default_factory=lambda: secrets.token_hex(8))

    state: State = "waiting"
    created: float = field(default_factory=time.time)
    arrived: float = field(default_factory=time.monotonic)
    index: int = 0  # of the picture that is drawn
    step: int = 0
    steps: int = 0
    preview: bytes = b""  # the last one of the picture that is drawn
    size: tuple[int, int] = (0, 0)  # of the pictures, once a step is done
    pictures: list[PictureDrawn] = field(default_factory=list)  # empty for a kept job: they are in the gallery
    text: str = ""  # that is written so far
    written: TextWritten | None = None
    first: int = 0  # the number of pictures of a kept job that have been stored, whether or not they were removed later
    finished: float | None = None  # the time of its end
    error: HttpError | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    timer: asyncio.TimerHandle | None = None
    watchers: set[asyncio.Queue[ProgressEvent]] = field(default_factory=set)
    listener: Callable[[ImageJob, ProgressEvent], None] | None = None  # of a kept job: called with each event

    @property
    def is_kept(self) -> bool:
        """True: its pictures go to the gallery, and it outlives its client and the server."""
        return self.kind == "job"

    @property
    def fingerprint(self) -> str:
        """A hash of the request, equal for equal requests."""
        files = self.spec.files
        data = (*files.images, files.mask or b"", *files.controls)
        hashes = [hashlib.sha256(file).hexdigest() for file in data if isinstance(file, bytes)]
        parts = self.model, sorted(self.spec.options.items()), hashes, self.writing, self.training
        return hashlib.sha256(repr(parts).encode(errors="replace")).hexdigest()

    @property
    def share(self) -> float:
        """The share of the steps that are done, 0 to 1."""
        total = len(self.spec.seeds) * max(1, self.steps)
        return min(1.0, (self.index * self.steps + self.step) / total)

    def message(self) -> Draw:
        """Return the message by which a worker draws the rest of it."""
        return Draw(
            id=self.id,
            model=self.model,
            job=self.spec,
            first=self.first,
            suffix=self.suffix,
            preview_suffix=self.preview_suffix,
            thumbnail=self.is_kept,
            partial=self.partial,
            enlarging=self.enlarging,
            writing=self.writing,
            training=self.training,
            seconds=self.deadline,
        )

    def notify(self, name: EventName, **data: Any) -> None:
        """Send an event to all watchers, and drop those that do not read theirs."""
        event = ProgressEvent(name, data)
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
        self.notify("state", state=state)

    def end(self, state: State, error: HttpError | None = None) -> None:
        """Begin the last state; a second call does nothing."""
        if self.ended.is_set():
            return
        self.state, self.error, self.finished = state, error, time.time()
        if self.timer is not None:
            self.timer.cancel()
        self.ended.set()
        self.notify("end", state=state, **({} if error is None else {"error": error.text}))
