"""The process of a worker: it opens models and draws, and ends when the process that started it ends."""

from __future__ import annotations

import json
import os
import queue
import resource
import signal
import sys
import threading
from collections.abc import Collection, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import qwenimg
from qwenimg.cli import failures
from qwenimg.cli.client_folder import public
from qwenimg.cli.workers import enlarging, messages, training, writing
from qwenimg.cli.workers.channel import FollowerChannel
from qwenimg.common.base import leftovers
from qwenimg.common.base.errors import DoesNotFit, ModelError, QwenimgError, UsageError
from qwenimg.common.jobs.job import Inputs, Job
from qwenimg.common.jobs.legal import read_pictures
from qwenimg.common.jobs.pace import PreviewPace, is_due
from qwenimg.common.jobs.run import Output, completed, estimated, prepare
from qwenimg.common.jobs.schema import request_schema
from qwenimg.common.pictures import layer_files
from qwenimg.common.request.request import Defaults, enlarged

if TYPE_CHECKING:
    from qwenimg.common.parts.texts.describing import Describer
    from qwenimg.common.parts.texts.writing import Writer
    from qwenimg.common.pipeline.pipeline import Pipeline
    from qwenimg.common.pipeline.result import Result, Step
    from qwenimg.common.upscaling.record import Enlargement


def main(descriptor: int) -> None:
    """Draw the jobs that come through the pipe with this descriptor. Never returns: the end of the pipe ends the
    process."""
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # a terminal sends them to all; the pipe ends this one
        signal.signal(number, signal.SIG_IGN)
    channel = FollowerChannel(Connection(descriptor))
    process = DrawingProcess(channel, channel.receive())
    threading.Thread(target=process.listen, args=(channel,), daemon=True).start()
    process.run()


class Halted(Exception):
    """A picture was halted between two steps."""


class Outlet(Protocol):
    """The receiver of a worker's messages: its pipe, or Ray."""

    def send(self, message: messages.FromWorker) -> object: ...


class DrawingProcess:
    """The loop of a worker, with at most one model open."""

    def __init__(self, outlet: Outlet, start: messages.Start) -> None:
        self.models = {
            name: opening if start.backend == "auto" else replace(opening, backend=start.backend)
            for name, opening in start.models.items()
        }
        self._send = outlet.send
        self._waiting: queue.SimpleQueue[messages.Draw] = queue.SimpleQueue()
        self._halts: set[str] = set()  # ids of jobs to stop
        self._skips: set[str] = set()  # ids of jobs whose current picture is to be stopped
        self._open: tuple[str, Pipeline] | None = None
        self._previews = False  # True: the open model can make them
        self._defaults: dict[str, dict[str, Any]] = {}  # of all models

    def listen(self, channel: FollowerChannel) -> None:
        """Receive messages in a thread, and end the process when the one that started it has ended."""
        with suppress(EOFError):
            while not isinstance(message := channel.receive(), messages.End):
                if isinstance(message, messages.Halt):
                    (self._skips if message.skip else self._halts).add(message.id)
                else:
                    self._waiting.put(message)
        leftovers.remove_all()
        os._exit(0)

    def run(self) -> None:
        """Open the first model, and draw every job."""
        self.begin()
        while True:
            self.draw(self._waiting.get())

    def begin(self) -> None:
        """Open the first model, draw a picture of one step, and send `Ready` or `Unusable`."""
        try:
            self._warm_up()
        except Exception as error:
            code, text = failures.report(error)
            self._send(messages.Unusable(exit_code=code, text=text))
        else:
            self._send(messages.Ready(schema=request_schema(), defaults=self._defaults))

    def _warm_up(self) -> None:
        from qwenimg.common.hub.open_model import open_files

        for name, opening in self.models.items():
            with closing(open_files(opening)) as files:
                self._defaults[name] = _shown(files.defaults())
        first = next(iter(self.models))
        pipe = self._opened(first)
        if self.models[first].rewrite_with is not None:
            self._writer(first, pipe, False)  # only for its errors
        try:
            with closing(pipe.stream("warm-up", seed=0, steps=1)) as events:
                for _ in events:
                    pass
        except UsageError:  # this model needs more than a prompt, or more steps; its first picture loads its weights
            pass

    def _opened(self, name: str) -> Pipeline:
        """Close the open model unless it is `name`, and open that one."""
        if self._open is not None and self._open[0] == name:
            return self._open[1]
        self._close()
        pipe = qwenimg.open_pipeline(self.models[name])
        self._open = name, pipe
        writes, describes = (self._can_write(name, pipe, sees) for sees in (False, True))
        facts = messages.ModelFacts(
            name=name, family=pipe.family, defaults=_shown(pipe.defaults), options=tuple(sorted(pipe.model.options)),
            images=(pipe.model.inputs.fewest, pipe.model.inputs.most),
            unguided=min(pipe.model.guidance.off, 1e6),  # infinite is no JSON
            controlled=pipe.controls.are_taken, sees_control=pipe.model.inputs.control,
            writes=writes, describes=describes,
        )  # fmt: skip
        self._send(messages.ModelOpened(model=facts, headline=pipe.headline()))
        try:
            pipe.fit_preview()
            self._previews = True
        except QwenimgError as error:
            failures.report(error, "there are no previews: ")
            self._previews = False
        return pipe

    def _close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def draw(self, task: messages.Draw) -> None:
        """Draw the pictures of a job, and send them and `Finished`."""
        from qwenimg.common.hub.job_upscalers import JobUpscalers

        code, text, refused, is_checking = 0, "", False, task.training is not None
        try:
            if task.training is not None:
                self._train(task, task.training)
                self._send(messages.Finished(id=task.id, peak=_peak()))
                return
            pipe = self._opened(task.model)
            if task.enlarging is not None:
                self._send(enlarging.enlarged(pipe, task, task.enlarging))
                self._send(messages.Finished(id=task.id, peak=_peak()))
                return
            is_checking = True
            if task.writing is not None:
                self._write(pipe, task, task.writing)
                self._send(messages.Finished(id=task.id, peak=_peak()))
                return
            _check_count(pipe, task.job)
            inputs, notes = _inputs(task.job)
            jobs = [completed(pipe, job, inputs) for job in task.job.split(pipe.wildcards)]
            jobs = jobs[task.first // max(1, jobs[0].layers) :]  # layers are kept one by one
            with closing(JobUpscalers(self.models[task.model].models_dir)) as upscalers:
                output = Output(larger=lambda job: upscalers.enlargement(job, pipe.runtime))
                if jobs:  # else a server was killed between the last picture and the end of the job
                    _check(pipe, jobs[0], inputs, task, output)
                    prepare(pipe, jobs, inputs)
                is_checking = False
                for job in jobs:
                    if task.id in self._halts:
                        break
                    self._skips.discard(task.id)
                    self._draw_one(pipe, job, inputs, task, output, notes)
        except Exception as error:
            code, text = failures.explain(error)
            if task.training is not None:
                text = public(Path(task.training.folder), text)
            # The model is open: a file that is wrong now is a LoRA or a control network that the request names.
            refused = isinstance(error, UsageError) or (is_checking and isinstance(error, ModelError))
            if not (refused or isinstance(error, DoesNotFit)):
                failures.report(error, "while working for the server: ")
        self._halts.discard(task.id)
        finished = messages.Finished(id=task.id, error=text, exit_code=code, refused=refused, peak=_peak())
        self._send(finished)

    def _train(self, task: messages.Draw, order: messages.Training) -> None:
        """Train a LoRA, for which the open model is closed: training opens it as it needs it."""
        self._close()
        try:
            training.train(self.models[task.model], task.id, order, self._send, lambda: task.id in self._halts)
        finally:
            self._halts.discard(task.id)

    def _write(self, pipe: Pipeline, task: messages.Draw, order: messages.Writing) -> None:
        """Write a text and send it, as far as it is if a halt comes between two tokens."""

        def check() -> None:
            if self._is_halted(task):
                raise writing.Ended

        pipe.runtime.interrupt = check
        try:
            writing.written(self._describer(task.model, pipe, order), task, order, self._send)
        finally:
            self._halts.discard(task.id)

    def _describer(self, name: str, pipe: Pipeline, order: messages.Writing) -> Describer:
        """Return the language model of the open model, with its vision tower for texts about pictures. Raises
        UsageError for one that cannot write or see."""
        from qwenimg.common.parts.texts.describing import Describer

        try:
            return Describer(writer=self._writer(name, pipe, order.sees, rewrites=order.task == "rewrite"))
        except ModelError as error:  # of a file, whose path clients do not see
            whose = "its text encoder" if self.models[name].rewrite_with is None else "the language model of --with"
            raise UsageError(f"{name}: {whose} {str(error).partition(': ')[2]}") from None

    def _writer(self, name: str, pipe: Pipeline, seeing: bool, *, rewrites: bool = False) -> Writer:
        """Return the writer by the server's language model, or by the text encoder of the open model; of one that
        `rewrites`, by the language model in the folder that was trained for it. Raises QwenimgError."""
        from qwenimg.common.parts.texts.writers import OTHER, own_writer
        from qwenimg.common.shapes import builtin

        if self.models[name].rewrite_with is not None:
            return pipe.rewriters.writer(pipe.model, seeing)
        if pipe.checkpoint is None or pipe.model_name == builtin.NAME:
            raise builtin.writes_nothing()
        if rewrites and not seeing and not pipe.rewriters.is_own:
            return pipe.rewriters.writer(pipe.model, seeing)
        return own_writer(pipe.model.residents, pipe.checkpoint, seeing, OTHER)

    def _can_write(self, name: str, pipe: Pipeline, sees: bool) -> bool:
        """Return whether texts are written; sees: about pictures."""
        try:
            self._writer(name, pipe, sees)
        except (ModelError, UsageError):
            return False
        return True

    def _draw_one(
        self, pipe: Pipeline, job: Job, inputs: Inputs, task: messages.Draw, output: Output, notes: Sequence[str]
    ) -> None:
        """Draw the image of a job and send it, unless a halt comes between two steps. notes: more warnings."""
        from qwenimg.common.pipeline.result import Result

        seconds, index = 0.0, (job.index - 1) * max(1, job.layers)
        by = 1 if (larger := output.larger(job)) is None else larger.by
        width, height = inputs.size(job)
        size, sides = (by * width, by * height), (job.get("width"), job.get("height"))
        drawn = {sides, enlarged(*sides, job.get("hires"))}
        previews = Previews(task.preview_suffix, task.partial, pipe.model.scale, drawn)

        def check() -> None:
            if self._is_halted(task):
                raise Halted

        pipe.runtime.interrupt = check
        with suppress(Halted), closing(pipe.stream(**inputs.call(job))) as events:
            for event in events:
                if isinstance(event, Result):
                    event.warn(notes)
                    self._send_pictures(pipe, task, index, event, seconds, output.larger(job))
                    return
                seconds += event.seconds
                seen = previews.after(event) if self._previews else b""
                self._send(
                    messages.Stepped(
                        id=task.id, index=index, step=event.index, steps=event.total, seconds=event.seconds,
                        preview=seen, size=size,
                    )
                )  # fmt: skip
                if event.index < event.total and self._is_halted(task):
                    return

    def _is_halted(self, task: messages.Draw) -> bool:
        """Return whether the current picture of a job is not drawn any further."""
        return task.id in self._halts or task.id in self._skips

    def _send_pictures(
        self,
        pipe: Pipeline,
        task: messages.Draw,
        first: int,
        result: Result,
        seconds: float,
        larger: Enlargement | None,
    ) -> None:
        """Send the image, or each layer as a picture of its own, made larger by `larger`, but for the `task.first` that
        are stored already."""
        from qwenimg.common.pipeline.encode import thumbnail

        pictures = result.layers or (result.pixels,)
        for index, pixels in enumerate(pictures, first):
            if index >= task.first:
                data, more = enlarging.drawn(pipe, larger, result, pixels, task.suffix)
                # Only JSON: a text of a class of torch's, such as its version, would import torch over there.
                recipe = json.loads(json.dumps(result.recipe | more))
                self._send(
                    messages.PictureDrawn(
                        id=task.id, index=index, data=data, recipe=recipe,
                        seconds=(sum(result.timing.values()) or seconds) / len(pictures),
                        thumbnail=thumbnail(pixels) if task.thumbnail else b"",
                    )
                )  # fmt: skip


class Previews:
    """The previews of one picture, as files."""

    def __init__(self, suffix: str, wanted: int, scale: int, sizes: Collection[tuple[int, int]]) -> None:
        """Create the previews of a picture. suffix: of their files, "" for none. wanted: `Draw.partial`. scale: pixels
        of a latent. sizes: width and height of the picture, in each pass."""
        self._suffix, self._wanted, self._scale = suffix, wanted, scale
        self._sizes = {(-(-height // scale), -(-width // scale)): (width, height) for width, height in sizes}
        self._made, self._pace = 0, PreviewPace()

    def after(self, step: Step) -> bytes:
        """Return the preview after a step; b"" if none is due."""
        if not self._suffix or step.index >= step.total:
            return b""
        if not self._wanted:
            return self._pace.after(step.seconds, lambda: self._encoded(step)) or b""
        if not is_due(step.index, step.total, self._made, self._wanted):
            return b""
        self._made += 1
        return self._encoded(step)

    def _encoded(self, step: Step) -> bytes:
        from qwenimg.common.pictures.pixels import crop, fit
        from qwenimg.common.pipeline.encode import encode

        seen = step.preview()
        if self._wanted:
            width, height = step.size
            rows, columns = -(-height // self._scale), -(-width // self._scale)
            seen = crop(fit(seen, columns * self._scale, rows * self._scale), width, height)
        return encode(seen, None, self._suffix)


def _check_count(pipe: Pipeline, job: Job) -> None:
    """Raise UsageError for pictures that the model does not take, before one is decoded: each can take 108 MB."""
    pipe.model.inputs.check_count(len(job.files.images), pipe.model_name, pipe.others)
    for one in job.get("control") or ():
        pipe.controls.check_taken(one.network)


def _inputs(job: Job) -> tuple[Inputs, list[str]]:
    """Decode the pictures of a job."""
    try:
        return read_pictures(job.files, job.get("control") or ())
    except ModelError as error:
        raise UsageError(str(error)) from None


def _check(pipe: Pipeline, job: Job, inputs: Inputs, task: messages.Draw, output: Output) -> None:
    """Raise UsageError for an image that the model or the file cannot have, and DoesNotFit, before anything is
    loaded."""
    from qwenimg.common.pipeline import encode

    width, height = inputs.size(job)
    larger = output.larger(job)
    if larger is not None:
        enlarging.check(larger, width, height, task.seconds)
    by = 1 if larger is None else larger.by
    encode.check(task.suffix, by * width, by * height, job.texts)
    if job.layers:
        layer_files.check(task.suffix)
    estimated(pipe, job, inputs, output)


def _shown(defaults: Defaults) -> dict[str, Any]:
    """Return the defaults of a model that clients see."""
    return {key: value for key, value in asdict(defaults).items() if key not in ("trained", "edited_size", "fitted")}


def _peak() -> int:
    """Return the most bytes of memory that this process has had."""
    peak: Any = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) * (1 if sys.platform == "darwin" else 1024)
