"""The output of a run: a bar or lines on standard error, and events or paths on standard output.

Standard output has the absolute path of each finished image, one per line, or with --json one object per line: `plan`,
then for each image `step` (many) and `image` or `error`, then `done`. Each has `schema` and `event`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from qwenimg.cli import failures, streams
from qwenimg.common.base.amounts import counted, duration
from qwenimg.common.base.errors import ModelError, QwenimgError
from qwenimg.common.base.text import clean
from qwenimg.common.jobs.job import Job
from qwenimg.common.memory import estimate
from qwenimg.common.request.request import OPTIONS, enlarged

if TYPE_CHECKING:
    from qwenimg import Pipeline, Result, Step
    from qwenimg.cli.preview import PreviewPrinter
    from qwenimg.common.memory.estimate import Estimate
    from qwenimg.common.runtime.compiling import Decision


WARNING = "qwenimg: warning: "
LINES = 10  # of steps, about, where standard error is no terminal


class RunPrinter:
    """Prints one run. With `quiet`, only warnings and errors are printed on standard error."""

    def __init__(self, *, as_json: bool, quiet: bool, debug: Sequence[str]) -> None:
        self.as_json, self.quiet, self.debug = as_json, quiet, debug
        self.start = time.monotonic()
        self.total = 0
        self._expected: Sequence[Estimate] = ()  # until the first step gives a better one
        self._compiles = False  # True: the first step compiles, so its time does not count
        self._held: list[str] | None = []  # lines that wait for the headline, which comes first
        self._warned: set[str] = set()
        self._bar = StepBar()
        self._hidden = False  # True: something was printed since the last error
        self._preview: PreviewPrinter | None = None

    # Before the images

    def notify(self, kind: str, text: str) -> None:
        """Print a message of the library: a `stage` that begins, a `notice`, or a `warning` (each warning once)."""
        if kind != "warning":
            self._line(text, always=kind == "notice")
        elif text not in self._warned:
            self._warned.add(text)
            self._line(f"{WARNING}{text}", always=True)

    def headline(self, text: str, expected: Sequence[Estimate]) -> None:
        """Print the first line: memory and time of all images. A long time is printed on a line of its own."""
        most, seconds = max(one.memory for one in expected), sum(one.seconds for one in expected)
        waiting, self._held = self._held or [], None
        self._expected = expected
        self._line(f"{text} · {estimate.summary(most, seconds)}")
        if seconds > estimate.LONG:
            takes = f"this takes {duration(seconds)} on this device"
            self.notify("warning", f"{takes}; fewer pixels, steps or pictures take less")
        for line in waiting:
            streams.say(line)

    def decided(self, mode: str, decision: Decision) -> None:
        """Print whether the denoiser is compiled. If it is not, and --compile was not given, only with --debug
        timing."""
        self._compiles |= decision.on
        if mode != "auto" or decision.on or "timing" in self.debug:
            self._line(decision.line, always="timing" in self.debug)

    def previews(self, pipe: Pipeline) -> None:
        """Show previews from now on, for the VAE of `pipe`; no previews if that fails."""
        from qwenimg.cli.preview import PreviewPrinter

        try:
            pipe.fit_preview()
        except QwenimgError as error:
            self.notify("warning", f"there is no preview: {clean(error, 200)}")
            return
        shows = not (self.as_json or self.quiet) and sys.stderr is not None and sys.stderr.isatty()
        self._preview = PreviewPrinter(in_terminal=shows)
        if line := self._preview.where():
            self._line(line)

    def give_up(self) -> None:
        """Print the warnings that waited for the headline, and close the bar, before an error ends the run."""
        waiting, self._held = self._held or [], None
        for line in waiting:
            if line.startswith(WARNING):
                streams.say(line)
        self._bar.close()

    def plan(self, pipe: Pipeline, jobs: Sequence[Job]) -> None:
        self.total = len(jobs)
        images = [
            {"index": job.index, "path": None if job.path is None else str(job.path)}
            | {name: job.get(name) for name, one in OPTIONS.items() if one.kind is not None}
            | {"seed": job.seed}
            for job in jobs
        ]
        about = {"backend": pipe.backend, "device": pipe.device, "model": pipe.model_name}
        if "timing" in self.debug:
            self._line(f"attention: {pipe.engine.attention()}", always=True)
        self._event("plan", **about, precision=pipe.precision.summary(), images=images)

    def real_model(self, commands: Callable[[], str]) -> None:
        """Print the commands for a real model, behind pictures of the built-in one: finding them takes as long as some
        steps."""
        if not (self.as_json or self.quiet):
            self._line(f"real model: {commands()}")

    # Each image

    def begin(self, job: Job) -> None:
        self._hidden = True
        sides = job.get("width"), job.get("height")
        size = "x".join(map(str, sides))
        if job.get("hires") is not None:
            size += f", then {'x'.join(map(str, enlarged(*sides, job.get('hires'))))}"
        self._line(
            f"picture {job.index} of {self.total}: seed {job.seed}, {size}, "
            f"{counted(job.get('steps'), 'step')}, guidance {job.get('guidance'):g}"
        )
        if job.get("template"):
            self._line(f"its prompt: {clean(job.prompt, 280)}")

    def step(self, job: Job, step: Step) -> None:
        self._event("step", index=job.index, step=step.index, total=step.total, sigma=step.sigma, seconds=step.seconds)
        if not (self.as_json or self.quiet):
            self._shown(step)
        if self._preview is not None:
            self._preview.step(step)
        self._correct(step)

    def _shown(self, step: Step) -> None:
        if sys.stderr is None or not sys.stderr.isatty():
            if is_told(step.index, step.total):
                self._line(f"step {step.index}/{step.total}, {step.seconds:.2f} s")
            return
        self._bar.step(step.total, step.seconds)
        if step.index == step.total:
            self._bar.close()

    def _correct(self, step: Step) -> None:
        """Print the remaining time after the first step (the second if the first compiles), if it is long or the
        estimate was far off."""
        if self._compiles:
            self._compiles = False
            return
        expected, self._expected = self._expected, ()
        if expected:
            rest, telling = estimate.left(expected, step.seconds)
            if telling:
                self._line(f"as this step went, the rest takes {duration(rest)}", always=rest > estimate.LONG)

    def image(self, job: Job, result: Result, seconds: float) -> None:
        for warning in result.warnings:
            self.notify("warning", warning)
        if "timing" in self.debug:
            self._line("timing: " + ", ".join(f"{k} {v:.3f} s" for k, v in result.timing.items()), always=True)
        if "shapes" in self.debug:
            self._line("shapes: " + "; ".join(f"{k} {v}" for k, v in result.shapes.items()), always=True)
        if self.as_json:
            self._event(
                "image",
                index=job.index,
                **_places(job),
                seed=job.seed,
                seconds=seconds,
                warnings=result.warnings,
                timing=result.timing,
                recipe=result.recipe,
            )
        else:
            for path in job.outputs:
                streams.put(os.fsencode(path) + b"\n")

    def failure(self, job: Job, error: Exception) -> int:
        """Print the error of an image, and return its exit code."""
        self._bar.close()
        where = f"picture {job.index} (seed {job.seed}): " if self.total > 1 else ""
        where = f"{clean(job.where, 80)}: {where}" if job.where else where
        code, text = failures.report(error, where)
        self._hidden = False
        if self.as_json:
            streams.put(failures.event(code, text, job.index))
        return code

    def fault(self, error: ModelError) -> int:
        """Print the error of a line of a prompt file, and return its exit code."""
        self._bar.close()
        code, text = failures.report(error)
        if self.as_json:
            streams.put(failures.event(code, text))
        return code

    def done(self, written: int, failed: int, code: int) -> None:
        if failed and self._hidden:
            streams.say(f"qwenimg: error: {failed} of {written + failed} were not made, as said above")
        self._event("done", made=written, failed=failed, exit=code, seconds=time.monotonic() - self.start)

    # Output

    def _line(self, text: str, *, always: bool = False) -> None:
        if self.quiet and not always:
            return
        self._bar.close()
        if self._preview is not None:
            self._preview.keep()
        if self._held is not None:
            self._held.append(text)
        else:
            streams.say(text)

    def _event(self, name: str, **fields: object) -> None:
        if self.as_json:
            streams.put(failures.record(name, **fields))


def _places(job: Job) -> dict[str, object]:
    """Return the fields of an event that name files: `path`, or for layers the first one's path, `layers` and the
    views."""
    files = [str(path) for path in job.outputs]
    places: dict[str, object] = {"path": files[0]}
    if not job.layers:
        return places
    views = zip(job.views, files[job.layers :], strict=True)
    return places | {"layers": files[: job.layers]} | dict(views)


def is_told(index: int, total: int) -> bool:
    """Return whether a step has a line where there is no bar: the first, and those that complete a tenth of all."""
    return index == 1 or index * LINES // total > (index - 1) * LINES // total


class Bar:
    """A bar on standard error. Errors of the terminal are ignored: the images matter more."""

    def __init__(self) -> None:
        self._bar: Any = None

    def close(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            with contextlib.suppress(OSError, ValueError):
                bar.close()


class StepBar(Bar):
    """A bar of steps."""

    def step(self, total: int, seconds: float = 0.0) -> None:
        """Advance the bar by one of `total` steps. The bar appears after the first step, which took `seconds`."""
        with contextlib.suppress(OSError, ValueError):
            if self._bar is None:
                from tqdm import tqdm

                tqdm.monitor_interval = 0  # no thread of its own
                width = os.get_terminal_size(sys.stderr.fileno()).columns or 80  # one without a size says 0 x 0
                self._bar = tqdm(
                    total=total, unit="step", file=sys.stderr, leave=False, smoothing=0, ncols=width, nrows=24
                )
                self._bar.start_t -= seconds  # it appears when the first step is done
            self._bar.update(1)
