"""Tiny Hunyuan-DiT folders, written by diffusers itself, with nothing in them that is all ones or zeros: of 1.2, and of
1.1, which sees sizes. And the transformer by its authors' names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from support import tiny_bert
from support.spiece_files import hugging_face, trained
from support.tiny_model import randomise
from support.tiny_sd import VAE
from support.tiny_t5 import tiny_t5

DIT: dict[str, Any] = {
    "num_attention_heads": 3,
    "attention_head_dim": 20,
    "in_channels": 4,
    "patch_size": 2,
    "activation_fn": "gelu-approximate",
    "sample_size": 12,
    "hidden_size": 60,
    "num_layers": 6,
    "mlp_ratio": 2.37,
    "learn_sigma": True,
    "cross_attention_dim": 44,
    "norm_type": "layer_norm",
    "cross_attention_dim_t5": 56,
    "pooled_projection_dim": 36,
    "text_len": 77,
    "text_len_t5": 256,
    "use_style_cond_and_image_meta_size": False,
}
KINDS: dict[str, dict[str, Any]] = {"hunyuan": {}, "hunyuan-1.1": {"use_style_cond_and_image_meta_size": True}}
BETAS = {"hunyuan": 0.018, "hunyuan-1.1": 0.03}
TEXT = {"vocab_size": 1000, "d_model": 56}
# Widths of whole blocks of codes
WIDE = {
    "num_attention_heads": 4, "attention_head_dim": 24, "hidden_size": 96, "mlp_ratio": 2.0, "cross_attention_dim": 64,
    "cross_attention_dim_t5": 64, "pooled_projection_dim": 64,
}  # fmt: skip
WIDE_TEXT = {"vocab_size": 1000, "d_model": 64, "d_ff": 96, "d_kv": 16, "num_heads": 4}
WIDE_BERT = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 1}  # heads as wide as the published


def tiny_dit(seed: int = 1, **changes: object) -> Any:
    """diffusers' transformer with the tiny configuration, float32, randomised."""
    from diffusers import HunyuanDiT2DModel

    model = HunyuanDiT2DModel(**(DIT | changes))
    randomise(model, seed)
    generator = torch.Generator().manual_seed(seed)
    tables = (model.text_embedding_padding, model.time_extra_emb.pooler.positional_embedding)
    for table in tables:
        table.data.copy_(torch.randn(table.shape, generator=generator))
    return model.eval()


def tiny_vae(seed: int = 2, **changes: object) -> Any:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(**(VAE | {"scaling_factor": 0.13025} | changes))
    randomise(model, seed)
    return model.eval()


def scheduler(kind: str) -> Any:
    from diffusers import DDPMScheduler

    return DDPMScheduler(
        beta_start=0.00085,
        beta_end=BETAS[kind],
        beta_schedule="scaled_linear",
        clip_sample=False,
        prediction_type="v_prediction",
        steps_offset=1,
        timestep_spacing="leading",
    )


def transformer_file(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of the transformer in its authors' names, by hand."""
    given, out = dict(model.state_dict()), {}
    ends = {
        "pos_embed.proj": "x_embedder.proj",
        "text_embedder.linear_1": "mlp_t5.0",
        "text_embedder.linear_2": "mlp_t5.2",
        "time_extra_emb.timestep_embedder.linear_1": "t_embedder.mlp.0",
        "time_extra_emb.timestep_embedder.linear_2": "t_embedder.mlp.2",
        "time_extra_emb.extra_embedder.linear_1": "extra_embedder.0",
        "time_extra_emb.extra_embedder.linear_2": "extra_embedder.2",
        "proj_out": "final_layer.linear",
    } | {f"time_extra_emb.pooler.{x}_proj": f"pooler.{x}_proj" for x in "qkvc"}
    for i in range(model.config.num_layers):
        b = f"blocks.{i}"
        ends |= {
            f"{b}.norm1.norm": f"{b}.norm1",
            f"{b}.norm1.linear": f"{b}.default_modulation.1",
            f"{b}.norm2": f"{b}.norm3",
            f"{b}.norm3": f"{b}.norm2",
            f"{b}.attn1.to_out.0": f"{b}.attn1.out_proj",
            f"{b}.attn2.to_out.0": f"{b}.attn2.out_proj",
            f"{b}.attn2.to_q": f"{b}.attn2.q_proj",
            f"{b}.ff.net.0.proj": f"{b}.mlp.fc1",
            f"{b}.ff.net.2": f"{b}.mlp.fc2",
        }
        ends |= {f"{b}.attn{j}.norm_{x}": f"{b}.attn{j}.{x}_norm" for j in (1, 2) for x in "qk"}
        if f"{b}.skip_linear.bias" in given:
            ends |= {f"{b}.{name}": f"{b}.{name}" for name in ("skip_norm", "skip_linear")}
        for leaf in ("weight", "bias"):
            for attention, name, letters in (("attn1", "Wqkv", "qkv"), ("attn2", "kv_proj", "kv")):
                parts = [given.pop(f"{b}.{attention}.to_{x}.{leaf}") for x in letters]
                out[f"{b}.{attention}.{name}.{leaf}"] = torch.cat(parts)
    for leaf in ("weight", "bias"):
        scale, shift = given.pop(f"norm_out.linear.{leaf}").chunk(2)
        out[f"final_layer.adaLN_modulation.1.{leaf}"] = torch.cat((shift, scale))
        for ours, theirs in ends.items():
            out[f"{theirs}.{leaf}"] = given.pop(f"{ours}.{leaf}")
    out["text_embedding_padding"] = given.pop("text_embedding_padding")
    out["pooler.positional_embedding"] = given.pop("time_extra_emb.pooler.positional_embedding")
    if (style := given.pop("time_extra_emb.style_embedder.weight", None)) is not None:
        out["style_embedder.weight"] = style
    assert not given, given.keys()
    return {key: value.contiguous() for key, value in out.items()}


def write_tiny_hunyuan(
    folder: Path,
    kind: str = "hunyuan",
    shard: str = "400KB",
    dit: Mapping[str, object] = {},
    bert: Mapping[str, object] = {},
    **text: object,
) -> None:
    """Write the whole folder through the pipeline's save_pretrained, with shards of at most `shard`; `dit`, `bert` and
    `text` are changes of the configurations."""
    from diffusers import HunyuanDiTPipeline

    with TemporaryDirectory() as words:
        pipeline = HunyuanDiTPipeline(
            vae=tiny_vae(),
            text_encoder=tiny_bert.tiny_bert(**bert),
            tokenizer=tiny_bert.hugging_face(tiny_bert.write_vocabulary(Path(words))),
            transformer=tiny_dit(**(KINDS[kind] | dit)),
            scheduler=scheduler(kind),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
            text_encoder_2=tiny_t5(**(TEXT | text)),
            tokenizer_2=hugging_face(trained()),
        )
        part = folder.with_suffix(".part")
        pipeline.save_pretrained(part, max_shard_size=shard)
    part.rename(folder)
