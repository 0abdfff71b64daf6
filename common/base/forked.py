"""Forked processes: threads of a framework do not survive a fork, and a computation then waits for them for ever."""

from __future__ import annotations

import os

from qwenimg.common.base.errors import UsageError


def check(process: int) -> None:
    """Raise UsageError unless this is the process of that id, in which a model or a framework was loaded."""
    if os.getpid() != process:
        raise UsageError(
            "a model cannot draw in a process that was forked after its backend was loaded (it would hang): "
            'start processes by multiprocessing.get_context("spawn") and load the model in each'
        )
