"""Tiny Stable Diffusion folders of every kind, written by diffusers: odd widths, several heads, nothing trivial."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from support.tiny_clip import tiny_clip, write_tiny_clip_tokenizer
from support.tiny_model import randomise

CROSS, PLAIN = "CrossAttnDownBlock2D", "DownBlock2D"
UP_CROSS, UP = "CrossAttnUpBlock2D", "UpBlock2D"
TRAINED = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "num_train_timesteps": 1000}
LEADING = TRAINED | {"steps_offset": 1, "timestep_spacing": "leading"}
DDIM = LEADING | {"set_alpha_to_one": False, "clip_sample": False}

# kind -> text encoders, UNet, scheduler class and configuration, pipeline class and its own fields
TEXTS: dict[str, tuple[str, ...]] = {
    "sd15": ("ViT-L",),
    "sd21": ("OpenCLIP-H",),
    "sdxl": ("ViT-L", "bigG"),
    "refiner": ("bigG",),
    "inpaint": ("ViT-L",),
}
_SMALL: dict[str, Any] = {"sample_size": 8, "norm_num_groups": 4, "layers_per_block": 1}
UNETS: dict[str, dict[str, Any]] = {
    "sd15": {
        "block_out_channels": (20, 40, 60),
        "down_block_types": (CROSS, CROSS, PLAIN),
        "up_block_types": (UP, UP_CROSS, UP_CROSS),
        "attention_head_dim": 4,
        "cross_attention_dim": 60,
    },
    "sd21": {
        "block_out_channels": (24, 48),
        "down_block_types": (CROSS, PLAIN),
        "up_block_types": (UP, UP_CROSS),
        "attention_head_dim": (2, 4),
        "use_linear_projection": True,
        "cross_attention_dim": 72,
    },
    "sdxl": {
        "block_out_channels": (16, 32, 48),
        "down_block_types": (PLAIN, CROSS, CROSS),
        "up_block_types": (UP_CROSS, UP_CROSS, UP),
        "attention_head_dim": (2, 4, 6),
        "transformer_layers_per_block": (1, 2, 3),
        "use_linear_projection": True,
        "cross_attention_dim": 140,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 52 + 6 * 8,
    },
    "refiner": {
        "block_out_channels": (16, 32, 32),
        "down_block_types": (PLAIN, CROSS, PLAIN),
        "up_block_types": (UP, UP_CROSS, UP),
        "attention_head_dim": (2, 4, 4),
        "transformer_layers_per_block": 2,
        "use_linear_projection": True,
        "cross_attention_dim": 80,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 52 + 5 * 8,
    },
}
UNETS["inpaint"] = UNETS["sd15"] | {"in_channels": 9}
VAE = {
    "block_out_channels": (8, 12, 16, 20),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "sample_size": 64,
}
SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sd15": ("PNDMScheduler", LEADING | {"skip_prk_steps": True, "set_alpha_to_one": False}),
    "sd21": ("DDIMScheduler", DDIM | {"prediction_type": "v_prediction"}),
    "sdxl": ("EulerDiscreteScheduler", LEADING),
    "refiner": ("EulerDiscreteScheduler", LEADING),
    "inpaint": ("DDIMScheduler", DDIM),
}


def tiny_unet(kind: str, seed: int = 11, **changes: Any) -> torch.nn.Module:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(**(_SMALL | UNETS[kind] | changes))
    randomise(model, seed)
    return model.eval()


def tiny_kl_vae(seed: int = 12, **changes: Any) -> torch.nn.Module:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(**(VAE | changes))
    randomise(model, seed)
    return model.eval()


def write_tiny_sd(folder: Path, kind: str) -> None:
    """The whole folder, through the pipeline's save_pretrained."""
    import diffusers
    from transformers import CLIPTokenizer

    parts: dict[str, Any] = {}
    for name, text in zip(("", "_2") if kind != "refiner" else ("_2",), TEXTS[kind], strict=False):
        tokens = folder.parent / f"{folder.name}-tokenizer{name}"
        write_tiny_clip_tokenizer(tokens, pad="<|endoftext|>" if text == "ViT-L" else "!")
        parts[f"tokenizer{name}"] = CLIPTokenizer.from_pretrained(tokens)
        parts[f"text_encoder{name}"] = tiny_clip(text, seed=5 + len(parts))
    class_name, config = SCHEDULERS[kind]
    vae = tiny_kl_vae(scaling_factor=0.13025 if kind in ("sdxl", "refiner") else 0.18215)
    parts |= {"unet": tiny_unet(kind), "vae": vae, "scheduler": getattr(diffusers, class_name)(**config)}
    pipeline = _pipeline(kind, parts)
    part = folder.with_suffix(".part")
    pipeline.save_pretrained(part)
    part.rename(folder)


def _pipeline(kind: str, parts: dict[str, Any]) -> Any:
    import diffusers

    if kind == "sdxl":
        return diffusers.StableDiffusionXLPipeline(**parts)
    if kind == "refiner":
        return diffusers.StableDiffusionXLImg2ImgPipeline(
            text_encoder=None, tokenizer=None, requires_aesthetics_score=True, **parts
        )
    plain: dict[str, Any] = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    cls = diffusers.StableDiffusionInpaintPipeline if kind == "inpaint" else diffusers.StableDiffusionPipeline
    return cls(**parts, **plain)
