"""What ComfyUI's files in 8 bits cost: size of the published transformer, error of weights, difference of pictures.

    python tools/measure_files.py      # writes the table of docs/measured/weights.md again

The built-in model's own weights are written in each layout, the matrices of its blocks and of its text encoder's layers
in 8 bits, the rest as it is; the self-test's 40 prompts are drawn from those files as `measure_weights.py` draws.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import numpy as np
import torch
from doc_tables import table, write
from measure_weights import drawn, figures
from safetensors.torch import save_file

from qwenimg.common.families import registry
from qwenimg.common.networks.denoisers import qwen_dit
from qwenimg.common.networks.denoisers.qwen_dit import QwenDiTConfig
from qwenimg.common.networks.encoders import qwen
from qwenimg.common.quant.bits import widened
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.shapes import builtin
from qwenimg.common.weights.values import read

NETWORKS = {"transformer": qwen_dit.NETWORK, "text_encoder": qwen.QWEN2_5_VL}
LAYOUTS = ("fp8 without scales", "fp8, a scale for each weight", "int8_tensorwise, a scale for each row")


def coded(weight: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Codes and scale of a matrix as ComfyUI's converters choose them: the largest value on the largest code."""
    if layout == LAYOUTS[0]:
        return weight.to(torch.float8_e4m3fn), None
    if layout == LAYOUTS[1]:
        scale = weight.abs().max() / torch.finfo(torch.float8_e4m3fn).max
        return (weight / scale).to(torch.float8_e4m3fn), scale
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    return (weight / scale).round().clamp(-127, 127).to(torch.int8), scale


def written(part: Component, name: str, layout: str, path: Path) -> tuple[float, float]:
    """Writes a part; the sums of squares of its coded weights and of their errors."""
    blocks = NETWORKS[name].blocks
    assert blocks is not None
    tensors: dict[str, torch.Tensor] = {}
    squares = errors = 0.0
    for key, entry in part.plan.entries.items():
        weight = torch.from_numpy(np.array(widened(read(entry))))
        if not blocks.fullmatch(key) or weight.ndim != 2:
            tensors[key] = weight
            continue
        tensors[key], scale = coded(weight, layout)
        layer = key.removesuffix(".weight")
        kind = "int8_tensorwise" if tensors[key].dtype == torch.int8 else "float8_e4m3fn"
        if scale is not None:
            tensors[f"{layer}.weight_scale"] = scale
            tensors[f"{layer}.comfy_quant"] = torch.tensor(list(f'{{"format": "{kind}"}}'.encode()), dtype=torch.uint8)
        value = tensors[key].double() * (1.0 if scale is None else scale.double())
        squares += float((weight.double() ** 2).sum())
        errors += float(((value - weight) ** 2).sum())
    save_file(tensors, path)
    return squares, errors


def gigabytes() -> str:
    """Of the published transformer with its blocks' matrices in 8 bits, beside bfloat16."""
    blocks = qwen_dit.NETWORK.blocks
    assert blocks is not None
    shapes = qwen_dit.manifest(QwenDiTConfig()).items()
    size = sum(math.prod(shape) * (1 if blocks.fullmatch(name) and len(shape) == 2 else 2) for name, shape in shapes)
    return f"{size / 1e9:.1f}"


def main() -> None:
    exact, _ = drawn(None)
    opened = registry.open_model(builtin.folder())
    rows = []
    for layout in LAYOUTS:
        with tempfile.TemporaryDirectory() as folder:
            paths = {name: Path(folder) / f"{name}.safetensors" for name in NETWORKS}
            sums = [written(opened.checkpoint[name], name, layout, path) for name, path in paths.items()]
            made, right = drawn(None, **paths)
        error = math.sqrt(sum(e for _, e in sums) / sum(s for s, _ in sums))
        rows.append([layout, gigabytes(), f"{error:.4f}", *figures(made, exact, right)])
        print(rows[-1], flush=True)
    opened.checkpoint.close()
    head = ["file", "published transformer, GB", "relative error of the weights", "median PSNR", "worst", "right"]
    write("measured/weights.md", "files", table(head, rows))


if __name__ == "__main__":
    main()
