"""Qwen2.5-VL with its vision tower, the text encoder of Qwen-Image-Edit: configuration, manifest, and what of a picture
is made once.

What is unusual about it, besides the language model (`qwen`):
- a picture is patches of 14 x 14 pixels; each block of 2 x 2 patches becomes one slot, an input of the language model;
- the patch kernel has two taps in time, and both see the same picture;
- most layers attend within windows of 8 x 8 patches, from the top left; those at the right and bottom may be smaller.
  `full_layers` attend to the whole picture;
- q, k, v come from one layer; the feed-forward is gated, with biases; norms are RMS norms;
- RoPE turns halves, by rows in the first half of the angles and by columns in the second;
- the language model's RoPE has three axes: time, rows and columns of slots; text has the same number on all three, and
  goes on after the longer side of a picture.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.block import Block
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks import params
from qwenimg.common.networks.encoders import decoder, language_model, qwen, vision_tower
from qwenimg.common.networks.encoders.decoder import HEAD
from qwenimg.common.networks.encoders.qwen import QwenVLConfig
from qwenimg.common.networks.encoders.vision_tower import CHANNELS, NESTED, PREFIX, TowerConfig
from qwenimg.common.weights.joined import Join, Joins
from qwenimg.common.weights.keys import Rename
from qwenimg.common.weights.plan import ParamUses

_MMPROJ_KEY = re.compile(
    r"(?:v\.(?:blk\.(?P<layer>\d+)\.)?)?(?P<part>mm\.[02]|[a-z]\w*)\.(?P<leaf>weight(?:\.1)?|bias)"
)
_MMPROJ = {  # llama.cpp's names of layers, in files called mmproj
    "patch_embd": "patch_embed.tap",
    "ln1": "norm1",
    "ln2": "norm2",
    "attn_q": "attn.q",
    "attn_k": "attn.k",
    "attn_v": "attn.v",
    "attn_out": "attn.proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ln": "merger.ln_q",
    "mm.0": "merger.mlp.0",
    "mm.2": "merger.mlp.2",
}
_NAMES = vision_tower.NAMES | {"window_size": "window_size", "fullatt_block_indexes": "full_layers"}
_FIXED = {"hidden_act": "silu", "in_channels": CHANNELS, "in_chans": CHANNELS}

Group = tuple[int, int]
"""A number of windows, and the patches of each."""


@dataclass(frozen=True, kw_only=True)
class QwenVLVisionConfig(TowerConfig, QwenVLConfig):
    """The configuration of both parts. Defaults: Qwen2.5-VL-7B."""

    mrope_section: tuple[int, ...] = field(default=(16, 24, 24), metadata=NESTED)
    vision_depth: int = field(default=32, metadata={"max": 1000} | NESTED)
    vision_width: int = field(default=1280, metadata=NESTED)
    vision_inner: int = field(default=3420, metadata=NESTED)
    vision_heads: int = field(default=16, metadata={"max": 1024} | NESTED)
    patch_size: int = field(default=14, metadata={"max": 256} | NESTED)  # pixels
    merge_size: int = field(default=2, metadata={"max": 16} | NESTED)  # patches a side of a slot
    taps_in_time: int = field(default=2, metadata={"max": 16} | NESTED)
    window_size: int = field(default=112, metadata={"max": 16384} | NESTED)  # pixels
    full_layers: tuple[int, ...] = field(default=(7, 15, 23, 31), metadata={"min": 0} | NESTED)

    def __post_init__(self) -> None:
        super().__post_init__()
        vision_tower.check(self, self.head_dim)
        if self.window_size % (self.patch_size * self.merge_size):
            raise ModelError(
                f"window_size {self.window_size} is not a multiple of patches of {self.patch_size} in blocks of "
                f"{self.merge_size}"
            )

    @property
    def vision_feed_forward(self) -> int:
        """The arrays of the feed-forward's width in memory at its peak: it is gated."""
        return 3

    @property
    def window(self) -> int:
        """The slots along a side of a window."""
        return self.window_size // self.slot


def fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `QwenVLVisionConfig` from a config.json. Raises ModelError for an unsupported value."""
    values = qwen.language_fields(data, QwenVLVisionConfig, qwen.QWEN2_5_VL.kind)
    text = data.get("text_config", data)
    sections = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if "mrope_section" in sections:
        values["mrope_section"] = sections["mrope_section"]
    width = text.get("hidden_size", QwenVLConfig.hidden_size)
    return values | language_model.vision_fields(data, _NAMES, _FIXED, width)


def described(config: QwenVLVisionConfig) -> dict[str, object]:
    """Return the keys of config.json that have the vision tower and the sections of RoPE."""
    return vision_tower.described(config, config.hidden_size, _NAMES, {"type": "mrope"})


def manifest(config: QwenVLVisionConfig) -> Manifest:
    """Return the shape of every tensor: the language model's, and the vision tower's with the prefix `visual.`."""
    width, slot = config.vision_width, config.vision_width * config.merge_size**2
    block = params.merge(
        params.norm("norm1", width),
        params.norm("norm2", width),
        params.linear("attn.qkv", 3 * width, width),
        params.linear("attn.proj", width, width),
        params.linear("mlp.gate_proj", config.vision_inner, width),
        params.linear("mlp.up_proj", config.vision_inner, width),
        params.linear("mlp.down_proj", width, config.vision_inner),
    )
    kernel = (width, CHANNELS, config.taps_in_time, config.patch_size, config.patch_size)
    tower = params.merge(
        {"patch_embed.proj.weight": kernel},
        params.repeat("blocks", config.vision_depth, block),
        params.norm("merger.ln_q", width),
        params.linear("merger.mlp.0", slot, slot),
        params.linear("merger.mlp.2", config.hidden_size, slot),
    )
    return params.merge(params.under("visual", tower), decoder.manifest(config))


def used(config: QwenVLVisionConfig, stored: Manifest) -> ParamUses:
    """Return the tensors of `stored` that are used, the patch kernel as a matrix."""
    return vision_tower.flat_kernel(decoder.used(config, stored))


def rename(key: str) -> str | None:
    """Return the manifest key of a file's key in any known style; None for a tensor that is not needed."""
    return _tower_name(key.removeprefix(qwen.MFLUX)) or qwen.QWEN2_5_VL.rename(key)


def names(config: QwenVLVisionConfig) -> Rename:
    """Return `rename`, with the head if `config` uses it."""
    plain = qwen.QWEN2_5_VL.rename_for(config)
    return lambda key: _tower_name(key.removeprefix(qwen.MFLUX)) or plain(key)


def _tower_name(key: str) -> str | None:
    if (ours := vision_tower.rename(key)) is not None:
        return ours
    match = _MMPROJ_KEY.fullmatch(key) if key.startswith(("v.", "mm.")) else None
    if match is None or match["part"] not in _MMPROJ:
        return None
    block = f"blocks.{match['layer']}." if match["layer"] else ""
    return f"{PREFIX}{block}{_MMPROJ[match['part']]}.{match['leaf']}"


def joins(manifest: Manifest) -> Joins:
    """Return the weights that a file for llama.cpp has in several tensors: q, k and v apart, and the taps in time."""
    fused = {
        name: Join(tuple(name.replace("qkv", part) for part in "qkv")) for name in manifest if ".attn.qkv." in name
    }
    return {**fused, **vision_tower.joined_taps()}


# A picture


class Layout(NamedTuple):
    """The order in which the vision tower has the slots of a picture: window by window, windows of one size together.
    `order` are the slots' places in raster order, `back` the place in `order` of each; `groups` are the windows."""

    order: NDArray[np.int64]
    back: NDArray[np.int64]
    groups: tuple[Group, ...]


def layout(config: QwenVLVisionConfig, rows: int, columns: int) -> Layout:
    """Return the layout of a picture of rows x columns patches."""
    side, merge = config.window, config.merge_size
    places = np.arange(rows // merge * (columns // merge)).reshape(rows // merge, columns // merge)
    windows = [
        places[top : top + side, left : left + side].reshape(-1)
        for top in range(0, len(places), side)
        for left in range(0, places.shape[1], side)
    ]
    windows.sort(key=len, reverse=True)  # which keeps the order of those of one size
    sizes = [len(window) for window in windows]
    order = np.concatenate(windows)
    groups = tuple((sizes.count(size), size * merge**2) for size in dict.fromkeys(sizes))
    return Layout(order, np.argsort(order), groups)


def by_slot(values: NDArray[Any], config: QwenVLVisionConfig, order: NDArray[np.int64]) -> NDArray[Any]:
    """Return `values` [L, ...] of patches, block by block, with the blocks in `order`."""
    return values.reshape(len(order), config.merge_size**2, *values.shape[1:])[order].reshape(values.shape)


NETWORK = replace(
    qwen.QWEN2_5_VL,
    name="qwen_vl_vision",
    config=QwenVLVisionConfig,
    manifest=manifest,
    used=used,
    fields=fields,
    rename=rename,
    renames=names,
    joins=joins,
    architectures=qwen.QWEN2_5_VL.architectures | {vision_tower.MMPROJ},
    traced=(
        *(block for block in qwen.QWEN2_5_VL.traced if block.name == "layer"),
        Block(name="tower", paths=re.compile("visual")),
        Block(name="vision", paths=re.compile(r"visual\.blocks\.\d+"), streams=1, depth=1),
        Block(name="vision_end", paths=re.compile(r"visual\.(patch_embed|merger)")),
    ),
    published=lambda name: name if name == HEAD or name.startswith(PREFIX) else f"model.{name}",
    described=described,
)
