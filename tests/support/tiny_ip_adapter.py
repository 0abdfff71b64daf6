"""Tiny IP-Adapters with the names of published files, and tiny image encoders by transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from support.tiny_model import randomise
from support.tiny_sd import _SMALL, UNETS

KINDS = ("base", "plus", "full-face")
STATES, EMBEDDING = 48, 36  # channels of the image encoder
SIDE, PATCH = 28, 7  # pixels of its pictures and of a patch
TOKENS = {"base": 4, "plus": 6}


def tiny_image_encoder(seed: int = 31, **changes: Any) -> torch.nn.Module:
    """transformers' CLIP vision model with its projection, float32, randomised."""
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    config: dict[str, Any] = {
        "hidden_size": STATES, "intermediate_size": 80, "projection_dim": EMBEDDING, "num_hidden_layers": 3,
        "num_attention_heads": 16, "image_size": SIDE, "patch_size": PATCH, "hidden_act": "gelu",
    }  # fmt: skip
    model = CLIPVisionModelWithProjection(CLIPVisionConfig(**config | changes))
    randomise(model, seed)
    return model.eval()


def cross_attentions(config: Mapping[str, Any]) -> list[int]:
    """The channels of the cross attentions of a UNet with this `config`, as diffusers lists its processors."""
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(config)
    parts = dict(unet.named_modules())
    names = [name.removesuffix(".processor") for name in unet.attn_processors]
    return [parts[name].to_k.weight.shape[0] for name in names if name.endswith("attn2")]


def _projection(kind: str, text: int) -> dict[str, tuple[int, ...]]:
    if kind == "base":
        width = TOKENS["base"] * text
        return {"proj.weight": (width, EMBEDDING), "proj.bias": (width,), "norm.weight": (text,), "norm.bias": (text,)}
    if kind == "full-face":
        return {
            "proj.0.weight": (STATES, STATES), "proj.0.bias": (STATES,), "proj.2.weight": (text, STATES),
            "proj.2.bias": (text,), "proj.3.weight": (text,), "proj.3.bias": (text,),
        }  # fmt: skip
    inner, heads = 52, 128
    shapes: dict[str, tuple[int, ...]] = {
        "latents": (1, TOKENS["plus"], inner), "proj_in.weight": (inner, STATES), "proj_in.bias": (inner,),
        "proj_out.weight": (text, inner), "proj_out.bias": (text,), "norm_out.weight": (text,),
        "norm_out.bias": (text,),
    }  # fmt: skip
    for i in range(4):  # as many as diffusers knows
        norms = (f"layers.{i}.0.norm1", f"layers.{i}.0.norm2", f"layers.{i}.1.0")
        shapes |= {f"{norm}.{leaf}": (inner,) for norm in norms for leaf in ("weight", "bias")}
        shapes |= {
            f"layers.{i}.0.to_q.weight": (heads, inner), f"layers.{i}.0.to_kv.weight": (2 * heads, inner),
            f"layers.{i}.0.to_out.weight": (inner, heads), f"layers.{i}.1.1.weight": (4 * inner, inner),
            f"layers.{i}.1.3.weight": (inner, 4 * inner),
        }  # fmt: skip
    return shapes


def tensors(base: str, kind: str = "base", seed: int = 41) -> dict[str, torch.Tensor]:
    """The tensors of an adapter for the tiny model `base`, by their names in published files."""
    text, generator = UNETS[base]["cross_attention_dim"], torch.Generator().manual_seed(seed)
    shapes = {f"image_proj.{name}": shape for name, shape in _projection(kind, text).items()}
    for i, width in enumerate(cross_attentions(_SMALL | UNETS[base])):
        shapes |= {f"ip_adapter.{2 * i + 1}.to_{name}_ip.weight": (width, text) for name in "kv"}
    made = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        norm = len(shape) == 1 and name.endswith("weight")
        made[name] = 1 + 0.3 * noise if norm else 0.2 * noise if len(shape) == 1 else noise / shape[-1] ** 0.5
    return made


def nested(named: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors in the two tables that diffusers takes, and a `.bin` file has."""
    tables: dict[str, dict[str, torch.Tensor]] = {"image_proj": {}, "ip_adapter": {}}
    for name, tensor in named.items():
        table, _, rest = name.partition(".")
        tables[table][rest] = tensor
    return tables


def write_adapter(folder: Path, base: str, kind: str = "base", seed: int = 41) -> Path:
    """Write an adapter with its encoder beside it, and return its file. By the end of its name it is a `.bin`."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "image_encoder").exists():
        tiny_image_encoder().save_pretrained(folder / "image_encoder")
    path = folder / f"ip-adapter-{kind}_{base}-{seed}.safetensors"
    save_file(tensors(base, kind, seed), path)
    return path
