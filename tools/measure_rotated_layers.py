"""What a layer costs whose weight stays in ComfyUI's `int8_convrot` and whose input is rotated: its error and its time,
beside those of `-q 8` and of the decoded weight.

    python tools/measure_rotated_layers.py      # writes docs/results/rotated.csv again

One layer in one process on one thread of a CPU; the arms take turns, and a figure is the median of the processor time
of ROUNDS. The error is that of the layer's result against float64 with the values that the file has: of computing, not
of quantizing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

os.environ.setdefault("MLX_ENABLE_TF32", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from doc_tables import write_data

from qwenimg.common.quant.affine import BITS8, encode
from qwenimg.common.quant.quantized_tensor import QuantizedTensor
from qwenimg.common.quant.rotated import RotatedInt8
from qwenimg.common.weights.storage import QuantFormat

GROUP, ROUNDS = 256, 7
SHAPES = ((12288, 3072), (3072, 3072), (3072, 12288))  # rows and width of the published transformer's layers
TOKENS = {"cpu": (256, 1088), "mlx": (256,)}
PART = 256  # rows of a layer in bfloat16 on MLX, of which a whole one takes minutes


def cases(weight: np.ndarray) -> dict[str, tuple[QuantFormat | None, QuantizedTensor | None, np.ndarray]]:
    """By name the code of a layer, its codes, and the values that it holds."""
    turning = RotatedInt8(GROUP)
    rotated, affine = turning.encode(weight), encode([weight], weight.shape, BITS8)
    values = turning.values([rotated.codes.view("i1"), rotated.scales])
    return {
        "-q 8": (BITS8, affine, BITS8.values(affine.arrays)),
        "rotated": (turning, rotated, values),
        "decoded": (None, None, values),
    }


def torch_arm(
    code: QuantFormat | None, coded: QuantizedTensor | None, values: np.ndarray, dtype: str
) -> Callable[[Any], np.ndarray]:
    import torch

    from qwenimg.backends.torch.ops import DTYPES, Linear
    from qwenimg.backends.torch.ops.quantized import DecodeBuffer, QuantizedLinear

    layer = Linear(values.shape[1], len(values), bias=False)
    if code is None or coded is None:
        layer.weight = torch.nn.Parameter(torch.from_numpy(values).to(DTYPES[dtype]))
    else:
        layer = QuantizedLinear(layer, code, DTYPES[dtype], DecodeBuffer())
        codes, *rest = map(torch.from_numpy, coded.arrays)
        layer.put(codes.view(torch.int32), *rest)

    def run(x: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return layer(torch.from_numpy(x).to(DTYPES[dtype])).float().numpy()

    return run


def mlx_arm(
    code: QuantFormat | None, coded: QuantizedTensor | None, values: np.ndarray, dtype: str
) -> Callable[[Any], np.ndarray]:
    import mlx.core as mx

    from qwenimg.backends.mlx.ops import DTYPES, Linear
    from qwenimg.backends.mlx.ops.quantized import QuantizedLinear

    layer = Linear(values.shape[1], len(values), bias=False)
    if code is None or coded is None:
        layer.weight = mx.array(values).astype(DTYPES[dtype])
    else:
        layer = QuantizedLinear(layer, code, DTYPES[dtype])
        layer.put(*map(mx.array, coded.arrays))

    def run(x: np.ndarray) -> np.ndarray:
        return np.array(layer(mx.array(x).astype(DTYPES[dtype])).astype(mx.float32))

    return run


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    import torch

    return torch.from_numpy(values).to(getattr(torch, dtype)).float().numpy()


def measured(backend: str, dtype: str, rows: int, width: int, tokens: int) -> list[str]:
    rng = np.random.default_rng(7)
    weight = (rng.standard_normal((rows, width)) * 0.02).astype(np.float32)
    x = rounded(rng.standard_normal((tokens, width)).astype(np.float32), dtype)
    arms, errors, seconds = {}, {}, {}
    for name, (code, coded, values) in cases(weight).items():
        arms[name] = (torch_arm if backend == "cpu" else mlx_arm)(code, coded, values, dtype)
        exact = x[:64].astype(np.float64) @ values.astype(np.float64).T
        errors[name] = np.linalg.norm(arms[name](x)[:64] - exact) / np.linalg.norm(exact)
        seconds[name] = [0.0] * 0
    for _ in range(ROUNDS):
        for name, run in arms.items():
            begun = time.process_time()
            run(x)
            seconds[name].append(time.process_time() - begun)
    usual = median(seconds["-q 8"])
    shown = [f"{errors[name]:.1e}" for name in arms]
    ratios = [f"{median(seconds[name]) / usual:.2f}" for name in ("rotated", "decoded")]
    return [f"`{backend}`", dtype, f"{width:,} to {rows:,}", f"{tokens:,}", *shown, *ratios]


def main() -> None:
    import fast_blas  # noqa: F401

    found = []
    for backend, every in TOKENS.items():
        for dtype in ("float32", "bfloat16"):
            for rows, width in SHAPES:
                for tokens in every:
                    of = PART if (backend, dtype) == ("mlx", "bfloat16") else rows
                    found.append(measured(backend, dtype, of, width, tokens))
                    print(found[-1], flush=True)
    heads = ["backend", "computes in", "layer", "tokens", "error of `-q 8`", "of the rotated layer", "of the decoded"]
    heads += ["time of the rotated layer, in that of `-q 8`", "of the decoded"]
    write_data("rotated", heads, found)


if __name__ == "__main__":
    main()
