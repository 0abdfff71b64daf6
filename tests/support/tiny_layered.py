"""A tiny Qwen-Image-Layered folder, written by diffusers itself, with nothing in it that is all ones or zeros.

Its latents have 16 channels: diffusers takes a picture of as many channels as the latents for latents.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_edit import louder
from tiny_model import SCHEDULER, tiny_dit, tiny_text_encoder, tiny_vae
from tiny_tokenizer import write_tiny_tokenizer


def tiny_layered_dit(seed: int = 1) -> torch.nn.Module:
    return louder(tiny_dit(seed, use_additional_t_cond=True, use_layer3d_rope=True))


def write_tiny_layered(folder: Path, shard: str = "400KB") -> None:
    """Write the whole folder through the pipeline's save_pretrained, with shards of at most `shard`."""
    import diffusers
    from transformers import Qwen2Tokenizer

    tokenizer_folder = folder.parent / f"{folder.name}-tokenizer"
    tokenizer_folder.mkdir(parents=True, exist_ok=True)
    write_tiny_tokenizer(tokenizer_folder)
    parts: dict[str, Any] = {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        "vae": tiny_vae(input_channels=4),
        "text_encoder": louder(tiny_text_encoder()),
        "tokenizer": Qwen2Tokenizer.from_pretrained(tokenizer_folder),
        "transformer": tiny_layered_dit(),
        "processor": None,
    }
    part = folder.with_suffix(".part")
    diffusers.QwenImageLayeredPipeline(**parts).save_pretrained(part, max_shard_size=shard)
    part.rename(folder)
