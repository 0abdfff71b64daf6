"""Prompts to token ids, with the Qwen2 tokenizer of a model folder.

Unusual here:

- The files are only data (`vocabulary`, `added_tokens`); the pipeline (NFC, split, bytes, BPE) is built
  here, so a file cannot bring a normalizer or a regex of its own.
- Text that spells a special token, such as `<|im_end|>`, becomes that token, in a prompt too, as in transformers.
- The first 34 states of a filled template are dropped after the text encoder, whatever their tokens are. With
  Qwen's vocabulary they are the system prompt; with one that splits it otherwise diffusers drops 34 as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.text import clean
from qwenimg.common.prompts.added_tokens import Added, read_added
from qwenimg.common.prompts.check import check_prompt
from qwenimg.common.prompts.vocabulary import REGEX, Vocabulary, guarded, read_vocabulary, refuse

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
    "<|im_start|>assistant\n"
)
DROPPED = 34  # tokens of TEMPLATE before the prompt
MAX_TOKENS = 1024  # tokens kept after the dropped ones


@dataclass(frozen=True)
class PromptTokens:
    """The ids of a filled template, and how many ids were cut off its end."""

    ids: tuple[int, ...]
    truncated: int

    def lost(self, limit: int) -> int:
        """How many tokens at the end do not condition the image, if at most `limit` after the dropped do."""
        return self.truncated + max(0, len(self.ids) - DROPPED - limit)


class QwenTokenizer:
    """Text to ids, the same as transformers' Qwen2Tokenizer gives. Made by `load`."""

    def __init__(self, vocabulary: Vocabulary, added: dict[str, Added]) -> None:
        self.file = vocabulary.file
        self.largest_id = max([*vocabulary.ids.values(), *(token.id for token in added.values())])
        self._tokenizer = guarded(self.file, lambda: _build(vocabulary, added))

    def encode(self, prompt: str) -> list[int]:
        """Ids of `prompt` as it is, without a template; UsageError if it is too long or not Unicode text."""
        check_prompt(prompt)
        return self.ids(prompt)

    def check_vocabulary(self, size: int) -> None:
        """ModelError if an id has no row in an embedding table of `size` rows."""
        if self.largest_id >= size:
            found = f"has the token id {self.largest_id}, but the text encoder has {size} embeddings"
            raise bad(self.file, f"{found}: use the tokenizer of this text encoder")

    def ids(self, text: str) -> list[int]:
        """Ids of `text`, which is not checked."""
        return guarded(self.file, lambda: self._tokenizer.encode(text, add_special_tokens=False).ids)


def load(folder: Path) -> QwenTokenizer:
    """The tokenizer in `folder`; ModelError if it is missing, broken, or not of the published Qwen2 form."""
    vocabulary = read_vocabulary(folder)
    return QwenTokenizer(vocabulary, read_added(folder, vocabulary))


def prompt_ids(tokenizer: QwenTokenizer, prompt: str) -> PromptTokens:
    """TEMPLATE filled with `prompt`, as ids, cut on the right to DROPPED + MAX_TOKENS as diffusers does.

    The conditioning is the text encoder's hidden states [DROPPED:] of these ids. Errors: those of
    `check_prompt`; ModelError if the vocabulary is so unlike Qwen's that nothing is left.
    """
    check_prompt(prompt)
    ids = tokenizer.ids(TEMPLATE.replace("{}", prompt))
    if len(ids) <= DROPPED:
        refuse(
            tokenizer.file,
            f"the filled prompt template has {len(ids)} tokens, of which {DROPPED} are dropped",
        )
    kept = ids[: DROPPED + MAX_TOKENS]
    return PromptTokens(tuple(kept), len(ids) - len(kept))


def length(tokenizer: QwenTokenizer, text: str) -> int:
    """Tokens of a prompt in the template."""
    return len(prompt_ids(tokenizer, text).ids)


def _build(vocabulary: Vocabulary, added: dict[str, Added]) -> Tokenizer:
    """The Qwen2 pipeline with these tokens."""
    from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    tokenizer = Tokenizer(BPE(vocab=vocabulary.ids, merges=vocabulary.merges))
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(REGEX), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    in_order = sorted(added.items(), key=lambda item: item[1].id)
    tokenizer.add_tokens([AddedToken(content, normalized=token.normalized) for content, token in in_order])
    for content, token in in_order:  # the library numbers new tokens itself, from the end of the vocabulary
        if tokenizer.token_to_id(content) != token.id:
            refuse(
                vocabulary.file,
                f"the id {token.id} of {clean(content, 60)!r} does not follow the vocabulary's last",
            )
    return tokenizer
