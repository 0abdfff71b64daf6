"""What parity tests stand on: tiny configurations, random checkpoints of them, and each backend with numpy outside."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import safetensors.torch
import torch

from qwenimg.backends import load as load_backend
from qwenimg.common.networks.denoisers import qwen_dit
from qwenimg.common.networks.encoders import decoder, qwen
from qwenimg.common.networks.vaes import qwen_vae
from qwenimg.common.parity import parity
from qwenimg.common.precision.precision import Precision
from qwenimg.common.weights import keys
from qwenimg.common.weights.plan import stored_uses

DIT = qwen_dit.QwenDiTConfig(
    num_layers=2, attention_head_dim=32, num_attention_heads=5, joint_attention_dim=72, axes_dims_rope=(8, 12, 12)
)
TEXT = qwen.QwenVLConfig(
    hidden_size=96,
    intermediate_size=136,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    vocab_size=131,
)
VAE = qwen_vae.QwenVAEConfig(base_dim=24, num_res_blocks=1)

# Weights


def weights(manifest: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    """Gains about 1, biases about 0, weights of unit gain: nothing trivial, and nothing that explodes."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in manifest.items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("gamma") or (len(shape) == 1 and "norm" in name and name.endswith("weight")):
            made[name] = 1 + 0.3 * noise
        elif len(shape) == 1:
            made[name] = 0.2 * noise
        elif "embed" in name and "timestep" not in name:
            made[name] = noise
        else:
            still = noise[:, :, -1] if len(shape) == 5 else noise  # only the last temporal tap counts
            made[name] = noise / still[0].numel() ** 0.5
    return made


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """float64 values, each the nearest one of `dtype`."""
    return torch.from_numpy(np.asarray(values, np.float64)).to(getattr(torch, dtype)).double().numpy()


class Files:
    """Random checkpoints of the three components, stored in one dtype."""

    def __init__(self, folder: Path, stored: str):
        self.configs = {"transformer": DIT, "text": TEXT, "vae": VAE}
        dit, text, vae = qwen_dit.manifest(DIT), decoder.manifest(TEXT), qwen_vae.manifest(VAE)
        manifests = {"transformer": dit, "text": text, "vae": vae}
        uses = {"transformer": qwen_dit.uses, "text": stored_uses, "vae": qwen_vae.uses}
        self.plans = {}
        for seed, (part, manifest) in enumerate(manifests.items()):
            path = folder / f"{part}-{stored}.safetensors"
            made = {key: value.to(getattr(torch, stored)) for key, value in weights(manifest, seed).items()}
            safetensors.torch.save_file(made, path)
            self.plans[part] = keys.plan(path, part, manifest, uses=uses[part])


# Backends


class Twin:
    """One backend, with its arrays made from numpy's and turned back; images are [B C h w] outside."""

    def __init__(self, name: str):
        self.engine = load_backend(name)
        package = "mlx" if name == "mlx" else "torch"
        self.name = package
        self.nn, self.attending, self.load, self.dit, self.vl, self.vae = (
            importlib.import_module(f"qwenimg.backends.{package}.{module}")
            for module in (
                "ops",
                "ops.attention",
                "load",
                "networks.denoisers.qwen_dit",
                "networks.encoders.decoder",
                "networks.vaes.qwen_vae",
            )
        )

    def array(self, values: np.ndarray, dtype: str, image: bool = False):
        if self.name == "torch":
            return torch.from_numpy(np.array(values)).to(self.nn.DTYPES[dtype])
        import mlx.core as mx

        assert dtype != "float64"
        values = values.transpose(0, 2, 3, 1) if image else values
        return mx.array(values.astype(np.float32)).astype(self.nn.DTYPES[dtype])

    def output(self, array, image: bool = False) -> parity.Output:
        if isinstance(array, np.ndarray):
            return parity.Output(values=array, dtype=str(array.dtype))
        values = self.engine.numpy(array)
        if image and self.name == "mlx":
            values = values.transpose(0, 3, 1, 2)
        return parity.Output(values=values, dtype=parity.dtype_name(array))

    def component(self, files: Files, part: str, precision: Precision):
        """The transformer, the text encoder or the VAE, with all its weights."""
        network = {"text": "decoder", "vae": "qwen_vae", "transformer": "qwen_dit"}[part]
        return self.engine.open(network, files.configs[part], files.plans[part].stored(precision), precision)


TORCH = cache(lambda: Twin("cpu"))
MLX = cache(lambda: Twin("mlx"))


def twins() -> dict[str, Twin]:
    return {"torch": TORCH(), "MLX": MLX()}
