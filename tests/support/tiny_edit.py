"""Tiny Qwen-Image-Edit folders, written by diffusers itself, with nothing in them that is all ones or zeros.

Weights are louder than those of `tiny_model`, so that a prompt, a picture and its timestep all move the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tiny_tokenizer import tiny_vocabulary, write_tiny_tokenizer

from support.tiny_model import SCHEDULER, TEXT, randomise, tiny_dit, tiny_vae

VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 36,
    "num_heads": 2,
    "out_hidden_size": 60,
    "patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [1],
}
KINDS = {"edit": ("QwenImageEditPipeline", False), "2509": ("QwenImageEditPlusPipeline", False),
         "2511": ("QwenImageEditPlusPipeline", True)}  # fmt: skip
GAIN = 2.0


def louder(model: torch.nn.Module) -> torch.nn.Module:
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "embed" not in name:
            parameter.data.mul_(GAIN)
    return model


def special(name: str) -> int:
    """The id of a special token behind the tiny vocabulary."""
    order = ("vision_start", "vision_end", "vision_pad", "image_pad")
    return len(tiny_vocabulary()[0]) + 9 + order.index(name)


def tiny_seeing_encoder(
    seed: int = 3, text: Mapping[str, object] = {}, vision: Mapping[str, object] = {}
) -> torch.nn.Module:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config = Qwen2_5_VLConfig(
        text_config=TEXT | {"vocab_size": len(tiny_vocabulary()[0]) + 14} | text,
        vision_config=VISION | vision,
        image_token_id=special("image_pad"),
        vision_start_token_id=special("vision_start"),
        vision_end_token_id=special("vision_end"),
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    randomise(model, seed)
    return louder(model).eval()


def write_tiny_edit(folder: Path, kind: str, shard: str = "400KB") -> None:
    """Write the whole folder through the pipeline's save_pretrained, with shards of at most `shard`."""
    import diffusers
    from transformers import Qwen2Tokenizer

    tokenizer_folder = folder.parent / f"{folder.name}-tokenizer"
    tokenizer_folder.mkdir(parents=True, exist_ok=True)
    write_tiny_tokenizer(tokenizer_folder)
    pipeline, zero_cond_t = KINDS[kind]
    parts: dict[str, Any] = {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        "vae": tiny_vae(),
        "text_encoder": tiny_seeing_encoder(),
        "tokenizer": Qwen2Tokenizer.from_pretrained(tokenizer_folder),
        "transformer": louder(tiny_dit(zero_cond_t=zero_cond_t)),
        "processor": None,
    }
    part = folder.with_suffix(".part")
    getattr(diffusers, pipeline)(**parts).save_pretrained(part, max_shard_size=shard)
    part.rename(folder)
