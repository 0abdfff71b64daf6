"""Folders and files of weights with random values, from the project's own manifests: what they draw is noise.

    python tools/random_model.py FOLDER               # a small Qwen-Image
    python tools/random_model.py FOLDER --layers 2    # one whose transformer has its full width, and so many layers

For tests, trials and measurements. Needs neither framework, nor diffusers or transformers. Weights have unit gain,
gains are about 1 and biases about 0: nothing trivial, and nothing that explodes. The values of a small model are drawn
tensor by tensor; those of a wide file are cut from one pool of normal numbers at a place that depends on the tensor's
name, at the speed of memory, one tensor at a time.
"""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tiny_tokenizer import write_tiny_tokenizer

from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks.denoisers import qwen_dit
from qwenimg.common.networks.denoisers.qwen_dit import QwenDiTConfig
from qwenimg.common.networks.encoders import decoder, qwen
from qwenimg.common.networks.encoders.qwen import QwenVLConfig
from qwenimg.common.networks.network import Network
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
NARROW_TEXT = QwenVLConfig(num_hidden_layers=1, intermediate_size=120, vocab_size=640)  # as wide as its states
STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
ITEMSIZE = {"F32": 4, "F16": 2, "BF16": 2}
DIFFUSERS_STEM = "diffusion_pytorch_model"
POOL = 1 << 20


# Folders


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
    text_keys = {f"model.{key}": shape for key, shape in decoder.manifest(text).items()}
    _write_json(folder / "transformer" / "config.json", {"_class_name": qwen_dit.CLASS_NAME} | asdict(dit))
    _write_json(folder / "vae" / "config.json", {"_class_name": qwen_vae.CLASS_NAME} | asdict(vae))
    heading = {"architectures": ["Qwen2_5_VLForConditionalGeneration"]}
    _write_json(folder / "text_encoder" / "config.json", heading | qwen.QWEN2_5_VL.written(text))
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


def write_part(folder: Path, network: Network, config: Any, dtype: str = "BF16") -> None:
    """A component in diffusers layout: its weights and its config.json."""
    stem = "model" if network.key == "model_type" else "diffusion_pytorch_model"
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
    write_random_model(folder, text=NARROW_TEXT)
    write_part(folder / "transformer", qwen_dit.NETWORK, QwenDiTConfig(num_layers=layers), dtype)
    if whole_vae:
        write_part(folder / "vae", qwen_vae.NETWORK, QwenVAEConfig(), "F32")


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


def write_safetensors(path: Path, weights: Mapping[str, Array], dtype: Dtype) -> None:
    """Float32 `weights` as one file in `dtype`."""
    manifest = {name: value.shape for name, value in weights.items()}
    kind = STORED[dtype]
    _write(path, manifest, kind, (stored(value, kind).tobytes() for value in weights.values()))


def write(path: Path, manifest: Mapping[str, tuple[int, ...]], dtype: str = "BF16", seed: int = 0) -> Path:
    """Write the safetensors file `path` with every tensor of `manifest`, stored as `dtype` (F32, F16 or BF16), of the
    pool of `seed`."""
    pool = np.random.default_rng(seed).standard_normal(POOL).astype(np.float32)
    pieces = (piece for name, shape in manifest.items() for piece in _bytes(pool, name, shape, dtype))
    return _write(path, manifest, dtype, pieces)


def _write(path: Path, manifest: Mapping[str, tuple[int, ...]], dtype: str, pieces: Iterable[bytes]) -> Path:
    """By hand, since numpy has no bfloat16 to give to a library."""
    header, at = dict[str, object](__metadata__={"format": "pt"}), 0
    for name, shape in manifest.items():
        size = prod(shape) * ITEMSIZE[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.writelines(pieces)
    return path


def stored(values: NDArray[np.float32], dtype: str) -> NDArray[np.generic]:
    """float32 values as they lie in a file; bfloat16 as the bits of the nearest one, ties to even."""
    if dtype == "BF16":
        bits = values.view(np.uint32)
        return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return values.astype({"F32": np.float32, "F16": np.float16}[dtype])


def _write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="of a transformer of full width")
    parser.add_argument("--dtype", choices=sorted(ITEMSIZE), default="BF16", help="of that transformer")
    parser.add_argument("--whole-vae", action="store_true", help="with --layers: the published VAE; else a small one")
    options = parser.parse_args()
    if options.layers:
        write_folder(options.folder, options.layers, options.dtype, whole_vae=options.whole_vae)
    else:
        write_random_model(options.folder)
    print(f"made {options.folder}: a Qwen-Image with RANDOM weights; what it draws is noise")


if __name__ == "__main__":
    main()
