"""The tokenizer of any language model that writes: a text to ids, and ids to text.

Unusual here:

- A text is only text: markers such as `<|im_end|>` that are typed in it are split as other words are. A chat template
  (`chats`) asks for its special tokens by name.
- Spaces around a text are the template's too: none is added before it.
- A token may end inside a character: `text` has U+FFFD for its bytes until the next one comes.
- Vocabularies of SentencePiece have words that are matched before a text is split, such as Gemma's `<table>`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.text import clean
from qwenimg.common.formats import gguf
from qwenimg.common.formats.stored import Header
from qwenimg.common.prompts import language_vocabulary, vocabulary
from qwenimg.common.prompts.check import check_prompt
from qwenimg.common.prompts.language_vocabulary import BYTES, LanguageVocabulary
from qwenimg.common.prompts.unigram import SPACE
from qwenimg.common.prompts.vocabulary import byte_symbols, guarded, refuse

FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")
"""Files by which a folder has a tokenizer."""
_KEY = "tokenizer.ggml."


class LanguageTokenizer:
    """A tokenizer in which only `special` finds special tokens."""

    def __init__(self, read: LanguageVocabulary) -> None:
        self.file = read.file
        self.word_ids = frozenset({*read.tokens.values(), *read.words.values()})
        """The ids of tokens that are text."""
        self.largest_id = max(*self.word_ids, *read.special.values())
        self._special, self._words = dict(read.special), dict(read.words)
        self._names = {id: text for text, id in self._words.items()}
        longest_first = sorted(self._words, key=len, reverse=True)
        self._found = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self.is_of_pieces, self.before = read.splitting.pieces, read.before
        self._tokenizer = guarded(
            self.file,
            lambda: read.splitting.build(read.tokens, read.merges, read.whole_words),
        )

    def check_vocabulary(self, size: int) -> None:
        """Check that each id has a row in an embedding table of `size` rows. Raises ModelError."""
        if self.largest_id >= size:
            fault = f"has the token id {self.largest_id}, but the language model has {size} embeddings"
            raise bad(self.file, f"{fault}: use the tokenizer of this model")

    def has(self, *tokens: str) -> bool:
        """Return whether all of these special tokens are there."""
        return all(token in self._special for token in tokens)

    def special(self, token: str) -> int:
        """Return the id of a special token. Raises ModelError for a vocabulary without it."""
        if token not in self._special:
            refuse(self.file, f"has no token {token}")
        return self._special[token]

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, none of which is a special token's. Raises UsageError as `check_prompt` does."""
        check_prompt(text)
        return self.plain(text)

    def plain(self, text: str) -> list[int]:
        """Return the ids of `text`, which is not checked. None of them is a special token's."""
        ids, at = list[int](), 0
        for match in self._found.finditer(text) if self._found else ():
            ids += [*self._split(text[at : match.start()]), self._words[match[0]]]
            at = match.end()
        return ids + self._split(text[at:])

    def bytes_of(self, id: int) -> bytes:
        """Return the bytes of a token; none of a special one, and of an id that is no token."""
        token = self._names.get(id) or self._tokenizer.id_to_token(id)
        if token is None:
            return b""
        if self.is_of_pieces:
            return self._single_bytes.get(token) or token.replace(SPACE, " ").encode()
        return b"".join(self._single_bytes.get(symbol) or symbol.encode() for symbol in token)

    def text(self, ids: Iterable[int]) -> str:
        """Return the text of `ids` without special tokens, and with U+FFFD for bytes that are not UTF-8."""
        return b"".join(map(self.bytes_of, ids)).decode(errors="replace")

    @cached_property
    def _single_bytes(self) -> dict[str, bytes]:
        symbols = BYTES if self.is_of_pieces else byte_symbols()
        return {symbol: bytes([byte]) for byte, symbol in enumerate(symbols)}

    def _split(self, text: str) -> list[int]:
        return guarded(self.file, lambda: self._tokenizer.encode(text, add_special_tokens=False).ids) if text else []


def load(folder: Path) -> LanguageTokenizer:
    """Load the tokenizer in `folder`. Raises ModelError as `language_vocabulary.read` does."""
    return LanguageTokenizer(language_vocabulary.read(folder))


def of_gguf(header: Header) -> LanguageTokenizer:
    """Return the tokenizer in the metadata of an open GGUF file. Raises ModelError if it has none, or one that is
    damaged or of a kind that is not known."""
    file, kind = header.file.path, header.metadata.get(_KEY + "model", "")
    arrays = gguf.read_arrays(header.file, {_KEY + name for name in ("tokens", "token_type", "scores", "merges")})
    texts, types = _texts(file, arrays, "tokens"), _numbers(file, arrays, "token_type")
    if kind == "gpt2":
        merges = [vocabulary.pair(file, merge) for merge in _texts(file, arrays, "merges")]
        pre = header.metadata.get(_KEY + "pre", "")
        return LanguageTokenizer(language_vocabulary.of_llama_cpp(file, pre, texts, types, merges))
    if kind == "llama" and header.metadata.get(_KEY + "remove_extra_whitespaces", "False") == "False":
        scores = _numbers(file, arrays, "scores")
        return LanguageTokenizer(language_vocabulary.of_pieces(file, texts, scores, types))
    raise bad(file, f"has a tokenizer of the kind '{clean(kind, 40)}' (tokenizer.ggml.model), which is not read")


def _texts(file: Path, arrays: Mapping[str, gguf.Array], name: str) -> list[str]:
    values = arrays.get(_KEY + name, ())
    if not values or not isinstance(values[0], str):
        raise bad(file, f"has no tokenizer: its metadata lack the texts {_KEY}{name}")
    return [value for value in values if isinstance(value, str)]


def _numbers(file: Path, arrays: Mapping[str, gguf.Array], name: str) -> list[float]:
    values = arrays.get(_KEY + name, ())
    if not values or isinstance(values[0], str):
        raise bad(file, f"has no tokenizer: its metadata lack the numbers {_KEY}{name}")
    return [value for value in values if not isinstance(value, str)]
