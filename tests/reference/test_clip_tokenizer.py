"""CLIP's tokenizer against transformers, and where it is looked for."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.refusals import refused
from support.tiny_clip import BOS, EOS, tiny_clip_vocabulary, write_tiny_clip_tokenizer

from qwenimg.common.base.errors import UsageError
from qwenimg.common.prompts import clip
from qwenimg.common.prompts.clip import load

PROMPTS = [
    "",
    " ",
    "a photo of an astronaut riding a horse",
    "A PHOTO of a Red Circle!!",
    "  leading, trailing  and   many\n\n\tblanks \u00a0\u3000 ",
    "don't 's I'LL we're 'S ''s it\u2019s",
    "1234 3.14159 ١٢٣ Ⅳ ½ ²",
    "红色 一个红色的圆 漢字かなカナ한글",
    "👍 👨\u200d👩\u200d👧\u200d👦 🏳️\u200d🌈 👍🏽",
    "e\u0301 é E\u0301 \u212b \ufb01 İ ẞ ß ǅ Ω",
    "<|startoftext|>x<|endoftext|> y <|ENDOFTEXT|> <|endoftext|",
    "(brackets:1.2) [and] {braces}; \\ / | ~ ` punctuation!?...!!!",
    "! !! !!! dog! !cat",
    "snake_case a@b.c https://example.org/?q=1&r=2 C++",
    "שלום مرحبا \u202eleft\u202c \u200b\ufeff",
    "\x00\x01\x1b[31m\x7f\x85\u2028\u2029",
    "\ud7ff\ue000\uffff\U0010ffff",
    "a" * 3000,
    "red circle, " * 300,
]
LAYOUTS = ("files", "files, pad !", "saved", "saved, pad !", "no configuration", "decoder")


def lay(folder: Path, layout: str) -> None:
    """The tokenizer as it is found: published files, what transformers saves, and files with nothing beside them."""
    from transformers import CLIPTokenizer

    source = folder.parent / f"{folder.name}-source"
    write_tiny_clip_tokenizer(source, pad="!" if "!" in layout else EOS)
    if layout.startswith("saved"):
        CLIPTokenizer.from_pretrained(source).save_pretrained(folder)
        return
    source.rename(folder)
    if layout == "no configuration":
        (folder / "tokenizer_config.json").unlink()
        (folder / "special_tokens_map.json").unlink()
    if layout == "decoder":
        ids = tiny_clip_vocabulary()[0]
        decoder = {str(ids[c]): option(c) for c in (BOS, EOS)}
        change(folder / "tokenizer_config.json", lambda config: config.update(added_tokens_decoder=decoder))


def option(content: str) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {"content": content, **flags}


def change(file: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(file.read_text(encoding="utf-8"))
    edit(data)
    file.write_text(json.dumps(data), encoding="utf-8")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ids_of_transformers(tmp_path: Path, layout: str) -> None:
    from transformers import CLIPTokenizer

    folder = tmp_path / "tokenizer"
    lay(folder, layout)
    theirs, ours = CLIPTokenizer.from_pretrained(folder), load(folder)
    assert (ours.bos, ours.eos, ours.pad) == (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id)
    for prompt in PROMPTS:
        assert [ours.bos, *ours.words(prompt), ours.eos] == theirs(prompt).input_ids, prompt
    ours.check_vocabulary(len(tiny_clip_vocabulary()[0]))


def test_another_padding_token(tmp_path: Path) -> None:
    """The vocabulary of ViT-L's folder serves an OpenCLIP encoder."""
    from transformers import CLIPTokenizer

    for name, pad in (("vit-l", EOS), ("open-clip", "!")):
        write_tiny_clip_tokenizer(tmp_path / name, pad)
    theirs = CLIPTokenizer.from_pretrained(tmp_path / "open-clip")
    ours = load(tmp_path / "vit-l", pad=clip.OPEN_CLIP_PAD)
    assert ours.pad == theirs.pad_token_id != load(tmp_path / "vit-l").pad
    for prompt in PROMPTS:
        assert [ours.bos, *ours.words(prompt), ours.eos] == theirs(prompt).input_ids


def test_long_and_broken_prompts(tmp_path: Path) -> None:
    write_tiny_clip_tokenizer(tmp_path)
    tokenizer = load(tmp_path)
    start = time.process_time()
    for text in ("a" * 100_000, "<|" * 50_000, "red " * 25_000, "'" * 100_000, "\u0301" * 100_000):
        assert tokenizer.words(text)
    seconds = time.process_time() - start
    print(f"five prompts of 100,000 characters: {seconds:.2f} s")
    assert seconds < 5
    for prompt in ("a" * 100_001, "\udcff"):
        with pytest.raises(UsageError):
            tokenizer.words(prompt)


# Bad files


def drop_byte(folder: Path) -> None:
    change(folder / "vocab.json", lambda vocab: vocab.pop("Ġ</w>"))


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: change(folder / "tokenizer_config.json", lambda data: data.update(changes))


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no vocabulary": (lambda folder: (folder / "vocab.json").unlink(), "vocab.json"),
    "no merges": (lambda folder: (folder / "merges.txt").unlink(), "merges.txt"),
    "vocabulary is a list": (lambda folder: (folder / "vocab.json").write_text("[]"), "object"),
    "vocabulary is cut off": (lambda folder: (folder / "vocab.json").write_text('{"a": 1'), "JSON"),
    "ids are text": (lambda folder: change(folder / "vocab.json", lambda v: v.update(a="1")), "'a'"),
    "two tokens with one id": (lambda folder: change(folder / "vocab.json", lambda v: v.update(a=5)), "same id"),
    "a byte is missing": (drop_byte, "256 bytes"),
    "no end token": (lambda folder: change(folder / "vocab.json", lambda v: v.pop(EOS)), "endoftext"),
    "merge of three": (lambda folder: (folder / "merges.txt").write_text("a b c\n"), "merge"),
    "merge into nothing": (lambda folder: (folder / "merges.txt").write_text("Ġ Ġ\n"), "merge"),
    "another class": (config(tokenizer_class="T5Tokenizer"), "T5Tokenizer"),
    "unknown padding": (config(pad_token="<pad>"), "<pad>"),
    "padding is a number": (config(pad_token=3), "special token"),
    "strips": (config(eos_token=option(EOS) | {"lstrip": True}), "lstrip"),
    "another token": (config(added_tokens_decoder={"9999": option("<cat-toy>")}), "<cat-toy>"),
    "added_tokens.json": (lambda f: (f / "added_tokens.json").write_text('{"<dog-toy>": 9999}'), "<dog-toy>"),
    "decoder is a list": (config(added_tokens_decoder=[1]), "added_tokens_decoder"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_files(tmp_path: Path, fault: str) -> None:
    write_tiny_clip_tokenizer(tmp_path)
    break_it, named = FAULTS[fault]
    break_it(tmp_path)
    assert named in refused(load, tmp_path)


@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer", "model.end_of_word_suffix", "decoder", "new"])
def test_a_tokenizer_json_of_another_form(tmp_path: Path, part: str) -> None:
    lay(tmp_path / "tokenizer", "saved")
    file = tmp_path / "tokenizer" / "tokenizer.json"

    def edit(data: dict[str, Any]) -> None:
        if part == "model.end_of_word_suffix":
            data["model"]["end_of_word_suffix"] = ""
        else:
            data[part] = {"type": "Lowercase"}

    change(file, edit)
    assert part in refused(load, tmp_path / "tokenizer")


def test_the_embeddings_must_be_as_many(tmp_path: Path) -> None:
    write_tiny_clip_tokenizer(tmp_path)
    assert "49408 embeddings" in refused(load(tmp_path).check_vocabulary, 49408)
