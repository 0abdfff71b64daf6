"""Draw the pictures of the README's list "More to try" and of the pages draw.md, edit.md and control.md.

    python tools/write_examples.py [--output docs/pictures]

Each is the picture that its command in the page draws with the built-in model, beside the one that it starts from.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from qwenimg.cli.main import run
from qwenimg.common.base.errors import QwenimgError
from qwenimg.common.pictures import canny

SIDE, GAP = 192, 8  # pixels
COLOURS = "red", "green", "blue"
ANY = "a large star"
CHOICES = "a {red|blue} {star|ring}"
STRENGTHS = ("0.2", "0.5", "0.8", "1")
START, CHANGED, MASKED = "two yellow stars", "two blue stars", "a yellow star to the left of a red circle"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/pictures"))
    output = parser.parse_args().output
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        row(output / "seeds.png", [drawn(folder, ANY, "-s", str(seed)) for seed in range(1, 5)])
        start = drawn(folder, START, "-s", "1")
        row(
            output / "image-to-image.png",
            [start, drawn(folder, CHANGED, "-i", str(start), "--strength", "0.8", "-s", "1")],
        )
        strengths = [drawn(folder, CHANGED, "-i", str(start), "--strength", one, "-s", "1") for one in STRENGTHS]
        row(output / "strength.png", [start, *strengths])
        row(output / "choices.png", [drawn(folder, CHOICES, "-s", str(seed)) for seed in range(1, 5)])
        steps = [drawn(folder, MASKED, "-s", "4", "--steps", one) for one in ("1", "3", "6", "20")]
        guided = [drawn(folder, MASKED, "-s", "4", "--guidance", one) for one in ("1", "3", "8", "20")]
        grid(output / "steps.png", [*steps, *guided], 4)
        edges = folder / "edges.png"
        Image.fromarray(canny.edges(np.asarray(Image.open(start).convert("RGB")))).save(edges)
        row(output / "edges.png", [start, edges])
        mask = folder / "mask.png"
        half = Image.new("L", Image.open(start).size, 0)
        ImageDraw.Draw(half).rectangle((half.width // 2, 0, half.width, half.height), fill=255)
        half.save(mask)
        inside = drawn(folder, MASKED, "-i", str(start), "--mask", str(mask), "-s", "4")
        row(output / "mask.png", [start, mask, inside])
        axes = ["--x", f"prompt={','.join(COLOURS)}", "--y", "guidance=1,4"]
        sheet = folder / "rings.png"
        if code := run(["grid", "a red ring", "-m", "shapes", *axes, "-s", "3", "-o", str(sheet), "--quiet"]):
            raise QwenimgError(f"the grid: exit code {code}")
        Image.open(sheet).save(output / "grid.png", optimize=True)


def drawn(folder: Path, prompt: str, *options: str) -> Path:
    """Draw a picture as the command line does, and return its file."""
    path = folder / f"{len([*folder.iterdir()])}.png"
    code = run(["-m", "shapes", prompt, *options, "-o", str(path), "--quiet"])
    if code:
        raise QwenimgError(f"{prompt}: exit code {code}")
    return path


def row(path: Path, pictures: list[Path]) -> None:
    grid(path, pictures, len(pictures))


def grid(path: Path, pictures: list[Path], columns: int) -> None:
    """Write pictures in rows of `columns`, with gaps between them."""
    lines = -(-len(pictures) // columns)
    sheet = Image.new("RGB", (columns * (SIDE + GAP) - GAP, lines * (SIDE + GAP) - GAP), "white")
    for index, one in enumerate(pictures):
        place = (index % columns * (SIDE + GAP), index // columns * (SIDE + GAP))
        sheet.paste(Image.open(one).convert("RGB").resize((SIDE, SIDE)), place)
    sheet.save(path, optimize=True)
    print(path)


if __name__ == "__main__":
    main()
