"""`qwenimg serve` as a process, as a user starts it, with the built-in model on the CPU."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import httpx2
import psutil

from support.processes import COMMAND, ENVIRONMENT

LONG = 1000  # steps: more than any test waits for


class RunningServer:
    """A server in a process group of its own, so that nothing of it is left after a test."""

    def __init__(
        self,
        gallery: Path,
        *options: object,
        cwd: Path | None = None,
        program: Sequence[str] = COMMAND,
        backend: str = "cpu",
    ) -> None:
        """Start it in the folder `cwd` and wait for its address."""
        command = [*program, "serve", "-m", "shapes", "--backend", backend, "--port", "0", "-o", gallery, *options]
        self.process = subprocess.Popen(
            list(map(str, command)),
            cwd=cwd,
            env=ENVIRONMENT | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []  # of standard error
        self._new: SimpleQueue[str | None] = SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._new.put(line)
        self._new.put(None)

    def says(self, words: str) -> str:
        """Wait for a line of standard error with `words`; the end of the process fails the test."""
        while (line := self._new.get()) is not None:
            self.lines.append(line)
            if words in line:
                return line
        raise AssertionError(f"ended without saying {words!r}: {''.join(self.lines)}")

    @property
    def http(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.address, timeout=None)

    @property
    def workers(self) -> list[int]:
        """The ids of its worker processes."""
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children()
            return [child.pid for child in children if any("drawing_process" in word for word in child.cmdline())]
        return []

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """Wait for its end, and return its exit code."""
        code = self.process.wait()
        while (line := self._new.get()) is not None:
            self.lines.append(line)
        return code

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def serving(
    gallery: Path,
    *options: object,
    cwd: Path | None = None,
    program: Sequence[str] = COMMAND,
    backend: str = "cpu",
) -> Iterator[RunningServer]:
    """A server that is ready."""
    server = RunningServer(gallery, *options, cwd=cwd, program=program, backend=backend)
    try:
        server.says("ready:")
        yield server
    finally:
        server.close()


def events(response: httpx2.Response) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and data of each server-sent event; comments are left out."""
    name = ""
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            yield name, json.loads(line[6:])


def until_step(http: httpx2.Client, job: str) -> None:
    """Wait until a job has done a step."""
    with http.stream("GET", f"/api/jobs/{job}/events") as response:
        next(data for name, data in events(response) if name == "step")


def until_end(http: httpx2.Client, job: str) -> dict[str, Any]:
    """Wait for the end of a job, and return it."""
    with http.stream("GET", f"/api/jobs/{job}/events") as response:
        next(data for name, data in events(response) if name == "end")
    answer: dict[str, Any] = http.get(f"/api/jobs/{job}").json()
    return answer


def gone(pid: int) -> None:
    """Wait for the end of a process that is no child of this one."""
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait()
