"""What `--precision int8` costs the built-in model, whose transformer is written in ComfyUI's int8_convrot for it.

python tools/measure_int8.py      # prints the table of docs/measured/precision.md#products-in-8-bits
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from qwenimg.cli.main import run
from qwenimg.common.families import registry
from qwenimg.common.networks.denoisers import qwen_dit
from qwenimg.common.quant.bits import widened
from qwenimg.common.quant.rotated import RotatedInt8
from qwenimg.common.shapes import builtin
from qwenimg.common.weights.comfy import described
from qwenimg.common.weights.values import read

CODE = RotatedInt8(64)  # the largest group that divides the model's rows
ASKED = ("--backend", "cpu", "--policies", "bf16,int8", "--size", "128x128", "-p", "two blue stars")


def written(path: Path) -> None:
    """Write the transformer with the matrices of its blocks in int8_convrot."""
    blocks, tensors = qwen_dit.NETWORK.blocks, dict[str, torch.Tensor]()
    assert blocks is not None
    opened = registry.open_model(builtin.folder())
    for key, entry in opened.checkpoint["transformer"].plan.entries.items():
        weight = np.array(widened(read(entry)))
        if not blocks.fullmatch(key) or not CODE.fits(weight.shape):
            tensors[key] = torch.from_numpy(weight)
            continue
        coded, layer = CODE.encode(weight), key.removesuffix(".weight")
        tensors[key] = torch.from_numpy(coded.codes.view("i1").copy())
        tensors[f"{layer}.weight_scale"] = torch.from_numpy(coded.scales)
        tensors[f"{layer}.comfy_quant"] = torch.from_numpy(described(CODE).copy())
    opened.checkpoint.close()
    save_file(tensors, path)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shapes_int8_convrot.safetensors"
        written(path)
        sys.exit(run(["precision", "shapes", "--transformer", str(path), *ASKED]))


if __name__ == "__main__":
    main()
