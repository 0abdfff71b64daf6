"""diffusers' denoisers with PEFT's LoRA layers, in float64, as the reference of a training step.

The pipeline of diffusers makes the denoiser's inputs and is stopped there; noisy latents and time take the place of its
own. The targets are the formulas of the papers, written here again.

- Times of flow models are those of a pipeline in float32. A time that is 3e-8 off is multiplied by 1000 for the
  sinusoids, and is worth 3e-5 of AuraFlow's gradients.
- Sinusoids of times are computed in float64: diffusers' own, in float32, are worth 1e-5 of a result.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from qwenimg.common.networks.denoisers import lumina_dit
from qwenimg.common.numbers.packing import pack, tokens
from qwenimg.common.training.lora_step import Draw
from support import (
    oracle,
    oracle_anima,
    oracle_auraflow,
    oracle_cascade,
    oracle_chroma,
    oracle_edit,
    oracle_ernie,
    oracle_flux,
    oracle_flux2,
    oracle_flux3,
    oracle_hunyuan,
    oracle_krea2,
    oracle_longcat,
    oracle_lumina,
    oracle_ovis,
    oracle_pixart,
    oracle_qwen21,
    oracle_sana,
    oracle_sd,
    oracle_sd3,
    oracle_zimage,
)

DOWN, UP = ".lora_A.weight", ".lora_B.weight"
Gradients = dict[str, np.ndarray]


class Stopped(Exception):
    """The denoiser was called."""


@dataclass(frozen=True)
class Kind:
    """How a family's denoiser is called. `first`: its noisy latents; `time`: of a level; `answer`: the prediction from
    its result, the size of `first`; `target`: from latents and noise at a level."""

    pipeline: Callable[[Path], Any]
    part: str
    first: Callable[[np.ndarray], Any]
    time: Callable[[float], float]
    names: tuple[str, str]  # of the arguments: latents, time
    answer: Callable[[Any], Tensor] = lambda result: result[0]
    target: Callable[[np.ndarray, np.ndarray, float], np.ndarray] = lambda x0, noise, sigma: noise - x0
    noised: Callable[[np.ndarray, np.ndarray, float], np.ndarray] = lambda x0, noise, s: (1 - s) * x0 + s * noise
    weight: Callable[[float], float] = lambda sigma: 1.0
    options: dict[str, Any] = field(default_factory=dict)
    last: bool = False  # whether the prediction is at the end of the result, behind that of the text
    module: Callable[[str], str] = str  # the name of a layer there, of its name here
    sized: bool = True  # False: it draws in the size in which it sees the picture


def _unet(name: str) -> Callable[[Path], Any]:
    return lambda folder: oracle_sd.pipeline(folder, name)


def _scaled(x0: np.ndarray, noise: np.ndarray, sigma: float) -> np.ndarray:
    """sqrt(a) x0 + sqrt(1 - a) noise, with a = 1 / (1 + sigma^2)."""
    a = 1 / (1 + sigma * sigma)
    return math.sqrt(a) * x0 + math.sqrt(1 - a) * noise


def _velocity(x0: np.ndarray, noise: np.ndarray, sigma: float) -> np.ndarray:
    a = 1 / (1 + sigma * sigma)
    return math.sqrt(a) * noise - math.sqrt(1 - a) * x0


def _kinds() -> dict[str, Kind]:
    flow = ("hidden_states", "timestep")
    qwen = Kind(oracle.pipeline, "transformer", pack, _fraction, flow, options={"true_cfg_scale": 1.0})
    flux = {"guidance_scale": 1.0, "max_sequence_length": 512}
    unet: dict[str, Any] = {"noised": _scaled, "options": {"guidance_scale": 1.0}}
    levels = ("sample", "timestep")
    drawn: dict[str, Any] = {"guidance_scale": 1.0, "use_resolution_binning": False, "clean_caption": False}
    return {
        "qwen": qwen,
        "qwen-2511": Kind(oracle_edit.pipeline, "transformer", pack, _fraction, flow, options=qwen.options),
        "z-image": Kind(
            oracle_zimage.pipeline,
            "transformer",
            lambda x: [torch.from_numpy(x[0][:, None])],
            _share,
            ("x", "t"),
            answer=lambda result: result[0][0][None, :, 0],
            target=lambda x0, noise, sigma: x0 - noise,
            options={"guidance_scale": 0.0},
        ),
        "flux-dev": Kind(
            lambda folder: oracle_flux.pipeline(folder, "text"), "transformer", pack, _multiplied, flow, options=flux
        ),
        "flux2-base": Kind(
            oracle_flux2.pipeline, "transformer", tokens, _fraction, flow, options={"guidance_scale": 1.0}
        ),
        "flux2-dev": Kind(
            oracle_flux2.dev_pipeline, "transformer", tokens, _fraction, flow, options={"guidance_scale": 1.0}
        ),
        "flux3-base": Kind(oracle_flux3.without_guidance, "transformer", tokens, _fraction, flow),
        "longcat": Kind(
            oracle_longcat.pipeline, "transformer", pack, _multiplied, flow,
            options={"guidance_scale": 1.0, "enable_prompt_rewrite": False},
        ),
        "longcat-edit": Kind(
            lambda folder: oracle_longcat.pipeline(folder, edits=True), "transformer", pack, _multiplied, flow,
            options={"guidance_scale": 1.0}, sized=False,
        ),
        "qwen21": Kind(
            oracle_qwen21.pipeline, "transformer", tokens, _fraction, flow,
            options={"true_cfg_scale": 1.0}, last=True,
        ),
        "sd3": Kind(
            lambda folder: oracle_sd3.pipeline(folder, ""), "transformer", torch.from_numpy, _timestep, flow,
            options={"guidance_scale": 1.0},
        ),
        "chroma": Kind(
            lambda folder: oracle_chroma.pipeline(folder, "text"), "transformer", pack, _multiplied, flow,
            options={"guidance_scale": 1.0},
        ),
        "ernie": Kind(
            oracle_ernie.pipeline, "transformer", torch.from_numpy, _timestep, flow,
            options={"guidance_scale": 1.0},
        ),
        "krea2": Kind(
            oracle_krea2.pipeline, "transformer", pack, _fraction, flow,
            options={"guidance_scale": 0.0}, last=True,
        ),
        "anima": Kind(
            lambda folder: oracle_anima.guided(folder, 1.0), "transformer",
            lambda x: torch.from_numpy(x)[:, :, None], _fraction, flow,
        ),
        "ovis": Kind(
            oracle_ovis.pipeline, "transformer", pack, _multiplied, flow, options={"guidance_scale": 1.0},
        ),
        "auraflow": Kind(
            oracle_auraflow.pipeline, "transformer", torch.from_numpy, _fraction, flow,
            options={"guidance_scale": 1.0},
        ),
        "lumina": Kind(
            oracle_lumina.pipeline, "transformer", torch.from_numpy, _share, flow,
            target=lambda x0, noise, sigma: x0 - noise, options={"guidance_scale": 1.0},
            module=lambda path: lumina_dit.published(f"{path}.").removesuffix("."),
        ),
        "pixart": Kind(
            oracle_pixart.pipeline, "transformer", torch.from_numpy, _linear_time, flow, noised=_scaled,
            answer=lambda result: result[0][:, :4], target=lambda x0, noise, sigma: noise,
            weight=lambda s: min(1 / s**2, 5.0) * s**2, options=drawn,
        ),
        "sana": Kind(
            oracle_sana.pipeline, "transformer", torch.from_numpy, lambda s: float(int(1000 * s)), flow,
            options={"guidance_scale": 1.0, "use_resolution_binning": False},
        ),
        "hunyuan-1.1": Kind(
            oracle_hunyuan.pipeline, "transformer", torch.from_numpy, _hunyuan_time, flow, noised=_scaled,
            answer=lambda result: result[0][:, :4], target=_velocity,
            weight=lambda s: min(1 / s**2, 5.0) / (1 / s**2 + 1),
            options={"guidance_scale": 1.0, "use_resolution_binning": False},
        ),
        "cascade": Kind(
            oracle_cascade.prior_pipeline, "prior", torch.from_numpy, _cosine_time, ("sample", "timestep_ratio"),
            target=lambda x0, noise, sigma: noise, noised=_scaled, weight=lambda s: 1 / (1 + 1 / s**2),
            options={"guidance_scale": 1.0},
        ),
        "sd15": Kind(
            _unet("StableDiffusionPipeline"), "unet", torch.from_numpy, _trained_time, levels,
            target=lambda x0, noise, sigma: noise, weight=lambda s: min(1 / s**2, 5.0) * s**2, **unet,
        ),
        "sd21": Kind(
            _unet("StableDiffusionPipeline"), "unet", torch.from_numpy, _trained_time, levels,
            target=_velocity, weight=lambda s: min(1 / s**2, 5.0) / (1 / s**2 + 1), **unet,
        ),
        "sdxl": Kind(
            _unet("StableDiffusionXLPipeline"), "unet", torch.from_numpy, _trained_time, levels,
            target=lambda x0, noise, sigma: noise, weight=lambda s: min(1 / s**2, 5.0) * s**2, **unet,
        ),
    }  # fmt: skip


def _timestep(sigma: float) -> float:
    return float(np.float32(sigma) * np.float32(1000))


def _fraction(sigma: float) -> float:
    """The timestep as a number in 0..1."""
    return float(np.float32(_timestep(sigma)) / np.float32(1000))


def _multiplied(sigma: float) -> float:
    """The same, for a class that multiplies it by 1000 in its own dtype."""
    return float(np.float32(1000) * np.float32(_fraction(sigma))) / 1000


def _share(sigma: float) -> float:
    """The share of the image at a level."""
    return float(np.float32(1000 - _timestep(sigma)) / np.float32(1000))


def _trained_time(sigma: float) -> float:
    """The timestep of a level of Stable Diffusion's own betas."""
    return _time(np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2, sigma)


def _hunyuan_time(sigma: float) -> float:
    """The timestep of a level of Hunyuan-DiT 1.1's betas."""
    return _time(np.linspace(0.00085**0.5, 0.03**0.5, 1000) ** 2, sigma)


def _cosine_time(sigma: float) -> float:
    """The time of a level of Stable Cascade's cosine."""
    least = math.cos(0.008 / 1.008 * math.pi / 2)
    return math.acos(least / math.sqrt(1 + sigma * sigma)) * 2 / math.pi * 1.008 - 0.008


def _linear_time(sigma: float) -> float:
    """The timestep of a level of PixArt's betas."""
    return _time(np.linspace(0.0001, 0.02, 1000), sigma)


def _time(betas: np.ndarray, sigma: float) -> float:
    products = np.cumprod(1 - betas)
    return float(np.abs(np.sqrt((1 - products) / products) - sigma).argmin())


KINDS = _kinds()


def loss_and_gradients(
    name: str, folder: Path, draws: list[Draw], factors: Mapping[str, np.ndarray]
) -> tuple[float, Gradients]:
    """Return the mean loss of `draws` and the gradients of the LoRA's factors, in float64. The factors of a text
    encoder have its folder and a slash in front."""
    of_zimage = "diffusers.models.transformers.transformer_z_image.TimestepEmbedder.timestep_embedding"
    with (
        mock.patch("diffusers.models.embeddings.get_timestep_embedding", _exact_sinusoids),
        mock.patch(of_zimage, staticmethod(lambda times, width: _exact_sinusoids(times, width, True, 0))),
    ):
        return _loss_and_gradients(KINDS[name], folder, draws, factors)


def _loss_and_gradients(
    kind: Kind, folder: Path, draws: list[Draw], factors: Mapping[str, np.ndarray]
) -> tuple[float, Gradients]:
    pipe, parts = kind.pipeline(folder), sorted({key.rpartition("/")[0] for key in factors})
    models = {part: _with_lora(getattr(pipe, part or kind.part), factors, part, kind.module) for part in parts}
    model = models.pop("")
    layers = [layer for one in (model, *models.values()) for layer in one.modules() if hasattr(layer, "path")]
    total: Any = 0.0
    for draw in draws:
        inputs = _inputs(kind, folder, draw)
        if models:
            inputs |= _texts(pipe, models, draw.example.request.prompt, inputs)
        x0, noise = (one.astype(np.float64) for one in (draw.example.latents, draw.noise))
        x = kind.first(kind.noised(x0, noise, draw.sigma))
        target = kind.first(kind.target(x0, noise, draw.sigma))
        mask = np.ones_like(x0) if draw.example.mask is None else np.broadcast_to(draw.example.mask, x0.shape)
        shares = kind.first(np.ascontiguousarray(mask.astype(np.float64)))
        if isinstance(target, list):
            target, shares = target[0][None, :, 0], shares[0][None, :, 0]
        latents, time = kind.names
        inputs[latents] = _put_first(inputs[latents], x)
        inputs[time] = torch.full_like(torch.as_tensor(inputs[time], dtype=torch.float64), kind.time(draw.sigma))
        answer = kind.answer(model(**_wide(inputs) | {"return_dict": False}))
        if answer.ndim == 3:
            answer = answer[:, -target.shape[1] :] if kind.last else answer[:, : target.shape[1]]
        errors = torch.as_tensor(shares) * (answer - torch.as_tensor(target)) ** 2
        total = total + kind.weight(draw.sigma) * draw.example.weight * errors.mean() / len(draws)
    parameters = {
        key: (one.lora_A if key.endswith(DOWN) else one.lora_B)["default"].weight
        for one in layers
        for key in [f"{one.path}{DOWN}", f"{one.path}{UP}"]
    }
    found = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    return total.item(), {
        key: np.zeros(p.shape) if g is None else g.numpy()
        for (key, p), g in zip(parameters.items(), found, strict=True)
    }


def _with_lora(network: Any, factors: Mapping[str, np.ndarray], part: str, module: Callable[[str], str]) -> Any:
    """Return a copy of a network in float64 with the factors of its part in PEFT's layers."""
    from peft import LoraConfig, inject_adapter_in_model

    model = copy.deepcopy(network).double().requires_grad_(False)
    paths = [key.removesuffix(DOWN) for key in factors if key.endswith(DOWN) and key.rpartition("/")[0] == part]
    start = "text_model." if "text_model" in dict(model.named_children()) else ""
    modules = {path: start + module(path.rpartition("/")[2]) for path in paths}
    rank = len(factors[paths[0] + DOWN])
    lora = LoraConfig(r=rank, lora_alpha=rank, target_modules=[*modules.values()])
    model = inject_adapter_in_model(lora, model)
    for path, name in modules.items():
        layer = model.get_submodule(name)
        layer.path = path
        for ours, theirs in ((DOWN, layer.lora_A), (UP, layer.lora_B)):
            theirs["default"].weight.data = torch.from_numpy(factors[path + ours].astype(np.float64))
            theirs["default"].weight.data = theirs["default"].weight.data.reshape(
                _shape(layer, ours, factors[path + ours])
            )
            theirs["default"].weight.requires_grad_(True)
    return model.eval()


def _shape(layer: Any, name: str, values: np.ndarray) -> tuple[int, ...]:
    """The shape of a factor in PEFT: that of a 1x1 convolution has two more axes."""
    return (*values.shape, 1, 1) if layer.base_layer.weight.ndim == 4 else values.shape


def _inputs(kind: Kind, folder: Path, draw: Draw) -> dict[str, Any]:
    """The arguments with which the pipeline calls its denoiser for an example."""
    pipe, request = kind.pipeline(folder), draw.example.request
    denoiser = getattr(pipe, kind.part)
    forward, caught = denoiser.forward, dict[str, Any]()

    @functools.wraps(forward)  # a modular pipeline gives what its signature has
    def stop(*args: Any, **given: Any) -> None:
        caught.update(inspect.signature(forward).bind(*args, **given).arguments)
        raise Stopped

    denoiser.forward = stop
    seen = [Image.fromarray(one) for one in request.images]
    images = {"image": seen if kind.sized else seen[0]} if seen else {}
    size = {"width": request.width, "height": request.height} if kind.sized else {}
    try:
        pipe(prompt=request.prompt, num_inference_steps=2, **size, **kind.options, **images)
    except Stopped:
        pass
    finally:
        denoiser.forward = forward
    return {key: one for key, one in caught.items() if not key.startswith("kv_cache")}  # of text, for later steps


def _texts(pipe: Any, encoders: Mapping[str, Any], prompt: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of Stable Diffusion's UNet that come from its text encoders, with their gradients."""
    with contextlib.ExitStack() as stack:
        for part, model in encoders.items():
            stack.enter_context(mock.patch.object(pipe, part, model))
        found = pipe.encode_prompt(prompt, device="cpu", num_images_per_prompt=1, do_classifier_free_guidance=False)
    added = inputs.get("added_cond_kwargs")
    pooled = {} if added is None else {"added_cond_kwargs": added | {"text_embeds": found[2]}}
    return {"encoder_hidden_states": found[0], **pooled}


def _put_first(given: Any, x: Any) -> Any:
    """Put noisy latents in the place of the pipeline's: those of references stay behind them."""
    if isinstance(given, list):
        return x
    x = torch.as_tensor(x)
    return torch.cat((x, given[:, x.shape[1] :].double()), dim=1) if x.ndim == 3 else x


def _wide(value: Any) -> Any:
    """Return arguments in float64."""
    if isinstance(value, dict):
        return {key: _wide(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_wide(one) for one in value)
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _exact_sinusoids(
    timesteps: Tensor,
    embedding_dim: int,
    flip_sin_to_cos: bool = False,
    downscale_freq_shift: float = 1,
    scale: float = 1,
    max_period: int = 10000,
) -> Tensor:
    """diffusers' `get_timestep_embedding`, in float64."""
    half = embedding_dim // 2
    rates = torch.exp(-math.log(max_period) * torch.arange(half, dtype=torch.float64) / (half - downscale_freq_shift))
    angles = scale * timesteps.double()[:, None] * rates
    parts = [torch.cos(angles), torch.sin(angles)] if flip_sin_to_cos else [torch.sin(angles), torch.cos(angles)]
    return torch.cat(parts, dim=-1)
