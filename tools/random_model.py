"""A small Qwen-Image folder with random weights, from the project's own manifests: what it draws is noise.

    python tools/random_model.py FOLDER

For tests and trials. Needs neither framework, nor diffusers or transformers.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tiny_tokenizer import write_tiny_tokenizer

from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks.denoisers import qwen_dit
from qwenimg.common.networks.denoisers.qwen_dit import QwenDiTConfig
from qwenimg.common.networks.encoders import qwen_vl
from qwenimg.common.networks.encoders.qwen_vl import QwenVLConfig
from qwenimg.common.networks.vaes import qwen_vae
from qwenimg.common.networks.vaes.qwen_vae import QwenVAEConfig
from qwenimg.common.parts import known_configs

Array = np.ndarray[Any, Any]
Dtype = Literal["float32", "float16", "bfloat16"]

DIT = QwenDiTConfig(
    num_layers=2, attention_head_dim=32, num_attention_heads=3, joint_attention_dim=72, axes_dims_rope=(8, 12, 12)
)
TEXT = QwenVLConfig(
    hidden_size=72,
    intermediate_size=120,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    vocab_size=640,  # like Qwen's, more rows than the tokenizer has tokens
)
VAE = QwenVAEConfig(base_dim=12, num_res_blocks=1)
SAFETENSORS_DTYPE = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
DIFFUSERS_STEM = "diffusion_pytorch_model"


def write_random_model(
    folder: Path,
    *,
    dit: QwenDiTConfig = DIT,
    text: QwenVLConfig = TEXT,
    vae: QwenVAEConfig = VAE,
    dtype: Dtype = "float32",
    shards: int = 1,
    seed: int = 0,
) -> None:
    """A complete folder in diffusers layout. Each component is stored in `dtype`, in `shards` files.

    The same arguments give the same bytes. model_index.json is written last: where it is, the folder is complete.
    """
    text_keys = {f"model.{key}": shape for key, shape in qwen_vl.manifest(text).items()}
    _write_config(folder / "transformer", qwen_dit.CLASS_NAME, dit)
    _write_config(folder / "vae", qwen_vae.CLASS_NAME, vae)
    heading = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
    _write_json(folder / "text_encoder" / "config.json", heading | asdict(text))
    small = known_configs.small_files("qwen-image")
    _write_json(folder / "scheduler" / "scheduler_config.json", small["scheduler/scheduler_config.json"])
    write_tiny_tokenizer(folder / "tokenizer")

    dit_weights = random_weights(qwen_dit.manifest(dit), seed)
    text_weights = random_weights(text_keys, seed + 1)
    vae_weights = random_weights(qwen_vae.manifest(vae), seed + 2)
    write_shards(folder / "transformer", DIFFUSERS_STEM, dit_weights, dtype, shards)
    write_shards(folder / "text_encoder", "model", text_weights, dtype, shards)
    write_shards(folder / "vae", DIFFUSERS_STEM, vae_weights, dtype, shards)
    _write_json(folder / "model_index.json", small["model_index.json"])


# Weights


def random_weights(manifest: Manifest, seed: int) -> dict[str, Array]:
    """Float32 values for every tensor: gains about 1, biases about 0, weights that keep the size of what they get."""
    generator = np.random.RandomState(seed)
    return {key: _values(key, shape, generator) for key, shape in manifest.items()}


def _values(key: str, shape: tuple[int, ...], generator: np.random.RandomState) -> Array:
    noise = generator.standard_normal(shape).astype(np.float32)
    if key.endswith(".gamma") or (len(shape) == 1 and "norm" in key and key.endswith(".weight")):
        return 1 + np.float32(0.3) * noise
    if len(shape) == 1:
        return np.float32(0.2) * noise
    if "embed" in key and "linear" not in key:
        return noise
    inputs = prod(shape[1:]) // (shape[2] if len(shape) == 5 else 1)  # one frame sees one temporal tap
    return noise * np.float32(inputs**-0.5)


# Files


def write_shards(folder: Path, stem: str, weights: dict[str, Array], dtype: Dtype, shards: int) -> None:
    """`stem`.safetensors, or for several shards stem-0000i-of-0000n.safetensors and their index."""
    if shards == 1:
        write_safetensors(folder / f"{stem}.safetensors", weights, dtype)
        return
    names = list(weights)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"{stem}-{i + 1:05}-of-{shards:05}.safetensors"
        part = {name: weights[name] for name in names[i::shards]}
        write_safetensors(folder / file, part, dtype)
        weight_map |= dict.fromkeys(part, file)
    total = sum(value.size for value in weights.values()) * (4 if dtype == "float32" else 2)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / f"{stem}.safetensors.index.json", index)


def write_safetensors(path: Path, weights: dict[str, Array], dtype: Dtype) -> None:
    """Float32 `weights` as one file in `dtype`. By hand, since numpy has no bfloat16 to give to a library."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    blobs, at = [], 0
    for name, value in weights.items():
        blobs.append(_stored(value, dtype))
        end = at + len(blobs[-1])
        header[name] = {"dtype": SAFETENSORS_DTYPE[dtype], "shape": list(value.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(b"".join([len(text).to_bytes(8, "little"), text, *blobs]))


def _stored(values: Array, dtype: Dtype) -> bytes:
    if dtype != "bfloat16":
        return values.astype("<f4" if dtype == "float32" else "<f2").tobytes()
    bits = values.astype("<f4").view("<u4")
    nearest: Array = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # ties to even
    return nearest.astype("<u2").tobytes()


def _write_config(folder: Path, class_name: str, config: QwenDiTConfig | QwenVAEConfig) -> None:
    _write_json(folder / "config.json", {"_class_name": class_name} | asdict(config))


def _write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/random_model.py FOLDER")
    write_random_model(Path(sys.argv[1]))
    print(f"made {sys.argv[1]}: a tiny Qwen-Image with RANDOM weights; what it draws is noise")
