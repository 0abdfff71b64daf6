"""`qwenimg describe`: which pictures it describes, the texts beside them, and what it prints; the language model is a
stand-in here."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.cli_runner import cli

from qwenimg.common.base.errors import ModelError, QwenimgError
from qwenimg.common.hub import describer as module
from qwenimg.common.parts.texts.writing import Written
from qwenimg.common.prompts.describing import Asking


@dataclass
class StandIn:
    """A language model that says how large a picture is."""

    asked: list[tuple[Asking, int]] = field(default_factory=list)
    faults: dict[int, QwenimgError] = field(default_factory=dict)  # by the number of the call
    cut: bool = False
    openings: list[Any] = field(default_factory=list)
    headline: str = "a stand-in"
    writer: Any = field(default_factory=SimpleNamespace)
    text: str = "a picture of {}x{}, “红”"

    def describe(self, pixels: np.ndarray, asking: Asking, limit: int, show: Callable[[str], None]) -> Written:
        self.asked.append((asking, limit))
        if (fault := self.faults.get(len(self.asked))) is not None:
            raise fault
        text = self.text.format(pixels.shape[1], pixels.shape[0])
        for word in text.split():
            show(word)
        return Written(text=text, whole=text, tokens=7, cut=self.cut)

    def describe_all(self, pictures: Any, asking: Asking, limit: int, ended: Callable[[int, Written], None]) -> None:
        for index, pixels in enumerate(pictures):
            ended(index, self.describe(pixels, asking, limit, lambda text: None))


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StandIn:
    found = StandIn()

    @contextmanager
    def opened(options: Any, other: str | None, engine: Any, notify: Any) -> Iterator[StandIn]:
        found.openings.append((options, other))
        yield found

    monkeypatch.setattr(module, "open_describer", opened)
    monkeypatch.chdir(tmp_path)
    return found


def picture(path: Path, width: int = 6, height: int = 4) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((height, width, 3), 90, np.uint8)).save(path)
    return path


def texts(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text("utf-8") for path in sorted(folder.glob("*.txt"))}


# What is printed


def test_one_caption_is_its_line_and_several_have_the_names_of_their_files(model: StandIn, tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    ran = cli("describe", "a.png", "-m", "qwen-image", "--limit", "40")
    assert (ran.code, ran.out.decode()) == (0, "a picture of 617x412, “红”\n"), ran
    assert model.asked == [(Asking(), 40)] and model.openings[0][0].model == "qwen-image"
    picture(tmp_path / "b c.jpg", 9, 9)
    ran = cli("describe", "b c.jpg", "a.png", "--with", "vl")
    assert ran.out.decode() == "b c.jpg: a picture of 504x504, “红”\na.png: a picture of 617x412, “红”\n"
    assert model.openings[1][1] == "vl"


@pytest.mark.parametrize(
    ("options", "asking"),
    [
        (("--tags",), Asking(task="tags")),
        (("--language", "zh"), Asking(language="zh")),
        (("--tags", "--language", "zh"), Asking(task="tags", language="zh")),
        (("--ask", " how many? "), Asking(question="how many?")),
    ],
)
def test_what_is_asked(model: StandIn, tmp_path: Path, options: tuple[str, ...], asking: Asking) -> None:
    picture(tmp_path / "a.png")
    assert cli("describe", "a.png", *options).code == 0
    assert model.asked == [(asking, 300)]


def test_events(model: StandIn, tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"no picture")
    ran = cli("describe", "a.png", "b.png", "--json")
    assert ran.code == 7 and [event["event"] for event in ran.events] == ["plan", "error", "text", "done"]
    plan, error, text, done = ran.events  # pictures are read before texts are written
    assert [one["picture"] for one in plan["images"]] == [str(tmp_path / "a.png"), str(tmp_path / "b.png")]
    assert (text["text"], text["tokens"], text["path"]) == ("a picture of 617x412, “红”", 7, None)
    assert error["exit"] == 5 and error["index"] == 2 and (done["made"], done["failed"], done["exit"]) == (1, 1, 7)


def test_control_characters_of_a_text_or_a_name_do_not_reach_a_terminal(model: StandIn, tmp_path: Path) -> None:
    model.text = "\x1b[2Jred\u202e {}x{}"
    for name in ("a.png", "\x1b[31mb.png"):
        picture(tmp_path / name)
    ran = cli("describe", "a.png", "\x1b[31mb.png")
    assert ran.code == 0 and b"\x1b" not in ran.out and "\u202e" not in ran.out.decode() and "\x1b" not in ran.err


# Texts beside pictures


def test_a_folder_of_pictures_gets_its_texts(model: StandIn, tmp_path: Path) -> None:
    folder = tmp_path / "10_cat"
    for name in ("b.png", "a.JPG", ".hidden.png", "c.webp"):
        picture(folder / name)
    (folder / "notes.md").write_text("x")
    (folder / "sub.png").mkdir()
    os.mkfifo(folder / "pipe.png")
    ran = cli("describe", "10_cat", "--write")
    assert ran.code == 0 and ran.paths == [folder / name for name in ("a.txt", "b.txt", "c.txt")], ran
    assert texts(folder) == dict.fromkeys(("a.txt", "b.txt", "c.txt"), "a picture of 617x412, “红”\n")
    assert not list(folder.glob(".*part"))


def test_a_stopped_run_goes_on_and_nothing_is_replaced_unasked(model: StandIn, tmp_path: Path) -> None:
    folder = tmp_path / "cats"
    for name in "abc":
        picture(folder / f"{name}.png")
    (folder / "b.txt").write_text("my own words")
    ran = cli("describe", "cats", "--write")
    assert ran.code == 0 and "1 of 3 pictures left out" in ran.err and len(model.asked) == 2
    assert texts(folder)["b.txt"] == "my own words"
    before = texts(folder)
    assert cli("describe", "cats", "--write").code == 0 and len(model.asked) == 2 and texts(folder) == before
    assert len(model.openings) == 1, "no model is opened for nothing"
    cli("describe", str(folder / "b.png"), "--write").refused(2, "b.txt", "exists", "--overwrite")
    assert cli("describe", "cats", "--write", "--overwrite").code == 0 and texts(folder)["b.txt"] != "my own words"


def test_a_text_that_appears_meanwhile_is_kept(model: StandIn, tmp_path: Path) -> None:
    folder = tmp_path / "cats"
    picture(folder / "a.png"), picture(folder / "b.png")
    real = model.describe

    def other_writes(*given: Any) -> Written:
        (folder / "a.txt").write_text("of another program")
        return real(*given)

    model.describe = other_writes  # type: ignore[method-assign]
    ran = cli("describe", "cats", "--write")
    assert ran.code == 7 and "a.txt: exists already" in ran.err
    assert texts(folder) == {"a.txt": "of another program", "b.txt": "a picture of 617x412, “红”\n"}


def test_links_are_replaced_and_never_followed(model: StandIn, tmp_path: Path) -> None:
    folder, victim = tmp_path / "cats", tmp_path / "victim"
    picture(folder / "a.png")
    victim.write_text("precious")
    (folder / "a.txt").symlink_to(victim)
    assert cli("describe", "cats", "--write").code == 0 and not model.asked, "what is there is kept"
    assert cli("describe", "cats", "--write", "--overwrite").code == 0
    assert victim.read_text() == "precious" and not (folder / "a.txt").is_symlink()
    picture(folder / "d.png")
    (folder / "d.txt").symlink_to(tmp_path / "missing")
    cli("describe", "cats", "--write")
    assert not (tmp_path / "missing").exists(), "a link to nothing is not followed either"
    (folder / "e.txt").mkdir()
    picture(folder / "e.png")
    cli("describe", "cats", "--write", "--overwrite").refused(2, "e.txt", "not a regular file")


def test_two_pictures_of_one_name_are_refused_before_any_text(model: StandIn, tmp_path: Path) -> None:
    picture(tmp_path / "cats" / "a.png"), picture(tmp_path / "cats" / "a.jpg")
    cli("describe", "cats", "--write").refused(2, "a.txt", "a.jpg and a.png")
    assert not model.openings and cli("describe", "cats").code == 0, "without --write they are two"


def test_a_bad_picture_is_one_line_and_the_others_are_described(model: StandIn, tmp_path: Path) -> None:
    folder = tmp_path / "cats"
    for name in "acd":
        picture(folder / f"{name}.png")
    (folder / "b.png").write_bytes((folder / "a.png").read_bytes()[:40])
    model.faults = dict.fromkeys((2, 3), ModelError("c.png: the model stumbles"))  # together, and alone
    ran = cli("describe", "cats", "--write", "--quiet")
    assert ran.code == 7 and sorted(texts(folder)) == ["a.txt", "d.txt"]
    errors = ran.err.splitlines()
    assert len(errors) == 2 and all(line.startswith("qwenimg: error: ") and len(line) <= 300 for line in errors), ran
    assert "b.png" in errors[0] and "stumbles" in errors[1]
    alone = cli("describe", str(folder / "b.png"), "--quiet")
    alone.refused(5, "b.png")
    (folder / "b.txt").unlink(missing_ok=True)
    for name in "acd":
        (folder / f"{name}.png").write_bytes(b"broken")
    assert cli("describe", "cats", "--write", "--overwrite").code == 5, "all have failed"


def test_a_signal_keeps_what_is_written(model: StandIn, tmp_path: Path) -> None:
    from qwenimg.cli import signals
    from qwenimg.cli.main import _run

    folder = tmp_path / "cats"
    for name in "abc":
        picture(folder / f"{name}.png")
    stop, real = signals.Stop(), model.describe

    def stopped(*given: Any) -> Written:
        made = real(*given)
        if len(model.asked) == 2:
            stop.number = 2
        return made

    model.describe = stopped  # type: ignore[method-assign]
    assert _run(["describe", "cats", "--write", "--quiet"], stop) == 130
    assert sorted(texts(folder)) == ["a.txt"], "the second was stopped before it was written"
    assert threading.main_thread() is not None and not list(folder.glob(".*"))


def test_a_cut_or_empty_text(model: StandIn, tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    model.cut = True
    ran = cli("describe", "a.png")
    assert ran.code == 0 and "warning: a.png" not in ran.out.decode() and "is cut after 7 tokens" in ran.err
    model.text = ""
    assert cli("describe", "a.png", "--quiet", "--write").code == 2
    assert not (tmp_path / "a.txt").exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("a.png", "--tags", "--ask", "x"), ("--tags and --ask",)),
        (("a.png", "--ask", "  "), ("--ask", "empty")),
        (("a.png", "--overwrite"), ("--overwrite is for --write",)),
        (("a.png", "--language", "de"), ("--language",)),
        (("a.png", "--limit", "0"), ("--limit",)),
        (("a.png", "--limit", "2049"), ("--limit",)),
        ((), ("As in: qwenimg describe",)),
        (("https://example.org/a.png",), ("download the file",)),
    ],
)
def test_wrong_usage(model: StandIn, tmp_path: Path, args: tuple[str, ...], words: tuple[str, ...]) -> None:
    picture(tmp_path / "a.png")
    cli("describe", *args).refused(2, *words)
    assert not model.openings


def test_what_is_no_picture(model: StandIn, tmp_path: Path) -> None:
    cli("describe", "missing.png", "--quiet").refused(5, "missing.png")
    (tmp_path / "empty").mkdir()
    cli("describe", "empty").refused(5, "empty", "no pictures")
    os.mkfifo(tmp_path / "pipe.png")
    cli("describe", "pipe.png", "--quiet").refused(5, "pipe.png", "pipe")
