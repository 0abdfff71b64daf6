"""Times one forward of Z-Image's transformer at full width against diffusers, in one run, with the correctness beside
the time.

    python tools/bench_step_zimage.py                             # two layers, 256 + 40 tokens, CPU
    python tools/bench_step_zimage.py --device cuda --layers 30 --tokens 4096+64 --dtypes bf16

A step here is one forward for one branch. `ours` has the refined text and the RoPE tables made beforehand, once per
run, as the product does; `ours, all inside` makes them in every step, as diffusers does. The arms take turns, in an
order that is reversed each time.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import bench_step
import numpy as np
import torch
from bench_step import Arm, evaluated, parameter_bytes, rows_of, show, synchronize
from wide_checkpoint import write

import qwenimg.backends
from qwenimg.common.families.z_image import published
from qwenimg.common.families.z_image.family import KIND
from qwenimg.common.networks import zimage_dit
from qwenimg.common.networks.zimage_conditioning import time_row
from qwenimg.common.networks.zimage_dit import PATCH, ZImageConfig
from qwenimg.common.numbers import packing
from qwenimg.common.numbers.timesteps import timestep_features
from qwenimg.common.precision.precision import bases
from qwenimg.common.weights import keys
from qwenimg.common.weights.plan import LoadPlan

BASES = bases(KIND)
TIMESTEP = 750.0  # a number that bfloat16 holds, so that no arm rounds it
POLICIES = {"fp32": ("fp32",), "bf16": ("bf16", "bf16-plain")}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Inputs = tuple[np.ndarray, np.ndarray]  # latents [1 16 h w] and text [1 S 2560]


def inputs(image: int, text: int) -> Inputs:
    """The same numbers for every arm; all of them are exact in bfloat16."""
    rows = max(r for r in range(1, int(image**0.5) + 1) if image % r == 0)
    rng, shape = np.random.default_rng(7), (1, 16, rows * PATCH, image // rows * PATCH)
    latents, states = (torch.from_numpy(rng.standard_normal(s).astype(np.float32)) for s in (shape, (1, text, 2560)))
    return latents.bfloat16().float().numpy(), states.bfloat16().float().numpy()


def exact_times(t: torch.Tensor, dim: int) -> torch.Tensor:
    """The sinusoids of a timestep, which diffusers makes in float32 whatever its dtype, in float64."""
    return torch.from_numpy(timestep_features(float(t), dim))[None]


def oracle(config: ZImageConfig, file: Path, dtype: torch.dtype, device: str) -> Any:
    """diffusers' model with the weights of `file`."""
    from diffusers import ZImageTransformer2DModel
    from safetensors import safe_open

    fields = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(config).items()}
    with torch.device("meta"):
        model = ZImageTransformer2DModel(**fields)
    with safe_open(file, framework="pt", device=device) as stored:
        model.load_state_dict({key: stored.get_tensor(key).to(dtype) for key in stored.keys()}, assign=True)  # noqa: SIM118
    return model.eval()


def oracle_arm(model: Any, given: Inputs) -> Arm:
    first = next(model.parameters())
    latents, text = (torch.from_numpy(x[0]).to(first.device, first.dtype) for x in given)
    time = torch.full((1,), 1 - TIMESTEP / 1000, device=first.device, dtype=first.dtype)

    @torch.inference_mode()
    def step() -> torch.Tensor:
        [result] = model([latents[:, None]], time, [text])[0]
        synchronize(first.device.type)
        return result

    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return Arm("diffusers", step, lambda x: x[:, 0].double().cpu().numpy(), weights)


def our_arms(engine: Any, config: ZImageConfig, plan: LoadPlan, policy: str, given: Inputs) -> list[Arm]:
    """`ours`, and `ours, all inside` on the same weights."""
    transformer = engine.open("zimage_dit", config, plan.stored(BASES[policy]), BASES[policy])
    h, w = given[0].shape[2:]
    latents, text = engine.array(packing.pack(given[0], channels_last=True)), engine.array(given[1])
    features, grid = time_row(TIMESTEP, "float32"), (h // PATCH, w // PATCH)
    condition = transformer.condition(text, grid)

    def step() -> Any:
        return evaluated(engine, transformer.predict(latents, features, condition))

    def all_inside() -> Any:
        return evaluated(engine, transformer.predict(latents, features, transformer.condition(text, grid)))

    def unpacked(x: Any) -> np.ndarray:
        return packing.unpack(engine.numpy(x), h, w, channels_last=True)[0]

    name, weights = (
        f"ours {policy} ({'mlx' if engine.name == 'mlx' else 'torch'})",
        sum(parameter_bytes(transformer.model)),
    )
    return [Arm(name, step, unpacked, weights), Arm(f"{name}, all inside", all_inside, unpacked, weights)]


def measure(options: argparse.Namespace, folder: Path) -> None:
    config = replace(published.transformer(), n_layers=options.layers, n_refiner_layers=1)
    manifest = {zimage_dit.published(key): shape for key, shape in zimage_dit.manifest(config).items()}
    file = write(folder / "diffusion_pytorch_model.safetensors", manifest)
    cases = [inputs(*map(int, tokens.split("+"))) for tokens in options.tokens]
    model = oracle(config, file, torch.float64 if options.layers <= 2 else torch.float32, options.device)
    model.t_embedder.timestep_embedding = exact_times
    references = [(arm := oracle_arm(model, case)).numpy(arm.step()) for case in cases]
    del model, arm
    gc.collect()
    engine = qwenimg.backends.load(options.device)
    for dtype in options.dtypes:
        model = oracle(config, file, DTYPES[dtype], options.device)
        for case, reference in zip(cases, references, strict=True):
            plan = keys.plan(folder, "transformer", zimage_dit.manifest(config), rename=zimage_dit.rename)
            arms = [oracle_arm(model, case)]
            for policy in POLICIES[dtype]:
                arms += our_arms(engine, config, plan, policy, case)
            tokens = {"image_tokens": case[0].size // 64, "text_tokens": case[1].shape[1], "branches": 1}
            show({"dtype": dtype, **tokens, "rows": rows_of(arms, dtype, reference, options.runs)})
            plan.close()
            del arms
            gc.collect()
        del model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", metavar="IMAGE+TEXT", default=["256+40"])
    parser.add_argument("--dtypes", nargs="+", choices=POLICIES, default=["fp32"])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5, help="of every arm, after one that is not counted")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    print(bench_step.header(argparse.Namespace(**vars(options), backend="torch", cfg=False)))
    with tempfile.TemporaryDirectory(prefix="bench-step-") as folder:
        measure(options, Path(folder))


if __name__ == "__main__":
    main()
