"""Tiny FLUX.3 Image Klein folders and networks, written by diffusers and transformers, with nothing in them that is all
ones or zeros. The tokenizer is beside the text encoder, as it is published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_tokenizer import write_tiny_tokenizer

from support.tiny_edit import louder
from support.tiny_flux2 import tiny_vae
from support.tiny_model import randomise
from support.tiny_qwen21 import tiny_seeing_encoder

DIT: dict[str, Any] = {
    "in_channels": 32,
    "cond_in_channels": 32,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 22,
    "num_attention_heads": 3,
    "joint_attention_dim": 480,
    "timestep_channels": 64,
    "axes_dims_rope": (4, 6, 4, 8),
}
LAYERS = 33  # of the text encoder: states are taken behind the last but one


def tiny_dit(seed: int = 1, *, loud: bool = True, **changes: object) -> Any:
    """diffusers' transformer with the tiny configuration, float32, randomised."""
    from diffusers import Flux3Transformer2DModel

    model = Flux3Transformer2DModel(**(DIT | changes))
    randomise(model, seed)
    return (louder(model) if loud else model).eval()


def tiny_text_encoder(seed: int = 3) -> Any:
    return tiny_seeing_encoder(seed, {"num_hidden_layers": LAYERS})


def transformer_file(model: Any) -> dict[str, torch.Tensor]:
    """The transformer's tensors in its authors' names, by hand."""
    ends = {
        "context_embedder": "txt_in",
        "x_embedders.image": "emb_in.image",
        "x_embedders.image_cond": "emb_in.image_cond",
        "proj_out": "final_layer.image.linear",
        "timestep_embedder.linear_1": "time_in.in_layer",
        "timestep_embedder.linear_2": "time_in.out_layer",
        **{
            f"{kind}_stream_modulations.{stream}.linear": f"{kind}_stream_modulations.{stream}.lin"
            for kind in ("early", "single")
            for stream in ("image", "image_cond", "txt")
        },
    }
    if model.config.flow_map:
        ends |= {f"target_timestep_embedder.linear_{i}": f"ref_time_in.{x}_layer" for i, x in ((1, "in"), (2, "out"))}
    layers = {
        "attn.to_q": "q_proj",
        "attn.to_k": "k_proj",
        "attn.to_v": "v_proj",
        "attn.to_out.0": "attn_out",
        "ff.linear_in": "mlp_in",
        "ff.linear_out": "mlp_out",
    }
    weights = {name.removesuffix(".weight"): value for name, value in model.state_dict().items()}
    out = {f"{theirs}.weight": weights[ours] for ours, theirs in ends.items()}
    scale, shift = weights["norm_out.linear"].chunk(2)
    out["final_layer.image.adaLN_modulation.1.weight"] = torch.cat((shift, scale))
    blocks = {
        "mode_blocks.image": "content_mode_blocks.image",
        "mode_blocks.image_cond": "content_mode_blocks.image_cond",
    }
    counts = dict.fromkeys([*blocks, "txt_mode_blocks"], model.config.num_layers)
    counts["single_transformer_blocks"] = model.config.num_single_layers
    blocks |= {"txt_mode_blocks": "txt_mode_blocks", "single_transformer_blocks": "single_blocks"}
    for ours, theirs in blocks.items():
        for i in range(counts[ours]):
            out |= {f"{theirs}.{i}.{name}.weight": weights[f"{ours}.{i}.{path}"] for path, name in layers.items()}
            out[f"{theirs}.{i}.norm.query_norm.scale"] = weights[f"{ours}.{i}.attn.norm_q"]
            out[f"{theirs}.{i}.norm.key_norm.scale"] = weights[f"{ours}.{i}.attn.norm_k"]
    assert len(out) == len(weights)
    return {name: value.contiguous() for name, value in out.items()}


def blocks(distilled: bool) -> Any:
    """diffusers' modular pipeline without the model that writes prompts."""
    from diffusers.modular_pipelines.flux3 import Flux3AutoBlocks, Flux3DistilledAutoBlocks

    made = Flux3DistilledAutoBlocks() if distilled else Flux3AutoBlocks()
    made.sub_blocks.pop("prompt_upsampler")
    return made


def write_tiny_flux3(folder: Path, *, distilled: bool, shard: str = "400KB", tokenizer: str = "text_encoder") -> None:
    """Write the folder part by part, with shards of at most `shard`: the pipeline's own save_pretrained would need
    torchvision for its processor."""
    part = folder.with_suffix(".part")
    blocks(distilled).init_pipeline().save_pretrained(str(part))
    write_tiny_tokenizer(part / tokenizer)
    tiny_vae().save_pretrained(part / "vae", max_shard_size=shard)
    tiny_dit(flow_map=distilled).save_pretrained(part / "transformer", max_shard_size=shard)
    tiny_text_encoder().save_pretrained(part / "text_encoder", max_shard_size=shard)
    part.rename(folder)
