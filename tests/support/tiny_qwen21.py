"""Tiny Qwen-Image-2.1 folders, written by diffusers itself, with nothing in them that is all ones or zeros.

Odd widths, three layers, three heads, fewer key than query heads, heads wider than the stream in the text encoder,
every norm and bias non-trivial, several shards. Weights are louder than those of `tiny_model`, so that a prompt, a
picture, its positions and its timestep all move the result.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_tokenizer import tiny_vocabulary, write_tiny_tokenizer

from qwenimg.common.families.qwen_image_21 import model, references
from support.tiny_edit import louder, special
from support.tiny_model import SCHEDULER, randomise

DIT: dict[str, Any] = {
    "in_channels": 12,
    "out_channels": 12,
    "num_layers": 3,
    "attention_head_dim": 22,
    "num_attention_heads": 3,
    "context_in_dim": 60,
    "mlp_ratio": 3,
    "axes_dims_rope": (6, 8, 8),
}
TEXT: dict[str, Any] = {
    "hidden_size": 60,
    "intermediate_size": 88,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_interleaved": True,
        "mrope_section": [3, 2, 2],
    },
}
VISION: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 36,
    "num_heads": 2,
    "out_hidden_size": 60,
    "patch_size": 16,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 2],
}
VAE: dict[str, Any] = {
    "base_dim": 6,
    "decoder_base_dim": 9,
    "z_dim": 12,
    "dim_mult": [1, 2, 4, 8, 8],
    "num_res_blocks": 1,
    "latents_mean": [0.1 * i - 0.5 for i in range(12)],
    "latents_std": [1.0 + 0.1 * i for i in range(12)],
}
GAIN = 1.5
AREA = 160 * 160  # pixels in which a picture is seen in tests; 1024 * 1024 take seconds
TURBO = (1.0, 0.978453, 0.95418, 0.926626, 0.89508, 0.845148, 0.704534, 0.414568)
"""The noise levels of Qwen-Image-2.1-Turbo, as its repository has them."""
LEAST = 32 * 32  # pixels of a picture, fewer than the published 256 * 256


def fused(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The transformer's tensors as ComfyUI has them: gate and up of the feed-forward in one, the gate's rows first."""
    given = dict(tensors)
    for name in [name for name in given if name.endswith(".img_mlp.gate_layer.weight")]:
        block = name.removesuffix(".gate_layer.weight")
        given[f"{block}.gate_up.weight"] = torch.cat([given.pop(name), given.pop(f"{block}.proj.weight")])
    return {name: value.contiguous() for name, value in given.items()}


def tiny_dit(seed: int = 1, **changes: object) -> torch.nn.Module:
    """diffusers' transformer with the tiny configuration, float32, randomised."""
    from diffusers import QwenImage21Transformer2DModel

    model = QwenImage21Transformer2DModel(**(DIT | changes))
    randomise(model, seed)
    model.txt_in.text_norm.weight.data -= 1  # it is stored minus one
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(GAIN)
    return model.eval()


def tiny_vae(seed: int = 2, **changes: object) -> torch.nn.Module:
    from diffusers import AutoencoderKLQwenImage21

    model = AutoencoderKLQwenImage21(**(VAE | changes))
    randomise(model, seed)
    return model.eval()


def tiny_seeing_encoder(
    seed: int = 3, text: Mapping[str, object] = {}, vision: Mapping[str, object] = {}
) -> torch.nn.Module:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    config = Qwen3VLConfig(
        text_config=TEXT | {"vocab_size": len(tiny_vocabulary()[0]) + 14} | text,
        vision_config=VISION | vision,
        image_token_id=special("image_pad"),
        vision_start_token_id=special("vision_start"),
        vision_end_token_id=special("vision_end"),
    )
    model = Qwen3VLForConditionalGeneration(config)
    randomise(model, seed)
    return louder(model).eval()


def write_tiny_qwen21(
    folder: Path, levels: tuple[float, ...] = (), shard: str = "400KB", *, tower: bool = True
) -> None:
    """Write the whole folder part by part, with shards of at most `shard`: the pipeline's own save_pretrained would
    need torchvision for its processor. levels: those of a distilled model. tower: with the vision tower."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    part = folder.with_suffix(".part")
    write_tiny_tokenizer(part / "processor")
    scheduler = {"num_train_timesteps": 1000, "shift": 1.0} if levels else SCHEDULER
    FlowMatchEulerDiscreteScheduler(**scheduler).save_pretrained(part / "scheduler")
    tiny_vae().save_pretrained(part / "vae", max_shard_size=shard)
    tiny_dit().save_pretrained(part / "transformer", max_shard_size=shard)
    text = tiny_seeing_encoder()
    kept = {name: value for name, value in text.state_dict().items() if tower or ".visual." not in name}
    text.save_pretrained(part / "text_encoder", max_shard_size=shard, state_dict=kept)
    index = {"_class_name": "QwenImage21Pipeline", "sample_sigmas": list(levels) or None}
    (part / "model_index.json").write_text(json.dumps(index))
    part.rename(folder)


def see_small_pictures(patch: pytest.MonkeyPatch) -> None:
    """Let ours see pictures in `AREA` pixels, and be measured like theirs."""
    patch.setattr(references, "AREA", AREA)
    patch.setattr(model, "AROUND", replace(model.AROUND, form=model.AROUND.form._replace(least=LEAST)))


@contextmanager
def small_pictures() -> Iterator[None]:
    """`see_small_pictures` while the context is open."""
    with pytest.MonkeyPatch.context() as patch:
        see_small_pictures(patch)
        yield
