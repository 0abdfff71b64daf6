"""What rotating a weight before it is quantized gains: difference of pictures for -q 4 and -q 6, with a rotation and
without.

    python tools/measure_rotation.py      # writes the table of docs/measured/weights.md again

The built-in model's weights that a policy quantizes are rotated as in ComfyUI's `convrot`, quantized by the policy's
codes, and rotated back; the rest is as it is. Layers that rotate their input compute with the same values; the last row
is drawn by such layers. 40 of the gate's prompts that are none of the self-test's are drawn in float32 from noise of
their own, on which nothing was ever chosen.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from doc_tables import table, write
from measure_weights import decibels, figures, relative
from safetensors.torch import save_file

import qwenimg
from qwenimg.common.families import registry
from qwenimg.common.networks.denoisers import qwen_dit
from qwenimg.common.networks.encoders import qwen
from qwenimg.common.quant.affine import Affine, encode
from qwenimg.common.quant.bits import widened
from qwenimg.common.shapes import builtin, selftest
from qwenimg.common.shapes.gate import GatePrompt, gate_prompts, selftest_prompts
from qwenimg.common.weights import quantize
from qwenimg.common.weights.storage import Packed
from qwenimg.common.weights.values import read

POLICIES = ("6", "4")
GROUPS = {"none": 1, "groups of 16": 16, "the largest groups up to 256": 256}
SHIPPED = "groups of 16, where there are 4 bits: as built"
NETWORKS = {"transformer": qwen_dit.NETWORK, "text_encoder": qwen.QWEN2_5_VL}
COUNT, SEEDS = 40, 70_000


def prompts() -> list[GatePrompt]:
    """Prompts of the gate that the self-test has not, evenly spread, with other seeds than the gate's."""
    known = {one.prompt for one in selftest_prompts()}
    others = [one for one in gate_prompts() if one.prompt not in known]
    chosen = [others[i * len(others) // COUNT] for i in range(COUNT)]
    return [replace(one, seed=SEEDS + i) for i, one in enumerate(chosen)]


def drawn(**options: Any) -> tuple[list[np.ndarray], int]:
    pipe = qwenimg.load("shapes", "cpu", "fp32", **options)
    answers = [event for event in selftest.draw(pipe, prompts()) if isinstance(event, selftest.Answer)]
    pipe.close()
    return [one.pixels.astype(np.float64) for one in answers], sum(not one.wrong for one in answers)


def group_of(width: int, most: int) -> int:
    """The largest power of 4 up to `most` that divides a row; 0 where that is 1."""
    return next(4**i for i in range(8, -1, -1) if 4**i <= most and width % 4**i == 0) if most > 1 else 0


def written(policy: str, most: int | None, folder: Path) -> tuple[dict[str, Path], float]:
    """The files of both parts, and the relative error of a layer: the root of the mean square over layers. `most`: the
    largest group of a rotation; None: those of the policy's codes."""
    opened = registry.open_model(builtin.folder())
    files, errors = {}, []
    for name, network in NETWORKS.items():
        assert network.blocks is not None
        plan = quantize.quantized(opened.checkpoint[name].plan, quantize.parse(policy)[network.role], network.blocks)
        tensors = {}
        for key, entry in plan.entries.items():
            values = widened(read(entry))
            if isinstance(entry.storage, Packed) and isinstance(code := entry.storage.code, Affine):
                if most is not None:
                    code = code._replace(rotation=group_of(values.shape[1], most))
                decoded = code.values(encode([values], values.shape, code).arrays)
                errors.append(relative(decoded, values))
                values = decoded
            tensors[key] = torch.from_numpy(np.ascontiguousarray(values, np.float32))
        files[name] = folder / f"{name}.safetensors"
        save_file(tensors, files[name])
    opened.checkpoint.close()
    return files, math.sqrt(float(np.mean(errors)))


def gain(made: list[np.ndarray], before: list[np.ndarray], exact: list[np.ndarray]) -> str:
    """How much nearer to `exact` pictures are than without a rotation: the mean, and its standard error."""
    gains = [a - b for a, b in zip(decibels(made, exact), decibels(before, exact), strict=True)]
    return f"{statistics.mean(gains):.1f} ± {statistics.stdev(gains) / math.sqrt(len(gains)):.1f} dB"


def main() -> None:
    exact, _ = drawn()
    rows = []
    for policy in POLICIES:
        pictures: list[list[np.ndarray]] = []
        for name, most in {**GROUPS, **({SHIPPED: None} if policy == "4" else {})}.items():
            with tempfile.TemporaryDirectory() as folder:
                files, error = written(policy, most, Path(folder))
                made, right = drawn(quantize=policy) if most is None else drawn(**files)
            pictures.append(made)
            rows.append([f"`-q {policy}`", name, f"{error:.4f}", *figures(made, exact, right)])
            print(rows[-1], gain(made, pictures[0], exact), flush=True)
    head = ["policy", "rotated by", "error of a layer", "median PSNR", "worst", "right"]
    write("measured/weights.md", "rotation", table(head, rows))


if __name__ == "__main__":
    main()
