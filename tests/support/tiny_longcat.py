"""Tiny LongCat-Image folders, written by diffusers itself, with nothing in them that is all ones or zeros."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tiny_tokenizer import write_tiny_tokenizer

from support.tiny_chroma import blocks_file
from support.tiny_edit import louder, tiny_seeing_encoder
from support.tiny_flux import SCHEDULER
from support.tiny_model import randomise, tiny_text_encoder
from support.tiny_zimage import tiny_vae

DIT: dict[str, Any] = {
    "in_channels": 64,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 22,
    "num_attention_heads": 3,
    "joint_attention_dim": 60,
    "pooled_projection_dim": 60,
    "axes_dims_rope": [6, 8, 8],
}
NAMES = {
    "time_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "single_transformer_blocks.": "single_blocks.",
    "transformer_blocks.": "double_blocks.",
    ".norm.linear": ".modulation.lin",
    "norm1_context.linear": "txt_mod.lin",
    "norm1.linear": "img_mod.lin",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
}
"""By diffusers' names what Flux.1's are."""
KINDS = {"text": "LongCatImagePipeline", "edit": "LongCatImageEditPipeline"}


def tiny_dit(seed: int = 1, **changes: object) -> torch.nn.Module:
    """diffusers' transformer with the tiny configuration, float32, randomised."""
    from diffusers import LongCatImageTransformer2DModel

    model = LongCatImageTransformer2DModel(**(DIT | changes))
    randomise(model, seed)
    return model.eval()


def write_tiny_longcat(folder: Path, kind: str, shard: str = "400KB", **sizes: object) -> None:
    """Write the whole folder through the pipeline's save_pretrained, with shards of at most `shard`. The class of Edit
    cannot be made without a processor of pictures, so its name alone is written."""
    from diffusers import FlowMatchEulerDiscreteScheduler, LongCatImagePipeline
    from transformers import Qwen2Tokenizer

    tokens = folder.parent / f"{folder.name}-tokenizer"
    write_tiny_tokenizer(tokens)
    encoder = tiny_seeing_encoder() if kind == "edit" else tiny_text_encoder()
    transformer = tiny_dit(**sizes)
    pipeline = LongCatImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        vae=tiny_vae(),
        text_encoder=encoder,
        tokenizer=Qwen2Tokenizer.from_pretrained(tokens),
        text_processor=None,
        transformer=louder(transformer) if kind == "edit" else transformer,
    )
    part = folder.with_suffix(".part")
    pipeline.save_pretrained(part, max_shard_size=shard)
    index = part / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"_class_name": KINDS[kind]}))
    part.rename(folder)


def transformer_file(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The transformer's tensors by Flux.1's names, as files for ComfyUI have them."""
    out, rest = blocks_file(model)
    for name, value in rest.items():
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        out[name] = torch.cat(value.chunk(2)[::-1]) if "adaLN" in name else value
    return {key: value.contiguous() for key, value in out.items()}
