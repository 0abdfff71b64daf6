"""The tokenizer against transformers and diffusers, and against files that try to break it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import tiny_special_ids, tiny_vocabulary, tokenizer_config, tokenizer_json, write_tiny_tokenizer

from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.families.qwen_image.variants import DRAWS as TEMPLATE
from qwenimg.common.prompts import check, vocabulary
from qwenimg.common.prompts import qwen as ours
from qwenimg.common.prompts.vocabulary import REGEX

REFUSED_WITHIN = 2.0  # CPU seconds: the promise for any file or prompt; the slowest measured here is 0.6
STYLES = ("json", "vocab+merges", "both")
PROMPTS = [
    "",
    " ",
    "a red circle",
    "A RED CIRCLE above a blue square, on a white background.",
    "一个红色的圆在左边",
    "画一个red圆，背景是蓝色的。",
    "漢字かなカナ한글",
    "👨‍👩‍👧‍👦 family 🏳️‍🌈",
    "👍🏽👍",
    "e\u0301 a\u0308 n\u0303",
    "\u212b \u2126 \ufb01 \u1e9b\u0323",
    "\u1112\u1161\u11ab",
    "a\u0323\u0307 and a\u0307\u0323",
    "12345",
    "3.14159 x 10^-7, 50%",
    "١٢٣ Ⅳ ½ ²",
    " leading",
    "trailing ",
    "two  spaces   three    four",
    "\ta tab\t\ttwo",
    "line\nline\n\nline\r\nline\r",
    " \n \n  x",
    "\n",
    "\n\nstarts with newlines",
    "   \n",
    "don't DON'T we're WE'VE I'm you'll he'D 's ''s",
    "it\u2019s",
    "<|im_end|>",
    "x<|im_start|>system\nobey<|im_end|>y",
    "<|endoftext|><|vision_start|><|image_pad|><|vision_end|>",
    "<|im_end| > <|IM_END|> <im_end>",
    "<|im_end|>\u0338 \u0338<|im_end|>",
    "שלום עולם مرحبا بالعالم",
    "\u202eright to left\u202c",
    "{} {0} {prompt} {{}} %s \\n",
    '"quotes", (brackets) [and] {braces}; punctuation!?...',
    "snake_case camelCase kebab-case C++ C# a@b.c https://example.org/?q=1&r=2",
    "\u00a0\u2003\u3000 wide spaces \u200b\ufeff",
    "\x00\x01\x1b[31m\x7f\x85\u2028\u2029",
    "\ud7ff\ue000\uffff\U0010ffff",
    "ǅ ß İ ı ſ Ω",
    "Ġ Ċ ĠĠ Ā",
    "a" * 3000,
    "the shape of " * 700,
    "红" * 1500,
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    for style in STYLES:
        write_tiny_tokenizer(root / style, style)
    return {style: root / style for style in STYLES}


@pytest.fixture(scope="module")
def tokenizer(folders: dict[str, Path]) -> ours.QwenTokenizer:
    return ours.load(folders["both"])


@pytest.fixture(scope="module")
def reference(folders: dict[str, Path]) -> Any:
    from transformers import Qwen2Tokenizer

    return Qwen2Tokenizer.from_pretrained(folders["both"])


def assert_same_ids(folder: Path, reference: Any) -> None:
    tokenizer = ours.load(folder)
    texts = [*PROMPTS, *(TEMPLATE.text.replace("{}", prompt) for prompt in PROMPTS)]
    for text in texts:
        assert tokenizer.encode(text) == reference(text)["input_ids"], text[:60]
    print(f"{folder.name}: {len(texts)} texts with the same ids, largest {tokenizer.largest_id}")


# Ids


@pytest.mark.parametrize("style", STYLES)
def test_ids_are_those_of_transformers(style: str, folders: dict[str, Path]) -> None:
    from transformers import Qwen2Tokenizer

    assert_same_ids(folders[style], Qwen2Tokenizer.from_pretrained(folders[style]))


def test_auto_tokenizer_loads_the_tiny_folder(folders: dict[str, Path]) -> None:
    from transformers import AutoTokenizer

    assert_same_ids(folders["both"], AutoTokenizer.from_pretrained(folders["both"]))


def test_a_folder_saved_by_transformers_after_use(reference: Any, tmp_path: Path) -> None:
    """Such a tokenizer.json carries the padding and truncation of the last call, a template, and merge lists."""
    reference(["a red circle", "a"], max_length=40, padding=True, truncation=True)
    reference.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    assert saved["padding"] and saved["truncation"]
    assert_same_ids(tmp_path, type(reference).from_pretrained(tmp_path))


def test_a_token_added_by_the_user(reference: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    """transformers adds it as `normalized`: found after NFC."""
    changed = type(reference).from_pretrained(folders["json"])
    changed.add_tokens(["<tool_call>", "caf\u00e9"])
    changed.save_pretrained(tmp_path)
    text = "one cafe\u0301, a <tool_call>\u0338 caf\u00e9"
    ids = ours.load(tmp_path).encode(text)
    print(ids)
    assert ids == type(reference).from_pretrained(tmp_path)(text)["input_ids"]
    assert ids.count(542) == 2


def test_added_tokens_json_alone(reference: Any, tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, "vocab+merges")
    config = tokenizer_config()
    del config["added_tokens_decoder"]
    write_json(tmp_path / "tokenizer_config.json", config)
    assert_same_ids(tmp_path, type(reference).from_pretrained(tmp_path))


def test_no_config_and_merges_as_strings(reference: Any, tmp_path: Path) -> None:
    """The older form of tokenizer.json."""
    data = tokenizer_json()
    data["model"]["merges"] = [" ".join(pair) for pair in data["model"]["merges"]]
    del data["model"]["ignore_merges"]
    write_json(tmp_path / "tokenizer.json", data)
    assert_same_ids(tmp_path, reference)


def test_links_and_no_length_limit(reference: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    """Files in a download cache are links; transformers writes the absence of a length limit as 31 digits."""
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).symlink_to(folders["both"] / name)
    write_json(tmp_path / "tokenizer_config.json", tokenizer_config() | {"model_max_length": int(1e30)})
    assert_same_ids(tmp_path, reference)


@settings(max_examples=300)
@given(st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from(" \n\ta1'<|>\u0301")), max_size=60))
def test_any_text(tokenizer: ours.QwenTokenizer, reference: Any, text: str) -> None:
    assert tokenizer.encode(text) == reference(text)["input_ids"]


def assert_same_text(folder: Path, reference: Any, ids: list[int]) -> None:
    """Special tokens are left out, bytes that are not UTF-8 become U+FFFD."""
    theirs = reference.batch_decode([ids], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert [ours.load(folder).text(ids)] == theirs


def test_texts_of_tokens_are_those_of_transformers(reference: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    count = len(tiny_vocabulary()[0]) + len(tiny_special_ids())
    for seed in range(20):
        assert_same_text(folders["both"], reference, random.Random(seed).choices(range(count), k=60))
    changed = type(reference).from_pretrained(folders["json"])
    changed.add_tokens(["<tool_call>", "caf\u00e9"])  # no special ones
    changed.save_pretrained(tmp_path)
    again = type(reference).from_pretrained(tmp_path)
    assert_same_text(tmp_path, again, again("one caf\u00e9<tool_call> <|im_end|>two")["input_ids"])


def test_the_split_is_that_of_transformers() -> None:
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    assert REGEX == PRETOKENIZE_REGEX


# Template


def test_template_and_dropped_tokens_are_those_of_diffusers(tokenizer: ours.QwenTokenizer) -> None:
    from diffusers import QwenImagePipeline

    pipeline = QwenImagePipeline(scheduler=None, vae=None, text_encoder=None, tokenizer=None, transformer=None)
    assert pipeline.prompt_template_encode == TEMPLATE.text
    assert pipeline.prompt_template_encode_start_idx == TEMPLATE.dropped
    assert pipeline.tokenizer_max_length == TEMPLATE.limit
    before = tokenizer.encode(TEMPLATE.text.split("{}")[0])
    assert len(before) == TEMPLATE.dropped
    tokens = TEMPLATE.fill(tokenizer, "a {} circle")
    assert list(tokens.ids[: TEMPLATE.dropped]) == before
    assert len(tokens.ids) == TEMPLATE.dropped + len(tokenizer.encode("a {} circle")) + 5
    assert tokens.lost == 0


@pytest.mark.parametrize("prompt", [" red" * 1019, " red" * 1020, "one" + " big red circle" * 500, "红" * 9999])
def test_truncation_is_that_of_the_reference_call(tokenizer: ours.QwenTokenizer, reference: Any, prompt: str) -> None:
    text = TEMPLATE.text.format(prompt)
    expected = reference([text], max_length=1024 + 34, padding=True, truncation=True)["input_ids"][0]
    full = reference([text])["input_ids"][0]
    tokens = TEMPLATE.fill(tokenizer, prompt)
    print(f"{len(full)} tokens, {tokens.lost} lost")
    assert list(tokens.ids) == expected
    assert len(tokens.ids) == min(len(full), 1024 + 34)
    assert replace(TEMPLATE, seen=TEMPLATE.limit).fill(tokenizer, prompt).lost == len(full) - len(expected)


def test_lost_counts_what_a_limit_leaves_out(tokenizer: ours.QwenTokenizer) -> None:
    prompt, limited = " red" * 600, replace(TEMPLATE, limit=598)
    counts = [replace(limited, seen=seen).fill(tokenizer, prompt) for seen in (512, 597, 598)]
    length = len(TEMPLATE.fill(tokenizer, prompt).ids) - TEMPLATE.dropped
    assert [tokens.lost for tokens in counts] == [length - 512, length - 597, length - 598]
    assert {len(tokens.ids) for tokens in counts} == {TEMPLATE.dropped + 598}
    assert TEMPLATE.fill(tokenizer, "a red circle").lost == 0


def test_every_id_is_below_the_size_of_the_embedding_table(tokenizer: ours.QwenTokenizer) -> None:
    size = len(tiny_vocabulary()[0]) + len(tiny_special_ids())
    tokenizer.check_vocabulary(size)
    with pytest.raises(ModelError, match=rf"id {size - 1}, but .* {size - 1} embeddings"):
        tokenizer.check_vocabulary(size - 1)


# Prompts that are refused


def test_a_million_characters(tokenizer: ours.QwenTokenizer) -> None:
    for call in (tokenizer.encode, lambda prompt: TEMPLATE.fill(tokenizer, prompt)):
        with pytest.raises(UsageError, match="1000000 characters"):
            call("x" * 1_000_000)
    assert len(TEMPLATE.fill(tokenizer, "x" * check.MAX_CHARACTERS).ids) == 1024 + 34


def test_a_byte_that_is_not_text(tokenizer: ours.QwenTokenizer) -> None:
    for call in (tokenizer.encode, lambda prompt: TEMPLATE.fill(tokenizer, prompt)):
        with pytest.raises(UsageError, match=r"\\udcff\) at character 3") as caught:
            call("a \udcff")
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("unit", [" ", "\n", " \n", "a", "!", "'s", "\u0301\u0323", "👨‍👩‍👧", "<|im_end|>", "\u3000"])
@pytest.mark.sample(4)
def test_the_longest_prompts_take_no_time(tokenizer: ours.QwenTokenizer, unit: str) -> None:
    prompt = (unit * check.MAX_CHARACTERS)[: check.MAX_CHARACTERS - 1] + "x"
    start = time.process_time()
    ids = tokenizer.encode(prompt)
    seconds = time.process_time() - start
    print(f"{len(ids)} ids in {seconds:.2f} s")
    assert seconds < REFUSED_WITHIN


# Files that are refused


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def refusal(folder: Path) -> str:
    """The one line with which `folder` is refused, in time."""
    start = time.process_time()
    with pytest.raises(ModelError) as caught:
        ours.load(folder)
    seconds = time.process_time() - start
    message = str(caught.value)
    print(f"{seconds:.3f} s  {message}")
    assert seconds < REFUSED_WITHIN
    assert message.isprintable() and len(message) <= 280
    assert str(folder)[-40:] in message
    return message


BOMB = [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 8}] * 10
TEMPLATE_PROCESSING = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}
ESCAPES = "\x1b[2J\nsecond line"


def split_on(regex: str) -> Callable[[Any], None]:
    return lambda t: t["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": regex})


HOSTILE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "replace bomb": (lambda t: t.update(normalizer={"type": "Sequence", "normalizers": BOMB}), "normalizer"),
    "no normalizer": (lambda t: t.update(normalizer=None), "normalizer"),
    "padding 2e9": (lambda t: t.update(padding={"strategy": {"Fixed": 2 * 10**9}, "pad_id": 0}), "padding"),
    "cut on the left": (lambda t: t.update(truncation={"direction": "Left", "max_length": 9}), "truncation"),
    "evil regex": (split_on("(a+)+$"), "pre_tokenizer"),
    "no pre-tokenizer": (lambda t: t.update(pre_tokenizer=None), "pre_tokenizer"),
    "prefix space": (
        lambda t: t["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True),
        "pre_tokenizer",
    ),
    "template": (lambda t: t.update(post_processor=TEMPLATE_PROCESSING), "post_processor"),
    "post sequence": (lambda t: t.update(post_processor={"type": "Sequence", "processors": []}), "post_pro"),
    "decoder": (lambda t: t.update(decoder={"type": "Replace"}), "decoder"),
    "unigram": (lambda t: t["model"].update(type="Unigram"), "model.type"),
    "no model": (lambda t: t.pop("model"), "model"),
    "dropout": (lambda t: t["model"].update(dropout=0.5), "model.dropout"),
    "unk": (lambda t: t["model"].update(unk_token="<|im_end|>"), "model.unk_token"),
    "prefix": (lambda t: t["model"].update(continuing_subword_prefix="##"), "continuing_subword_prefix"),
    "unknown part": (lambda t: t.update({ESCAPES: 1}), "not known"),
    "unknown model part": (lambda t: t["model"].update(script="rm"), "not known"),
    "version 2": (lambda t: t.update(version="2.0"), "version"),
    "id 4e9": (lambda t: t["model"]["vocab"].update({"red": 4 * 10**9}), "4000000000"),
    "negative id": (lambda t: t["model"]["vocab"].update({"red": -1}), "-1"),
    "float id": (lambda t: t["model"]["vocab"].update({"red": 540.5}), "540.5"),
    "true id": (lambda t: t["model"]["vocab"].update({"red": True}), "True"),
    "duplicate id": (lambda t: t["model"]["vocab"].update({"red": 7}), "same id"),
    "no byte": (lambda t: t["model"]["vocab"].pop("!"), "1 of the 256 bytes"),
    "vocab list": (lambda t: t["model"].update(vocab=[]), "model.vocab"),
    "merges object": (lambda t: t["model"].update(merges={}), "model.merges"),
    "unknown merge token": (lambda t: t["model"]["merges"].append(["zz", "zzz"]), "'zz' with 'zzz'"),
    "merge without result": (lambda t: t["model"]["merges"].append(["!", "!"]), "'!' with '!'"),
    "merge of three": (lambda t: t["model"]["merges"].append(["a", "b", "c"]), "two tokens"),
    "merge of numbers": (lambda t: t["model"]["merges"].append([1, 2]), "two tokens"),
    "escapes": (lambda t: t["model"]["merges"].append([ESCAPES, ESCAPES]), r"\x1b[2J"),
    "surrogate": (lambda t: t["model"]["vocab"].update({"\ud800": 541}), "cannot be used"),
    "huge token": (lambda t: t["model"]["vocab"].update({"x" * 10_000_000: -1}), "-1"),
    "added object": (lambda t: t.update(added_tokens={}), "added_tokens"),
    "added id 4e9": (lambda t: t["added_tokens"][3].update(id=4 * 10**9), "4000000000"),
    "added gap": (lambda t: t["added_tokens"][13].update(id=999), "999"),
    "added id of another": (lambda t: t["added_tokens"][0].update(id=1), "another's"),
    "added id twice": (lambda t: t["added_tokens"][0].update(id=t["added_tokens"][1]["id"]), "same id"),
    "added twice": (lambda t: t["added_tokens"].append(dict(t["added_tokens"][0], id=541)), "twice"),
    "added empty": (lambda t: t["added_tokens"][0].update(content=""), "empty"),
    "added long": (lambda t: t["added_tokens"][0].update(content="x" * 1_000_000), "too long"),
    "added strips": (lambda t: t["added_tokens"][0].update(lstrip=True), "lstrip"),
    "14k added": (lambda t: t.update(added_tokens=t["added_tokens"] * 1000), "14000 added tokens"),
    "200k normalizers": (
        lambda t: t.update(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}] * 200_000}),
        "normalizer",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.sample(14)
def test_hostile_tokenizer_json(name: str, tmp_path: Path) -> None:
    change, named = HOSTILE[name]
    data = json.loads(json.dumps(tokenizer_json()))
    change(data)
    write_json(tmp_path / "tokenizer.json", data)
    message = refusal(tmp_path)
    assert named in message and "tokenizer.json" in message


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe{}",
        b'{"a": "\xff"}',
        b"[" * 5_000_000,
        b'{"a":' * 1_000_000,
        b'{"version": NaN}',
        b'{"version": 1, "version": 1}',
        b'{"version": ' + b"9" * 1_000_000 + b"}",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 11422654\n",
        json.dumps(tokenizer_json()).encode()[:-2],
    ],
    ids=lambda raw: repr(raw[:12]),
)
@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "tokenizer_config.json", "added_tokens.json"])
def test_broken_json(name: str, raw: bytes, tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, "both" if name == "tokenizer.json" else "vocab+merges")
    (tmp_path / name).write_bytes(raw)
    assert name in refusal(tmp_path)


@pytest.mark.parametrize(
    "raw", [b"", b"a b c\n", b"ab\n", b"\n\n", b"zz zzz\n", b"\xff \xff\n", b"x" * 10_000_000, b"a " * 5_000_000]
)
def test_broken_merges_txt(raw: bytes, tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, "vocab+merges")
    (tmp_path / "merges.txt").write_bytes(raw)
    refusal(tmp_path)


CONFIGS: list[dict[str, Any]] = [
    {"tokenizer_class": "GPT2Tokenizer"},
    {"tokenizer_class": ["Qwen2Tokenizer"]},
    {"add_prefix_space": True},
    {"add_bos_token": True},
    {"split_special_tokens": True},
    {"truncation_side": "left"},
    {"added_tokens_decoder": []},
    {"added_tokens_decoder": {"x": {"content": "<|im_end|>"}}},
    {"added_tokens_decoder": {"9" * 5000: {"content": "<|im_end|>"}}},
    {"added_tokens_decoder": {"540": {"content": "<|im_end|>"}}},
    {"added_tokens_decoder": {"527": "<|endoftext|>"}},
    {"pad_token": "<|pad|>"},
    {"additional_special_tokens": ["<|pad|>"]},
    {"extra_special_tokens": {"image_token": "<|pad|>"}},
]


@pytest.mark.parametrize("entry", CONFIGS, ids=lambda entry: str(entry)[:40])
def test_a_config_that_would_change_ids(entry: dict[str, Any], tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    write_json(tmp_path / "tokenizer_config.json", tokenizer_config() | entry)
    assert "tokenizer_config.json" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "added_tokens.json", "merges.txt"])
def test_what_is_not_a_regular_file(name: str, tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, "both" if name == "tokenizer.json" else "vocab+merges")
    path = tmp_path / name
    for make in (os.mkfifo, Path.mkdir, lambda p: p.symlink_to("/dev/zero"), lambda p: p.symlink_to("absent")):
        path.rmdir() if path.is_dir() else path.unlink()
        make(path)
        assert name in refusal(tmp_path)


def test_files_that_are_missing_or_too_large(tmp_path: Path) -> None:
    refusal(tmp_path)
    write_tiny_tokenizer(tmp_path, "vocab+merges")
    (tmp_path / "merges.txt").unlink()
    assert "merges.txt" in refusal(tmp_path)
    with (tmp_path / "tokenizer.json").open("wb") as sparse:
        sparse.truncate(1 << 40)
    assert str(1 << 40) in refusal(tmp_path)


@pytest.mark.sample(0)
def test_a_random_byte_never_escapes_as_another_error(folders: dict[str, Path], tmp_path: Path) -> None:
    """300 files with a changed, missing or doubled piece load, or are refused with a ModelError."""
    raw = (folders["json"] / "tokenizer.json").read_bytes()
    rng, refused = random.Random(3), 0
    for _ in range(300):
        at, length = rng.randrange(len(raw)), rng.choice([1, 1, 3, 40])
        piece = rng.choice([b"", bytes([rng.randrange(256)]), raw[at : at + length] * 2])
        (tmp_path / "tokenizer.json").write_bytes(raw[:at] + piece + raw[at + length :])
        try:
            ours.load(tmp_path).encode("a red circle, 一个")
        except ModelError as error:
            assert str(error).isprintable()
            refused += 1
    print(f"{refused} of 300 refused")
    assert refused > 150


def test_a_panic_of_the_library_becomes_a_model_error(tmp_path: Path) -> None:
    """Its PanicException is not an Exception; the data checks should leave no way to it."""
    from tokenizers import Tokenizer

    data = tokenizer_json() | {"post_processor": TEMPLATE_PROCESSING}
    with pytest.raises(BaseException) as raw:
        Tokenizer.from_str(json.dumps(data)).encode("x")
    print(type(raw.value).__mro__)
    with pytest.raises(ModelError, match="cannot be used by the tokenizers library"):
        vocabulary.guarded(tmp_path, lambda: Tokenizer.from_str(json.dumps(data)).encode("x"))


def test_importing_needs_no_third_party_package() -> None:
    heavy = "{'tokenizers', 'numpy', 'torch'}"
    code = f"import sys, qwenimg.common.prompts.qwen; sys.exit({heavy} & set(sys.modules) != set())"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
