"""Tiny SANA folders, written by diffusers itself, with nothing in them that is all ones or zeros.

Odd widths, heads of other widths in both attentions, every norm, bias and table non-trivial, the published scheduler
configurations, and a VAE of six levels, so that a latent stands for 32 x 32 pixels as in the published one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from support.tiny_lumina import tiny_text_encoder, tiny_tokenizer
from support.tiny_model import randomise

DIT: dict[str, Any] = {
    "in_channels": 8,
    "out_channels": 8,
    "num_attention_heads": 5,
    "attention_head_dim": 12,
    "num_layers": 3,
    "num_cross_attention_heads": 3,
    "cross_attention_head_dim": 20,
    "cross_attention_dim": 60,
    "caption_channels": 60,
    "mlp_ratio": 2.3,
    "sample_size": 32,
    "qk_norm": "rms_norm_across_heads",
}
# What is different of SANA-Sprint, of SANA 1.0, and of the models for 2K and 4K
KINDS: dict[str, dict[str, Any]] = {
    "sana": {},
    "sana-sprint": {"guidance_embeds": True, "guidance_embeds_scale": 0.1},
    "sana-1.0": {"qk_norm": None},
    "sana-2k": {"qk_norm": None, "interpolation_scale": 1.5, "sample_size": 64},
}
# As wide as needed for codes in blocks of 32
WIDE: dict[str, Any] = {
    "num_attention_heads": 2, "attention_head_dim": 32, "cross_attention_head_dim": 32, "num_cross_attention_heads": 2,
    "cross_attention_dim": 64, "mlp_ratio": 2.0,
}  # fmt: skip
VAE: dict[str, Any] = {
    "latent_channels": 8,
    "attention_head_dim": 8,
    "encoder_block_types": ["ResBlock"] * 3 + ["EfficientViTBlock"] * 3,
    "decoder_block_types": ["ResBlock"] * 3 + ["EfficientViTBlock"] * 3,
    "encoder_block_out_channels": [6, 8, 8, 16, 16, 32],
    "decoder_block_out_channels": [6, 8, 8, 16, 16, 32],
    "encoder_layers_per_block": [2, 1, 1, 2, 1, 1],
    "decoder_layers_per_block": [1, 2, 1, 1, 2, 1],
    "encoder_qkv_multiscales": [[], [], [], [5], [5], [5]],
    "decoder_qkv_multiscales": [[], [], [], [5], [5], [5]],
    "downsample_block_type": "conv",
    "upsample_block_type": "interpolate",
    "decoder_norm_types": "rms_norm",
    "decoder_act_fns": "silu",
    "scaling_factor": 0.41407,
}
DPM = {
    "algorithm_type": "dpmsolver++", "final_sigmas_type": "zero", "flow_shift": 3.0, "lower_order_final": True,
    "prediction_type": "flow_prediction", "solver_order": 2, "solver_type": "midpoint", "use_flow_sigmas": True,
}  # fmt: skip


def tiny_dit(seed: int = 1, **changes: object) -> Any:
    """diffusers' transformer with the tiny configuration, float32, randomised."""
    from diffusers import SanaTransformer2DModel

    model = SanaTransformer2DModel(**(DIT | changes))
    randomise(model, seed)
    generator = torch.Generator().manual_seed(seed + 100)
    for name, parameter in model.named_parameters():
        if name.endswith("scale_shift_table"):
            parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def tiny_vae(seed: int = 2, **changes: object) -> Any:
    from diffusers import AutoencoderDC

    model = AutoencoderDC(**(VAE | changes))
    randomise(model, seed)
    return model.eval()


def write_tiny_sana(
    folder: Path,
    kind: str = "sana",
    shard: str = "400KB",
    dit: Mapping[str, object] = {},
    text: Mapping[str, object] = {},
) -> None:
    """Write the whole folder through the pipeline's save_pretrained, with shards of at most `shard`; `dit` and `text`
    are changes of the configurations."""
    import diffusers

    is_sprint = kind == "sana-sprint"
    scheduler = diffusers.SCMScheduler() if is_sprint else diffusers.DPMSolverMultistepScheduler(**DPM)
    pipeline = (diffusers.SanaSprintPipeline if is_sprint else diffusers.SanaPipeline)(
        transformer=tiny_dit(**{**KINDS[kind], **dit}),
        scheduler=scheduler,
        vae=tiny_vae(),
        text_encoder=tiny_text_encoder(**text),
        tokenizer=tiny_tokenizer(),
    )
    part = folder.with_suffix(".part")
    pipeline.save_pretrained(part, max_shard_size=shard)
    part.rename(folder)


# Files in the authors' names


def transformer_file(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of diffusers' transformer under its authors' names, written by hand."""
    given, out = dict(model.state_dict()), {}
    whole = {
        "patch_embed.proj": "x_embedder.proj",
        "caption_projection.linear_1": "y_embedder.y_proj.fc1",
        "caption_projection.linear_2": "y_embedder.y_proj.fc2",
        "caption_norm": "attention_y_norm",
        "time_embed.linear": "t_block.1",
        "proj_out": "final_layer.linear",
    }
    guided = model.config.guidance_embeds
    times = "time_embed.timestep_embedder" if guided else "time_embed.emb.timestep_embedder"
    for i, j in ((1, 0), (2, 2)):
        whole[f"{times}.linear_{i}"] = f"t_embedder.mlp.{j}"
        if guided:
            whole[f"time_embed.guidance_embedder.linear_{i}"] = f"cfg_embedder.mlp.{j}"
    out["final_layer.scale_shift_table"] = given.pop("scale_shift_table")
    for n in range(model.config.num_layers):
        ours, theirs = f"transformer_blocks.{n}", f"blocks.{n}"
        out[f"{theirs}.scale_shift_table"] = given.pop(f"{ours}.scale_shift_table")
        out[f"{theirs}.attn.qkv.weight"] = torch.cat([given.pop(f"{ours}.attn1.to_{x}.weight") for x in "qkv"])
        for leaf in ("weight", "bias"):
            pair = [given.pop(f"{ours}.attn2.to_{x}.{leaf}") for x in "kv"]
            out[f"{theirs}.cross_attn.kv_linear.{leaf}"] = torch.cat(pair)
        whole[f"{ours}.attn2.to_q"] = f"{theirs}.cross_attn.q_linear"
        for attention, name in (("attn1", "attn"), ("attn2", "cross_attn")):
            whole[f"{ours}.{attention}.to_out.0"] = f"{theirs}.{name}.proj"
            for x in "qk":
                whole[f"{ours}.{attention}.norm_{x}"] = f"{theirs}.{name}.{x}_norm"
        for one, other in (("inverted", "inverted_conv"), ("depth", "depth_conv"), ("point", "point_conv")):
            whole[f"{ours}.ff.conv_{one}"] = f"{theirs}.mlp.{other}.conv"
    for name, value in given.items():
        layer, _, leaf = name.rpartition(".")
        out[f"{whole[layer]}.{leaf}"] = value
    side = model.config.sample_size
    out["pos_embed"] = torch.zeros(1, side * side, model.config.cross_attention_dim)
    out["y_embedder.y_embedding"] = torch.zeros(300, model.config.caption_channels)
    return {key: value.contiguous() for key, value in out.items()}


def vae_file(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of diffusers' VAE under its authors' names, written by hand."""
    given, out = dict(model.state_dict()), {}
    ends = {
        "encoder.conv_in": "encoder.project_in.conv",
        "encoder.conv_out": "encoder.project_out.main.op_list.0.conv",
        "decoder.conv_in": "decoder.project_in.main.conv",
        "decoder.norm_out": "decoder.project_out.op_list.0",
        "decoder.conv_out": "decoder.project_out.op_list.2.conv",
    }
    inner = {
        "conv1": "main.conv1.conv",
        "conv2": "main.conv2.conv",
        "norm": "main.conv2.norm",
        "attn.to_out": "context_module.main.proj.conv",
        "attn.norm_out": "context_module.main.proj.norm",
        "attn.to_qkv_multiscale.0.proj_in": "context_module.main.aggreg.0.0",
        "attn.to_qkv_multiscale.0.proj_out": "context_module.main.aggreg.0.1",
        "conv_out.conv_inverted": "local_module.main.inverted_conv.conv",
        "conv_out.conv_depth": "local_module.main.depth_conv.conv",
        "conv_out.conv_point": "local_module.main.point_conv.conv",
        "conv_out.norm": "local_module.main.point_conv.norm",
    }
    for name in list(given):
        if name.endswith(".attn.to_q.weight"):
            start = name.removesuffix("to_q.weight")
            qkv = torch.cat([given.pop(f"{start}to_{x}.weight") for x in "qkv"])
            there = _stage(start.removesuffix(".attn."))
            out[f"{there}.context_module.main.qkv.conv.weight"] = qkv[..., None, None]
    for name, value in given.items():
        layer, _, leaf = name.rpartition(".")
        if layer in ends:
            out[f"{ends[layer]}.{leaf}"] = value
            continue
        way, blocks, level, place, *rest = layer.split(".")
        there, rest_ = _stage(f"{way}.{blocks}.{level}.{place}"), ".".join(rest)
        if rest_ == "conv":
            out[f"{there}.main.{'conv.' if way == 'decoder' else ''}conv.{leaf}"] = value
        else:
            kernel = value[..., None, None] if rest_ == "attn.to_out" else value
            out[f"{there}.{inner[rest_]}.{leaf}"] = kernel
    return {key: value.contiguous() for key, value in out.items()}


def _stage(name: str) -> str:
    way, _, level, place = name.split(".")
    return f"{way}.stages.{level}.op_list.{place}"
