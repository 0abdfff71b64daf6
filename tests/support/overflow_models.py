"""Tiny folders with weights that some dtype does not hold, or that no dtype does."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from support.hot_model import heat, heat_products
from support.tiny_model import DIT

Weights = dict[str, torch.Tensor]
Change = Callable[[Weights], Any]
Maker = Callable[[str], Path]  # of a name in CASES, the folder
LAYERS = DIT["num_layers"]
LAST = f"transformer_blocks.{LAYERS - 1}"


def changed(source: Path, target: Path, part: str, change: Change) -> Path:
    """A copy of the folder `source` whose component `part` is changed in place, or by what `change` returns."""
    shutil.copytree(source, target)
    weights: Weights = {}
    for file in sorted((target / part).glob("*.safetensors")):
        weights |= safetensors.torch.load_file(file)
        file.unlink()
    for index in (target / part).glob("*.index.json"):
        index.unlink()
    made = change(weights)
    name = "model" if part.startswith("text_encoder") else "diffusion_pytorch_model"
    kept = made if isinstance(made, dict) else weights
    safetensors.torch.save_file({k: v.contiguous() for k, v in kept.items()}, target / part / f"{name}.safetensors")
    return target


# Qwen-Image


def streams(weights: Weights) -> Weights:
    """Residual streams of 5e7."""
    return heat(weights, LAYERS)


def products(weights: Weights) -> Weights:
    """Products beyond 32 times float16's range too, so that the scales do not hold them."""
    hot = heat_products(weights, LAYERS)
    for stream in ("img", "txt"):
        hot[f"{LAST}.{stream}_mlp.net.0.proj.weight"] *= 2.0**12
        hot[f"{LAST}.{stream}_mlp.net.2.weight"] *= 2.0**-6
    return hot


def edge_of_bfloat16(weights: Weights) -> None:
    """A product of 3.3975e38, which float32 holds and bfloat16 rounds to infinity, in a channel that is gated by 0."""
    _large_product(weights, 8e34)


def beyond_float32(weights: Weights) -> None:
    _large_product(weights, 1e38)


def _large_product(weights: Weights, tenth: float) -> None:
    block, channel, row = "transformer_blocks.1", 5, 7
    weights[f"{block}.img_mlp.net.0.proj.weight"][row] = 0
    weights[f"{block}.img_mlp.net.0.proj.bias"][row] = 10
    weights[f"{block}.img_mlp.net.2.weight"][channel] = 0
    weights[f"{block}.img_mlp.net.2.weight"][channel, row] = tenth
    weights[f"{block}.img_mlp.net.2.bias"][channel] = torch.finfo(torch.bfloat16).max
    gate = 5 * len(weights["img_in.bias"]) + channel
    weights[f"{block}.img_mod.1.weight"][gate] = 0
    weights[f"{block}.img_mod.1.bias"][gate] = 0


def states_of_qwen_vl(weights: Weights) -> None:
    """Activations of the text encoder beyond float16."""
    for key in weights:
        if "language_model.layers.1.mlp." in key or key.startswith("model.layers.1.mlp."):
            weights[key] *= 300 if "up_proj" in key else 3e3 if "down_proj" in key else 1


def qwen_vae(weights: Weights) -> None:
    """An activation behind the first upsampler of the decoder."""
    weights["decoder.up_blocks.0.upsamplers.0.resample.1.weight"] *= 1e5


def beyond_float16(end: str) -> Change:
    """One weight of 7e4 in the tensor whose name ends so."""

    def change(weights: Weights) -> None:
        next(weights[key] for key in weights if key.endswith(end)).view(-1)[1] = 7e4

    return change


def nan(key: str) -> Change:
    def change(weights: Weights) -> None:
        weights[key].view(-1)[1] = torch.nan

    return change


# Stable Diffusion


def unet_stream(weights: Weights) -> None:
    """A channel of the stream that two residual blocks bring to 8e4."""
    for i in (0, 1):
        weights[f"mid_block.resnets.{i}.conv2.bias"][3] = 4e4


def unet_product(weights: Weights) -> None:
    """Queries of 1e5."""
    weights["mid_block.attentions.0.transformer_blocks.0.attn2.to_q.weight"] *= 1e5


def states_of_clip(weights: Weights) -> None:
    key = next(key for key in weights if key.endswith("layers.0.mlp.fc2.weight"))
    weights[key] *= 1e5


def kl_vae(weights: Weights) -> None:
    """Like SDXL's: an activation behind an upsampler of the decoder."""
    weights["decoder.up_blocks.1.upsamplers.0.conv.weight"] *= 3e4


def kl_vae_at_the_edge_of_bfloat16(weights: Weights) -> None:
    """A pixel's value of 3.3975e38, as in `edge_of_bfloat16`."""
    weights["decoder.conv_norm_out.weight"][3] = 0
    weights["decoder.conv_norm_out.bias"][3] = 10
    weights["decoder.conv_out.weight"][0] = 0
    weights["decoder.conv_out.weight"][0, 3, 1, 1] = 8e34
    weights["decoder.conv_out.bias"][0] = torch.finfo(torch.bfloat16).max


# name -> the folder that is changed, its component, and how
CASES: dict[str, tuple[str, str, Change]] = {
    "streams": ("qwen", "transformer", streams),
    "products": ("qwen", "transformer", products),
    "edge": ("qwen", "transformer", edge_of_bfloat16),
    "beyond": ("qwen", "transformer", beyond_float32),
    "qwen-text": ("qwen", "text_encoder", states_of_qwen_vl),
    "qwen-vae": ("qwen", "vae", qwen_vae),
    "modulation-weight": ("qwen", "transformer", beyond_float16("transformer_blocks.1.img_mod.1.bias")),
    "qwen-vae-weight": ("qwen", "vae", beyond_float16("decoder.conv_out.bias")),
    "clip-weight": ("sd15", "text_encoder", beyond_float16("layers.0.mlp.fc2.bias")),
    "unet-stream": ("sd15", "unet", unet_stream),
    "unet-product": ("sd15", "unet", unet_product),
    "clip": ("sd15", "text_encoder", states_of_clip),
    "kl-vae": ("sd15", "vae", kl_vae),
    "vae-edge": ("sd15", "vae", kl_vae_at_the_edge_of_bfloat16),
}
