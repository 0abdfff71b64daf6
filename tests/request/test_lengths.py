"""No option's text is read if it is longer than its schema says, by whatever way it comes in."""

from __future__ import annotations

import itertools
import json
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
from support.cli_runner import cli

from qwenimg.cli import config
from qwenimg.common.base.amounts import parse_ranges
from qwenimg.common.base.errors import ModelError, QwenimgError, UsageError
from qwenimg.common.base.strict_json import strict_json
from qwenimg.common.base.text import LONGEST, short
from qwenimg.common.jobs.image_options import TEXT_OPTIONS, check, parse, parse_seeds
from qwenimg.common.jobs.prompt_file import read_prompts
from qwenimg.common.jobs.schema import request_schema
from qwenimg.common.request import cached_calls, skip_layers
from qwenimg.common.request.request import OPTIONS, request_of

TEXTS = {name: one for name, one in TEXT_OPTIONS.items() if one.kind is str or one.several}
PARTS = {"cached_calls": "1-9999,", "skip_layers": "0-999,", "lora": "a:1;", "control": "a=b:1;", "seed": "1,",
         "size": "64x64", "aspect": "16:9"}  # fmt: skip


def too_long(name: str) -> str:
    part = PARTS.get(name, "word ")
    return part * (TEXTS[name].longest // len(part) + 20_000)


@pytest.fixture(autouse=True)
def quick() -> Any:
    """One such request of 140 kB took 14 s before."""
    start = time.process_time()
    yield
    spent = time.process_time() - start
    print(f"{spent:.3f} s of processor time")
    assert spent < 5


@pytest.mark.parametrize("name", TEXTS)
def test_by_a_prompt_file_a_call_a_configuration_and_the_command_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = too_long(name)
    said: list[QwenimgError] = []
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "x", name: text}))
    [(_, line)] = read_prompts(str(tmp_path / "p.jsonl"))
    assert isinstance(line, ModelError)
    said.append(line)
    with pytest.raises(UsageError) as caught:
        values = {"prompt": "x"} | {name: text}
        check(parse(values))
        parse_seeds(values["seed"])
    said.append(caught.value)
    if name in OPTIONS and not TEXT_OPTIONS[name].several:
        with pytest.raises(UsageError) as caught:
            request_of({"prompt": "x", name: text})
        said.append(caught.value)
    if TEXT_OPTIONS[name].config:
        (tmp_path / "config.toml").write_text(f'{name} = "{"x" * (TEXTS[name].longest + 1)}"')
        monkeypatch.setattr(config, "path", lambda: tmp_path / "config.toml")
        with pytest.raises(UsageError) as caught:
            config.defaults()
        said.append(caught.value)
        monkeypatch.undo()
    dashed = text[:100_000] if name not in ("prompt", "negative_prompt") else f"{text[:120_000]}"
    ran = cli("-m", "shapes", *(["x"] if name != "prompt" else []), f"--{TEXT_OPTIONS[name].dashed}={dashed}")
    assert ran.code == 2 and len(ran.err) < LONGEST + 40, ran.err
    for error in said:
        print(error)
        assert re.search("characters|bytes", str(error)) or name in ("size", "aspect"), error
        assert len(str(error)) <= LONGEST


def test_the_schema_says_the_same() -> None:
    for name, about in request_schema()["properties"].items():
        for kind in about.get("anyOf", [about]):
            if "maxLength" in kind:
                assert kind["maxLength"] == TEXT_OPTIONS[name].longest
    TEXT_OPTIONS["cached_calls"].check("1-9999," * 1142 + "1")
    assert len(cached_calls.parse("1-9999," * 100_000 + "7")) == 9999, "at once, even beyond that length"


def test_ranges_are_those_of_a_plain_count() -> None:
    rng = random.Random(5)
    for _ in range(300):
        pairs = [sorted((rng.randrange(60), rng.randrange(60))) for _ in range(rng.randint(1, 6))]
        text = ",".join(rng.choice([f"{a}-{b}", f" {a} - {b} ", str(a)]) for a, b in pairs)
        plain = {
            number
            for part in text.split(",")
            for ends in [[int(end) for end in part.split("-")]]
            for number in range(ends[0], ends[-1] + 1)
        }
        assert parse_ranges(text) == tuple(sorted(plain)) == skip_layers.parse(text)
    for text in ("", ",", "1,", "a", "2-1", "-1", "1-", "1--2", "12345", "1.5", "²", "1-2-3"):
        assert parse_ranges(text) is None
        with pytest.raises(UsageError):
            cached_calls.parse(text)
    assert parse_ranges("0") == (0,) and parse_ranges("9999") == (9999,)
    for text in ("0", "0-4", "3,0"):
        with pytest.raises(UsageError):
            cached_calls.parse(text)


def test_a_refusal_keeps_its_start_and_its_end() -> None:
    long = UsageError("file.png: " + "x" * 5000 + "; choose another name")
    assert len(str(long)) == LONGEST and str(long).startswith("file.png: ") and str(long).endswith("another name")
    assert short("x" * LONGEST) == "x" * LONGEST and str(UsageError("short")) == "short"


HALVES = ["\\ud800", "\\udfff", "a\\uDBFFb", "\\ud83d\\\\\\ude00", "\\ude00\\ud83d", "\\ud83d\\ud83d\\ude00"]
WHOLE = ["\\ud83d\\ude00", "\\\\ud800", "\\\\\\ud83d\\ude00", "\\ue000", "\\u0041", "\U0001f600", '\\"\\ud83d\\uDE00']


def test_half_of_a_surrogate_pair_is_no_character() -> None:
    """As Python has it: what it cannot encode is refused, and nothing else is."""
    for text in [*HALVES, *WHOLE, *map("".join, itertools.product([*HALVES, *WHOLE], repeat=2))]:
        raw = f'{{"a": "{text}"}}'.encode()
        try:
            json.loads(raw)["a"].encode()
            is_whole = True
        except UnicodeEncodeError:
            is_whole = False
        assert strict_json(raw, "x", depth=2, values=9) == json.loads(raw), "recipes have names of files"
        if is_whole:
            assert strict_json(raw, "x", depth=2, values=9, halves=False) == json.loads(raw)
        else:
            with pytest.raises(ModelError, match="surrogate"):
                strict_json(raw, "x", depth=2, values=9, halves=False)
