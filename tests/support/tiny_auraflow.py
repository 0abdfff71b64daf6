"""A tiny AuraFlow folder, written by diffusers itself, with nothing in it that is all ones or zeros.

Odd widths, registers and a table of positions of their own, a table of distances in every block of the text encoder,
AuraFlow's own scheduler configuration, SDXL's VAE in small, and a tokenizer of LLaMA's kind; and its transformer by its
authors' names.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from support.language_files import pieces
from support.tiny_model import randomise

SCHEDULER = {"num_train_timesteps": 1000, "shift": 1.73}
DIT: dict[str, Any] = {
    "sample_size": 8,
    "in_channels": 4,
    "num_mmdit_layers": 2,
    "num_single_dit_layers": 3,
    "attention_head_dim": 14,
    "num_attention_heads": 3,
    "joint_attention_dim": 60,
    "caption_projection_dim": 42,
    "out_channels": 4,
    "pos_embed_max_size": 14**2,
}
TEXT: dict[str, Any] = {
    "d_model": 60,
    "d_kv": 14,
    "d_ff": 88,
    "num_layers": 3,
    "num_heads": 5,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "gated-gelu",
}
VAE: dict[str, Any] = {
    "block_out_channels": [6, 12, 12, 18],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 3,
    "scaling_factor": 0.13025,
}
# As wide as needed for codes in blocks of 32, with heads as published, which no tensor shows
WIDE: dict[str, Any] = {
    "attention_head_dim": 256, "num_attention_heads": 1, "caption_projection_dim": 256, "joint_attention_dim": 64,
    "sample_size": 64,
}  # fmt: skip
WIDE_TEXT = {"d_model": 64, "d_kv": 32, "num_heads": 2, "d_ff": 96}
WIDE_VAE: dict[str, Any] = {"block_out_channels": [32, 32, 64, 32], "norm_num_groups": 32}
FEED_FORWARD = {"linear_1": "c_fc1", "linear_2": "c_fc2", "out_projection": "c_proj"}


def tiny_dit(seed: int = 1, **changes: object) -> Any:
    """diffusers' transformer with the tiny configuration, float32, randomised."""
    from diffusers import AuraFlowTransformer2DModel

    model = AuraFlowTransformer2DModel(**(DIT | changes))
    randomise(model, seed)
    generator = torch.Generator().manual_seed(seed + 100)
    for table, size in ((model.register_tokens, 0.7), (model.pos_embed.pos_embed, 0.5)):
        table.data.copy_(size * torch.randn(table.shape, generator=generator))
    for block in model.joint_transformer_blocks:  # some words among hundreds of zeros, which keys and queries see alike
        block.attn.add_v_proj.weight.data *= 12
    return model.eval()


def tiny_text_encoder(seed: int = 3, **changes: object) -> Any:
    """transformers' encoder with the tiny configuration, float32, randomised; its blocks' tables differ."""
    from transformers import UMT5Config, UMT5EncoderModel

    vocabulary = len(vocabulary_and_merges()[0]) + 9
    model = UMT5EncoderModel(UMT5Config(**(TEXT | {"vocab_size": vocabulary} | changes)))
    randomise(model, seed)
    generator = torch.Generator().manual_seed(seed)
    model.shared.weight.data.copy_(torch.randn(model.shared.weight.shape, generator=generator))
    for block in model.encoder.block:
        attention = block.layer[0].SelfAttention
        table = attention.relative_attention_bias.weight
        table.data.copy_(2 * torch.randn(table.shape, generator=generator))
        attention.q.weight.data /= model.config.d_kv**0.5  # as trained models begin
    return model.eval()


def tiny_vae(seed: int = 2, **changes: object) -> Any:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(**(VAE | changes))
    randomise(model, seed)
    return model.eval()


@cache
def vocabulary_and_merges() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Pieces of SentencePiece's BPE, as LLaMA's tokenizer.json has them."""
    texts, scores, types = pieces()
    ids = {text: id for id, text in enumerate(texts)}
    merged = {text: id for text, id in ids.items() if types[id] == 1}
    merges = [
        (scores[id], text[:cut], text[cut:])
        for text, id in merged.items()
        for cut in range(1, len(text))
        if text[:cut] in merged and text[cut:] in merged
    ]
    merges.sort(key=lambda merge: (-merge[0], -len(merge[1])))
    return ids, [(left, right) for _, left, right in merges]


def tiny_tokenizer() -> Any:
    """Without a token before a text and with one behind it, padded on the right."""
    from transformers import LlamaTokenizerFast

    ids, merges = vocabulary_and_merges()
    return LlamaTokenizerFast(
        vocab=ids, merges=merges, add_bos_token=False, add_eos_token=True, pad_token="<s>", padding_side="right"
    )


def transformer_file(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of diffusers' transformer under its authors' names."""
    state = dict(model.state_dict())
    halves = state["norm_out.linear.weight"].chunk(2)
    state["norm_out.linear.weight"] = torch.cat(halves[::-1])
    return {authors_name(name): value.contiguous() for name, value in state.items()}


def authors_name(name: str) -> str:
    """The authors' name of a tensor or layer."""
    whole = {
        "pos_embed.pos_embed": "positional_encoding",
        "pos_embed.proj": "init_x_linear",
        "time_step_proj.linear_1": "t_embedder.mlp.0",
        "time_step_proj.linear_2": "t_embedder.mlp.2",
        "context_embedder": "cond_seq_linear",
        "norm_out.linear": "modF.1",
        "proj_out": "final_linear",
    }
    for theirs, authors in whole.items():
        if name == theirs or name.startswith(f"{theirs}."):
            return authors + name.removeprefix(theirs)
    kind, _, rest = name.partition("_transformer_blocks.")
    if not rest:
        return name
    layer, _, part = rest.partition(".")
    joint = kind == "joint"
    rules = {
        "norm1_context.linear": "modC.1",
        "norm1.linear": "modX.1" if joint else "modCX.1",
        "attn.to_out.0": "attn.w2o" if joint else "attn.w1o",
        "attn.to_add_out": "attn.w1o",
        "attn.to_": "attn.w2" if joint else "attn.w1",
        "attn.add_": "attn.w1",
        "ff_context.": "mlpC.",
        "ff.": "mlpX." if joint else "mlp.",
    }
    for theirs, authors in rules.items():
        if part.startswith(theirs):
            part = authors + part.removeprefix(theirs).removesuffix("_proj").replace("_proj.", ".")
            break
    for theirs, authors in FEED_FORWARD.items():
        part = part.replace(theirs, authors)
    return f"{'double' if joint else 'single'}_layers.{layer}.{part}"


def write_tiny_auraflow(
    folder: Path,
    shard: str = "400KB",
    dit: Mapping[str, object] = {},
    text: Mapping[str, object] = {},
    vae: Mapping[str, object] = {},
) -> None:
    """Write the whole folder through AuraFlowPipeline.save_pretrained, with shards of at most `shard`; `dit`, `text`
    and `vae` are changes of the configurations."""
    from diffusers import AuraFlowPipeline, FlowMatchEulerDiscreteScheduler

    pipeline = AuraFlowPipeline(
        transformer=tiny_dit(**dit),
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        vae=tiny_vae(**vae),
        text_encoder=tiny_text_encoder(**text),
        tokenizer=tiny_tokenizer(),
    )
    part = folder.with_suffix(".part")
    pipeline.save_pretrained(part, max_shard_size=shard)
    part.rename(folder)
