"""Token ids of prompts in a template, by the Qwen2 tokenizer of a model folder.

Unusual here:

- The files are only data (`vocabulary`, `added_tokens`); the pipeline (NFC, split, bytes, BPE) is built
  here, so a file cannot bring a normalizer or a regex of its own.
- Text that spells a special token, such as `<|im_end|>`, becomes that token, in a prompt too, as in transformers.
- The first states of a filled template are dropped after the text encoder, whatever their tokens are. With Qwen's
  vocabulary they are the system prompt; diffusers drops as many with a vocabulary that splits it otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.text import clean
from qwenimg.common.numbers.sizes import ceil_to
from qwenimg.common.prompts.added_tokens import Added, read_added
from qwenimg.common.prompts.check import check_prompt
from qwenimg.common.prompts.prompt_tokens import PromptTokens
from qwenimg.common.prompts.vocabulary import REGEX, Vocabulary, guarded, read_vocabulary, refuse

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Template:
    """A text around the prompts for a language model, and which of its states condition an image."""

    text: str  # the prompt stands for `{}`
    dropped: int  # tokens of `text` before the prompt, whose states are dropped
    limit: int  # tokens behind those that are encoded: all others are cut off
    seen: int  # tokens behind those whose states condition an image
    pad: str = ""  # the token with which ids are filled up; "": they are not
    multiple: int = 0  # ids are filled up to a multiple of so many, `limit` at most; 0: to `limit`

    def fill(self, tokenizer: QwenTokenizer, prompt: str) -> PromptTokens:
        """Return the ids of the template filled with `prompt`, cut on the right as diffusers does. Raises UsageError as
        `check_prompt` does, and ModelError for a vocabulary that splits the template into too few tokens."""
        check_prompt(prompt)
        ids = tokenizer.ids(self.text.replace("{}", prompt))
        if len(ids) <= self.dropped:
            refuse(
                tokenizer.file,
                f"the filled prompt template has {len(ids)} tokens, of which {self.dropped} are dropped",
            )
        lost = len(ids) - self.dropped - self.used(len(ids))
        kept = ids[: self.dropped + self.limit]
        pads = self.dropped + self.filled(len(kept) - self.dropped) - len(kept)
        return PromptTokens((*kept, *(pads * [tokenizer.special(self.pad)] if pads else [])), lost, pads)

    def start(self, length: int) -> int:
        """Return how many of the first states of `length` tokens are dropped."""
        return self.dropped

    def filled(self, length: int) -> int:
        """Return how many ids `length` of them, behind those that are dropped, are filled up to."""
        if not self.pad:
            return length
        return min(self.limit, ceil_to(length, self.multiple)) if self.multiple else self.limit

    def used(self, length: int) -> int:
        """Return how many states of `length` tokens condition an image."""
        return min(self.seen, length - self.dropped)


class QwenTokenizer:
    """A tokenizer with the ids of transformers' Qwen2Tokenizer. Opened by `load`."""

    def __init__(self, vocabulary: Vocabulary, added: dict[str, Added]) -> None:
        self.file = vocabulary.file
        self.largest_id = max([*vocabulary.ids.values(), *(token.id for token in added.values())])
        self._special = frozenset(token.id for token in added.values() if token.special)
        self.word_ids = frozenset({*vocabulary.ids.values(), *(token.id for token in added.values())}) - self._special
        self._tokenizer = guarded(self.file, lambda: _build(vocabulary, added))

    def encode(self, prompt: str) -> list[int]:
        """Return the ids of `prompt` without a template. Raises UsageError as `check_prompt` does."""
        check_prompt(prompt)
        return self.ids(prompt)

    def check_vocabulary(self, size: int) -> None:
        """Check that each id has a row in an embedding table of `size` rows. Raises ModelError."""
        if self.largest_id >= size:
            fault = f"has the token id {self.largest_id}, but the text encoder has {size} embeddings"
            raise bad(self.file, f"{fault}: use the tokenizer of this text encoder")

    def special(self, token: str) -> int:
        """Return the id of a special token. Raises ModelError for a vocabulary without it."""
        ids = self.ids(token)
        if len(ids) != 1:
            refuse(self.file, f"has no token {token}")
        return ids[0]

    def has(self, *tokens: str) -> bool:
        """Return whether all of these special tokens are there."""
        return all(len(self.ids(token)) == 1 for token in tokens)

    def ids(self, text: str) -> list[int]:
        """Return the ids of `text`, which is not checked."""
        return guarded(self.file, lambda: self._tokenizer.encode(text, add_special_tokens=False).ids)

    def plain(self, text: str) -> list[int]:
        """Return the ids of `text`, which is not checked, without added tokens: those that it spells stay text."""
        return guarded(self.file, lambda: plain_ids(self._tokenizer, text))

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without special tokens, and with U+FFFD for bytes that are not UTF-8."""
        kept = [token for token in ids if token not in self._special]
        return guarded(self.file, lambda: self._tokenizer.decode(kept, skip_special_tokens=False))


def load(folder: Path) -> QwenTokenizer:
    """Load the tokenizer in `folder`. Raises ModelError if it is missing, broken, or not of the published form."""
    vocabulary = read_vocabulary(folder)
    return QwenTokenizer(vocabulary, read_added(folder, vocabulary))


def plain_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of `text` by the steps of `tokenizer` other than the search for added tokens."""
    normal = text if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str(text)
    pieces = [(normal, (0, 0))] if tokenizer.pre_tokenizer is None else tokenizer.pre_tokenizer.pre_tokenize_str(normal)
    return [token.id for piece, _ in pieces for token in tokenizer.model.tokenize(piece)]


def _build(vocabulary: Vocabulary, added: dict[str, Added]) -> Tokenizer:
    """Return the Qwen2 pipeline with these tokens."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    tokenizer = Tokenizer(BPE(vocab=vocabulary.ids, merges=vocabulary.merges))
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(REGEX), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    in_order = sorted(added.items(), key=lambda item: item[1].id)
    tokenizer.add_tokens([AddedToken(content, normalized=token.normalized) for content, token in in_order])
    for content, token in in_order:  # the library numbers new tokens itself, from the end of the vocabulary
        if tokenizer.token_to_id(content) != token.id:
            refuse(
                vocabulary.file,
                f"the id {token.id} of {clean(content, 60)!r} does not follow the vocabulary's last",
            )
    return tokenizer
