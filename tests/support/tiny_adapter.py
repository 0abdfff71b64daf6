"""Tiny T2I-Adapters by diffusers, in the files of published ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from support.tiny_model import randomise


def tiny_adapter(seed: int = 11, **config: Any) -> torch.nn.Module:
    """diffusers' T2I-Adapter, in float32, randomised."""
    import diffusers

    model = diffusers.T2IAdapter(**config)
    randomise(model, seed)
    return model.eval()


def write_adapter(folder: Path, seed: int = 11, **config: Any) -> Path:
    """Write a folder in diffusers layout, and return it."""
    tiny_adapter(seed, **config).save_pretrained(folder)
    return folder


def adapter_names(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of an adapter by the names of its authors, written down without the code under test."""
    light = model.config.adapter_type == "light_adapter"
    written = {}
    for name, tensor in model.state_dict().items():
        parts = name.removeprefix("adapter.").split(".")
        if parts[0] == "body" and light:
            parts = ["body" if part == "resnets" else part for part in parts]
        elif parts[0] == "body":
            number = int(parts[1]) * model.config.num_res_blocks
            rest = parts[2:]
            if rest[0] == "resnets":
                number, rest = number + int(rest[1]), rest[2:]
            parts = ["body", str(number), *rest]
        written[".".join(parts)] = tensor.contiguous()
    return written
