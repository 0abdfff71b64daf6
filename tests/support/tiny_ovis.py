"""A tiny Ovis-Image folder, written by diffusers itself, with nothing in it that is all ones or zeros; and its
transformer by its authors' names and ComfyUI's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tiny_tokenizer import write_tiny_tokenizer

from support.tiny_chroma import blocks_file
from support.tiny_flux import SCHEDULER
from support.tiny_longcat import NAMES
from support.tiny_model import randomise
from support.tiny_zimage import tiny_text_encoder, tiny_vae

DIT: dict[str, Any] = {
    "in_channels": 64,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 22,
    "num_attention_heads": 3,
    "joint_attention_dim": 60,
    "axes_dims_rope": [6, 8, 8],
}
CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
"""Qwen3's, as far as the pipeline uses it."""


def tiny_dit(seed: int = 1, **changes: object) -> torch.nn.Module:
    """diffusers' transformer with the tiny configuration, float32, randomised."""
    from diffusers import OvisImageTransformer2DModel

    model = OvisImageTransformer2DModel(**(DIT | changes))
    randomise(model, seed)
    return model.eval()


def write_tiny_ovis(folder: Path, shard: str = "400KB", **sizes: object) -> None:
    """Write the whole folder through the pipeline's save_pretrained, with shards of at most `shard`."""
    from diffusers import FlowMatchEulerDiscreteScheduler, OvisImagePipeline
    from transformers import Qwen2Tokenizer

    tokens = folder.parent / f"{folder.name}-tokenizer"
    write_tiny_tokenizer(tokens)
    config = tokens / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": CHAT}))
    pipeline = OvisImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        vae=tiny_vae(),
        text_encoder=tiny_text_encoder(),
        tokenizer=Qwen2Tokenizer.from_pretrained(tokens),
        transformer=tiny_dit(**sizes),
    )
    part = folder.with_suffix(".part")
    pipeline.save_pretrained(part, max_shard_size=shard)
    part.rename(folder)


def transformer_file(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The transformer's tensors by ComfyUI's names."""
    blocks, rest = blocks_file(model)
    out = {}
    for name, value in blocks.items():
        block, mlp, leaf = name.partition("_mlp.0.")
        if mlp:
            out[f"{block}_mlp.up_proj.{leaf}"], out[f"{block}_mlp.gate_proj.{leaf}"] = value.chunk(2)
        else:
            out[name.replace("_mlp.2.", "_mlp.down_proj.")] = value
    for name, value in rest.items():
        if name == "context_embedder_norm.weight":
            out["txt_norm.scale"] = value
            continue
        for ours, theirs in NAMES.items():
            name = name.replace(ours.removeprefix("time_embed."), theirs)
        out[name] = torch.cat(value.chunk(2)[::-1]) if "adaLN" in name else value
    return {key: value.contiguous() for key, value in out.items()}


def authors_file(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The transformer's tensors by its authors' names."""
    return {
        (f"semantic_{name}" if name.startswith("txt_") else name).replace(".scale", ".weight"): value
        for name, value in transformer_file(model).items()
    }
