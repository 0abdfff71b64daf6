"""Tiny PixArt folders, written by diffusers itself, with nothing in them that is all ones or zeros: of Sigma, of alpha,
which sees the size of its pictures, and of alpha's consistency model. And the transformer by its authors' names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from support.spiece_files import hugging_face, trained
from support.tiny_model import randomise
from support.tiny_sd import VAE
from support.tiny_t5 import tiny_t5

BETAS = {"beta_start": 0.0001, "beta_end": 0.02, "beta_schedule": "linear", "num_train_timesteps": 1000}
"""PixArt's own, whose last level is 157."""
QUIET = BETAS | {"beta_end": 0.008}
"""Of alpha: random weights, which do not know the noise, make latents a hundred times as large of PixArt's own."""
DIT: dict[str, Any] = {
    "num_attention_heads": 3,
    "attention_head_dim": 20,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 3,
    "cross_attention_dim": 60,
    "caption_channels": 52,
    "sample_size": 12,
    "use_additional_conditions": False,
}
ALPHA = {"sample_size": 128, "use_additional_conditions": None}
KINDS = {"pixart": {}, "pixart-alpha": ALPHA, "pixart-lcm": ALPHA}
# Widths of whole blocks of codes
WIDE = {"num_attention_heads": 4, "attention_head_dim": 24, "cross_attention_dim": 96, "caption_channels": 64}
WIDE_TEXT = {"vocab_size": 1000, "d_model": 64, "d_ff": 96, "d_kv": 16, "num_heads": 4}
SCALES = {"pixart": 0.13025}  # of the latents


def tiny_dit(seed: int = 1, **changes: object) -> Any:
    """diffusers' transformer with the tiny configuration, float32, randomised."""
    from diffusers import PixArtTransformer2DModel

    model = PixArtTransformer2DModel(**(DIT | changes))
    randomise(model, seed)
    for name, table in model.named_parameters():
        if name.endswith("scale_shift_table"):
            table.data *= 4  # as large as what all blocks share
    return model.eval()


def tiny_vae(seed: int = 2, **changes: object) -> Any:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(**(VAE | changes))
    randomise(model, seed)
    return model.eval()


def transformer_file(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of the transformer in its authors' names, by hand."""
    given, out = dict(model.state_dict()), {}
    ends = {
        "pos_embed.proj": "x_embedder.proj",
        "caption_projection.linear_1": "y_embedder.y_proj.fc1",
        "caption_projection.linear_2": "y_embedder.y_proj.fc2",
        "adaln_single.linear": "t_block.1",
        "proj_out": "final_layer.linear",
    }
    embedders = {"timestep": "t_embedder", "resolution": "csize_embedder", "aspect_ratio": "ar_embedder"}
    for ours, theirs in embedders.items():
        if f"adaln_single.emb.{ours}_embedder.linear_1.bias" in given:
            ends |= {f"adaln_single.emb.{ours}_embedder.linear_{i}": f"{theirs}.mlp.{2 * i - 2}" for i in (1, 2)}
    for i in range(model.config.num_layers):
        here, there = f"transformer_blocks.{i}", f"blocks.{i}"
        ends |= {
            f"{here}.attn1.to_out.0": f"{there}.attn.proj",
            f"{here}.attn2.to_q": f"{there}.cross_attn.q_linear",
            f"{here}.attn2.to_out.0": f"{there}.cross_attn.proj",
            f"{here}.ff.net.0.proj": f"{there}.mlp.fc1",
            f"{here}.ff.net.2": f"{there}.mlp.fc2",
        }
        out[f"{there}.scale_shift_table"] = given.pop(f"{here}.scale_shift_table")
        for leaf in ("weight", "bias"):
            for attention, name, letters in (("attn1", "attn.qkv", "qkv"), ("attn2", "cross_attn.kv_linear", "kv")):
                parts = [given.pop(f"{here}.{attention}.to_{x}.{leaf}") for x in letters]
                out[f"{there}.{name}.{leaf}"] = torch.cat(parts)
    out["final_layer.scale_shift_table"] = given.pop("scale_shift_table")
    for leaf in ("weight", "bias"):
        for ours, theirs in ends.items():
            out[f"{theirs}.{leaf}"] = given.pop(f"{ours}.{leaf}")
    assert not given, given.keys()
    return {key: value.contiguous() for key, value in out.items()}


def authors_file(model: Any) -> dict[str, torch.Tensor]:
    """The same with what no forward reads: positions, and the states of an empty caption."""
    out = transformer_file(model)
    length = 120 if "csize_embedder.mlp.0.bias" in out else 300
    out["y_embedder.y_embedding"] = torch.ones(length, model.config.caption_channels)
    out["pos_embed"] = torch.ones(1, (model.config.sample_size // 2) ** 2, model.inner_dim)
    return out


def write_tiny_pixart(
    folder: Path, kind: str = "pixart", shard: str = "400KB", dit: Mapping[str, object] = {}, **text: object
) -> None:
    """Write the whole folder through the pipeline's save_pretrained, with shards of at most `shard`; `dit` and `text`
    are changes of the configurations."""
    import diffusers

    of_sigma = kind == "pixart"
    scheduler = diffusers.LCMScheduler if kind == "pixart-lcm" else diffusers.DPMSolverMultistepScheduler
    pipeline = (diffusers.PixArtSigmaPipeline if of_sigma else diffusers.PixArtAlphaPipeline)(
        transformer=tiny_dit(**(KINDS[kind] | dit)),
        scheduler=scheduler(**(BETAS if of_sigma else QUIET)),
        vae=tiny_vae(scaling_factor=SCALES.get(kind, 0.18215)),
        text_encoder=tiny_t5(**({"vocab_size": 1000} | text)),
        tokenizer=hugging_face(trained()),
    )
    part = folder.with_suffix(".part")
    pipeline.save_pretrained(part, max_shard_size=shard)
    part.rename(folder)
