"""The added tokens of a Qwen2 tokenizer, such as `<|im_start|>`: matched in a text before it is split.

They are in up to three files. As in transformers, tokenizer_config.json is preferred to tokenizer.json and
added_tokens.json.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwenimg.common.base.text import clean
from qwenimg.common.prompts.vocabulary import Vocabulary, check_ids, json_object, refuse, refuse_value, shown

MAX_ADDED = 1024
MAX_LENGTH = 256  # characters

# The entries of tokenizer_config.json that would change ids, with the values that do not.
_CONFIG: dict[str, tuple[object, ...]] = {
    "tokenizer_class": (
        None,
        "Qwen2Tokenizer",
        "Qwen2TokenizerFast",
        "PreTrainedTokenizerFast",
        "TokenizersBackend",
    ),
    "add_prefix_space": (None, False),
    "add_bos_token": (None, False),
    "add_eos_token": (None, False),
    "split_special_tokens": (None, False),
    "truncation_side": (None, "right"),
}


@dataclass(frozen=True)
class Added:
    """An added token. `normalized`: it is matched in the text after NFC, not before as each of added_tokens.json.
    `special`: it is no word, and left out of a text."""

    id: int
    normalized: bool
    special: bool = True


def read_added(folder: Path, vocabulary: Vocabulary) -> dict[str, Added]:
    """Read the added tokens of `folder` by their content: from tokenizer_config.json if it lists any, else from
    tokenizer.json and added_tokens.json. Raises ModelError if files are broken, disagree, or are not of Qwen's form."""
    file = folder / "tokenizer_config.json"
    config = _json_if_there(file)
    for name, values in _CONFIG.items():
        if config.get(name) not in values:
            refuse_value(file, name, config[name])
    added = _added_tokens_json(folder / "added_tokens.json") | _tokenizer_json(vocabulary)
    if config.get("added_tokens_decoder") is not None:
        listed = _decoder(file, config["added_tokens_decoder"])
        for content in listed.keys() & added.keys():
            if listed[content].id != added[content].id:
                refuse(file, f"gives '{clean(content, 40)}' another id than the other tokenizer files")
        added = listed
    for content in _named(config):
        if content not in added:
            refuse(file, f"names a special token '{clean(content, 40)}' that is not an added token")
    _check_new(vocabulary, added)
    return added


def _json_if_there(file: Path) -> dict[str, Any]:
    return json_object(file) if os.path.lexists(file) else {}


def _tokenizer_json(vocabulary: Vocabulary) -> dict[str, Added]:
    return checked_entries(vocabulary.file, vocabulary.added_entries)


def checked_entries(
    file: Path, entries: Sequence[Any], most: int = MAX_ADDED, *, in_texts: bool = True
) -> dict[str, Added]:
    """Return the added tokens of a tokenizer.json, at most `most`. in_texts: they are found in texts, so that none may
    remove text around it. Raises ModelError."""
    ids = [entry.get("id") if isinstance(entry, dict) else None for entry in entries]
    return _added(file, list(zip(entries, ids, strict=True)), most, in_texts)


def _added_tokens_json(file: Path) -> dict[str, Added]:
    return _added(file, [({"content": content}, i) for content, i in _json_if_there(file).items()])


def _decoder(file: Path, decoder: Any) -> dict[str, Added]:
    if not isinstance(decoder, dict) or not all(i.isdecimal() and len(i) < 10 for i in decoder):
        refuse(file, "must have an object with ids as keys for added_tokens_decoder")
    return _added(file, [(entry, int(i)) for i, entry in decoder.items()])


def _added(
    file: Path, entries: list[tuple[Any, Any]], most: int = MAX_ADDED, in_texts: bool = True
) -> dict[str, Added]:
    """Return the added tokens of (entry, id) pairs. Raise ModelError for options that remove text around a token that
    is found in texts."""
    if len(entries) > most:
        refuse(file, f"has {len(entries)} added tokens, at most {most} are read")
    added: dict[str, Added] = {}
    for entry, i in entries:
        content = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(content, str) or not 0 < len(content) <= MAX_LENGTH or content in added:
            refuse(file, f"has an added token that is twice there, empty or too long ({shown(content)})")
        if in_texts and any(entry.get(option, False) is not False for option in ("lstrip", "rstrip", "single_word")):
            refuse(file, f"has lstrip, rstrip or single_word at the added token '{clean(content, 40)}'")
        added[content] = Added(i, entry.get("normalized") is True, entry.get("special") is not False)
    check_ids(file, {content: token.id for content, token in added.items()})
    return added


def _named(config: dict[str, Any]) -> list[str]:
    """Return the special tokens that tokenizer_config.json names: eos_token and its like, and the extra ones."""
    values = [value for name, value in config.items() if name.endswith("_token")]
    for name in ("additional_special_tokens", "extra_special_tokens"):
        extra = config.get(name)
        values += extra.values() if isinstance(extra, dict) else extra if isinstance(extra, list) else []
    contents = [value.get("content") if isinstance(value, dict) else value for value in values]
    return [content for content in contents if isinstance(content, str)]


def _check_new(vocabulary: Vocabulary, added: dict[str, Added]) -> None:
    """Check that each added token has its id in the vocabulary, or one that no other token has. Raise ModelError."""
    used = set(vocabulary.ids.values())
    for content, token in added.items():
        if vocabulary.ids.get(content, None if token.id in used else token.id) != token.id:
            refuse(vocabulary.file, f"the id {token.id} of the added token '{clean(content, 40)}' is another's")
