"""A tiny Qwen-Image folder, written by diffusers itself, with nothing in it that is all ones or zeros.

Odd widths, three layers, three heads, fewer key than query heads, every norm and bias non-trivial, several shards,
Qwen-Image's own scheduler configuration and latent statistics.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from tiny_tokenizer import tiny_vocabulary, write_tiny_tokenizer

SCHEDULER = {
    "base_image_seq_len": 256,
    "max_image_seq_len": 8192,
    "base_shift": 0.5,
    "max_shift": 0.9,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
    "num_train_timesteps": 1000,
}
LIGHTNING = SCHEDULER | {"base_shift": 1.0986122886681098, "max_shift": 1.0986122886681098, "shift_terminal": None}
DIT = {
    "patch_size": 2,
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 3,
    "attention_head_dim": 22,
    "num_attention_heads": 3,
    "joint_attention_dim": 60,
    "axes_dims_rope": (6, 8, 8),
}
TEXT = {
    "hidden_size": 60,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 2, 2]},
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "out_hidden_size": 60,
    "fullatt_block_indexes": [0],
}
VAE = {"base_dim": 12, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 1}


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Gains about 1, biases about 0, weights of unit gain: nothing trivial, and nothing that explodes."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("gamma") or (parameter.ndim == 1 and "norm" in name and name.endswith("weight")):
            value = 1 + 0.3 * noise
        elif parameter.ndim == 1:
            value = 0.2 * noise
        elif "embed_tokens" in name:
            value = noise
        else:
            value = noise / parameter[0].numel() ** 0.5
        parameter.data.copy_(value)


def tiny_dit(seed: int = 1, **changes: object) -> torch.nn.Module:
    """diffusers' transformer with the tiny configuration, float32, randomised."""
    from diffusers import QwenImageTransformer2DModel

    model = QwenImageTransformer2DModel(**(DIT | changes))
    randomise(model, seed)
    return model.eval()


def tiny_vae(seed: int = 2, **changes: object) -> torch.nn.Module:
    from diffusers import AutoencoderKLQwenImage

    model = AutoencoderKLQwenImage(**(VAE | changes))
    randomise(model, seed)
    return model.eval()


def tiny_text_encoder(
    seed: int = 3, text: Mapping[str, object] = {}, vision: Mapping[str, object] = {}
) -> torch.nn.Module:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vocabulary = len(tiny_vocabulary()[0]) + 14
    config = Qwen2_5_VLConfig(text_config=TEXT | {"vocab_size": vocabulary} | text, vision_config=VISION | vision)
    model = Qwen2_5_VLForConditionalGeneration(config)
    randomise(model, seed)
    return model.eval()


def write_tiny_model(folder: Path, shard: str = "400KB") -> None:
    """The whole folder, through QwenImagePipeline.save_pretrained with shards of at most `shard`."""
    from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline
    from transformers import Qwen2Tokenizer

    tokenizer_folder = folder.parent / f"{folder.name}-tokenizer"
    tokenizer_folder.mkdir(parents=True, exist_ok=True)
    write_tiny_tokenizer(tokenizer_folder)
    pipeline = QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        vae=tiny_vae(),
        text_encoder=tiny_text_encoder(),
        tokenizer=Qwen2Tokenizer.from_pretrained(tokenizer_folder),
        transformer=tiny_dit(),
    )
    part = folder.with_suffix(".part")
    pipeline.save_pretrained(part, max_shard_size=shard)
    part.rename(folder)
