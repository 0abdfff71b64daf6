"""The command `selftest`: check that the built-in model draws what its prompts ask for on this machine."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

import qwenimg
from qwenimg.cli import failures, places, streams
from qwenimg.cli.progress import StepBar
from qwenimg.cli.signals import Stop
from qwenimg.common.base.errors import NumericsError, UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.families.load_options import load_options_of

if TYPE_CHECKING:
    from qwenimg.common.shapes.gate import GatePrompt
    from qwenimg.common.shapes.selftest import Answer, Score

SHEET_BYTES = 2**16  # bytes of an image of flat colours on the sheet; 40 of 256x256 took 1.1 MB


@click.command("selftest")
@click.option(
    "-m", "--model", metavar="FOLDER", help="A model that was trained for this test; default the built-in one."
)
@places.declared("backend")
@click.option("--precision", default="auto", metavar="POLICY", help="auto, bf16 or fp32, as for a picture.")
@click.option("--size", metavar="WxH", help="The size of each picture; default the model's.")
@click.option("-o", "--output", metavar="SHEET.png", help="Write all pictures on one sheet, marked right or wrong.")
@click.option("--overwrite", is_flag=True, help="Replace the sheet if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per event.")
@click.option("--quiet", is_flag=True, help="Print the total only.")
@click.pass_context
def selftest(
    ctx: click.Context,
    model: str | None,
    backend: str | None,
    precision: str,
    size: str | None,
    output: str | None,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Draw 40 prompts with the built-in model on this machine and check each image by rules: colour, shape, place.

    Exit code 0 if enough are right, 6 if not. The work is the same, seed for seed, on every machine."""
    from qwenimg.common.hub.resolve import is_built_in
    from qwenimg.common.numbers.sizes import parse_size
    from qwenimg.common.shapes.builtin import NAME, other_sizes
    from qwenimg.common.shapes.gate import selftest_prompts

    sides = None if size is None else parse_size(size)
    if sides is not None and is_built_in(model or NAME) and (fault := other_sizes([sides])):
        raise UsageError(f"--size {clean(size, 40)}: {fault}, and few would be right")
    stop = ctx.obj if isinstance(ctx.obj, Stop) else Stop()
    prompts = selftest_prompts()
    size_of_sheet = len(prompts) * SHEET_BYTES
    path = None if output is None else sheet_path(output, "selftest", overwrite=overwrite, size=size_of_sheet)
    report = SelftestReport(prompts, as_json=as_json, quiet=quiet)
    pipe = qwenimg.open_pipeline(
        load_options_of({"model": model or NAME, "backend": backend, "precision": precision}), report.notify
    )
    report.line(pipe.headline())
    report.event("plan", backend=pipe.backend, device=pipe.device, model=pipe.model_name, pictures=len(prompts))
    answers = _answers(pipe, prompts, sides, report, stop)
    return _judge(answers, path, overwrite, report)


def sheet_path(output: str, prompt: str, *, overwrite: bool, size: int) -> Path:
    """Check that the sheet's file can be written, with `size` bytes free, and return its path."""
    from qwenimg.common.base import atomic_files
    from qwenimg.common.jobs.naming import output_path

    if output == "-":
        raise UsageError("-o -: the sheet goes to a file; give its name")
    now = datetime.now()
    path = output_path(output, seed=0, index=1, prompt=prompt, now=now, several=False, same_seeds=False).absolute()
    if path.suffix.lower() != ".png":
        raise UsageError(f"-o {clean(output, 120)}: the sheet is a PNG; let the name end in .png")
    atomic_files.check_output(path, overwrite=overwrite)
    atomic_files.sweep(path.parent)
    atomic_files.check_space(path, size)
    return path


def _answers(
    pipe: qwenimg.Pipeline, prompts: list[GatePrompt], size: tuple[int, int] | None, report: SelftestReport, stop: Stop
) -> list[Answer]:
    from qwenimg.common.families.catalog import BUILT_IN
    from qwenimg.common.shapes import selftest as test

    pipe.prepare([*(asked.prompt for asked in prompts), BUILT_IN.negative_prompt])
    answers: list[Answer] = []
    try:
        with stop.waits():
            for event in test.draw(pipe, prompts, size):
                if isinstance(event, test.Answer):
                    answers.append(event)
                    report.answer(event)
                    stop.picture()
                else:
                    report.step(event.total)
                    stop.step(event.index, event.total, event.seconds)
    finally:
        report.close()
    return answers


def _judge(answers: list[Answer], path: Path | None, overwrite: bool, report: SelftestReport) -> int:
    """Print the score and write the sheet. Raises NumericsError if too few are right."""
    from qwenimg.common.base import atomic_files
    from qwenimg.common.shapes import selftest as test

    scores = test.scores(answers)
    report.scores(scores, [test.line(score) for score in scores], answers)
    if path is not None:
        atomic_files.write_atomic(path, test.sheet_png(answers), overwrite=overwrite)
        report.result(b"sheet: " + os.fsencode(path))
    failed = [score.group for score in scores if not score.passed]
    report.event("done", passed=not failed, sheet=None if path is None else str(path))
    if failed:
        total = scores[-1]
        raise NumericsError(
            f"the self-test failed: {total.right} of {total.n} pictures are right; too few in {', '.join(failed)}"
        )
    return 0


class SelftestReport:
    """Prints a bar or a line for each image on standard error, the score on standard output."""

    def __init__(self, prompts: list[GatePrompt], *, as_json: bool, quiet: bool) -> None:
        self.prompts, self.as_json, self.quiet = prompts, as_json, quiet
        self.terminal = sys.stderr is not None and sys.stderr.isatty()
        self._bar = StepBar()

    def notify(self, kind: str, text: str) -> None:
        """Print warnings of the library, but no stages: the images are small and many."""
        if kind == "warning":
            self.close()
            streams.say(f"qwenimg: warning: {text}")

    def line(self, text: str) -> None:
        if not self.quiet:
            streams.say(text)

    def result(self, line: bytes) -> None:
        if not self.as_json and not self.quiet:
            streams.put(line + b"\n")

    def event(self, name: str, **fields: object) -> None:
        if self.as_json:
            streams.put(failures.record(name, **fields))

    def step(self, steps: int) -> None:
        if self.as_json or self.quiet or not self.terminal:
            return
        self._bar.step(steps * len(self.prompts))

    def answer(self, answer: Answer) -> None:
        asked, verdict = answer.asked, asdict(answer.verdict)
        about = {"group": asked.group, "prompt": asked.prompt, "seed": asked.seed}
        self.event("answer", number=answer.number, **about, right=not answer.wrong, wrong=answer.wrong, verdict=verdict)
        if not self.terminal:
            self.line(f"{answer.number} of {len(self.prompts)}: {asked.prompt}: {_verdict(answer)}")

    def scores(self, scores: list[Score], lines: list[str], answers: list[Answer]) -> None:
        """Print the score of each group and the total, then the failures."""
        for score in scores:
            self.event("score", **asdict(score), passed=score.passed)
        if self.as_json:
            return
        shown = lines[-1:] if self.quiet else lines
        if not self.quiet:
            shown = [*shown, *(f"{a.number}. {a.asked.prompt}: {_verdict(a)}" for a in answers if a.wrong)]
        streams.put("".join(f"{line}\n" for line in shown).encode())

    def close(self) -> None:
        self._bar.close()


def _verdict(answer: Answer) -> str:
    return f"wrong: {', '.join(answer.wrong)}" if answer.wrong else "right"
