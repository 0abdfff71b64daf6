"""The queue with workers that say what the test says: limits, ends, losses, turns; no process, no clock."""

from __future__ import annotations

import asyncio
import base64
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.fake_worker import FakeWorker, dispatching, order, settle

from qwenimg.cli.serve import dispatcher as module
from qwenimg.cli.serve.dispatcher import MANY, Dispatcher
from qwenimg.cli.serve.journal import Journal
from qwenimg.cli.serve.messages import Stepped, Unusable
from qwenimg.cli.serve.orders import Fault, PictureOrder
from qwenimg.common.families.opening import Opening

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


def refused(dispatcher: Dispatcher, one: PictureOrder) -> Fault:
    with pytest.raises(Fault) as caught:
        dispatcher.submit(one)
    return caught.value


def test_orders_are_drawn_one_by_one_in_their_order(run) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        orders = [order(str(i)) for i in range(3)]
        for one in orders:
            dispatcher.submit(one)
        assert worker.drawn == orders[:1] and [dispatcher.position(one) for one in orders] == [0, 1, 2]
        for one in orders:
            await worker.step()
            assert one.step == 1 and one.share == 0.25
            await worker.picture()
            await worker.finish()
            assert one.state == "done" and one.pictures[0].recipe["prompt"] == one.fields["prompt"]
        assert worker.drawn == orders and not dispatcher.waiting

    run(body)


def test_a_preview_is_that_of_the_picture_that_is_drawn(run) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        one = order(seeds=(1, 2))
        dispatcher.submit(one)
        news: asyncio.Queue[Any] = asyncio.Queue()
        one.watchers.add(news)
        await worker.say(Stepped(order=one.id, index=0, step=1, steps=4, seconds=0.1, preview=b"A"))
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
        one = order(kind="job")
        dispatcher.submit(one)
        for step in (1, 2, 3):
            await worker.step(step)
        assert dispatcher.watchers == {reads}
        assert [reads.get_nowait()[1].name for _ in range(5)] == ["state", "state", "step", "step", "step"]
        dispatcher.submit(order())
        assert reads.empty(), "requests of other APIs are nobody's news"

    run(body)


def test_a_full_queue_refuses_and_says_when_to_come_again(run) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        for i in range(3):  # one is drawn, two wait
            dispatcher.submit(order(str(i)))
        fault = refused(dispatcher, order("one more"))
        assert (fault.status, fault.code) == (429, "queue_full") and 1 <= int(fault.headers["retry-after"]) <= 120
        await worker.finish()
        dispatcher.submit(order("now"))
        dispatcher._seconds.append(1e6)
        assert refused(dispatcher, order("far")).headers["retry-after"] == "120"

    run(body)


def test_one_client_of_another_machine_has_a_share(run) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        for i in range(3):
            dispatcher.submit(order(str(i), client="10.0.0.7"))
        assert refused(dispatcher, order("y", client="10.0.0.7")).code == "client_limit"
        dispatcher.submit(order("y", client="10.0.0.8"))

    run(body, queue=10, share=2)


def test_nothing_is_taken_before_the_warm_up_nor_after_stop(run) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        fault = refused(dispatcher, order())
        assert fault.status == 503 and "loading" in fault.text and "retry-after" in fault.headers
        await worker.get_ready()
        first, second, kept = order("1"), order("2"), order("3", kind="job")
        for one in (first, second, kept):
            dispatcher.submit(one)
        dispatcher.stop()
        assert refused(dispatcher, order()).status == 503
        assert second.fault is not None and second.fault.status == 503, "an order that waits is refused at once"
        closing = asyncio.create_task(dispatcher.close())
        await settle()
        assert not closing.done() and not worker.closed, "what is drawn is finished"
        await worker.picture()
        await worker.finish()
        await closing
        assert first.state == "done" and len(first.pictures) == 1 and worker.closed
        assert [one.id for one in dispatcher.journal.unfinished()] == [kept.id], "a job is left to the next server"

    run(body, ready=False)


def test_a_cancelled_order_frees_its_place_and_halts_the_worker(run) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        orders = [order(str(i)) for i in range(3)]
        for one in orders:
            dispatcher.submit(one)
        dispatcher.cancel(orders[1])
        assert orders[1].state == "cancelled" and dispatcher.waiting == [orders[2]] and not worker.halts
        dispatcher.cancel(orders[0])
        assert orders[0].ended.is_set() and worker.halts == [(orders[0].id, False)]
        assert worker.drawn == orders[:1], "the worker is busy until it says so"
        await worker.picture()  # too late
        assert not orders[0].pictures
        await worker.finish()
        assert worker.drawn == [orders[0], orders[2]]

    run(body)


def test_the_deadline_counts_waiting_too(run) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        drawn, waits = order("1", deadline=0.0), order("2", deadline=0.0)
        dispatcher.submit(drawn)
        dispatcher.submit(waits)
        await asyncio.gather(drawn.ended.wait(), waits.ended.wait())
        for one in (drawn, waits):
            assert one.fault is not None and (one.fault.status, one.fault.code) == (504, "deadline")
            assert one.fault.headers == {"x-should-retry": "false"}
        assert worker.halts == [(drawn.id, False)]

    run(body)


def test_halting_keeps_what_is_finished_and_skipping_goes_on(run) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        one = order(seeds=(1, 2, 3))
        dispatcher.submit(one)
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
        one, other = order("1"), order("2")
        dispatcher.submit(one)
        dispatcher.submit(other)
        await worker.die(code)
        assert one.fault is not None and one.fault.status == status
        assert one.fault.headers == {"x-should-retry": "false"}
        assert worker.starts == 2 and not dispatcher.is_ready
        await worker.get_ready()
        assert worker.order is other

    run(body)


def test_a_request_that_ends_workers_is_refused(run) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        for _ in range(2):
            dispatcher.submit(order("poison", seeds=(3,)))
            await worker.die()
            await worker.get_ready()
        fault = refused(dispatcher, order("poison", seeds=(4,)))
        assert fault.status == 507 and "x-should-retry" in fault.headers
        dispatcher.submit(order("healthy"))

    run(body)


def test_a_worker_that_is_lost_again_and_again_stays_down(run) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        for _ in range(MANY):
            await worker.die()
        assert worker.starts == MANY and worker.state == "down"
        fault = refused(dispatcher, order())
        assert fault.status == 503 and fault.headers == {"x-should-retry": "false"}

    run(body)


def test_a_job_is_drawn_again_once_after_a_loss_without_what_is_kept(run) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        job = order(kind="job", seeds=(1, 2))
        dispatcher.submit(job)
        await worker.picture(0)
        await worker.die()
        assert job.state == "waiting" and job.first == 1
        await worker.get_ready()
        assert worker.order is job and job.draw().first == 1
        await worker.die()
        assert job.state == "failed" and job.fault is not None
        row = dispatcher.journal.job(job.id)
        assert row is not None and (row["state"], row["pictures"]) == ("failed", [f"{job.id}-0"])

    run(body)


def test_jobs_go_on_in_the_next_server(run, tmp_path: Path) -> None:
    asked: list[PictureOrder] = []

    async def first(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        for i in range(2):
            asked.append(order(str(i), kind="job", seeds=(5, 6), images=(b"in", b"two")))
            dispatcher.submit(asked[-1])
        await worker.picture(0)
        for task in dispatcher._tasks:
            task.cancel()  # as after kill -9: nothing is noted

    async def second(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        assert worker.order is not None and (worker.order.id, worker.order.first) == (asked[0].id, 1)
        assert worker.order.images == (b"in", b"two") and worker.order.seeds == (5, 6)
        await worker.picture(1)
        await worker.finish()
        assert worker.order is not None and (worker.order.id, worker.order.first) == (asked[1].id, 0)
        names = [kept.name for kept in dispatcher.journal.pictures(None, 10)]
        assert names == [f"{asked[0].id}-1.png", f"{asked[0].id}-0.png"]

    run(first)
    run(second)


def test_a_job_of_a_model_that_is_not_served_any_more_fails(run) -> None:
    async def first(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        dispatcher.submit(order("1", kind="job"))
        job = order("2", kind="job", model="two")
        dispatcher.submit(job)
        for task in dispatcher._tasks:
            task.cancel()

    async def second(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        assert [(row["state"], row["error"]) for row in dispatcher.journal.jobs(9)] == [
            ("failed", "the model two is not served any more"),
            ("waiting", None),
        ]

    run(first)
    run(second, models={"one": Opening()})


def test_orders_of_the_open_model_come_first_but_not_for_ever(run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        first, other, same = order("1"), order("2", model="two"), order("3")
        for one in (first, other, same):
            dispatcher.submit(one)
        await worker.finish()
        assert worker.order is same
        late = order("4")
        dispatcher.submit(late)
        monkeypatch.setattr(module, "TURN", -1.0)
        await worker.finish()
        assert worker.order is other

    run(body)


@pytest.mark.parametrize(
    ("exit_code", "refused", "status"),
    [(2, True, 400), (5, True, 400), (4, False, 507), (6, False, 500), (5, False, 500), (1, False, 500)],
)
def test_errors_of_workers_have_a_status_and_no_path(run, exit_code: int, refused: bool, status: int) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        one = order()
        dispatcher.submit(one)
        await worker.finish("/home/me/models/x.safetensors: is broken", exit_code, refused=refused)
        assert one.fault is not None and one.fault.status == status
        assert "/home" not in one.fault.text and one.fault.headers == {"x-should-retry": "false"}

    run(body)


def test_a_model_that_does_not_open_ends_the_server(run) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        await worker.say(Unusable(exit_code=5, text="no such model"))
        assert dispatcher.unusable.result().exit_code == 5

    run(body, ready=False)


def test_a_bug_in_the_dispatcher_ends_the_server(run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        monkeypatch.setattr(dispatcher, "_finish", None)
        dispatcher.submit(order())
        await worker.finish()
        assert isinstance(dispatcher.unusable.exception(), TypeError)

    run(body)


def test_a_full_disk_ends_the_job_and_not_the_server(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        job = order(kind="job")
        dispatcher.submit(job)
        monkeypatch.setattr(Journal, "keep", full)
        await worker.picture()
        await job.ended.wait()
        assert job.fault is not None and job.fault.status == 507 and worker.halts == [(job.id, False)]
        await worker.finish()
        dispatcher.submit(order())
        assert dispatcher.is_ready

    run(body)


def test_two_workers_draw_at_once(run) -> None:
    async def body(dispatcher: Dispatcher, worker: FakeWorker) -> None:
        other: Any = dispatcher.workers[1]
        await other.get_ready("two")
        first, second = order("1"), order("2", model="two")
        dispatcher.submit(first)
        dispatcher.submit(second)
        assert worker.order is first and other.order is second and dispatcher.drawing == [first, second]

    run(body, backends=("cpu", "mlx"))
