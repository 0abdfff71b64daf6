"""A rank other than 0: it computes the steps of rank 0's images, and ends when rank 0 ends, for whatever reason."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from qwenimg.backends import ranks
from qwenimg.cli import failures, streams
from qwenimg.cli.ranks.identity import check_same, identity
from qwenimg.cli.ranks.link import Announce, CompileBlocks, DrawSteps, Failed, FollowerLink, Leave, ModelIsOpen, Open
from qwenimg.cli.signals import STOPPING
from qwenimg.common.base import leftovers
from qwenimg.common.base.errors import NumericsError
from qwenimg.common.hub.open_model import open_pipeline
from qwenimg.common.pipeline.rank_pipeline import RankPipeline
from qwenimg.common.runtime.group import RankLost, RankPlace

_FIRST = 1.0  # seconds for the thread that listens to see the end of rank 0 first


def main(descriptor: int, backend: str) -> None:
    """Follow rank 0, the process that started this one. descriptor: a pipe that ends when that process ends."""
    threading.Thread(target=_end_with_parent, args=(Connection(descriptor),), daemon=True).start()
    size = int(os.environ["WORLD_SIZE"])
    place = ranks.place(size)
    assert place is not None
    follow(place, backend, None)


def _handle(handler: signal.Handlers) -> None:
    """Set the handler of Ctrl-C and the other signals that end a run, which all ranks get."""
    for number in STOPPING:
        signal.signal(number, handler)


def follow(place: RankPlace, backend: str, words: tuple[str, ...] | None) -> NoReturn:
    """Connect with the other ranks, and follow rank 0 until it ends. words: the command line, under a launcher."""
    link: FollowerLink | None = None
    _handle(signal.SIG_DFL)
    try:
        engine = ranks.engine(backend, place)
        assert engine.group is not None
        link = FollowerLink(engine.group, words)
        _handle(signal.SIG_IGN)  # from here on rank 0 says when to end
        engine.group.failing = _wait
        _Follower(link, engine).run()
    except Exception as error:
        code, text = failures.explain(error)
        if link is None:
            failures.report(error)
            leftovers.remove_all()
            os._exit(code)
        if not isinstance(error, NumericsError):  # rank 0 has found the same values
            link.send(Failed(exit_code=code, text=text))
    _wait()


def _wait() -> NoReturn:
    """Wait until the thread that listens ends the process."""
    while True:
        threading.Event().wait()


class _Follower:
    def __init__(self, link: FollowerLink, engine: Any) -> None:
        self.link, self.engine, self.rank = link, engine, engine.group.rank
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def run(self) -> NoReturn:
        """Follow the messages of rank 0, one after the other."""
        pipe: RankPipeline | None = None
        while True:
            message = self.inbox.get()
            if isinstance(message, Open):
                pipe = self._opened(message)
                continue
            assert pipe is not None, "a model is opened first"
            if isinstance(message, Announce):
                pipe.prepare(**message.arguments)
            elif isinstance(message, CompileBlocks):
                pipe.compile("on" if message.on else "off")
            elif isinstance(message, DrawSteps):
                check_same(pipe.hashes(message.request), message.hashes)
                pipe.follow(message.request)

    def _opened(self, message: Open) -> RankPipeline:
        pipe = open_pipeline(message.opening, lambda: self.engine)
        assert isinstance(pipe, RankPipeline)
        check_same(identity(pipe), message.identity)
        self.link.send(ModelIsOpen())
        return pipe

    def _listen(self) -> None:
        """Receive messages in a thread, and end the process when rank 0 has ended."""
        try:
            while not isinstance(message := self.link.receive(), Leave):
                self.inbox.put(message)
        except EOFError:
            if self.rank == 1:  # one line is enough
                streams.say(f"qwenimg: error: rank 0 of {self.link.size} has ended, so all others end too")
            leftovers.remove_all()
            os._exit(RankLost.exit_code)
        leftovers.remove_all()
        os._exit(0)


def _end_with_parent(pipe: Connection) -> None:
    """End this process when its parent ends. Once all ranks are connected, the thread that listens sees that first, and
    reports it."""
    with suppress(EOFError, OSError):
        pipe.recv()
    time.sleep(_FIRST)
    leftovers.remove_all()
    os._exit(RankLost.exit_code)
