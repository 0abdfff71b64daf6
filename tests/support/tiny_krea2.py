"""Tiny Krea 2 folders and networks, written by diffusers and transformers, with nothing in them that is all ones or
zeros. The text encoder is as deep as the published one, since the pipeline takes states behind its last layer but
one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tiny_tokenizer import write_tiny_tokenizer

from support.tiny_model import randomise, tiny_vae
from support.tiny_qwen21 import tiny_seeing_encoder

DIT: dict[str, Any] = {
    "in_channels": 64,
    "num_layers": 3,
    "attention_head_dim": 22,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 90,
    "timestep_embed_dim": 64,
    "text_hidden_dim": 60,
    "num_text_layers": 12,
    "text_num_attention_heads": 6,
    "text_num_key_value_heads": 3,
    "text_intermediate_size": 44,
    "num_layerwise_text_blocks": 2,
    "num_refiner_text_blocks": 1,
    "axes_dims_rope": (6, 8, 8),
}
LAYERS = 36  # of the text encoder
SCHEDULER = {
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 6400,
}


def tiny_dit(seed: int = 1, **changes: object) -> Any:
    """diffusers' transformer with the tiny configuration, float32, randomised."""
    from diffusers import Krea2Transformer2DModel

    model = Krea2Transformer2DModel(**(DIT | changes))
    randomise(model, seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and "norm" in name:
            parameter.data -= 1  # it is stored minus one
        if name.endswith("scale_shift_table"):
            parameter.data *= 0.2 * parameter.shape[1] ** 0.5
    return model.eval()


def tiny_text_encoder(seed: int = 3, text: Mapping[str, object] = {}, vision: Mapping[str, object] = {}) -> Any:
    """Qwen3-VL without a head of its own, as the one of 4 B has none."""
    model = tiny_seeing_encoder(seed, {"num_hidden_layers": LAYERS, **text}, vision).model
    model.config.tie_word_embeddings = True
    return model


def transformer_file(model: Any) -> dict[str, torch.Tensor]:
    """The transformer's tensors in its authors' names, by hand: the table of a block is one vector."""
    attention = {"to_q": "wq", "to_k": "wk", "to_v": "wv", "to_gate": "gate", "to_out.0": "wo"}
    block = {
        **{f"attn.{ours}.weight": f"attn.{theirs}.weight" for ours, theirs in attention.items()},
        **{f"attn.norm_{x}.weight": f"attn.qknorm.{x}norm.scale" for x in "qk"},
        **{f"ff.{layer}.weight": f"mlp.{layer}.weight" for layer in ("gate", "up", "down")},
        "norm1.weight": "prenorm.scale",
        "norm2.weight": "postnorm.scale",
    }
    layers = {
        "img_in": "first",
        "time_embed.linear_1": "tmlp.0",
        "time_embed.linear_2": "tmlp.2",
        "time_mod_proj": "tproj.1",
        "txt_in.linear_1": "txtmlp.1",
        "txt_in.linear_2": "txtmlp.3",
        "final_layer.linear": "last.linear",
    }
    names = {f"{ours}.{leaf}": f"{theirs}.{leaf}" for ours, theirs in layers.items() for leaf in ("weight", "bias")}
    names |= {
        "txt_in.norm.weight": "txtmlp.0.scale",
        "final_layer.norm.weight": "last.norm.scale",
        "final_layer.scale_shift_table": "last.modulation.lin",
        "text_fusion.projector.weight": "txtfusion.projector.weight",
    }
    places = {f"transformer_blocks.{i}": f"blocks.{i}" for i in range(model.config.num_layers)}
    for kind in ("layerwise", "refiner"):
        count = getattr(model.config, f"num_{kind}_text_blocks")
        places |= {f"text_fusion.{kind}_blocks.{i}": f"txtfusion.{kind}_blocks.{i}" for i in range(count)}
    for ours, theirs in places.items():
        names |= {f"{ours}.{name}": f"{theirs}.{other}" for name, other in block.items()}
        if ours.startswith("transformer"):
            names[f"{ours}.scale_shift_table"] = f"{theirs}.mod.lin"
    weights = model.state_dict()
    assert names.keys() == weights.keys()
    return {
        theirs: (weights[ours].flatten() if theirs.endswith(".mod.lin") else weights[ours]).contiguous()
        for ours, theirs in names.items()
    }


def write_tiny_krea2(folder: Path, *, turbo: bool = False, shard: str = "400KB", **sizes: object) -> None:
    """Write the whole folder through the pipeline's save_pretrained, with shards of at most `shard`."""
    from diffusers import FlowMatchEulerDiscreteScheduler, Krea2Pipeline
    from transformers import Qwen2Tokenizer

    part, tokens = folder.with_suffix(".part"), folder.with_suffix(".tokens")
    write_tiny_tokenizer(tokens)
    pipeline = Krea2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        vae=tiny_vae(),
        text_encoder=tiny_text_encoder(),
        tokenizer=Qwen2Tokenizer.from_pretrained(tokens),
        transformer=tiny_dit(**sizes),
        is_distilled=turbo,
    )
    pipeline.save_pretrained(part, max_shard_size=shard)
    part.rename(folder)
