"""Both ends of a connection between two processes: messages, pings, and the end of either process.

The leader is a server, the driver of a batch or rank 0; a follower is a worker or another rank.
"""

from __future__ import annotations

import queue
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

PAUSE, SILENCE = 5.0, 12  # seconds; so many of them in a row without an answer, and the follower's process is stopped
START = 120  # pauses in place of SILENCE for a follower that starts: a slow disk may hold its modules


@dataclass(frozen=True, kw_only=True)
class Ping:
    """A question that a thread of the follower answers, whatever else the follower computes."""


@dataclass(frozen=True, kw_only=True)
class Pong:
    """The answer to `Ping`."""


def silence() -> float:
    """Return the seconds after which a follower that does not answer counts as stopped."""
    return SILENCE * PAUSE


class LeaderChannel:
    """The leader's end. `send` and `receive` are called from different threads."""

    def __init__(self, pipe: Connection, pauses: int | None = None) -> None:
        """Create this end. pauses: the most without an answer, until the first message; default SILENCE."""
        self._pipe, self._pauses = pipe, pauses
        self._outbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()

    def send(self, message: object) -> None:
        """Send a message, and never wait: a stopped follower does not read."""
        self._outbox.put(message)

    def flush(self, seconds: float) -> None:
        """Wait at most `seconds` until all messages are sent. No others can follow."""
        self._outbox.put(None)
        self._writer.join(seconds)

    def receive(self) -> Any:
        """Wait for a message. Raises EOFError once the follower has ended, and TimeoutError if it does not answer.

        Pauses are counted and not seconds: while this process itself is stopped, by Ctrl-Z, none goes by."""
        while True:
            self._wait()
            try:
                message = self._pipe.recv()
            except OSError:
                raise EOFError from None
            self._pauses = None
            if not isinstance(message, Pong):
                return message

    def close(self) -> None:
        """Close the connection to a follower that has ended."""
        self.flush(PAUSE)
        self._pipe.close()

    def _wait(self) -> None:
        for pause in range(1 + (SILENCE if self._pauses is None else self._pauses)):
            if self._pipe.poll(PAUSE):
                return
            if not pause:
                self.send(Ping())
        raise TimeoutError

    def _write(self) -> None:
        with suppress(OSError):  # the follower has ended, and `receive` raises
            while (message := self._outbox.get()) is not None:
                self._pipe.send(message)


class FollowerChannel:
    """The follower's end. Any thread may send."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._sending = pipe, threading.Lock()

    def send(self, message: object) -> None:
        with self._sending, suppress(OSError):  # the leader has ended, and `receive` raises
            self._pipe.send(message)

    def receive(self) -> Any:
        """Wait for a message, and answer pings meanwhile. Raises EOFError once the leader has ended."""
        try:
            while isinstance(message := self._pipe.recv(), Ping):
                self.send(Pong())
        except OSError:
            raise EOFError from None
        return message
