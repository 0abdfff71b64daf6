"""Tokenizers of language models, trained at test time by the libraries that have them, in each kind of file."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from gguf import GGUFWriter
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE

from support.scripts import corpus

# As the published files have them, written a second time
REGEXES = {
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",  # noqa: E501
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",  # noqa: E501
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",  # noqa: E501
}  # fmt: skip
BYTE_LEVEL = (*REGEXES, "smollm", "gpt-2")
WHOLE_WORDS = ("llama-bpe", "tekken")
SPECIAL = {
    "qwen2": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "llama-bpe": ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "tekken": ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "smollm": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "gpt-2": ("<|endoftext|>",),
    "pieces": ("<unk>", "<s>", "</s>"),
}
WORDS = ("<table>", "\n\n", "\n\n\n")
"""Words that pieces are matched with before a text is split."""
CODE = (
    "def f(x):\n    return x**2  # square\n\n\nclass A:\n\tpass",
    "{'a': [1, 2.5e-3]}; foo_bar.baz()->qux;; // http://a.b/c?d=1&e=2",
    "a    b\t\tc\r\n\r\n d",
    "12345 67 8",
    "don't DON'T we'LL it's",
    "\n\n\n\nkalo",
    "     ",
    "<table><tr>x</table>",
)
SPELLED = ("<|im_end|>\n<|im_start|>system", "<s> </s> <unk>", "<0x0A><0x41>", "[INST] x [/INST]", "<|eot_id|>")
"""Markers that are typed in a text."""


@cache
def byte_level(name: str, size: int = 700) -> str:
    """The tokenizer.json of a byte-level BPE that splits texts as `name`."""
    tokenizer = Tokenizer(BPE(ignore_merges=name in WHOLE_WORDS))
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    if name == "gpt-2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif name == "smollm":
        parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    else:
        split = pre_tokenizers.Split(Regex(REGEXES[name]), behavior="isolated")
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL[name]],
        show_progress=False,
    )
    tokenizer.train_from_iterator([*corpus(30), *CODE], trainer)
    return tokenizer.to_str()


@cache
def pieces_model(size: int = 900) -> bytes:
    """The tokenizer.model of SentencePiece's BPE with tokens for bytes, as those of LLaMA 2 and Gemma."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus(150)),
        model_writer=model,
        vocab_size=size,
        model_type="bpe",
        byte_fallback=True,
        user_defined_symbols=list(WORDS),
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        character_coverage=0.9995,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def pieces() -> tuple[list[str], list[float], list[int]]:
    """The texts, scores and types of `pieces_model`, as a GGUF file has them."""
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_proto=pieces_model())
    ids = range(model.get_piece_size())

    def type(id: int) -> int:
        text = model.id_to_piece(id)
        kinds = ((2, model.is_unknown(id)), (3, model.is_control(id)), (6, model.is_byte(id)), (4, text in WORDS))
        return next((kind for kind, is_it in kinds if is_it), 1)

    return [model.id_to_piece(id) for id in ids], [model.get_score(id) for id in ids], [type(id) for id in ids]


def write_folder(folder: Path, name: str) -> Path:
    """A folder with a tokenizer of this kind."""
    folder.mkdir(parents=True, exist_ok=True)
    if name == "pieces":
        (folder / "tokenizer.model").write_bytes(pieces_model())
    else:
        (folder / "tokenizer.json").write_text(byte_level(name), encoding="utf-8")
    return folder


def add_vocabulary(writer: GGUFWriter, name: str) -> None:
    """Write the vocabulary of this kind into the metadata of a GGUF file."""
    if name == "pieces":
        texts, scores, types = pieces()
        writer.add_tokenizer_model("llama")
        writer.add_token_scores(scores)
        writer.add_add_space_prefix(False)
    else:
        data = json.loads(byte_level(name))
        special = {token["content"] for token in data["added_tokens"]}
        texts = sorted(data["model"]["vocab"], key=data["model"]["vocab"].get)
        types = [3 if text in special else 1 for text in texts]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(name)
        writer.add_token_merges([_merge(merge) for merge in data["model"]["merges"]])
    writer.add_token_list(texts)
    writer.add_token_types(types)


def _merge(merge: Any) -> str:
    return merge if isinstance(merge, str) else " ".join(merge)


def write_gguf(path: Path, name: str, architecture: str = "llama", tensors: Sequence[Any] = ()) -> Path:
    """A GGUF file with this vocabulary and no weights."""
    writer = GGUFWriter(path, architecture)
    add_vocabulary(writer, name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
