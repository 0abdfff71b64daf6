"""`--preview`: in the terminal, if it says that it shows pictures, else in a file."""

from __future__ import annotations

import base64
import io
import os
import pty
import re
import threading
import tty
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.cli_runner import Library, cli

from qwenimg.cli import preview, terminal
from qwenimg.cli.preview import ROWS, PreviewPrinter
from qwenimg.cli.terminal import Terminal
from qwenimg.common.base.errors import DoesNotFit
from qwenimg.common.pictures import in_terminal
from qwenimg.common.pipeline.result import Step

PIXELS = np.random.default_rng(1).integers(0, 256, (9, 14, 3), np.uint8)
SEEN = np.full((8, 8, 3), 99, np.uint8)  # of the stand-in for a model


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(preview, "file", lambda: tmp_path / "cache" / "preview.png")
    return tmp_path / "cache" / "preview.png"


# What a terminal says


@pytest.mark.parametrize(
    ("answer", "protocol", "cell"),
    [
        (b"\x1b_Gi=31;OK\x1b\\\x1bP>|kitty(0.32.2)\x1b\\\x1b[6;18;9t\x1b[?62;c", "kitty", 18),
        (b"\x1b_Gi=31;OK\x1b\\\x1bP>|ghostty 1.0\x1b\\\x1b[?62;22c", "kitty", 20),
        (b"\x1bP>|iTerm2 3.5.4\x1b\\\x1b[?64;1;2;4;6c", "iterm", 20),
        (b"\x1bP>|WezTerm 2024\x1b\\\x1b[6;21;10t\x1b[?65;4;6;18;22c", "iterm", 21),
        (b"\x1bP>|foot(1.16)\x1b\\\x1b[6;17;8t\x1b[?62;4;22c", "sixel", 17),
        (b"\x1b_Gi=31;ENOTSUPPORTED\x1b\\\x1b[?62;4c", "sixel", 20),
        (b"\x1b[?4;1c", None, 0), (b"\x1b[?1;2c", None, 0), (b"\x1b[?64;14;41c", None, 0), (b"", None, 0),
        (b"\x1b[6;0;0t\x1b[?62;4c", "sixel", 20), (b"hello c", None, 0),
    ],
)  # fmt: skip
def test_answers_of_terminals(answer: bytes, protocol: str | None, cell: int) -> None:
    told = terminal.parse_answer(answer)
    assert (told and told.protocol) == protocol and (told is None or told.cell == cell)


@pytest.fixture
def pair() -> Iterator[tuple[int, int]]:
    ours, theirs = pty.openpty()
    tty.setraw(ours)
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def test_a_terminal_is_asked(pair: tuple[int, int]) -> None:
    """Without echo, and as it was before when it has answered in pieces."""
    ours, theirs = pair
    before = terminal.termios.tcgetattr(theirs)

    def answer() -> None:
        asked = b""
        while not asked.endswith(b"\x1b[c"):
            asked += os.read(ours, 100)
        for piece in (b"\x1b_Gi=31;OK\x1b\\\x1b[6;", b"18;9t\x1b[?62", b";22c"):
            os.write(ours, piece)

    thread = threading.Thread(target=answer)
    thread.start()
    told = terminal.parse_answer(terminal.ask(theirs))
    thread.join()
    assert told == Terminal("kitty", 18) and terminal.termios.tcgetattr(theirs) == before


def test_a_terminal_that_says_nothing(pair: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "WAIT", 0.01)
    assert terminal.ask(pair[1]) == b""


# Pictures


def test_kitty() -> None:
    large = np.random.default_rng(2).integers(0, 256, (64, 64, 3), np.uint8)
    codes = Terminal("kitty").picture(large, 12, 7)
    parts = re.findall(rb"\x1b_G([^;]*);([^\x1b]*)\x1b\\", codes)
    assert parts[0][0] == b"a=T,f=100,i=7,p=1,r=12,C=1,q=2,m=1" and {part[0] for part in parts[1:-1]} <= {b"m=1"}
    assert parts[-1][0] == b"m=0" and all(len(data) <= 4096 for _, data in parts) and len(parts) > 2
    whole = Image.open(io.BytesIO(base64.b64decode(b"".join(data for _, data in parts))))
    assert (np.asarray(whole) == large).all()


def test_iterm() -> None:
    match = re.fullmatch(rb"\x1b]1337;File=inline=1;size=(\d+);height=12;preserveAspectRatio=1:(.*)\a",
                         Terminal("iterm").picture(PIXELS, 12, 7))  # fmt: skip
    assert match is not None
    data = base64.b64decode(match[2])
    assert len(data) == int(match[1]) and (np.asarray(Image.open(io.BytesIO(data))) == PIXELS).all()


def decoded(codes: bytes) -> np.ndarray:
    """The picture in sixel codes, by the definition of the VT340."""
    match = re.fullmatch(rb'\x1bPq"1;1;(\d+);(\d+)((?:#\d+;2;\d+;\d+;\d+)*)(.*)\x1b\\', codes)
    assert match is not None
    out = np.zeros((int(match[2]), int(match[1]), 3))
    palette = {int(n): [int(v) * 2.55 for v in rgb.split(b";")]
               for n, rgb in re.findall(rb"#(\d+);2;(\d+;\d+;\d+)", match[3])}  # fmt: skip
    x = y = colour = 0
    at, text = 0, match[4]
    while at < len(text):
        token = re.compile(rb"#(\d+)|(?:!(\d+))?([?-~])|([$-])").match(text, at)
        assert token is not None
        at = token.end()
        if token[1]:
            colour = int(token[1])
        elif token[4]:
            x, y = 0, y + 6 * (token[4] == b"-")
        else:
            count = int(token[2] or 1)
            for bit in range(6):
                if token[3][0] - 63 >> bit & 1:
                    out[y + bit, x : x + count] = palette[colour]
            x += count
    return out


def test_sixel() -> None:
    numbers, palette = in_terminal.enlarged(PIXELS, 40)
    assert numbers.shape == (36, 56), "whole bands of six rows"
    expected = palette[numbers].astype(int)
    assert np.abs(decoded(Terminal("sixel", 20).picture(PIXELS, 2, 7)) - expected).max() <= 2, "by hundredths"


def test_the_picture_stays_above_the_bar(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    printer = PreviewPrinter(in_terminal=False)
    printer.terminal = Terminal("iterm")

    def step(index: int) -> None:
        printer.step(Step(index=index, total=4, sigma=1.0, seconds=60.0, read=lambda: PIXELS, see=lambda: PIXELS))

    def written() -> bytes:
        return capfdbinary.readouterr().err

    step(1)
    first = written()
    assert first.startswith(b"\r\x1b[K" + b"\n" * ROWS + b"\x1b7\r\x1b[12A\x1b]1337;") and first.endswith(b"\a\x1b8")
    step(2)
    assert written().startswith(b"\x1b7\r\x1b[12A"), "in its place"
    printer.keep()
    step(3)
    assert written().startswith(b"\r\x1b[K" + b"\n" * ROWS), "below what was printed"
    step(4)
    assert written() == b"", "the last step has the picture itself"


# The command


@pytest.mark.parametrize("options", [(), ("--json",), ("--quiet",)])
def test_without_such_a_terminal_it_is_a_file(library: Library, file: Path, options: tuple[str, ...]) -> None:
    ran = cli("x", "--preview", "-m", "m", "--seed", "1", *options)
    assert ran.code == 0 and (np.asarray(Image.open(file)) == SEEN).all()
    assert ("preview.png" in ran.err) == ("--quiet" not in options)


def test_a_file_that_cannot_be_written_is_no_error(library: Library, file: Path) -> None:
    file.parent.write_bytes(b"no folder")
    assert cli("x", "--preview", "-m", "m", "--seed", "1").code == 0


def test_a_map_that_does_not_fit_is_a_warning(library: Library, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from support.fake_pipeline import FakePipeline

    def fails(self: FakePipeline) -> None:
        raise DoesNotFit("no room")

    monkeypatch.setattr(FakePipeline, "fit_preview", fails)
    ran = cli("x", "--preview", "-m", "m", "--seed", "1")
    assert ran.code == 0 and "warning: there is no preview: no room" in ran.err and not file.exists()


def test_without_the_option_nothing_is_computed(library: Library, file: Path) -> None:
    assert cli("x", "-m", "m", "--seed", "1").code == 0 and not file.exists()
