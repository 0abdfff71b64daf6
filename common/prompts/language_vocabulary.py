"""The vocabularies of language models that write, of every kind of file, checked as data.

Special tokens are no part of the BPE: no text, however it is spelled, becomes one. That holds for the byte tokens of
SentencePiece too, which only bytes become.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.text import clean
from qwenimg.common.prompts.added_tokens import Added, checked_entries, read_added
from qwenimg.common.prompts.language_forms import PIECES, SPLITTINGS, Splitting
from qwenimg.common.prompts.spiece import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER, read_typed_pieces
from qwenimg.common.prompts.unigram import SPACE
from qwenimg.common.prompts.vocabulary import (
    MAX_ID,
    Vocabulary,
    byte_symbols,
    check_vocabulary,
    has,
    json_object,
    read_vocabulary,
    refuse,
    refuse_value,
    vocabulary_of,
)

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
"""The tokens of SentencePiece's bytes."""
USED_BYTES = (*b"\t\n\r", *range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF1))
"""Bytes of texts in UTF-8. SmolLM2's vocabulary lacks some of the others: of control characters, and of planes without
letters."""
# Gemma 2's tokenizer.json has 17.5 MB, 837,000 tokens and merges, and 217 added tokens
MAX_BYTES = 40 << 20
MAX_VALUES = 4_000_000  # quotation marks
MAX_ADDED = 8192
MAX_PIECE = 256  # characters
MAX_LENGTH = 4_000_000  # characters of all pieces; Gemma 2's have 1.7 million


@dataclass(frozen=True, kw_only=True)
class LanguageVocabulary:
    """A checked vocabulary. tokens, merges: those of the BPE; special: ids of tokens that are no text, by their names;
    words: ids of others that are matched before a text is split; before: the special tokens that its file has before a
    text, which a chat template has itself."""

    file: Path
    splitting: Splitting
    tokens: dict[str, int]
    merges: list[tuple[str, str]]
    special: Mapping[str, int]
    words: Mapping[str, int]
    whole_words: bool = False
    before: tuple[str, ...] = ()


def read(folder: Path) -> LanguageVocabulary:
    """Read the vocabulary in `folder`: tokenizer.json, vocab.json with merges.txt, or tokenizer.model. Raises
    ModelError if none is there, or one is broken or of a kind that is not known."""
    if os.path.lexists(folder / "tokenizer.json"):
        return _tokenizer_json(folder / "tokenizer.json")
    if os.path.lexists(folder / "vocab.json"):
        vocabulary = read_vocabulary(folder)
        return _of_bytes(vocabulary, SPLITTINGS[0], read_added(folder, vocabulary), False)
    if os.path.lexists(folder / "tokenizer.model"):
        return of_pieces(folder / "tokenizer.model", *read_typed_pieces(folder / "tokenizer.model"))
    raise bad(folder, "holds no tokenizer (tokenizer.json, vocab.json with merges.txt, or tokenizer.model)")


def of_llama_cpp(
    file: Path, pre: str, texts: Sequence[str], types: Sequence[float], merges: list[tuple[str, str]]
) -> LanguageVocabulary:
    """Return a byte-level vocabulary of a GGUF file, which calls its splitting `pre`. Raises ModelError."""
    splitting = next((one for one in SPLITTINGS if pre in one.llama_cpp), None)
    if splitting is None:
        known = ", ".join(name for one in SPLITTINGS for name in one.llama_cpp)
        raise bad(file, f"splits texts as '{clean(pre, 40)}' (tokenizer.ggml.pre), which is not known; known: {known}")
    ids, added = _typed(file, texts, types)
    return _of_bytes(Vocabulary(file, ids, merges, []), splitting, added, splitting.whole_words)


def of_pieces(file: Path, texts: Sequence[str], scores: Sequence[float], types: Sequence[float]) -> LanguageVocabulary:
    """Return the vocabulary of SentencePiece's BPE: of the pairs of pieces in a text that together are a piece, that
    with the highest score is merged first. Raises ModelError."""
    if not all(map(isfinite, scores)):
        refuse(file, "has a score that is no number")
    texts = [text.replace(" ", SPACE) for text in texts]
    types = [NORMAL if type == USER and SPACE in text else type for text, type in zip(texts, types, strict=False)]
    ids, added = _typed(file, texts, types)
    tokens = {text: id for text, id in ids.items() if text not in added or not added[text].special}
    merges = [
        (scores[id], text[:cut], text[cut:])
        for text, id in tokens.items()
        if types[id] != BYTE
        for cut in range(1, len(text))
        if text[:cut] in tokens and text[cut:] in tokens
    ]
    merges.sort(key=lambda merge: (-merge[0], -len(merge[1]), -len(merge[2])))
    return _of_pieces(Vocabulary(file, ids, [(left, right) for _, left, right in merges], []), added, False)


def _tokenizer_json(file: Path) -> LanguageVocabulary:
    parts = json_object(file, MAX_BYTES, MAX_VALUES)
    splitting = next((one for one in SPLITTINGS if one.matches(parts)), None)
    if splitting is None:
        refuse_value(file, "pre_tokenizer", parts.get("pre_tokenizer"))
    vocabulary = vocabulary_of(file, parts, splitting.form)
    added = checked_entries(file, vocabulary.added_entries, MAX_ADDED, in_texts=False)
    whole_words = parts["model"].get("ignore_merges") is True
    made = (
        _of_pieces(vocabulary, added, whole_words)
        if splitting is PIECES
        else _of_bytes(vocabulary, splitting, added, whole_words)
    )
    return replace(made, before=tuple(token for token in _before(parts.get("post_processor")) if token in made.special))


def _before(processor: Any) -> Iterator[str]:
    """Yield the tokens that the post-processor of a tokenizer.json puts before a text."""
    steps = processor.get("processors") if has(processor, "type", "Sequence") else [processor]
    for step in steps if isinstance(steps, list) else ():
        parts = step.get("single") if has(step, "type", "TemplateProcessing") else None
        for part in parts if isinstance(parts, list) else ():
            token = part.get("SpecialToken") if isinstance(part, dict) else None
            if not isinstance(token, dict):
                break
            yield str(token.get("id"))


def _typed(file: Path, texts: Sequence[str], types: Sequence[float]) -> tuple[dict[str, int], dict[str, Added]]:
    """Return the ids of the texts that are tokens, and those that are added tokens. Raises ModelError."""
    if not len(texts) == len(types) < MAX_ID or sum(map(len, texts)) > MAX_LENGTH:
        refuse(file, f"has {len(texts)} tokens with {len(types)} types, or of more than {MAX_LENGTH:,} characters")
    ids: dict[str, int] = {}
    added: dict[str, Added] = {}
    for id, (text, type) in enumerate(zip(texts, types, strict=True)):
        if type == UNUSED:
            continue
        if not 0 < len(text) <= MAX_PIECE or text in ids:
            refuse(file, f"its token {id} is twice there, empty or too long ('{clean(text, 40)}')")
        ids[text] = id
        if type in (CONTROL, UNKNOWN, USER):
            added[text] = Added(id, False, type != USER)
    return ids, added


def _of_bytes(
    vocabulary: Vocabulary, splitting: Splitting, added: Mapping[str, Added], whole_words: bool
) -> LanguageVocabulary:
    """Return a byte-level vocabulary, in which all added tokens are special: published ones are markers."""
    symbols = byte_symbols()
    check_vocabulary(vocabulary, (symbols[byte] for byte in USED_BYTES))
    return _without_added(vocabulary, splitting, {text: one.id for text, one in added.items()}, {}, whole_words)


def _of_pieces(vocabulary: Vocabulary, added: Mapping[str, Added], whole_words: bool) -> LanguageVocabulary:
    # Gemma has a tab among its pieces, and no token for that byte
    check_vocabulary(vocabulary, (BYTES[i] for i in range(256) if i > 127 or chr(i) not in vocabulary.ids))
    special = {text: one.id for text, one in added.items() if one.special}
    words = {text: one.id for text, one in added.items() if not one.special}
    return _without_added(vocabulary, PIECES, special, words, whole_words)


def _without_added(
    vocabulary: Vocabulary,
    splitting: Splitting,
    special: Mapping[str, int],
    words: Mapping[str, int],
    whole_words: bool,
) -> LanguageVocabulary:
    """Return the vocabulary without special tokens in its BPE, and without merges that make one or a byte."""
    tokens = {text: id for text, id in vocabulary.ids.items() if text not in special}
    used = tokens.keys() - set(BYTES) if splitting.pieces else tokens.keys()
    merges = [
        (left, right) for left, right in vocabulary.merges if left in used and right in used and left + right in used
    ]
    others = set(tokens.values())
    for text, id in (*special.items(), *words.items()):
        if vocabulary.ids.get(text, None if id in others else id) != id:
            refuse(vocabulary.file, f"the id {id} of the added token '{clean(text, 40)}' is another's")
    return LanguageVocabulary(
        file=vocabulary.file,
        splitting=splitting,
        tokens=tokens,
        merges=merges,
        special=special,
        words=words,
        whole_words=whole_words,
    )
