"""LoRAs that are written here, in other programs: diffusers loads every layer of every family and draws the same
picture, and mflux's and ComfyUI's tables of names have each key."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from support import (
    lora_cases as cases,
)
from support import oracle, oracle_flux, oracle_flux2, oracle_sd, oracle_sd3, oracle_zimage, peer
from support.cli_runner import cli
from support.lora_spellings import denoiser

import qwenimg
from qwenimg.common.networks.denoisers import zimage_dit
from qwenimg.common.numbers import noise

WEIGHTS = 2e-6  # of the largest value of a weight
PIXELS = 2  # of 255
LATENTS = 1e-4
BLOCK = re.compile(r"(single_)?transformer_blocks\.\d+\.|layers\.\d+\.|.*\.transformer_blocks\.\d+\.")
LAYER = re.compile(r".*(attn|attention|mlp|ff|ff_context|feed_forward)\d?\..*|.*\.(proj_mlp|proj_out)")
TEXTS = ["--train-text-encoder"]
PIPELINES: dict[str, Callable[[Path], Any]] = {
    "qwen": oracle.pipeline.__wrapped__,
    "z-image": oracle_zimage.pipeline.__wrapped__,
    "flux-dev": lambda folder: oracle_flux.made(folder, "text"),
    "flux2-klein": oracle_flux2.pipeline.__wrapped__,
    "sd3": lambda folder: oracle_sd3.pipeline.__wrapped__(folder, ""),
    "sd15": lambda folder: oracle_sd.pipeline.__wrapped__(folder, "StableDiffusionPipeline"),
    "sdxl": lambda folder: oracle_sd.pipeline.__wrapped__(folder, "StableDiffusionXLPipeline"),
}


def written(kind: str, folder: Path, tmp_path: Path) -> tuple[Path, dict[str, cases.Arrays]]:
    """A LoRA for the attention and the feed-forwards of every block, as this project writes it; and its factors."""
    there = cases.shapes(folder, denoiser(kind))
    paths = [path for path, shape in there.items() if len(shape) == 2 and BLOCK.match(path) and LAYER.fullmatch(path)]
    modules = {path: cases.lora(there[path], i) for i, path in enumerate(paths)}
    for arrays in modules.values():
        arrays["up"] *= np.float32(0.3)
    source = cases.written(tmp_path / "source.safetensors", modules, cases.Dialect("transformer.", cases.PEFT_HALVES))
    out = tmp_path / "written.safetensors"
    assert cli("lora", "merge", str(source), "-m", str(folder), "-o", str(out)).code == 0
    return out, modules


@pytest.mark.parametrize("kind", PIPELINES)
@pytest.mark.sample(2)
def test_diffusers_adds_every_layer(kind: str, tiny: dict[str, Path], tmp_path: Path) -> None:
    file, modules = written(kind, tiny[kind], tmp_path)
    pipe = PIPELINES[kind](tiny[kind])
    model = getattr(pipe, denoiser(kind))
    before = {name: value.detach().double().numpy().copy() for name, value in model.named_parameters()}
    pipe.load_lora_weights(file)
    pipe.fuse_lora(components=[denoiser(kind)])
    pipe.unload_lora_weights()
    worst, changed = 0.0, 0
    for name, value in model.named_parameters():
        path = name.removesuffix(".weight")
        after, expected = value.detach().numpy(), before[name]
        if path in modules:
            expected = expected + cases.added(modules[path], 1.0, expected.shape)
            changed += 1
        worst = max(worst, float(np.abs(after - expected).max() / np.abs(expected).max()))
    print(f"{kind}: {changed} layers, error {worst:.1e} (limit {WEIGHTS})")
    assert changed == len(modules) > 10 and worst <= WEIGHTS


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.parametrize("kind", ["qwen", "sd15"])
@pytest.mark.sample(2)
def test_diffusers_draws_the_picture_that_is_drawn_here(
    kind: str, backend: str, tiny: dict[str, Path], tmp_path: Path
) -> None:
    file, _ = written(kind, tiny[kind], tmp_path)
    draws_the_same(kind, backend, tiny[kind], file)


@pytest.mark.sample(0, rest=3)
@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.parametrize(("kind", "more"), [("qwen", []), ("sd15", []), ("sd15", TEXTS), ("sdxl", TEXTS)])
def test_diffusers_draws_by_a_trained_file(
    kind: str, backend: str, more: list[str], tiny: dict[str, Path], tmp_path: Path
) -> None:
    """A few steps at a large rate, as its owner trains: by the command, on the backend that draws then."""
    data, file = tmp_path / "pictures", tmp_path / "trained.safetensors"
    data.mkdir()
    for name in ("red", "blue"):
        Image.new("RGB", (64, 64), name).save(data / f"{name}.png")
        (data / f"{name}.txt").write_text(f"a {name} ring")
    few = ["--size", "64", "--steps", "3", "--rank", "4", "--rate", "0.3", "--batch", "2"]
    asked = ["--data", str(data), "-o", str(file), "-m", str(tiny[kind]), "--backend", backend, *few, *more]
    ran = cli("train", "lora", *asked)
    assert ran.code == 0, ran.err
    prefixes = {re.match(r"lora_(unet|te\d?)_|", key)[0] for key in load_file(file)}
    texts = {"sd15": {"lora_te_"}, "sdxl": {"lora_te1_", "lora_te2_"}}[kind] if more else set()
    assert prefixes == (texts | ({""} if kind == "qwen" else {"lora_unet_"})), prefixes
    draws_the_same(kind, backend, tiny[kind], file)


def draws_the_same(kind: str, backend: str, folder: Path, file: Path) -> None:
    """Assert that diffusers draws with a LoRA the picture that is drawn here, which is far from the one without it."""
    pipe = PIPELINES[kind](folder)
    for part in {"text_encoder"} & pipe.components.keys():
        vars(getattr(pipe, part)).pop("text_model", None)  # of `oracle_sd.pipeline`, by which the loader takes names
    pipe.load_lora_weights(file)
    asked: dict[str, Any] = {"width": 64, "height": 48, "steps": 3, "guidance": 3.0, "seed": 7}
    with closing(qwenimg.load(folder, backend, "fp32")) as ours:
        plain, made = ours("a red ring", **asked), ours("a red ring", **asked, lora=file)
    if kind == "qwen":
        packed = torch.from_numpy(oracle.pack(noise.normal((1, 16, 6, 8), seed=7)))
        expected = oracle.drawn(
            pipe, "a red ring", (64, 48), negative_prompt=" ", steps=3, guidance=3.0, latents=packed
        )
    else:
        start = torch.from_numpy(noise.normal((1, 4, 6, 8), seed=7))
        more = {"guidance_scale": 3.0, "num_inference_steps": 3, "width": 64, "height": 48}
        final = pipe("a red ring", latents=start, output_type="latent", **more).images
        expected = final.numpy(), peer.decoded(pipe, final)
    peer.check_picture(f"{kind} on {backend}", made, expected, LATENTS, PIXELS)
    moved = np.abs(made.pixels.astype(int) - plain.pixels).max()
    print(f"{kind} on {backend}: the LoRA moves pixels by up to {moved}")
    assert moved > 10 * PIXELS


# Tables of names of other programs' loaders, as of June 2026 (mflux) and of ComfyUI's comfy/lora.py, by their rules

_OF_QWEN = r"attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)|(img|txt)_mlp\.net\.(0\.proj|2)"
_OF_FLUX = r"attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)|ff(_context)?\.net\.(0\.proj|2)"
_OF_FLUX2 = r"attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)|ff(_context)?\.linear_(in|out)"
_SINGLE, _SINGLE2 = r"attn\.to_[qkv]|proj_mlp|proj_out", r"attn\.(to_qkv_mlp_proj|to_out)"
_OF_ZIMAGE = r"attention\.(to_[qkv]|to_out\.0)|feed_forward\.w[123]"
_ENDS = r"\.lora_[AB]\.weight"
_BLOCKS, _SINGLES = r"transformer\.transformer_blocks\.\d+\.", r"transformer\.single_transformer_blocks\.\d+\."
_KOHYA = (
    r"lora_unet_(down|mid|up)_block(s_\d+)?_attentions_\d+_transformer_blocks_\d+_\w+\.(lora_(down|up)\.weight|alpha)"
)
MFLUX = {
    "qwen": rf"diffusion_model\.transformer_blocks\.\d+\.({_OF_QWEN}){_ENDS}",
    "z-image": rf"diffusion_model\.(layers|noise_refiner|context_refiner)\.\d+\.({_OF_ZIMAGE}){_ENDS}",
    "flux-dev": rf"({_BLOCKS}({_OF_FLUX})|{_SINGLES}({_SINGLE})){_ENDS}",
    "flux2-klein": rf"({_BLOCKS}({_OF_FLUX2})|{_SINGLES}({_SINGLE2})){_ENDS}",
}
"""mflux has no scale of its own for these: without alpha it is 1."""
COMFYUI = {  # its own names of Qwen-Image are diffusers'; of the others it maps diffusers' behind these prefixes
    **MFLUX,
    "sd3": rf"{_BLOCKS}(attn2?|ff|ff_context)\.\S+{_ENDS}",
    "sd15": _KOHYA,
    "sdxl": _KOHYA,
}


@pytest.mark.parametrize(
    ("program", "kind"), [("mflux", kind) for kind in MFLUX] + [("ComfyUI", kind) for kind in COMFYUI]
)
def test_every_key_is_in_the_table_of(program: str, kind: str, tiny: dict[str, Path], tmp_path: Path) -> None:
    file, modules = written(kind, tiny[kind], tmp_path)
    pattern = re.compile({"mflux": MFLUX, "ComfyUI": COMFYUI}[program][kind])
    keys = list(load_file(file))
    lost = [key for key in keys if not pattern.fullmatch(key)]
    print(f"{program}, {kind}: {len(keys)} keys of {len(modules)} layers, not in its table: {lost}")
    assert not lost and len(keys) >= 2 * len(modules)
    assert not any(key.endswith(".alpha") for key in keys) or keys[0].startswith("lora_unet_")


def test_a_key_that_no_table_has_is_found() -> None:
    """The tables tell: bare names, an alpha, and other layers are in none."""
    for key in ("transformer_blocks.0.attn.to_q.lora_A.weight", "diffusion_model.transformer_blocks.0.attn.to_q.alpha"):
        assert not any(re.fullmatch(pattern, key) for pattern in (*MFLUX.values(), *COMFYUI.values()))
    assert zimage_dit.NETWORK.lora_prefix == "diffusion_model."
