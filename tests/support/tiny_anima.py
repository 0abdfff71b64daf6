"""A tiny Anima folder and its networks, written by diffusers and transformers, with nothing in them that is all ones or
zeros. A head is 22 wide, so that its three axes are 10, 6 and 6."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_tokenizer import write_tiny_tokenizer

from support.spiece_files import hugging_face, trained
from support.tiny_model import randomise, tiny_vae
from support.tiny_zimage import tiny_text_encoder

DIT: dict[str, Any] = {
    "in_channels": 16,
    "out_channels": 16,
    "num_attention_heads": 3,
    "attention_head_dim": 22,
    "num_layers": 3,
    "mlp_ratio": 2.5,
    "text_embed_dim": 36,
    "adaln_lora_dim": 14,
    "rope_scale": (1.0, 4.0, 4.0),
    "extra_pos_embed_type": None,
}
CONDITIONER: dict[str, Any] = {
    "source_dim": 60,
    "target_dim": 36,
    "model_dim": 36,
    "num_layers": 2,
    "num_attention_heads": 3,
    "mlp_ratio": 2.5,
    "min_sequence_length": 24,
}
SCHEDULER = {"num_train_timesteps": 1000, "shift": 3.0, "use_dynamic_shifting": False}


def tiny_dit(seed: int = 1, **changes: object) -> Any:
    """diffusers' transformer with the tiny configuration, float32, randomised."""
    from diffusers import CosmosTransformer3DModel

    model = CosmosTransformer3DModel(**(DIT | changes))
    randomise(model, seed)
    return model.eval()


def tiny_conditioner(seed: int = 4, **changes: object) -> Any:
    """diffusers' text conditioner, with a row for each token of the tiny T5's."""
    from diffusers import AnimaTextConditioner

    sizes = CONDITIONER | {"target_vocab_size": len(hugging_face(trained()))} | changes
    model = AnimaTextConditioner(**sizes)
    randomise(model, seed)
    model.embed.weight.data *= sizes["model_dim"] ** 0.5  # type: ignore[operator]
    return model.eval()


def transformer_file(model: Any, conditioner: Any = None) -> dict[str, torch.Tensor]:
    """The tensors of the transformer in its authors' names, by hand, and with them those of a conditioner."""
    kinds = {"norm1": "self_attn", "norm2": "cross_attn", "norm3": "mlp"}
    layers = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out.0": "output_proj"}
    layers |= {f"norm_{x}": f"{x}_norm" for x in "qk"}
    names = {
        "patch_embed.proj": "x_embedder.proj.1",
        "time_embed.t_embedder.linear_1": "t_embedder.1.linear_1",
        "time_embed.t_embedder.linear_2": "t_embedder.1.linear_2",
        "time_embed.norm": "t_embedding_norm",
        "norm_out.linear_1": "final_layer.adaln_modulation.1",
        "norm_out.linear_2": "final_layer.adaln_modulation.2",
        "proj_out": "final_layer.linear",
    }
    for i in range(model.config.num_layers):
        ours, theirs = f"transformer_blocks.{i}", f"blocks.{i}"
        for norm, kind in kinds.items():
            names |= {f"{ours}.{norm}.linear_{j}": f"{theirs}.adaln_modulation_{kind}.{j}" for j in (1, 2)}
        for attention, kind in (("attn1", "self_attn"), ("attn2", "cross_attn")):
            names |= {f"{ours}.{attention}.{one}": f"{theirs}.{kind}.{other}" for one, other in layers.items()}
        names |= {f"{ours}.ff.net.0.proj": f"{theirs}.mlp.layer1", f"{ours}.ff.net.2": f"{theirs}.mlp.layer2"}
    weights = model.state_dict()
    assert {f"{name}.weight" for name in names} == weights.keys()
    file = {f"{theirs}.weight": weights[f"{ours}.weight"] for ours, theirs in names.items()}
    of_text = {} if conditioner is None else conditioner.state_dict()
    return file | {f"llm_adapter.{name}": value for name, value in of_text.items()}


def write_tiny_anima(folder: Path, shard: str = "400KB") -> None:
    """Write the folder part by part, with shards of at most `shard`."""
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.modular_pipelines.anima import AnimaAutoBlocks

    part = folder.with_suffix(".part")
    AnimaAutoBlocks().init_pipeline().save_pretrained(str(part))
    write_tiny_tokenizer(part / "tokenizer")
    hugging_face(trained()).save_pretrained(part / "t5_tokenizer")
    FlowMatchEulerDiscreteScheduler(**SCHEDULER).save_pretrained(part / "scheduler")
    tiny_vae().save_pretrained(part / "vae", max_shard_size=shard)
    tiny_dit().save_pretrained(part / "transformer", max_shard_size=shard)
    tiny_conditioner().save_pretrained(part / "text_conditioner", max_shard_size=shard)
    tiny_text_encoder().save_pretrained(part / "text_encoder", max_shard_size=shard)
    part.rename(folder)
