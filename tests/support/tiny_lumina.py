"""A tiny Lumina-Image 2.0 folder, written by diffusers itself, with nothing in it that is all ones or zeros.

Odd widths, fewer key than query heads in both networks, every norm and bias non-trivial, soft caps and a window of
Gemma 2 that act, Lumina-Image 2.0's own scheduler configuration, and a tokenizer of Gemma's kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from support.language_files import pieces
from support.tiny_model import randomise
from support.tiny_zimage import tiny_vae

SCHEDULER = {"num_train_timesteps": 1000, "shift": 6.0, "use_dynamic_shifting": False}
DIT: dict[str, Any] = {
    "in_channels": 16,
    "hidden_size": 88,
    "num_layers": 3,
    "num_refiner_layers": 2,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "multiple_of": 6,
    "ffn_dim_multiplier": 0.7,
    "axes_dim_rope": [6, 8, 8],
    "axes_lens": [300, 48, 64],
    "cap_feat_dim": 60,
}
TEXT: dict[str, Any] = {
    "hidden_size": 60, "intermediate_size": 88, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 14, "rms_norm_eps": 1e-6, "max_position_embeddings": 8192,
    "sliding_window": 40, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 20,
    "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
# As wide as needed for codes in blocks of 32
WIDE: dict[str, Any] = {
    "hidden_size": 128, "axes_dim_rope": [8, 12, 12], "cap_feat_dim": 64, "multiple_of": 32, "ffn_dim_multiplier": None,
}  # fmt: skip
WIDE_TEXT = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4}


def tiny_dit(seed: int = 1, **changes: object) -> Any:
    """diffusers' transformer with the tiny configuration, float32, randomised."""
    from diffusers import Lumina2Transformer2DModel

    model = Lumina2Transformer2DModel(**(DIT | changes))
    randomise(model, seed)
    generator = torch.Generator().manual_seed(seed + 100)
    gain = model.time_caption_embed.caption_embedder[0].weight  # a norm by no name
    gain.data.copy_(1 + 0.3 * torch.randn(gain.shape, generator=generator))
    return model.eval()


def tiny_text_encoder(seed: int = 3, **changes: object) -> Any:
    from transformers import Gemma2Config, Gemma2Model

    vocabulary = len(vocabulary_and_merges()[0]) + 9
    # the default kernel leaves out the soft caps of the configuration
    config = Gemma2Config(**(TEXT | {"vocab_size": vocabulary, "attn_implementation": "eager"} | changes))
    model = Gemma2Model(config)
    randomise(model, seed)
    for key, parameter in model.named_parameters():
        parameter.data -= 1 if key.endswith("norm.weight") else 0  # gains are stored minus one
    model.get_input_embeddings().weight.data *= 0.2
    return model.eval()


@cache
def vocabulary_and_merges() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Pieces of SentencePiece's BPE, as Gemma's tokenizer.json has them."""
    texts, scores, types = pieces()
    names = {"<s>": "<bos>", "</s>": "<eos>"}
    ids = {names.get(text, text): id for id, text in enumerate(texts)} | {"<pad>": len(texts)}
    merged = {text: id for text, id in ids.items() if id < len(texts) and types[id] == 1}
    merges = [
        (scores[id], text[:cut], text[cut:])
        for text, id in merged.items()
        for cut in range(1, len(text))
        if text[:cut] in merged and text[cut:] in merged
    ]
    merges.sort(key=lambda merge: (-merge[0], -len(merge[1])))
    return ids, [(left, right) for _, left, right in merges]


def tiny_tokenizer() -> Any:
    from transformers import GemmaTokenizer

    ids, merges = vocabulary_and_merges()
    return GemmaTokenizer(vocab=ids, merges=merges, add_bos_token=True)


def transformer_file(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of diffusers' transformer under its authors' names, as files for ComfyUI have them."""
    given, out = dict(model.state_dict()), {}
    for name in list(given):
        if name.endswith(".attn.to_q.weight"):
            block = name.removesuffix(".attn.to_q.weight")
            parts = [given.pop(f"{block}.attn.to_{x}.weight") for x in "qkv"]
            out[f"{block}.attention.qkv.weight"] = torch.cat(parts)
            out[f"{block}.attention.out.weight"] = given.pop(f"{block}.attn.to_out.0.weight")
            for x in "qk":
                out[f"{block}.attention.{x}_norm.weight"] = given.pop(f"{block}.attn.norm_{x}.weight")
    for name, value in given.items():
        out[authors_name(name)] = value
    out["norm_final.weight"] = torch.ones(model.config.hidden_size)  # read by nobody
    return {key: value.contiguous() for key, value in out.items()}


def authors_name(name: str) -> str:
    """The authors' name of a tensor that is one there too."""
    whole = {
        "time_caption_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
        "time_caption_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
        "time_caption_embed.caption_embedder": "cap_embedder",
        "norm_out.linear_1": "final_layer.adaLN_modulation.1",
        "norm_out.linear_2": "final_layer.linear",
        ".norm1.linear": ".adaLN_modulation.1",
        ".norm1.norm": ".attention_norm1",
        ".norm1.weight": ".attention_norm1.weight",
        ".norm2": ".attention_norm2",
        ".linear_": ".w",
    }
    for theirs, authors in whole.items():
        name = name.replace(theirs, authors)
    return name


def write_tiny_lumina(
    folder: Path, shard: str = "400KB", dit: Mapping[str, object] = {}, text: Mapping[str, object] = {}
) -> None:
    """Write the whole folder through Lumina2Pipeline.save_pretrained, with shards of at most `shard`; `dit` and `text`
    are changes of the configurations."""
    from diffusers import FlowMatchEulerDiscreteScheduler, Lumina2Pipeline

    pipeline = Lumina2Pipeline(
        transformer=tiny_dit(**dit),
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        vae=tiny_vae(),
        text_encoder=tiny_text_encoder(**text),
        tokenizer=tiny_tokenizer(),
    )
    part = folder.with_suffix(".part")
    pipeline.save_pretrained(part, max_shard_size=shard)
    part.rename(folder)
