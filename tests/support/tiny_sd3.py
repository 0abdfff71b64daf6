"""Tiny Stable Diffusion 3 models, written by diffusers itself, with nothing in them that is all ones or zeros.

Odd widths, three layers or more, every norm and bias non-trivial. Three kinds, as they are published: SD 3 (no norms of
q and k), SD 3.5 large (with norms), SD 3.5 medium (a second attention in its first blocks).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from support.spiece_files import hugging_face, trained
from support.tiny_clip import EOS, tiny_clip, write_tiny_clip_tokenizer
from support.tiny_ldm import behind, vae_file
from support.tiny_model import randomise
from support.tiny_t5 import tiny_t5

DIT: dict[str, Any] = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 4,
    "attention_head_dim": 12,
    "num_attention_heads": 3,
    "joint_attention_dim": 60,
    "caption_projection_dim": 36,
    "pooled_projection_dim": 46,
    "pos_embed_max_size": 19,
}
KINDS: dict[str, dict[str, Any]] = {
    "sd3": {"qk_norm": None},
    "large": {"qk_norm": "rms_norm"},
    "medium": {"qk_norm": "rms_norm", "dual_attention_layers": (0, 1)},
}


def tiny_dit(kind: str = "medium", seed: int = 1, **changes: object) -> torch.nn.Module:
    """diffusers' transformer of a kind with the tiny configuration, float32, randomised, its table of positions too."""
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(**(DIT | KINDS[kind] | changes))
    randomise(model, seed)
    # The file's table is the one to take: no formula gives this one.
    generator = torch.Generator().manual_seed(seed + 100)
    table = model.pos_embed.pos_embed
    table += 0.3 * torch.randn(table.shape, generator=generator)
    return model.eval()


SCHEDULER = {"num_train_timesteps": 1000, "shift": 3.0}
VAE: dict[str, Any] = {
    "block_out_channels": [6, 12, 12, 18],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 1,
    "latent_channels": 16,
    "norm_num_groups": 3,
    "scaling_factor": 1.5305,
    "shift_factor": 0.0609,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
CLIPS: dict[str, dict[str, Any]] = {  # both with projections; the first one's activation is quick_gelu
    "text_encoder": {"hidden_size": 20, "intermediate_size": 44, "num_attention_heads": 2, "projection_dim": 18},
    "text_encoder_2": {"hidden_size": 30, "intermediate_size": 52, "num_attention_heads": 3, "projection_dim": 28},
}


# What the shapes of a file without configurations do not show is as published: heads of 64 channels, norms of 32 groups
WIDE_DIT = {
    "attention_head_dim": 64,
    "num_attention_heads": 2,
    "caption_projection_dim": 128,
    "joint_attention_dim": 200,
    "sample_size": 128,
}
WIDE_CLIPS = {
    "text_encoder": {"hidden_size": 64, "num_attention_heads": 1, "projection_dim": 18},
    "text_encoder_2": {"hidden_size": 128, "num_attention_heads": 2, "projection_dim": 28},
}
WIDE_VAE = {"block_out_channels": [32, 64, 32, 32], "norm_num_groups": 32, "sample_size": 1024}


def tiny_vae(seed: int = 2, **changes: Any) -> torch.nn.Module:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(**(VAE | changes))
    randomise(model, seed)
    return model.eval()


T5 = "text_encoder_3"
WITH_T5 = ("medium",)  # kinds whose folder has the third text encoder


def models_of(kind: str, *, wide: bool = False) -> dict[str, torch.nn.Module]:
    """Every component by its folder's name. `wide`: as a file without configurations can show."""
    dit, clips = WIDE_DIT if wide else {}, WIDE_CLIPS if wide else CLIPS
    width = (DIT | dit)["joint_attention_dim"]
    t5 = {T5: tiny_t5(8, d_model=width, vocab_size=len(hugging_face(trained())))} if kind in WITH_T5 else {}
    return {
        "transformer": tiny_dit(kind, **dit),
        "text_encoder": tiny_clip("ViT-L", 3, projected=True, **clips["text_encoder"]),
        "text_encoder_2": tiny_clip("bigG", 4, **clips["text_encoder_2"]),
        **t5,
        "vae": tiny_vae(**(WIDE_VAE if wide else {})),
    }


def write_tiny_sd3(folder: Path, kind: str = "medium", shard: str = "400KB", *, wide: bool = False) -> None:
    """Write the whole folder through StableDiffusion3Pipeline.save_pretrained, with shards of at most `shard`."""
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
    from transformers import CLIPTokenizer

    parts: dict[str, Any] = {T5: None, "tokenizer_3": hugging_face(trained()) if kind in WITH_T5 else None}
    parts |= models_of(kind, wide=wide)
    for name, pad in (("tokenizer", EOS), ("tokenizer_2", "!")):
        tokens = folder.parent / f"{folder.name}-{name}"
        write_tiny_clip_tokenizer(tokens, pad)
        parts[name] = CLIPTokenizer.from_pretrained(tokens)
    pipeline = StableDiffusion3Pipeline(scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER), **parts)
    part = folder.with_suffix(".part")
    pipeline.save_pretrained(part, max_shard_size=shard)
    part.rename(folder)


# In one file


def transformer_file(model: torch.nn.Module, *, table: bool = True) -> dict[str, torch.Tensor]:
    """The transformer in its authors' names, without prefix; `table`: with the table of positions."""
    state, out = dict(model.state_dict()), {}
    last = model.config.num_layers - 1
    positions = state.pop("pos_embed.pos_embed")
    for kind in ("weight", "bias"):
        for layer in range(last + 1):
            ours, theirs = f"transformer_blocks.{layer}.", f"joint_blocks.{layer}."
            for path, names in (
                ("x_block.attn", [f"attn.to_{x}" for x in "qkv"]),
                ("context_block.attn", [f"attn.add_{x}_proj" for x in "qkv"]),
                ("x_block.attn2", [f"attn2.to_{x}" for x in "qkv"]),
            ):
                if f"{ours}{names[0]}.{kind}" in state:
                    out[f"{theirs}{path}.qkv.{kind}"] = torch.cat([state.pop(f"{ours}{name}.{kind}") for name in names])
        for name in (f"transformer_blocks.{last}.norm1_context.linear.{kind}", f"norm_out.linear.{kind}"):
            state[name] = torch.cat(state[name].chunk(2)[::-1])
    for name, value in state.items():
        for pattern, new in (
            (r"^pos_embed\.proj", "x_embedder.proj"),
            (r"^time_text_embed\.timestep_embedder\.linear_1", "t_embedder.mlp.0"),
            (r"^time_text_embed\.timestep_embedder\.linear_2", "t_embedder.mlp.2"),
            (r"^time_text_embed\.text_embedder\.linear_1", "y_embedder.mlp.0"),
            (r"^time_text_embed\.text_embedder\.linear_2", "y_embedder.mlp.2"),
            (r"^norm_out\.linear", "final_layer.adaLN_modulation.1"),
            (r"^proj_out", "final_layer.linear"),
            (r"^transformer_blocks", "joint_blocks"),
            (r"norm1\.linear", "x_block.adaLN_modulation.1"),
            (r"norm1_context\.linear", "context_block.adaLN_modulation.1"),
            (r"(?<=\d\.)(attn2?)\.to_out\.0", r"x_block.\1.proj"),
            (r"attn\.to_add_out", "context_block.attn.proj"),
            (r"attn\.norm_added_", "context_block.attn.ln_"),
            (r"(?<=\d\.)(attn2?)\.norm_", r"x_block.\1.ln_"),
            (r"ff\.net\.0\.proj", "x_block.mlp.fc1"),
            (r"ff\.net\.2", "x_block.mlp.fc2"),
            (r"ff_context\.net\.0\.proj", "context_block.mlp.fc1"),
            (r"ff_context\.net\.2", "context_block.mlp.fc2"),
        ):
            name = re.sub(pattern, new, name)
        out[name] = value
    return out | ({"pos_embed": positions} if table else {})


def one_file(models: dict[str, torch.nn.Module]) -> dict[str, torch.Tensor]:
    """All of `models` in one file, with what published files have beside them."""
    out = behind("model.diffusion_model.", transformer_file(models["transformer"]))
    if "vae" in models:
        out |= behind("first_stage_model.", vae_file(models["vae"]))
    for name, prefix in (("text_encoder", "clip_l"), ("text_encoder_2", "clip_g"), (T5, "t5xxl")):
        if name in models:
            out |= behind(f"text_encoders.{prefix}.transformer.", dict(models[name].state_dict()))
            out |= {f"text_encoders.{prefix}.logit_scale": torch.tensor(4.6)}
    return {key: value.clone().contiguous() for key, value in out.items()}
