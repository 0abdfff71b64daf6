"""JSON files and strict dataclasses: what is read, and what is refused in one line."""

import json
import math
import os
from dataclasses import dataclass, field

import pytest
from support.refusals import refused

from qwenimg.common.base.config import parse, read_json


@dataclass(frozen=True, kw_only=True)
class Config:
    num_layers: int = field(metadata={"max": 1000})
    width: int = 96
    first: int = field(default=0, metadata={"min": 0})
    eps: float = 1e-6
    bias: bool = True
    act: str = "silu"
    axes: tuple[int, ...] = (16, 56, 56)
    means: tuple[float, ...] = ()
    flags: tuple[bool, ...] = (True,)
    scale: float | None = None
    groups: int | None = 32

    def __post_init__(self) -> None:
        if self.width % 2:
            raise ValueError(f"width {self.width} is odd")


GOOD = {"num_layers": 60}


def parsed(data, **more):
    return parse(Config, data, source="config.json", **more)


def test_defaults_and_every_type():
    assert parsed(GOOD) == Config(num_layers=60)
    data = {
        "num_layers": 2,
        "width": 8,
        "first": 0,
        "eps": 1,
        "bias": False,
        "act": "gelu",
        "axes": [2, 3],
        "means": [1, -0.5],
        "flags": [False, True],
        "scale": 0.25,
        "groups": None,
    }
    config = parsed(data)
    assert config == Config(
        num_layers=2,
        width=8,
        first=0,
        eps=1.0,
        bias=False,
        act="gelu",
        axes=(2, 3),
        means=(1.0, -0.5),
        flags=(False, True),
        scale=0.25,
        groups=None,
    )
    assert type(config.eps) is float and all(type(mean) is float for mean in config.means)


def test_unknown_keys():
    data = GOOD | {"_class_name": "X", "dropout": 0.5, "extra_null": None, "extra_false": False, "n": 2}
    assert parsed(data | {"n": None}, ignored=frozenset({"dropout"})) == Config(**GOOD)
    text = refused(parsed, data, ignored=frozenset({"dropout"}))
    assert text.startswith("config.json: 'n' is 2:") and "does not know what it changes" in text
    for value in (0, "", [], {}, True, 0.0):
        assert "'n'" in refused(parsed, GOOD | {"n": value})


WRONG = [
    ("num_layers", 10**9),
    ("num_layers", 10**5),
    ("num_layers", 1001),
    ("num_layers", 0),
    ("num_layers", -1),
    ("num_layers", "60"),
    ("num_layers", 60.0),
    ("num_layers", True),
    ("num_layers", None),
    ("num_layers", [60]),
    ("num_layers", {"a": 1}),
    ("width", 10**12),
    ("width", 65_537),
    ("first", -1),
    ("eps", "1e-6"),
    ("eps", math.nan),
    ("eps", math.inf),
    ("eps", 10**400),
    ("eps", True),
    ("eps", None),
    ("bias", 1),
    ("bias", "true"),
    ("act", 3),
    ("act", None),
    ("axes", [16, 0]),
    ("axes", [16, 2.0]),
    ("axes", [16, True]),
    ("axes", [[16]]),
    ("axes", 16),
    ("axes", "16"),
    ("axes", [1] * 65),
    ("axes", None),
    ("means", [1.0, math.nan]),
    ("flags", [1]),
    ("scale", math.inf),
    ("groups", 0),
    ("\x1b[2J\nkey", 3),
]


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_wrong_values(key, value):
    text = refused(parsed, GOOD | {key: value})
    assert text.startswith("config.json: ") and repr(key)[1:-1] in text


def test_missing_key_and_own_checks():
    assert "'num_layers' is missing" in refused(parsed, {})
    assert "width 7 is odd" in refused(parsed, GOOD | {"width": 7})


# Files


BROKEN = {
    "empty": (b"", "not JSON"),
    "truncated": (b'{"num_layers": 6', "not JSON"),
    "list": (b"[]", "not a JSON object"),
    "number": (b"3", "not a JSON object"),
    "NaN": (b'{"eps": NaN}', "NaN"),
    "Infinity": (b'{"eps": -Infinity}', "Infinity"),
    "overflow": (b'{"eps": 1e999}', "too large"),
    "duplicate": (b'{"a": {"n": 1, "n": 2}}', "'n' occurs twice"),
    "byte order mark": (b"\xef\xbb\xbf{}", "byte order mark"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "byte order mark"),
    "UTF-16 without mark": ('{"a": 1}'.encode("utf-16-le"), "not JSON"),
    "Latin-1": (b'{"a": "\xe9"}', "not UTF-8"),
    "65 deep": (b'{"a":' * 65 + b"1" + b"}" * 65, "65 deep"),
    "100,000 deep": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "100000 deep"),
    "2,000,000 values": (b"[" + b"0," * 2_000_001 + b"0]", "values"),
    "21 digits": (b'{"num_layers": 100000000000000000000}', "digits"),
    "control character": (b'{"a": "\n"}', "not JSON"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files(tmp_path, case):
    raw, reason = BROKEN[case]
    path = tmp_path / "config.json"
    path.write_bytes(raw)
    text = refused(read_json, path)
    assert "config.json" in text and reason in text


def test_fifty_megabytes(tmp_path):
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(50 << 20)
    assert str(50 << 20) in refused(read_json, path)


def test_not_regular(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    assert "pipe" in refused(read_json, tmp_path / "config.json")
    assert "folder" in refused(read_json, tmp_path)
    assert "does not exist" in refused(read_json, tmp_path / "nothing.json")


@pytest.mark.parametrize("depth", [1, 64])
def test_good_files(tmp_path, depth):
    data = {"text": 'brackets "[{" in text \\', "n": [1, -2.5e3, None, True], "图": "é"}
    for _ in range(depth - 2):
        data = {"a": data}
    path = tmp_path / "config.json"
    for ascii_only in (True, False):
        path.write_text(json.dumps(data, ensure_ascii=ascii_only, indent=1), encoding="utf-8")
        assert read_json(path) == data
