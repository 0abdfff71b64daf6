"""The encoder of Stable Cascade's prior a second time, as the paper and its authors' file have it: one function of the
file's tensors, in float64. And a tiny one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from qwenimg.common.networks.vaes import effnet

Tensors = Mapping[str, torch.Tensor]
# The sizes of a tiny encoder, whose latents are those of the tiny prior
TINY: dict[str, Any] = {
    "widths": (4, 5, 6, 8, 8, 12, 16),
    "layers": (2, 2, 1, 2, 1, 2),
    "features": 20,
    "latent_channels": 16,
}
_STRIDES = (1, 2, 2, 2, 1, 2)


def tiny_effnet(seed: int = 31, shapes: Mapping[str, tuple[int, ...]] | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a file, with nothing in it that is all ones or zeros, and the counters of its training. shapes:
    of other sizes than TINY's."""
    shapes = shapes or effnet.manifest(effnet.EffnetConfig(**TINY))
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=generator)
        fan_in = max(1, int(np.prod(shape[1:])))
        if name.endswith("running_var"):
            value = 0.5 + value.abs()
        elif len(shape) == 1 and name.endswith("weight"):
            # What a block adds to its input is smaller than that: else many blocks amplify every rounding
            value = (0.3 if ".3.1." in name else 1) * (1 + 0.3 * value)
        elif len(shape) == 1:
            value = 0.3 * value
        else:
            value = value * (1.3 / fan_in**0.5)
        tensors[name] = value
        if name.endswith("running_mean"):
            tensors[name.replace("running_mean", "num_batches_tracked")] = torch.tensor(7)
    return tensors


class Encoder:
    """Random tensors of these sizes as a part of a folder."""

    def __init__(self, seed: int, **sizes: Any):
        self.config = effnet.EffnetConfig(**sizes)
        self.tensors = tiny_effnet(seed, effnet.manifest(self.config))

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        return list(self.tensors.items())

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir()
        save_file(self.tensors, folder / "diffusion_pytorch_model.safetensors")
        (folder / "config.json").write_text(json.dumps(effnet.NETWORK.written(self.config)))


def encoded(tensors: Tensors, pixels: np.ndarray) -> np.ndarray:
    """The latents [1, z, h, w] of pixels [1, 3, 32h, 32w] in 0..1, in float64."""
    wide = {name: value.double() for name, value in tensors.items()}
    mean, std = (
        torch.tensor(x, dtype=torch.float64)[:, None, None] for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    )
    x = (torch.from_numpy(pixels).double() - mean) / std
    x = F.silu(_conv(wide, "backbone.0", x, stride=2))
    for stage, stride in enumerate(_STRIDES, 1):
        i = 0
        while f"backbone.{stage}.{i}.block.0.0.weight" in wide:
            x = _block(wide, f"backbone.{stage}.{i}.block", x, stride if i == 0 else 1)
            i += 1
    x = F.silu(_conv(wide, "backbone.7", x))
    x = F.conv2d(x, wide["mapper.0.weight"])
    return _norm(wide, "mapper.1", x, 1e-5).numpy()


def _block(wide: Tensors, name: str, x: torch.Tensor, stride: int) -> torch.Tensor:
    if f"{name}.2.fc1.weight" in wide:
        y = F.silu(_conv(wide, f"{name}.0", x))
        y = F.silu(_conv(wide, f"{name}.1", y, stride, groups=y.shape[1]))
        scale = F.adaptive_avg_pool2d(y, 1)
        scale = F.silu(F.conv2d(scale, wide[f"{name}.2.fc1.weight"], wide[f"{name}.2.fc1.bias"]))
        y = y * torch.sigmoid(F.conv2d(scale, wide[f"{name}.2.fc2.weight"], wide[f"{name}.2.fc2.bias"]))
        y = _conv(wide, f"{name}.3", y)
    else:
        y = F.silu(_conv(wide, f"{name}.0", x, stride))
        y = _conv(wide, f"{name}.1", y) if f"{name}.1.0.weight" in wide else y
    return x + y if x.shape == y.shape and stride == 1 else y


def _conv(wide: Tensors, name: str, x: torch.Tensor, stride: int = 1, groups: int = 1) -> torch.Tensor:
    weight = wide[f"{name}.0.weight"]
    y = F.conv2d(x, weight, None, stride, (weight.shape[-1] - 1) // 2, groups=groups)
    return _norm(wide, f"{name}.1", y, 1e-3)


def _norm(wide: Tensors, name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
    statistics = wide[f"{name}.running_mean"], wide[f"{name}.running_var"]
    return F.batch_norm(x, *statistics, wide.get(f"{name}.weight"), wide.get(f"{name}.bias"), False, 0.0, eps)
