"""Folders of models at their published size whose files are headers and a hole: for what reads no weight."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

from tiny_tokenizer import write_tiny_tokenizer

from qwenimg.common.families import catalog, registry
from qwenimg.common.networks.network import Network
from qwenimg.common.parts import known_configs

DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
SIZES = {"BF16": 2, "F16": 2, "F32": 4}
# Families with the tokenizer of Qwen
QWENS = ("qwen-image", "z-image", "flux2", "flux3", "longcat", "krea2", "anima", "ovis")


def write_published(folder: Path, name: str = "qwen-image") -> Path:
    """The known model `name`, of which the disk holds some hundred kB; its tokenizer is a tiny one of Qwen, or a folder
    without files."""
    known, model = catalog.KNOWN[name], registry.published(catalog.KNOWN[name])
    assert model is not None
    networks = {network.name: network for network in model.family.networks}
    for part, component in model.checkpoint.components.items():
        dtype = known.denoiser_dtype if component.role == "transformer" else None
        _write_part(folder / part, networks[component.network], component.config, DTYPES[dtype or known.dtype])
    for path, table in known_configs.small_files(name).items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(json.dumps(table))
    if known.family in QWENS:
        write_tiny_tokenizer(folder / "tokenizer")
    else:
        (folder / "tokenizer").mkdir()
    return folder


def _write_part(folder: Path, network: Network, config: Any, dtype: str) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(network.written(config)))
    header, at = {}, 0
    for name, shape in network.manifest(config).items():
        size = SIZES[dtype] * prod(shape)
        header[network.published(name)] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    raw, stem = json.dumps(header).encode(), "model" if network.role == "text" else "diffusion_pytorch_model"
    with (folder / f"{stem}.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + at)
