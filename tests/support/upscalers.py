"""Random upscalers of the ESRGAN family: their tensors by each set of names, their files, and their formula."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.numpy import save_file

Tensors = dict[str, np.ndarray]

SEED = 7


def rrdbnet(
    blocks: int = 2, features: int = 16, growth: int = 8, enlarged: int = 2, patch: int = 1, channels: int = 3
) -> Tensors:
    """Return random tensors by BasicSR's names; each value is that of numpy's generator, the same everywhere."""
    tensors: Tensors = {}
    rng = np.random.default_rng(SEED)
    _conv(tensors, rng, "conv_first", features, channels * patch**2)
    for b in range(blocks):
        for r in (1, 2, 3):
            for c in range(5):
                outputs = growth if c < 4 else features
                _conv(tensors, rng, f"body.{b}.rdb{r}.conv{c + 1}", outputs, features + c * growth)
    names = ["conv_body", *(f"conv_up{i + 1}" for i in range(enlarged)), "conv_hr"]
    for name in names:
        _conv(tensors, rng, name, features, features)
    _conv(tensors, rng, "conv_last", channels, features)
    return tensors


def srvgg(convs: int = 3, features: int = 16, scale: int = 4) -> Tensors:
    tensors: Tensors = {}
    rng = np.random.default_rng(SEED)
    for i in range(convs + 1):
        _conv(tensors, rng, f"body.{2 * i}", features, features if i else 3)
        tensors[f"body.{2 * i + 1}.weight"] = rng.random(features, np.float32)
    _conv(tensors, rng, f"body.{2 * convs + 2}", 3 * scale**2, features)
    return tensors


def _conv(tensors: Tensors, rng: np.random.Generator, name: str, outputs: int, inputs: int) -> None:
    spread = np.float32((9 * inputs) ** -0.5)
    tensors[f"{name}.weight"] = rng.standard_normal((outputs, inputs, 3, 3), np.float32) * spread
    tensors[f"{name}.bias"] = rng.standard_normal(outputs, np.float32) * np.float32(0.1)


# The other names


def first_names(tensors: Tensors) -> Tensors:
    """Return an RRDBNet by the names of the first ESRGAN."""
    renamed = (("body.", "RRDB_trunk."), ("rdb", "RDB"), ("conv_body", "trunk_conv"), ("conv_hr", "HRconv"))

    def name(key: str) -> str:
        for ours, theirs in (*renamed, ("conv_up", "upconv")):
            key = theirs + key.removeprefix(ours) if key.startswith(ours) else key.replace(".rdb", ".RDB")
        return key

    return {name(key): values for key, values in tensors.items()}


def places(tensors: Tensors) -> Tensors:
    """Return an RRDBNet by its places in a sequence, as in ESRGAN's first release."""
    blocks = len({key.split(".")[1] for key in tensors if key.startswith("body.")})
    ups = sum(key.startswith("conv_up") and key.endswith("weight") for key in tensors)
    layers = {"conv_first": "model.0", "conv_body": f"model.1.sub.{blocks}"}
    layers |= {f"conv_up{i}": f"model.{3 * i}" for i in range(1, ups + 1)}
    layers |= {"conv_hr": f"model.{3 * ups + 2}", "conv_last": f"model.{3 * ups + 4}"}

    def name(key: str) -> str:
        layer, _, leaf = key.rpartition(".")
        if match := re.fullmatch(r"body\.(\d+)\.rdb(\d)\.(conv\d)", layer):
            return f"model.1.sub.{match[1]}.RDB{match[2]}.{match[3]}.0.{leaf}"
        return f"{layers[layer]}.{leaf}"

    return {name(key): values for key, values in tensors.items()}


# Files


def as_safetensors(path: Path, tensors: Tensors, table: str = "") -> Path:
    save_file({table + key: np.ascontiguousarray(values) for key, values in tensors.items()}, path)
    return path


def as_torch(path: Path, tensors: Tensors, table: str = "params_ema", *, old: bool = False) -> Path:
    """Write what `torch.save` makes of them, in the layout of today, or the `old` one."""
    values = {key: torch.from_numpy(np.ascontiguousarray(one)) for key, one in tensors.items()}
    whole = {table: values} if table else values
    torch.save(whole, path, _use_new_zipfile_serialization=not old)
    return path


# The formula, in float64


def formula(tensors: Mapping[str, np.ndarray], pixels: np.ndarray) -> np.ndarray:
    """Return the result [1, 3, H, W] of the network for pixels [h, w, 3] in 0..255, in float64."""
    weights = {key: torch.from_numpy(np.asarray(values)).double() for key, values in tensors.items()}
    x = torch.tensor(pixels).double().permute(2, 0, 1)[None] / 255
    with torch.inference_mode():
        return (_rrdbnet if "conv_first.weight" in weights else _srvgg)(weights, x).numpy()


def _rrdbnet(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    def conv(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, weights[f"{name}.weight"], weights[f"{name}.bias"], padding=1)

    height, width = x.shape[2:]
    patch = {3: 1, 12: 2, 48: 4}[weights["conv_first.weight"].shape[1]]
    x = F.pixel_unshuffle(F.pad(x, (0, -width % patch, 0, -height % patch), mode="reflect"), patch)
    first = trunk = conv("conv_first", x)
    for b in range(len({key.split(".")[1] for key in weights if key.startswith("body.")})):
        block = trunk
        for r in (1, 2, 3):
            seen = [block]
            for c in (1, 2, 3, 4):
                seen.append(F.leaky_relu(conv(f"body.{b}.rdb{r}.conv{c}", torch.cat(seen, 1)), 0.2))
            block = block + 0.2 * conv(f"body.{b}.rdb{r}.conv5", torch.cat(seen, 1))
        trunk = trunk + 0.2 * block
    x = first + conv("conv_body", trunk)
    ups = sorted(key.removesuffix(".weight") for key in weights if re.fullmatch(r"conv_up\d\.weight", key))
    for name in ups:
        x = F.leaky_relu(conv(name, x.repeat_interleave(2, 2).repeat_interleave(2, 3)), 0.2)
    x = conv("conv_last", F.leaky_relu(conv("conv_hr", x), 0.2))
    scale = 2 ** len(ups) // patch
    return x[:, :, : height * scale, : width * scale]


def _srvgg(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    last = max(int(key.split(".")[1]) for key in weights)
    y = x
    for place in range(0, last + 1, 2):
        y = F.conv2d(y, weights[f"body.{place}.weight"], weights[f"body.{place}.bias"], padding=1)
        if place < last:
            slope = weights[f"body.{place + 1}.weight"][:, None, None]
            y = torch.where(y > 0, y, slope * y)
    scale = int((y.shape[1] // 3) ** 0.5)
    return F.pixel_shuffle(y, scale) + x.repeat_interleave(scale, 2).repeat_interleave(scale, 3)
