"""The self-test: its score against counts made by hand, its sheet pixel by pixel, and the command around them."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from random_model import write_random_model
from support.cli_runner import cli
from support.truthful import Truthful

import qwenimg
from qwenimg.cli import signals
from qwenimg.cli.main import run
from qwenimg.common.families import catalog
from qwenimg.common.pictures import labelled_sheet
from qwenimg.common.pictures.labelled_sheet import SheetTile
from qwenimg.common.pictures.png import read_text
from qwenimg.common.shapes import builtin, gate, selftest
from qwenimg.common.shapes.check import Verdict, check
from qwenimg.common.shapes.gate import selftest_prompts
from qwenimg.common.shapes.selftest import Answer
from qwenimg.common.shapes.words import parse

PROMPTS = selftest_prompts()
# of n prompts, how many must be right: 0.95 * 7 = 6.65, 0.85 * 4 = 3.4, ...; in all 6.65 + 3.4 + 3.6 + ... = 33.95
LEAST = {"trained": 6, "held-out": 3, "chinese": 3, "position": 4, "size": 2, "background": 2, "count": 2}
LEAST |= {"relation": 8, "held-out-relation": 0, "total": 33}


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Truthful]:
    """Puts a perfect model in the place of every other, but for what is said to be wrong."""
    monkeypatch.chdir(tmp_path)

    def place(wrong: dict[str, dict[str, str]] | None = None) -> Truthful:
        pipe = Truthful(PROMPTS, wrong)
        monkeypatch.setattr(qwenimg, "open_pipeline", lambda opening, notify: pipe)
        return pipe

    return place


def swapped(*groups: str, leave: int = 0) -> dict[str, dict[str, str]]:
    """Another colour for all but `leave` prompts of these groups."""
    found = {}
    for group in groups:
        for asked in [asked for asked in PROMPTS if asked.group == group][leave:]:
            color = asked.wanted.things[0].color
            found[asked.prompt] = {"color": "blue" if color != "blue" else "red"}
    return found


# The score


def test_the_parts_are_those_of_a_verdict():
    assert set(selftest.ALL) == {field.name for field in fields(Verdict)}
    assert selftest.JUDGED.keys() == selftest.LEAST.keys() == {asked.group for asked in gate.gate_prompts()}


def test_a_perfect_model_has_every_picture_right(draws: Callable[..., Truthful]):
    pipe = draws()
    ran = cli("selftest")
    lines = ran.out.decode().splitlines()
    print("\n".join(lines))
    assert ran.code == 0
    count = Counter(asked.group for asked in PROMPTS)
    assert [line.split()[0] for line in lines] == [*LEAST]
    for line in lines[:-1]:
        group, right, _, n = line.split()[:4]
        assert int(right) == int(n) == count[group]
        assert ("no threshold" in line) == (LEAST[group] == 0)
        assert f"at least {LEAST[group]} " in line or not LEAST[group]
    assert lines[-1].split()[:7] == ["total", "40", "of", "40", "at", "least", "33"] and lines[-1].endswith("passed")
    r = catalog.BUILT_IN
    assert {(a["width"], a["height"], a["steps"], a["guidance"]) for a in pipe.asked} == {
        (r.width, r.height, r.steps, r.guidance)
    }
    assert [a["seed"] for a in pipe.asked] == [asked.seed for asked in PROMPTS]
    assert set(pipe.prepared) == {asked.prompt for asked in PROMPTS} | {" "}


def test_another_size(draws: Callable[..., Truthful]):
    """For a model that was trained at one: of what `tools/train.py` makes, say."""
    pipe = draws()
    assert cli("selftest", "--size", "160x96").code == 0
    assert {(a["width"], a["height"]) for a in pipe.asked} == {(160, 96)}
    cli("selftest", "--size", "160x").refused(2, "160", "WIDTHxHEIGHT")
    cli("selftest", "--size", "64x64").refused(2, "--size 64x64", "it was trained at 128x128", "few would be right")


@pytest.mark.parametrize("group", [group for group in LEAST if group not in ("total", "held-out-relation")])
@pytest.mark.sample(1)
def test_each_group_fails_below_its_threshold(draws: Callable[..., Truthful], group: str):
    draws(swapped(group, leave=LEAST[group]))
    assert cli("selftest").code == 0
    draws(swapped(group, leave=LEAST[group] - 1))
    ran = cli("selftest")
    assert ran.code == 6
    assert ran.err.splitlines()[-1].startswith("qwenimg: error: the self-test failed: ")
    assert ran.err.splitlines()[-1].endswith(f"too few in {group}")


def test_the_total_fails_on_its_own(draws: Callable[..., Truthful]):
    """Every group just right, and the group without a threshold wrong."""
    wrong: dict[str, dict[str, str]] = {}
    for group, least in LEAST.items():
        if group != "total":
            wrong |= swapped(group, leave=least)
    draws(wrong)
    ran = cli("selftest", "--quiet")
    right = sum(least for group, least in LEAST.items() if group != "total")
    assert ran.code == 6 and right == 30
    assert ran.out.decode().split()[:4] == ["total", "30", "of", "40"] and len(ran.out.splitlines()) == 1
    assert ran.err.splitlines() == [
        "qwenimg: error: the self-test failed: 30 of 40 pictures are right; too few in total"
    ]


def test_what_is_wrong_is_told(draws: Callable[..., Truthful]):
    draws(swapped("chinese", leave=3))
    ran = cli("selftest")
    [asked] = [asked for asked in PROMPTS if asked.group == "chinese"][3:]
    number = PROMPTS.index(asked) + 1
    assert ran.out.decode().splitlines()[-1] == f"{number}. {asked.prompt}: wrong: color"
    assert f"{number} of 40: {asked.prompt}: wrong: color" in ran.err.splitlines()


def test_events(draws: Callable[..., Truthful], tmp_path: Path):
    draws(swapped("chinese", leave=2))
    ran = cli("selftest", "--json", "-o", "sheet.png")
    assert ran.code == 6
    kinds = Counter(event["event"] for event in ran.events)
    assert kinds == {"plan": 1, "answer": 40, "score": 10, "done": 1, "error": 1}
    assert ran.events[0]["pictures"] == 40 and all(event["schema"] == 1 for event in ran.events)
    answers = [event for event in ran.events if event["event"] == "answer"]
    assert [a["prompt"] for a in answers] == [asked.prompt for asked in PROMPTS]
    assert [a["wrong"] for a in answers if not a["right"]] == [["color"]] * 2
    assert ran.events[-2] | {"schema": 1} == {
        "schema": 1,
        "event": "done",
        "passed": False,
        "sheet": str(tmp_path / "sheet.png"),
    }
    assert json.loads(json.dumps(answers[0]["verdict"]))["position"] is None


# The sheet


def test_sheet(draws: Callable[..., Truthful], tmp_path: Path):
    wrong = swapped("chinese", leave=3)
    draws(wrong)
    assert cli("selftest", "-o", "sheet").code == 0  # as for a picture, .png is added
    assert "DigitalSourceType" in str(read_text(tmp_path / "sheet.png"))
    with Image.open(tmp_path / "sheet.png") as opened:
        page = np.asarray(opened.convert("RGB"))
    side, margin = 128, labelled_sheet.MARGIN
    across = side + 2 * margin
    assert page.shape[1] == 8 * across and page.shape[0] % 5 == 0
    down = page.shape[0] // 5
    marks = []
    for i in range(40):
        row, column = divmod(i, 8)
        cell = page[row * down : (row + 1) * down, column * across : (column + 1) * across]
        edge = tuple(int(v) for v in cell[margin - 1, margin + 5])
        marks.append({labelled_sheet.GREEN: True, labelled_sheet.RED: False}[edge])
        under = cell[margin + side + labelled_sheet.MARK :]
        dark = (under.max(axis=2) < 120).sum()
        assert dark > 40, f"cell {i + 1} has no text: {dark} dark pixels"
    assert marks == [asked.prompt not in wrong for asked in PROMPTS]


@pytest.mark.parametrize("name", ["sheet.jpg", "sheet.webp", "sheet.bmp"])
def test_the_sheet_is_a_png(draws: Callable[..., Truthful], tmp_path: Path, name: str):
    cli("selftest", "-o", name).refused(2, ".png")
    assert not (tmp_path / name).exists()


def test_a_picture_is_on_the_sheet_as_it_is():
    pictures = [np.full((128, 128, 3), value, np.uint8) for value in (10, 90, 200)]
    page = labelled_sheet.sheet([SheetTile(pixels=p, lines=("a b",)) for p in pictures], columns=2)
    across, down = 128 + 2 * labelled_sheet.MARGIN, page.shape[0] // 2
    for i, picture in enumerate(pictures):
        top, left = i // 2 * down + labelled_sheet.MARGIN, i % 2 * across + labelled_sheet.MARGIN
        assert (page[top : top + 128, left : left + 128] == picture).all()
        assert (page[top - 1, left : left + 128] == 255).all()  # no mark
    large = labelled_sheet.sheet([SheetTile(pixels=np.zeros((512, 256, 3), np.uint8), lines=())], columns=1)
    margin = labelled_sheet.MARGIN
    assert (large[margin : margin + 256, margin : margin + 128] == 0).all()


def test_long_prompts_are_wrapped_and_chinese_is_told_in_english():
    asked = replace(PROMPTS[0], prompt="a small red circle to the left of a very large purple star")
    blank = np.zeros((32, 32, 3), np.uint8)
    verdict = check(blank, asked.wanted)
    answer = Answer(number=7, asked=asked, pixels=blank, verdict=verdict)
    assert not selftest.tile(answer).right and selftest.tile(answer).lines[1].startswith("wrong: color")
    from PIL import ImageFont

    font = ImageFont.load_default()
    lines = labelled_sheet._wrapped(selftest.tile(answer).lines, 128, font)
    assert len(lines) > 3 and max(font.getlength(line) for line in lines) <= 128
    assert " ".join(lines).startswith(f"7. {asked.prompt}")
    chinese = replace(answer, asked=replace(asked, prompt="一个圆", wanted=parse("一个圆"), group="chinese"))
    assert selftest.tile(chinese).lines[0] == "7. a circle (chinese)"


# The command


@pytest.mark.sample(0)
def test_the_sheet_is_checked_before_anything_is_drawn(draws: Callable[..., Truthful], tmp_path: Path):
    pipe = draws()
    (tmp_path / "old.png").write_bytes(b"kept")
    cli("selftest", "-o", "old.png").refused(2, "old.png", "--overwrite")
    cli("selftest", "-o", "-").refused(2, "-o -")
    cli("selftest", "-o", "sheet.jpg").refused(2, "PNG")
    cli("selftest", "-o", "no/such/folder/a.png").refused(2, "no/such/folder")
    assert not pipe.asked and (tmp_path / "old.png").read_bytes() == b"kept"
    assert cli("selftest", "-o", "old.png", "--overwrite", "--quiet").code == 0
    assert (tmp_path / "old.png").read_bytes()[:4] == b"\x89PNG"


def test_a_signal_ends_it_and_leaves_no_sheet(
    draws: Callable[..., Truthful], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pipe = draws()
    whole = pipe.stream
    monkeypatch.setattr(signals, "LONG", 600.0)  # a busy machine takes longer than 10 s between two pictures
    seen = threading.Event()  # a run of no work may else be over before the watching thread has read the signal
    monkeypatch.setattr(signals, "_tell", lambda line: seen.set())

    def stream(*args: Any, **kwargs: Any) -> Any:
        if len(pipe.asked) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            assert seen.wait(60)
        return whole(*args, **kwargs)

    pipe.stream = stream  # type: ignore[method-assign]
    monkeypatch.setattr("gc.freeze", lambda: None)
    monkeypatch.setattr("sys.argv", ["qwenimg", "selftest", "-o", "sheet.png"])
    before = {number: signal.getsignal(number) for number in signals.STOPPING}
    try:
        code = run()  # as the process's own command line, whose signals are watched
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert code == 130 and seen.is_set() and len(pipe.asked) <= 3
    assert list(tmp_path.iterdir()) == []


def test_without_the_built_in_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(builtin, "folder", lambda: tmp_path / "nowhere")
    cli("selftest").refused(5, "not in this installation", "tools/train.py")


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(1)
def test_random_weights_fail_it(backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The ordinary pipeline, on both backends: what draws noise is found out, and -m takes any folder."""
    write_random_model(tmp_path / "random")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(catalog, "BUILT_IN", replace(catalog.BUILT_IN, width=48, height=32, steps=2))
    monkeypatch.setattr(gate, "selftest_prompts", lambda: PROMPTS[:3])
    ran = cli("selftest", "-m", "random", "--backend", backend, "--precision", "fp32", "-o", "a.png", "--json")
    events = {event["event"]: event for event in ran.events}
    print(ran.err)
    assert ran.code == 6 and events["plan"]["model"] == "random" and (tmp_path / "a.png").exists()
    assert events["done"]["passed"] is False and events["error"]["exit"] == 6
