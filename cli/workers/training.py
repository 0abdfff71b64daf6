"""LoRAs that a worker trains for a client. All files are in one folder, and named by a client relative to it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from qwenimg.cli import lora_training
from qwenimg.cli.client_folder import Folder, public
from qwenimg.cli.workers.messages import FromWorker, Trained, Training, TrainingNote, TrainingSamples, TrainingStep
from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.text import clean
from qwenimg.common.families.load_options import LoadOptions

if TYPE_CHECKING:
    from qwenimg.common.training.session import Judged, Made

_OF_DRAWING = ("precision", "preset", "compile", "fallback")  # options of opening a model that training has not
EVERY = 0.2  # seconds between two messages about steps
MOST_FILES = 400_000  # of a folder of pictures, which are looked through for links


class Ended(Exception):
    """A training was ended before its first step."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """The real paths of a training."""

    data: Path
    keep: Path | None
    output: Path
    run: Path


def places(order: Training) -> Places:
    """Return the paths that the options of an order name. Raises UsageError for one that is outside the folder, also by
    a link, and for a folder of pictures that is none."""
    folder, options = Folder(Path(order.folder)), order.options
    pictures = {}
    for field in ("data", "keep"):
        name = options[field]
        if name is None or (field == "keep" and name == lora_training.AUTO):
            continue
        pictures[field] = path = folder.inside(name, field, "a folder of pictures")
        if not path.is_dir():
            what = "is a file" if path.exists() else "no such folder"
            raise UsageError(f"{field} {clean(name, 60)!r}: {what}; give the name of a folder of pictures")
    name = options["output"]
    output, run = (folder.path / f"{name}{suffix}" for suffix in (lora_training.SUFFIX, ".run"))
    for path in (output, run):
        if path.is_symlink():
            raise UsageError(f"output {clean(name, 60)!r}: {clean(path.name, 80)} is a link; move it away")
    return Places(data=pictures["data"], keep=pictures.get("keep"), output=output, run=run)


def train(
    opening: LoadOptions,
    name: str,
    order: Training,
    send: Callable[[FromWorker], object],
    is_halted: Callable[[], bool],
) -> None:
    """Train the LoRA of an order, and send what a client sees of it; with `is_halted` it ends after its step, with its
    checkpoint. name: of the job. Raises QwenimgError."""
    found, options = places(order), dict(order.options)
    for path in (found.data, found.keep):
        if path is not None:
            _check_links(path, Path(order.folder))
    resume = options["resume"] or (order.continues and os.path.lexists(found.run / f"lora{lora_training.SUFFIX}"))
    usual = {name: getattr(LoadOptions(), name) for name in _OF_DRAWING}
    opening = replace(opening, **usual, quantize=options.pop("quantize") or opening.quantize)
    options |= {"data": found.data, "output": found.output, "keep": str(found.keep or options["keep"] or "") or None}
    options |= {"products": options.pop("precision"), "resume": resume, "only_plan": False, "quiet": True}
    options |= {field: tuple(options[field]) for field in ("lora", "sample")}
    wanted = lora_training.Wanted(opening=opening, **options)
    try:
        is_whole = lora_training.train(wanted, _Watcher(name, wanted.steps, Path(order.folder), send, is_halted))
    except Ended:
        return
    if is_whole:
        send(Trained(id=name, path=str(found.output)))


def _check_links(path: Path, folder: Path) -> None:
    """Raise ModelError for a link in `path` that leads out of `folder`."""
    count = 0
    for place, folders, files in os.walk(path):
        count += len(folders) + len(files)
        if count > MOST_FILES:
            raise bad(path, f"holds more than {MOST_FILES:,} files")
        for one in (*folders, *files):
            file = Path(place, one)
            if file.is_symlink() and not Path(os.path.realpath(file)).is_relative_to(folder):
                raise bad(file, "is a link that leads out of the folder; put a copy in its place")


class _Watcher:
    """A run that is watched by messages. One about a step has the mean loss of the steps since the one before."""

    def __init__(
        self, name: str, steps: int, folder: Path, send: Callable[[FromWorker], object], is_halted: Callable[[], bool]
    ) -> None:
        self._name, self._steps, self._folder, self._send, self._is_halted = name, steps, folder, send, is_halted
        self._losses, self._sent = list[float](), 0.0

    @property
    def is_stopped(self) -> bool:
        return self._is_halted()

    def check(self) -> None:
        if self._is_halted():
            raise Ended

    def stepping(self) -> AbstractContextManager[object]:
        return nullcontext()

    def tell(self, line: str) -> None:
        self._send(TrainingNote(id=self._name, text=public(self._folder, line)))

    def warn(self, text: str) -> None:
        self.tell(f"warning: {text}")

    def follow(self, event: Made | Judged) -> None:
        from qwenimg.common.pipeline.encode import thumbnail
        from qwenimg.common.training.session import Judged

        if isinstance(event, Judged):
            pictures = tuple(map(thumbnail, event.pictures))
            self._send(
                TrainingSamples(
                    id=self._name, step=event.step, learnt=event.learnt, held_out=event.held_out, pictures=pictures
                )
            )
            return
        done, now = event.done, time.monotonic()
        self._losses.append(done.loss)
        if now - self._sent < EVERY and event.left and not self.is_stopped:
            return
        made, loss = len(self._losses), sum(self._losses) / len(self._losses)
        self._losses, self._sent = [], now
        self._send(
            TrainingStep(
                id=self._name, step=done.step, steps=self._steps, made=made, loss=loss, rate=done.rate, left=event.left
            )
        )
