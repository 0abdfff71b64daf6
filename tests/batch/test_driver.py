"""The driver with workers that say what the test says, and the journal; no process, no clock."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.fake_worker import FakeWorker, at_once, settle

from qwenimg.cli.batch import driver as module
from qwenimg.cli.batch.driver import STARTS, TRIES, BatchOutcome, Driver
from qwenimg.cli.batch.record import BatchJournal
from qwenimg.cli.batch.tasks import BatchTask
from qwenimg.cli.serve.messages import PictureDrawn, Settings, Unusable
from qwenimg.common.base.errors import UsageError
from qwenimg.common.families.opening import Opening

Body = Callable[[Driver, list[FakeWorker]], Awaitable[None]]


def task(i: int) -> BatchTask:
    return BatchTask(key=f"{i:016x}".ljust(64, "0"), where=f"r:{i}", fields={"prompt": "x"}, seed=i)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[BatchOutcome, list[Any]]]:
    """Run a driver with `count` pictures while `body(driver, workers)` says what happens."""

    def runs(body: Body, count: int, workers: int = 1) -> tuple[BatchOutcome, list[Any]]:
        monkeypatch.setattr(module, "PAUSE", 0.0)
        monkeypatch.setattr(asyncio, "to_thread", at_once)
        journal, ended = BatchJournal(tmp_path / "out", (0, 1)), list[Any]()
        settings = Settings(models={"model": Opening()}, backends=("cpu",) * workers)

        async def whole() -> BatchOutcome:
            driver = Driver(
                [task(i) for i in range(count)], frozenset(), journal, settings,
                lambda one, error, seconds: ended.append((one.seed, error)), lambda line: None, FakeWorker,
            )  # fmt: skip
            running = asyncio.create_task(driver.run())
            await settle()
            there: Any = driver.workers
            await body(driver, there)
            return await running

        outcome = asyncio.run(whole())
        journal.close()
        return outcome, ended

    return runs


async def draw(worker: FakeWorker) -> None:
    await worker.picture()
    await worker.finish()


def test_each_worker_has_one_picture_at_a_time(run, tmp_path: Path) -> None:
    async def body(driver: Driver, workers: list[FakeWorker]) -> None:
        for worker in workers:
            await worker.get_ready()
        assert [worker.order.seeds for worker in workers] == [(0,), (1,)] and len(driver.waiting) == 3
        while any(worker.order for worker in workers):
            for worker in workers:
                if worker.order:
                    await draw(worker)

    outcome, ended = run(body, 5, workers=2)
    assert outcome.done == 5 and not outcome.failed and not outcome.left
    assert sorted(seed for seed, _ in ended) == [0, 1, 2, 3, 4]
    assert len(list((tmp_path / "out").glob("*.png"))) == 5


def test_no_more_workers_than_pictures(run) -> None:
    async def body(driver: Driver, workers: list[FakeWorker]) -> None:
        assert len(workers) == 2
        for worker in workers:
            await worker.get_ready()
        for worker in workers:
            await draw(worker)

    assert run(body, 2, workers=9)[0].done == 2


def test_a_picture_that_ends_workers_is_given_up_and_the_others_are_drawn(run, tmp_path: Path) -> None:
    async def body(driver: Driver, workers: list[FakeWorker]) -> None:
        [worker] = workers
        await worker.get_ready()
        while worker.order is not None:
            if worker.order.seeds == (1,):
                await worker.die()
                if driver.waiting:
                    await worker.get_ready()
            else:
                await draw(worker)

    outcome, ended = run(body, 3)
    assert outcome.done == 2 and outcome.failed == [1]
    assert [(seed, bool(error)) for seed, error in ended] == [(0, False), (2, False), (1, True)]
    rows = [json.loads(line) for line in (tmp_path / "out" / "journal.jsonl").read_text().splitlines()]
    assert (rows[-1]["state"], rows[-1]["tries"]) == ("failed", TRIES) and "memory" in rows[-1]["error"]


def test_a_picture_that_cannot_be_drawn_is_given_up_at_once(run) -> None:
    async def body(driver: Driver, workers: list[FakeWorker]) -> None:
        await workers[0].get_ready()
        await workers[0].finish("steps: no schedule", 2)
        await draw(workers[0])

    outcome, ended = run(body, 2)
    assert (outcome.done, outcome.failed, ended[0]) == (1, [2], (0, "steps: no schedule"))


def test_a_worker_that_is_never_ready_ends_the_batch(run) -> None:
    async def body(driver: Driver, workers: list[FakeWorker]) -> None:
        for _ in range(STARTS):
            await workers[0].die(1)
        assert workers[0].starts == STARTS

    assert run(body, 2)[0].left == 2


def test_a_model_that_does_not_open_ends_the_batch(run) -> None:
    async def body(driver: Driver, workers: list[FakeWorker]) -> None:
        await workers[0].say(Unusable(exit_code=5, text="no model"))
        await workers[0].die(0)

    outcome, _ = run(body, 2)
    assert outcome.unusable is not None and outcome.unusable.exit_code == 5 and outcome.left == 2


def test_a_signal_finishes_what_is_drawn(run) -> None:
    async def body(driver: Driver, workers: list[FakeWorker]) -> None:
        first, second = workers
        await first.get_ready()
        driver.stop()
        await settle()
        assert second.closed and not first.closed, "one that loads is ended at once"
        await second.die(0)
        await draw(first)

    outcome, ended = run(body, 5, workers=2)
    assert (outcome.done, outcome.left, ended) == (1, 4, [(0, "")])


# The journal


def drawn(data: bytes = b"PNG") -> PictureDrawn:
    return PictureDrawn(order="x", index=0, data=data, recipe={}, seconds=0.1)


def test_the_journal_forgets_a_torn_line_and_nothing_else(tmp_path: Path) -> None:
    journal = BatchJournal(tmp_path, (0, 1))
    for i in range(3):
        journal.publish(task(i), b"PNG", 0.1, replace=False)
    journal.close()
    whole = (tmp_path / "journal.jsonl").read_bytes()
    for cut in range(len(whole)):
        (tmp_path / "journal.jsonl").write_bytes(whole[:cut])
        journal = BatchJournal(tmp_path, (0, 1))
        assert len(journal.known().done) == whole[:cut].count(b"\n")
        journal.close()
        assert (tmp_path / "journal.jsonl").read_bytes() == whole[: whole[:cut].rfind(b"\n") + 1]


def test_a_published_picture_is_adopted_and_a_changed_one_is_not_there(tmp_path: Path) -> None:
    journal = BatchJournal(tmp_path, (0, 1))
    assert not journal.adopt(task(1))
    (tmp_path / task(1).name).write_bytes(b"of a killed driver")
    assert journal.adopt(task(1))
    sha256 = journal.known().done[task(1).key]
    assert journal.is_there(task(1), sha256)
    journal.publish(task(1), b"late", 0.1, replace=False)
    assert (tmp_path / task(1).name).read_bytes() == b"of a killed driver", "the first one wins"
    (tmp_path / task(1).name).write_bytes(b"changed")
    assert not journal.is_there(task(1), sha256)
    journal.publish(task(1), b"again", 0.1, replace=True)
    assert journal.is_there(task(1), journal.known().done[task(1).key])
    journal.close()


def test_shards_read_each_other_and_write_their_own(tmp_path: Path) -> None:
    first, second = BatchJournal(tmp_path, (0, 2)), BatchJournal(tmp_path, (1, 2))
    first.publish(task(1), b"PNG", 0.1, replace=False)
    second.add(task(2), "failed", error="no", exit=1, tries=3)
    assert set(second.known().done) == {task(1).key} and set(first.known().failed) == {task(2).key}
    with pytest.raises(UsageError, match="another batch"):
        BatchJournal(tmp_path, (1, 2))
    second.publish(task(2), b"PNG", 0.1, replace=False)
    assert not first.known().failed
    first.close()
    second.close()


@pytest.mark.parametrize("line", [b"{", b"[]", b"{}", b'{"key": 3, "state": "done"}', b"\xff", b"null"])
def test_lines_that_are_none_of_ours_are_left_out(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "journal.jsonl").write_bytes(line + b"\n")
    journal = BatchJournal(tmp_path, (0, 1))
    assert journal.known().done == {}
    journal.close()
