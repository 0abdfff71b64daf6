"""A tiny Z-Image folder, written by diffusers itself, with nothing in it that is all ones or zeros.

Odd widths, more layers than one of each kind, fewer key than query heads, heads wider than the stream in the text
encoder, every norm, bias and pad token non-trivial, Z-Image-Turbo's own scheduler configuration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tiny_tokenizer import tiny_vocabulary, write_tiny_tokenizer

from support.tiny_model import randomise

SCHEDULER = {"num_train_timesteps": 1000, "shift": 3.0, "use_dynamic_shifting": False}
DIT: dict[str, Any] = {
    "in_channels": 16,
    "dim": 66,
    "n_layers": 3,
    "n_refiner_layers": 2,
    "n_heads": 3,
    "n_kv_heads": 3,
    "cap_feat_dim": 60,
    "axes_dims": [6, 8, 8],
    "axes_lens": [640, 48, 48],
}
TEXT = {
    "hidden_size": 60,
    "intermediate_size": 88,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": True,
}
VAE = {
    "block_out_channels": [6, 12, 12, 18],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 1,
    "latent_channels": 16,
    "norm_num_groups": 3,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_dit(seed: int = 1, **changes: object) -> torch.nn.Module:
    """diffusers' transformer with the tiny configuration, float32, randomised."""
    from diffusers import ZImageTransformer2DModel

    model = ZImageTransformer2DModel(**(DIT | changes))
    randomise(model, seed)
    generator = torch.Generator().manual_seed(seed + 100)
    gain = model.cap_embedder[0].weight  # a norm by no name
    gain.data.copy_(1 + 0.3 * torch.randn(gain.shape, generator=generator))
    for pad in (model.x_pad_token, model.cap_pad_token):
        pad.data.copy_(torch.randn(pad.shape, generator=generator))
    return model.eval()


# As wide as needed for codes in blocks of 32, and still odd in heads and layers
WIDE: dict[str, Any] = {"dim": 96, "cap_feat_dim": 64, "axes_dims": [8, 12, 12]}


def transformer_file(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of diffusers' transformer under its authors' names, as files for ComfyUI have them."""
    given, out = dict(model.state_dict()), {}
    for name in list(given):
        if ".attention.to_q." in name:
            block = name.removesuffix(".to_q.weight")
            out[f"{block}.qkv.weight"] = torch.cat([given.pop(f"{block}.to_{x}.weight") for x in "qkv"])
            out[f"{block}.out.weight"] = given.pop(f"{block}.to_out.0.weight")
            for x in "qk":
                out[f"{block}.{x}_norm.weight"] = given.pop(f"{block}.norm_{x}.weight")
    for name, value in given.items():
        out[name.replace("all_x_embedder.2-1.", "x_embedder.").replace("all_final_layer.2-1.", "final_layer.")] = value
    out["norm_final.weight"] = torch.ones(model.config.dim)  # read by nobody
    return {key: value.contiguous() for key, value in out.items()}


# Names of diffusers that MLX_z-image's converter changes
MLX_Z_IMAGE = {
    "t_embedder.mlp.0": "t_embedder.linear1",
    "t_embedder.mlp.2": "t_embedder.linear2",
    "all_x_embedder.2-1": "x_embedder",
    "cap_embedder.0": "cap_embedder.layers.0",
    "cap_embedder.1": "cap_embedder.layers.1",
    "all_final_layer.2-1": "final_layer",
    "adaLN_modulation.1": "adaLN_modulation.layers.1",
    "attention.to_out.0": "attention.to_out",
    "adaLN_modulation.0": "adaLN_modulation",
}


def mlx_z_image_file(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of diffusers' transformer as MLX_z-image's converter names them."""
    return {mlx_z_image_name(name): value.contiguous() for name, value in model.state_dict().items()}


def mlx_z_image_name(name: str) -> str:
    for diffusers, theirs in MLX_Z_IMAGE.items():
        name = name.replace(diffusers, theirs)
    return name


# Versions of control networks as their class has them
CONTROLS: dict[str, dict[str, Any]] = {
    "1": {"control_layers_places": [0, 2], "control_in_dim": 16, "add_control_noise_refiner": None},
    "2.0": {"control_layers_places": [0, 1, 2], "add_control_noise_refiner": "control_layers"},
    "2.1": {"control_layers_places": [0, 1], "add_control_noise_refiner": "control_noise_refiner"},
}


def tiny_control(version: str, seed: int = 17, **changes: object) -> torch.nn.Module:
    """diffusers' control network of this version for the tiny transformer, float32, randomised, loud."""
    from diffusers.models.controlnets.controlnet_z_image import ZImageControlNetModel

    sizes = {name: DIT[name] for name in ("dim", "n_refiner_layers", "n_heads", "n_kv_heads")}
    usual = {"control_in_dim": 33, "control_refiner_layers_places": [0, 1]}
    model = ZImageControlNetModel(**(sizes | usual | CONTROLS[version] | changes))
    randomise(model, seed)
    for name, value in model.named_parameters():
        if name.endswith(("x_embedder.2-1.weight", "after_proj.weight")):
            value.data.mul_(3)
    return model.eval()


def control_file(version: str) -> dict[str, torch.Tensor]:
    """The tensors of a control network as its authors publish them: 2.0 with refiner blocks that were never trained."""
    tensors = dict(tiny_control(version).state_dict())
    if version == "2.0":
        own = tiny_control("2.1").state_dict()
        tensors |= {key: value for key, value in own.items() if key.startswith("control_noise_refiner.")}
        for name in tensors:
            if name.startswith("control_noise_refiner.") and ("after_proj" in name or "before_proj" in name):
                tensors[name] = torch.zeros_like(tensors[name])
    return {key: value.contiguous() for key, value in tensors.items()}


def tiny_text_encoder(seed: int = 3, **changes: object) -> torch.nn.Module:
    from transformers import Qwen3Config, Qwen3Model

    model = Qwen3Model(Qwen3Config(**(TEXT | {"vocab_size": len(tiny_vocabulary()[0]) + 14} | changes)))
    randomise(model, seed)
    return model.eval()


def tiny_vae(seed: int = 2, **changes: object) -> torch.nn.Module:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(**(VAE | changes))
    randomise(model, seed)
    return model.eval()


def write_tiny_zimage(
    folder: Path, shard: str = "400KB", dit: Mapping[str, object] = {}, text: Mapping[str, object] = {}
) -> None:
    """Write the whole folder through ZImagePipeline.save_pretrained, with shards of at most `shard`; `dit` and `text`
    are changes of the configurations."""
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline
    from transformers import Qwen2Tokenizer

    tokenizer_folder = folder.parent / f"{folder.name}-tokenizer"
    write_tiny_tokenizer(tokenizer_folder)
    config = tokenizer_folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": CHAT}))
    pipeline = ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        vae=tiny_vae(),
        text_encoder=tiny_text_encoder(**text),
        tokenizer=Qwen2Tokenizer.from_pretrained(tokenizer_folder),
        transformer=tiny_dit(**dit),
    )
    part = folder.with_suffix(".part")
    pipeline.save_pretrained(part, max_shard_size=shard)
    part.rename(folder)
