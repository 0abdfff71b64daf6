"""Rank 0 of a run on several devices: it starts the other ranks, unless a launcher has, and tells them what it does."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from qwenimg.backends import ranks
from qwenimg.cli.ranks import follow
from qwenimg.cli.ranks.identity import identity
from qwenimg.cli.ranks.link import Announce, CompileBlocks, DrawSteps, Hub, Open
from qwenimg.cli.signals import Stop
from qwenimg.common.base import leftovers
from qwenimg.common.base.errors import UsageError
from qwenimg.common.families.opening import Opening
from qwenimg.common.hub import open_model
from qwenimg.common.pipeline.rank_pipeline import RankPipeline
from qwenimg.common.runtime.group import RankPlace

if TYPE_CHECKING:
    from qwenimg.common.pipeline.pipeline import Pipeline
    from qwenimg.common.request.request import Request
    from qwenimg.common.runtime.engine import Engine

_CODE = "from qwenimg.cli.ranks.follow import main; main()"
_VERDICT = 5.0  # seconds in which the end of a rank is seen, once an exchange with it has failed
_GRACE = 5.0  # seconds for a rank to end by itself


class Leader:
    """Rank 0, which leads the others. They follow its pipeline once it is open."""

    def __init__(self, devices: int, place: RankPlace | None, opening: Opening, stop: Stop) -> None:
        """Check the options. place: that of a launcher, whose ranks meet here already; without one they are started
        when the pipeline is opened. Raises QwenimgError."""
        check(opening)
        self.backend = ranks.check_backend(opening.backend, launched_by_mlx=place is not None and ranks.by_mlx())
        self.devices, self._place, self._stop = devices, place, stop
        self._children: list[subprocess.Popen[str]] = []
        self._hub: Hub | None = None
        self._engine = None if place is None else self._met(place)

    def open_pipeline(self, opening: Opening, notify: Callable[[str, str], None]) -> Pipeline:
        """Open a pipeline on this rank, and the same on all others. Raises QwenimgError."""
        pipe = open_model.open_pipeline(opening, self._started, notify)
        assert self._hub is not None
        self._hub.send(Open(opening=opening, identity=identity(pipe)))
        self._hub.wait_opened()
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
        if self._hub is not None:
            self._hub.leave()
        if self._engine is not None and self._engine.group is not None:
            self._engine.group.close()
        for child in self._children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(_GRACE)
        leftovers.end(self._children)

    def _send(self, message: Announce | CompileBlocks | DrawSteps) -> None:
        assert self._hub is not None
        self._hub.send(message)

    # The start

    def _started(self) -> Engine:
        """Return the engine of this rank, with the others started."""
        if self._engine is None:
            name = "lo0" if sys.platform == "darwin" else "lo"
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            store, port = ranks.store(self.backend, self.devices)
            for rank in range(1, self.devices):
                self._start(rank, port)
            place = RankPlace(rank=0, size=self.devices, neighbours=self.devices, port=port)
            self._engine = self._met(place, store)
        return self._engine

    def _start(self, rank: int, port: int) -> None:
        about = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.devices, "LOCAL_WORLD_SIZE": self.devices,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip
        environment = {name: text for name, text in os.environ.items() if not name.startswith(("MLX_", "TORCHELASTIC"))}
        child = subprocess.Popen(
            [sys.executable, "-c", _CODE, self.backend],
            stdin=subprocess.PIPE,  # its end is the end of this process
            stdout=subprocess.DEVNULL,
            env=environment | {name: str(value) for name, value in about.items()},
            text=True,
            start_new_session=True,  # Ctrl-C in a terminal is for rank 0 alone
        )
        leftovers.add(child)
        self._children.append(child)
        threading.Thread(target=self._watch, args=(rank, child), daemon=True).start()

    def _watch(self, rank: int, child: subprocess.Popen[str]) -> None:
        """End this process if a rank ends before it has connected. It has said why, unless it was killed."""
        code = child.wait()
        if self._hub is None:
            how = f"was killed by signal {-code}" if code < 0 else "has ended"
            self._stop.fail(max(code, 1), "" if code > 0 else f"rank {rank} of {self.devices} {how} at its start")

    def _met(self, place: RankPlace, store: Any = None) -> Engine:
        """Return the engine of this rank once all have met and are connected."""
        engine = ranks.engine(self.backend, place, store)
        assert engine.group is not None
        self._engine = engine
        self._hub = Hub(engine.group, place, tuple(sys.argv[1:]), self._stop.fail)
        self._stop.last = self._hub.leave
        engine.group.failing = lambda: time.sleep(_VERDICT)  # by then the end of a rank has ended this process
        return engine


@contextmanager
def leading(devices: int, opening: Opening, stop: Stop) -> Iterator[Leader]:
    """Yield rank 0 of several devices, and end the others behind the context. Never returns on another rank of a
    launcher, which follows that one. Raises QwenimgError."""
    place = ranks.place(devices)
    if place is not None and place.rank:
        check(opening)
        follow.follow(place, ranks.check_backend(opening.backend, launched_by_mlx=ranks.by_mlx()), tuple(sys.argv[1:]))
    leader = Leader(devices, place, opening, stop)
    try:
        yield leader
    finally:
        leader.leave()


def check(opening: Opening) -> None:
    """Raise UsageError for an option that several devices do not have."""
    if opening.fallback:
        raise UsageError(
            "--fallback works on one device: of several only the one that meets a value too large would know of it; "
            "give the wider --precision instead"
        )
