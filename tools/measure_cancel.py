"""Measure how soon the server is free again: when a job is cancelled, and when a client goes.

    python tools/measure_cancel.py [--times 20]

Behind a long picture of the built-in model waits a short one. The picture ends after the step that is being computed;
printed is what comes on top: the time from the end of that step to the start of the next picture.
"""

from __future__ import annotations

import argparse
import contextlib
import queue
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import httpx2
from screenshots import serving
from support.servers import events

LONG: dict[str, Any] = {"prompt": "a red circle", "steps": 1000, "size": "128x128"}
SHORT: dict[str, Any] = {"prompt": "a ring", "steps": 1, "size": "64x64"}


class News:
    """The server's events, each with the moment at which it came."""

    def __init__(self, address: str) -> None:
        self._events: queue.SimpleQueue[tuple[float, str, dict[str, Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(address,), daemon=True).start()
        self.wait("jobs")

    def _read(self, address: str) -> None:
        stream = httpx2.stream("GET", f"{address}/api/events", timeout=None)
        with contextlib.suppress(httpx2.RemoteProtocolError), stream as response:  # the server is killed at the end
            for name, data in events(response):
                self._events.put((time.perf_counter(), name, data))

    def wait(self, name: str, job: str = "", state: str = "") -> tuple[float, list[float]]:
        """Wait for an event of `job`, or for its `state`; return its moment, and those of the steps of all jobs before
        it."""
        steps = list[float]()
        while True:
            moment, kind, data = self._events.get()
            rows = [row for row in data.get("jobs", ()) if row["id"] == job and row["state"] == state]
            if kind == name and (rows or data.get("id") == job or not job):
                return moment, steps
            if kind == "step":
                steps.append(moment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    times = parser.parse_args().times
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(folder) as address,
        httpx2.Client(base_url=address, timeout=None) as http,
    ):
        news = News(address)
        cancelled = [cancel(http, news) for _ in range(times)]
        gone = [go(address, http, news) for _ in range(times)]
    lengths, after, more = zip(*cancelled, strict=True)
    print(f"a step takes {shown(lengths)}; after a cancel came at most {max(more)} more")
    print(f"from the last step of a cancelled job to the start of the next one: {shown(after)}")
    print(f"from the end of a client's connection to it, the rest of a step included: {shown(gone)}")


def shown(seconds: Sequence[float]) -> str:
    return f"{1000 * statistics.median(seconds):.1f} ms, at most {1000 * max(seconds):.1f} ms"


def cancel(http: httpx2.Client, news: News) -> tuple[float, float, int]:
    """Cancel a job amid a step. Return the seconds of a step, those from its last step to the start of the next job,
    and the number of steps after the cancel."""
    long, short = (http.post("/api/jobs", json=body).json()["id"] for body in (LONG, SHORT))
    begun = [news.wait("step", long)[0] for _ in range(4)]
    time.sleep(random.random() * (begun[-1] - begun[-2]))
    http.delete(f"/api/jobs/{long}")
    asked = time.perf_counter()
    drawing, steps = news.wait("jobs", short, "drawing")
    last = max([*begun, *steps])
    return (begun[-1] - begun[0]) / 3, drawing - max(last, asked), sum(step > asked for step in steps)


def go(address: str, http: httpx2.Client, news: News) -> float:
    """Close the connection of a client whose picture is drawn. Return the seconds to the start of the next job."""
    with httpx2.Client(base_url=address, timeout=None) as client:
        with client.stream("POST", "/v1/images/generations", json=LONG | {"stream": True}) as answer:
            lines = answer.iter_lines()
            while not next(lines).startswith(": step 3"):
                pass
            short = http.post("/api/jobs", json=SHORT).json()["id"]
        moment = time.perf_counter()
    drawing, _ = news.wait("jobs", short, "drawing")
    return drawing - moment


if __name__ == "__main__":
    main()
