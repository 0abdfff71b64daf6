"""Times one step of a full-width Stable Diffusion UNet against diffusers, in one run, with the correctness beside it.

    python tools/bench_unet.py                                        # SD 1.5, 64x64 latents, two branches, CPU
    python tools/bench_unet.py --family sdxl --latents 128 --device cuda --dtypes bf16 fp16

A step here is one forward of the whole model with both branches of guidance in one batch. Ours has the keys and values
of the text made beforehand, once per run, as the product does. The weights are random. The arms take turns, in an order
that is reversed each time. A row whose result is not correct says INVALID instead of a ratio.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import bench_step
import numpy as np
import torch
from bench_step import Arm
from wide_checkpoint import write

import qwenimg.backends
from qwenimg.common.base.config import parse
from qwenimg.common.families.stable_diffusion.family import KIND
from qwenimg.common.networks.denoisers import unet
from qwenimg.common.networks.denoisers.unet import UNetConfig
from qwenimg.common.precision.precision import bases
from qwenimg.common.weights import keys
from qwenimg.common.weights.plan import LoadPlan

SD_BASES = bases(KIND)
TIME = 437.0  # a whole number, as Stable Diffusion's times are
TOKENS = 77
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
POLICIES = {"fp32": ("fp32",), "bf16": ("bf16", "bf16-plain"), "fp16": ("fp16", "fp16-plain")}
FAMILIES: dict[str, dict[str, Any]] = {
    "sd15": {"cross_attention_dim": 768},
    "sdxl": {
        "block_out_channels": [320, 640, 1280],
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "attention_head_dim": [5, 10, 20],
        "transformer_layers_per_block": [1, 2, 10],
        "cross_attention_dim": 2048,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
}


class Inputs:
    """The same numbers for every arm; all of them are exact in bfloat16."""

    def __init__(self, config: UNetConfig, side: int):
        rng = np.random.default_rng(7)
        self.latents = exact(rng.standard_normal((1, config.in_channels, side, side)))
        self.text = exact(rng.standard_normal((2, TOKENS, config.cross_attention_dim)))
        self.features = sinusoids(np.array([TIME]), config.time_channels)
        self.pooled, self.sizes, self.addition = None, None, None
        if config.addition_time_embed_dim:
            self.pooled = exact(rng.standard_normal((2, 1280)))
            self.sizes = np.array([[8.0 * side, 8 * side, 0, 0, 8 * side, 8 * side]] * 2, np.float32)
            rows = sinusoids(self.sizes.reshape(-1), config.addition_time_embed_dim).reshape(2, -1)
            self.addition = np.concatenate((self.pooled, rows), axis=1)


def exact(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).bfloat16().float().numpy()


def sinusoids(times: np.ndarray, channels: int) -> np.ndarray:
    """[T] -> [T channels] in float64: cosines, then sines."""
    frequencies = np.exp(-np.log(10000.0) * np.arange(channels // 2) / (channels // 2))
    angles = times.astype(np.float64)[:, None] * frequencies
    return np.concatenate((np.cos(angles), np.sin(angles)), axis=1)


class Sinusoids(torch.nn.Module):
    """diffusers makes them in float32 whatever its dtype."""

    def __init__(self, channels: int):
        super().__init__()
        self.channels = channels

    def forward(self, times: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(sinusoids(times.double().cpu().numpy(), self.channels)).to(times.device)


def oracle(family: str, file: Path, dtype: torch.dtype, device: str) -> torch.nn.Module:
    """diffusers' model with the weights of `file`."""
    from diffusers import UNet2DConditionModel
    from safetensors import safe_open

    with torch.device("meta"):
        model = UNet2DConditionModel(**FAMILIES[family])
    with safe_open(file, framework="pt", device=device) as stored:
        model.load_state_dict({key: stored.get_tensor(key).to(dtype) for key in stored.keys()}, assign=True)  # noqa: SIM118
    model.time_proj = Sinusoids(model.config.block_out_channels[0])
    if model.config.addition_time_embed_dim:
        model.add_time_proj = Sinusoids(model.config.addition_time_embed_dim)
    return model.eval()


def oracle_arm(model: torch.nn.Module, given: Inputs) -> Arm:
    first = next(model.parameters())

    def put(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(first.device, first.dtype)

    latents, text = put(given.latents).expand(2, -1, -1, -1), put(given.text)
    time = torch.tensor([TIME] * 2, device=first.device)
    more = {}
    if given.pooled is not None and given.sizes is not None:
        more = {"added_cond_kwargs": {"text_embeds": put(given.pooled), "time_ids": put(given.sizes)}}

    @torch.inference_mode()
    def step() -> torch.Tensor:
        result = model(latents, time, text, return_dict=False, **more)[0]
        bench_step.synchronize(first.device.type)
        return result

    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return Arm("diffusers", step, lambda x: x.double().cpu().numpy(), weights)


def our_arm(engine: Any, config: UNetConfig, plan: LoadPlan, policy: str, given: Inputs) -> Arm:
    model = engine.open("unet", config, plan.stored(SD_BASES[policy]), SD_BASES[policy])
    condition = model.condition(given.text, given.addition)
    latents = engine.array(given.latents)

    def step() -> Any:
        return bench_step.evaluated(engine, model.predict(latents, given.features, condition))

    weights = sum(bench_step.parameter_bytes(model.model))
    return Arm(f"ours {policy} ({'mlx' if engine.name == 'mlx' else 'torch'})", step, engine.numpy, weights)


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    config = parse(UNetConfig, unet.unet_fields(FAMILIES[options.family]), source=options.family)
    manifest = unet.manifest(config)
    file = write(folder / "diffusion_pytorch_model.safetensors", manifest)
    given = Inputs(config, options.latents)
    arm = oracle_arm(oracle(options.family, file, torch.float32, options.device), given)
    reference = arm.numpy(arm.step())  # float64 would take twice the memory
    del arm
    engine, tables = qwenimg.backends.load(options.device), []
    for dtype in options.dtypes:
        gc.collect()
        bench_step.synchronize_and_free()
        plan = keys.plan(folder, "unet", manifest, uses=unet.uses)
        arms = [oracle_arm(oracle(options.family, file, DTYPES[dtype], options.device), given)]
        arms += [our_arm(engine, config, plan, policy, given) for policy in POLICIES[dtype]]
        rows = bench_step.rows_of(arms, dtype, reference, options.runs)
        plan.close()
        table = {"dtype": dtype, "image_tokens": options.latents**2, "text_tokens": TOKENS, "branches": 2, "rows": rows}
        bench_step.show(table)
        tables.append(table)
        del arms
    return tables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, default="sd15")
    parser.add_argument("--latents", type=int, default=64, help="rows and columns of the latents")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    parser.add_argument("--runs", type=int, default=5, help="of every arm, after one that is not counted")
    parser.add_argument("--threads", type=int, help="default: torch's")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    options.backend, options.layers, options.cfg = "torch", FAMILIES[options.family], True
    head = bench_step.header(options) | {"layers": options.family}
    with tempfile.TemporaryDirectory(prefix="bench-unet-") as folder:
        tables = measure(options, Path(folder))
    head["load_average_after"] = os.getloadavg()[0]
    if options.out:
        options.out.write_text(json.dumps(head | {"tables": tables}, indent=1) + "\n")


if __name__ == "__main__":
    main()
