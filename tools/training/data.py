"""What the steps are trained on: pictures of random scenes, rendered when they are needed. Nothing is read from a disk.

Every batch is made from (seed, step) alone, so that a run can be resumed anywhere. Arrays are numpy's, float32.

B batch, N pictures, z latent channels, `h w` latents or pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.shapes.words import Language
from training import describe
from training import scenes as shapes
from training.scenes import Scene

Float32 = NDArray[np.float32]
Size = tuple[int, int]

VAE_KIND, SCENE_KIND, STEP_KIND, MEASURE_KIND, TEXT_KIND = range(5)
"""Streams of random numbers that must not be the same."""

REUSE = 16  # steps that a picture is used in, each time with another prompt, noise and noise level
LAG = 64  # steps between two uses of a picture
DROPPED = 0.1  # of the prompts, so that there is a prediction without one
COLOR_ONLY = 0.08  # of the prompts of one object, so that a colour by itself is more than no prompt
CHINESE = 0.4  # of the prompts
SIDES = (64, 320)  # pixels a side of the pictures that the VAE's crops are cut from


def generator(seed: int, kind: int, index: int) -> np.random.Generator:
    """The random numbers of one batch."""
    return np.random.default_rng([seed, kind, index])


# For the VAE


def crops(seed: int, step: int, count: int, size: Size) -> tuple[Float32, np.random.Generator]:
    """Windows of `size` [N 3 h w] out of pictures of various sizes, around an object; and the step's generator."""
    rng = generator(seed, VAE_KIND, step)
    return np.stack([_crop(rng, size) for _ in range(count)]), rng


def _crop(rng: np.random.Generator, size: Size) -> Float32:
    """The scene is moved and enlarged, so that only what is in the window is drawn."""
    scene = shapes.random_scene(rng)
    width, height = size
    side = SIDES[0] * (SIDES[1] / SIDES[0]) ** rng.random()
    target = shapes.pick(rng, scene.objects)
    left = (target.x + (rng.random() - 0.5) * 3 * target.radius) * side - width / 2
    top = (target.y + (rng.random() - 0.5) * 3 * target.radius) * side - height / 2
    moved = [
        replace(
            o,
            x=(o.x * side - left) / width,
            y=(o.y * side - top) / height,
            radius=o.radius * side / min(width, height),
        )
        for o in scene.objects
    ]
    return shapes.render(replace(scene, objects=tuple(moved)), width, height)


def pictures(seed: int, count: int, size: Size) -> Float32:
    """Whole pictures [N 3 h w] to measure with."""
    rng = generator(seed, MEASURE_KIND, 0)
    return np.stack([shapes.render(shapes.random_scene(rng), *size) for _ in range(count)])


# For the transformer


@dataclass(frozen=True)
class Group:
    """Scenes and their latents [N z h w], which stay in use for a while. `simple`: for the first lessons."""

    simple: bool
    scenes: list[Scene]
    latents: Float32


@dataclass(frozen=True)
class Batch:
    """Latents x, noise [B z h w], noise levels before the shift, and prompts of one step."""

    latents: Float32
    noise: Float32
    levels: NDArray[np.float64]
    prompts: list[str]


class LatentBatches:
    """Batches whose pictures are each encoded once and used in `REUSE` steps, `LAG` or more steps apart.

    Each step renders and encodes a small new part of its batch. What is in use at a step is a function of (seed,
    step): after a resume the groups still in use are made again. The first `simple` groups, one for each step, are of
    one object under its plain prompt. `encode`: pictures [N 3 h w] -> latents [N z h w].
    """

    def __init__(
        self, seed: int, batch: int, sizes: Sequence[Size], encode: Callable[[Float32], Float32], simple: int = 0
    ):
        self.seed, self.sizes, self.encode, self.simple = seed, sizes, encode, simple
        self.uses = next(uses for uses in range(REUSE, 0, -1) if batch % uses == 0)
        self.count = batch // self.uses
        self.lag = len(sizes) * -(-LAG // len(sizes))  # a multiple, so that all groups of a batch have one size
        self._groups: dict[int, Group] = {}

    def size(self, step: int) -> Size:
        return self.sizes[step % len(self.sizes)]

    def batch(self, step: int) -> Batch:
        """The batch of a step. Steps in order cost the least."""
        numbers = [step + use * self.lag for use in range(self.uses)]  # the last one is new
        oldest = min(numbers)
        self._groups = {number: group for number, group in self._groups.items() if number >= oldest}
        groups = [self._group(number) for number in numbers]
        scenes = [(scene, group.simple) for group in groups for scene in group.scenes]
        latents = np.concatenate([group.latents for group in groups])
        rng = generator(self.seed, STEP_KIND, step)
        return Batch(
            latents=latents,
            noise=rng.standard_normal(latents.shape, dtype=np.float32),
            levels=1 / (1 + np.exp(-rng.standard_normal(len(scenes)))),
            prompts=[prompt(scene, rng, simple=simple) for scene, simple in scenes],
        )

    def _group(self, number: int) -> Group:
        if number not in self._groups:
            rng = generator(self.seed, SCENE_KIND, number)
            simple = number < self.simple
            make = shapes.simple_scene if simple else shapes.random_scene
            scenes = [make(rng) for _ in range(self.count)]
            images = np.stack([shapes.render(scene, *self.size(number)) for scene in scenes])
            self._groups[number] = Group(simple, scenes, self.encode(images))
        return self._groups[number]


def prompt(scene: Scene, rng: np.random.Generator, *, simple: bool, drop: bool = True) -> str:
    """A description in one of two languages, or, with `drop`, now and then a space, which stands for no prompt, or a
    colour and nothing else, which is what a negative prompt is made of."""
    language: Language = "zh" if rng.random() < CHINESE else "en"
    text = describe.plain(scene) if simple else describe.describe(scene, rng, language)
    if drop and rng.random() < DROPPED:
        return " "
    if drop and not simple and len(scene.objects) == 1 and rng.random() < COLOR_ONLY:
        return describe.only_color(scene, rng, language)
    return text


def padded(ids: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], list[int]]:
    """Token ids [B S], padded at the end, where a causal encoder does not look, and the length of each row."""
    lengths = [len(row) for row in ids]
    table = np.zeros((len(ids), max(lengths)), dtype=np.int64)
    for to, row in zip(table, ids, strict=True):
        to[: len(row)] = row
    return table, lengths
