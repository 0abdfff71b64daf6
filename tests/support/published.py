"""Folders of models at their published size whose files are headers and a hole: for what reads no weight."""

from __future__ import annotations

import json
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

from tiny_tokenizer import write_tiny_tokenizer

from qwenimg.common.base.shape import Manifest
from qwenimg.common.families.flux import published as flux
from qwenimg.common.families.flux import small_files as flux_files
from qwenimg.common.families.flux2 import small_files as flux2_files
from qwenimg.common.families.flux2.published import variants
from qwenimg.common.families.qwen_image.small_files import INDEX, SCHEDULER
from qwenimg.common.families.sd3 import published as sd3
from qwenimg.common.families.sd3 import small_files as sd3_files
from qwenimg.common.families.stable_diffusion.published import models, vae
from qwenimg.common.families.z_image import published as z_image
from qwenimg.common.families.z_image import small_files
from qwenimg.common.networks.denoisers import flux2_dit, flux_dit, qwen_dit, sd3_dit, unet, zimage_dit
from qwenimg.common.networks.denoisers.qwen_dit import QwenDiTConfig
from qwenimg.common.networks.encoders import clip, qwen3, qwen_vl, t5
from qwenimg.common.networks.encoders.qwen3 import Qwen3Config
from qwenimg.common.networks.encoders.qwen_vl import QwenVLConfig
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.vaes import flux2_vae, kl_vae, qwen_vae
from qwenimg.common.networks.vaes.flux2_vae import Flux2VAEConfig
from qwenimg.common.networks.vaes.qwen_vae import QwenVAEConfig


def write_published(folder: Path) -> Path:
    """57.7 GB to read, of which the disk holds some hundred kB."""
    dit, text, vae = QwenDiTConfig(), QwenVLConfig(), QwenVAEConfig()
    heading = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
    keys = {f"model.{key}": shape for key, shape in qwen_vl.manifest(text).items()}
    _write(folder / "transformer", {"_class_name": qwen_dit.CLASS_NAME} | asdict(dit), qwen_dit.manifest(dit))
    _write(folder / "vae", {"_class_name": qwen_vae.CLASS_NAME} | asdict(vae), qwen_vae.manifest(vae))
    _write(folder / "text_encoder", heading | asdict(text), keys, "model")
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(SCHEDULER))
    write_tiny_tokenizer(folder / "tokenizer")
    (folder / "model_index.json").write_text(json.dumps(INDEX))
    return folder


def write_published_sd(folder: Path, name: str) -> Path:
    """Stable Diffusion `name`, without tokenizers."""
    model = models()[name]
    parts = {"unet": (unet.NETWORK, model.unet), "vae": (kl_vae.NETWORK, vae())}
    parts |= {part: (clip.NETWORK, config) for part, config in model.texts.items()}
    for part, (network, config) in parts.items():
        _write_part(folder / part, network, config, "F32")
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(model.scheduler))
    kind = "StableDiffusionXLPipeline" if len(model.texts) > 1 else "StableDiffusionPipeline"
    index = {"_class_name": kind} | {part: ["transformers", "CLIPTextModel"] for part in model.texts}
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def write_published_zimage(folder: Path, name: str) -> Path:
    """Z-Image `name`."""
    dtype = "F32" if name == "z-image-turbo" else "BF16"
    parts = {
        "transformer": (zimage_dit.NETWORK, z_image.transformer(), dtype),
        "text_encoder": (qwen3.NETWORK, Qwen3Config(), "BF16"),
        "vae": (kl_vae.NETWORK, kl_vae.FLUX_1, "BF16"),
    }
    for part, (network, config, stored) in parts.items():
        _write_part(folder / part, network, config, stored)
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(small_files.scheduler(z_image.SHIFTS[name])))
    write_tiny_tokenizer(folder / "tokenizer")
    (folder / "model_index.json").write_text(json.dumps(small_files.INDEX))
    return folder


def write_published_flux2(folder: Path, name: str) -> Path:
    """FLUX.2 klein `name`."""
    variant = variants()[name]
    parts = {
        "transformer": (flux2_dit.NETWORK, variant.transformer),
        "text_encoder": (qwen3.NETWORK, variant.text_encoder),
        "vae": (flux2_vae.NETWORK, Flux2VAEConfig()),
    }
    for part, (network, config) in parts.items():
        _write_part(folder / part, network, config)
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(flux2_files.SCHEDULER))
    write_tiny_tokenizer(folder / "tokenizer")
    (folder / "model_index.json").write_text(json.dumps(flux2_files.index(variant.distilled)))
    return folder


def write_published_flux(folder: Path, name: str) -> Path:
    """Flux.1 `name`, with a folder for its tokenizer, which has no files."""
    model = flux.published(name)
    assert model is not None
    guided = model.components["transformer"].config.guidance_embeds
    networks = {"transformer": flux_dit.NETWORK, "text_encoder": clip.NETWORK, "text_encoder_2": t5.NETWORK}
    for part, component in model.components.items():
        network, config = networks.get(part, kl_vae.NETWORK), component.config
        _write_part(folder / part, network, config)
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(flux_files.scheduler(distilled=not guided)))
    (folder / "tokenizer").mkdir()
    (folder / "model_index.json").write_text(json.dumps(flux_files.INDEX))
    return folder


def write_published_sd3(folder: Path, name: str) -> Path:
    """Stable Diffusion 3 `name`, without tokenizers."""
    model = sd3.published(name)
    assert model is not None
    networks = {network.name: network for network in (sd3_dit.NETWORK, clip.NETWORK, t5.NETWORK, kl_vae.NETWORK)}
    for part, component in model.components.items():
        network = networks[component.network]
        dtype = "F16" if name == "sd3-medium" else "BF16"
        _write_part(folder / part, network, component.config, dtype)
    for path, data in sd3_files.small_files(model).items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(json.dumps(data))
    return folder


def _write_part(folder: Path, network: Network, config: Any, dtype: str = "BF16") -> None:
    manifest = {network.published(key): shape for key, shape in network.manifest(config).items()}
    stem = "model" if network.role == "text" else "diffusion_pytorch_model"
    _write(folder, network.written(config), manifest, stem, dtype)


def _write(
    folder: Path,
    config: dict[str, object],
    manifest: Manifest,
    stem: str = "diffusion_pytorch_model",
    dtype: str = "BF16",
) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    header, at = {}, 0
    for name, shape in manifest.items():
        size = {"BF16": 2, "F16": 2, "F32": 4}[dtype] * prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    with (folder / f"{stem}.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + at)
