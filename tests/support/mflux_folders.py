"""Tiny models in the folders that mflux saves: its names, kernels with their channels last, layers in codes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import torch

from qwenimg.common.networks.denoisers.anima_dit import authors_name
from support.folder_tensors import tensors

CLIP, T5 = "text_encoder", "text_encoder_2"


def flux_name(name: str, part: str) -> str:
    """mflux's name of a tensor, as its loader lists them."""
    if part == "transformer":
        name = re.sub(r"(\.ff(_context)?)\.net\.0\.proj\.", r"\1.linear1.", name)
        return re.sub(r"(\.ff(_context)?)\.net\.2\.", r"\1.linear2.", name)
    if part == "vae":
        name = re.sub(r"(conv_in|conv_out)\.", r"\1.conv2d.", name)
        return name.replace(".conv_norm_out.", ".conv_norm_out.norm.")
    if part == T5:
        name = re.sub(r"encoder\.block\.(\d+)\.layer\.0\.", r"t5_blocks.\1.attention.", name)
        name = re.sub(r"encoder\.block\.(\d+)\.layer\.1\.", r"t5_blocks.\1.ff.", name)
        return name.removeprefix("encoder.")
    return f"text_model.{name.removeprefix('text_model.')}"


def flux2_name(name: str, part: str = "") -> str:
    """As its modules are called."""
    name = name.removeprefix("model.").replace("timestep_embedder.linear", "linear")
    return re.sub(
        r"((?<!single_)transformer_blocks\.\d+\.attn|mid_block\.attentions\.0)\.to_out\.0", r"\1.to_out", name
    )


def zimage_name(name: str, part: str) -> str:
    if part == "text_encoder":
        return name.removeprefix("model.")
    if part == "vae":
        side = "conv2d" if name.startswith("encoder.") else "conv"
        for layer in ("conv_in", "conv_out"):
            name = name.replace(f".{layer}.", f".{layer}.{side}.")
        return name.replace(".conv_norm_out.", ".conv_norm_out.norm.")
    name = name.replace("t_embedder.mlp.0.", "t_embedder.linear1.").replace("t_embedder.mlp.2.", "t_embedder.linear2.")
    return name.replace("2-1.adaLN_modulation.1.", "2-1.adaLN_modulation.0.")


def flux3_name(name: str, part: str) -> str:
    """Of the text encoder mflux has 32 layers of the language model alone."""
    if part == "text_encoder":
        seen = name.startswith("model.language_model.") and not re.search(r"\.layers\.(3[2-9])\.", name)
        return name.removeprefix("model.language_model.") if seen else ""
    return flux2_name(name) if part == "vae" else name.replace(".attn.to_out.0.", ".attn.to_out.")


def ernie_name(name: str, part: str) -> str:
    if part == "text_encoder":
        return name if name.startswith("language_model.") else ""
    if part == "vae":
        return flux2_name(name)
    name = name.replace("adaLN_modulation.1.", "adaln_modulation.")
    return name.replace(".self_attention.to_out.0.", ".self_attention.to_out.")


def anima_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Those of the transformer in its authors' names, which mflux has, with those of the text conditioner."""
    if folder.name != "transformer":
        return tensors(folder)
    own, text = (tensors(folder.parent / part) for part in ("transformer", "text_conditioner"))
    return {authors_name(name): value for name, value in own.items()} | {f"llm_adapter.{k}": v for k, v in text.items()}


def read_by_mlx(folder: Path) -> dict[str, mx.array]:
    """In MLX's order, by which tensors are dealt to shards, and `info` names one of them."""
    return {name: value for file in folder.glob("*.safetensors") for name, value in mx.load(str(file)).items()}


@dataclass(frozen=True, kw_only=True)
class Kind:
    name: Callable[[str, str], str]  # "" for one that mflux leaves out
    read: Callable[[Path], Any] = lambda folder: {name: mx.array(v.numpy()) for name, v in tensors(folder).items()}
    parts: tuple[str, ...] = ("transformer", "text_encoder", "vae")
    rotary: int = 0  # frequencies of the text encoder, which mflux 0.24 saves too, though it computed them
    version: str = "0.13.1"
    shards: int = 2
    # Of folders and files that are as they were, their patterns with their places there, or "" for the same
    kept: Mapping[str, str] = field(default_factory=lambda: {"tokenizer*": ""})


KINDS = {
    "flux": Kind(name=flux_name, parts=("transformer", CLIP, T5, "vae")),
    "flux2": Kind(name=flux2_name, rotary=4, version="0.24.0", shards=1),
    "z-image": Kind(name=zimage_name, read=read_by_mlx, rotary=16),
    "flux3": Kind(
        name=flux3_name,
        rotary=4,
        version="0.24.0",
        kept={f"text_encoder/{name}": "" for name in ("tokenizer*", "vocab.json", "merges.txt")},
    ),
    "ernie": Kind(name=ernie_name, version="0.24.0"),
    # of its VAE, which is Qwen-Image's, `test_mflux_files` has mflux's names
    "anima": Kind(
        name=lambda name, part: name,
        read=lambda folder: {name: mx.array(v.numpy()) for name, v in anima_tensors(folder).items()},
        parts=("transformer", "text_encoder"),
        rotary=4,
        version="0.24.0",
        kept={"tokenizer": "", "t5_tokenizer": "tokenizer_2", "vae": ""},
    ),
}


def save_as_mflux(folder: Path, out: Path, family: str, bits: int | None = None) -> Path:
    """All parts in shards and an index; layers in groups of 64, kernels with their channels last, T5's table in each
    block."""
    kind = KINDS[family]
    about = {"quantization_level": str(bits), "mflux_version": kind.version}
    for part in kind.parts:
        saved: dict[str, mx.array] = {}
        for name, array in kind.read(folder / part).items():
            if name == "encoder.embed_tokens.weight" or name.endswith("num_batches_tracked"):
                continue
            if not (called := kind.name(name, part)):
                continue
            table = "relative_attention" in called
            for one in [called.replace(".0.", f".{i}.") for i in range(3)] if table else [called]:
                layer = one.removesuffix(".weight")
                if array.ndim == 4:
                    saved[one] = mx.contiguous(mx.moveaxis(array, 1, -1))
                elif bits and array.ndim == 2 and array.shape[1] % 64 == 0 and "pad_token" not in name:
                    codes = mx.quantize(array, group_size=64, bits=bits)
                    saved |= dict(zip((one, f"{layer}.scales", f"{layer}.biases"), codes, strict=True))
                else:
                    saved[one] = array
        if part == "text_encoder" and kind.rotary:
            saved["rotary_emb.inv_freq"] = mx.ones(kind.rotary)
        (out / part).mkdir(parents=True)
        places = {name: f"{i % kind.shards}.safetensors" for i, name in enumerate(saved)}
        for file in set(places.values()):
            shard = {name: saved[name] for name in saved if places[name] == file}
            mx.save_safetensors(str(out / part / file), shard, about)
        index = {"metadata": about, "weight_map": places}
        (out / part / "model.safetensors.index.json").write_text(json.dumps(index))
        shutil.copy(folder / part / "config.json", out / part / "config.json")  # mflux has the published sizes alone
    for pattern, there in kind.kept.items():
        for path in folder.glob(pattern):
            target = out / (there or path.relative_to(folder))
            target.parent.mkdir(exist_ok=True)
            (shutil.copytree if path.is_dir() else shutil.copy)(path, target)
    return out
