"""Times the gradients of a LoRA of rank 16 beside a few blocks at full width, in float32, against diffusers with PEFT
in one run, with the difference of the gradients beside the time.

    python tools/bench_training.py                     # Qwen-Image: two layers, 256 + 40 tokens
    python tools/bench_training.py flux --runs 5       # another model of bench_step.py
    python tools/bench_training.py --backend mlx       # MLX

A step is one forward, the loss, and the gradients of all factors. What depends on the noise level alone is made
beforehand, as the product does for many steps at once; diffusers makes it in every step. `bench.py` says how arms take
turns. The figures are printed; with --keep they go to docs/results/training-step.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("MLX_ENABLE_TF32", "0")
if sys.platform == "linux" and "mlx" in sys.argv:
    import fast_blas  # noqa: F401

import bench
import numpy as np
import torch
from bench import Arm
from bench_step import Case, cases, checkpoint, inputs, oracles, planned
from doc_tables import DATA

import qwenimg.backends
from qwenimg.common.families import registry
from qwenimg.common.precision.precision import bases
from qwenimg.common.runtime.factor_names import DOWN, UP
from qwenimg.common.training.lora_step import first_factors

RANK = 16
NEAR = 1e-5  # relative L2 of all gradients: both are float32
Arrays = Mapping[str, np.ndarray]


def factors_of(case: Case) -> dict[str, np.ndarray]:
    """Return factors of the layers that learn; up is not zero, so that down has a gradient."""
    row = next(family.training for family in registry.FAMILIES if family.name == case.family)
    assert row is not None, case.family
    shapes = case.network.manifest(case.config)
    paths = {key.removesuffix(".weight"): shape for key, shape in shapes.items() if key.endswith(".weight")}
    layers = {path: (s[0], s[1]) for path, s in paths.items() if len(s) == 2 and row.layers.fullmatch(path)}
    factors, generator = first_factors(layers, RANK, seed=0), np.random.default_rng(1)
    for name in factors:
        if name.endswith(UP):
            factors[name] = (generator.standard_normal(factors[name].shape) * 0.01).astype(np.float32)
    return factors


def peer(case: Case, files: list[Path], given: Any, factors: Arrays) -> tuple[Arm, tuple[int, ...]]:
    """Return diffusers' model with PEFT's layers, and the shape of its prediction."""
    from peft import LoraConfig, inject_adapter_in_model

    model = oracles(case, files, torch.float32, "cpu")[0].requires_grad_(False)
    paths = [key.removesuffix(DOWN) for key in factors if key.endswith(DOWN)]
    adapted = f"^(?:{'|'.join(map(re.escape, paths))})$"
    model = inject_adapter_in_model(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=adapted), model)
    leaves: dict[str, torch.Tensor] = {}
    for path in paths:
        layer = model.get_submodule(path)
        for name, part in ((DOWN, layer.lora_A), (UP, layer.lora_B)):
            weight = part["default"].weight
            weight.data = torch.from_numpy(factors[path + name].copy()).reshape(weight.shape)
            leaves[path + name] = weight.requires_grad_()
    step = case.theirs(model, *(torch.from_numpy(x) for x in given))
    with torch.no_grad():
        shape = tuple(step().shape)
    target = torch.from_numpy(target_of(shape))

    def gradients() -> dict[str, torch.Tensor | None]:
        loss = (step() - target).square().mean()
        return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), allow_unused=True), strict=True))

    return Arm("diffusers with PEFT", gradients, as_vector), shape


def ours(case: Case, engine: Any, files: list[Path], given: Any, factors: Arrays, shape: tuple[int, ...]) -> Arm:
    precision = bases(case.kind)["fp32"]
    plan = planned(case, case, files[0])
    component = engine.open(case.network.name, case.config, plan.stored(precision), precision)
    adapters = engine.adapters(factors, None)
    adapters.attach(component)
    target = engine.array(target_of(shape))
    with adapters.learning():
        step, x, _ = case.ours(component, engine, *given)

    def loss() -> Any:
        difference = step(x).reshape(shape) - target
        return (difference * difference).mean()

    def gradients() -> Any:
        with adapters.learning():
            return adapters.evaluated(adapters.gradients(loss)[1])

    return Arm(bench.our_name(engine, "fp32"), gradients, as_vector)


def target_of(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(5).standard_normal(shape).astype(np.float32)


def as_vector(gradients: Mapping[str, Any]) -> np.ndarray:
    """Return all gradients as one vector, by their names; without those that no result depends on."""
    parts = {name: np.asarray(one).astype(np.float64).ravel() for name, one in gradients.items() if one is not None}
    return np.concatenate([parts[name] for name in sorted(parts) if parts[name].any()])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--tokens", default="256+40", metavar="IMAGE+TEXT")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--keep", action="store_true", help="write docs/results/training-step.json")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    case, sizes = cases()[options.model], map(int, options.tokens.split("+"))
    factors, given = factors_of(case), inputs(case, *sizes)
    with tempfile.TemporaryDirectory(prefix="bench-training-") as folder:
        files = [checkpoint(part, Path(folder)) for part in case.parts]
        theirs, shape = peer(case, files, given, factors)
        arms = [theirs, ours(case, qwenimg.backends.load(options.backend), files, given, factors, shape)]
        reference, found = (arm.numpy(arm.step()) for arm in arms)
        apart = float(np.linalg.norm(found - reference) / np.linalg.norm(reference))
        seconds = bench.alternate(arms, options.runs)
    cpu = {name: median(used for _, used in some) for name, some in seconds.items()}
    ratio = cpu[arms[1].name] / cpu[arms[0].name]
    row = {
        "model": options.model,
        "tokens": options.tokens,
        "runs": options.runs,
        "cpu_seconds": cpu,
        "ratio": ratio,
        "gradients_apart": apart,
    }
    print(json.dumps(row, indent=1))
    if apart > NEAR:
        print("INVALID: the gradients are not the same")
        return 1
    if options.keep:
        file = DATA / "training-step.json"
        rows = json.loads(file.read_text()) if file.exists() else {}
        name = f"{options.model}-{options.backend}-{options.tokens}"
        file.write_text(json.dumps(rows | {name: row}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
