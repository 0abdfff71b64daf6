"""The networks on MLX are the translations of those on torch, byte for byte."""

from __future__ import annotations

import re

import pytest
import twin

TORCH = """\
import torch
from torch import Tensor

from qwenimg.backends.torch import ops


class Block(torch.nn.Module):
    def __init__(self, dim: int, device: torch.device):
        super().__init__()
        self.device = device
        self.net = torch.nn.ModuleList([ops.Linear(dim, dim)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        # [B C h w] -> [B 3 8h 8w]
        return ops.silu(torch.cat((x, self.net[0](ops.table(y, self.device))), dim=1))
"""
MLX = """\
import mlx.core as mx
import mlx.nn
from mlx.core import array as Array

from qwenimg.backends.mlx import ops


class Block(mlx.nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.net = [ops.Linear(dim, dim)]

    def __call__(self, x: Array, y: Array) -> Array:
        # [B h w C] -> [B 8h 8w 3]
        return ops.silu(mx.concatenate((x, self.net[0](ops.table(y))), axis=1))
"""


def sources(name: str) -> tuple[str, str]:
    torch, mlx = ((folder / f"{name}.py").read_text(encoding="utf-8") for folder in (twin.TORCH, twin.MLX))
    return torch, mlx


@pytest.mark.parametrize("name", twin.names())
def test_mlx_is_the_translation(name: str) -> None:
    torch, mlx = sources(name)
    assert twin.translate(torch) == mlx, f"edit backends/torch/networks/{name}.py and run `make twins`"
    words = re.findall(r".*\b(?:torch|ModuleList)\b.*", mlx.removeprefix(twin.NOTE))  # a list over lines
    assert not words, f"no rule of tools/twin.py translates: {words}"


def test_every_network_is_on_both() -> None:
    """And what is written by hand is there, with a reason."""
    names = [set(twin.modules(folder)) for folder in (twin.TORCH, twin.MLX)]
    assert names[0] == names[1] == {*twin.names(), *twin.BY_HAND}
    assert len(twin.names()) >= 7 and all(twin.BY_HAND.values())


def test_every_rule_is_used() -> None:
    together = "".join(sources(name)[0] for name in twin.names())
    assert [pattern for pattern, _ in twin.RULES if not re.search(pattern, together, re.MULTILINE)] == []


def test_translation() -> None:
    assert twin.translate(TORCH) == twin.NOTE + MLX
