"""The weights of a part's folder."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of all files of a folder, by their names."""
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}
