"""A tiny Flux.1, made by diffusers itself, with nothing in it that is all ones or zeros; and the same in one file.

Odd widths, more layers than one of each kind, every norm and bias non-trivial.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from support.spiece_files import hugging_face, trained
from support.tiny_clip import tiny_clip, write_tiny_clip_tokenizer
from support.tiny_ldm import behind, vae_file
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
    "pooled_projection_dim": 26,
    "guidance_embeds": True,
    "axes_dims_rope": [6, 8, 8],
}


WIDE: dict[str, Any] = {  # whose rows are whole blocks of codes
    "attention_head_dim": 32,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 32,
    "axes_dims_rope": [8, 12, 12],
}


SINGLE: dict[str, Any] = {  # what the shapes of a file do not show is as published
    "attention_head_dim": 128,
    "num_attention_heads": 1,
    "joint_attention_dim": 64,
    "axes_dims_rope": [16, 56, 56],
}
SINGLE_CLIP = {"hidden_size": 64, "num_attention_heads": 1}
SINGLE_VAE = {"block_out_channels": [32, 64, 32, 32], "norm_num_groups": 32, "sample_size": 1024}


def tiny_dit(seed: int = 1, **changes: object) -> torch.nn.Module:
    """diffusers' transformer with the tiny configuration of dev, float32, randomised."""
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(**(DIT | changes))
    randomise(model, seed)
    return model.eval()


STREAMS = {
    "img": ("to_{}", "norm_{}", "to_out.0", "norm1", "ff"),
    "txt": ("add_{}_proj", "norm_added_{}", "to_add_out", "norm1_context", "ff_context"),
}


def transformer_file(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The transformer's tensors by its authors' names, made from diffusers' the other way round than the product does:
    by writing each of their tensors."""
    given, out = dict(model.state_dict()), {}
    leaves = ("weight", "bias")

    def take(name: str) -> torch.Tensor:
        return given.pop(name)

    for theirs, ours in (("time_in", "timestep"), ("vector_in", "text"), ("guidance_in", "guidance")):
        if ours == "guidance" and not model.config.guidance_embeds:
            continue
        for leaf in leaves:
            out[f"{theirs}.in_layer.{leaf}"] = take(f"time_text_embed.{ours}_embedder.linear_1.{leaf}")
            out[f"{theirs}.out_layer.{leaf}"] = take(f"time_text_embed.{ours}_embedder.linear_2.{leaf}")
    for leaf in leaves:
        out[f"img_in.{leaf}"], out[f"txt_in.{leaf}"] = take(f"x_embedder.{leaf}"), take(f"context_embedder.{leaf}")
        out[f"final_layer.linear.{leaf}"] = take(f"proj_out.{leaf}")
        scale, shift = take(f"norm_out.linear.{leaf}").chunk(2)
        out[f"final_layer.adaLN_modulation.1.{leaf}"] = torch.cat([shift, scale])
        for i in range(model.config.num_layers):
            block = f"transformer_blocks.{i}."
            for stream, (qkv, _, proj, norm, ff) in STREAMS.items():
                there = f"double_blocks.{i}.{stream}_"
                fused = [take(f"{block}attn.{qkv.format(x)}.{leaf}") for x in "qkv"]
                out[f"{there}attn.qkv.{leaf}"] = torch.cat(fused)
                out[f"{there}attn.proj.{leaf}"] = take(f"{block}attn.{proj}.{leaf}")
                out[f"{there}mod.lin.{leaf}"] = take(f"{block}{norm}.linear.{leaf}")
                out[f"{there}mlp.0.{leaf}"] = take(f"{block}{ff}.net.0.proj.{leaf}")
                out[f"{there}mlp.2.{leaf}"] = take(f"{block}{ff}.net.2.{leaf}")
        for i in range(model.config.num_single_layers):
            block, there = f"single_transformer_blocks.{i}.", f"single_blocks.{i}."
            fused = [take(f"{block}{name}.{leaf}") for name in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")]
            out[f"{there}linear1.{leaf}"] = torch.cat(fused)
            out[f"{there}linear2.{leaf}"] = take(f"{block}proj_out.{leaf}")
            out[f"{there}modulation.lin.{leaf}"] = take(f"{block}norm.linear.{leaf}")
    for i in range(model.config.num_layers):
        for stream, (_, norm, *_) in STREAMS.items():
            for x, name in (("q", "query_norm"), ("k", "key_norm")):
                out[f"double_blocks.{i}.{stream}_attn.norm.{name}.scale"] = take(
                    f"transformer_blocks.{i}.attn.{norm.format(x)}.weight"
                )
    for i in range(model.config.num_single_layers):
        for x, name in (("q", "query_norm"), ("k", "key_norm")):
            out[f"single_blocks.{i}.norm.{name}.scale"] = take(f"single_transformer_blocks.{i}.attn.norm_{x}.weight")
    assert not given, f"in no file: {given.keys()}"
    return {key: value.contiguous() for key, value in out.items()}


# A folder

SCHEDULER: dict[str, Any] = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 4096,
    "max_shift": 1.15,
    "num_train_timesteps": 1000,
    "shift": 3.0,
    "use_dynamic_shifting": True,
}
SCHEDULERS = {"schnell": SCHEDULER | {"shift": 1.0, "use_dynamic_shifting": False}}
PIPELINES = {"kontext": "FluxKontextPipeline", "fill": "FluxFillPipeline"} | dict.fromkeys(
    ("canny", "depth"), "FluxControlPipeline"
)
FILL = {"in_channels": 384, "out_channels": 64}
CONTROL = {"in_channels": 128, "out_channels": 64}


def write_tiny_flux(
    folder: Path, variant: str, shard: str = "400KB", *, wide: bool = False, single: bool = False
) -> None:
    """Write the whole folder through the save_pretrained of its pipeline, with shards of at most `shard`. wide: with
    rows that are whole blocks of codes. single: as a file without configurations can show."""
    import diffusers
    from diffusers import FlowMatchEulerDiscreteScheduler
    from transformers import CLIPTokenizer

    tokens = folder.parent / f"{folder.name}-tokenizer"
    write_tiny_clip_tokenizer(tokens)
    clip_sizes = {"hidden_size": 64, "intermediate_size": 96} if wide else {}
    t5_sizes = {"d_model": 64, "d_kv": 16, "num_heads": 4, "d_ff": 96} if wide else {"d_model": 60}
    clip_sizes, t5_sizes = (SINGLE_CLIP, {"d_model": 64}) if single else (clip_sizes, t5_sizes)
    clip, t5 = tiny_clip("ViT-L", **clip_sizes), tiny_t5(vocab_size=1000, **t5_sizes)
    sizes = (SINGLE if single else WIDE if wide else {}) | {"pooled_projection_dim": clip.config.hidden_size}
    sizes |= FILL if variant == "fill" else CONTROL if variant in ("canny", "depth") else {}
    pipeline = getattr(diffusers, PIPELINES.get(variant, "FluxPipeline"))(
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULERS.get(variant, SCHEDULER)),
        vae=tiny_vae(**(SINGLE_VAE if single else {})),
        text_encoder=clip,
        tokenizer=CLIPTokenizer.from_pretrained(tokens),
        text_encoder_2=t5,
        tokenizer_2=hugging_face(trained()),
        transformer=tiny_dit(guidance_embeds=variant not in ("schnell", "undistilled"), **sizes),
    )
    part = folder.with_suffix(".part")
    pipeline.save_pretrained(part, max_shard_size=shard)
    part.rename(folder)


# In one file


def one_file(folder: Path, *parts: str, vae: str = "vae.") -> dict[str, torch.Tensor]:
    """The transformer of a folder and those of its other `parts`, all unless some are given, in one file, with what
    ComfyUI's files have beside them."""
    from diffusers import AutoencoderKL, FluxTransformer2DModel
    from transformers import CLIPTextModel, T5EncoderModel

    chosen = parts or ("text_encoder", "text_encoder_2", "vae")
    transformer = FluxTransformer2DModel.from_pretrained(folder / "transformer")
    out = behind("model.diffusion_model.", transformer_file(transformer))
    if "vae" in chosen:
        out |= behind(vae, vae_file(AutoencoderKL.from_pretrained(folder / "vae")))
    if "text_encoder" in chosen:
        clip = dict(CLIPTextModel.from_pretrained(folder / "text_encoder").state_dict())
        clip = {f"text_model.{name.removeprefix('text_model.')}": value for name, value in clip.items()}
        clip |= {"text_projection.weight": torch.eye(64), "text_model.embeddings.position_ids": torch.arange(77)[None]}
        out |= behind("text_encoders.clip_l.transformer.", clip)
        out["text_encoders.clip_l.logit_scale"] = torch.tensor(4.6)
    if "text_encoder_2" in chosen:
        t5 = dict(T5EncoderModel.from_pretrained(folder / "text_encoder_2").state_dict())
        out |= behind("text_encoders.t5xxl.transformer.", t5)
        out["text_encoders.t5xxl.logit_scale"] = torch.tensor(4.6)
    return {key: value.clone().contiguous() for key, value in out.items()}
