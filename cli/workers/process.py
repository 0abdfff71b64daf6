"""Start and end of a process of this package, with a pipe to it."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeAlias

from qwenimg.common.base.safe_files import closed_on_error

Process: TypeAlias = "subprocess.Popen[bytes]"

GRACE = 5.0  # seconds for a process to end by itself


@dataclass(frozen=True)
class Lost:
    """The end of a worker's process."""

    code: int  # negative: minus the number of the signal that ended it
    is_silent: bool = False  # True: it was killed since it did not answer

    @property
    def is_out_of_memory(self) -> bool:
        """True: most likely the system has killed it since memory ran out."""
        return self.code == -signal.SIGKILL and not self.is_silent

    @property
    def predicate(self) -> str:
        """The end in words, to follow `the worker`."""
        if self.is_silent:
            return "did not answer, as if stopped (kill -STOP, a debugger), and was killed"
        return "was killed, most likely since memory ran out" if self.is_out_of_memory else "has ended"

    @property
    def reason(self) -> str:
        """The exit code or the signal, in words."""
        if self.is_silent:
            return "killed, since it did not answer, as if stopped: kill -STOP, a debugger"
        if self.code >= 0:
            return f"exit code {self.code}"
        names = {number.value: number.name for number in signal.Signals}
        return f"killed by {names.get(-self.code, -self.code)}" + (
            ", most likely out of memory" if self.is_out_of_memory else ""
        )


def start(
    module: str,
    *args: str,
    environment: Mapping[str, str] | None = None,
    output: int = 2,
    apart: bool = False,
) -> tuple[Process, Connection]:
    """Start `module.main(descriptor, *args)` in a process of its own, and return the process and this end of the pipe
    whose other end the descriptor is. environment: in place of this process's. output: its standard output. apart:
    signals of the terminal do not reach it. Raises OSError."""
    ours, theirs = multiprocessing.Pipe()
    descriptor = theirs.fileno()
    code = f"import sys; from {module} import main; main(int(sys.argv[1]), *sys.argv[2:])"
    with closing(theirs), closed_on_error(ours):
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(descriptor), *args],
            stdin=subprocess.DEVNULL,
            stdout=output,
            pass_fds=(descriptor,),
            env=environment,
            start_new_session=apart,
        )
    return process, ours


def end(process: Process) -> None:
    """Wait for the end of a process that was asked to end, and kill it after `GRACE` seconds. A kill while a GPU
    works may leak its memory, so it is the last resort."""
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
