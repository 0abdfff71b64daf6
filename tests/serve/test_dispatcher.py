"""The queue with workers that say what the test says: limits, ends, losses, turns; no process, no clock."""

from __future__ import annotations

import asyncio
import base64
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.fake_worker import SETTINGS, FakeWorker, dispatching, image_job, settle

from qwenimg.cli.serve import dispatcher as module
from qwenimg.cli.serve import journal as journal_module
from qwenimg.cli.serve.apis.jobs_api import JobsApi
from qwenimg.cli.serve.dispatcher import MANY, Dispatcher
from qwenimg.cli.serve.http_error import HttpError
from qwenimg.cli.serve.image_job import ImageJob
from qwenimg.cli.serve.journal import Journal
from qwenimg.cli.serve.metrics import Metrics
from qwenimg.cli.workers.messages import Stepped, Unusable
from qwenimg.common.base.errors import DoesNotFit, UsageError
from qwenimg.common.families.load_options import LoadOptions

Body = Callable[[Dispatcher, FakeWorker], Awaitable[None]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run `body(dispatcher, worker)`, the worker ready unless `ready` is false."""

    def runs(body: Body, *, ready: bool = True, folder: Path = tmp_path / "gallery", **changed: Any) -> None:
        async def whole() -> None:
            async with dispatching(folder, monkeypatch, **changed) as (dispatcher, [worker, *_]):
                if ready:
                    await worker.get_ready()
                await body(dispatcher, worker)

        asyncio.run(whole())

    return runs


async def refused(dispatcher: Dispatcher, one: ImageJob) -> HttpError:
    with pytest.raises(HttpError) as caught:
        await dispatcher.submit(one)
    return caught.value


def test_jobs_are_drawn_one_by_one_in_their_order(run) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        jobs = [image_job(str(i)) for i in range(3)]
        for one in jobs:
            await dispatcher.submit(one)
        assert worker.drawn == [jobs[0].id] and [dispatcher.position(one) for one in jobs] == [0, 1, 2]
        for one in jobs:
            await worker.step()
            assert one.step == 1 and one.share == 0.25
            await worker.picture()
            await worker.finish()
            assert one.state == "done" and one.pictures[0].recipe["prompt"] == one.spec.prompt
        assert worker.drawn == [job.id for job in jobs] and not dispatcher.waiting

    run(body)


def test_a_preview_is_that_of_the_picture_that_is_drawn(run) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        one = image_job(seeds=(1, 2))
        await dispatcher.submit(one)
        news: asyncio.Queue[Any] = asyncio.Queue()
        one.watchers.add(news)
        await worker.say(Stepped(id=one.id, index=0, step=1, steps=4, seconds=0.1, preview=b"A"))
        await worker.step(2)
        assert one.preview == b"A", "until there is another"
        told = [news.get_nowait().data for _ in range(2)]
        assert [data.get("preview") for data in told] == [base64.b64encode(b"A").decode(), None]
        await worker.picture(0)
        assert one.preview == b"", "the next picture has none yet"

    run(body)


def test_who_does_not_read_the_news_is_dropped(run) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        reads, sleeps = asyncio.Queue[Any](), asyncio.Queue[Any](2)
        dispatcher.watchers |= {reads, sleeps}
        one = image_job(kind="job")
        await dispatcher.submit(one)
        for step in (1, 2, 3):
            await worker.step(step)
        assert dispatcher.watchers == {reads}
        assert [reads.get_nowait()[1].name for _ in range(5)] == ["state", "state", "step", "step", "step"]
        await dispatcher.submit(image_job())
        assert reads.empty(), "requests of other APIs are nobody's news"

    run(body)


def test_a_full_queue_refuses_and_says_when_to_come_again(run) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        for i in range(3):  # one is drawn, two wait
            await dispatcher.submit(image_job(str(i)))
        fault = await refused(dispatcher, image_job("one more"))
        assert (fault.status, fault.code) == (429, "queue_full") and 1 <= int(fault.headers["retry-after"]) <= 120
        await worker.finish()
        await dispatcher.submit(image_job("now"))
        dispatcher._seconds.append(1e6)
        assert (await refused(dispatcher, image_job("far"))).headers["retry-after"] == "120"

    run(body)


def test_one_client_of_another_machine_has_a_share(run) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        for i in range(3):
            await dispatcher.submit(image_job(str(i), client="10.0.0.7"))
        assert (await refused(dispatcher, image_job("y", client="10.0.0.7"))).code == "client_limit"
        await dispatcher.submit(image_job("y", client="10.0.0.8"))

    run(body, queue=10, share=2)


def test_nothing_is_taken_before_the_warm_up_nor_after_stop(run) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        fault = await refused(dispatcher, image_job())
        assert fault.status == 503 and "loading" in fault.text and "retry-after" in fault.headers
        await worker.get_ready()
        first, second, kept = image_job("1"), image_job("2"), image_job("3", kind="job")
        for one in (first, second, kept):
            await dispatcher.submit(one)
        dispatcher.stop()
        assert (await refused(dispatcher, image_job())).status == 503
        assert second.error is not None and second.error.status == 503, "a job that waits is refused at once"
        closing = asyncio.create_task(dispatcher.close())
        await settle()
        assert not closing.done() and not worker.closed, "what is drawn is finished"
        await worker.picture()
        await worker.finish()
        await closing
        assert first.state == "done" and len(first.pictures) == 1 and worker.closed
        assert [one.id for one in dispatcher.journal.unfinished()] == [kept.id], "a job is left to the next server"

    run(body, ready=False)


def test_a_cancelled_job_frees_its_place_and_halts_the_worker(run) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        jobs = [image_job(str(i)) for i in range(3)]
        for one in jobs:
            await dispatcher.submit(one)
        dispatcher.cancel(jobs[1])
        assert jobs[1].state == "cancelled" and dispatcher.waiting == [jobs[2]] and not worker.halts
        dispatcher.cancel(jobs[0])
        assert jobs[0].ended.is_set() and worker.halts == [(jobs[0].id, False)]
        assert worker.drawn == [jobs[0].id], "the worker is busy until it says so"
        await worker.picture()  # too late
        assert not jobs[0].pictures
        await worker.finish()
        assert worker.drawn == [jobs[0].id, jobs[2].id]

    run(body)


def test_the_deadline_counts_waiting_too(run) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        drawn, waits = image_job("1", deadline=0.0), image_job("2", deadline=0.0)
        await dispatcher.submit(drawn)
        await dispatcher.submit(waits)
        await asyncio.gather(drawn.ended.wait(), waits.ended.wait())
        for one in (drawn, waits):
            assert one.error is not None and (one.error.status, one.error.code) == (504, "deadline")
            assert one.error.headers == {"x-should-retry": "false"}
        assert worker.halts == [(drawn.id, False)]

    run(body)


def test_halting_keeps_what_is_finished_and_skipping_goes_on(run) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        one = image_job(seeds=(1, 2, 3))
        await dispatcher.submit(one)
        await worker.picture(0)
        dispatcher.halt(one, skip=True)
        dispatcher.halt(one, skip=False)
        assert worker.halts == [(one.id, True), (one.id, False)] and not one.ended.is_set()
        await worker.finish()
        assert one.state == "done" and len(one.pictures) == 1

    run(body)


@pytest.mark.parametrize(("code", "status"), [(-9, 507), (-11, 500), (1, 500)])
def test_a_lost_worker_is_answered_at_once_and_started_again(run, code: int, status: int) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        one, other = image_job("1"), image_job("2")
        await dispatcher.submit(one)
        await dispatcher.submit(other)
        await worker.die(code)
        assert one.error is not None and one.error.status == status
        assert one.error.headers == {"x-should-retry": "false"}
        assert worker.starts == 2 and not dispatcher.is_ready
        await worker.get_ready()
        assert worker.job is other

    run(body)


def test_a_worker_that_did_not_answer_is_no_lack_of_memory(run) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        one = image_job("1")
        await dispatcher.submit(one)
        await worker.die(-9, is_silent=True)
        assert one.error is not None and one.error.status == 500 and "did not answer" in one.error.text
        assert worker.starts == 2 and "memory" not in " ".join(dispatcher.lines)  # type: ignore[attr-defined]

    run(body)


def test_a_request_that_ends_workers_is_refused(run) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        for _ in range(2):
            await dispatcher.submit(image_job("poison", seeds=(3,)))
            await worker.die()
            await worker.get_ready()
        fault = await refused(dispatcher, image_job("poison", seeds=(4,)))
        assert fault.status == 507 and "x-should-retry" in fault.headers
        await dispatcher.submit(image_job("healthy"))

    run(body)


def test_a_worker_that_is_lost_again_and_again_stays_down(run) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        for _ in range(MANY):
            await worker.die()
        assert worker.starts == MANY and worker.state == "down"
        fault = await refused(dispatcher, image_job())
        assert fault.status == 503 and fault.headers == {"x-should-retry": "false"}

    run(body)


def test_a_job_is_drawn_again_once_after_a_loss_without_what_is_kept(run) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        job = image_job(kind="job", seeds=(1, 2))
        await dispatcher.submit(job)
        await worker.picture(0)
        await worker.die()
        assert job.state == "waiting" and job.first == 1
        await worker.get_ready()
        assert worker.job is job and job.message().first == 1
        await worker.die()
        assert job.state == "failed" and job.error is not None
        row = dispatcher.journal.job(job.id)
        assert row is not None and (row["state"], row["pictures"]) == ("failed", [f"{job.id}-0"])

    run(body)


def test_jobs_go_on_in_the_next_server(run, tmp_path: Path) -> None:
    asked: list[ImageJob] = []

    async def first(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        for i in range(2):
            asked.append(image_job(str(i), kind="job", seeds=(5, 6), images=(b"in", b"two")))
            await dispatcher.submit(asked[-1])
        await worker.picture(0)
        for task in dispatcher._tasks:
            task.cancel()  # as after kill -9: nothing is noted

    async def second(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        assert worker.job is not None and (worker.job.id, worker.job.first) == (asked[0].id, 1)
        assert worker.job.spec.files.images == (b"in", b"two") and worker.job.spec.seeds == (5, 6)
        await worker.picture(1)
        await worker.finish()
        assert worker.job is not None and (worker.job.id, worker.job.first) == (asked[1].id, 0)
        names = [kept.name for kept in dispatcher.journal.pictures(None, 10)[0]]
        assert names == [f"{asked[0].id}-1.png", f"{asked[0].id}-0.png"]

    run(first)
    run(second)


def test_a_job_of_a_model_that_is_not_served_any_more_fails(run) -> None:
    async def first(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        await dispatcher.submit(image_job("1", kind="job"))
        job = image_job("2", kind="job", model="two")
        await dispatcher.submit(job)
        for task in dispatcher._tasks:
            task.cancel()

    async def second(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        assert [(row["state"], row["error"]) for row in dispatcher.journal.jobs(9)] == [
            ("failed", "the model two is not served any more"),
            ("waiting", None),
        ]

    run(first)
    run(second, models={"one": LoadOptions()})


def test_jobs_of_the_open_model_come_first_but_not_for_ever(run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        first, other, same = image_job("1"), image_job("2", model="two"), image_job("3")
        for one in (first, other, same):
            await dispatcher.submit(one)
        await worker.finish()
        assert worker.job is same
        late = image_job("4")
        await dispatcher.submit(late)
        monkeypatch.setattr(module, "TURN", -1.0)
        await worker.finish()
        assert worker.job is other

    run(body)


@pytest.mark.parametrize(
    ("exit_code", "refused", "status"),
    [(2, True, 400), (5, True, 400), (4, False, 507), (6, False, 500), (5, False, 500), (1, False, 500)],
)
def test_errors_of_workers_have_a_status_and_no_path(run, exit_code: int, refused: bool, status: int) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        one = image_job()
        await dispatcher.submit(one)
        await worker.finish("/home/me/models/x.safetensors: is broken", exit_code, refused=refused)
        assert one.error is not None and one.error.status == status
        assert "/home" not in one.error.text and one.error.headers == {"x-should-retry": "false"}

    run(body)


def test_a_model_that_does_not_open_ends_the_server(run) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        await worker.say(Unusable(exit_code=5, text="no such model"))
        assert dispatcher.unusable.result().exit_code == 5

    run(body, ready=False)


def test_a_bug_in_the_dispatcher_ends_the_server(run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        monkeypatch.setattr(dispatcher, "_finish", None)
        await dispatcher.submit(image_job())
        await worker.finish()
        assert isinstance(dispatcher.unusable.exception(), TypeError)

    run(body)


def test_a_full_disk_ends_the_job_and_not_the_server(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        job = image_job(kind="job")
        await dispatcher.submit(job)
        monkeypatch.setattr(Journal, "keep", full)
        await worker.picture()
        await job.ended.wait()
        assert job.error is not None and job.error.status == 507 and worker.halts == [(job.id, False)]
        await worker.finish()
        await dispatcher.submit(image_job())
        assert dispatcher.is_ready

    run(body)


def test_two_workers_draw_at_once(run) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        other: Any = dispatcher.workers[1]
        await other.get_ready("two")
        first, second = image_job("1"), image_job("2", model="two")
        await dispatcher.submit(first)
        await dispatcher.submit(second)
        assert worker.job is first and other.job is second and dispatcher.drawing == [first, second]

    run(body, backends=("cpu", "mlx"))


def test_a_worker_that_cannot_open_its_model_again_is_a_loss(run) -> None:
    """The first time the server ends with the error; later the worker is started again, and then stays down."""

    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        for count in range(1, MANY + 1):
            await worker.say(Unusable(exit_code=5, text="x.safetensors: ends early"))
            assert worker.ends == count and not dispatcher.unusable.done()
            await worker.die(0)
        assert worker.starts == MANY and worker.state == "down"
        assert (await refused(dispatcher, image_job())).status == 503
        assert any("ends early" in line for line in dispatcher.lines)  # type: ignore[attr-defined]

    run(body)


def test_a_worker_whose_process_cannot_be_started_is_a_loss(run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        start, tries = worker.start, [1]

        def no_more() -> Any:
            if tries:
                raise OSError(24, f"Too many open files ({tries.pop()})")
            return start()

        monkeypatch.setattr(worker, "start", no_more)
        await worker.die()
        await worker.get_ready()
        assert worker.state == "ready" and not tries and worker.starts == 2

    run(body)


def test_a_job_whose_picture_was_removed_goes_on_after_a_loss(run) -> None:
    """With the next picture, not with the number that is left: else one index would be given twice."""

    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        job = image_job(kind="job", seeds=(1, 2, 3))
        await dispatcher.submit(job)
        for index in (0, 1):
            await worker.picture(index)
        for kept in dispatcher.journal.pictures(None, 9)[0]:
            dispatcher.journal.remove(kept)
        await worker.die()
        await worker.get_ready()
        assert worker.job is job and job.message().first == 2
        assert dispatcher.journal.unfinished()[0].first == 2, "and in the next server"
        await worker.picture(2)
        await worker.finish()
        row = dispatcher.journal.job(job.id)
        assert row is not None and (row["state"], row["pictures"]) == ("done", [f"{job.id}-2"])

    run(body)


PASSING = [
    OSError(24, "Too many open files"),
    OSError(28, "No space left on device"),
    PermissionError(13, "denied"),
    sqlite3.OperationalError("database is locked"),
    DoesNotFit("disk full"),
    UsageError("cannot be written"),
]


@pytest.mark.parametrize("error", PASSING, ids=str)
def test_what_cannot_be_stored_for_a_while_is_tried_again(
    run, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The job, its picture and its end: each fails twice. A file's own errors come with a picture alone."""

    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        monkeypatch.setattr(module, "AGAIN", 1e6)
        journal = dispatcher.journal
        for name in ("add", "keep", "end") if isinstance(error, (OSError, sqlite3.Error)) else ("keep",):
            monkeypatch.setattr(journal, name, failing(getattr(journal, name), [error, error]))
        job = image_job(kind="job")
        await dispatcher.submit(job)
        await worker.picture()
        await worker.finish()
        await settle()
        row = journal.job(job.id)
        assert row is not None and (row["state"], len(row["pictures"])) == ("done", 1)
        assert dispatcher.job(job.id) is None, "its end is written"

    run(body)


def failing(change: Callable[..., Any], errors: list[Exception]) -> Callable[..., Any]:
    """Return `change`, which raises each of `errors` first."""

    def changed(*given: Any) -> Any:
        if errors:
            raise errors.pop()
        return change(*given)

    return changed


def test_a_job_that_cannot_be_stored_is_not_drawn(run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        def locked(*_: object) -> None:
            raise sqlite3.OperationalError("database is locked")

        monkeypatch.setattr(dispatcher.journal, "add", locked)
        fault = await refused(dispatcher, image_job(kind="job"))
        assert fault.status == 503 and "retry-after" in fault.headers
        assert not worker.drawn and not dispatcher.waiting and not dispatcher._entering

    run(body)


def test_a_job_whose_end_is_not_written_yet_has_ended_for_clients(run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        def locked(*_: object) -> None:
            raise sqlite3.OperationalError("database is locked")

        job = image_job(kind="job")
        await dispatcher.submit(job)
        with monkeypatch.context() as patch:
            patch.setattr(dispatcher.journal, "end", locked)
            await worker.finish()
            row = dispatcher.journal.job(job.id)
            shown = JobsApi(dispatcher, dispatcher.journal, dispatcher.settings)._live(row or {})
            assert (shown["state"], shown["ended"]) == ("done", job.finished)
        await settle()
        row = dispatcher.journal.job(job.id)
        assert row is not None and row["state"] == "done"

    run(body)


def test_another_programs_lock_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With real threads: a change waits for the lock, and the gallery is read meanwhile."""
    monkeypatch.setattr(journal_module, "PATIENCE", 0.01)

    async def whole() -> None:
        journal = Journal(tmp_path)
        other = sqlite3.connect(tmp_path / journal_module.NAME, isolation_level=None)
        other.execute("begin immediate")

        def unlocks(line: str) -> None:
            assert "database is locked" in line
            other.execute("rollback")

        monkeypatch.setattr(module, "ServerWorker", FakeWorker)
        monkeypatch.setattr(module, "EVERY", 0.0)
        dispatcher = Dispatcher(SETTINGS, journal, Metrics(), unlocks)
        job = image_job(kind="job")
        adding = asyncio.create_task(dispatcher._retried("it cannot be stored", journal.add, job))
        assert await journal.reading(journal.jobs, 9) == []
        await adding
        assert [row["id"] for row in await journal.reading(journal.jobs, 9)] == [job.id]
        await dispatcher.close()
        journal.close()
        other.close()

    asyncio.run(whole())
