"""The connections of ranks, in threads: orders, errors, strangers, and the end of either side."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from qwenimg.cli.ranks import link
from qwenimg.cli.ranks.identity import check_same
from qwenimg.cli.ranks.link import Announce, DrawSteps, Failed, FollowerLink, LeaderLink, Leave, ModelIsOpen
from qwenimg.cli.workers import channel
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.group import RankLost, RankPlace

WORDS = ("a red circle", "--devices", "3")
PLACE = RankPlace(rank=0, size=3)


class Group:
    """The part of a group that broadcasts rank 0's address."""

    def __init__(self, rank: int, size: int, told: queue.SimpleQueue[bytes]) -> None:
        self.rank, self.size, self._told = rank, size, told

    def broadcast(self, data: bytes) -> bytes:
        if self.rank == 0:
            for _ in range(self.size):
                self._told.put(data)
        return self._told.get()


Connected = tuple[LeaderLink, list[FollowerLink], "queue.SimpleQueue[tuple[int, str]]"]


def connected(
    words: tuple[str, ...] | None = WORDS, size: int = 3, before: Callable[[int, str], None] = lambda port, token: None
) -> Connected:
    """The link of rank 0 and those of the others; before: is called with the address first."""
    told, ended, followers = queue.SimpleQueue[bytes](), queue.SimpleQueue[tuple[int, str]](), list[FollowerLink]()

    def connect() -> None:
        address = told.get()
        told.put(address)
        _, port, token = address.decode().split()
        before(int(port), token)
        for rank in range(1, size):
            group: Any = Group(rank, size, told)
            followers.append(FollowerLink(group, words))

    thread = threading.Thread(target=connect)
    thread.start()
    group: Any = Group(0, size, told)
    try:
        leader = LeaderLink(group, PLACE, WORDS, lambda code, text: ended.put((code, text)))
    finally:
        thread.join()
    return leader, followers, ended


def hang_up(pipe: Connection) -> None:
    """As the end of a process does: to close what another thread reads would not."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as caller:
        caller.shutdown(socket.SHUT_RDWR)


def test_orders_arrive_at_all_and_in_order() -> None:
    leader, followers, ended = connected()
    image = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    leader.send(Announce(arguments={"prompts": ["x"]}))
    leader.send(DrawSteps(request=Request(prompt="x", seed=7, image=image), hashes={}))
    for follower in followers:
        assert follower.receive() == Announce(arguments={"prompts": ["x"]})
        request = follower.receive().request
        assert request.seed == 7 and (request.image == image).all()
        follower.send(ModelIsOpen())
    leader.wait_opened()
    leader.leave()
    assert all(isinstance(follower.receive(), Leave) for follower in followers)
    del followers
    assert ended.empty()


def test_an_error_of_a_rank_is_rank_0s() -> None:
    _, followers, ended = connected()
    followers[1].send(Failed(exit_code=4, text="it takes 5 GB"))
    assert ended.get() == (4, "rank 2: it takes 5 GB")


def test_the_end_of_a_rank_is_seen_at_once() -> None:
    leader, followers, ended = connected()
    hang_up(followers[0]._pipe)
    code, text = ended.get()
    assert code == 1 and text.startswith("rank 1 of 3 has ended")
    for pipe in leader._channels.values():
        hang_up(pipe._pipe)
    with pytest.raises(EOFError):
        followers[1].receive()


def test_after_leaving_no_end_is_an_error() -> None:
    leader, followers, ended = connected()
    leader.leave()
    for follower in followers:
        hang_up(follower._pipe)
    for thread in threading.enumerate():
        if "(_read)" in thread.name:
            thread.join(5)
    assert ended.empty()


def listens(follower: FollowerLink, until: threading.Event) -> threading.Thread:
    """Receive orders as a rank does, for as long as the rank is not stopped."""

    def receive() -> None:
        with suppress(EOFError, OSError):
            while not until.is_set():
                follower.receive()

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    return thread


def test_a_rank_that_does_not_answer_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two one answers, though it sends nothing else."""
    monkeypatch.setattr(channel, "PAUSE", 0.02)
    leader, followers, ended = connected()
    asked: queue.SimpleQueue[int] = queue.SimpleQueue()
    send = FollowerLink.send

    def noted(follower: FollowerLink, message: Any) -> None:
        asked.put(1)
        send(follower, message)

    monkeypatch.setattr(FollowerLink, "send", noted)
    listens(followers[0], threading.Event())
    code, text = ended.get()
    print(text)
    assert code == 1 and text.startswith("rank 2 of 3 has not answered for 0 s: its process is stopped")
    assert len(text) < 300 and not asked.empty() and ended.empty()
    for _ in range(2 * channel.SILENCE):  # the other one is asked again and again
        asked.get()
    assert ended.empty()
    leader.leave()


def test_a_question_waits_for_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a message that a stopped rank does not read: `send` returns, and the end of all comes."""
    monkeypatch.setattr(channel, "PAUSE", 0.02)
    leader, _, ended = connected(size=2)
    leader.send(Announce(arguments={"image": bytes(8 << 20)}))  # more than a connection holds
    code, text = ended.get()
    leader.leave()
    assert code == 1 and text.startswith("rank 1 of 2 has not answered")


def test_a_rank_that_is_stopped_before_it_says_hello(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "PATIENCE", 0.05)
    monkeypatch.setattr(FollowerLink, "send", lambda follower, message: None)
    with pytest.raises(RankLost, match="rank 1 of 3 has not answered"):
        connected()


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\n\r\n" + b"x" * 64, b"\xff" * 36, b"0" * 32 + b" 001"])
def test_strangers_are_hung_up_on(data: bytes) -> None:
    def stranger(port: int, token: str) -> None:
        refused = suppress(ConnectionResetError, BrokenPipeError)  # it has hung up before it had read all
        with refused, socket.create_connection(("127.0.0.1", port)) as caller:
            caller.sendall(data)
            with suppress(OSError):
                caller.shutdown(socket.SHUT_WR)
            assert caller.recv(1) == b""

    leader, followers, ended = connected(before=stranger)
    assert len(followers) == 2 and ended.empty()
    leader.leave()


def test_other_options_and_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="rank 1 was started with other options than rank 0"):
        connected(words=("a blue star",))
    connected(words=None)[0].leave()  # rank 0 has started it itself
    send = FollowerLink.send
    monkeypatch.setattr(FollowerLink, "send", lambda follower, hello: send(follower, replace(hello, version="9")))
    with pytest.raises(UsageError, match="rank 1 is qwenimg 9, rank 0 0"):
        connected()


def test_a_rank_that_does_not_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "PATIENCE", 0.01)
    group: Any = Group(0, 2, queue.SimpleQueue())
    with pytest.raises(RankLost, match="of 2 ranks 1 have connected"):
        LeaderLink(group, RankPlace(rank=0, size=2), WORDS, lambda code, text: None)


def test_rank_0_that_is_not_there() -> None:
    told: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    told.put(f"127.0.0.1 {port} {'0' * 32}".encode())
    group: Any = Group(1, 2, told)
    with pytest.raises(RankLost, match=f"rank 0 cannot be reached at 127.0.0.1:{port}: Connection refused"):
        FollowerLink(group, None)


def test_what_must_be_the_same() -> None:
    check_same({"--precision": "bf16"}, {"--precision": "bf16"})
    with pytest.raises(ModelError, match="--precision differs: fp32 here, bf16 on rank 0"):
        check_same({"--precision": "fp32"}, {"--precision": "bf16"})
    with pytest.raises(ModelError, match="the files of the vae differs: missing here, 123456789012 on rank 0"):
        check_same({}, {"the files of the vae": "1234567890123"})
    with pytest.raises(ModelError, match="lora_sha256 differs: abc here, missing on rank 0"):
        check_same({"lora_sha256": "abc"}, {})
