"""What a plan says of each stage is what the run does, for every family, on both backends and at any limit: which
network is opened and which is used again, how many of its bytes stay in memory, and how the work is divided. Images
are the same at any limit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.crossed import crossed
from support.family_cases import ASKED, BACKENDS, KINDS, PICTURE, PROMPT, STARTING, opener, places, see_few_pixels
from support.relative import relative
from support.toy_family import add_toy, write_toy

from qwenimg import Pipeline
from qwenimg.common.pipeline import fit_options
from qwenimg.common.pipeline.steps.step_cache import Pass
from qwenimg.common.runtime.residents import Occupancy, Placement, Residents
from qwenimg.common.runtime.runtime import Change, limit_for
from qwenimg.common.runtime.stages import Stage
from qwenimg.common.weights import streaming

BRIEF = ASKED | {"steps": 3}
# The second one needs the text encoder again, the third another schedule, the fourth the VAE's encoder.
PICTURES: tuple[dict[str, Any], ...] = (
    {"prompt": PROMPT}, {"prompt": "a star"}, {"prompt": "a star", "width": 96, "cfg_end": 0.5},
    {"prompt": PROMPT, "image": PICTURE, "strength": 0.8}, {"prompt": PROMPT},
    {"prompt": "a ring", "hires": 1.5, "hires_strength": 0.7},
    {"prompt": "a ring", "hires": 1.5, "hires_strength": 0.7, "hires_with": "latent"},
)  # fmt: skip
SAME = 3e-4  # relative L2: streamed blocks have the same bits; a UNet's branches in turn round otherwise, 8e-5 at most
SHARES = (1.0, 1.6)  # of the least --max-memory
Row = tuple[str, str, bool, int, int | None]  # stage, component, whether it is opened, its bytes, size of a piece


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("toy")


@pytest.fixture(autouse=True)
def with_toy(monkeypatch: pytest.MonkeyPatch, toy: Path) -> None:
    add_toy(monkeypatch, toy / "networks")
    see_few_pixels(monkeypatch)


@pytest.fixture
def load(kind: str, backend: str, toy: Path, tiny: dict[str, Path]) -> Callable[[int | None], Pipeline]:
    model = toy / "model"
    folder = places(tiny, model if model.exists() else write_toy(model))[kind]
    return lambda limit: opener(kind, folder, tiny)(backend, max_memory=limit)


def planned(pipe: Pipeline, asked: dict[str, Any]) -> list[Row]:
    """The stages as `fit_options.plan_memory` simulates them."""
    rows: list[Row] = []
    place = Occupancy.place

    def noted(memory: Occupancy, stage: Stage) -> Placement:
        way = place(memory, stage)
        held = streaming.peak_weight_bytes(pipe.runtime.load_plan(way.component), None)
        rows.append((stage.name, stage.resident, way.opens, held, way.split.size))
        return way

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Occupancy, "place", noted)
        plan = fit_options.plan_memory(pipe.model, pipe.check(**asked))
    assert plan.fits(plan.budget)
    return once(rows)


def once(rows: list[Row]) -> list[Row]:
    """Without what is entered again right behind itself, such as the VAE for each of an image and its mask."""
    return [row for i, row in enumerate(rows) if i == 0 or row[2] or row[:2] != rows[i - 1][:2]]


def drawn(pipe: Pipeline, asked: dict[str, Any]) -> tuple[list[Row], np.ndarray]:
    """The stages as the engine opens networks for them, and the final latents."""
    rows: list[Row] = []
    held: dict[str, int] = getattr(pipe, "held", {})
    opened: list[int] = []
    open_, enter = pipe.engine.open, Residents.acquire

    def opening(network: str, config: Any, plan: Any, precision: Any) -> Any:
        opened.append(streaming.peak_weight_bytes(plan, None))
        return open_(network, config, plan, precision)

    def entered(residents: Residents, stage: Stage) -> Any:
        opened.clear()
        network, split = enter(residents, stage)
        held[stage.resident] = opened[0] if opened else held[stage.resident]
        row = (stage.name, stage.resident, bool(opened), held[stage.resident], split.size)
        rows.append(row)
        return network, split

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipe.engine, "open", opening)
        patch.setattr(Residents, "acquire", entered)
        made = pipe(**asked)
    pipe.held = held  # type: ignore[attr-defined]
    return once(rows), made.latents


def lowest(pipe: Pipeline, every: list[dict[str, Any]]) -> int:
    """The least --max-memory at which a fresh run of each of the images fits."""
    tight = pipe.model.variant(Change(max_memory=1))
    return limit_for(max(fit_options.plan_memory(tight, pipe.check(**asked)).largest.peak for asked in every))


@pytest.mark.parametrize(("kind", "backend"), crossed(KINDS, BACKENDS))
@pytest.mark.sample(0, rest=5)
def test_a_run_does_what_its_plan_says(load: Callable[[int | None], Pipeline], kind: str, backend: str) -> None:
    every = [BRIEF | asked for asked in PICTURES]
    if kind not in STARTING:
        every = [{name: asked[name] for name in asked if name != "strength"} for asked in every if "hires" not in asked]
    if kind == "cascade":  # whose latents are not those that a run begins from
        every = [asked for asked in every if "hires_with" not in asked]
    with closing(load(10**12)) as pipe:
        least = lowest(pipe, every)
    seen, whole, errors = set[tuple[bool, int]](), list[np.ndarray](), list[float]()
    for limit in (None, *(int(share * least) for share in SHARES)):
        with closing(load(limit)) as pipe:
            for number, asked in enumerate(every):
                plan = planned(pipe, asked)
                run, latents = drawn(pipe, asked)
                assert run == plan, (limit, asked)
                seen |= {(opens, held) for _, _, opens, held, _ in run}
                whole += [latents] if limit is None else []
                errors.append(relative(latents, whole[number]))
    print(f"{kind} on {backend}: from {least:,} bytes on, {len(seen)} ways to have a component in memory; ", end="")
    print(f"latents {max(errors):.1e} apart")
    assert max(errors) <= SAME
    assert kind == "toy" or len(seen) > 4, "some are used again, and some streamed"


@pytest.mark.parametrize(
    ("kind", "sampler"),
    [("qwen", "euler"), ("sd15", "heun"), ("sdxl+refiner", "dpmpp_2m"), ("z-image", "heun"), ("sd3", "euler")],
)
@pytest.mark.parametrize("backend", ["cpu"])
@pytest.mark.sample(1)
def test_a_run_has_the_passes_of_its_plan(
    load: Callable[[int | None], Pipeline], sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where guidance ends within a step, and beside skipped layers, which are a branch of their own."""
    called, entered = list[int](), list[Any]()
    call, enter = Pass.__call__, Residents.acquire

    def counted(one: Pass, *given: Any) -> Any:
        called.append(1)
        return call(one, *given)

    def noted(residents: Residents, stage: Stage) -> Any:
        network, split = enter(residents, stage)
        entered.append(split.passes if stage.name in ("denoise", "refine") else 0)
        return network, split

    monkeypatch.setattr(Pass, "__call__", counted)
    monkeypatch.setattr(Residents, "acquire", noted)
    with closing(load(None)) as pipe:
        more = {"skip_layers": "1"} if "skip_layers" in pipe.model.options else {}
        for share in (0.3, 0.5, 1.0):
            pipe(PROMPT, **BRIEF | {"steps": 5, "sampler": sampler, "cfg_end": share}, **more)
            print(f"cfg_end {share}: {len(called)} passes")
            assert len(called) == sum(entered), share
            called.clear()
            entered.clear()
