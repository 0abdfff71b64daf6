"""Times one forward of a flow-match transformer at full width against diffusers, in one run, with the correctness
beside the time.

    python tools/bench_step_flow.py                               # all models, a few layers, 256 + 40 tokens, CPU
    python tools/bench_step_flow.py flux --device cuda --tokens 4096+512 --dtypes bf16

A step here is one forward for one branch. What depends on no step (text, RoPE tables, for FLUX.1 and SD3 the modulation
of a schedule) is made beforehand, once per run, as the product does; diffusers makes it in every step. The arms take
turns, in an order that is reversed each time.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import bench_step
import numpy as np
import torch
from bench_step import Arm, evaluated, parameter_bytes, rows_of, show, synchronize
from wide_checkpoint import write

import qwenimg.backends
from qwenimg.common.families import registry
from qwenimg.common.networks.denoisers import (
    flux2_conditioning,
    flux2_dit,
    flux_conditioning,
    flux_dit,
    qwen21_conditioning,
    qwen21_dit,
    qwen_conditioning,
    qwen_dit,
    sd3_conditioning,
    sd3_dit,
    zimage_conditioning,
    zimage_dit,
)
from qwenimg.common.networks.denoisers.flux_dit import FluxConfig
from qwenimg.common.networks.denoisers.qwen21_dit import Qwen21Config
from qwenimg.common.networks.denoisers.qwen_dit import QwenDiTConfig
from qwenimg.common.networks.denoisers.sd3_dit import SD3Config
from qwenimg.common.networks.network import Network
from qwenimg.common.numbers import packing
from qwenimg.common.numbers.timesteps import timestep_features
from qwenimg.common.parts import known_configs
from qwenimg.common.precision.precision import DenoiserKind, bases
from qwenimg.common.weights import keys

QWEN21_WORDS = 5  # in front of the picture
SIGMA, GUIDANCE = 0.25, 3.5  # times that bfloat16 holds, so that no arm rounds them
POLICIES = {"fp32": ("fp32",), "bf16": ("bf16", "bf16-plain"), "fp16": ("fp16", "fp16-plain")}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Step = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model with few layers. `theirs` and `ours` make a step of a model, latents, text [1 S C] and pooled text."""

    family: str
    network: Network
    config: Any
    oracle: str  # diffusers' class
    embedding: str  # the module of the oracle that makes sinusoids
    text: int  # channels
    pooled: int
    theirs: Callable[[Any, Any, Any, Any], Step]
    ours: Callable[[Any, Any, np.ndarray, np.ndarray, np.ndarray], tuple[Step, Callable[[Any], np.ndarray]]]


# FLUX.1


def _flux_theirs(model: Any, latents: Any, text: Any, pooled: Any) -> Step:
    ids = _ids(latents, text)
    kind = {"device": latents.device, "dtype": latents.dtype}
    more = {"guidance": torch.full((1,), GUIDANCE, **kind), "pooled_projections": pooled}
    return lambda: model(_tokens(latents), text, timestep=torch.full((1,), SIGMA, **kind), **ids, **more)[0]


def _flux_ours(component: Any, engine: Any, latents: np.ndarray, text: np.ndarray, pooled: np.ndarray) -> Any:
    h, w = latents.shape[2:]
    features = (
        flux_conditioning.time_rows([1000 * SIGMA], "float32"),
        flux_conditioning.guidance_row(GUIDANCE, "float32"),
    )
    modulation = component.modulate(*features, [engine.array(pooled)])
    condition, x = component.condition(engine.array(text), [(h // 2, w // 2)]), engine.array(packing.pack(latents))
    return lambda: component.predict(x, (modulation, 0), condition), lambda y: engine.numpy(y)


# FLUX.2


def _flux2_theirs(model: Any, latents: Any, text: Any, pooled: Any) -> Step:
    ids = _ids(latents, text, axes=4)
    tokens, time = latents.flatten(2).transpose(1, 2), torch.full((1,), SIGMA, device=text.device, dtype=text.dtype)
    return lambda: model(tokens, text, timestep=time, **ids, guidance=None)[0]


def _flux2_ours(component: Any, engine: Any, latents: np.ndarray, text: np.ndarray, pooled: np.ndarray) -> Any:
    features = flux2_conditioning.time_rows(component.config, 1000 * SIGMA, "float32")
    condition, x = (
        component.condition(engine.array(text), ([latents.shape[2:]], [])),
        engine.array(packing.tokens(latents)),
    )
    return lambda: component.predict(x, features, condition), lambda y: engine.numpy(y)


# Stable Diffusion 3


def _sd3_theirs(model: Any, latents: Any, text: Any, pooled: Any) -> Step:
    time = torch.full((1,), 1000 * SIGMA, device=text.device, dtype=text.dtype)
    return lambda: model(latents, text, pooled, time, return_dict=False)[0]


def _sd3_ours(component: Any, engine: Any, latents: np.ndarray, text: np.ndarray, pooled: np.ndarray) -> Any:
    h, w = latents.shape[2:]
    modulation = component.modulate(sd3_conditioning.time_rows([1000 * SIGMA]), [pooled])
    condition, x = component.condition(text, (h // 2, w // 2)), engine.array(latents)
    return lambda: component.predict(x, (modulation, 0), condition), lambda y: engine.numpy(y)


# Z-Image


def _zimage_theirs(model: Any, latents: Any, text: Any, pooled: Any) -> Step:
    time = torch.full((1,), 1 - SIGMA, device=text.device, dtype=text.dtype)
    return lambda: model([latents[0][:, None]], time, [text[0]])[0][0][:, 0]


def _zimage_ours(component: Any, engine: Any, latents: np.ndarray, text: np.ndarray, pooled: np.ndarray) -> Any:
    h, w = latents.shape[2:]
    condition = component.condition(engine.array(text), (h // 2, w // 2))
    features, x = (
        zimage_conditioning.time_row(1000 * SIGMA, "float32"),
        engine.array(packing.pack(latents, channels_last=True)),
    )
    return (
        lambda: component.predict(x, features, condition),
        lambda y: packing.unpack(engine.numpy(y), h, w, channels_last=True)[0],
    )


# Qwen-Image-2.1, which sees a picture like the latents behind the first words


def _qwen21_parts(latents: Any, text: Any) -> tuple[Any, Any, Any]:
    """Return tokens [1 L C], the text's states with those of slots among them, and which of them are slots."""
    count, words = latents.shape[2] * latents.shape[3] // 4, QWEN21_WORDS
    slots = torch.zeros(1, count, text.shape[2], device=text.device, dtype=text.dtype)
    states = torch.cat((text[:, :words], slots, text[:, words:]), dim=1)
    mask = torch.zeros(1, states.shape[1], dtype=torch.bool, device=text.device)
    mask[:, words : words + count] = True
    return latents.flatten(2).transpose(1, 2), states, mask


def _qwen21_theirs(model: Any, latents: Any, text: Any, pooled: Any, kept: bool = False) -> Step:
    """A step as it is without keys and values that are `kept`, or with them."""
    from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache

    tokens, states, mask = _qwen21_parts(latents, text)
    shape, count = (1, *latents.shape[2:]), tokens.shape[1]
    every = torch.cat((mask, torch.ones_like(mask[:, :1]).expand(1, count // 4)), dim=1)
    time = torch.full((1,), SIGMA, device=text.device, dtype=text.dtype)
    more = {"img_shapes": [[shape, shape]], "img_mask": every, "return_dict": False}
    cache = QwenImage21KVCache(len(model.transformer_blocks)) if kept else None

    def step(mode: str | None) -> Any:
        given = torch.cat((tokens, tokens), dim=1), states, time
        return model(*given, **more, kv_cache=cache, kv_cache_mode=mode)[0][:, -count:]

    if kept:
        with torch.inference_mode():
            step("extract")
    return lambda: step("cached" if kept else None)


def _qwen21_ours(component: Any, engine: Any, latents: np.ndarray, text: np.ndarray, pooled: np.ndarray) -> Any:
    tokens, states, _ = _qwen21_parts(torch.from_numpy(latents), torch.from_numpy(text))
    (h, w), x = latents.shape[2:], engine.array(tokens.contiguous().numpy())
    places = [(QWEN21_WORDS, h // 2, w // 2)]
    condition = component.condition(engine.array(states.numpy()), ((h, w), places, [x]))
    features = qwen21_conditioning.time_row(1000 * SIGMA, "float32")
    return lambda: component.predict(x, features, condition), lambda y: engine.numpy(y)


# Qwen-Image-Edit-2511, which sees two pictures like the latents


def _edit_theirs(model: Any, latents: Any, text: Any, pooled: Any) -> Step:
    shape, tokens = (1, latents.shape[2] // 2, latents.shape[3] // 2), _tokens(latents)
    time = torch.full((1,), SIGMA, device=text.device, dtype=text.dtype)
    x, seen = torch.cat([tokens] * 3, dim=1), [[shape] * 3]
    more = {"encoder_hidden_states_mask": None, "return_dict": False}
    return lambda: model(x, text, timestep=time, img_shapes=seen, **more)[0][:, : tokens.shape[1]]


def _edit_ours(component: Any, engine: Any, latents: np.ndarray, text: np.ndarray, pooled: np.ndarray) -> Any:
    shape, tokens = (1, latents.shape[2] // 2, latents.shape[3] // 2), engine.array(packing.pack(latents))
    modulation = component.modulate(qwen_conditioning.time_rows(component.config, [1000 * SIGMA], "float32"))
    condition = component.condition([engine.array(text)], [shape] * 3, [tokens] * 2)
    return lambda: component.predict(tokens, (modulation, 0), condition), lambda y: engine.numpy(y)


def _tokens(latents: Any) -> Any:
    """[1 C h w] -> [1 L 4C], as FLUX.1 packs them."""
    c, h, w = latents.shape[1:]
    return latents.reshape(1, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(1, h * w // 4, 4 * c)


def _ids(latents: Any, text: Any, axes: int = 3) -> dict[str, Any]:
    """The positions that a pipeline of diffusers gives: of 2 x 2 latents for FLUX.1, of each for FLUX.2."""
    step, S = (2, text.shape[1]) if axes == 3 else (1, text.shape[1])
    h, w = (side // step for side in latents.shape[2:])
    image, words = torch.zeros(h, w, axes), torch.zeros(S, axes)
    image[..., 1], image[..., 2] = torch.arange(h)[:, None], torch.arange(w)[None]
    if axes == 4:
        words[:, 3] = torch.arange(S)
    return {"img_ids": image.reshape(-1, axes).to(text.device), "txt_ids": words.to(text.device)}


def cases() -> dict[str, Case]:
    """Return each model with one block of each kind, or two."""
    klein = replace(
        known_configs.read("flux2-klein-4b", "transformer", flux2_dit.NETWORK), num_layers=1, num_single_layers=1
    )
    zimage = replace(known_configs.read("z-image", "transformer", zimage_dit.NETWORK), n_layers=2, n_refiner_layers=1)
    medium = SD3Config(num_layers=2, dual_attention_layers=(0,), qk_norm="rms_norm", pos_embed_max_size=384)
    dev = FluxConfig(num_layers=1, num_single_layers=1, guidance_embeds=True)
    edit = QwenDiTConfig(num_layers=2, zero_cond_t=True)
    qwen21 = Case(
        family="qwen-image-2.1", network=qwen21_dit.NETWORK, config=Qwen21Config(num_layers=2),
        oracle="QwenImage21Transformer2DModel", embedding="time_text_embed.time_proj", text=4096, pooled=1,
        theirs=_qwen21_theirs, ours=_qwen21_ours,
    )  # fmt: skip
    return {
        "qwen21": qwen21,  # diffusers makes keys and values of text and picture anew in each step
        "qwen21-kept": replace(qwen21, theirs=partial(_qwen21_theirs, kept=True)),
        "edit": Case(
            family="qwen-image", network=qwen_dit.NETWORK, config=edit, oracle="QwenImageTransformer2DModel",
            embedding="time_text_embed.time_proj", text=edit.joint_attention_dim, pooled=1, theirs=_edit_theirs,
            ours=_edit_ours,
        ),
        "z-image": Case(
            family="z-image", network=zimage_dit.NETWORK, config=zimage, oracle="ZImageTransformer2DModel",
            embedding="t_embedder", text=zimage.cap_feat_dim, pooled=1, theirs=_zimage_theirs, ours=_zimage_ours,
        ),
        "flux": Case(
            family="flux", network=flux_dit.NETWORK, config=dev, oracle="FluxTransformer2DModel",
            embedding="time_text_embed.time_proj", text=4096, pooled=768, theirs=_flux_theirs, ours=_flux_ours,
        ),
        "flux2": Case(
            family="flux2", network=flux2_dit.NETWORK, config=klein, oracle="Flux2Transformer2DModel",
            embedding="time_guidance_embed.time_proj", text=klein.joint_attention_dim, pooled=1,
            theirs=_flux2_theirs, ours=_flux2_ours,
        ),
        "sd3": Case(
            family="sd3", network=sd3_dit.NETWORK, config=medium, oracle="SD3Transformer2DModel",
            embedding="time_text_embed.time_proj", text=4096, pooled=2048, theirs=_sd3_theirs, ours=_sd3_ours,
        ),
    }  # fmt: skip


# The run


def inputs(case: Case, image: int, text: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the same numbers for every arm: latents, text and pooled text, all exact in bfloat16."""
    rows = max(r for r in range(1, int(image**0.5) + 1) if image % r == 0)
    patch, channels = (1, case.config.in_channels) if case.family in ("flux2", "qwen-image-2.1") else (2, 16)
    shapes = ((1, channels, rows * patch, image // rows * patch), (1, text, case.text), (1, case.pooled))
    rng = np.random.default_rng(7)
    given = (torch.from_numpy(rng.standard_normal(shape).astype(np.float32)) for shape in shapes)
    latents, states, pooled = (values.bfloat16().float().numpy() for values in given)
    return latents, states, pooled


def oracle(case: Case, file: Path, dtype: torch.dtype, device: str) -> Any:
    """diffusers' model with the weights of `file`, and sinusoids that are made in float64."""
    import diffusers
    from safetensors import safe_open

    fields = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(case.config).items()}
    if case.family == "qwen-image":
        known = inspect.signature(getattr(diffusers, case.oracle)).parameters
        fields = {name: value for name, value in fields.items() if name in known}
    with torch.device("meta"):
        model = getattr(diffusers, case.oracle)(**fields)
    with safe_open(file, framework="pt", device=device) as stored:
        tensors = {key: stored.get_tensor(key).to(dtype) for key in stored.keys()}  # noqa: SIM118
    model.load_state_dict(tensors, assign=True)
    maker = model.get_submodule(case.embedding)
    if case.family == "qwen-image":
        from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope

        model.pos_embed = QwenEmbedRope(theta=10000, axes_dim=list(case.config.axes_dims_rope), scale_rope=True)
        model.time_text_embed.time_proj = bench_step.ExactTimes()
        return model.eval()
    if case.family == "qwen-image-2.1":
        from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21Rope

        model.pos_embed = QwenImage21Rope(theta=10000, axes_dim=list(case.config.axes_dims_rope))
        maker.forward = lambda times: torch.cat([_sinusoids(1000 * time) for time in times])
        return model.eval()
    setattr(maker, "timestep_embedding" if case.family == "z-image" else "forward", _sinusoids)
    return model.eval()


def _sinusoids(t: torch.Tensor, dim: int = 256) -> torch.Tensor:
    return torch.from_numpy(timestep_features(float(t), dim)).float()[None].to(t.device)


def oracle_arm(case: Case, model: Any, given: tuple[np.ndarray, ...]) -> Arm:
    first = next(model.parameters())
    step = case.theirs(model, *(torch.from_numpy(x).to(first.device, first.dtype) for x in given))

    @torch.inference_mode()
    def synchronized() -> torch.Tensor:
        result = step()
        synchronize(first.device.type)
        return result

    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return Arm("diffusers", synchronized, lambda x: x.double().cpu().numpy(), weights)


def our_arm(case: Case, engine: Any, folder: Path, kind: DenoiserKind, policy: str, given: Any) -> Arm:
    manifest, precision = case.network.manifest(case.config), bases(kind)[policy]
    plan = keys.plan(
        folder, "transformer", manifest, uses=lambda stored: case.network.used(case.config, stored),
        rename=case.network.rename,
    )  # fmt: skip
    component = engine.open(case.network.name, case.config, plan.stored(precision), precision)
    step, unpacked = case.ours(component, engine, *given)
    weights = sum(parameter_bytes(component.model))
    return Arm(f"ours {policy} ({engine.name})", lambda: evaluated(engine, step()), unpacked, weights)


def measure(case: Case, options: argparse.Namespace, folder: Path) -> None:
    manifest = {case.network.published(key): shape for key, shape in case.network.manifest(case.config).items()}
    file = write(folder / "diffusion_pytorch_model.safetensors", manifest)
    given = [inputs(case, *map(int, tokens.split("+"))) for tokens in options.tokens]
    exact = oracle(case, file, torch.float32, options.device)
    references = [(arm := oracle_arm(case, exact, one)).numpy(arm.step()) for one in given]
    del exact, arm
    gc.collect()
    engine = qwenimg.backends.load(options.device)
    kind = next(family.precision for family in registry.FAMILIES if family.name == case.family)
    for dtype in options.dtypes:
        model = oracle(case, file, DTYPES[dtype], options.device)
        for one, reference in zip(given, references, strict=True):
            arms = [oracle_arm(case, model, one)]
            arms += [our_arm(case, engine, folder, kind, policy, one) for policy in POLICIES[dtype]]
            tokens = {
                "image_tokens": one[0].size // (case.config.in_channels if case.family in ("flux", "flux2") else 64),
                "text_tokens": one[1].shape[1],
                "branches": 1,
            }
            show(
                {"model": case.family, "dtype": dtype, **tokens, "rows": rows_of(arms, dtype, reference, options.runs)}
            )
            del arms
            gc.collect()
        del model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help="qwen21, edit, z-image, flux, flux2, sd3; all without it"
    )
    parser.add_argument("--tokens", nargs="+", metavar="IMAGE+TEXT", default=["256+40"])
    parser.add_argument("--dtypes", nargs="+", choices=POLICIES, default=["fp32"])
    parser.add_argument("--runs", type=int, default=5, help="of every arm, after one that is not counted")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    print(bench_step.header(argparse.Namespace(**vars(options), backend="torch", cfg=False, layers="few")))
    for name in options.models or cases():
        with tempfile.TemporaryDirectory(prefix="bench-step-") as folder:
            measure(cases()[name], options, Path(folder))


if __name__ == "__main__":
    main()
