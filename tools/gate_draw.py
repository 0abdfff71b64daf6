"""What the gate draws and who draws it: a backend of ours, or diffusers from the same noise, in several processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import conftest  # noqa: F401  (the environment of the tests, before a framework is imported)
import numpy as np
from support import frameworks  # noqa: F401

import qwenimg
from qwenimg.common.base.errors import NumericsError
from qwenimg.common.families import catalog
from qwenimg.common.numbers import noise
from qwenimg.common.shapes import builtin, gate
from qwenimg.common.shapes.check import Verdict, check, ideal_overlap, look
from qwenimg.common.shapes.gate import GatePrompt
from qwenimg.common.shapes.scenes import SHAPES
from qwenimg.common.shapes.selftest import JUDGED
from qwenimg.common.shapes.words import Parsed, Thing

Pixels = np.ndarray[Any, np.dtype[np.uint8]]

LOW_GUIDANCE = "guidance-1"
PLAIN, WITHOUT_RED = "any-colour", "negative-red"
EXTRA = (LOW_GUIDANCE, PLAIN, WITHOUT_RED)
"""Groups beside those of the gate's prompts."""
ANY_COLOUR_SEEDS = range(3000, 3008)


@dataclass(frozen=True, kw_only=True)
class Artist:
    """Who draws: `model` is a folder or a name, `backend` one of ours or `diffusers`, `size` width and height.
    diffusers has the model's own sampler only."""

    model: str
    backend: str
    precision: str
    size: tuple[int, int] = (catalog.BUILT_IN.width, catalog.BUILT_IN.height)
    sampler: str | None = None  # the model's own

    def __str__(self) -> str:
        return f"{self.backend}:{self.precision}"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One picture to draw, counted in `group`."""

    group: str
    asked: GatePrompt
    guidance: float = catalog.BUILT_IN.guidance
    negative: str = catalog.BUILT_IN.negative_prompt


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A job that is done. `pixels` and `verdict` are None where a value was not finite; `overlap` is that of the only
    object asked for with the ideal shape that fits best, 0 where there is none, and None where more are asked for."""

    job: Job
    pixels: Pixels | None
    verdict: Verdict | None
    colors: tuple[str, ...]  # of the objects that are seen
    overlap: float | None = None

    @property
    def right(self) -> bool:
        """By the parts that count in the prompt's own group."""
        parts = JUDGED[self.job.asked.group]
        return self.verdict is not None and all(getattr(self.verdict, name) is not False for name in parts)


# What


def jobs(groups: Sequence[str] | None, limit: int | None) -> list[Job]:
    """The gate's prompts, every pair once at guidance 1, and every shape without a colour, with and without red as the
    negative prompt. `groups` chooses, `limit` is the most of a group, spread over it."""
    found = [Job(group=asked.group, asked=asked) for asked in gate.gate_prompts()]
    pairs = [job for job in found if job.group in ("trained", "held-out") and job.asked.seed % 4 == 0]
    found += [replace(job, group=LOW_GUIDANCE, guidance=1.0) for job in pairs]
    for group, negative in ((PLAIN, catalog.BUILT_IN.negative_prompt), (WITHOUT_RED, "red")):
        found += [Job(group=group, asked=asked, negative=negative) for asked in _any_colour()]
    names = list(dict.fromkeys(job.group for job in found))
    for name in groups or []:
        if name not in names:
            raise SystemExit(f"--groups: {name} is none of {', '.join(names)}")
    return [job for name in names if not groups or name in groups for job in _spread(found, name, limit)]


def _any_colour() -> list[GatePrompt]:
    wanted = {shape: Parsed(things=(Thing(shape=shape),)) for shape in SHAPES}
    return [
        GatePrompt(group="trained", prompt=f"a {shape}", seed=seed, wanted=wanted[shape])
        for seed in ANY_COLOUR_SEEDS
        for shape in SHAPES
    ]


def _spread(found: Sequence[Job], group: str, limit: int | None) -> list[Job]:
    members = [job for job in found if job.group == group]
    count = min(len(members), limit or len(members))
    return [members[(2 * i + 1) * len(members) // (2 * count)] for i in range(count)]


# Who


def model_folder(model: str) -> Path:
    """The folder that `model` stands for."""
    return builtin.folder() if catalog.find(model) is catalog.BUILT_IN and not Path(model).exists() else Path(model)


def painter(artist: Artist) -> Callable[[Job], Pixels]:
    """Opens the model; what it returns draws one picture. Raises NumericsError for a value that is not finite."""
    return _diffusers(artist) if artist.backend == "diffusers" else _ours(artist)


def _ours(artist: Artist) -> Callable[[Job], Pixels]:
    pipe = qwenimg.load(artist.model, artist.backend, artist.precision, offline=True)
    width, height = artist.size

    def draw(job: Job) -> Pixels:
        result = pipe(
            job.asked.prompt,
            negative_prompt=job.negative,
            width=width,
            height=height,
            steps=catalog.BUILT_IN.steps,
            guidance=job.guidance,
            seed=job.asked.seed,
            sampler=artist.sampler,
        )
        return result.pixels

    return draw


def _diffusers(artist: Artist) -> Callable[[Job], Pixels]:
    import torch
    from support import oracle

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[artist.precision]
    folder, (width, height) = model_folder(artist.model), artist.size

    def draw(job: Job) -> Pixels:
        latents = noise.normal((1, 16, height // 8, width // 8), job.asked.seed)
        _, pixels = oracle.generate(
            folder,
            job.asked.prompt,
            latents,
            negative_prompt=job.negative,
            steps=catalog.BUILT_IN.steps,
            guidance=job.guidance,
            dtype=dtype,
        )
        if not np.isfinite(pixels).all():
            raise NumericsError("diffusers' picture is not finite")
        return pixels.astype(np.uint8)

    return draw


# Drawing

_painter: list[Callable[[Job], Pixels]] = []  # of this process


def _open(artist: Artist) -> None:
    _painter[:] = [painter(artist)]


def _draw(job: Job) -> Drawn:
    try:
        pixels = _painter[0](job)
    except NumericsError:
        return Drawn(job=job, pixels=None, verdict=None, colors=())
    return judged(job, pixels)


def judged(job: Job, pixels: Pixels) -> Drawn:
    """`job` as done, with what the checker sees in `pixels`."""
    seen = look(pixels)[1]
    alone = [thing.count for thing in job.asked.wanted.things] == [1]
    return Drawn(
        job=job,
        pixels=pixels,
        verdict=check(pixels, job.asked.wanted),
        colors=tuple(one.color for one in seen),
        overlap=ideal_overlap(pixels) if alone else None,
    )


def draw_all(artist: Artist, wanted: Sequence[Job], workers: int = 1) -> Iterator[Drawn]:
    """Every job in its order, by `workers` processes."""
    if workers < 2:
        _open(artist)
        yield from map(_draw, wanted)
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), _open, (artist,)) as pool:
        yield from pool.map(_draw, wanted, chunksize=4)
