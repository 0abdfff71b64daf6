"""What each precision policy costs, on two full-width blocks of Qwen-Image against float64, on both backends.

    python tools/measure_precision.py            # measures (about 4 minutes, 8 GB) and writes the tables
    python tools/measure_precision.py --tables   # writes the tables again from docs/results/precision.json

The weights are random in bfloat16, 64 image and 24 text tokens. NMSE is |a - r|^2 / |r|^2 of the predicted velocity, r
from the torch twin in float64, which tests hold against diffusers in double.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

os.environ.setdefault("MLX_ENABLE_TF32", "0")
os.environ.setdefault("MLX_DISABLE_COMPILE", "1")

import numpy as np
import torch
from doc_tables import DOCS, table, write
from safetensors.torch import save_file

from qwenimg import backends
from qwenimg.common.families import registry
from qwenimg.common.families.qwen_image.family import KIND
from qwenimg.common.networks.denoisers import qwen_conditioning, qwen_dit
from qwenimg.common.precision import devices, precision, presets
from qwenimg.common.precision.precision import Precision
from qwenimg.common.weights import keys
from qwenimg.common.weights.plan import LoadPlan

POLICIES = ("fp32", "bf16", "bf16,final_norm=off", "bf16-plain", "fp16-plain")
CONFIG = qwen_dit.QwenDiTConfig(num_layers=2)
EXAMPLES = (
    devices.apple("Apple M1, M2"),
    devices.apple("Apple M3 and later"),
    devices.nvidia("NVIDIA Pascal (GTX 1080)", (6, 1)),
    devices.nvidia("NVIDIA P100, Volta, Turing (RTX 2080, T4)", (7, 5)),
    devices.nvidia("NVIDIA GTX 1660", (7, 5)),
    devices.nvidia("NVIDIA Ampere and later (RTX 3060, A100, H100)", (8, 0)),
    devices.cpu("CPU with bfloat16 (AMX, AVX512-BF16), torch", bf16=True),
    devices.cpu("another CPU, torch", bf16=False),
    devices.cpu("any CPU, MLX", bf16=False, emulates=True),
)
RESULT = DOCS / "results" / "precision.json"
COMMAND = "python tools/measure_precision.py"


def write_weights(folder: Path) -> None:
    """Random bfloat16 weights by the manifest, with gains about 1 and small biases."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for key, shape in qwen_dit.manifest(CONFIG).items():
        value = torch.randn(shape, generator=generator) * 0.02
        tensors[key] = (value * 5 + 1 if "norm" in key and len(shape) == 1 else value).bfloat16()
    save_file(tensors, folder / "diffusion_pytorch_model.safetensors")


def velocity(backend: str, policy: Precision, plan: LoadPlan) -> np.ndarray:
    """One prediction [1, 64, 64]."""
    random = np.random.default_rng(0)
    latents = random.standard_normal((1, 64, 64)).astype(np.float32)
    text = random.standard_normal((1, 24, 3584)).astype(np.float32)
    engine = backends.load(backend)
    transformer = engine.open("qwen_dit", CONFIG, plan.stored(policy), policy)
    modulation = transformer.modulate(qwen_conditioning.time_rows(CONFIG, [713.2], policy.time_dtype()))
    array = (lambda x: torch.from_numpy(x).double()) if policy.name == "fp64" else engine.array
    condition = transformer.condition([array(text)], [(1, 8, 8)])
    return engine.numpy(transformer.predict(array(latents), (modulation, 0), condition)).astype(np.float64)


def error(a: np.ndarray, reference: np.ndarray) -> float:
    return float(np.sum((a - reference) ** 2) / np.sum(reference**2))


def measure() -> dict[str, object]:
    rows = {}
    with tempfile.TemporaryDirectory() as temporary:
        write_weights(Path(temporary))
        plan = keys.plan(Path(temporary), "transformer", qwen_dit.manifest(CONFIG), uses=qwen_dit.uses)
        reference = velocity("cpu", precision.float64(KIND), plan)
        for name in POLICIES:
            policy = precision.parse(name, on_gpu=False, kind=KIND)
            ours = {backend: velocity(backend, policy, plan) for backend in ("cpu", "mlx")}
            rows[name] = {backend: error(value, reference) for backend, value in ours.items()}
            rows[name]["mutual"] = error(ours["cpu"], ours["mlx"])
            print(name, rows[name], flush=True)
        plan.close()
    versions = backends.load("cpu").versions() | backends.load("mlx").versions()
    return {"command": COMMAND, "versions": versions, "nmse": rows}


def write_tables(result: dict[str, dict[str, dict[str, float]]]) -> None:
    rows = [[f"`{name}`", *(f"{row[k]:.1e}" for k in ("cpu", "mlx", "mutual"))] for name, row in result["nmse"].items()]
    write(
        "measured/precision.md",
        "cost",
        table(["policy", "torch against float64", "MLX against float64", "MLX against torch"], rows),
    )
    heads = ["policy", "text encoder", "transformer", "VAE", "final_norm", "modulation", "residual"]
    policies = [_policy_row(policy) for policy in precision.bases(KIND).values()]
    write("measured/precision.md", "policies", table(heads, policies))
    write_presets()
    places = [[f"`{name}`", text] for name, text in KIND.places.items()]
    write("measured/precision.md", "places", table(["place", "what is in it"], places))


def _policy_row(p: Precision) -> list[str]:
    places = p.places()
    return [f"`{p.name}`", p.text, p.transformer, p.vae, places["final_norm"], places["modulation"], places["residual"]]


def write_presets() -> None:
    """What each preset is, and what `auto` is on a list of devices, for a model of 20 GB or more in float32."""
    kinds = {family.title: family.precision for family in registry.FAMILIES}
    rows = [
        [f"`{name}`", *(f"`{kind.presets[name]}`" for kind in kinds.values()), preset.purpose]
        for name, preset in presets.PRESETS.items()
    ]
    write("memory.md", "presets", table(["preset", *kinds, "for"], rows))
    made = []
    for device in EXAMPLES:
        choices = [
            presets.choose("auto", "auto", kind, device, lambda p: 2 * 10**10, 10**12) for kind in kinds.values()
        ]
        made.append([device.name, *(f"`{choice.precision}`" for choice in choices), device.about])
    write("memory.md", "auto", table(["device", *kinds, "since it"], made))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", action="store_true", help="only write the tables again")
    if not parser.parse_args().tables:
        import fast_blas  # noqa: F401

        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(measure(), indent=1) + "\n")
    write_tables(json.loads(RESULT.read_text()))


if __name__ == "__main__":
    main()
