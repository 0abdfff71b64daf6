"""Files of textual inversion as programs write them, for tiny models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

WIDTHS = {"sd15": (60,), "sd21": (72,), "sdxl": (60, 80), "refiner": (80,), "inpaint": (60,)}
"""The widths of the text encoders of tiny folders."""


def vectors(count: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1000 * seed + width))


def parts(kind: str, count: int, seed: int) -> dict[str, torch.Tensor]:
    """The vectors for each text encoder of a tiny folder, by their keys in a file for SDXL."""
    made = [vectors(count, width, seed) for width in WIDTHS[kind]]
    return dict(zip(("clip_l", "clip_g") if len(made) > 1 else ("",), made, strict=True))


def a1111_safetensors(path: Path, values: torch.Tensor) -> None:
    save_file({"emb_params": values}, path)


def a1111_pt(path: Path, values: torch.Tensor) -> None:
    about: dict[str, Any] = {"name": "trained", "step": 500, "sd_checkpoint": None, "sd_checkpoint_name": None}
    torch.save({"string_to_token": {"*": 265}, "string_to_param": {"*": torch.nn.Parameter(values)}} | about, path)


def original_pt(path: Path, values: torch.Tensor) -> None:
    """As the paper's authors write it, and kohya with a tensor as the token."""
    parameters = torch.nn.ParameterDict({"*": torch.nn.Parameter(values)})
    torch.save({"string_to_token": {"*": torch.tensor(265)}, "string_to_param": parameters}, path)


def learned_embeds(path: Path, values: torch.Tensor) -> None:
    torch.save({"<cat-toy>": values[0] if len(values) == 1 else values}, path)


def learned_safetensors(path: Path, values: torch.Tensor) -> None:
    save_file({"<cat-toy>": values}, path)


def bare(path: Path, values: torch.Tensor) -> None:
    torch.save(values, path)


WRITERS: dict[str, Callable[[Path, torch.Tensor], None]] = {
    "style.safetensors": a1111_safetensors,
    "style.pt": a1111_pt,
    "original.pt": original_pt,
    "learned_embeds.bin": learned_embeds,
    "learned_embeds.safetensors": learned_safetensors,
    "bare.pt": bare,
}


def write(path: Path, kind: str, count: int, seed: int) -> Path:
    """Write the embedding of `count` vectors for the tiny folder `kind`."""
    made = parts(kind, count, seed)
    save_file(made if len(made) > 1 else {"emb_params": made[""]}, path)
    return path
