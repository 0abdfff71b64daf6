"""Rank 0 of a run on several devices: it starts the other ranks, unless a launcher has, and leads them."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from subprocess import DEVNULL
from typing import TYPE_CHECKING, Any

from qwenimg.backends import ranks
from qwenimg.cli.ranks import follow
from qwenimg.cli.ranks.identity import identity
from qwenimg.cli.ranks.link import Announce, CompileBlocks, DrawSteps, LeaderLink, Open
from qwenimg.cli.signals import Stop
from qwenimg.cli.workers import process
from qwenimg.cli.workers.process import Lost, Process
from qwenimg.common.base import leftovers
from qwenimg.common.base.errors import UsageError
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.hub import open_model
from qwenimg.common.pipeline.rank_pipeline import RankPipeline
from qwenimg.common.runtime.group import RankPlace

if TYPE_CHECKING:
    from qwenimg.common.pipeline.pipeline import Pipeline
    from qwenimg.common.request.request import Request
    from qwenimg.common.runtime.engine import Engine

_PROGRAM = "qwenimg.cli.ranks.follow"
_VERDICT = 5.0  # seconds in which the end of a rank is seen, once an exchange with it has failed


class Leader:
    """Rank 0. The other ranks follow its pipeline once it is open."""

    def __init__(self, devices: int, place: RankPlace | None, opening: LoadOptions, stop: Stop) -> None:
        """Check the options. place: set by a launcher, whose ranks connect here at once; None: the other ranks are
        started when the pipeline is opened. Raises QwenimgError."""
        check(opening)
        self.backend = ranks.check_backend(opening.backend, launched_by_mlx=place is not None and ranks.by_mlx())
        self.devices, self._place, self._stop = devices, place, stop
        self._children: list[tuple[Process, Connection]] = []  # with the pipe by whose end they see the end of this one
        self._link: LeaderLink | None = None
        self._engine = None if place is None else self._connected(place)

    def open_pipeline(self, opening: LoadOptions, notify: Callable[[str, str], None]) -> Pipeline:
        """Open a pipeline on this rank, and the same on all others. Raises QwenimgError."""
        pipe = open_model.open_pipeline(opening, self._started, notify)
        assert self._link is not None
        self._link.send(Open(opening=opening, identity=identity(pipe)))
        self._link.wait_opened()
        assert isinstance(pipe, RankPipeline)
        pipe.followers = self
        return pipe

    def draw(self, request: Request, hashes: Mapping[str, Any]) -> None:
        self._send(DrawSteps(request=request, hashes=dict(hashes)))

    def compile(self, on: bool) -> None:
        self._send(CompileBlocks(on=on))

    def announce(self, arguments: Mapping[str, Any]) -> None:
        self._send(Announce(arguments=arguments))

    def leave(self) -> None:
        """End the other ranks."""
        self._stop.last = None
        if self._link is not None:
            self._link.leave()
        if self._engine is not None and self._engine.group is not None:
            self._engine.group.close()
        for child, _ in self._children:
            process.end(child)
        leftovers.end(child for child, _ in self._children)

    def _send(self, message: Announce | CompileBlocks | DrawSteps) -> None:
        assert self._link is not None
        self._link.send(message)

    # The start

    def _started(self) -> Engine:
        """Start the other ranks, and return the engine of this one."""
        if self._engine is None:
            name = "lo0" if sys.platform == "darwin" else "lo"
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            store, port = ranks.store(self.backend, self.devices)
            for rank in range(1, self.devices):
                self._start(rank, port)
            place = RankPlace(rank=0, size=self.devices, neighbours=self.devices, port=port)
            self._engine = self._connected(place, store)
        return self._engine

    def _start(self, rank: int, port: int) -> None:
        about = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.devices, "LOCAL_WORLD_SIZE": self.devices,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip
        environment = {name: text for name, text in os.environ.items() if not name.startswith(("MLX_", "TORCHELASTIC"))}
        environment |= {name: str(value) for name, value in about.items()}
        child, pipe = process.start(_PROGRAM, self.backend, environment=environment, output=DEVNULL, apart=True)
        leftovers.add(child)
        self._children.append((child, pipe))
        threading.Thread(target=self._watch, args=(rank, child), daemon=True).start()

    def _watch(self, rank: int, child: Process) -> None:
        """End this process if a rank ends before it has connected. It has printed why, unless it was killed."""
        lost = Lost(child.wait())
        if self._link is None:
            text = f"rank {rank} of {self.devices} has ended at its start ({lost.reason})"
            self._stop.fail(max(lost.code, 1), "" if lost.code > 0 else text)

    def _connected(self, place: RankPlace, store: Any = None) -> Engine:
        """Connect with all other ranks, and return the engine of this one."""
        engine = ranks.engine(self.backend, place, store)
        assert engine.group is not None
        self._engine = engine
        self._link = LeaderLink(engine.group, place, tuple(sys.argv[1:]), self._stop.fail)
        self._stop.last = self._link.leave
        engine.group.failing = lambda: time.sleep(_VERDICT)  # by then the end of a rank has ended this process
        return engine


@contextmanager
def leading(devices: int, opening: LoadOptions, stop: Stop) -> Iterator[Leader]:
    """Yield rank 0 of several devices, and end the other ranks after the context. On another rank of a launcher it
    follows rank 0 and never returns. Raises QwenimgError."""
    place = ranks.place(devices)
    if place is not None and place.rank:
        check(opening)
        follow.follow(place, ranks.check_backend(opening.backend, launched_by_mlx=ranks.by_mlx()), tuple(sys.argv[1:]))
    leader = Leader(devices, place, opening, stop)
    try:
        yield leader
    finally:
        leader.leave()


def check(opening: LoadOptions) -> None:
    """Raise UsageError for an option that does not work on several devices."""
    if opening.fallback:
        raise UsageError(
            "--fallback works on one device: of several only the one that meets a value too large would know of it; "
            "give the wider --precision instead"
        )
