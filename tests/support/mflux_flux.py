"""A tiny FLUX.1 in the folder that mflux saves."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import mlx.core as mx

from support.folder_tensors import tensors

CLIP, T5 = "text_encoder", "text_encoder_2"


def mflux_name(name: str, part: str) -> str:
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


def save_as_mflux(folder: Path, out: Path, bits: int | None) -> Path:
    """All parts in two shards; layers in groups of 64, kernels with their channels last, T5's table in each block."""
    for part in ("transformer", CLIP, T5, "vae"):
        saved: dict[str, mx.array] = {}
        values = tensors(folder / part)
        values.pop("encoder.embed_tokens.weight", None)
        for name, value in values.items():
            called, array = mflux_name(name, part), mx.array(value.numpy())
            names = (
                [called] if "relative_attention" not in called else [called.replace(".0.", f".{i}.") for i in range(3)]
            )
            for one in names:
                layer = one.removesuffix(".weight")
                if array.ndim == 4:
                    saved[one] = mx.contiguous(mx.moveaxis(array, 1, -1))
                elif bits and array.ndim == 2 and array.shape[1] % 64 == 0:
                    codes = mx.quantize(array, group_size=64, bits=bits)
                    saved |= dict(zip((one, f"{layer}.scales", f"{layer}.biases"), codes, strict=True))
                else:
                    saved[one] = array
        about = {"quantization_level": str(bits), "mflux_version": "0.13.1"}
        (out / part).mkdir(parents=True)
        for i in range(2):
            shard = {name: saved[name] for name in list(saved)[i::2]}
            mx.save_safetensors(str(out / part / f"{i}.safetensors"), shard, about)
        index = {"metadata": about, "weight_map": {n: f"{i}.safetensors" for i in range(2) for n in list(saved)[i::2]}}
        (out / part / "model.safetensors.index.json").write_text(json.dumps(index))
        shutil.copy(folder / part / "config.json", out / part / "config.json")  # mflux has the published sizes alone
    for name in ("tokenizer", "tokenizer_2"):
        shutil.copytree(folder / name, out / name)
    return out
