"""Tiny Flux.2 klein folders and networks, written by diffusers and transformers, with nothing in them that is all ones
or zeros."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tiny_tokenizer import tiny_vocabulary, write_tiny_tokenizer

from support.tiny_model import randomise

DIT: dict[str, Any] = {
    "in_channels": 32,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 22,
    "num_attention_heads": 3,
    "joint_attention_dim": 180,
    "timestep_guidance_channels": 64,
    "axes_dims_rope": (4, 6, 4, 8),
    "guidance_embeds": False,
}


TEXT: dict[str, Any] = {
    "hidden_size": 60,
    "intermediate_size": 88,
    "num_hidden_layers": 29,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": True,
}
VAE: dict[str, Any] = {
    "block_out_channels": (6, 12, 12, 18),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 1,
    "latent_channels": 8,
    "norm_num_groups": 3,
}


SMALL_DECODER = {"decoder_block_out_channels": (3, 9, 9, 15)}
"""Of a VAE whose decoder is narrower than its encoder."""


def tiny_dit(seed: int = 1, **changes: object) -> torch.nn.Module:
    """diffusers' transformer with the tiny configuration, float32, randomised."""
    from diffusers import Flux2Transformer2DModel

    model = Flux2Transformer2DModel(**(DIT | changes))
    randomise(model, seed)
    return model.eval()


def tiny_text_encoder(seed: int = 3, **changes: object) -> torch.nn.Module:
    """transformers' language model, with as many layers as have states taken behind them, and two more."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(Qwen3Config(**(TEXT | {"vocab_size": len(tiny_vocabulary()[0]) + 14} | changes)))
    randomise(model, seed)
    return model.eval()


def tiny_vae(seed: int = 2, **changes: object) -> torch.nn.Module:
    """diffusers' VAE with the tiny configuration, and statistics of which no channel has another's."""
    from diffusers import AutoencoderKLFlux2

    model = AutoencoderKLFlux2(**(VAE | changes))
    randomise(model, seed)
    generator = torch.Generator().manual_seed(seed + 100)
    mean, variance = model.bn.running_mean, model.bn.running_var
    mean.copy_(0.5 * torch.randn(mean.shape, generator=generator))
    variance.copy_(0.3 + 2 * torch.rand(variance.shape, generator=generator))
    model.bn.num_batches_tracked.fill_(1234)
    return model.eval()


def transformer_file(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The transformer's tensors in its authors' names, by hand: fused q, k and v, shift before scale."""
    ends = {
        "x_embedder": "img_in",
        "context_embedder": "txt_in",
        "proj_out": "final_layer.linear",
        "time_guidance_embed.timestep_embedder.linear_1": "time_in.in_layer",
        "time_guidance_embed.timestep_embedder.linear_2": "time_in.out_layer",
        "double_stream_modulation_img.linear": "double_stream_modulation_img.lin",
        "double_stream_modulation_txt.linear": "double_stream_modulation_txt.lin",
        "single_stream_modulation.linear": "single_stream_modulation.lin",
    }
    double = {
        "attn.to_out.0": "img_attn.proj",
        "attn.to_add_out": "txt_attn.proj",
        "ff.linear_in": "img_mlp.0",
        "ff.linear_out": "img_mlp.2",
        "ff_context.linear_in": "txt_mlp.0",
        "ff_context.linear_out": "txt_mlp.2",
    }
    single = {"attn.to_qkv_mlp_proj": "linear1", "attn.to_out": "linear2"}
    if model.config.guidance_embeds:
        for i, layer in ((1, "in_layer"), (2, "out_layer")):
            ends[f"time_guidance_embed.guidance_embedder.linear_{i}"] = f"guidance_in.{layer}"
    weights = {name.removesuffix(".weight"): value for name, value in model.state_dict().items()}
    out = {f"{theirs}.weight": weights[ours] for ours, theirs in ends.items()}
    scale, shift = weights["norm_out.linear"].chunk(2)
    out["final_layer.adaLN_modulation.1.weight"] = torch.cat((shift, scale))
    for i in range(model.config.num_layers):
        ours, theirs = f"transformer_blocks.{i}", f"double_blocks.{i}"
        out |= {f"{theirs}.{name}.weight": weights[f"{ours}.{path}"] for path, name in double.items()}
        for stream, names, norm in (
            ("img", ("to_q", "to_k", "to_v"), "norm_"),
            ("txt", ("add_q_proj", "add_k_proj", "add_v_proj"), "norm_added_"),
        ):
            attn = f"{theirs}.{stream}_attn"
            out[f"{attn}.qkv.weight"] = torch.cat([weights[f"{ours}.attn.{name}"] for name in names])
            out[f"{attn}.norm.query_norm.scale"] = weights[f"{ours}.attn.{norm}q"]
            out[f"{attn}.norm.key_norm.scale"] = weights[f"{ours}.attn.{norm}k"]
    for i in range(model.config.num_single_layers):
        ours, theirs = f"single_transformer_blocks.{i}", f"single_blocks.{i}"
        out |= {f"{theirs}.{name}.weight": weights[f"{ours}.{path}"] for path, name in single.items()}
        out[f"{theirs}.norm.query_norm.scale"] = weights[f"{ours}.attn.norm_q"]
        out[f"{theirs}.norm.key_norm.scale"] = weights[f"{ours}.attn.norm_k"]
    return {name: value.contiguous() for name, value in out.items()}


CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
SCHEDULER = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 4096,
    "max_shift": 1.15,
    "num_train_timesteps": 1000,
    "shift": 3.0,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}


def write_tiny_flux2(folder: Path, *, distilled: bool, kv: bool = False, shard: str = "400KB") -> None:
    """Write the whole folder through save_pretrained of Flux2KleinPipeline, or of that with `kv`, with shards of at
    most `shard`."""
    from diffusers import FlowMatchEulerDiscreteScheduler, Flux2KleinKVPipeline, Flux2KleinPipeline
    from transformers import Qwen2TokenizerFast

    tokenizer_folder = folder.parent / f"{folder.name}-tokenizer"
    write_tiny_tokenizer(tokenizer_folder)
    config = tokenizer_folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": CHAT}))
    pipeline = (Flux2KleinKVPipeline if kv else Flux2KleinPipeline)(
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        vae=tiny_vae(),
        text_encoder=tiny_text_encoder(),
        tokenizer=Qwen2TokenizerFast.from_pretrained(tokenizer_folder),
        transformer=tiny_dit(),
        is_distilled=distilled,
    )
    part = folder.with_suffix(".part")
    pipeline.save_pretrained(part, max_shard_size=shard)
    part.rename(folder)
