"""Requests in JSON as fields: names, types, bounds, and what hostile clients send; no server."""

from __future__ import annotations

import base64
import dataclasses
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_worker import SETTINGS

from qwenimg.cli.serve.apis import body
from qwenimg.cli.serve.http_error import HttpError
from qwenimg.cli.serve.public import HIDDEN, public
from qwenimg.common.jobs.image_options import TEXT_OPTIONS
from qwenimg.common.jobs.job import InputFiles
from qwenimg.common.request.lora_text import Lora
from qwenimg.common.request.option import Option, option, options_of

LORAS = replace(SETTINGS, loras={"style": "/home/me/loras/style.safetensors"})


def fault(data: dict[str, Any], **more: Any) -> HttpError:
    with pytest.raises(HttpError) as caught:
        body.job_of(body.options(data, **more), SETTINGS, most=10)
    return caught.value


def test_every_option_is_asked_by_its_name_and_by_those_of_others() -> None:
    names = body.option_names()
    assert set(TEXT_OPTIONS) == set(names.values())
    for name in ("num_inference_steps", "guidance_scale", "true_cfg_scale", "cfg_scale", "cfg", "steps", "guidance"):
        assert names[name] in ("steps", "guidance", "true_cfg")


def test_a_new_option_of_a_picture_needs_no_line_here(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class More:
        sparkle: int = option(0, Option(help="sparkle", aliases=("more-glitter",), least=0, most=9))

    monkeypatch.setitem(TEXT_OPTIONS, "sparkle", options_of(More)["sparkle"])
    assert body.job_of(body.options({"prompt": "x", "more_glitter": 3}), SETTINGS, most=1).options["sparkle"] == 3
    assert fault({"prompt": "x", "sparkle": 10}).param == "sparkle"


def test_fields_and_seeds() -> None:
    data = {"prompt": "x", "seed": 7, "num_images": 3, "cfg_scale": 2, "num_inference_steps": 9.0, "size": "64x32"}
    job = body.job_of(body.options(data), SETTINGS, most=3)
    assert job.options == {"prompt": "x", "guidance": 2, "steps": 9, "width": 64, "height": 32}
    assert job.seeds == (7, 8, 9)
    seeds = body.job_of(body.options({"prompt": "x", "seed": -1}), SETTINGS, most=1).seeds
    assert len(seeds) == 1 and seeds[0] >= 0


@pytest.mark.parametrize(
    ("data", "param"),
    [
        ({}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": 3}, "prompt"), ({"prompt": "x", "steps": 0}, "steps"),
        ({"prompt": "x", "steps": True}, "steps"), ({"prompt": "x", "steps": 2.5}, "steps"),
        ({"prompt": "x", "steps": "20x"}, "steps"), ({"prompt": "x", "steps": [1]}, "steps"),
        ({"prompt": "x", "steps": 10**19}, "steps"), ({"prompt": "x", "guidance": -1}, "guidance"),
        ({"prompt": "x", "num_inference_steps": 10**9}, "steps"), ({"prompt": "x", "sampler": "nope"}, "sampler"),
        ({"prompt": "x", "seed": "1-99"}, "num_images"), ({"prompt": "x", "seed": "a"}, "seed"),
        ({"prompt": "x", "size": "9999999x9"}, "size"), ({"prompt": "x", "aspect": "0:0"}, "aspect"),
        ({"prompt": "x", "width": 0}, "width"), ({"prompt": "x", "num_images": 0}, "num_images"),
        ({"prompt": "x", "image": "/etc/passwd"}, "image"), ({"prompt": "x", "latents": "/x.npy"}, "latents"),
        ({"prompt": "x", "output": "/x.png"}, "output"), ({"prompt": "x", "cfg": 1, "guidance": 2}, "guidance"),
        ({"prompt": "x", "lora": "/etc/passwd"}, "lora"), ({"prompt": "x", "lora": "../x:0.5"}, "lora"),
        ({"prompt": "x", "lora": ["a/b/c"]}, "lora"), ({"prompt": "x", "lora": [1]}, "lora"),
        ({"prompt": "\ud800"}, "prompt"), ({"prompt": "x" * 10**6}, "prompt"),
    ],
)  # fmt: skip
def test_a_wrong_value_names_its_field(data: dict[str, Any], param: str) -> None:
    error = fault(data)
    print(error.text)
    assert (error.status, error.param) == (400, param) and len(error.text) <= 300 and error.text.isprintable()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [("steps", "4", 4), ("guidance", "1.5", 1.5), ("cfg_scale", "7", 7.0), ("num_images", " 1 ", 1),
     ("strength", ".5", 0.5), ("guidance", "1e1", 10.0), ("clip_skip", "2", 2)],
)  # fmt: skip
def test_a_number_may_be_a_text(name: str, text: str, value: float) -> None:
    """As a seed may be, and as those of a form are."""
    [option] = {body.option_names()[name]} - {"prompt"}
    fields = body.options({"prompt": "x", name: text})
    assert fields[option] == value and type(fields[option]) is type(value)


@pytest.mark.parametrize("text", ["four", "", "nan", "inf", "1_0", "0x4", "²", "1e400", "1" * 5000, "--1", "1.5.2"])
def test_what_is_no_number_is_refused(text: str) -> None:
    for name in ("steps", "guidance", "width", "num_images"):
        assert fault({"prompt": "x", name: text}).param == name


LONG = {"cached_calls": "1-9999,", "skip_layers": "0-999,", "lora": "a:1;", "control": "a=1;", "seed": "1,",
        "prompt": "word ", "negative_prompt": "word ", "sampler": "euler", "schedule": "karras", "aspect": "1:1",
        "size": "64x64", "few_steps": "lcm-", "caption": "en", "control_mode": "balanced", "lora_mode": "auto",
        "mask_mode": "inside", "mask_fill": "fill", "hires_with": "lanczos", "outpaint": "top=1,",
        "variation": "7:0.2,", "ip_adapter": "a:1;", "ip_image": "a;", "ip_mask": "a;",
        "embedding": "a=b;", "upscale_with": "x4"}  # fmt: skip


def test_no_text_is_longer_than_its_schema_says() -> None:
    """Nor read, if it is: one such request of 140 kB took 14 s before."""
    start = time.process_time()
    for name, part in LONG.items():
        text = part * 1_000_000
        assert fault({"prompt": "x", name: text}).param == name
        if TEXT_OPTIONS[name].parse is not None:
            assert fault({"prompt": "x", name: [part] * 9_000}).param == name
    spent = time.process_time() - start
    print(f"{spent:.3f} s of processor time for {len(LONG)} texts of megabytes")
    assert set(LONG) == {name for name, one in TEXT_OPTIONS.items() if one.kind is str or one.several} and spent < 5


def test_loras_have_served_names_alone() -> None:
    options = body.job_of(body.options({"prompt": "x", "lora": "style:0.5"}), LORAS, most=1).options
    assert options["lora"] == (Lora("/home/me/loras/style.safetensors", 0.5),)
    options = body.job_of(body.options({"prompt": "x", "lora": ["style:0.5", "style"]}), LORAS, most=1).options
    assert [one.source for one in options["lora"]] == ["/home/me/loras/style.safetensors"] * 2
    with pytest.raises(HttpError) as caught:
        body.job_of(body.options({"prompt": "x", "lora": "/home/me/loras/style.safetensors"}), LORAS, most=1)
    assert caught.value.param == "lora"


def test_the_name_of_a_lora_is_never_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client could tell before by the answer whether a file is there."""
    monkeypatch.chdir(tmp_path)
    Path("style:0.5").touch()
    Path("style:x").touch()
    options = body.job_of(body.options({"prompt": "x", "lora": "style:0.5"}), LORAS, most=1).options
    assert options["lora"] == (Lora("/home/me/loras/style.safetensors", 0.5),)
    with pytest.raises(HttpError, match="'x' is no number"):
        body.job_of(body.options({"prompt": "x", "lora": "style:x"}), LORAS, most=1)


CONTROLLED = replace(SETTINGS, controls={"union": "/home/me/nets/union", "known": "qwen-image-controlnet-union"})


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [
        ("union=1", 1, "/home/me/nets/union=1"), (" union = canny@1:0.5 ", 1, "/home/me/nets/union=canny@1:0.5"),
        ("canny@1", 1, "canny@1"), ("=1:1:0-1", 1, "1"),  # for a model that sees it itself
        (["union=2:0.5:0-0.8", "known=1", "union=1"], 2,
         "/home/me/nets/union=2:0.5:0-0.8; qwen-image-controlnet-union=1; /home/me/nets/union=1"),
        ("union=1:0.5; union=also@2; known=mask@3", 3,
         "/home/me/nets/union=1:0.5; /home/me/nets/union=also@2; qwen-image-controlnet-union=mask@3"),
    ],
)  # fmt: skip
def test_controls_have_served_names_and_numbers_of_pictures(text: object, count: int, expected: str) -> None:
    data = body.options({"prompt": "x", "control": text})
    controls = body.job_of(data, CONTROLLED, InputFiles(controls=(b"x",) * count), most=1).options["control"]
    assert "; ".join(map(str, controls)) == expected


@pytest.mark.parametrize(
    ("text", "count", "param"),
    [
        ("union=/etc/passwd", 1, "control"), ("union=canny@/etc/passwd", 1, "control"), ("union=../1", 1, "control"),
        ("union=1/../../x", 1, "control"), ("union=file:1", 1, "control"), ("union=01", 1, "control"),
        ("union=0", 1, "control"), ("union=1:x", 1, "control"), ("union=1:0.5:0.9-0.1", 1, "control"),
        ("union=1:-1", 1, "control"), ("union=1:1e999", 1, "control"), ("union=pose@1", 1, "control"),
        ("union", 1, "control"), ("/etc/passwd", 1, "control"), ("=../1", 1, "control"),
        ("/home/me/nets/union=1", 1, "control"),
        ("qwen-image-controlnet-union=1", 1, "control"), ("../nets/union=1", 1, "control"), (7, 1, "control"),
        ([1], 1, "control"), (["union=1", None], 1, "control"), ("; ".join(["union=1"] * 9), 1, "control"),
        ("union=2", 1, "control_image"), ("union=1", 0, "control_image"), ("union=1", 2, "control_image"),
        ("", 1, "control_image"), ("union=1\0", 1, "control"), ("union=\u0661", 1, "control"),
    ],
)  # fmt: skip
def test_a_control_names_no_file(text: object, count: int, param: str) -> None:
    with pytest.raises(HttpError) as caught:
        data = body.options({"prompt": "x", "control": text})
        body.job_of(data, CONTROLLED, InputFiles(controls=(b"x",) * count), most=1)
    print(caught.value.text)
    assert caught.value.param == param and caught.value.status == 400
    assert "/home" not in caught.value.text.replace("'/home/me/nets/union'", "") and caught.value.text.isprintable()


@pytest.mark.parametrize("value", ["/etc/passwd", "http://x/y", 3, [3], [""], {"a": 1}, ["QQ=="] * 9])
def test_pictures_of_controls_are_in_base64(value: object) -> None:
    with pytest.raises(HttpError) as caught:
        body.pictures({"control_image": value}, "control_image")
    assert caught.value.param == "control_image"


def test_models_have_served_names_alone() -> None:
    settings = replace(SETTINGS, aliases={"dall-e-2": "two"})
    assert body.model_named("dall-e-2", settings) == "two" and body.model_named("one", settings) == "one"
    for name in ("/etc", "../one", "three", "", 3, None, ["one"], {"one": 1}, "owner/name"):
        with pytest.raises(HttpError) as caught:
            body.model_named(name, settings)
        assert caught.value.status == 404 and caught.value.code == "model_not_found"


def test_pictures_are_in_base64_and_never_fetched() -> None:
    data = base64.b64encode(b"PNG").decode()
    assert body.picture_bytes(data, "image") == b"PNG"
    assert body.picture_bytes(f"data:image/png;base64,{data}", "image") == b"PNG"
    for wrong in (
        "http://127.0.0.1/x.png",
        "https://x/y",
        "file:///etc/passwd",
        "/etc/passwd",
        "",
        "a",
        3,
        None,
        [data],
    ):
        with pytest.raises(HttpError) as caught:
            body.picture_bytes(wrong, "image")
        assert caught.value.param == "image" and caught.value.status == 400


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(sorted(body.option_names())) | st.text(max_size=8), ANY, max_size=6))
def test_any_json_is_an_order_or_a_fault(data: dict[str, Any]) -> None:
    try:
        job = body.job_of(body.options(data), SETTINGS, most=4)
    except HttpError as error:
        assert error.status in (400, 404) and len(error.text) <= 300
        json.dumps([error.text, error.param])
    else:
        assert job.prompt and 1 <= len(job.seeds) <= 4


@pytest.mark.parametrize(
    "text",
    ["/home/me/x.safetensors: is broken", "~/x.safetensors: is broken", "weights of '/opt/x/y' do not fit",
     "…models/deep/x.safetensors: ends early", "in ../models/x.gguf: no"],
)  # fmt: skip
def test_no_path_is_told(text: str) -> None:
    assert "/" not in public(text, SETTINGS)


def test_plain_reasons_are_told() -> None:
    for text in ("steps is 0; choose 1 to 1000", "64x64 needs 12.5 GB and 3 GB are free: -q 4", "16:9 and/or 3/4"):
        assert public(text, SETTINGS) == text
    file = "/home/me/loras/style.safetensors"
    for shown in (file, "…/loras/style.safetensors", "/home/me/loras/sty…"):
        assert public(f"lora {shown}: does not fit", LORAS) == "lora style: does not fit"
    assert public("…/loras/other.safetensors: does not fit", LORAS) == HIDDEN
