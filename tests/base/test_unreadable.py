"""What cannot be read, written or written out: every kind of file at every option, long names, a working folder that
is gone, numbers of thousands of digits. One line and the documented code."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwenimg.cli import config
from qwenimg.cli.main import run
from qwenimg.common.base import safe_files
from qwenimg.common.base.errors import ModelError, QwenimgError, UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.pictures.latents import read_latents
from qwenimg.common.request.family_options import FamilyOptions
from qwenimg.common.request.request import Defaults, Request

BIG = 10**5000
KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "socket": lambda path: socket.socket(socket.AF_UNIX).bind(path.name),
    "loop": lambda path: path.symlink_to(path),
    "dangling": lambda path: path.symlink_to("nothing"),
}
OPTIONS = {
    "-m": "x", "--refiner": "x", "--vae": "x", "-i": "x.png", "--from": "x.png", "--prompt-file": "x",
    "--latents": "x.npy", "info": "x", "-o": "x.png", "--save-latents": "x.npy",
}  # fmt: skip
WRITTEN = ("-o", "--save-latents")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config, "path", lambda: tmp_path / "config.toml")
    return tmp_path


def line(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    """The exit code of the command line and its one line of error."""
    code = run(list(args))
    *before, last = capsys.readouterr().err.splitlines()
    print(code, last)
    assert last.startswith("qwenimg: error: ") and last.isprintable() and len(last) <= 300
    assert not [text for text in before if "error" in text]
    return code, last


def asked(option: str, value: str) -> list[str]:
    if option == "info":
        return ["info", value]
    words = [] if option in ("--from", "--prompt-file") else ["a red circle"]
    model = [] if option == "-m" else ["-m", "none/none"]
    return [*words, option, value, *model]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("option", OPTIONS)
def test_every_kind_of_file_at_every_option(option: str, kind: str, place: Path, capsys) -> None:
    if option == "-m" and kind == "folder":
        pytest.skip("a model is a folder")
    KINDS[kind](place / OPTIONS[option])
    if option == "-o" and kind in ("folder", "dangling", "loop"):
        return  # a folder is written into, a link is replaced
    if option in ("--refiner", "--vae"):  # looked at once there is a model
        with pytest.raises(ModelError) as caught:
            safe_files.open_regular(place / OPTIONS[option])
        assert str(caught.value).isprintable()
        return
    code, _ = line(capsys, *asked(option, OPTIONS[option]))
    assert code == (2 if option in WRITTEN else 5)


@pytest.mark.parametrize("option", OPTIONS)
def test_names_of_300_characters(option: str, capsys) -> None:
    code, said = line(capsys, *asked(option, "x" * 300 + OPTIONS[option][1:]))
    assert code == (2 if option in WRITTEN else 5) and ("xxx" in said or "none/none" in said)


@pytest.mark.parametrize("option", OPTIONS)
def test_a_folder_without_permission(option: str, place: Path, monkeypatch, capsys) -> None:
    """Root may look everywhere, so what the system would say is said by the test."""
    (place / "shut").mkdir()

    def denied(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **more: Any) -> Any:
            if "shut" in str(path) and Path(str(path)).name != "shut":
                raise PermissionError(13, "Permission denied", str(path))
            return original(path, *args, **more)

        return call

    monkeypatch.setattr(os, "open", denied(os.open))
    monkeypatch.setattr(os, "lstat", denied(os.lstat))
    monkeypatch.setattr(os, "stat", denied(os.stat))
    code, said = line(capsys, *asked(option, f"shut/{OPTIONS[option]}"))
    if option in ("--refiner", "--vae"):
        return  # the model comes first
    assert code == (2 if option in WRITTEN else 5) and "ermission" in said


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_as_config_toml(kind: str, place: Path, capsys) -> None:
    KINDS[kind](place / "config.toml")
    code, said = line(capsys, "a red circle", "-m", "none/none")
    assert code == 2 and "config.toml" in said


@pytest.mark.parametrize(
    "text",
    [f"steps = {'1' * 5000}", f"steps = 0x{'f' * 60_000}", f"guidance = {'1' * 60_000}.0", "a = " + "[" * 30_000,
     "a" + ".a" * 20_000 + " = 1", "[" + "a." * 20_000 + "a]", "steps = {" * 10_000, "a = [" + "1," * 30_000 + "]",
     "\n".join(f"k{i} = 1" for i in range(6000)), '"""' * 20_000, 'output = """' + "\\" * 50_000],
)  # fmt: skip
def test_config_toml_of_any_shape(text: str, place: Path, capsys) -> None:
    (place / "config.toml").write_text(text)
    code, said = line(capsys, "a red circle", "-m", "none/none")
    assert code == 2 and "config.toml" in said


def test_texts_in_config_toml_may_hold_anything(place: Path) -> None:
    text = """negative_prompt = "a.b [c] {d} # e \\" ['" # [x] a.b\noutput = 'x.[y].png'\nsteps = 3\nguidance = 1.5\n"""
    (place / "config.toml").write_text(text + 'sampler = """euler"""\n')
    found = config.defaults()
    assert found["negative_prompt"] == "a.b [c] {d} # e \" ['" and found["output"] == "x.[y].png"
    assert (found["steps"], found["guidance"], found["sampler"]) == (3, 1.5, "euler")


def test_a_working_folder_that_is_gone(tmp_path: Path, monkeypatch, capsys) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    code, said = line(capsys, "a red circle")
    assert code == 2 and "the working folder does not exist any more" in said
    with pytest.raises(UsageError, match="working folder"):
        safe_files.absolute(Path("x"))
    assert safe_files.absolute(Path("/x/../y")) == Path("/y")


@pytest.mark.parametrize(
    "fields",
    [{name: value} for name in ("width", "height", "steps", "seed", "guidance", "strength", "clip_skip",
     "guidance_rescale", "refine_at") for value in (BIG, -BIG, [BIG], {1: BIG})],
)  # fmt: skip
def test_large_integers_in_a_request(fields: dict[str, Any]) -> None:
    own = {name: value for name, value in fields.items() if name in FamilyOptions.__dataclass_fields__}
    with pytest.raises(UsageError) as caught:
        Request(prompt="a", family_options=FamilyOptions(**own), **{k: v for k, v in fields.items() if k not in own})
    assert len(str(caught.value)) < 200 and "of about 5,001 digits" in str(caught.value)


def test_large_integers_elsewhere(place: Path) -> None:
    picture = np.zeros((4, 5, 3), np.uint8)
    assert Defaults().sides(BIG, None, [picture])[1] == BIG * 4 // 5
    for number in ("1" * 5000, "0x" + "f" * 5000, "-0x" + "f" * 5000):
        head = f"{{'descr': '<f4', 'fortran_order': False, 'shape': (1, 4, {number}, 8), }}\n".encode()
        (place / "x.npy").write_bytes(b"\x93NUMPY\1\0" + len(head).to_bytes(2, "little") + head + bytes(64))
        with pytest.raises(ModelError) as caught:
            read_latents(place / "x.npy")
        assert "x.npy" in str(caught.value)


class Rude:
    def __str__(self) -> str:
        raise QwenimgError("no")


@pytest.mark.parametrize(
    ("value", "text"),
    [(BIG, "<an integer of about 5,001 digits>"), (7, "7"), (True, "True"), ("a\x1b", "a\\x1b"),
     (ValueError(BIG), "<ValueError>"),
     (Rude(), "<Rude>"), ([1, [BIG]], "[1, [<an integer of about 5,001 digits>]]"), ((1, 4), "(1, 4)"), (1.5, "1.5")],
    ids=lambda value: value if type(value) is str else "",
)  # fmt: skip
def test_any_object_is_one_short_line(value: object, text: str) -> None:
    assert clean(value, 60) == text


def test_a_line_costs_what_it_shows() -> None:
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    for value in (nested, [0] * 10**6, "x" * 10**7, dict.fromkeys(range(10**5))):
        assert len(clean(value, 40)) <= 40
