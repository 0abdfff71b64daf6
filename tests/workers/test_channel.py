"""The channel between a leader and a follower: order of messages, silence, and the end of either side."""

from __future__ import annotations

import multiprocessing
import threading
from typing import Any

import pytest

from qwenimg.cli.workers import channel as module
from qwenimg.cli.workers.channel import FollowerChannel, LeaderChannel, Ping, Pong
from qwenimg.cli.workers.process import Lost


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> tuple[LeaderChannel, FollowerChannel]:
    monkeypatch.setattr(module, "PAUSE", 0.01)
    ours, theirs = multiprocessing.Pipe()
    return LeaderChannel(ours), FollowerChannel(theirs)


def test_messages_arrive_in_their_order(ends: tuple[LeaderChannel, FollowerChannel]) -> None:
    leader, follower = ends
    for number in range(100):
        leader.send(number)
        follower.send(-number)
    assert [follower.receive() for _ in range(100)] == list(range(100))
    assert [leader.receive() for _ in range(100)] == [-number for number in range(100)]


def test_a_follower_that_answers_pings_may_compute_for_long(ends: tuple[LeaderChannel, FollowerChannel]) -> None:
    leader, follower = ends
    pipe, pings = follower._pipe, 5

    def answers() -> None:
        for _ in range(pings):
            assert pipe.recv() == Ping(), "nothing else was sent"
            pipe.send(Pong())
        pipe.send("done")

    threading.Thread(target=answers).start()
    assert leader.receive() == "done"


def test_a_follower_that_does_not_answer_is_noticed(ends: tuple[LeaderChannel, FollowerChannel]) -> None:
    """Also if it leaves a message unread that is larger than a pipe."""
    leader, _ = ends
    leader.send(bytes(8 << 20))
    with pytest.raises(TimeoutError):
        leader.receive()


def test_a_follower_may_take_longer_to_start() -> None:
    """So many pauses without an answer, and then as few as always."""
    polls = list[float]()

    class Pipe:
        def poll(self, seconds: float) -> bool:
            polls.append(seconds)
            return len(polls) == module.START

        def recv(self) -> str:
            return "begun"

        def send(self, message: object) -> None: ...

    pipe: Any = Pipe()
    leader = LeaderChannel(pipe, module.START)
    assert leader.receive() == "begun"
    with pytest.raises(TimeoutError):
        leader.receive()
    assert len(polls) == module.START + 1 + module.SILENCE and set(polls) == {module.PAUSE}


def test_the_end_of_the_follower(ends: tuple[LeaderChannel, FollowerChannel]) -> None:
    """What it has sent before arrives."""
    leader, follower = ends
    follower.send("last")
    follower._pipe.close()
    assert leader.receive() == "last"
    with pytest.raises(EOFError):
        leader.receive()
    leader.send("too late")
    leader.close()


def test_the_end_of_the_leader(ends: tuple[LeaderChannel, FollowerChannel]) -> None:
    leader, follower = ends
    leader.send("last")
    leader.close()
    assert follower.receive() == "last"
    with pytest.raises(EOFError):
        follower.receive()
    follower.send("too late")


@pytest.mark.parametrize(
    ("lost", "predicate", "reason"),
    [
        (Lost(0), "has ended", "exit code 0"),
        (Lost(1), "has ended", "exit code 1"),
        (Lost(-11), "has ended", "killed by SIGSEGV"),
        (Lost(-9), "was killed, most likely since memory ran out", "killed by SIGKILL, most likely out of memory"),
        (Lost(-99), "has ended", "killed by 99"),
        (Lost(-9, is_silent=True), "did not answer", "killed, since it did not answer"),
    ],
)
def test_the_end_of_a_process_in_words(lost: Lost, predicate: str, reason: str) -> None:
    assert lost.predicate.startswith(predicate) and lost.reason.startswith(reason)
    assert lost.is_out_of_memory == ("memory" in lost.predicate) == ("memory" in lost.reason)
