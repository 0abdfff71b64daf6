"""Both branches of a UNet's guidance in one batch or one after the other, its blocks in memory or streamed: what fits,
and the same picture."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cli_runner import cli
from support.opened_parts import network_of

import qwenimg
from qwenimg import DoesNotFit, Pipeline
from qwenimg.common.base.amounts import size_text
from qwenimg.common.families.stable_diffusion.expert import Expert
from qwenimg.common.memory.memory_plan import StageMemory
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.pipeline import fit
from qwenimg.common.pipeline.models.diffusion_model import renew
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.residents import Occupancy, Placement, Residents
from qwenimg.common.runtime.runtime import limit_for, plannable
from qwenimg.common.runtime.stages import Stage

SIZE: dict[str, Any] = {
    "width": 64, "height": 64, "steps": 2, "seed": 5, "guidance": 6.0, "negative_prompt": "blue", "sampler": "euler",
}  # fmt: skip
SHAPE = (8, 8)
APART = 1e-5  # of the largest latent: a batch of two multiplies in another order than one branch (3e-6 measured)
RUNGS = [(2, False), (1, False), (2, True), (1, True)]  # branches in one batch, whether blocks are streamed


class Sizes:
    """Bytes of the UNet whole and with all of its blocks streamed, and of steps of one branch and of both."""

    def __init__(self, pipe: Pipeline):
        expert, asked = base(pipe), pipe.check("a red circle", **SIZE)
        runtime, unet = expert.runtime, expert.checkpoint["unet"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runtime, "max_memory", 1)
            self.least = runtime.weight_bytes(runtime.with_streaming(unet, 0))
        self.whole = runtime.weight_bytes(unet)
        self.one, self.both = (expert.step_bytes(asked, *SHAPE, count) for count in (1, 2))

    @property
    def rooms(self) -> list[int]:
        """The least of each of the `RUNGS`."""
        return [part + step for part in (self.whole, self.least) for step in (self.both, self.one)]


def base(pipe: Pipeline) -> Expert:
    return pipe.model.base  # type: ignore[attr-defined]


def load(folder: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    """One that streams. Of these models decoding takes more than a step, and is left out."""
    pipe = qwenimg.load(folder, backend, "fp32", max_memory="1000GB")
    stages = pipe.model.stages
    monkeypatch.setattr(pipe.model, "stages", lambda *given: stages(*given)[:-1])
    monkeypatch.setattr(
        pipe.model.vae, "decode", lambda x: np.zeros((1, 3, 8 * x.shape[2], 8 * x.shape[3]), np.float32)
    )
    return pipe


def limit(pipe: Pipeline, room: int) -> None:
    """To so many bytes that a plan may use, or up to two more."""
    pipe.runtime.max_memory = limit_for(room)
    assert 0 <= plannable(limit_for(room)) - room <= 2


def denoising(pipe: Pipeline, **asked: Any) -> StageMemory:
    return next(
        s for s in fit.plan_memory(pipe.model, pipe.check("a red circle", **asked)).stages if s.name == "denoise"
    )


def arranged(pipe: Pipeline, asked: Request, room: int) -> Placement:
    """How the steps are run in so many bytes with nothing else in memory."""
    [stage] = pipe.model.steps(asked, pipe.model.plan(asked), LatentShape(1, *SHAPE)).values()  # type: ignore[attr-defined]
    return Occupancy(pipe.runtime, lambda loaded: room, lambda names: None).place(stage)


def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many branches each call of the UNet has, from now on."""
    seen: list[int] = []
    enter = Residents.acquire

    def entered(residents: Residents, stage: Stage) -> Any:
        component, split = enter(residents, stage)
        predict = type(component).predict if stage.resident == "unet" else None
        if predict is not None:
            component.predict = lambda x, step, condition: (
                seen.append(condition.branches) or predict(component, x, step, condition)
            )
        return component, split

    monkeypatch.setattr(Residents, "acquire", entered)
    return seen


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_what_is_chosen(name: str, backend: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """From the room of each rung on down to that of the next one."""
    with closing(load(folders[name], backend, monkeypatch)) as pipe:
        sizes, expert, asked = Sizes(pipe), base(pipe), pipe.check("a red circle", **SIZE)
        rooms = sizes.rooms
        assert rooms == sorted(rooms, reverse=True)
        for (branches, streams), room, above in zip(RUNGS, rooms, [10**12, *rooms], strict=False):
            for some in (room, above - 1):
                way = arranged(pipe, asked, some)
                read = expert.runtime.streamed_bytes(way.component)
                assert (way.split.size, read > 0) == (branches, streams)
                assert way.weights + way.split.activations <= some
        refused = arranged(pipe, asked, rooms[-1] - 1)
        assert refused.split.size == 1 and refused.weights == sizes.least
        pipe.runtime.max_memory = None
        decided = [arranged(pipe, asked, room).split.size for room in (rooms[0], rooms[0] - 1, rooms[1], rooms[1] - 1)]
        assert decided == [2, 1, 1, 1], "without streaming; where nothing fits, what takes the least"


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.parametrize("name", ["sd15", "sdxl"])
@pytest.mark.sample(0)
def test_what_is_planned_is_drawn(
    name: str, backend: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a limit for each rung: the plan, the estimate, the calls, the bytes that they read, and the picture."""
    seen, drawn = calls(monkeypatch), list[Any]()
    with closing(load(folders[name], backend, monkeypatch)) as pipe:
        sizes = Sizes(pipe)
        for (branches, streams), room in zip(RUNGS, sizes.rooms, strict=True):
            renew(pipe.model, "")  # nothing is loaded
            limit(pipe, room)
            asked = SIZE | {"steps": 4, "cfg_end": 0.5}
            found, stage = fit.plan_memory(pipe.model, pipe.check("a red circle", **asked)), denoising(pipe, **asked)
            assert stage.activations == (sizes.one, sizes.both)[branches - 1] and stage.peak <= room + 2
            assert stage.about == ("" if branches == 2 else "one branch of guidance after the other")
            assert pipe.estimate("a red circle", **asked).memory == found.largest.peak == stage.peak
            seen.clear()
            drawn.append(pipe("a red circle", **asked).latents)
            assert seen == ([2, 2, 1, 1] if branches == 2 else [1] * 6)
            per_call = pipe.runtime.streamed_bytes(pipe.model.residents._memory.opened["unet"])
            assert (per_call > 0) == streams and found.streamed == len(seen) * per_call
            print(f"{name} on {backend}: {room} bytes, calls of {seen} branches, {found.streamed:,.0f} bytes streamed")
        renew(pipe.model, "")
        limit(pipe, sizes.rooms[-1] - 3)
        with pytest.raises(DoesNotFit, match=f"takes {size_text(sizes.rooms[-1])} in fp32, --max-memory "):
            pipe("a red circle", **SIZE)
    batched, turns, streamed, streamed_turns = drawn
    difference = float(np.abs(turns - batched).max() / np.abs(batched).max())
    print(f"{difference:.1e} apart")
    assert difference < APART
    assert streamed.tobytes() == batched.tobytes() and streamed_turns.tobytes() == turns.tobytes()


@pytest.mark.parametrize("rung", [0, 2])
@pytest.mark.sample(1)
def test_pictures_of_other_sizes_follow(rung: int, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A UNet that is loaded stays as it is where a step fits beside it, and is planned so."""
    seen, kept = calls(monkeypatch), list[Any]()
    with closing(load(folders["sd15"], "cpu", monkeypatch)) as pipe:
        sizes = Sizes(pipe)
        larger = base(pipe).step_bytes(pipe.check("a red circle", **SIZE), 128 // 8, 128 // 8, 2)
        limit(pipe, sizes.rooms[rung] + larger - sizes.both - 3)  # a little less than both branches of 128 pixels take
        for side, branches in ((64, 2), (128, 1), (64, 2), (32, 2), (128, 1)):
            asked = SIZE | {"width": side, "height": side}
            stage = denoising(pipe, **asked)
            seen.clear()
            pipe("a red circle", **asked)
            step = base(pipe).step_bytes(pipe.check("a red circle", **asked), side // 8, side // 8, branches)
            print(f"{side} pixels: {stage.activations} bytes beside {stage.weights}, calls of {set(seen)} branches")
            assert set(seen) == {branches} and stage.activations == step
            assert stage.weights == pipe.runtime.weight_bytes(pipe.model.residents._memory.opened["unet"])
            kept.append(network_of(pipe, "unet"))
        assert all(unet is kept[1] for unet in kept[1:])


@pytest.mark.parametrize("published", ["sdxl --max-memory 1900MB", "sd15 --max-memory 750MB"])
@pytest.mark.sample(1)
def test_in_turn_is_planned_before_a_smaller_picture_is(published: str) -> None:
    """Both were refused, and a smaller size said instead."""
    ran = cli("plan", *published.split(), "--backend", "cpu", "--precision", "bf16", "--memory", "16GB", "--json")
    found = json.loads(ran.out)
    assert ran.code == 0 and found["fits"] and found["ways"] == []
