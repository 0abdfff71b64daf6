"""The vocabulary of a model folder (Qwen2's, or CLIP's), read and checked as data; and checks for others.

A tokenizer.json is a program: its normalizers, regexes, templates and padding run as written, and 500 bytes
of them can take all memory or abort the process. So only vocabulary, merges and added tokens are taken from
the files, and every other part must have the form (`Form`) that the published tokenizers have.

As in transformers, tokenizer.json is preferred to vocab.json with merges.txt.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, TypeVar

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import bad, open_regular
from qwenimg.common.base.strict_json import strict_json
from qwenimg.common.base.text import clean

REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# One emoji makes Python keep a text with four bytes a character, so a file of 24 MiB can take 220 MB.
MAX_BYTES = {  # Qwen's largest: 11.4 MB, 2.8 MB, 1.7 MB, 1 kB, 10 kB
    "tokenizer.json": 24 << 20,
    "vocab.json": 8 << 20,
    "merges.txt": 8 << 20,
    "added_tokens.json": 1 << 20,
    "tokenizer_config.json": 4 << 20,
    "special_tokens_map.json": 1 << 20,
    "spiece.model": 8 << 20,  # T5's has 0.8 MB, mT5's 4.3 MB
    "vocab.txt": 4 << 20,  # Hunyuan-DiT's, for BERT, has 0.4 MB
    "tokenizer.model": 8 << 20,  # Gemma's has 4.2 MB
}
MAX_ID = 2**20  # Qwen's largest is 151,664
MAX_VALUES = 1_200_000  # Qwen's largest has 910,000 quotation marks: a name and a merge of two for each token
MAX_MERGES = 2**19  # Qwen's largest has 151,387
MAX_DEPTH = 64
NO_LENGTH_LIMIT = b"1000000000000000019884624838656"  # how transformers writes model_max_length = int(1e30)

_PRE_TOKENIZERS = [
    {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": REGEX}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": trim, "use_regex": False},
        ],
    }
    for trim in (False, True)
]


def has(part: Any, key: str, value: object) -> bool:
    return isinstance(part, dict) and bool(part.get(key) == value)


def _adds_no_token(part: Any) -> bool:
    """Return whether a post-processor leaves the ids unchanged: none, ByteLevel (offsets), or a template of the
    text."""
    if has(part, "type", "TemplateProcessing"):
        text_alone = [{"Sequence": {"id": "A", "type_id": 0}}]
        return has(part, "single", text_alone) and has(part, "special_tokens", {})
    return part is None or has(part, "type", "ByteLevel")


Part: TypeAlias = Callable[[Any], bool]


@dataclass(frozen=True, kw_only=True)
class Form:
    """The form of a tokenizer.json: checks of its parts, the values of its model, and the end of a word."""

    parts: Mapping[str, Part]
    model: Mapping[str, tuple[object, ...]]
    suffix: str = ""


# Padding and truncation are not used: transformers writes those of its last call into the file, so a pipeline saved
# after use has both. Those that would change ids are refused.
_QWEN_PARTS: dict[str, Part] = {
    "version": lambda part: part in (None, "1.0"),
    "truncation": lambda part: part is None or has(part, "direction", "Right"),
    "padding": lambda part: part is None or has(part, "strategy", "BatchLongest"),
    "added_tokens": lambda part: isinstance(part, list),
    "normalizer": lambda part: part == {"type": "NFC"},
    "pre_tokenizer": lambda part: part in _PRE_TOKENIZERS,
    "post_processor": _adds_no_token,
    "decoder": lambda part: part is None or has(part, "type", "ByteLevel"),
    "model": lambda part: isinstance(part, dict),
}
_QWEN_MODEL: dict[str, tuple[object, ...]] = {
    "type": ("BPE",),
    "dropout": (None,),
    "unk_token": (None,),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
    "fuse_unk": (None, False),
    "byte_fallback": (None, False),
    "ignore_merges": (None, False),
}
QWEN = Form(parts=_QWEN_PARTS, model=_QWEN_MODEL)


@dataclass(frozen=True)
class Vocabulary:
    """A checked byte-level BPE, and the entries of tokenizer.json's added tokens, which are not checked yet."""

    file: Path  # the name in errors
    ids: dict[str, int]
    merges: list[tuple[str, str]]
    added_entries: list[Any]


def read_vocabulary(folder: Path, form: Form = QWEN) -> Vocabulary:
    """Read the vocabulary in `folder`. Raises ModelError if it is missing, broken, or not of the published form."""
    file = folder / "tokenizer.json"
    if os.path.lexists(file):
        vocabulary = _tokenizer_json(file, form)
    else:
        file = folder / "vocab.json"
        vocabulary = Vocabulary(file, json_object(file), _merges_txt(folder / "merges.txt"), [])
    check_vocabulary(vocabulary, (symbol for byte in byte_symbols() for symbol in (byte, byte + form.suffix)))
    return vocabulary


def check_vocabulary(vocabulary: Vocabulary, single_bytes: Iterable[str]) -> None:
    """Check ids, merges, and that there are the tokens `single_bytes`, one or more for each byte. Raises ModelError."""
    check_ids(vocabulary.file, vocabulary.ids)
    if absent := set(single_bytes) - vocabulary.ids.keys():
        refuse(vocabulary.file, f"has no token for {len(absent)} of the 256 bytes, so parts of a prompt would vanish")
    _check_merges(vocabulary)


def refuse(file: Path, reason: str) -> NoReturn:
    """Raise ModelError with the file, the reason and what to do."""
    raise bad(file, f"{reason}; use the unchanged tokenizer folder of the model") from None


def refuse_value(file: Path, name: str, value: Any) -> NoReturn:
    """Raise ModelError for a tokenizer part that would give other ids than the published tokenizer."""
    refuse(file, f"{name} is not that of the published tokenizer ({shown(value)})")


def shown(value: Any) -> str:
    """Return a short name for an untrusted value, without walking through it."""
    if isinstance(value, dict):
        return f"an object of type {shown(value.get('type'))}"
    return f"a list of {len(value)}" if isinstance(value, list) else f"'{clean(value, 40)}'"


# Files


def read_file(file: Path, most: int | None = None) -> bytes:
    """Read all bytes of `file`, at most `most` of them, by default those of MAX_BYTES. Raises ModelError."""
    most = most or MAX_BYTES[file.name]
    opened = open_regular(file)
    try:
        if opened.size > most:
            refuse(file, f"has {opened.size} bytes, at most {most} are read")
        data = opened.read(0, opened.size)
        opened.check_unchanged()
    finally:
        opened.close()
    return data


def json_object(file: Path, most: int | None = None, values: int = MAX_VALUES) -> dict[str, Any]:
    """Read the object in a JSON file of at most `most` bytes, by default those of MAX_BYTES, and about so many
    `values`. Raises ModelError."""
    raw = read_file(file, most).replace(NO_LENGTH_LIMIT, b"null")
    value = strict_json(raw, file, depth=MAX_DEPTH, values=values)
    if not isinstance(value, dict):
        refuse(file, f"must hold a JSON object, not {shown(value)}")
    return value


def read_parts(file: Path, form: Form, data: frozenset[str]) -> dict[str, Any]:
    """Read the parts of a tokenizer.json. Raises ModelError if one is not of `form`; of the model, `data` has any."""
    parts = json_object(file)
    check_parts(file, parts, form, data)
    return parts


def check_parts(file: Path, parts: Mapping[str, Any], form: Form, data: frozenset[str]) -> None:
    """Raise ModelError if a part of a tokenizer.json is not of `form`; of the model, `data` has any."""
    for name, allowed in form.parts.items():
        if not allowed(parts.get(name)):
            refuse_value(file, name, parts.get(name))
    model = parts["model"]
    for name, values in form.model.items():
        if model.get(name) not in values:
            refuse_value(file, f"model.{name}", model.get(name))
    unknown = [*(parts.keys() - form.parts.keys()), *(model.keys() - form.model.keys() - data)]
    if unknown:
        refuse(file, f"has a part that is not known, '{clean(unknown[0], 40)}'")


def _tokenizer_json(file: Path, form: Form) -> Vocabulary:
    return vocabulary_of(file, json_object(file), form)


def vocabulary_of(file: Path, parts: Mapping[str, Any], form: Form) -> Vocabulary:
    """Return the vocabulary, which is not checked, in the parts of a tokenizer.json. Raises ModelError if one is not of
    `form`."""
    check_parts(file, parts, form, frozenset({"vocab", "merges"}))
    model = parts["model"]
    if not isinstance(model.get("vocab"), dict) or not isinstance(model.get("merges"), list):
        refuse(file, "must have model.vocab, an object, and model.merges, a list")
    merges = [pair(file, merge) for merge in model["merges"]]
    return Vocabulary(file, model["vocab"], merges, parts["added_tokens"])


def _merges_txt(file: Path) -> list[tuple[str, str]]:
    raw = read_file(file)
    if raw.count(b"\n") > MAX_MERGES:
        refuse(file, f"has more than {MAX_MERGES:,} lines")
    try:
        lines = raw.decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        refuse(file, f"is not UTF-8 at byte {error.start}")
    return [pair(file, line.removesuffix("\r")) for line in lines if not line.startswith("#version")]


def pair(file: Path, merge: Any) -> tuple[str, str]:
    """Return the two tokens of a merge. Raises ModelError."""
    parts = merge.split(" ", 2) if isinstance(merge, str) else merge
    if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, str) for part in parts):
        refuse(file, f"has a merge that is not of two tokens ({shown(merge)})")
    return parts[0], parts[1]


# Vocabulary


def byte_symbols() -> list[str]:
    """Return the characters that stand for the 256 bytes in a byte-level vocabulary, in the order of the bytes.

    In GPT-2's table, a printable byte of Latin-1 is itself, and the others are U+0100 and up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def check_ids(file: Path, ids: Mapping[str, Any]) -> None:
    """Check that the ids are different integers from 0 to MAX_ID - 1. Raises ModelError."""
    for token, i in ids.items():
        if type(i) is not int or not 0 <= i < MAX_ID:
            refuse(file, f"gives '{clean(token, 40)}' the id {shown(i)}, not an integer below {MAX_ID}")
    if len(set(ids.values())) != len(ids):
        refuse(file, "gives two tokens the same id")


def _check_merges(vocabulary: Vocabulary) -> None:
    for left, right in vocabulary.merges:
        if left not in vocabulary.ids or right not in vocabulary.ids or left + right not in vocabulary.ids:
            merge = f"'{clean(left, 40)}' with '{clean(right, 40)}'"
            refuse(vocabulary.file, f"has a merge of {merge}, for which the vocabulary lacks a token")


T = TypeVar("T")


def guarded(file: Path, call: Callable[[], T]) -> T:
    """Return `call()`. Raises ModelError for all that the tokenizers library raises, its panics (BaseException) too."""
    try:
        return call()
    except (KeyboardInterrupt, SystemExit, MemoryError, ModelError):
        raise
    except BaseException as error:
        refuse(file, f"cannot be used by the tokenizers library ({clean(error, 60)})")
