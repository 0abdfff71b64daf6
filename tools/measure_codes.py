"""What weights in codes take while a full-width transformer is loaded, and what one of its layers takes to compute.

    python tools/measure_codes.py                # writes the tables of docs/measured/weights.md again; 2.2 GB of disk
    python tools/measure_codes.py --layers       # the times of layers alone
    python tools/measure_codes.py --int4pack     # torch's own product by codes of 4 bits alone
    python tools/measure_codes.py --step         # the time of a step alone; 3 GB of disk, 13 GB of memory

Memory: three blocks of the published width in bfloat16, loaded with `-q 4` in a process of its own; the largest
resident size while loading, over that before, against the bytes of the plan. Time: one layer of 3072 to 12288, in codes
and as it is, in one process on one thread of a CPU; the arms take turns, and a figure is the median of the processor
time of ROUNDS. torch's product and bfloat16 on MLX are timed on PART of a layer's rows: of a whole one they
take minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("MLX_ENABLE_TF32", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that wait for one another use processor time too

import numpy as np
from doc_tables import table, write
from random_model import write as write_wide

from qwenimg import backends
from qwenimg.common.families.qwen_image.family import KIND
from qwenimg.common.measure import exactness
from qwenimg.common.networks.denoisers import qwen_dit
from qwenimg.common.networks.denoisers.qwen_dit import QwenDiTConfig
from qwenimg.common.precision.precision import bases
from qwenimg.common.precision.residency import ALWAYS
from qwenimg.common.quant.affine import BITS4, BITS6, BITS8, Affine, encode
from qwenimg.common.quant.quantized_tensor import unpack
from qwenimg.common.weights import keys, quantize

BACKENDS = ("cpu", "mlx")
LAYERS, POLICY = 3, "4"
WIDTH, INNER, TOKENS, ROUNDS = 3072, 12288, (256, 1088), 5
PART = 256
LARGEST = INNER * WIDTH * 2  # bytes of the largest layer that stays, in bfloat16


def load(path: Path, backend: str) -> dict[str, int]:
    """Loads the transformer in `path`; bytes by the plan, and resident: before, after, and at most."""
    config = QwenDiTConfig(num_layers=LAYERS)
    plan = keys.plan(path, "transformer", qwen_dit.manifest(config), uses=qwen_dit.uses)
    assert qwen_dit.NETWORK.blocks is not None
    plan = quantize.quantized(plan, quantize.parse(POLICY)["transformer"], qwen_dit.NETWORK.blocks)
    plan = plan.stored(bases(KIND)["bf16"], "transformer")
    engine = backends.load(backend)
    exactness.float32_error(engine)
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forgets the largest size so far
    opened = engine.open("qwen_dit", config, plan, bases(KIND)["bf16"])
    found = {
        "plan": plan.when(ALWAYS).nbytes,
        "before": before,
        "after": _resident("VmRSS"),
        "most": _resident("VmHWM"),
    }
    assert opened is not None
    return found


def _resident(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def memory() -> list[list[str]]:
    rows = []
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        path = write_wide(Path(folder) / "wide.safetensors", qwen_dit.manifest(QwenDiTConfig(num_layers=LAYERS)))
        for backend in BACKENDS:
            asked = [sys.executable, __file__, "--load", str(path), backend]
            done = subprocess.run(asked, check=True, capture_output=True, text=True)
            found = json.loads(done.stdout.splitlines()[-1])
            over = found["most"] - found["before"] - found["plan"]
            figures = [found["plan"], found["after"] - found["before"], found["most"] - found["before"]]
            rows.append([f"`{backend}`", *(f"{n / 1e9:.2f} GB" for n in figures), f"{over / LARGEST:.1f}"])
            print(rows[-1], flush=True)
    return rows


def drawn(rows: int) -> np.ndarray:
    """A layer's weight."""
    return np.random.default_rng(0).standard_normal((rows, WIDTH)).astype(np.float32) * WIDTH**-0.5


def arms(backend: str, dtype: str, count: int) -> dict[str, Callable[[Any], object]]:
    """A layer of `count` rows by what it is kept in, as a function of its input."""
    weight = drawn(count)
    found: dict[str, Callable[[Any], object]] = {}
    codes = {"dense": None, "8 bits": BITS8, "6 bits": BITS6, "4 bits": BITS4}
    for name, code in {**codes, "not rotated": BITS4._replace(rotation=0)}.items():
        found[name] = (_torch if backend == "cpu" else _mlx)(weight, code, dtype)
    return found


def _torch(weight: np.ndarray, code: Affine | None, dtype: str) -> Callable[[Any], object]:
    import torch

    from qwenimg.backends.torch.ops import DTYPES, Linear
    from qwenimg.backends.torch.ops.quantized import DecodeBuffer, QuantizedLinear

    layer = Linear(WIDTH, len(weight), bias=False)
    if code is None:
        layer.weight = torch.nn.Parameter(torch.from_numpy(weight).to(DTYPES[dtype]))
    else:
        layer = QuantizedLinear(layer, code, DTYPES[dtype], DecodeBuffer())
        codes, *rest = map(torch.from_numpy, encode([weight], weight.shape, code).arrays)
        layer.put(codes.view(torch.int32), *rest)

    def run(x: np.ndarray) -> object:
        with torch.inference_mode():
            return layer(torch.from_numpy(x).to(DTYPES[dtype]))

    return run


def _mlx(weight: np.ndarray, code: Affine | None, dtype: str) -> Callable[[Any], object]:
    import mlx.core as mx

    from qwenimg.backends.mlx.ops import DTYPES, Linear
    from qwenimg.backends.mlx.ops.quantized import QuantizedLinear

    layer = Linear(WIDTH, len(weight), bias=False)
    if code is None:
        layer.weight = mx.array(weight).astype(DTYPES[dtype])
    else:
        layer = QuantizedLinear(layer, code, DTYPES[dtype])
        layer.put(*map(mx.array, encode([weight], weight.shape, code).arrays))

    def run(x: np.ndarray) -> object:
        made = layer(mx.array(x).astype(DTYPES[dtype]))
        mx.eval(made)
        return made

    return run


def turns(layers: dict[str, Callable[[Any], object]], tokens: int) -> list[str]:
    """The time of each layer but the first, as a multiple of the first one's."""
    x = np.random.default_rng(1).standard_normal((tokens, WIDTH)).astype(np.float32)
    seconds: dict[str, list[float]] = {name: [] for name in layers}
    for turn in range(ROUNDS + 1):
        for name, run in layers.items():
            begun = time.process_time()
            run(x)
            if turn:  # the first warms up
                seconds[name].append(time.process_time() - begun)
    first, *others = (median(every) for every in seconds.values())
    print({name: [round(value, 4) for value in every] for name, every in seconds.items()}, flush=True)
    return [f"{value / first:.2f}" for value in others]


def times(backend: str, dtype: str, count: int) -> list[list[str]]:
    layers = arms(backend, dtype, count)
    return [[f"`{backend}`", dtype, f"{count:,}", f"{tokens:,}", *turns(layers, tokens)] for tokens in TOKENS]


def step() -> list[list[str]]:
    """A forward of four full-width blocks in float32 on torch, by `-q`, as a multiple of the one that is not in codes.
    Of fewer blocks `-q 4` would keep all in 8 bits."""
    import bench
    import bench_step

    case = bench_step.cases(layers=4)["qwen"]
    given = bench_step.inputs(case, 1024, 64)
    engine, blocks = backends.load("cpu"), qwen_dit.NETWORK.blocks
    assert blocks is not None
    arms = []
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        path = bench_step.checkpoint(case, Path(folder))
        for policy in ("", "8", "6", "4"):
            plan = bench_step.planned(case, case, path)
            if policy:
                plan = quantize.quantized(plan, quantize.parse(policy)["transformer"], blocks)
            arms.append(replace(bench_step.our_arms(case, engine, [plan], "fp32", given)[0], name=policy))
            arms[-1].step()
        seconds = bench.alternate(arms, ROUNDS - 2)
    print(seconds, flush=True)
    dense, *coded = (median(used for _, used in seconds[arm.name]) for arm in arms)
    return [["`cpu`", "float32", "1,024 + 64", *(f"{each / dense:.2f}" for each in coded)]]


def int4pack(dtype: str) -> list[list[str]]:
    """torch's product by 4-bit codes: what it takes the weights for, and its time beside ours and a dense layer's."""
    import torch

    from qwenimg.backends.torch.ops import DTYPES

    weight, kept = drawn(PART), DTYPES[dtype]
    code = BITS4._replace(rotation=0)
    codes, *rest = encode([weight], weight.shape, code).arrays
    numbers = torch.from_numpy(unpack(codes, 4).astype(np.int32))
    scales, biases = (torch.from_numpy(part.astype(np.float32)) for part in rest)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
    ends = torch.stack([scales.T, (biases + 8 * scales).T], -1).contiguous().to(kept)  # (code - 8) scale + zero

    def run(x: np.ndarray) -> torch.Tensor:
        given = torch.from_numpy(x).to(kept)
        return torch.ops.aten._weight_int4pack_mm_for_cpu(given, packed, BITS4.group, ends)

    grouped = numbers.view(PART, -1, BITS4.group).to(torch.float32)
    meant = (grouped * scales[..., None] + biases[..., None]).flatten(1)
    found, rounded = run(np.eye(WIDTH, dtype=np.float32)).T.to(torch.float32), meant.to(kept).to(torch.float32)
    errors = [f"{float((made - meant).norm() / meant.norm()):.4f}" for made in (found, rounded)]
    row = [dtype, f"{float((found == rounded).to(torch.float32).mean()):.0%}", *errors]
    layers = {"dense": _torch(weight, None, dtype), "4 bits": _torch(weight, code, dtype), "int4pack": run}
    rows = [[*row, f"{tokens:,}", *turns(layers, tokens)] for tokens in TOKENS]
    print(*rows, sep="\n", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--load", nargs=2, metavar=("FILE", "BACKEND"), help=argparse.SUPPRESS)
    parser.add_argument("--layers", action="store_true", help="only the times of layers")
    parser.add_argument("--int4pack", action="store_true", help="only torch's own product by codes of 4 bits")
    parser.add_argument("--step", action="store_true", help="only the time of a step")
    given = parser.parse_args()
    if given.load:
        print(json.dumps(load(Path(given.load[0]), given.load[1])))
        return
    if given.step:
        write(
            "measured/weights.md",
            "step",
            table(["backend", "computes in", "tokens", "`-q 8`", "`-q 6`", "`-q 4`"], step()),
        )
        return
    if given.layers == given.int4pack:
        heads = ["backend", "weights, by the plan", "resident after", "at most while loading", "layers over the plan"]
        write("measured/weights.md", "loading", table(heads, memory()))
    import fast_blas  # noqa: F401

    if given.int4pack or not given.layers:
        heads = ["computes in", "values that are ours", "error", "of rounding alone", "tokens", "decoded", "torch's"]
        rows = [row for dtype in ("float32", "bfloat16") for row in int4pack(dtype)]
        write("measured/weights.md", "int4pack", table(heads, rows))
    if given.layers or not given.int4pack:
        timed = [("cpu", "float32", INNER), ("cpu", "bfloat16", INNER), ("mlx", "float32", INNER)]
        timed += [("mlx", "bfloat16", PART)]  # of a whole layer it takes minutes
        rows = [row for one in timed for row in times(*one)]
        heads = ["backend", "computes in", "rows", "tokens", "8 bits", "6 bits", "4 bits", "4 bits, not rotated"]
        write("measured/weights.md", "layers", table(heads, rows))


if __name__ == "__main__":
    main()
