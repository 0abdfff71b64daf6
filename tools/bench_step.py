"""Times one forward of a full-width transformer against diffusers, in one run, with the correctness beside the time.

    python tools/bench_step.py                                    # two layers, 256 + 40 and 1024 + 64 tokens, CPU
    python tools/bench_step.py --backend mlx                      # and MLX
    python tools/bench_step.py --device cuda --layers 60 --size 1024 --cfg --dtypes bf16

A step here is one forward of the whole model with guidance off (`--cfg`: two branches in one batch). `ours` has the
modulation, the start of the text stream and the RoPE tables made beforehand, once per schedule or run, as the product
does; `ours, all inside` makes them in every step, as diffusers does (which keeps its RoPE tables too). The arms take
turns, in an order that is reversed each time. A row whose result is not correct says INVALID instead of a ratio.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch
from wide_checkpoint import write

import qwenimg.backends
from qwenimg.common.families.qwen_image.family import KIND
from qwenimg.common.networks.denoisers import qwen_conditioning, qwen_dit
from qwenimg.common.networks.denoisers.qwen_dit import QwenDiTConfig
from qwenimg.common.precision.precision import bases
from qwenimg.common.precision.residency import ONCE
from qwenimg.common.weights import keys
from qwenimg.common.weights.plan import LoadPlan

ROOT = Path(__file__).parent.parent
BASES = bases(KIND)
TIMESTEP = 750.0  # a number that bfloat16 holds, so that no arm rounds it
POLICIES = {"fp32": ("fp32",), "bf16": ("bf16", "bf16-plain")}
FP32_TOLERANCE = 1e-5  # relative L2 to float64: some 30 float32 roundings in a row, and sums over 12288 products
BF16_TOLERANCE = 1.1  # times diffusers' own error in bfloat16: the same weights, the same places or fewer are rounded
LARGEST_FP64 = 4  # layers; a reference for more is float32


@dataclass
class Inputs:
    """The same numbers for every arm; all of them are exact in bfloat16."""

    latents: np.ndarray  # [1 L 64]
    text: np.ndarray  # [1 S 3584]
    shape: tuple[int, int, int]  # frames, rows, columns in tokens
    branches: int


@dataclass
class Arm:
    name: str
    step: Callable[[], Any]
    numpy: Callable[[Any], np.ndarray]
    weights: int = 0  # bytes


# Inputs and checkpoint


def inputs(image: int, text: int, branches: int) -> Inputs:
    rows = max(r for r in range(1, int(image**0.5) + 1) if image % r == 0)
    rng = np.random.default_rng(7)
    latents, states = (rng.standard_normal(s).astype(np.float32) for s in ((1, image, 64), (1, text, 3584)))
    latents, states = (torch.from_numpy(x).bfloat16().float().numpy() for x in (latents, states))
    return Inputs(latents, states, (1, rows, image // rows), branches)


def make_checkpoint(folder: Path, config: QwenDiTConfig) -> Path:
    return write(folder / "diffusion_pytorch_model.safetensors", qwen_dit.manifest(config))


# Arms


def oracle(config: QwenDiTConfig, file: Path, dtype: torch.dtype, device: str) -> torch.nn.Module:
    """diffusers' model with the weights of `file`."""
    from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope, QwenImageTransformer2DModel
    from safetensors import safe_open

    with torch.device("meta"):
        model = QwenImageTransformer2DModel(num_layers=config.num_layers)
    with safe_open(file, framework="pt", device=device) as stored:
        model.load_state_dict({key: stored.get_tensor(key).to(dtype) for key in stored.keys()}, assign=True)  # noqa: SIM118
    model.pos_embed = QwenEmbedRope(theta=10000, axes_dim=list(config.axes_dims_rope), scale_rope=True)
    return model.eval()


class ExactTimes(torch.nn.Module):
    """The sinusoids of a timestep, which diffusers makes in float32 whatever its dtype, in float64."""

    def forward(self, timestep: torch.Tensor) -> torch.Tensor:
        frequencies = torch.exp(torch.arange(128, device=timestep.device).double() / -128 * np.log(10000))
        angles = 1000 * timestep.double()[:, None] * frequencies
        return torch.cat((angles.cos(), angles.sin()), dim=-1)


def oracle_arm(model: torch.nn.Module, given: Inputs) -> Arm:
    first = next(model.parameters())
    latents, text = (
        torch.from_numpy(x).to(first.device, first.dtype).expand(given.branches, -1, -1)
        for x in (given.latents, given.text)
    )
    timestep = torch.full((given.branches,), TIMESTEP / 1000, device=first.device, dtype=first.dtype)

    @torch.inference_mode()
    def step() -> torch.Tensor:
        result = model(
            hidden_states=latents,
            encoder_hidden_states=text,
            encoder_hidden_states_mask=None,
            timestep=timestep,
            img_shapes=[[given.shape]] * given.branches,
            return_dict=False,
        )[0]
        synchronize(first.device.type)
        return result

    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return Arm("diffusers", step, lambda x: x.double().cpu().numpy(), weights)


def our_arms(engine: Any, config: QwenDiTConfig, plan: LoadPlan, policy: str, given: Inputs) -> list[Arm]:
    """`ours`, and `ours, all inside` on the same weights."""
    transformer = engine.open("qwen_dit", config, plan.stored(BASES[policy]), BASES[policy])
    features = qwen_conditioning.time_rows(config, [TIMESTEP], "float32")
    modulation = transformer.modulate(features)
    resident = sum(parameter_bytes(transformer.model))
    load_modulation(engine, transformer)
    latents = engine.array(given.latents)
    texts = [engine.array(given.text)] * given.branches
    condition = transformer.condition(texts, [given.shape])
    rows = engine.array(features)
    grad = torch.inference_mode if engine.name != "mlx" else nullcontext

    def step() -> Any:
        return evaluated(engine, transformer.predict(latents, (modulation, 0), condition))

    def all_inside() -> Any:
        with grad():
            model = transformer.model
            temb = model.time_text_embed(rows, None)
            blocks = [block.modulation(temb) for block in model.transformer_blocks]
            now = type(modulation)(blocks, model.norm_out.modulation(temb))
            anew = transformer.condition(texts, [given.shape])
            return evaluated(engine, transformer.predict(latents, (now, 0), anew))

    name = f"ours {policy} ({'mlx' if engine.name == 'mlx' else 'torch'})"
    full = sum(parameter_bytes(transformer.model))
    return [Arm(name, step, engine.numpy, resident), Arm(f"{name}, all inside", all_inside, engine.numpy, full)]


def load_modulation(engine: Any, transformer: Any) -> None:
    plan = transformer.plan.when(ONCE)
    device = [] if engine.name == "mlx" else [transformer.device]
    load = sys.modules[type(transformer).__module__].load
    load.fill(transformer.model, plan, *device)


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


# Measurement


def alternate(arms: list[Arm], runs: int) -> dict[str, list[tuple[float, float]]]:
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


def rows_of(arms: list[Arm], dtype: str, reference: np.ndarray, runs: int) -> list[dict[str, Any]]:
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


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    config = QwenDiTConfig(num_layers=options.layers)
    file = make_checkpoint(folder, config)
    cases = [inputs(*map(int, tokens.split("+")), branches=2 if options.cfg else 1) for tokens in options.tokens]
    exact = torch.float64 if options.layers <= LARGEST_FP64 else torch.float32
    model = oracle(config, file, exact, options.device)
    model.time_text_embed.time_proj = ExactTimes()
    references = [(arm := oracle_arm(model, case)).numpy(arm.step()) for case in cases]
    del model, arm
    gc.collect()
    synchronize_and_free()
    engines = [qwenimg.backends.load(name) for name in ([options.device, "mlx"][: 1 + (options.backend == "mlx")])]
    tables = []
    for dtype in options.dtypes:
        model = oracle(config, file, {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype], options.device)
        for case, reference in zip(cases, references, strict=True):
            plan = keys.plan(folder, "transformer", qwen_dit.manifest(config), uses=qwen_dit.uses)
            arms = [oracle_arm(model, case)]
            for engine in engines:
                for policy in POLICIES[dtype]:
                    arms += our_arms(engine, config, plan, policy, case)
            rows = rows_of(arms, dtype, reference, options.runs)
            plan.close()
            tables.append({"dtype": dtype, "image_tokens": case.latents.shape[1], "text_tokens": case.text.shape[1]})
            tables[-1] |= {"branches": case.branches, "reference": str(exact), "rows": rows}
            show(tables[-1])
            del arms
            gc.collect()
            synchronize_and_free()
        del model
    return tables


def synchronize_and_free() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


# Report


def header(options: argparse.Namespace) -> dict[str, Any]:
    import diffusers

    versions = {"python": platform.python_version(), "torch": torch.__version__, "diffusers": diffusers.__version__}
    if options.backend == "mlx":
        import mlx.core as mx

        versions["mlx"] = mx.__version__
    return {
        "command": shlex.join(["python", f"tools/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "commit": git("rev-parse", "HEAD"),
        "changed": bool(git("status", "--porcelain", "backends", "common", "tools")),
        "versions": versions,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("OMP_", "MKL_", "MLX_"))},
        "layers": options.layers,
        "runs": options.runs,
        "step": f"one forward, {'both branches of guidance in one batch' if options.cfg else 'guidance off'}",
    }


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def show(table: dict[str, Any]) -> None:
    print(f"\n{table['dtype']}, {table['image_tokens']} + {table['text_tokens']} tokens x {table['branches']}")
    print(f"  {'':38} {'median':>9} {'min':>9} {'IQR':>8} {'ratio':>8} {'of CPU':>8}   relative L2   step peak")
    for row in table["rows"]:
        ratios = (row["ratio_of_medians"], row["ratio_of_processor_medians"])
        shown = " ".join(f"{ratio if isinstance(ratio, str) else f'{ratio:.3f}':>8}" for ratio in ratios)
        peak = "" if row["peak_step_bytes"] is None else f"{row['peak_step_bytes'] / 1e9:.2f} GB"
        times = f"{row['median_s']:8.3f}s {row['min_s']:8.3f}s {row['iqr_s']:7.3f}s"
        print(f"  {row['arm']:38} {times} {shown}   {row['relative_l2']:.2e}      {peak}", flush=True)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", metavar="IMAGE+TEXT", default=None, help="default: 256+40 1024+64")
    parser.add_argument("--size", type=int, metavar="PIXELS", help="a square image of this side, with 64 text tokens")
    parser.add_argument("--dtypes", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5, help="of every arm, after one that is not counted")
    parser.add_argument("--threads", type=int, help="default: torch's")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of torch")
    parser.add_argument("--backend", choices=("torch", "mlx"), default="torch", help="mlx: MLX's arms as well")
    parser.add_argument("--cfg", action="store_true", help="two branches in one batch")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    options = parser.parse_args()
    if options.size:
        options.tokens = [*(options.tokens or []), f"{(options.size // 16) ** 2}+64"]
    options.tokens = options.tokens or ["256+40", "1024+64"]
    return options


def main() -> None:
    options = read_options()
    if options.threads:
        torch.set_num_threads(options.threads)
    os.environ.setdefault("MLX_ENABLE_TF32", "0")
    if options.backend == "mlx" and sys.platform == "linux":
        import fast_blas  # noqa: F401

    head = header(options)
    if head["load_average"] > 0.5 * os.cpu_count():
        print(f"the machine is busy (load average {head['load_average']:.1f}): only ratios mean anything")
    with tempfile.TemporaryDirectory(prefix="bench-step-") as folder:
        tables = measure(options, Path(folder))
    head["load_average_after"] = os.getloadavg()[0]
    if options.out:
        options.out.write_text(json.dumps(head | {"tables": tables}, indent=1) + "\n")


if __name__ == "__main__":
    main()
