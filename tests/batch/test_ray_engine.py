"""Ray's workers with a Ray that the test plays: its calls, the end of an actor, and what the driver makes of it."""

from __future__ import annotations

import asyncio
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.cli_runner import cli
from support.fake_worker import PNG

from qwenimg.cli.batch import driver as driving
from qwenimg.cli.batch import ray_engine
from qwenimg.cli.batch.driver import TRIES, Driver
from qwenimg.cli.batch.record import BatchJournal
from qwenimg.cli.batch.tasks import BatchTask
from qwenimg.cli.workers.messages import Draw, Finished, PictureDrawn, Ready, Start
from qwenimg.cli.workers.process import Lost
from qwenimg.common.base.errors import BackendMissing, UsageError
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.jobs.job import Job

POISON = 3  # the seed that ends its actor


class PretendRay:
    """The parts of Ray that are used. Its actors draw at once."""

    class RayError(Exception): ...

    def __init__(self) -> None:
        self.exceptions = SimpleNamespace(RayError=self.RayError)
        self.actors: list[dict[str, Any]] = []  # the options of each
        self.killed = 0

    def remote(self, **options: Any) -> Any:
        def make(models: Any) -> Any:
            self.actors.append(options)
            return SimpleNamespace(begin=SimpleNamespace(remote=self.begin), draw=SimpleNamespace(remote=self.draw))

        return lambda cls: SimpleNamespace(remote=make)

    async def begin(self) -> list[Any]:
        return [Ready()]

    async def draw(self, task: Draw) -> list[Any]:
        if task.job.seeds == (POISON,):
            raise self.RayError("the actor died")
        picture = PictureDrawn(id=task.id, index=0, data=PNG, recipe={}, seconds=0.1)
        return [picture, Finished(id=task.id)]

    def kill(self, actor: Any, no_restart: bool) -> None:
        self.killed += 1


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> PretendRay:
    pretended = PretendRay()
    monkeypatch.setitem(sys.modules, "ray", pretended)
    monkeypatch.setattr(driving, "PAUSE", 0.0)
    return pretended


def test_a_request_that_ends_its_actors_is_given_up_and_the_others_are_drawn(ray: PretendRay, tmp_path: Path) -> None:
    tasks = [
        BatchTask(key=f"{i:016x}".ljust(64, "0"), job=Job(options={"prompt": "x"}, seeds=(i,), where=f"r:{i}"))
        for i in range(8)
    ]
    starts, ended = [Start(models={"model": LoadOptions()}, backend="cuda", threads=3)] * 2, list[Any]()
    journal = BatchJournal(tmp_path / "out", (0, 1))

    async def whole() -> driving.BatchOutcome:
        return await Driver(
            tasks, frozenset(), journal, starts,
            lambda one, error, seconds: ended.append((one.job.seed, error)), lambda line: None, ray_engine.RayWorker,
        ).run()  # fmt: skip

    outcome = asyncio.run(whole())
    journal.close()
    assert outcome.done == 7 and outcome.failed == [1] and outcome.left == 0
    assert sorted(seed for seed, error in ended if not error) == [0, 1, 2, 4, 5, 6, 7]
    assert [error for seed, error in ended if seed == POISON] == [f"its worker has ended, {TRIES} times"]
    # A new actor after each end as long as there is work, which the other worker may have taken meanwhile.
    assert TRIES <= len(ray.actors) <= 2 + TRIES
    assert {(one["max_restarts"], one["max_task_retries"], one["num_gpus"]) for one in ray.actors} == {(0, 0, 1)}
    assert ray.actors[0]["runtime_env"] == {"env_vars": {"OMP_NUM_THREADS": "3"}} and ray.killed


def test_the_end_of_an_actor_is_a_message(ray: PretendRay) -> None:
    async def whole() -> None:
        worker = ray_engine.RayWorker(Start(models={"model": LoadOptions()}, backend="cpu"))
        inbox = worker.start()
        assert await inbox.get() == Ready() and ray.actors[0]["num_gpus"] == 0
        worker._call(ray.draw(Draw(id="x", model="model", job=Job(options={}, seeds=(POISON,)))))
        assert await inbox.get() == Lost(ray_engine.ENDED)
        assert worker.start() is not inbox, "the messages of the old actor do not reach the new one"
        assert await worker._inbox.get() == Ready()
        await worker.close()

    asyncio.run(whole())


def test_more_workers_than_gpus_are_refused() -> None:
    ray_engine.check(["cuda", "cuda"], 2)
    ray_engine.check(["cpu"] * 9, 0)
    with pytest.raises(UsageError, match="--workers 3: this Ray cluster has 2 GPUs"):
        ray_engine.check(["cuda"] * 3, 2)
    with pytest.raises(UsageError, match="--backend cuda:1: Ray chooses the GPU"):
        ray_engine.check(["cuda:1"], 2)


def test_without_ray_it_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "r.jsonl").write_text('{"prompt": "x", "steps": 1, "size": "64x64"}\n')
    drawn = ("batch", "r.jsonl", "-o", "out", "-m", "shapes", "--backend", "cpu", "--engine")
    cli(*drawn, "ray").refused(3, "--engine ray needs ray", "pip install '.[ray]'")
    cli(*drawn, "dask").refused(2, "--engine")
    assert find_spec("qwenimg.cli.batch.ray_engine") and not list((tmp_path / "out").glob("*.png"))


def test_ray_that_does_not_start_is_one_line(ray: PretendRay, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: Any) -> None:
        assert "log_to_driver" in options and ("object_store_memory" in options) == ("RAY_ADDRESS" not in environment)
        raise ConnectionError("no cluster\nat this address")

    environment: dict[str, str] = {}
    ray.init = init  # type: ignore[attr-defined]
    for address in ("", "10.0.0.1:6379"):
        environment = {"RAY_ADDRESS": address} if address else {}
        monkeypatch.setenv("RAY_ADDRESS", address)
        with (
            pytest.raises(BackendMissing, match="Ray does not start: no cluster at this address"),
            ray_engine.cluster(()),
        ):
            pass


def test_a_drawer_returns_the_messages_of_a_worker() -> None:
    from qwenimg.cli.workers.messages import ModelOpened

    drawer = ray_engine.Drawer(Start(models={"model": LoadOptions(model="shapes")}, backend="cpu"))
    opened, ready = drawer.begin()
    assert isinstance(opened, ModelOpened) and isinstance(ready, Ready)
    fields = {"prompt": "a red circle", "steps": 2, "width": 64, "height": 64}
    drawn, finished = drawer.draw(Draw(id="1", model="model", job=Job(options=fields, seeds=(7,))))
    assert isinstance(drawn, PictureDrawn) and drawn.data.startswith(b"\x89PNG") and drawn.recipe["seed"] == 7
    assert finished.error == ""  # type: ignore[union-attr]
    [failed] = drawer.draw(Draw(id="2", model="model", job=Job(options=fields | {"steps": 0}, seeds=(7,))))
    assert "steps" in failed.error  # type: ignore[union-attr]
    [unusable] = ray_engine.Drawer(Start(models={"model": LoadOptions(model="missing.safetensors")})).begin()
    assert unusable.exit_code == 5  # type: ignore[union-attr]
