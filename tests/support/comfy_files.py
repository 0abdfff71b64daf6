"""Weights as ComfyUI writes them in 8 and 4 bits, and the values that they then have, by the published formulas."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

ROTATED = ("convrot", "w4a4", "w4a8", "w6a8")
LAYOUTS = ("plain", "older", "newer", "metadata", "int8", *ROTATED)
H4 = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]) / 2
SMALL = 4  # values that share a scale in w4a8


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
        if layout in ROTATED:
            if value.ndim == 2 and (group := group_of(value.shape[1], layout)):
                parts, layers[layer], values[name] = rotated(value, layout, group)
                tensors |= {f"{layer}.{part}": held for part, held in parts.items()}
            continue
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


def rotation(width: int, group: int) -> np.ndarray:
    """R [width width] in float64, by its definition."""
    power = H4
    while len(power) < group:
        power = np.kron(power, H4)
    return np.kron(np.eye(width // group), power)


def group_of(width: int, layout: str) -> int:
    """The largest group up to 256 that divides `width`, or 0 where this layout has none."""
    fits = width % (32 if layout == "w6a8" else 16 if layout == "w4a8" else 4) == 0
    return next((group for group in (256, 64, 16, 4) if fits and width % group == 0), 0)


def nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Whole numbers 0 to 15, two in a byte, the first of a row in the low half."""
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8)


def rotated(
    value: torch.Tensor, layout: str, group: int
) -> tuple[dict[str, torch.Tensor], dict[str, object], torch.Tensor]:
    """The tensors of a matrix in this layout, its descriptor, and the values that it then has, rounded once."""
    turn = torch.from_numpy(rotation(value.shape[1], group))
    turned = value.double() @ turn
    said: dict[str, object] = {"convrot_groupsize": group}
    parts: dict[str, torch.Tensor] = {}
    if layout in ("convrot", "w4a4"):
        most = 127 if layout == "convrot" else 7
        scale = (turned.abs().amax(1, keepdim=True).clamp(min=1e-8) / most).float()
        whole = (turned / scale.double()).round().clamp(-most, most).int()
        parts["weight"] = whole.to(torch.int8) if layout == "convrot" else nibbles(whole & 15)
        parts["weight_scale"] = scale if layout == "convrot" else scale[:, 0]
        said |= {"format": "int8_tensorwise", "convrot": True} if layout == "convrot" else {"format": "convrot_w4a4"}
    else:
        small, half = (SMALL, 8) if layout == "w4a8" else (16, 32)
        grouped = turned.reshape(len(value), -1, small)
        scale = (turned.abs().amax(1, keepdim=True).clamp(min=1e-8) / 127).float()
        each = (grouped.abs().amax(-1) / scale / (1 if layout == "w4a8" else half - 1)).clamp(min=1e-3)
        parts["weight_s_rel"] = each.to(torch.float8_e4m3fn) if layout == "w4a8" else each.float()
        each = parts["weight_s_rel"].float()
        parts["weight_s_channel"] = scale[:, 0]
        levels = torch.arange(64.0) - half
        if layout == "w4a8":
            levels = parts["weight_codebook"] = torch.linspace(-1, 1, 16)
        given = (grouped / scale.double()[..., None]).float()[..., None] - levels[: 2 * half] * each[..., None, None]
        codes = given.abs().argmin(-1).reshape(value.shape)
        whole = (levels[codes].reshape(grouped.shape) * each[..., None]).round().clamp(-127, 127).reshape(value.shape)
        parts["weight"] = nibbles(codes & 15)
        if layout == "w6a8":
            high = sum((codes[:, i::4] >> 4) << 2 * i for i in range(4))
            parts["weight"] = torch.cat((parts["weight"], high.to(torch.uint8).view(torch.int8)), 1)
        said |= {"format": "asym_w4a8_int8", "group_size": small}
    return parts, said, ((whole.double() @ turn) * scale.double()).float()
