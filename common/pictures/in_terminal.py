"""Pixels as escape codes that show pictures in a terminal: kitty's, iTerm2's, and sixel."""

from __future__ import annotations

import base64
import io
import re

import numpy as np

from qwenimg.common.pictures.pixels import Uint8
from qwenimg.common.pictures.png import encode_png

CHUNK = 4096  # bytes of one command of kitty
COLOURS = 128  # of a sixel picture
BAND = 6  # rows of pixels of a line of sixel


def kitty(pixels: Uint8, rows: int, number: int) -> bytes:
    """Return the escape codes that show pixels [h, w, 3] in `rows` rows of text and leave the cursor in place. number:
    the picture's id; a picture with the same id is replaced. Source: kitty's "Terminal graphics protocol"."""
    text = base64.b64encode(encode_png(pixels, {}, None))
    chunks = [text[begin : begin + CHUNK] for begin in range(0, len(text), CHUNK)]
    out = io.BytesIO()
    for i, chunk in enumerate(chunks):
        first = f"a=T,f=100,i={number},p=1,r={rows},C=1,q=2," if i == 0 else ""
        out.write(f"\x1b_G{first}m={int(i + 1 < len(chunks))};".encode() + chunk + b"\x1b\\")
    return out.getvalue()


def iterm(pixels: Uint8, rows: int) -> bytes:
    """Return the codes that show pixels [h, w, 3] in `rows` rows of text. Source: iTerm2's "Inline Images Protocol"."""
    data = encode_png(pixels, {}, None)
    keys = f"inline=1;size={len(data)};height={rows};preserveAspectRatio=1"
    return f"\x1b]1337;File={keys}:".encode() + base64.b64encode(data) + b"\a"


def sixel(pixels: Uint8, height: int) -> bytes:
    """Return the codes that show pixels [h, w, 3] enlarged to about `height` rows of pixels: a line for each BAND of
    rows, and in it one for each colour that occurs. Source: DEC, "VT330/VT340 Programmer Reference Manual"."""
    numbers, palette = enlarged(pixels, height)
    out = [f'\x1bPq"1;1;{numbers.shape[1]};{numbers.shape[0]}']
    out += [f"#{i};2;{';'.join(str(round(int(v) * 100 / 255)) for v in palette[i])}" for i in np.unique(numbers)]
    for top in range(0, len(numbers), BAND):
        band = numbers[top : top + BAND]
        bits = (1 << np.arange(BAND))[:, None]
        for i in np.unique(band):
            codes = ((band == i) * bits).sum(0).astype(np.uint8) + 63
            out.append(f"#{i}{_short(codes.tobytes().decode())}$")
        out.append("-")
    return ("".join(out) + "\x1b\\").encode()


def enlarged(pixels: Uint8, height: int) -> tuple[Uint8, Uint8]:
    """Return the numbers of colours [h, w], h whole bands in `height`, and the colours [N, 3], at most COLOURS."""
    from PIL import Image

    height = max(BAND, height - height % BAND)
    width = max(1, round(pixels.shape[1] * height / pixels.shape[0]))
    picture = Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR).quantize(COLOURS)
    return np.asarray(picture), np.asarray(picture.getpalette(), np.uint8).reshape(-1, 3)


def _short(codes: str) -> str:
    """Return sixel codes with the length of a run in place of its repeats."""
    return re.sub(r"(.)\1{3,}", lambda run: f"!{len(run[0])}{run[1]}", codes)
