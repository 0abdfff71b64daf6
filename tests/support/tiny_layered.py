"""A tiny Qwen-Image-Layered folder, written by diffusers itself, with nothing in it that is all ones or zeros.

Its latents have 16 channels: diffusers takes a picture of as many channels as the latents for latents.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tiny_tokenizer import tiny_special_ids, write_tiny_tokenizer

from support.tiny_edit import louder, tiny_seeing_encoder
from support.tiny_model import SCHEDULER, tiny_dit, tiny_vae

GENERATION = {"do_sample": True, "temperature": 0.1, "top_k": 1, "top_p": 0.001, "repetition_penalty": 1.05}
"""As published: of the one best token, the draw is no draw."""


def tiny_layered_dit(seed: int = 1, **changes: object) -> torch.nn.Module:
    return louder(tiny_dit(seed, use_additional_t_cond=True, use_layer3d_rope=True, **changes))


def tiny_writing_encoder(
    seed: int = 3, text: Mapping[str, object] = {}, vision: Mapping[str, object] = {}
) -> torch.nn.Module:
    model = tiny_seeing_encoder(seed, text, vision)
    special = tiny_special_ids()
    ends = [special[name] for name in ("<|im_end|>", "<|endoftext|>")]
    model.generation_config.update(**GENERATION, eos_token_id=ends, bos_token_id=None)
    return model


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
        "text_encoder": tiny_writing_encoder(),
        "tokenizer": Qwen2Tokenizer.from_pretrained(tokenizer_folder),
        "transformer": tiny_layered_dit(),
        "processor": None,
    }
    part = folder.with_suffix(".part")
    diffusers.QwenImageLayeredPipeline(**parts).save_pretrained(part, max_shard_size=shard)
    part.rename(folder)


def with_generation(folder: Path, to: Path, **values: Any) -> Path:
    """Copy a folder and change settings of its generation_config.json; return the copy."""
    path = shutil.copytree(folder, to) / "text_encoder" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return to
