"""The connections between rank 0 and each other rank: instructions one way, errors the other, and the end of either.

They are separate from the frameworks' exchanges of arrays, so that a rank waits for instructions without a limit, and
the end of another rank is seen at once, whatever both are computing.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from qwenimg.cli.workers import channel
from qwenimg.cli.workers.channel import FollowerChannel, LeaderChannel
from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.version import __version__
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.group import Group, RankLost, RankPlace

PATIENCE = 60.0  # seconds until all ranks, which the framework has connected already, are connected here too
GREETING = 10.0  # seconds in which a new connection names its rank
# Until a machine that no longer answers counts as ended: 3 s of silence and three questions, 2 s apart
_ALIVE = {"TCP_KEEPIDLE": 3, "TCP_KEEPALIVE": 3, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 9000}
_LOCAL = ("127.0.0.1", "localhost")

# From rank 0


@dataclass(frozen=True, kw_only=True)
class Open:
    """A model to open, and its identity on rank 0."""

    opening: LoadOptions
    identity: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Announce:
    """Arguments for `Pipeline.prepare`."""

    arguments: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class CompileBlocks:
    """A switch: whether the denoiser is compiled when it is next loaded."""

    on: bool


@dataclass(frozen=True, kw_only=True)
class DrawSteps:
    """A request whose steps to compute, and the hashes of its LoRAs and control networks on rank 0."""

    request: Request
    hashes: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Leave:
    """The end of the run."""


# From another rank


@dataclass(frozen=True, kw_only=True)
class Hello:
    """The first message of a rank: its version, and its command line under a launcher."""

    version: str
    words: tuple[str, ...] | None


@dataclass(frozen=True, kw_only=True)
class ModelIsOpen:
    """The model is open."""


@dataclass(frozen=True, kw_only=True)
class Failed:
    """An error that ends this rank."""

    exit_code: int
    text: str


class LeaderLink:
    """Rank 0's connections. `ends(exit code, text)` is called in another thread when a rank has ended, failed or does
    not answer."""

    def __init__(
        self, group: Group, place: RankPlace, words: tuple[str, ...], ends: Callable[[int, str], None]
    ) -> None:
        """Send the others an address, and wait until all have connected. words: this rank's command line. Raises
        UsageError for a rank of another version or with other options, and RankLost."""
        self.size, self._ends, self._left = group.size, ends, False
        self._opened = threading.Semaphore(0)
        token = secrets.token_hex(16)
        with socket.create_server(("127.0.0.1" if place.host in _LOCAL else "", 0)) as server:
            group.broadcast(f"{place.host} {server.getsockname()[1]} {token}".encode())
            server.settimeout(PATIENCE)
            pipes: dict[int, Connection] = {}
            while len(pipes) < self.size - 1:
                try:
                    caller, _ = server.accept()
                except TimeoutError:
                    raise RankLost(f"of {self.size} ranks {len(pipes) + 1} have connected") from None
                if (rank := _greeted(caller, token)) is not None:
                    pipes[rank] = Connection(caller.detach())
        for rank, pipe in sorted(pipes.items()):
            self._check(rank, pipe, words)
        self._channels = {rank: LeaderChannel(pipe) for rank, pipe in pipes.items()}
        for rank in self._channels:
            threading.Thread(target=self._read, args=(rank,), daemon=True).start()

    def send(self, message: Open | Announce | CompileBlocks | DrawSteps | Leave) -> None:
        for link in self._channels.values():
            link.send(message)

    def wait_opened(self) -> None:
        """Wait until all have opened the model."""
        for _ in self._channels:
            self._opened.acquire()

    def leave(self) -> None:
        """End the other ranks; from now on the end of a rank is no error."""
        self._left = True
        self.send(Leave())
        for link in self._channels.values():
            link.flush(channel.PAUSE)

    def _check(self, rank: int, pipe: Connection, words: tuple[str, ...]) -> None:
        try:
            hello = pipe.recv() if pipe.poll(PATIENCE) else None
        except (EOFError, OSError):
            raise RankLost(self._lost(rank)) from None
        if hello is None:
            raise RankLost(self._silent(rank, PATIENCE))
        if hello.version != __version__:
            raise UsageError(f"rank {rank} is qwenimg {hello.version}, rank 0 {__version__}: install one on all")
        if hello.words not in (None, words):
            raise UsageError(f"rank {rank} was started with other options than rank 0: give all ranks one command")

    def _read(self, rank: int) -> None:
        try:
            while True:
                message = self._channels[rank].receive()
                if isinstance(message, Failed):
                    return self._end(message.exit_code, f"rank {rank}: {message.text}")
                if isinstance(message, ModelIsOpen):
                    self._opened.release()
        except EOFError:
            self._end(RankLost.exit_code, self._lost(rank))
        except TimeoutError:
            self._end(RankLost.exit_code, self._silent(rank, channel.silence()))

    def _end(self, code: int, text: str) -> None:
        if not self._left:
            self._ends(code, text)

    def _lost(self, rank: int) -> str:
        return f"rank {rank} of {self.size} has ended, killed or with its machine, so the picture is not drawn"

    def _silent(self, rank: int, seconds: float) -> str:
        return (
            f"rank {rank} of {self.size} has not answered for {seconds:.0f} s: its process is stopped (kill -STOP, a "
            "debugger) or its machine; all ranks end, and the picture is not drawn"
        )


class FollowerLink(FollowerChannel):
    """The connection of another rank to rank 0."""

    def __init__(self, group: Group, words: tuple[str, ...] | None) -> None:
        """Connect with rank 0. Raises RankLost."""
        self.size = group.size
        host, port, token = group.broadcast(b"").decode().split()
        try:
            caller = socket.create_connection((host, int(port)), PATIENCE)
            _keep_alive(caller)
            caller.sendall(f"{token} {group.rank:03d}".encode())
            caller.settimeout(None)
        except OSError as error:
            reason = error.strerror or "no answer"
            raise RankLost(f"rank {group.rank}: rank 0 cannot be reached at {host}:{port}: {reason}") from None
        super().__init__(Connection(caller.detach()))
        self.send(Hello(version=__version__, words=words))


def _greeted(caller: socket.socket, token: str) -> int | None:
    """Read the token and the rank of a new connection. Close a stranger's, and return None."""
    _keep_alive(caller)
    caller.settimeout(GREETING)
    expected = f"{token} 000"
    data = b""
    with suppress(OSError):
        while len(data) < len(expected) and (piece := caller.recv(len(expected) - len(data))):
            data += piece
    given, _, rank = data.decode("latin-1").partition(" ")
    if not (secrets.compare_digest(given.encode("latin-1"), token.encode()) and rank.isdecimal()):
        caller.close()
        return None
    caller.settimeout(None)
    return int(rank)


def _keep_alive(caller: socket.socket) -> None:
    """Turn on TCP keepalive, which notices a machine that is gone."""
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _ALIVE.items():
        if (number := getattr(socket, name, None)) is not None:
            with suppress(OSError):
                caller.setsockopt(socket.IPPROTO_TCP, number, value)
