"""A rank other than 0: it computes the steps of rank 0's images, and ends when rank 0 ends, for whatever reason."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from typing import Any, NoReturn

from qwenimg.backends import ranks
from qwenimg.cli import failures, streams
from qwenimg.cli.ranks.identity import check_same, identity
from qwenimg.cli.ranks.link import Announce, CompileBlocks, DrawSteps, Failed, Leave, ModelIsOpen, Open, Spoke
from qwenimg.cli.signals import STOPPING
from qwenimg.common.base import leftovers
from qwenimg.common.base.errors import NumericsError
from qwenimg.common.hub.open_model import open_pipeline
from qwenimg.common.pipeline.rank_pipeline import RankPipeline
from qwenimg.common.runtime.group import RankLost, RankPlace

_FIRST = 1.0  # seconds


def main() -> None:
    """Follow rank 0, the process that started this one."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    size = int(os.environ["WORLD_SIZE"])
    place = ranks.place(size)
    assert place is not None
    follow(place, sys.argv[1], None)


def _handle(way: signal.Handlers) -> None:
    """Set the handler of Ctrl-C and other signals to end, which all ranks get."""
    for number in STOPPING:
        signal.signal(number, way)


def follow(place: RankPlace, backend: str, words: tuple[str, ...] | None) -> NoReturn:
    """Meet the other ranks, and follow rank 0 until it ends. words: the command line that a launcher gave."""
    spoke: Spoke | None = None
    _handle(signal.SIG_DFL)
    try:
        engine = ranks.engine(backend, place)
        assert engine.group is not None
        spoke = Spoke(engine.group, words)
        _handle(signal.SIG_IGN)  # from here on rank 0 says when to end
        engine.group.failing = _wait
        _Follower(spoke, engine).run()
    except Exception as error:
        code, text = failures.explain(error)
        if spoke is None:
            failures.report(error)
            leftovers.remove_all()
            os._exit(code)
        if not isinstance(error, NumericsError):  # that one rank 0 has met too
            spoke.send(Failed(exit_code=code, text=text))
    _wait()


def _wait() -> NoReturn:
    """Wait until the thread that listens ends the process."""
    while True:
        threading.Event().wait()


class _Follower:
    def __init__(self, spoke: Spoke, engine: Any) -> None:
        self.spoke, self.engine, self.rank = spoke, engine, engine.group.rank
        self.orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def run(self) -> NoReturn:
        """Follow the orders of rank 0, one after the other. Raises their errors."""
        pipe: RankPipeline | None = None
        while True:
            order = self.orders.get()
            if isinstance(order, Open):
                pipe = self._opened(order)
                continue
            assert pipe is not None, "a model is opened first"
            if isinstance(order, Announce):
                pipe.prepare(**order.arguments)
            elif isinstance(order, CompileBlocks):
                pipe.compile("on" if order.on else "off")
            elif isinstance(order, DrawSteps):
                check_same(pipe.hashes(order.request), order.hashes)
                pipe.follow(order.request)

    def _opened(self, order: Open) -> RankPipeline:
        pipe = open_pipeline(order.opening, lambda: self.engine)
        assert isinstance(pipe, RankPipeline)
        check_same(identity(pipe), order.identity)
        self.spoke.send(ModelIsOpen())
        return pipe

    def _listen(self) -> None:
        """Receive orders in a thread of its own, and end the process when rank 0 has ended."""
        try:
            while not isinstance(order := self.spoke.receive(), Leave):
                self.orders.put(order)
        except EOFError:
            if self.rank == 1:  # one of all says so
                streams.say(f"qwenimg: error: rank 0 of {self.spoke.size} has ended, so all others end too")
            leftovers.remove_all()
            os._exit(RankLost.exit_code)
        leftovers.remove_all()
        os._exit(0)


def _end_with_parent() -> None:
    """End this process when its parent ends, which closes this end of the pipe. Once both are connected, the thread
    that listens sees that end first, and reports it."""
    os.read(0, 1)
    time.sleep(_FIRST)
    leftovers.remove_all()
    os._exit(RankLost.exit_code)
