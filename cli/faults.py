"""The lines of a prompt file that ask for what cannot be made: each is reported, and ends the run or is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from qwenimg.cli.progress import Report
from qwenimg.common.base.errors import ModelError
from qwenimg.common.jobs.pictures import Picture
from qwenimg.common.jobs.run import passing

MOST = 20  # that are reported one by one where they end the run


def report_faults(faults: Sequence[ModelError], report: Report, *, left: int, keep_going: bool) -> list[int]:
    """Reports `faults` and returns their exit codes. Raises the last where they end the run: unless `keep_going`,
    and where none are `left` to draw."""
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
    wanted: list[Picture], check: Callable[[Picture], object], report: Report, failed: list[int], *, keep_going: bool
) -> list[Picture]:
    """Those of `wanted` that pass `check`. A fault of a prompt file is reported with its line, and its exit code
    is added to `failed`. Raises QwenimgError."""
    passed, faults = passing(wanted, check)
    failed += report_faults(faults, report, left=len(passed), keep_going=keep_going)
    return passed
