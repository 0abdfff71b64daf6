"""The text of --control, and the values that a call from Python has in its place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given as given_
from hypothesis import strategies as st
from PIL import Image

from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.request import coerce, control_text
from qwenimg.common.request.control_text import Control
from qwenimg.common.request.request import request_of

PICTURE = np.zeros((4, 6, 3), np.uint8)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Image.fromarray(PICTURE).save("a.png")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("net=a.png", Control("net", "a.png")),
        (" net = a.png ", Control("net", "a.png")),
        ("owner/net=canny@a.png:0.5", Control("owner/net", "a.png", "canny", 0.5)),
        ("net=no.png:0.8:0.1-0.9", Control("net", "no.png", "", 0.8, 0.1, 0.9)),
        ("net=no.png:1e-1:0-1e-1", Control("net", "no.png", "", 0.1, 0.0, 0.1)),
        ("net=no:b.png:2", Control("net", "no:b.png", "", 2.0)),
        ("net=no:b.png:0", Control("net", "no:b.png", "", 0.0)),
        ("net=canny@no@b.png", Control("net", "no@b.png", "canny")),
        ("net=mail@no.png", None),
        ("net=a=b.png:1", Control("net", "a=b.png", "", 1.0)),
        ("a.png", Control("", "a.png")),  # for a model that sees it itself
        ("canny@a.png:0.5", Control("", "a.png", "canny", 0.5)),
        ("= a.png", Control("", "a.png")),
    ],
)
def test_forms(text: str, expected: Control | None) -> None:
    if expected is None:
        with pytest.raises(UsageError, match="mail is no preprocessor here; there are canny"):
            control_text.parse(text)
        return
    assert control_text.parse(text) == (expected,)
    assert control_text.parse(f"{text}; ;x=y.png") == (expected, Control("x", "y.png"))


def test_a_file_with_colons_is_a_file() -> None:
    Image.fromarray(PICTURE).save("a:0.5.png")
    Path("canny@b:1").touch()
    Image.fromarray(PICTURE).save("canny@b.png")
    text = "net=a:0.5.png; net=canny@b.png"
    files = (Control("net", "a:0.5.png"), Control("net", "canny@b.png"))
    assert control_text.parse(text) == files
    seen = request_of({"prompt": "x"} | coerce.read_pictures({"control": text})[0]).controls
    assert seen == files and all(one.picture is not None for one in seen)
    assert str(files[1]) == "net=./canny@b.png", "which no preprocessor makes"


def test_what_is_no_file_is_not_looked_for() -> None:
    """A request over HTTP names its pictures by numbers: a file of the same name changes nothing."""
    for name in ("1:0.8", "1:0.8:0-1", "canny@1"):
        Path(name).touch()
    text = "net=1:0.8; net=1:0.8:0-1; net=canny@1"
    expected = (Control("net", "1", "", 0.8), Control("net", "1", "", 0.8), Control("net", "1", "canny"))
    assert control_text.parse(text, files=False) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("net", "write MODEL=PICTURE"),
        ("canny@no.png:1", "no such picture no.png:1; write MODEL=PICTURE"),
        ("=no.png", "write MODEL=PICTURE"),
        ("net=", "write MODEL=PICTURE"),
        ("net=:0.5", "no picture before the colon"),
        ("net=b.png:x", "'x' is no scale"),
        ("net=b.png:", "'' is no scale"),
        ("net=b.png:nan", "a scale is a number from 0 to 10"),
        ("net=b.png:inf", "a scale is a number from 0 to 10"),
        ("net=b.png:-1", "a scale is a number from 0 to 10"),
        ("net=b.png:11", "a scale is a number from 0 to 10"),
        ("net=b.png:0.2-0.8", "need a scale before them"),
        ("net=b.png:1:0.8-0.2", "starts at 0.8, behind its end at 0.2"),
        ("net=b.png:1:0-1.5", "no shares of the steps"),
        ("net=b.png:1:-0.5-1", "no shares of the steps"),
        ("net=b.png:1:nan-1", "no shares of the steps"),
        ("net=b.png:1:..-1", "no shares of the steps"),
        ("net=b.png:1:0-0-1", "no shares of the steps"),
        (
            "net=pose@b.png",
            "pose is no preprocessor here; there are canny, scribble, invert, grey, blur, colour. Make the picture by",
        ),
        (";".join(["net=b.png"] * 9), "9 controls; at most 8"),
    ],
)
def test_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        control_text.parse(text)
    assert said in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("start", "end", "steps", "expected"),
    [
        (0, 1, 7, (0, 7)), (0.2, 0.8, 5, (1, 4)), (0.3, 0.7, 5, (2, 3)), (0, 0.5, 3, (0, 1)), (0.5, 1, 3, (2, 3)),
        (0.4, 0.5, 3, (2, 2)), (1, 1, 4, (4, 4)), (0, 0, 4, (0, 0)), (0.1, 1, 10, (1, 10)), (0, 0.3, 10, (0, 3)),
    ],
)  # fmt: skip
def test_steps_are_those_of_diffusers(start: float, end: float, steps: int, expected: tuple[int, int]) -> None:
    keeps = [1.0 - float(i / steps < start or (i + 1) / steps > end) for i in range(steps)]
    first, last = Control("n", "p", start=start, end=end).steps(steps)
    assert (first, last) == expected
    assert keeps == [float(first <= i < last) for i in range(steps)]


@pytest.mark.parametrize("numbers", ["", ":0.5", ":0.5:0.1-1", ":1:0-0.25"])
def test_numbers_come_back(numbers: str) -> None:
    [one] = control_text.parse(f"net=b.png{numbers}")
    assert control_text.parse(f"net=b.png{one.numbers}") == (one,)
    assert str(one) == f"net=b.png{numbers}"


SHARES = st.floats(0, 1)
NAMES = st.text("abc/:@. -é", min_size=1, max_size=12).map(str.strip).filter(bool)


@given_(NAMES, NAMES, st.sampled_from(("", "canny")), st.floats(0, 10), SHARES, SHARES)
def test_a_control_is_that_of_its_text(
    network: str, file: str, preprocessor: str, scale: float, one: float, other: float
) -> None:
    control = Control(network, file, preprocessor, scale, *sorted((one, other)))
    [parsed] = control_text.parse(str(control), files=False)
    assert replace(parsed, file=parsed.file.removeprefix("./")) == replace(control, file=file.removeprefix("./"))


# From Python


@pytest.mark.parametrize(
    ("value", "text", "count"),
    [
        ("net=a.png", "net=a.png", 1),
        (["net=a.png:0.5", "n=canny@a.png"], "net=a.png:0.5; n=canny@a.png", 2),
        (("net", PICTURE), "net=a picture", 1),
        ([("net", Image.fromarray(PICTURE), 1), "n=a.png"], "net=a picture; n=a.png", 2),
        ((Path("net"), Path("a.png"), 0.5, (0, 0.25)), "net=a.png:0.5:0-0.25", 1),
        (("net", "canny@a.png", 0.5), "net=canny@a.png:0.5", 1),
    ],
)
def test_calls(value: Any, text: str, count: int) -> None:
    converted, _ = coerce.read_pictures({"control": value})
    assert "; ".join(map(str, converted["control"])) == text
    request = request_of({"prompt": "x"} | converted)
    assert len(request.controls) == count == len(request.control_pictures)
    assert all(np.array_equal(one, PICTURE) for one in request.control_pictures)
    assert coerce.read_pictures(converted)[0] == converted, "a picture is read once"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (3, "control has int"), (("net",), "control has tuple"), (("net", PICTURE, 1, (0, 1), 2), "control has tuple"),
        (("net", PICTURE, "x"), "a number of control net is 'x'; expected a number"),
        (("net", PICTURE, True), "is 'True'; expected a number"),
        (("net", PICTURE, 1, 0.5), "expected a pair"), (("a;b", PICTURE), "a semicolon parts controls"),
        (("a=b", PICTURE), "a semicolon parts controls"), (("net", 3), "expected a PIL image"),
        (("net", PICTURE, float("nan")), "a scale is a number"), (("net", PICTURE, 1, (0.9, 0.1)), "behind its end"),
        (("net", PICTURE[0]), "expected uint8 [H, W, 3]"), (("net", PICTURE.astype(float)), "expected uint8"),
    ],
)  # fmt: skip
def test_refused_calls(value: Any, said: str) -> None:
    with pytest.raises(UsageError) as error:
        request_of({"prompt": "x"} | coerce.read_pictures({"control": value})[0])
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("content", "said"), [(None, "does not exist"), (b"hello", "is no PNG"), (b"\x89PNG\r\n\x1a\n", "cannot be read")]
)
def test_pictures_that_are_none(content: bytes | None, said: str) -> None:
    if content is not None:
        Path("b.png").write_bytes(content)
    with pytest.raises(ModelError, match=said):
        coerce.read_pictures({"control": "net=canny@b.png:0.5"})
