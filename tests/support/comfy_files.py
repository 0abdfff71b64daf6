"""Weights as ComfyUI writes them in 8 bits, and the values that they then have."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

import torch

LAYOUTS = ("plain", "older", "newer", "metadata", "int8")


class Written(NamedTuple):
    """The tensors and the metadata of a file, and what its weights are, float32."""

    tensors: dict[str, torch.Tensor]
    notes: dict[str, str]
    values: dict[str, torch.Tensor]


def comfy(
    weights: dict[str, torch.Tensor], layout: str, chosen: Callable[[str], bool], marker: str = "scaled_fp8"
) -> Written:
    """`weights`, of which the matrices and convolutions that are `chosen` are in 8 bits; every third stays as it is,
    since files mix both."""
    tensors, values = dict(weights), {name: value.float() for name, value in weights.items()}
    layers = {}
    names = [n for n, value in weights.items() if n.endswith(".weight") and value.ndim > 1 and chosen(n)]
    for name in (name for i, name in enumerate(names) if i % 3 != 2):
        layer, value = name.removesuffix(".weight"), weights[name].float()
        most = value.abs().max()
        if layout == "int8":
            scale = value.flatten(1).abs().amax(1).clamp(min=1e-8)[:, None] / 127 if value.ndim == 2 else most / 127
            spread = scale if scale.ndim else scale.reshape(())
            code = (value / spread).round().clamp(-127, 127).to(torch.int8)
        else:
            scale = spread = torch.ones(()) if layout == "plain" else most / 448
            code = (value / scale).to(torch.float8_e4m3fn)
        tensors[name] = code
        values[name] = code.float() * spread
        if layout == "older":
            tensors[f"{layer}.scale_weight"], tensors[f"{layer}.scale_input"] = scale, torch.ones(())
        elif layout != "plain":
            tensors[f"{layer}.weight_scale"] = scale
            layers[layer] = {"format": "int8_tensorwise" if layout == "int8" else "float8_e4m3fn"}
    if layout == "older":
        tensors[marker] = torch.zeros(0, dtype=torch.float8_e4m3fn)
    if layout == "metadata":
        table = {"format_version": "1.0", "layers": layers}
        return Written(tensors, {"_quantization_metadata": json.dumps(table)}, values)
    for layer, said in layers.items():
        tensors[f"{layer}.comfy_quant"] = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
    return Written(tensors, {}, values)
