"""A tiny T5 encoder, made by transformers: odd widths, heads wider together than the stream, nothing trivial in it."""

from __future__ import annotations

from typing import Any

import torch

from support.tiny_model import randomise

CONFIG: dict[str, Any] = {
    "vocab_size": 387,
    "d_model": 52,
    "d_kv": 14,
    "d_ff": 88,
    "num_layers": 3,
    "num_heads": 5,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}


def tiny_t5(seed: int = 6, **changes: Any) -> torch.nn.Module:
    """transformers' encoder with the tiny configuration, float32, randomised."""
    from transformers import T5Config, T5EncoderModel

    model = T5EncoderModel(T5Config(**(CONFIG | changes)))
    randomise(model, seed)
    generator = torch.Generator().manual_seed(seed)
    attention = model.encoder.block[0].layer[0].SelfAttention
    for table, size in ((model.shared.weight, 1.0), (attention.relative_attention_bias.weight, 2.0)):
        table.data.copy_(size * torch.randn(table.shape, generator=generator))
    for block in model.encoder.block:  # as trained models begin: their scores are not divided by the root of this
        block.layer[0].SelfAttention.q.weight.data /= model.config.d_kv**0.5
    return model.eval()
