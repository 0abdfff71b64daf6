"""Trainings in the queue, with workers that say what the test says: who waits for whom, stops, losses, the journal."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.fake_worker import FakeWorker, dispatching, image_job, settle, training

from qwenimg.cli.serve.dispatcher import Dispatcher
from qwenimg.cli.serve.http_error import HttpError
from qwenimg.cli.serve.image_job import POINTS, SAMPLES
from qwenimg.cli.serve.journal import Journal
from qwenimg.cli.serve.training_options import parse_training
from qwenimg.cli.workers.messages import Trained, TrainingSamples, TrainingStep

Body = Callable[[Dispatcher, list[FakeWorker]], Awaitable[None]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run `body(dispatcher, workers)` with ready workers."""

    def runs(body: Body, **changed: Any) -> None:
        async def whole() -> None:
            changed.setdefault("training", "/t")
            async with dispatching(tmp_path / "g", monkeypatch, **changed) as (dispatcher, workers):
                for worker in workers:
                    await worker.get_ready()
                await body(dispatcher, workers)

        asyncio.run(whole())

    return runs


def test_a_training_is_before_the_drawings_that_come_after_it(run) -> None:
    async def body(dispatcher: Dispatcher, workers: list[FakeWorker]) -> None:
        [worker] = workers
        one, other, picture = training("a"), training("b"), image_job(kind="job")
        for job in (one, other):
            await dispatcher.submit(job)
        assert one.state == "training" and dispatcher.behind(other) == [one] and one.progress.left is None
        await dispatcher.submit(image_job("x"))  # how long it takes is not known yet
        await worker.train(1, left=700.0)
        assert (one.progress.left, one.progress.losses, one.step, one.steps) == (700.0, [(1, 1.0)], 1, 10)
        with pytest.raises(HttpError) as caught:
            await dispatcher.submit(image_job("y"))
        assert (caught.value.status, caught.value.code) == (503, "training") and "12 min" in caught.value.text
        dispatcher.settings.loras.clear()
        await worker.say(Trained(id=one.id, path="/t/a.safetensors"))
        await worker.finish()
        assert one.state == "done" and dispatcher.settings.loras == {"a": "/t/a.safetensors"}
        dispatcher.settings.loras.clear()
        dispatcher.cancel(other)
        await dispatcher.submit(picture)
        assert other.state == "stopping" and picture.state == "waiting" and dispatcher.behind(picture) == [other]
        await worker.finish()
        assert other.state == "cancelled" and dispatcher.behind(picture) == []

    run(body)


def test_of_two_workers_one_trains_and_the_other_draws(run) -> None:
    async def body(dispatcher: Dispatcher, workers: list[FakeWorker]) -> None:
        jobs = [training("a"), training("b"), image_job("x"), image_job("y")]
        for job in jobs:
            await dispatcher.submit(job)
        assert [job.state for job in jobs] == ["training", "waiting", "drawing", "waiting"]
        assert dispatcher.behind(jobs[1]) == [jobs[0]] and dispatcher.behind(jobs[3]) == []
        await workers[0].train(1, left=1e6)
        await workers[1].finish()
        assert jobs[3].state == "drawing", "the second training waits for the first"
        await workers[1].finish()
        assert workers[1].job is None and jobs[1].state == "waiting"
        await dispatcher.submit(image_job("z"))
        await workers[0].finish("no", 6)
        assert jobs[0].state == "failed" and jobs[1].state == "training"
        dispatcher.cancel(jobs[1])
        await workers[0].finish()

    run(body, backends=("cpu", "mlx"))


def test_a_stop_of_the_server_leaves_it_to_the_next(run) -> None:
    async def body(dispatcher: Dispatcher, workers: list[FakeWorker]) -> None:
        one, news = training("a", resume=False), asyncio.Queue[Any]()
        await dispatcher.submit(one)
        await workers[0].train(3)
        one.watchers.add(news)
        dispatcher.stop()
        assert workers[0].halts == [(one.id, False)]
        closing = asyncio.create_task(dispatcher.close())
        await settle()
        assert not closing.done(), "it waits for the checkpoint"
        await workers[0].finish()
        await closing
        told = [news.get_nowait() for _ in range(news.qsize())]
        assert [(event.name, event.data["state"]) for event in told] == [("state", "waiting"), ("end", "waiting")]
        assert [job.id for job in dispatcher.journal.unfinished()] == [one.id]

    run(body)


@pytest.mark.parametrize(("folder", "state"), [("/else", "training"), ("", "failed")])
def test_the_next_server_goes_on(run, tmp_path: Path, folder: str, state: str) -> None:
    journal, one = Journal(tmp_path / "g"), training("a", steps=7, sample=["x", "y"], flips=True)
    assert one.training is not None
    journal.add(one)
    journal.close()

    async def body(dispatcher: Dispatcher, workers: list[FakeWorker]) -> None:
        if folder:
            assert workers[0].task is not None and workers[0].task.training is not None
            order = workers[0].task.training
            assert (order.folder, order.continues, order.options) == ("/else", True, one.training.options)  # type: ignore[union-attr]
            await workers[0].finish("over", 6)
        row = dispatcher.journal.job(one.id)
        assert row is not None and row["request"]["kind"] == "training"
        assert row["state"] == "failed" and ("--training" in row["error"]) == (not folder)

    run(body, training=folder)


@pytest.mark.parametrize(
    "change", ["steps', -1)", "steps', '\"x\"')", "data', null)", "output', '../x')", "stepz', 5)", "flips', 1)"]
)
def test_a_damaged_row_fails_alone(tmp_path: Path, change: str) -> None:
    journal = Journal(tmp_path)
    jobs = [training("a"), training("b")]
    for job in jobs:
        journal.add(job)
    journal.close()
    with sqlite3.connect(tmp_path / "gallery.sqlite3") as base:
        base.execute(f"update jobs set request = json_set(request, '$.{change} where id = ?", (jobs[0].id,))
    base.close()
    journal = Journal(tmp_path)
    assert [job.id for job in journal.unfinished()] == [jobs[1].id]
    row = journal.job(jobs[0].id)
    assert row is not None and row["state"] == "failed" and "damaged" in row["error"]
    journal.close()


def test_a_lost_worker_ends_the_training(run) -> None:
    async def body(dispatcher: Dispatcher, workers: list[FakeWorker]) -> None:
        for count in range(3):
            one = training("a")
            if count == 2:
                with pytest.raises(HttpError, match="has ended a worker 2 times"):
                    await dispatcher.submit(one)
                return
            await dispatcher.submit(one)
            await workers[0].die(-9)
            assert one.state == "failed" and one.error is not None and one.error.status == 507
            assert "while it trained; with resume it goes on" in one.error.text and one not in dispatcher.waiting
            await workers[0].get_ready()

    run(body)


def test_a_curve_of_many_steps_stays_short() -> None:
    progress, total = training().progress, 10_000
    for step in range(1, total + 1):
        progress.add_step(
            TrainingStep(id="x", step=step, steps=total, made=1, loss=float(step), rate=1e-4, left=float(total - step))
        )
    steps = [step for step, _ in progress.losses]
    print(f"{total} steps in {len(steps)} points")
    assert POINTS // 2 <= len(steps) <= POINTS and steps == sorted(set(steps)) and steps[-1] == total
    assert all(abs(loss - step) <= total / 20 for step, loss in progress.losses)
    names = progress.add_samples(TrainingSamples(id="x", step=5, learnt=1.0, held_out=None, pictures=(b"a", b"b")))
    assert names == progress.samples == ["0000005-0", "0000005-1"]
    for step in range(1, 1001):
        progress.add_samples(TrainingSamples(id="x", step=step, learnt=1.0, held_out=None, pictures=(b"a", b"b")))
    assert len(progress.samples) == len(progress.judged) == SAMPLES and progress.samples[-1] == "0001000-1"


def test_defaults_are_those_of_the_command_line() -> None:
    options = parse_training({"data": "a", "output": "b.safetensors", "steps": "12", "rate": 1, "sample": "x"})
    assert (options["steps"], options["rate"], options["sample"], options["output"]) == (12, 1.0, ["x"], "b")
    usual = {
        "rank": 16,
        "save_every": 100,
        "precision": "auto",
        "quantize": None,
        "flips": False,
        "checkpointing": None,
    }
    assert {name: options[name] for name in usual} == usual and options["lora"] == []
    assert parse_training(options) == options
