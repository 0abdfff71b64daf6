"""What every bench of a network shares: arms that take turns, their times with the correctness beside them, the table,
and what is said of the machine.

The arms take turns in an order that is reversed each time; the first arm is the peer, and has run once before. A row
whose result is not correct says INVALID instead of a ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parent.parent
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
POLICIES = {"fp32": ("fp32",), "bf16": ("bf16", "bf16-plain"), "fp16": ("fp16", "fp16-plain")}
FP32_TOLERANCE = 1e-5  # relative L2 to float64: some 30 float32 roundings in a row, and sums over 12288 products
BF16_TOLERANCE = 1.1  # times the peer's own error in 16 bit: the same weights, the same places or fewer are rounded


@dataclass
class Arm:
    name: str
    step: Callable[[], Any]
    numpy: Callable[[Any], np.ndarray]
    weights: int = 0  # bytes


def exact(values: np.ndarray) -> np.ndarray:
    """Numbers that bfloat16 holds, so that no arm rounds them."""
    return torch.from_numpy(values).bfloat16().float().numpy()


# Arms


def stored(
    model: torch.nn.Module, file: Path, dtype: torch.dtype, device: str = "cpu", name: Callable[[str], str] = str
) -> Any:
    """The peer's model with the weights of `file`; its buffers stay as it makes them. name: the peer's of a tensor."""
    from safetensors import safe_open

    with safe_open(file, framework="pt", device=device) as tensors:
        weights = {name(key): tensors.get_tensor(key).to(dtype) for key in tensors.keys()}  # noqa: SIM118
    model.load_state_dict(weights, assign=True)
    return model.eval()


def peer_arm(name: str, model: torch.nn.Module, step: Callable[[], torch.Tensor]) -> Arm:
    device = next(model.parameters()).device.type

    @torch.inference_mode()
    def synchronized() -> torch.Tensor:
        result = step()
        synchronize(device)
        return result

    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return Arm(name, synchronized, lambda x: x.double().cpu().numpy(), weights)


def our_name(engine: Any, policy: str) -> str:
    return f"ours {policy} ({'mlx' if engine.name == 'mlx' else 'torch'})"


def parameter_bytes(model: Any) -> list[int]:
    """Of the parameters that are in memory."""
    if isinstance(model, torch.nn.Module):
        return [p.nbytes for p in model.parameters() if not p.is_meta]
    from mlx.utils import tree_flatten

    return [value.nbytes for _, value in tree_flatten(model.parameters()) if value.size]


def evaluated(engine: Any, result: Any) -> Any:
    if engine.name == "mlx":
        import mlx.core as mx

        mx.eval(result)
    synchronize(engine.name)
    return result


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def synchronize_and_free() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


# Measurement


def alternate(arms: Sequence[Arm], runs: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds by the clock and of all processors, for every run of every arm; each has run once before.

    On a machine that does other work as well, the seconds of the processors are the steadier measure.
    """
    seconds: dict[str, list[tuple[float, float]]] = {arm.name: [] for arm in arms}
    for run in range(runs):
        for arm in arms if run % 2 == 0 else reversed(arms):
            start, used = time.perf_counter(), time.process_time()
            arm.step()
            seconds[arm.name].append((time.perf_counter() - start, time.process_time() - used))
    return seconds


def peak_of_step(arm: Arm) -> int | None:
    """Bytes above what was allocated before, on an NVIDIA GPU."""
    if not torch.cuda.is_initialized():
        return None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    arm.step()
    return torch.cuda.max_memory_allocated() - before


def error_of(arm: Arm, reference: np.ndarray) -> float:
    result = np.asarray(arm.numpy(arm.step()), np.float64)
    return float(np.linalg.norm(result - reference) / np.linalg.norm(reference))


def rows_of(arms: Sequence[Arm], dtype: str, reference: np.ndarray, runs: int) -> list[dict[str, Any]]:
    """The table of one dtype and size; the first arm is the peer."""
    errors = {arm.name: error_of(arm, reference) for arm in arms}
    allowed = FP32_TOLERANCE if dtype == "fp32" else BF16_TOLERANCE * errors[arms[0].name]
    seconds = alternate(arms, runs)
    base, base_cpu = zip(*seconds[arms[0].name], strict=True)
    rows = []
    for arm in arms:
        mine, cpu = zip(*seconds[arm.name], strict=True)
        quarter = quantiles(mine, n=4)
        valid = errors[arm.name] <= allowed
        rows.append(
            {
                "arm": arm.name,
                "median_s": median(mine),
                "min_s": min(mine),
                "iqr_s": quarter[2] - quarter[0],
                "ratio_of_medians": median(mine) / median(base) if valid else "INVALID",
                "median_of_ratios": median(a / b for a, b in zip(mine, base, strict=True)) if valid else "INVALID",
                "median_processor_s": median(cpu),
                "ratio_of_processor_medians": median(cpu) / median(base_cpu) if valid else "INVALID",
                "relative_l2": errors[arm.name],
                "relative_l2_allowed": allowed,
                "weight_bytes": arm.weights,
                "peak_step_bytes": peak_of_step(arm),
            }
        )
    return rows


# Report


def options(description: str | None) -> argparse.ArgumentParser:
    """The options that every bench has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="of every arm, after one that is not counted")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    return parser


def header(runs: int, device: str = "cpu", **more: Any) -> dict[str, Any]:
    import diffusers

    versions = {"python": platform.python_version(), "torch": torch.__version__, "diffusers": diffusers.__version__}
    if "mlx.core" in sys.modules:
        versions["mlx"] = sys.modules["mlx.core"].__version__
    return {
        "command": shlex.join(["python", f"tools/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "commit": git("rev-parse", "HEAD"),
        "changed": bool(git("status", "--porcelain", "backends", "common", "tools")),
        "versions": versions,
        "device": torch.cuda.get_device_name() if device == "cuda" else cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("OMP_", "MKL_", "MLX_"))},
        "runs": runs,
        **more,
    }


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    print(f"\n{title}")
    print(f"  {'':38} {'median':>9} {'min':>9} {'IQR':>8} {'ratio':>8} {'of CPU':>8}   relative L2   step peak")
    for row in rows:
        ratios = (row["ratio_of_medians"], row["ratio_of_processor_medians"])
        shown = " ".join(f"{ratio if isinstance(ratio, str) else f'{ratio:.3f}':>8}" for ratio in ratios)
        peak = "" if row["peak_step_bytes"] is None else f"{row['peak_step_bytes'] / 1e9:.2f} GB"
        times = f"{row['median_s']:8.3f}s {row['min_s']:8.3f}s {row['iqr_s']:7.3f}s"
        print(f"  {row['arm']:38} {times} {shown}   {row['relative_l2']:.2e}      {peak}", flush=True)


def keep(path: Path | None, head: dict[str, Any], tables: Sequence[dict[str, Any]]) -> None:
    """Write the results, if a file is given for them."""
    if path:
        head = head | {"load_average_after": os.getloadavg()[0], "tables": list(tables)}
        path.write_text(json.dumps(head, indent=1) + "\n")
