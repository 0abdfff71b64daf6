"""Tiny Stable Diffusion UNets and VAEs by diffusers, with nothing in them that is all ones or zeros, and our twins of
them on each backend with numpy outside."""

from __future__ import annotations

import importlib
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qwenimg.backends import load as load_backend
from qwenimg.common.base.config import parse
from qwenimg.common.networks.denoisers import unet
from qwenimg.common.networks.vaes import kl_vae
from qwenimg.common.precision.precision import Precision
from qwenimg.common.weights import keys
from qwenimg.common.weights.plan import LoadPlan
from support.tiny_model import randomise

CROSS = ("CrossAttnDownBlock2D", "CrossAttnUpBlock2D")
PLAIN = ("DownBlock2D", "UpBlock2D")

# Published configurations, without the fields that are the reference's defaults.
TEXT_TIME = {"addition_embed_type": "text_time", "addition_time_embed_dim": 256, "use_linear_projection": True}
PUBLISHED: dict[str, dict[str, Any]] = {
    "SD 1.5": {"cross_attention_dim": 768, "attention_head_dim": 8, "sample_size": 64},
    "SD 2.1": {
        "cross_attention_dim": 1024,
        "attention_head_dim": [5, 10, 20, 20],
        "use_linear_projection": True,
        "upcast_attention": True,
        "sample_size": 96,
    },
    "SDXL base": {
        **TEXT_TIME,
        "block_out_channels": [320, 640, 1280],
        "down_block_types": [PLAIN[0], CROSS[0], CROSS[0]],
        "up_block_types": [CROSS[1], CROSS[1], PLAIN[1]],
        "attention_head_dim": [5, 10, 20],
        "transformer_layers_per_block": [1, 2, 10],
        "cross_attention_dim": 2048,
        "projection_class_embeddings_input_dim": 2816,
        "sample_size": 128,
    },
    "SDXL refiner": {
        **TEXT_TIME,
        "block_out_channels": [384, 768, 1536, 1536],
        "down_block_types": [PLAIN[0], CROSS[0], CROSS[0], PLAIN[0]],
        "up_block_types": [PLAIN[1], CROSS[1], CROSS[1], PLAIN[1]],
        "attention_head_dim": [6, 12, 24, 24],
        "transformer_layers_per_block": 4,
        "cross_attention_dim": 1280,
        "projection_class_embeddings_input_dim": 2560,
        "sample_size": 128,
    },
}
# Their cousins: the same kinds of blocks, unequal widths and heads, head widths that are no power of two.
TINY: dict[str, dict[str, Any]] = {
    "SD 1.5": {"block_out_channels": [16, 24, 40, 40], "attention_head_dim": 4, "layers_per_block": 2},
    "SD 2.1": {"block_out_channels": [16, 32, 48, 48], "attention_head_dim": [2, 4, 6, 6], "layers_per_block": 1},
    "SDXL base": {
        "block_out_channels": [12, 24, 36],
        "attention_head_dim": [1, 2, 3],
        "transformer_layers_per_block": [1, 2, 3],
        "projection_class_embeddings_input_dim": 20 + 6 * 6,
    },
    "SDXL refiner": {
        "block_out_channels": [12, 24, 36, 36],
        "attention_head_dim": [1, 2, 3, 3],
        "transformer_layers_per_block": 2,
        "projection_class_embeddings_input_dim": 20 + 5 * 6,
        "layers_per_block": 1,
    },
}
TINY = {name: PUBLISHED[name] | {"norm_num_groups": 4, "cross_attention_dim": 20} | TINY[name] for name in PUBLISHED}
for _name in ("SDXL base", "SDXL refiner"):
    TINY[_name]["addition_time_embed_dim"] = 6
TINY["inpainting"] = TINY["SD 1.5"] | {"in_channels": 9, "layers_per_block": 1}

VAE_PUBLISHED = {
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 2,
    "sample_size": 512,
}
VAE_TINY: dict[str, Any] = VAE_PUBLISHED | {
    "block_out_channels": [8, 16, 24],
    "down_block_types": ["DownEncoderBlock2D"] * 3,
    "up_block_types": ["UpDecoderBlock2D"] * 3,
    "norm_num_groups": 4,
}

# The reference's side


def unet_config(data: dict[str, Any]) -> unet.UNetConfig:
    return parse(unet.UNetConfig, unet.unet_fields(data), source="config.json", ignored=unet.IGNORED_CONFIG)


def vae_config(data: dict[str, Any]) -> kl_vae.KLVAEConfig:
    return parse(kl_vae.KLVAEConfig, kl_vae.vae_fields(data), source="config.json", ignored=kl_vae.IGNORED_CONFIG)


def tiny_unet(name: str, seed: int = 3) -> torch.nn.Module:
    import diffusers

    diffusers.utils.logging.set_verbosity_error()
    model = diffusers.UNet2DConditionModel(**TINY[name])
    randomise(model, seed)
    return model.eval()


def tiny_vae(seed: int = 4, **changes: object) -> torch.nn.Module:
    import diffusers

    diffusers.utils.logging.set_verbosity_error()
    model = diffusers.AutoencoderKL(**(VAE_TINY | changes))
    randomise(model, seed)
    return model.eval()


class ExactSinusoids(torch.nn.Module):
    """What diffusers makes in float32, in float64: cosines, then sines. `dtype`: what is handed on."""

    def __init__(self, channels: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.channels, self.dtype = channels, dtype

    def forward(self, times: torch.Tensor) -> torch.Tensor:
        half = self.channels // 2
        frequencies = torch.exp(-math.log(10000.0) * torch.arange(half, dtype=torch.float64) / half)
        angles = times.double()[:, None] * frequencies
        return torch.cat((angles.cos(), angles.sin()), dim=-1).to(self.dtype)


class Given:
    """Inputs of a UNet in float64: two images, two times, two texts, and two sets of sizes where it takes them."""

    def __init__(self, config: unet.UNetConfig, size: tuple[int, int], tokens: int = 7) -> None:
        rng = np.random.default_rng(5)
        self.times = np.array([981.0, 437.0])
        self.latents = rng.standard_normal((2, config.in_channels, *size))
        self.text = rng.standard_normal((2, tokens, config.cross_attention_dim))
        self.features = ExactSinusoids(config.time_channels)(torch.from_numpy(self.times)).numpy()
        self.pooled, self.sizes, self.addition = None, None, None
        if config.addition_time_embed_dim and config.projection_class_embeddings_input_dim:
            self.pooled = rng.standard_normal((2, 20))
            count = (config.projection_class_embeddings_input_dim - 20) // config.addition_time_embed_dim
            self.sizes = np.array([[512.0, 384, 0, 7, 520, 392], [64.0, 72, 3, 0, 6.5, 64]])[:, :count]
            made = ExactSinusoids(config.addition_time_embed_dim)(torch.from_numpy(self.sizes).flatten())
            self.addition = np.concatenate((self.pooled, made.reshape(2, -1).numpy()), axis=1)


def reference(model: torch.nn.Module, given: Given, dtype: torch.dtype) -> np.ndarray:
    """diffusers' prediction, with exact sinusoids rounded once to `dtype`."""
    model = model.to(dtype)
    model.time_proj = ExactSinusoids(model.config.block_out_channels[0], dtype)
    more = {}
    if given.pooled is not None and given.sizes is not None:
        model.add_time_proj = ExactSinusoids(model.config.addition_time_embed_dim, dtype)
        parts = {"text_embeds": given.pooled, "time_ids": given.sizes}
        more["added_cond_kwargs"] = {name: torch.from_numpy(part).to(dtype) for name, part in parts.items()}
    latents, times, text = (torch.from_numpy(x).to(dtype) for x in (given.latents, given.times, given.text))
    with torch.no_grad():
        return model(latents, times, text, return_dict=False, **more)[0].double().numpy()


# Our side


class Side:
    """One backend; images are [B C h w] outside."""

    def __init__(self, name: str):
        self.engine = load_backend(name)
        self.name = "mlx" if name == "mlx" else "torch"
        package = f"qwenimg.backends.{self.name}"
        self.nn, self.attending, self.load, self.unets, self.vaes = (
            importlib.import_module(f"{package}.{module}")
            for module in ("ops", "ops.attention", "load", "networks.denoisers.unet", "networks.vaes.kl_vae")
        )

    def array(self, values: np.ndarray | None, dtype: str):
        if values is None:
            return None
        if self.name == "torch":
            return torch.from_numpy(np.array(values)).to(self.nn.DTYPES[dtype])
        import mlx.core as mx

        values = values.transpose(0, 2, 3, 1) if values.ndim == 4 else values
        return mx.array(values.astype(np.float32)).astype(self.nn.DTYPES[dtype])

    def wide(self, array) -> str:
        """The name of the array's dtype, or float32 where that is less."""
        return "float64" if str(array.dtype).endswith("float64") else "float32"

    def numpy(self, array) -> np.ndarray:
        values = self.engine.numpy(array)
        return values.transpose(0, 3, 1, 2) if values.ndim == 4 and self.name == "mlx" else values

    def unet(self, config: unet.UNetConfig, plan: LoadPlan, precision: Precision):
        stream = self.nn.DTYPES[precision.residual_dtype("unet")]
        return self._filled(lambda: self.unets.UNetModel(config, stream), plan, precision)

    def vae(self, config: kl_vae.KLVAEConfig, plan: LoadPlan, precision: Precision):
        return self._filled(lambda: self.vaes.KLVAE(config), plan, precision)

    def _filled(self, build, plan: LoadPlan, precision: Precision):
        model = self.load.empty(build, precision, plan.component)
        device = [] if self.name == "mlx" else [torch.device("cpu")]
        self.load.fill(model, plan.stored(precision), *device)
        return model

    def predict(self, model, given: Given, dtype: str = "float32"):
        """The prediction as the backend's own array."""
        latents, features, text, addition = (
            self.array(x, dtype) for x in (given.latents, given.features, given.text, given.addition)
        )
        with torch.inference_mode():
            return model(latents, features, model.context(text), addition)


TORCH = cache(lambda: Side("cpu"))
MLX = cache(lambda: Side("mlx"))


def sides() -> dict[str, Side]:
    return {"torch": TORCH(), "MLX": MLX()}


def unet_plan(folder: Path) -> tuple[unet.UNetConfig, LoadPlan]:
    """Of a folder that diffusers wrote."""
    config = unet_config(json.loads((folder / "config.json").read_text()))
    stored = unet.manifest(config)
    return config, keys.plan(folder, "unet", stored, uses=unet.uses)


def vae_plan(folder: Path) -> tuple[kl_vae.KLVAEConfig, LoadPlan]:
    config = vae_config(json.loads((folder / "config.json").read_text()))
    return config, keys.plan(folder, "vae", kl_vae.manifest(config), rename=kl_vae.rename)


def relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Relative L2; shapes equal, all finite, and the reference not trivial."""
    assert ours.shape == theirs.shape and np.isfinite(ours).all() and theirs.std() > 0.1
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
