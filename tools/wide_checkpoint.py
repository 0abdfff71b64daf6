"""Checkpoints made from a manifest alone, one tensor at a time, for tests and tools that need full-width weights.

    python tools/wide_checkpoint.py FOLDER --layers 2    # a Qwen-Image folder of full width; what it draws is noise

Weights have unit gain, gains are about 1 and biases about 0: nothing trivial, and nothing that explodes. Every value
is cut from one pool of normal numbers at a place that depends on the tensor's name, at the speed of memory.
"""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import random_model
from numpy.typing import NDArray

from qwenimg.common.networks.denoisers import qwen_dit
from qwenimg.common.networks.denoisers.qwen_dit import QwenDiTConfig
from qwenimg.common.networks.encoders.qwen_vl import QwenVLConfig
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.vaes import qwen_vae
from qwenimg.common.networks.vaes.qwen_vae import QwenVAEConfig
from qwenimg.common.parts import known_configs

POOL = 1 << 20
TEXT = QwenVLConfig(num_hidden_layers=1, intermediate_size=120, vocab_size=640)
ITEMSIZE = {"F32": 4, "F16": 2, "BF16": 2}


def write(path: Path, manifest: Mapping[str, tuple[int, ...]], dtype: str = "BF16", seed: int = 0) -> Path:
    """Writes the safetensors file `path` with every tensor of `manifest`, stored as `dtype` (F32, F16 or BF16)."""
    header, at = {}, 0
    for name, shape in manifest.items():
        size = prod(shape) * ITEMSIZE[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    pool = np.random.default_rng(seed).standard_normal(POOL).astype(np.float32)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for name, shape in manifest.items():
            file.writelines(_bytes(pool, name, shape, dtype))
    return path


def write_part(folder: Path, network: Network, config: Any, dtype: str = "BF16") -> None:
    """A component in diffusers layout: its weights and its config.json."""
    stem = "model" if network.role == "text" else "diffusion_pytorch_model"
    manifest = {network.published(key): shape for key, shape in network.manifest(config).items()}
    write(folder / f"{stem}.safetensors", manifest, dtype)
    (folder / "config.json").write_text(json.dumps(network.written(config)))


def write_small_files(folder: Path, model: str, pipeline: str = "") -> None:
    """The scheduler of a known model, and at last its model_index.json, with the class `pipeline` if that is given."""
    for path, table in reversed(known_configs.small_files(model).items()):
        named = {"_class_name": pipeline} if pipeline and path == "model_index.json" else {}
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(json.dumps(table | named))


def write_folder(folder: Path, layers: int, dtype: str = "BF16", *, whole_vae: bool = False) -> None:
    """A Qwen-Image folder with a transformer of full width in `dtype`, a text encoder of one layer, which is as wide as
    its states and thin inside, and a small VAE or the published one, in float32."""
    random_model.write_random_model(folder, text=TEXT)
    _widen(folder / "transformer", qwen_dit, QwenDiTConfig(num_layers=layers), dtype)
    if whole_vae:
        _widen(folder / "vae", qwen_vae, QwenVAEConfig(), "F32")


def _widen(folder: Path, network: ModuleType, config: QwenDiTConfig | QwenVAEConfig, dtype: str) -> None:
    """Puts this network in the place of the one in `folder`."""
    described = {"_class_name": network.CLASS_NAME} | asdict(config)
    (folder / "config.json").write_text(json.dumps(described), encoding="utf-8")
    write(folder / f"{random_model.DIFFUSERS_STEM}.safetensors", network.manifest(config), dtype)


def stored(values: NDArray[np.float32], dtype: str) -> NDArray[np.generic]:
    """float32 values as they lie in a file; bfloat16 as the bits of the nearest one, ties to even."""
    if dtype == "BF16":
        bits = values.view(np.uint32)
        return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return values.astype({"F32": np.float32, "F16": np.float16}[dtype])


def _bytes(pool: NDArray[np.float32], name: str, shape: tuple[int, ...], dtype: str) -> Iterator[bytes]:
    """The tensor in pieces: one stretch of the pool, repeated. Its length is odd, so that no two rows are equal."""
    offset, scale = _gain(name, shape)
    start = zlib.crc32(name.encode()) % POOL
    length = min(prod(shape), POOL - 1 - start % 4096 // 2 * 2)
    values = np.concatenate([pool[start : start + length], pool[: max(0, start + length - POOL)]])
    stretch = stored(offset + scale * values, dtype).tobytes()
    left = prod(shape) * ITEMSIZE[dtype]
    while left:
        yield stretch[:left]
        left -= min(left, len(stretch))


def _gain(name: str, shape: tuple[int, ...]) -> tuple[np.float32, np.float32]:
    """Middle and deviation of a tensor's values."""
    if name.endswith("gamma") or (len(shape) == 1 and "norm" in name and name.endswith("weight")):
        return np.float32(1), np.float32(0.3)
    if name.endswith("running_var"):
        return np.float32(1), np.float32(0.1)
    if len(shape) == 1:
        return np.float32(0), np.float32(0.2)
    return np.float32(0), np.float32(prod(shape[1:]) ** -0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dtype", choices=sorted(ITEMSIZE), default="BF16")
    parser.add_argument("--whole-vae", action="store_true", help="the published VAE; else a small one")
    options = parser.parse_args()
    write_folder(options.folder, options.layers, options.dtype, whole_vae=options.whole_vae)


if __name__ == "__main__":
    main()
