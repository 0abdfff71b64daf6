"""Small models of every family, opened alike: what a test over all families runs through."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import qwenimg
from qwenimg import Pipeline
from qwenimg.common.families.longcat import references as longcat_references
from qwenimg.common.families.qwen_image import references

BACKENDS = ("cpu", "mlx")
# kind -> the family's name
KINDS = {
    "qwen": "qwen-image",
    "qwen-2511": "qwen-image",
    "qwen-layered": "qwen-image",
    "qwen21": "qwen-image-2.1",
    "sd15": "stable-diffusion",
    "sd21": "stable-diffusion",
    "sdxl": "stable-diffusion",
    "inpaint": "stable-diffusion",
    "sdxl+refiner": "stable-diffusion",
    "z-image": "z-image",
    "flux2-klein": "flux2",
    "flux2-base": "flux2",
    "flux2-kv": "flux2",
    "flux2-dev": "flux2-dev",
    "flux3-klein": "flux3",
    "flux3-base": "flux3",
    "flux-dev": "flux",
    "flux-schnell": "flux",
    "sd3": "sd3",
    "longcat": "longcat",
    "longcat-edit": "longcat",
    "chroma": "chroma",
    "ernie": "ernie",
    "krea2": "krea2",
    "anima": "anima",
    "lumina": "lumina",
    "auraflow": "auraflow",
    "sana": "sana",
    "sana-sprint": "sana",
    "ovis": "ovis",
    "pixart": "pixart",
    "pixart-alpha": "pixart",
    "hunyuan": "hunyuan",
    "hunyuan-1.1": "hunyuan",
    "cascade": "cascade",
    "toy": "toy",
}
FIRST = {family: kind for kind, family in reversed(KINDS.items()) if family != "toy"}
"""By family its first kind, for tests that take one of each; without the toy, which has a network alone."""
STARTING = tuple(kind for kind in KINDS if kind != "qwen-layered")
"""Kinds that may start from a picture; the other takes one apart."""
ASKED: dict[str, Any] = {"width": 52, "height": 36, "steps": 3, "guidance": 3.0, "seed": 7}
PROMPT = "a (red:1.3) circle [dog]"  # with weights, where a family has them

PICTURE = np.random.default_rng(3).integers(0, 256, (36, 52, 3), np.uint8)
PICTURE[8:24, 12:40] = (200, 40, 90)
SEEN = np.random.default_rng(4).integers(0, 256, (40, 32, 3), np.uint8)
HOLE = np.zeros((36, 52), np.uint8)
HOLE[:, 24:] = 255
TASKS: dict[str, dict[str, Any]] = {
    "text": {},
    "image": {"image": PICTURE, "strength": 0.7},
    "mask": {"image": PICTURE, "mask": HOLE, "strength": 0.7},
}


def places(tiny: dict[str, Path], toy: Path) -> dict[str, Path]:
    """The folder of each kind."""
    return {kind: (tiny | {"toy": toy})[kind.partition("+")[0]] for kind in KINDS}


Opener = Callable[..., Pipeline]


def opener(kind: str, folder: Path, tiny: dict[str, Path]) -> Opener:
    """Opens the kind's model on a backend, in float32 unless it is told another precision."""
    more = {"refiner": tiny["refiner"]} if kind == "sdxl+refiner" else {}

    def opened(backend: str, precision: str = "fp32", **options: Any) -> Pipeline:
        pipe = qwenimg.load(folder, backend=backend, precision=precision, **(more | options))
        return given_a_picture(pipe) if pipe.model.inputs.fewest else pipe

    return opened


def given_a_picture(pipe: Pipeline) -> Pipeline:
    """Sees SEEN unless a call has another image: all tests of one family hold for a model that edits pictures too."""
    resolve = pipe.resolve
    usual = {"image": SEEN} | ({"layers": 1} if "layers" in pipe.model.options else {})
    pipe.resolve = lambda asked: resolve(usual | dict(asked))  # type: ignore[method-assign]
    return pipe


def see_few_pixels(monkeypatch: Any) -> None:
    """Lets a model that edits pictures see a hundredth of what it was trained with."""
    monkeypatch.setattr(references, "AREA", 96**2)
    monkeypatch.setattr(longcat_references, "AREA", 96**2)
