"""A tiny Chroma folder, written by diffusers itself, with nothing in it that is all ones or zeros; and its transformer
by its authors' names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from support.spiece_files import hugging_face, trained
from support.tiny_edit import louder
from support.tiny_flux import SCHEDULER
from support.tiny_model import randomise
from support.tiny_t5 import tiny_t5
from support.tiny_zimage import tiny_vae

DIT: dict[str, Any] = {
    "in_channels": 64,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 22,
    "num_attention_heads": 3,
    "joint_attention_dim": 60,
    "axes_dims_rope": [6, 8, 8],
    "approximator_num_channels": 64,
    "approximator_hidden_dim": 40,
    "approximator_layers": 3,
}


def tiny_dit(seed: int = 1, **changes: object) -> torch.nn.Module:
    """diffusers' transformer with the tiny configuration, float32, randomised."""
    from diffusers import ChromaTransformer2DModel

    model = ChromaTransformer2DModel(**(DIT | changes))
    randomise(model, seed)
    return model.eval()


def write_tiny_chroma(folder: Path, shard: str = "400KB", **sizes: object) -> None:
    """Write the whole folder through the pipeline's save_pretrained, with shards of at most `shard`."""
    from diffusers import ChromaPipeline, FlowMatchEulerDiscreteScheduler

    pipeline = ChromaPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        vae=tiny_vae(),
        text_encoder=tiny_t5(vocab_size=1000, d_model=60),
        tokenizer=hugging_face(trained()),
        transformer=louder(tiny_dit(**sizes)),
    )
    part = folder.with_suffix(".part")
    pipeline.save_pretrained(part, max_shard_size=shard)
    part.rename(folder)


def transformer_file(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The transformer's tensors by its authors' names, made from diffusers'."""
    out, rest = blocks_file(model)
    for name, value in rest.items():
        theirs = name.replace("linear_1", "in_layer").replace("linear_2", "out_layer")
        out[theirs.replace(".weight", ".scale") if ".norms." in name else theirs] = value
    return {key: value.contiguous() for key, value in out.items()}


def blocks_file(model: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What all transformers of Flux.1's blocks have, by the names of its authors; and the rest, by diffusers'."""
    given, out = dict(model.state_dict()), {}
    streams = {
        "img": ("to_{}", "norm_{}", "to_out.0", "ff"),
        "txt": ("add_{}_proj", "norm_added_{}", "to_add_out", "ff_context"),
    }
    ends = {"img_in": "x_embedder", "txt_in": "context_embedder", "final_layer.linear": "proj_out"}
    for leaf in ("weight", "bias"):
        for theirs, ours in ends.items():
            out[f"{theirs}.{leaf}"] = given.pop(f"{ours}.{leaf}")
        for i in range(model.config.num_layers):
            for stream, (qkv, _, proj, ff) in streams.items():
                here, there = f"transformer_blocks.{i}.", f"double_blocks.{i}.{stream}_"
                parts = [given.pop(f"{here}attn.{qkv.format(x)}.{leaf}") for x in "qkv"]
                out[f"{there}attn.qkv.{leaf}"] = torch.cat(parts)
                out[f"{there}attn.proj.{leaf}"] = given.pop(f"{here}attn.{proj}.{leaf}")
                out[f"{there}mlp.0.{leaf}"] = given.pop(f"{here}{ff}.net.0.proj.{leaf}")
                out[f"{there}mlp.2.{leaf}"] = given.pop(f"{here}{ff}.net.2.{leaf}")
        for i in range(model.config.num_single_layers):
            here, there = f"single_transformer_blocks.{i}.", f"single_blocks.{i}."
            parts = [given.pop(f"{here}{name}.{leaf}") for name in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")]
            out[f"{there}linear1.{leaf}"] = torch.cat(parts)
            out[f"{there}linear2.{leaf}"] = given.pop(f"{here}proj_out.{leaf}")
    for x, name in (("q", "query_norm"), ("k", "key_norm")):
        for i in range(model.config.num_layers):
            for stream, (_, norm, *_) in streams.items():
                own = given.pop(f"transformer_blocks.{i}.attn.{norm.format(x)}.weight")
                out[f"double_blocks.{i}.{stream}_attn.norm.{name}.scale"] = own
        for i in range(model.config.num_single_layers):
            own = given.pop(f"single_transformer_blocks.{i}.attn.norm_{x}.weight")
            out[f"single_blocks.{i}.norm.{name}.scale"] = own
    return out, given
