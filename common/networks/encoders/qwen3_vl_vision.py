"""Qwen3-VL with its vision tower, a text encoder that sees pictures: configuration, manifest, and what of a picture is
made once.

What is unusual about it, besides the language model (`qwen`):
- a picture is patches of 16 x 16 pixels; each block of 2 x 2 patches becomes one slot, an input of the language model;
- the patch kernel has two taps in time, and both see the same picture;
- a learned table of 48 x 48 positions is stretched over the picture, corner to corner, and added to the patches;
- every layer attends to the whole picture; norms are LayerNorms, and the feed-forward is not gated;
- after some layers of the tower, and after the last one, a merger makes slots; those of the former are added to the
  states of the language model at the slots, after its first layers ("deepstack");
- RoPE turns halves, by rows in the first half of the angles and by columns in the second;
- the language model's RoPE has the three axes interleaved: of three neighbouring angles the first is of the time, the
  second of the row and the third of the column of a slot, as long as each has angles left, and then of the time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.block import Block
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks import params
from qwenimg.common.networks.encoders import decoder, language_model, qwen, vision_tower
from qwenimg.common.networks.encoders.qwen import Qwen3VLConfig
from qwenimg.common.networks.encoders.vision_tower import CHANNELS, NESTED, PREFIX, TowerConfig
from qwenimg.common.weights.joined import Joins
from qwenimg.common.weights.keys import Rename
from qwenimg.common.weights.plan import ParamUses

_NAMES = vision_tower.NAMES | {
    "num_position_embeddings": "positions",
    "deepstack_visual_indexes": "deep_layers",
}
_MMPROJ_KEY = re.compile(
    r"(?:v\.(?:blk\.(?P<layer>\d+)\.|deepstack\.(?P<deep>\d+)\.)?)?(?P<part>mm\.[02]|[a-z]\w*)\."
    r"(?P<leaf>weight(?:\.1)?|bias)"
)
_MMPROJ = {  # llama.cpp's names of layers, in files called mmproj
    "patch_embd": "patch_embed.proj",
    "position_embd": "pos_embed",
    "ln1": "norm1",
    "ln2": "norm2",
    "attn_qkv": "attn.qkv",
    "attn_out": "attn.proj",
    "ffn_up": "mlp.linear_fc1",
    "ffn_down": "mlp.linear_fc2",
    "norm": "norm",
    "fc1": "linear_fc1",
    "fc2": "linear_fc2",
    "post_ln": "merger.norm",
    "mm.0": "merger.linear_fc1",
    "mm.2": "merger.linear_fc2",
}
_FIXED = {"hidden_act": "gelu_pytorch_tanh", "in_channels": CHANNELS}


@dataclass(frozen=True, kw_only=True)
class Qwen3VLVisionConfig(TowerConfig, Qwen3VLConfig):
    """The configuration of both parts. Defaults: Qwen3-VL-8B."""

    mrope_section: tuple[int, ...] = field(default=(24, 20, 20), metadata=NESTED)
    vision_depth: int = field(default=27, metadata={"max": 1000} | NESTED)
    vision_width: int = field(default=1152, metadata=NESTED)
    vision_inner: int = field(default=4304, metadata=NESTED)
    vision_heads: int = field(default=16, metadata={"max": 1024} | NESTED)
    patch_size: int = field(default=16, metadata={"max": 256} | NESTED)  # pixels
    merge_size: int = field(default=2, metadata={"max": 16} | NESTED)  # patches a side of a slot
    taps_in_time: int = field(default=2, metadata={"max": 16} | NESTED)
    positions: int = field(default=2304, metadata={"max": 2**20} | NESTED)  # of the table, a square
    deep_layers: tuple[int, ...] = field(default=(8, 16, 24), metadata={"min": 0} | NESTED)

    def __post_init__(self) -> None:
        super().__post_init__()
        vision_tower.check(self, self.head_dim)
        if self.side**2 != self.positions:
            raise ModelError(f"num_position_embeddings {self.positions} is not a square")
        deep, most = self.deep_layers, min(self.vision_depth, self.num_hidden_layers)
        if list(deep) != sorted(set(deep)) or len(deep) > most or max(deep, default=0) >= self.vision_depth:
            raise ModelError(
                f"deepstack_visual_indexes {list(deep)} must be numbers of the {self.vision_depth} vision layers in "
                f"order, at most one for each of {self.num_hidden_layers} language layers"
            )

    @property
    def side(self) -> int:
        """The positions along a side of the table."""
        return isqrt(self.positions)

    @property
    def vision_feed_forward(self) -> int:
        """The arrays of the feed-forward's width in memory at its peak: it is not gated."""
        return 2


def fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `Qwen3VLVisionConfig` from a config.json. Raises ModelError for an unsupported value."""
    values = qwen.language_fields(data, Qwen3VLVisionConfig, qwen.QWEN3_VL.kind)
    text = data.get("text_config", data)
    sections = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not sections.get("mrope_interleaved", True):
        raise ModelError("mrope_interleaved is false: not supported")
    values |= {"mrope_section": sections["mrope_section"]} if "mrope_section" in sections else {}
    return values | language_model.vision_fields(
        data, _NAMES, _FIXED, text.get("hidden_size", Qwen3VLConfig.hidden_size)
    )


def described(config: Qwen3VLVisionConfig) -> dict[str, object]:
    """Return the keys of config.json that have the vision tower and the sections of RoPE."""
    return vision_tower.described(
        config, config.hidden_size, _NAMES, {"rope_type": "default", "mrope_interleaved": True}
    )


def manifest(config: Qwen3VLVisionConfig) -> Manifest:
    """Return the shape of every tensor: the language model's, and the vision tower's with the prefix `visual.`."""
    width = config.vision_width
    block = params.merge(
        params.affine("norm1", width),
        params.affine("norm2", width),
        params.linear("attn.qkv", 3 * width, width),
        params.linear("attn.proj", width, width),
        params.linear("mlp.linear_fc1", config.vision_inner, width),
        params.linear("mlp.linear_fc2", width, config.vision_inner),
    )
    tower = params.merge(
        params.conv("patch_embed.proj", width, CHANNELS, config.taps_in_time, config.patch_size, config.patch_size),
        {"pos_embed.weight": (config.positions, width)},
        params.repeat("blocks", config.vision_depth, block),
        params.under("merger", _merger(config, width)),
        params.repeat("deepstack_merger_list", len(config.deep_layers), _merger(config, _slot(config))),
    )
    return params.merge(params.under("visual", tower), decoder.manifest(config))


def _slot(config: Qwen3VLVisionConfig) -> int:
    """Return the width of the patches of one slot side by side."""
    return config.vision_width * config.merge_size**2


def _merger(config: Qwen3VLVisionConfig, normed: int) -> Manifest:
    """Return the shapes of a merger whose norm is `normed` wide."""
    slot = _slot(config)
    return params.merge(
        params.affine("norm", normed),
        params.linear("linear_fc1", slot, slot),
        params.linear("linear_fc2", config.hidden_size, slot),
    )


def used(config: Qwen3VLVisionConfig, stored: Manifest) -> ParamUses:
    """Return the tensors of `stored` that are used, the patch kernel as a matrix."""
    return vision_tower.flat_kernel(decoder.used(config, stored))


def rename(key: str) -> str | None:
    """Return the manifest key of a file's key in any known style; None for a tensor that is not needed."""
    return vision_tower.rename(key) or qwen.QWEN3_VL.rename(key)


def names(config: Qwen3VLVisionConfig) -> Rename:
    """Return `rename` extended by llama.cpp's names for the vision tower, where a deepstack merger has the number of
    the layer before it, and by the head if `config` uses it."""
    plain = qwen.QWEN3_VL.rename_for(config)
    deep = {str(layer): i for i, layer in enumerate(config.deep_layers)}

    def named(key: str) -> str | None:
        match = _MMPROJ_KEY.fullmatch(key) if key.startswith(("v.", "mm.")) else None
        if match is None or match["part"] not in _MMPROJ or match["deep"] not in (None, *deep):
            return vision_tower.rename(key) or plain(key)
        tap = match["part"] == "patch_embd" and match["leaf"] != "bias"
        part = "patch_embed.tap" if tap else _MMPROJ[match["part"]]
        block = f"blocks.{match['layer']}." if match["layer"] else ""
        block += f"deepstack_merger_list.{deep[match['deep']]}." if match["deep"] else ""
        return f"{PREFIX}{block}{part}.{match['leaf']}"

    return named


def joins(manifest: Manifest) -> Joins:
    """Return the weight that a file for llama.cpp has in two tensors: the taps in time."""
    return vision_tower.joined_taps()


# A picture


class Stretched(NamedTuple):
    """The positions of patches in the table, between four of its rows: their numbers [L 4], and their shares [L 4]."""

    rows: NDArray[np.int64]
    shares: NDArray[np.float64]


def stretched(config: Qwen3VLVisionConfig, rows: int, columns: int) -> Stretched:
    """Return the positions of rows x columns patches, block by block, in the position table, stretched corner to
    corner."""
    places = vision_tower.blockwise(config.merge_size, rows, columns)
    where = places * (config.side - 1) / np.maximum(1, [rows - 1, columns - 1])
    low = np.floor(where).astype(np.int64)
    high, share = np.minimum(low + 1, config.side - 1), where - low
    (top, left), (bottom, right), (down, across) = low.T, high.T, share.T
    numbers = [row * config.side + column for row in (top, bottom) for column in (left, right)]
    shares = [vertical * horizontal for vertical in (1 - down, down) for horizontal in (1 - across, across)]
    return Stretched(np.stack(numbers, axis=1), np.stack(shares, axis=1))


NETWORK = replace(
    qwen.QWEN3_VL,
    name="qwen3_vl_vision",
    config=Qwen3VLVisionConfig,
    manifest=manifest,
    used=used,
    fields=fields,
    rename=rename,
    renames=names,
    joins=joins,
    architectures=qwen.QWEN3_VL.architectures | {vision_tower.MMPROJ},
    traced=(
        *(block for block in qwen.QWEN3_VL.traced if block.name == "layer"),
        Block(name="tower", paths=re.compile("visual")),
        Block(name="vision_block", paths=re.compile(r"visual\.blocks\.\d+"), streams=1, depth=1),
        Block(name="merger", paths=re.compile(r"visual\.(merger|deepstack_merger_list\.\d+)")),
    ),
    tables=qwen.QWEN3_VL.tables | {f"{PREFIX}pos_embed.weight"},
    published=lambda name: f"model.{name}" if name.startswith(PREFIX) else qwen.QWEN3_VL.published(name),
    described=described,
)
