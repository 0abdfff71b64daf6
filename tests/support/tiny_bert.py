"""A tiny BERT, made by transformers, and its vocabulary: odd widths, nothing trivial in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from support.tiny_model import randomise

CONFIG: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 44,
    "intermediate_size": 76,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 90,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
}
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = (
    *("red", "circle", "blue", "square", "star", "stars", "ring", "above", "three", "yellow", "small", "house"),
    *"背景红圆形的猫",
    *(f"##{one}" for one in ("s", "ed", "ing", "y", "le", "star")),
)


def tiny_bert(seed: int = 8, **changes: Any) -> torch.nn.Module:
    """transformers' encoder with the tiny configuration, float32, randomised."""
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig(**(CONFIG | changes)), add_pooling_layer=True)
    randomise(model, seed)
    generator = torch.Generator().manual_seed(seed)
    for table in (one for name, one in model.named_parameters() if "embeddings.weight" in name):
        table.data.copy_(torch.randn(table.shape, generator=generator))
    return model.eval()


def vocabulary() -> list[str]:
    """The tokens, in the order of their ids."""
    letters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    return list(dict.fromkeys((*SPECIAL, *WORDS, *letters, *(f"##{one}" for one in letters))))


def write_vocabulary(folder: Path, **config: object) -> Path:
    """Write vocab.txt and tokenizer_config.json, as BERT's folders have them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in vocabulary()), encoding="utf-8")
    given = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 77}
    (folder / "tokenizer_config.json").write_text(json.dumps(given | config))
    return folder


def hugging_face(folder: Path) -> Any:
    """transformers' tokenizer of such a folder."""
    from transformers import BertTokenizer

    return BertTokenizer.from_pretrained(folder)
