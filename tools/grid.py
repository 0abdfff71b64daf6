"""One picture of several: draws each prompt with the built-in model and puts them in a grid, the prompts under them.

    python tools/grid.py docs/pictures/first.png "a red circle" "two yellow stars" ...

The n-th prompt has the seed n - 1, or --seed and up from there. It draws what `qwenimg -m shapes -s SEED PROMPT` draws.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import fonts

import qwenimg
from qwenimg.common.base.atomic_files import write_atomic
from qwenimg.common.base.errors import QwenimgError
from qwenimg.common.pictures.labelled_sheet import SheetTile, sheet
from qwenimg.common.pictures.png import encode_png
from qwenimg.common.request.recipe import XMP
from qwenimg.common.shapes import builtin, captions
from qwenimg.common.shapes.words import parse


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.png")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT")
    parser.add_argument("--model", default=builtin.NAME, help="the built-in model unless given")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--columns", type=int, default=4)
    parser.add_argument("--side", type=int, default=192, help="pixels, of each picture on the page")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        draw(args)
    except QwenimgError as error:
        print(f"grid: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def draw(args: argparse.Namespace) -> None:
    pipe = qwenimg.load(args.model, args.backend, args.precision, offline=True)
    text = "".join(args.prompts)
    font = None if text.isascii() else fonts.font_for(text)  # Pillow's own has no Chinese
    tiles = []
    for seed, prompt in enumerate(args.prompts, args.seed):
        shown = prompt if prompt.isascii() or font else captions.english(parse(prompt))
        tiles.append(SheetTile(pixels=pipe(prompt, seed=seed).pixels, lines=(shown or f"(prompt {len(tiles) + 1})",)))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(args.out, encode_png(sheet(tiles, args.columns, args.side, font), {}, XMP), overwrite=True)
    print(args.out)


if __name__ == "__main__":
    sys.exit(main())
