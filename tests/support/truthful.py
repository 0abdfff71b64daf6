"""A stand-in for a perfect model: it renders what the gate's prompts ask for, and what is wrong with it is chosen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from training import scenes

from qwenimg.common.shapes.gate import GatePrompt
from qwenimg.common.shapes.words import Parsed

COLORS, SHAPES = list(scenes.PALETTE), list(scenes.SHAPES)


def jittered(rng: np.random.Generator, picture: scenes.Scene) -> scenes.Scene:
    """Its objects a little elsewhere and of other sizes, as a model draws them."""

    def moved(o: scenes.Object) -> scenes.Object:
        dx, dy, grow = rng.uniform(-1, 1, 3)
        return replace(o, x=o.x + 0.02 * dx, y=o.y + 0.02 * dy, radius=o.radius * (1 + 0.04 * grow))

    return replace(picture, objects=tuple(map(moved, picture.objects)))


def scene(wanted: Parsed, seed: int, *, color: str | None = None, shape: str | None = None) -> scenes.Scene:
    """A scene of what is `wanted`; `color` and `shape` are of its first thing instead."""
    rng = np.random.default_rng(seed)
    first = wanted.things[0]
    pair = (color or first.color or "red", shape or first.shape)
    if wanted.relation is not None:
        second = (wanted.things[1].color, wanted.things[1].shape)
        ground = wanted.background or scenes.backgrounds(pair[0], second[0])[0]
        return jittered(rng, scenes.two(pair, wanted.relation, second, ("small", "medium"), ground))
    ground = wanted.background or scenes.backgrounds(pair[0])[0]
    if (first.count or 1) > 1:
        return jittered(rng, scenes.several(*pair, "small", first.count, ground))
    return jittered(rng, scenes.one(*pair, first.size or "medium", wanted.position or "center", ground))


def pixels(picture: scenes.Scene, width: int, height: int) -> np.ndarray:
    """As uint8 [H, W, 3]."""
    levels = (scenes.render(picture, width, height) + 1) * 127.5
    return np.ascontiguousarray(np.rint(levels).astype(np.uint8).transpose(1, 2, 0))


class Truthful:
    """`stream` of a pipeline. `wrong` says by prompt what its first thing is drawn as: `color` or `shape`."""

    backend, device, model_name = "cpu", "Fake CPU", "shapes-v1"

    def __init__(self, prompts: Sequence[GatePrompt], wrong: Mapping[str, dict[str, str]] | None = None):
        self.wanted = {(asked.prompt, asked.seed): asked.wanted for asked in prompts}
        self.wrong = wrong or {}
        self.asked: list[dict[str, Any]] = []
        self.prepared: list[str] = []

    def headline(self) -> str:
        return "cpu on Fake CPU · fp32 · shapes-v1"

    def prepare(self, prompts: Sequence[str], clip_skip: int = 0, lora: str = "") -> None:
        self.prepared += prompts

    def stream(self, prompt: str, *, seed: int, width: int, height: int, steps: int, **asked: Any) -> Iterator[Any]:
        from qwenimg import Result, Step

        self.asked.append({"prompt": prompt, "seed": seed, "width": width, "height": height, "steps": steps, **asked})
        for i in range(steps):
            yield Step(
                index=i + 1,
                total=steps,
                sigma=1.0,
                seconds=0.0,
                read=lambda: np.zeros((1, 4, 8, 8), "f4"),
                see=lambda: np.full((8, 8, 3), 99, np.uint8),
            )
        picture = scene(self.wanted[prompt, seed], seed, **self.wrong.get(prompt, {}))
        latents = np.zeros((1, 16, height // 8, width // 8), np.float32)
        yield Result(pixels=pixels(picture, width, height), latents=latents, recipe={})  # type: ignore[typeddict-item]
