"""Tiny control networks for Qwen-Image, in the files of published ones, with nothing in them that is all ones or zeros.

Their weights are loud, so that a picture moves the result.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from support.tiny_model import DIT, randomise

CONTROL = {key: value for key, value in DIT.items() if key != "num_layers"}
WIDTH = CONTROL["attention_head_dim"] * CONTROL["num_attention_heads"]
PATCH_GAIN, PICTURE_GAIN = 3.0, 4.0


def tiny_controlnet(seed: int = 11, *, layers: int = 2, extra: int = 0, **changes: object) -> torch.nn.Module:
    """diffusers' ControlNet with the tiny configuration, float32, randomised."""
    from diffusers import QwenImageControlNetModel

    model = QwenImageControlNetModel(**(CONTROL | changes), num_layers=layers, extra_condition_channels=extra)
    randomise(model, seed)
    model.controlnet_x_embedder.weight.data.mul_(PICTURE_GAIN)
    return model.eval()


def write_controlnet(folder: Path, seed: int = 11, *, layers: int = 2, extra: int = 0) -> Path:
    """Write a folder in diffusers layout, and return it."""
    tiny_controlnet(seed, layers=layers, extra=extra).save_pretrained(folder)
    return folder


def tiny_patches(seed: int = 21, *, layers: int = 3, extra: int = 0, width: int = WIDTH) -> dict[str, torch.Tensor]:
    """The tensors of block-wise patches."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {"img_in.weight": normal(width, 64 + extra) / 8, "img_in.bias": 0.2 * normal(width)}
    for i in range(layers):
        block = f"controlnet_blocks.{i}."
        for name in ("x_rms", "y_rms"):
            tensors[f"{block}{name}.weight"] = 1 + 0.3 * normal(width)
        for name in ("input_proj", "output_proj"):
            tensors[f"{block}{name}.weight"] = PATCH_GAIN * normal(width, width) / width**0.5
            tensors[f"{block}{name}.bias"] = 0.2 * normal(width)
    return tensors


def write_patches(file: Path, seed: int = 21, *, layers: int = 3, extra: int = 0) -> Path:
    """Write block-wise patches as one file, and return it."""
    save_file(tiny_patches(seed, layers=layers, extra=extra), file)
    return file


LORA_LAYERS = (
    *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_out.0")),
    "attn.to_add_out", "img_mlp.net.2", "img_mod.1", "txt_mlp.net.2", "txt_mod.1",
)  # fmt: skip


def write_control_lora(file: Path, transformer: torch.nn.Module, seed: int = 31, rank: int = 4) -> Path:
    """Write a LoRA for control in context, of the layers and in the names of the published one, and return it."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, layer in transformer.named_modules():
        if isinstance(layer, torch.nn.Linear) and name.startswith("transformer_blocks") and name.endswith(LORA_LAYERS):
            out, into = layer.weight.shape
            for half, shape, fan in (("A", (rank, into), into), ("B", (out, rank), rank)):
                tensors[f"{name}.lora_{half}.default.weight"] = torch.randn(shape, generator=generator) / fan**0.5
    save_file(tensors, file)
    return file
