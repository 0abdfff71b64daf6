"""A word that the built-in model does not know, "hexagon": twelve pictures to learn it from, pictures of what the model
knows, and a judge. docs/train.md has the commands of the whole run.

    python tools/hexagons.py draw FOLDER
    python tools/hexagons.py judge --lora my.safetensors --backend mlx
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from training import scenes as drawn

import qwenimg
from qwenimg.common.families import catalog
from qwenimg.common.pictures import pixels
from qwenimg.common.pictures.png import encode_png
from qwenimg.common.shapes import captions, check, gate, scenes, selftest
from qwenimg.common.shapes.words import Parsed, Thing

SIDE = 128
COLORS = ("red", "green", "blue", "yellow", "orange", "purple", "black", "brown")
PLACES = {"left": "on the left", "right": "on the right", "top": "at the top", "bottom": "at the bottom"}
KNOWN = 96
Captioned = tuple[drawn.Scene, str]


def _hexagon(x: Any, y: Any) -> Any:
    """The distance of a regular hexagon with a corner at each side."""
    y = np.abs(y)
    return np.maximum(0.8660254 * x + 0.5 * y, y) - 0.8660254


@contextmanager
def known() -> Iterator[None]:
    """Draw hexagons, and tell them from the eight shapes, while the context is open."""
    check._template.cache_clear()
    with (
        mock.patch.dict(scenes._DISTANCE, {"hexagon": _hexagon}),
        mock.patch.object(check, "SHAPES", (*scenes.SHAPES, "hexagon")),
    ):
        yield
    check._template.cache_clear()


# Pictures


def scene(color: str, place: str = "center", size: str = "medium") -> drawn.Scene:
    return drawn.one(color, "hexagon", size, place, drawn.backgrounds(color)[0])


def twelve() -> list[Captioned]:
    """The scenes to learn from: each colour once, and four places."""
    pairs = zip(COLORS, PLACES.items(), strict=False)
    placed = [(scene(color, place), f"a {color} hexagon {words}") for color, (place, words) in pairs]
    return [*((scene(color), f"a {color} hexagon") for color in COLORS), *placed]


def old() -> list[Captioned]:
    """Scenes of what the model knows."""
    rng, pictures = np.random.default_rng(9), list[Captioned]()
    while len(pictures) < KNOWN:
        one = drawn.random_scene(rng)
        caption = captions.english(drawn.requirements(one))
        if caption is not None:
            pictures.append((one, caption))
    return pictures


def draw(folder: Path) -> None:
    """Write the pictures, each with its caption, into `new` and `known` of a folder."""
    with known():
        for name, pictures in (("new", twelve()), ("known", old())):
            (folder / name).mkdir(parents=True)
            for i, (picture, caption) in enumerate(pictures):
                path = folder / name / f"{i:02d}.png"
                path.write_bytes(encode_png(pixels.to_uint8(drawn.render(picture, SIDE, SIDE)), {}, None))
                path.with_suffix(".txt").write_text(caption, encoding="utf-8")


# The judge


def learnt(pipe: qwenimg.Pipeline, lora: Path | None = None) -> int:
    """How many of eight prompts, a trained colour each, give a hexagon of it."""
    asked = [
        gate.GatePrompt(
            group="trained",
            prompt=f"a {color} hexagon",
            seed=100 + i,
            wanted=Parsed(things=(Thing(shape="hexagon", color=color),)),
        )
        for i, color in enumerate(COLORS)
    ]
    return _right(pipe, asked, lora)


def remembered(pipe: qwenimg.Pipeline, lora: Path | None = None) -> int:
    """How many of the self-test's 40 prompts are drawn right."""
    return _right(pipe, gate.selftest_prompts(), lora)


def _right(pipe: qwenimg.Pipeline, asked: Sequence[gate.GatePrompt], lora: Path | None) -> int:
    options: dict[str, Any] = catalog.BUILT_IN.usual | {"width": SIDE, "height": SIDE, "lora": lora}
    right = 0
    for number, one in enumerate(asked, 1):
        made = pipe(one.prompt, **options, seed=one.seed).pixels
        answer = selftest.Answer(number=number, asked=one, pixels=made, verdict=check.check(made, one.wanted))
        if answer.wrong:
            print(f"{one.prompt}, seed {one.seed}: wrong {', '.join(answer.wrong)}")
        right += not answer.wrong
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw", help="write the pictures to learn from, and known ones")
    drawing.add_argument("folder", type=Path)
    judging = commands.add_parser("judge", help="count hexagons and old words that are drawn right")
    judging.add_argument("--lora", type=Path, help="default: the model alone")
    judging.add_argument("--backend", default="cpu")
    args = parser.parse_args()
    if args.command == "draw":
        draw(args.folder)
        return
    with known(), qwenimg.load("shapes", backend=args.backend, precision="fp32") as pipe:
        print(f"hexagons: {learnt(pipe, args.lora)} of {len(COLORS)}")
        print(f"old words: {remembered(pipe, args.lora)} of {len(gate.selftest_prompts())}")


if __name__ == "__main__":
    main()
