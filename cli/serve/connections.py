"""The connections that clients open: how many there are, and how long one may be silent.

Silent connections cost an attacker nothing, and each takes a descriptor of this process, which also needs some for
pictures, for its database and for its workers.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Iterable
from contextlib import suppress

from uvicorn.protocols.http.h11_impl import H11Protocol

CONNECTIONS = 256  # at once, where the limit of descriptors is 1,024 as on Linux
DESCRIPTORS = 1024  # that this process asks for, where fewer are usual
RESERVED = 128  # of them, for files and workers
ACCEPTED = 32  # connections that are accepted in one go, before those beyond the limit are closed
BACKLOG = 512  # that wait to be accepted
FIRST = 5.0  # seconds before the first byte of a request
SLOW = 30.0  # seconds for the head of a request, for its body, and for a client to read what is sent
READ = 32 << 10  # bytes of one read: parsing a request of tiny chunks takes long


def room() -> int:
    """Raise the limit of descriptors, and return how many connections may be open, each with an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    limit = DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    return max(8, min(CONNECTIONS, (limit - RESERVED) // 3))


def listen(listeners: Iterable[socket.socket]) -> None:
    """Set the backlog of listening sockets to BACKLOG: uvicorn's is the number accepted at a time."""
    for listener in listeners:
        listener.listen(BACKLOG)


class HastyProtocol(H11Protocol):
    """A connection that is closed if it is silent, slow, or does not read. Above the limit, the connection that has
    been idle longest is closed; if none is idle, the new one."""

    _timer: asyncio.TimerHandle | None = None  # of a request that is waited for, or of a close
    _unread: asyncio.TimerHandle | None = None
    _is_silent = True  # True: no byte has come
    since = 0.0  # the time from which a request is waited for

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = READ  # type: ignore[attr-defined]
        assert self.limit_concurrency is not None
        if len(self.connections) > self.limit_concurrency - 1:
            self._make_room()
        self._wait(FIRST)

    def data_received(self, data: bytes) -> None:
        if self._is_silent:
            self._is_silent = False
            self._wait(SLOW)
        super().data_received(data)
        if self.transport.is_closing():
            self._wait(SLOW)

    def eof_received(self) -> None:
        super().eof_received()
        self._wait(SLOW)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait(SLOW)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def _watch_reader(self, before: int | None = None) -> None:
        """Drop a client that has read less than READ bytes since `before` bytes were waiting."""
        now = self.transport.get_write_buffer_size()
        if before is not None and now > before - READ:
            self.drop()
        else:
            self._unread = self.loop.call_later(SLOW, self._watch_reader, now)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._timer, self._unread):
            if timer is not None:
                timer.cancel()

    def _wait(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.since = self.loop.time()
        self._timer = self.loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        if self.is_idle or self.transport.is_closing():
            self.drop()

    @property
    def is_idle(self) -> bool:
        """True between requests, and until the head of a request is complete."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_sending(self) -> bool:
        """True while the body of a request is received."""
        return self.cycle is not None and self.cycle.more_body

    def drop(self) -> None:
        """Close the connection at once and discard unsent data."""
        self.connections.discard(self)
        self.transport.abort()

    def _make_room(self) -> None:
        others = [one for one in self.connections if isinstance(one, HastyProtocol) and one is not self]
        idle = [one for one in others if one.is_idle] or [one for one in others if one.is_sending]
        min(idle, key=lambda one: one.since, default=self).drop()
