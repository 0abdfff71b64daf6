"""Both branches of a UNet's guidance in one batch, or one after the other where only that fits: the same picture."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qwenimg
from qwenimg.common.families.stable_diffusion.expert import Expert
from qwenimg.common.pipeline import fit

SIZE: dict[str, Any] = {"width": 256, "height": 128, "steps": 2, "seed": 5, "guidance": 6.0}
SHAPE = (16, 32)


def calls(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many branches each call of the UNet has, from now on."""
    seen: list[int] = []
    opened = Expert.unet

    def unet(expert: Expert, more: int = 0) -> Any:
        component = opened(expert, more)
        predict = type(component).predict
        component.predict = lambda x, features, condition: (
            seen.append(condition.branches) or predict(component, x, features, condition)
        )
        return component

    monkeypatch.setattr(Expert, "unet", unet)
    return seen


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_in_turn_where_only_that_fits(
    name: str, backend: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(qwenimg.load(folders[name], backend, "fp32")) as pipe:
        expert, asked = pipe.model.base, pipe.check("a red circle", **SIZE)  # type: ignore[attr-defined]
        weights = expert.runtime.weight_bytes(expert.checkpoint["unet"])
        one, both = (weights + expert.step_bytes(asked, *SHAPE, count) for count in (1, 2))
        decided = [expert.branches(asked, SHAPE, room) for room in (one - 1, one, both - 1, both)]
        assert decided == [2, 1, 1, 2], "where not even one fits, neither is right, and blocks are streamed"
        seen = calls(pipe, monkeypatch)
        batched = pipe("a red circle", negative_prompt="blue", **SIZE)
        assert set(seen) == {2}
        count = len(seen)
        seen.clear()
        monkeypatch.setattr(expert, "room", lambda more: both - 1)
        turns = pipe("a red circle", negative_prompt="blue", **SIZE)
    difference = float(np.abs(turns.latents - batched.latents).max() / np.abs(batched.latents).max())
    print(f"{name} on {backend}: {one} to {both} bytes, calls of {set(seen)} branches, {difference:.1e} apart")
    assert set(seen) == {1} and len(seen) == 2 * count and difference < 1e-5


def test_the_plan_is_of_what_is_drawn(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(qwenimg.load(folders["sd15"], "cpu", "fp32")) as pipe:
        expert, asked = pipe.model.base, pipe.check("a red circle", **SIZE)  # type: ignore[attr-defined]
        weights = expert.runtime.weight_bytes(expert.checkpoint["unet"])
        one, both = (expert.step_bytes(asked, *SHAPE, count) for count in (1, 2))
        planned = {}
        for room in (weights + both, weights + both - 1):
            monkeypatch.setattr(expert.runtime, "room", lambda loaded, room=room: room)
            planned[room] = next(s.activations for s in fit.needs(pipe.model, asked).stages if s.name == "denoise")
    print(planned, one, both)
    assert list(planned.values()) == [both, one]
