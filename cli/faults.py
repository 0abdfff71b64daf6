"""Lines of a prompt file that cannot be generated: each is reported, and ends the run or is skipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from qwenimg.cli.progress import RunPrinter
from qwenimg.common.base.errors import ModelError
from qwenimg.common.jobs.pictures import Picture
from qwenimg.common.jobs.run import passing

MOST = 20  # the most faults that are reported one by one if they end the run


def report_faults(faults: Sequence[ModelError], report: RunPrinter, *, left: int, keep_going: bool) -> list[int]:
    """Report `faults` and return their exit codes. Raises the last if they end the run: without `keep_going`, or if no
    image is `left`."""
    if not faults or (keep_going and left):
        return [report.fault(error) for error in faults]
    *others, last = faults[:MOST]
    for error in others:
        report.fault(error)
    if len(faults) > MOST:
        report.fault(last)
        last = ModelError(f"{len(faults) - MOST} more lines of the prompt file are at fault, after those above")
    raise last


def kept(
    wanted: list[Picture],
    check: Callable[[Picture], object],
    report: RunPrinter,
    failed: list[int],
    *,
    keep_going: bool,
) -> list[Picture]:
    """Return those of `wanted` that pass `check`. A fault of a prompt file is reported with its line, and its exit code
    is added to `failed`. Raises QwenimgError."""
    passed, faults = passing(wanted, check)
    failed += report_faults(faults, report, left=len(passed), keep_going=keep_going)
    return passed
