"""One pipeline draws one picture at a time: a second call is refused at once. What is given up frees it:
`test_every_family`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest

import qwenimg
from qwenimg import ModelError, Pipeline, PipelineBusy, Result, Step, UsageError

SMALL: dict[str, Any] = {"width": 32, "height": 32, "steps": 3, "seed": 5}
WAIT = 300  # seconds, for a test that hangs; nothing is measured with it


@pytest.fixture(params=["cpu", "mlx"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["qwen", "sd15"])
def open_pipe(request: pytest.FixtureRequest, backend: str, tiny_folder: Path) -> Callable[[], Pipeline]:
    folder = tiny_folder if request.param == "qwen" else request.getfixturevalue("folders")["sd15"]
    return lambda: qwenimg.load(folder, backend=backend, precision="fp32")


CALLS: dict[str, Callable[[Pipeline], object]] = {
    "call": lambda pipe: pipe("a star", **SMALL),
    "stream": lambda pipe: pipe.stream("a star", **SMALL),
    "prepare": lambda pipe: pipe.prepare(["a star"]),
    "free_transformer": lambda pipe: pipe.free_transformer(),
    "close": lambda pipe: pipe.close(),
}


@pytest.mark.sample(0)
def test_a_second_thread_is_refused_and_the_first_keeps_its_picture(open_pipe: Callable[[], Pipeline]) -> None:
    pipe, begun, go_on = open_pipe(), Event(), Event()
    early = pipe.stream("a star", **SMALL)  # made before, and not begun

    def draw() -> Result:
        for event in pipe.stream("a ring", **SMALL):
            if isinstance(event, Step) and event.index == 1:
                begun.set()
                assert go_on.wait(WAIT)
        assert isinstance(event, Result)
        return event

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(draw)
        try:
            assert begun.wait(WAIT)
            for call in (*CALLS.values(), lambda pipe: next(early)):
                with pytest.raises(PipelineBusy, match="this pipeline is busy"):
                    call(pipe)
        finally:
            go_on.set()
        drawn = future.result(WAIT)
    fresh = open_pipe()
    assert drawn.recipe["prompt"] == "a ring"
    assert drawn.latents.tobytes() == fresh("a ring", **SMALL).latents.tobytes()
    assert pipe("a star", **SMALL).latents.tobytes() == fresh("a star", **SMALL).latents.tobytes()


@pytest.mark.parametrize("name", [name for name in CALLS if name != "close"])
def test_a_closed_pipeline_says_so(tiny_folder: Path, name: str) -> None:
    pipe = qwenimg.load(tiny_folder, backend="cpu", precision="fp32")
    late = pipe.stream("a star", **SMALL)
    pipe.close()
    pipe.close()
    with pytest.raises(UsageError, match="this pipeline is closed; load the model again"):
        CALLS[name](pipe)
    with pytest.raises(UsageError, match="closed"):
        next(late)


@pytest.mark.sample(1)
def test_a_second_thread_that_waits_draws_its_picture_next(open_pipe: Callable[[], Pipeline]) -> None:
    pipe, in_line = open_pipe(), Event()
    with ThreadPoolExecutor(2) as pool:
        first = pipe.stream("a ring", **SMALL)
        next(first)

        def wait() -> Result:
            stream = pipe.stream("a star", wait=True, **SMALL)
            in_line.set()
            *_, result = stream
            assert isinstance(result, Result)
            return result

        future = pool.submit(wait)
        assert in_line.wait(WAIT)
        *_, ring = first
        star = future.result(WAIT)
        again = pool.submit(lambda: pipe("a star", wait=WAIT, **SMALL)).result(WAIT)
    assert isinstance(ring, Result)
    fresh = open_pipe()
    assert ring.latents.tobytes() == fresh("a ring", **SMALL).latents.tobytes()
    assert star.latents.tobytes() == fresh("a star", **SMALL).latents.tobytes() == again.latents.tobytes()


@pytest.mark.sample(1)
def test_the_picture_that_waits_is_drawn_after_one_that_fails(open_pipe: Callable[[], Pipeline]) -> None:
    pipe = open_pipe()
    broken = Path("no-such-lora.safetensors")
    with ThreadPoolExecutor(1) as pool:
        first = pipe.stream("a ring", **SMALL)
        next(first)
        future = pool.submit(lambda: pipe("a star", wait=True, **SMALL))
        with pytest.raises(ZeroDivisionError):
            first.throw(ZeroDivisionError)
        assert future.result(WAIT).recipe["prompt"] == "a star"
    with pytest.raises(ModelError):
        pipe("a star", wait=True, lora=broken, **SMALL)
    assert pipe("a star", **SMALL).seed == SMALL["seed"]


@pytest.mark.sample(1)
def test_a_block_ends_when_the_picture_of_another_thread_is_done(open_pipe: Callable[[], Pipeline]) -> None:
    begun, go_on, leaves = Event(), Event(), Event()

    def draw(pipe: Pipeline) -> Result:
        for event in pipe.stream("a ring", **SMALL):
            if isinstance(event, Step) and event.index == 1:
                begun.set()
                assert go_on.wait(WAIT)
        assert isinstance(event, Result)
        return event

    def release() -> None:
        assert leaves.wait(WAIT)
        go_on.set()

    with ThreadPoolExecutor(2) as pool:
        with open_pipe() as pipe:
            future = pool.submit(draw, pipe)
            assert begun.wait(WAIT)
            pool.submit(release)
            leaves.set()
        assert future.result(WAIT).recipe["prompt"] == "a ring", "it was drawn to its end"
    with pytest.raises(UsageError, match="closed"), pipe:
        pass


@pytest.mark.sample(1)
def test_a_block_ends_a_stream_of_its_own_thread_whatever_ends_it(open_pipe: Callable[[], Pipeline]) -> None:
    with open_pipe() as pipe:
        stream = pipe.stream("a ring", **SMALL)
        next(stream)
    assert list(stream) == []
    with pytest.raises(ZeroDivisionError), open_pipe() as other:
        stream = other.stream("a ring", **SMALL)
        next(stream)
        raise ZeroDivisionError
    with pytest.raises(UsageError, match="closed"):
        other("a ring", **SMALL)
