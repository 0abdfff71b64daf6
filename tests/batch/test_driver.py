"""The driver with workers that say what the test says, and the journal; no process, no clock."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.fake_worker import PNG, FakeWorker, at_once, settle

from qwenimg.cli.batch import driver as module
from qwenimg.cli.batch.driver import STARTS, TRIES, BatchOutcome, Driver
from qwenimg.cli.batch.record import MAX_BYTES, MAX_LINE, BatchJournal
from qwenimg.cli.batch.tasks import BatchTask
from qwenimg.cli.workers.messages import PictureDrawn, Start, Unusable
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.jobs.job import Job
from qwenimg.common.pictures.png import encode_png, has_batch_key, with_batch_key

OTHER = encode_png(np.full((2, 2, 3), 9, np.uint8), {}, None)
Body = Callable[[Driver, list[FakeWorker]], Awaitable[None]]


def task(i: int) -> BatchTask:
    return BatchTask(key=f"{i:016x}".ljust(64, "0"), job=Job(options={"prompt": "x"}, seeds=(i,), where=f"r:{i}"))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[BatchOutcome, list[Any]]]:
    """Run a driver with `count` pictures while `body(driver, workers)` says what happens."""

    def runs(body: Body, count: int, workers: int = 1) -> tuple[BatchOutcome, list[Any]]:
        monkeypatch.setattr(module, "PAUSE", 0.0)
        monkeypatch.setattr(asyncio, "to_thread", at_once)
        journal, ended = BatchJournal(tmp_path / "out", (0, 1)), list[Any]()
        starts = [Start(models={"model": LoadOptions()}, backend="cpu")] * workers

        async def whole() -> BatchOutcome:
            driver = Driver(
                [task(i) for i in range(count)], frozenset(), journal, starts,
                lambda one, error, seconds: ended.append((one.job.seed, error)), lambda line: None, FakeWorker,
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
        assert [worker.task.job.seeds for worker in workers] == [(0,), (1,)] and len(driver.waiting) == 3
        while any(worker.task for worker in workers):
            for worker in workers:
                if worker.task:
                    await draw(worker)

    outcome, ended = run(body, 5, workers=2)
    assert outcome.done == 5 and not outcome.failed and not outcome.left
    assert sorted(seed for seed, _ in ended) == [0, 1, 2, 3, 4]
    assert len(list((tmp_path / "out").glob("*.png"))) == 5


def test_warnings_about_pictures_are_printed_once(run) -> None:
    lines: list[str] = []

    async def body(driver: Driver, workers: list[FakeWorker]) -> None:
        [worker] = workers
        driver.say = lines.append
        await worker.get_ready()
        for i in range(2):
            recipe = {"warnings": ["the picture is blank", f"only {i}"]}
            await worker.say(PictureDrawn(id=worker.task.id, index=0, data=PNG, recipe=recipe, seconds=0.1))
            await worker.finish()

    assert run(body, 2)[0].done == 2
    assert lines == ["warning: r:0: the picture is blank", "warning: r:0: only 0", "warning: r:1: only 1"]


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
        while worker.task is not None:
            if worker.task.job.seeds == (1,):
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


def drawn(data: bytes = PNG) -> PictureDrawn:
    return PictureDrawn(id="x", index=0, data=data, recipe={}, seconds=0.1)


def test_the_journal_forgets_a_torn_line_and_nothing_else(tmp_path: Path) -> None:
    journal = BatchJournal(tmp_path, (0, 1))
    for i in range(3):
        journal.publish(task(i), PNG, 0.1, replace=False)
    journal.close()
    whole = (tmp_path / "journal.jsonl").read_bytes()
    for cut in range(len(whole)):
        (tmp_path / "journal.jsonl").write_bytes(whole[:cut])
        journal = BatchJournal(tmp_path, (0, 1))
        assert len(journal.entries().done) == whole[:cut].count(b"\n")
        journal.close()
        assert (tmp_path / "journal.jsonl").read_bytes() == whole[: whole[:cut].rfind(b"\n") + 1]


def test_a_published_picture_is_adopted_and_a_changed_one_is_not_there(tmp_path: Path) -> None:
    journal, path, whole = BatchJournal(tmp_path, (0, 1)), tmp_path / task(1).name, with_batch_key(PNG, task(1).key)
    assert not journal.adopt(task(1))
    path.write_bytes(whole)  # of a killed driver
    assert journal.adopt(task(1))
    sha256 = journal.entries().done[task(1).key]
    assert journal.is_intact(task(1), sha256)
    journal.publish(task(1), OTHER, 0.1, replace=False)
    assert path.read_bytes() == whole, "the first one wins"
    path.write_bytes(b"changed")
    assert not journal.is_intact(task(1), sha256)
    journal.publish(task(1), OTHER, 0.1, replace=True)
    assert journal.is_intact(task(1), journal.entries().done[task(1).key])
    assert Image.open(path).getpixel((0, 0)) == (9, 9, 9), "a reader of PNG takes the text for what it is"
    journal.close()


def test_only_a_whole_picture_with_its_key_is_adopted(tmp_path: Path) -> None:
    """Every cut and every changed byte, the picture of another key, and one without."""
    whole = with_batch_key(PNG, task(1).key)
    assert has_batch_key(whole, task(1).key)
    cuts = [whole[:cut] for cut in range(len(whole))]
    changed = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole))]
    others = [PNG, with_batch_key(PNG, task(2).key), whole + b"x", PNG[:-12] + whole[-12:]]
    assert not any(has_batch_key(data, task(1).key) for data in (*cuts, *changed, *others))
    journal = BatchJournal(tmp_path, (0, 1))
    for data in (b"", whole[:-1], PNG, b"a foreign file"):
        (tmp_path / task(1).name).write_bytes(data)
        assert not journal.adopt(task(1)) and not journal.entries().done
    journal.publish(task(1), PNG, 0.1, replace=False)
    assert (tmp_path / task(1).name).read_bytes() == whole, "drawn anew"
    journal.close()


def special(path: Path, kind: str, elsewhere: Path) -> None:
    """Put something that is no regular file at `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    match kind:
        case "link":
            path.symlink_to(elsewhere)
        case "link to nothing":
            path.symlink_to(path.with_name("nowhere"))
        case "link to itself":
            path.symlink_to(path)
        case "endless":
            path.symlink_to("/dev/zero")
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()


KINDS = ("link", "link to nothing", "link to itself", "endless", "pipe", "folder")


@pytest.mark.parametrize("name", ["journal.jsonl", "journal-1-of-2.jsonl"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_journal_is_a_regular_file(tmp_path: Path, kind: str, name: str) -> None:
    """Its own, and that of another shard, which is only read."""
    precious = tmp_path / "precious.txt"
    precious.write_text("no line of a journal, and no line end")
    special(tmp_path / "out" / name, kind, precious)
    with pytest.raises(
        UsageError, match=r"cannot be a batch's journal: .*; move it away, or give another -o$"
    ) as found:
        journal = BatchJournal(tmp_path / "out", (0, 1))
        journal.entries()
    assert len(str(found.value)) <= 300 and "\n" not in str(found.value)
    assert precious.read_text() == "no line of a journal, and no line end"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_regular_file_under_a_pictures_name_is_no_picture(tmp_path: Path, run: Any, kind: str) -> None:
    """A link is replaced and not followed; a folder or a pipe fails this picture alone."""
    precious = tmp_path / "precious.png"
    precious.write_bytes(with_batch_key(PNG, task(0).key))
    special(tmp_path / "out" / task(0).name, kind, precious)

    async def body(driver: Driver, workers: list[FakeWorker]) -> None:
        assert not driver.journal.adopt(task(0))
        await workers[0].get_ready()
        await draw(workers[0])
        await draw(workers[0])

    outcome, ended = run(body, 2)
    assert precious.read_bytes() == with_batch_key(PNG, task(0).key)
    if kind in ("folder", "pipe"):
        assert (outcome.done, outcome.failed) == (1, [2]) and "not a regular file" in ended[0][1]
    else:
        assert outcome.done == 2 and not (tmp_path / "out" / task(0).name).is_symlink()


def test_shards_read_each_other_and_write_their_own(tmp_path: Path) -> None:
    first, second = BatchJournal(tmp_path, (0, 2)), BatchJournal(tmp_path, (1, 2))
    first.publish(task(1), PNG, 0.1, replace=False)
    second.add(task(2), "failed", error="no", exit=1, tries=3)
    assert set(second.entries().done) == {task(1).key} and set(first.entries().failed) == {task(2).key}
    with pytest.raises(UsageError, match="another batch"):
        BatchJournal(tmp_path, (1, 2))
    second.publish(task(2), PNG, 0.1, replace=False)
    assert not first.entries().failed
    first.close()
    second.close()


GOOD = {"key": "0" * 64, "state": "done", "file": "x.png", "line": "r:1", "seed": 1, "sha256": "1" * 64}
DAMAGE: dict[str, bytes] = {
    "no JSON": b"{",
    "no object": b"[]",
    "empty": b"{}",
    "a blank line": b"",
    "null": b"null",
    "no UTF-8": b"\xff",
    "zeros": b"\0" * 40,
    "deep": b"[" * 100_000,
    "a key twice": b'{"key": "%s", ' % (b"0" * 64) + json.dumps(GOOD).encode()[1:],
    "a huge number": json.dumps(GOOD | {"seed": 0}).encode().replace(b'"seed": 0', b'"seed": ' + b"9" * 60_000),
    "a key that is a number": json.dumps(GOOD | {"key": 3}).encode(),
    "a short key": json.dumps(GOOD | {"key": "00"}).encode(),
    "another state": json.dumps(GOOD | {"state": "drawn"}).encode(),
    "no hash": json.dumps({name: value for name, value in GOOD.items() if name != "sha256"}).encode(),
    "a hash that is none": json.dumps(GOOD | {"sha256": None}).encode(),
    "an error that is none": json.dumps(GOOD | {"state": "failed", "error": ["x"]}).encode(),
    "a long line": json.dumps(GOOD | {"line": "x" * MAX_LINE}).encode(),
}


@pytest.mark.parametrize("name", ["journal.jsonl", "journal-1-of-2.jsonl"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_line_is_named_and_nothing_is_changed(tmp_path: Path, damage: str, name: str) -> None:
    data = json.dumps(GOOD).encode() + b"\n" + DAMAGE[damage] + b"\n" + json.dumps(GOOD).encode() + b"\n"
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ModelError, match=r"line 2 is not of a batch's journal; move the file away: ") as found:
        journal = BatchJournal(tmp_path, (0, 1))
        journal.entries()
    assert len(str(found.value)) <= 300 and str(found.value).isprintable()
    assert (tmp_path / name).read_bytes() == data


@pytest.mark.parametrize("data", [b"a text without a line end", b"{}", b"\0\0", b"x" * (MAX_LINE + 2)])
def test_a_last_line_that_is_not_torn_is_not_cut_off(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "journal.jsonl").write_bytes(data)
    with pytest.raises(ModelError, match="line 1 is not of a batch's journal"):
        BatchJournal(tmp_path, (0, 1))
    assert (tmp_path / "journal.jsonl").read_bytes() == data


def test_a_journal_has_a_largest_size(tmp_path: Path) -> None:
    with (tmp_path / "journal.jsonl").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(ModelError, match="larger than any journal of a batch"):
        BatchJournal(tmp_path, (0, 1))
