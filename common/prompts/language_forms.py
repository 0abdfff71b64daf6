"""The ways in which tokenizers of language models split a text, as data: byte-level ones by a regex, SentencePiece's.

Unusual here:

- a tokenizer.json is recognised by its normalizer, pre-tokenizer and model, which are compared with those here and
  never run; a GGUF file names them (`tokenizer.ggml.model`, `tokenizer.ggml.pre`);
- a space before a text, which some of SentencePiece's models add, is none of these: chat templates have the spaces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qwenimg.common.prompts.unigram import SPACE
from qwenimg.common.prompts.vocabulary import REGEX, Form, has

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CONTRACTED, _ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_ENDS}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDS}"
)


@dataclass(frozen=True, kw_only=True)
class Splitting:
    """The way of one kind of tokenizer from a text to pieces for its BPE."""

    name: str
    llama_cpp: tuple[str, ...]  # names in `tokenizer.ggml.pre`
    regex: str = ""  # the pieces; "": those of GPT-2, which the library has
    digits: bool = False  # each digit is a piece
    nfc: bool = False
    whole_words: bool = False  # a piece that is a token is not merged; a tokenizer.json has it as `ignore_merges`
    pieces: bool = False  # of SentencePiece: spaces are `▁`, bytes are tokens such as <0x0A>, and nothing is split

    def matches(self, parts: Mapping[str, Any]) -> bool:
        """Return whether a tokenizer.json has this normalizer, pre-tokenizer and model."""
        model = parts.get("model")
        if not isinstance(model, dict) or bool(model.get("byte_fallback")) != self.pieces:
            return False
        normalizer, words = parts.get("normalizer"), parts.get("pre_tokenizer")
        if self.pieces:
            return _is_spaces(normalizer) and (words is None or _is_by_spaces(words) or _is_metaspace(words))  # or both
        return normalizer == ({"type": "NFC"} if self.nfc else None) and self._splits(words)

    def _splits(self, words: Any) -> bool:
        if not self.regex and not self.digits:
            return _is_bytes(words, by_regex=True)
        parts = words.get("pretokenizers") if has(words, "type", "Sequence") else None
        if not isinstance(parts, list) or len(parts) != 2:
            return False
        digits = {"type": "Digits", "individual_digits": True}
        split = {"type": "Split", "pattern": {"Regex": self.regex}, "behavior": "Isolated", "invert": False}
        return parts[0] == (digits if self.digits else split) and _is_bytes(parts[1], by_regex=self.digits)

    @property
    def form(self) -> Form:
        """The form of its tokenizer.json, whose other parts change no id."""
        return Form(
            parts={
                "version": lambda part: part in (None, "1.0"),
                "truncation": lambda part: True,
                "padding": lambda part: True,
                "added_tokens": lambda part: isinstance(part, list),
                "normalizer": lambda part: True,  # of `matches`
                "pre_tokenizer": lambda part: True,
                "post_processor": lambda part: True,  # tokens around a text are the chat template's
                "decoder": lambda part: True,
                "model": lambda part: isinstance(part, dict),
            },
            model={
                "type": ("BPE",),
                "dropout": (None, 0.0),
                "unk_token": (None, "<unk>") if self.pieces else (None,),
                "continuing_subword_prefix": (None, ""),
                "end_of_word_suffix": (None, ""),
                "fuse_unk": (None, True, False),
                "byte_fallback": (True,) if self.pieces else (None, False),
                "ignore_merges": (None, True, False),
            },
        )

    def build(self, ids: dict[str, int], merges: list[tuple[str, str]], whole_words: bool) -> Tokenizer:
        """Return the library's tokenizer with these tokens, none of them special."""
        from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
        from tokenizers.models import BPE

        model = BPE(
            vocab=ids, merges=merges, ignore_merges=whole_words, byte_fallback=self.pieces, fuse_unk=self.pieces
        )
        tokenizer = Tokenizer(model)
        if self.pieces:
            tokenizer.normalizer = normalizers.Replace(" ", SPACE)
            return tokenizer
        if self.nfc:
            tokenizer.normalizer = normalizers.NFC()
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.regex)
        first: list[Any] = [pre_tokenizers.Split(Regex(self.regex), behavior="isolated")] if self.regex else []
        first += [pre_tokenizers.Digits(individual_digits=True)] if self.digits else []
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, as_bytes])
        return tokenizer


PIECES = Splitting(name="SentencePiece's", llama_cpp=(), pieces=True)
SPLITTINGS = (
    Splitting(name="Qwen's", llama_cpp=("qwen2",), regex=REGEX, nfc=True),
    Splitting(name="LLaMA 3's", llama_cpp=("llama-bpe", "llama3", "llama-v3"), regex=_LLAMA3, whole_words=True),
    Splitting(name="Mistral's", llama_cpp=("tekken",), regex=_TEKKEN, whole_words=True),
    Splitting(name="SmolLM2's", llama_cpp=("smollm",), digits=True),
    Splitting(name="GPT-2's", llama_cpp=("gpt-2",)),
    PIECES,
)


def _is_bytes(part: Any, *, by_regex: bool) -> bool:
    return (
        has(part, "type", "ByteLevel")
        and part.get("add_prefix_space") is False
        and part.get("use_regex", True) is by_regex
    )


def _is_spaces(part: Any) -> bool:
    """Return whether a normalizer makes spaces `▁`, with another before a text or without, or there is none."""
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    before = {"type": "Prepend", "prepend": SPACE}
    return part in (None, replaced, {"type": "Sequence", "normalizers": [before, replaced]})


def _is_by_spaces(part: Any) -> bool:
    """Return whether a pre-tokenizer splits by spaces, of which the normalizer left none."""
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    return bool(part == split)


def _is_metaspace(part: Any) -> bool:
    return has(part, "type", "Metaspace") and part.get("replacement") == SPACE and part.get("split") is False
