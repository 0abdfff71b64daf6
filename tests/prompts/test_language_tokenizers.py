"""Tokenizers of language models that write, against the libraries of the published ones."""

from __future__ import annotations

import json
import re
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.language_files import (
    BYTE_LEVEL,
    CODE,
    SPECIAL,
    SPELLED,
    byte_level,
    pieces,
    pieces_model,
    write_folder,
    write_gguf,
)
from support.scripts import TROUBLE, texts
from tokenizers import Tokenizer

from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.formats.headers import open_header
from qwenimg.common.prompts import chats, language
from qwenimg.common.prompts.chat import Turn
from qwenimg.common.prompts.language import LanguageTokenizer

KINDS = (*BYTE_LEVEL, "pieces")
EVERY = [text for text in (*texts(300), *TROUBLE, *CODE, *SPELLED) if text]


def of_gguf(path: Path) -> LanguageTokenizer:
    header = open_header(path)
    try:
        return language.of_gguf(header)
    finally:
        header.file.close()


def reference(name: str) -> Callable[[str], list[int]]:
    """The ids of the library itself, with special tokens as text."""
    if name == "pieces":
        import sentencepiece

        model = sentencepiece.SentencePieceProcessor(model_proto=pieces_model())
        return lambda text: [int(id) for id in model.encode(text)]
    tokenizer = Tokenizer.from_str(byte_level(name))
    tokenizer.encode_special_tokens = True
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("file", ["folder", "GGUF"])
@pytest.mark.parametrize("name", KINDS)
def test_ids_are_those_of_the_library(tmp_path: Path, name: str, file: str) -> None:
    ours = (
        language.load(write_folder(tmp_path, name)) if file == "folder" else of_gguf(write_gguf(tmp_path / "a", name))
    )
    theirs = reference(name)
    wrong = [text for text in EVERY if ours.plain(text) != theirs(text)]
    tokens = sum(len(ours.plain(text)) for text in EVERY)
    print(f"{name}: {len(EVERY)} texts, {tokens} ids, {len(wrong)} texts differ")
    assert not wrong, (ascii(wrong[0]), ours.plain(wrong[0]), theirs(wrong[0]))


@pytest.mark.parametrize("name", KINDS)
def test_a_text_never_has_a_special_token(tmp_path: Path, name: str) -> None:
    tokenizer = language.load(write_folder(tmp_path, name))
    special = {tokenizer.special(token) for token in SPECIAL[name]}
    for text in (*SPELLED, *SPECIAL[name], "".join(SPECIAL[name])):
        ids = tokenizer.plain(text)
        assert special.isdisjoint(ids)
        assert tokenizer.text(ids) == text
        assert name != "pieces" or 13 not in ids or "\n" in text  # <0x0A> is no byte
    assert tokenizer.text(sorted(special)) == ""


@pytest.mark.parametrize("name", KINDS)
def test_text_comes_back_also_token_by_token(tmp_path: Path, name: str) -> None:
    """A token may end inside a character: its bytes are U+FFFD until the next one comes."""
    tokenizer, parts = language.load(write_folder(tmp_path, name)), 0
    for text in EVERY:
        ids = tokenizer.plain(text)
        whole = tokenizer.text(ids)
        if "\u2581" not in text:
            assert whole == (unicodedata.normalize("NFC", text) if name == "qwen2" else text)
        shown = [tokenizer.text(ids[: i + 1]) for i in range(len(ids))]
        if "\ufffd" not in text:
            parts += any("\ufffd" in part for part in shown)
            assert all(whole.startswith(part.rstrip("\ufffd")) for part in shown)
    print(f"{name}: {parts} texts with a token that ends inside a character")
    assert parts > 10


def test_a_prompt_is_checked_and_a_long_one_takes_no_time(tmp_path: Path) -> None:
    for name in ("llama-bpe", "pieces"):
        tokenizer = language.load(write_folder(tmp_path / name, name))
        with pytest.raises(UsageError, match="1000000 characters"):
            tokenizer.encode(10**6 * "a")
        for unit in ("a", " ", "\n", "ка ло", "</s>"):
            start = time.process_time()
            tokenizer.encode((100_000 // len(unit)) * unit)
            assert time.process_time() - start < 5


# Files


def _other(change: Callable[[dict[str, Any]], object], folder: Path, name: str = "llama-bpe") -> str:
    data = json.loads(byte_level(name))
    change(data)
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ModelError) as error:
        language.load(folder)
    message = str(error.value)
    assert "\n" not in message and "tokenizer.json" in message and len(message) < 400
    return message


def test_other_files_are_refused_in_one_line(tmp_path: Path) -> None:
    bert = {"type": "BertPreTokenizer"}
    evil = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    assert "pre_tokenizer" in _other(lambda data: data.update(pre_tokenizer=bert), tmp_path)
    assert "pre_tokenizer" in _other(lambda data: data["pre_tokenizer"]["pretokenizers"].insert(0, evil), tmp_path)
    assert "pre_tokenizer" in _other(lambda data: data.update(normalizer={"type": "Lowercase"}), tmp_path)
    assert "dropout" in _other(lambda data: data["model"].update(dropout=0.5), tmp_path)
    assert "256 bytes" in _other(lambda data: data["model"]["vocab"].pop("a"), tmp_path)
    assert "id" in _other(lambda data: data["model"]["vocab"].update(a=-1), tmp_path)
    assert "merge" in _other(lambda data: data["model"]["merges"].append("a b c"), tmp_path)
    assert "another's" in _other(lambda data: data["added_tokens"][0].update(id=300), tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="holds no tokenizer"):
        language.load(tmp_path)


def test_unknown_splittings_of_gguf_files_are_refused(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    def written(model: str, pre: str, *, tokens: bool = True) -> Path:
        writer = GGUFWriter(tmp_path / "a.gguf", "llama")
        writer.add_tokenizer_model(model)
        writer.add_tokenizer_pre(pre)
        if tokens:
            texts, scores, types = pieces()
            writer.add_token_list(texts)
            writer.add_token_scores(scores)
            writer.add_token_types(types)
            writer.add_token_merges(["a b"])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / "a.gguf"

    for path, reason in (
        (lambda: written("gpt2", "falcon"), "'falcon'"),
        (lambda: written("t5", "default"), "'t5'"),
        (lambda: written("llama", "default", tokens=False), "has no tokenizer"),
    ):
        with pytest.raises(ModelError, match=reason):
            of_gguf(path())


# Chat templates


# As the published templates write them
CHATS = {
    "smollm": (
        "llama",
        "ChatML",
        "<|im_start|>system\n{S}<|im_end|>\n<|im_start|>user\n{U}<|im_end|>\n<|im_start|>assistant\n",
    ),
    "llama-bpe": (
        "llama",
        "LLaMA 3",
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n{S}<|eot_id|><|start_header_id|>user"
        "<|end_header_id|>\n\n{U}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "tekken": ("mistral", "Mistral with an instruction", "<s>[SYSTEM_PROMPT]{S}[/SYSTEM_PROMPT][INST]{U}[/INST]"),
    "pieces": ("llama", "LLaMA 2", "<s> [INST] <<SYS>>\n{S}\n<</SYS>>\n\n{U} [/INST]"),
}


EARLIER = {
    "smollm": "{U}<|im_end|>\n<|im_start|>assistant\n{A}<|im_end|>\n<|im_start|>user\n",
    "llama-bpe": "{U}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n{A}<|eot_id|><|start_header_id|>user"
    "<|end_header_id|>\n\n",
    "tekken": "{U}[/INST]{A}</s>[INST]",
    "pieces": "{U} [/INST] {A} </s><s> [INST] ",
}


def filled(name: str, tokenizer: LanguageTokenizer, text: str) -> list[int]:
    """The ids of a text in which special tokens are spelled, by the library alone."""
    parts = re.split("(" + "|".join(map(re.escape, SPECIAL[name])) + ")", text)
    ids = [[tokenizer.special(part)] if i % 2 else reference(name)(part) for i, part in enumerate(parts)]
    return [id for part in ids for id in part]


@pytest.mark.parametrize("name", CHATS)
def test_chat_templates(tmp_path: Path, name: str) -> None:
    """Markers in a question stay text: it has as many special tokens as any other."""
    kind, title, text = CHATS[name]
    tokenizer = language.load(write_folder(tmp_path, name))
    found = chats.find_chat(kind, tokenizer)
    assert found.name == title
    ids = found.ids(tokenizer, "Kalo!", "mire lo")[0]
    assert ids == filled(name, tokenizer, text.format(S="Kalo!", U="mire lo"))
    opening = found.opening(tokenizer, "Kalo!")
    assert len(opening) > 3 and ids[: len(opening)] == opening
    turns = [Turn("rike", "somo."), Turn("dule?", "ama!")]
    questions = "".join(EARLIER[name].format(U=turn.question, A=turn.answer) for turn in turns) + "mire lo"
    later = found.ids(tokenizer, "Kalo!", "mire lo", earlier=turns)[0]
    assert later == filled(name, tokenizer, text.format(S="Kalo!", U=questions)) and later[: len(opening)] == opening
    assert found.stop_ids(tokenizer)
    special = {tokenizer.special(token) for token in SPECIAL[name]}
    typed = found.ids(tokenizer, "Kalo!", "".join((*SPELLED, *SPECIAL[name])))[0]
    assert [id for id in typed if id in special] == [id for id in ids if id in special]


def test_a_model_that_does_not_chat_is_refused(tmp_path: Path) -> None:
    tokenizer = language.load(write_folder(tmp_path, "gpt-2"))
    with pytest.raises(ModelError, match="no known chat template"):
        chats.find_chat("llama", tokenizer)
