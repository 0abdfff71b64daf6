"""The common code of the vision towers of Qwen's language models: names, configurations, and places of patches.

A picture is patches of pixels; each block of merge x merge of them becomes one slot, an input of the language model.
The patch kernel has several taps in time, which all see the same picture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.errors import ModelError
from qwenimg.common.networks.encoders.language_model import COMPUTED
from qwenimg.common.numbers import rope
from qwenimg.common.weights.joined import Join, Joins
from qwenimg.common.weights.plan import ParamUses

CHANNELS = 3
NORM_EPS = 1e-6
ROPE_THETA = 10000.0
PREFIX = "visual."
MMPROJ = "clip"  # the architecture of llama.cpp's files of a vision tower alone
_PREFIXES = ("model.visual.", "vision_tower.", PREFIX)
NAMES = {  # of vision_config: of the configuration here
    "depth": "vision_depth",
    "hidden_size": "vision_width",
    "intermediate_size": "vision_inner",
    "num_heads": "vision_heads",
    "patch_size": "patch_size",
    "spatial_merge_size": "merge_size",
    "temporal_patch_size": "taps_in_time",
}
NESTED = {"in_files": False}  # metadata of fields in objects of their own: `described`


@dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """The fields of a configuration that describe the tower and its pictures."""

    mrope_section: tuple[int, ...]
    vision_depth: int
    vision_width: int
    vision_inner: int
    vision_heads: int
    patch_size: int  # pixels
    merge_size: int  # patches a side of a slot
    taps_in_time: int

    @property
    def vision_head_dim(self) -> int:
        return self.vision_width // self.vision_heads

    @property
    def patch_values(self) -> int:
        """The numbers of one patch: channels, time, rows and columns."""
        return CHANNELS * self.taps_in_time * self.patch_size**2

    @property
    def slot(self) -> int:
        """The pixels along a side of a slot."""
        return self.patch_size * self.merge_size


class PicturePlace(NamedTuple):
    """The place of a picture in a prompt: its first slot among the ids, and its rows and columns of slots."""

    start: int
    rows: int
    columns: int


def check(config: TowerConfig, head_dim: int) -> None:
    """Raise ModelError for numbers that do not go together. head_dim: the width of the language model's heads."""
    if len(config.mrope_section) != 3 or 2 * sum(config.mrope_section) != head_dim:
        raise ModelError(
            f"mrope_section {list(config.mrope_section)} must be three numbers that add up to half of the heads' "
            f"width {head_dim}"
        )
    if config.vision_width % (4 * config.vision_heads):
        raise ModelError(f"vision hidden_size {config.vision_width} is not a multiple of 4 x {config.vision_heads}")


def described(
    config: TowerConfig, width: int, names: Mapping[str, str], scaling: Mapping[str, object]
) -> dict[str, object]:
    """Return the keys of config.json that have the tower, and the sections of RoPE. width: the channels that the
    language model takes; names: the fields of `config` by the file's names; scaling: the other keys of RoPE."""
    vision = {theirs: getattr(config, ours) for theirs, ours in names.items()}
    return {
        "vision_config": vision | {"out_hidden_size": width},
        "rope_scaling": {**scaling, "mrope_section": config.mrope_section},
    }


def joined_taps() -> Joins:
    """Return the patch kernel, stored as one tensor for each tap in time."""
    tap = f"{PREFIX}patch_embed.tap.weight"
    return {f"{PREFIX}patch_embed.proj.weight": Join((tap, f"{tap}.1"), axis=2)}


def flat_kernel(uses: ParamUses) -> ParamUses:
    """Return `uses` with the patch kernel [C, 3, time, y, x] as a matrix."""
    return {
        name: use._replace(shape=(use.shape[0], prod(use.shape[1:]))) if len(use.shape) == 5 else use
        for name, use in uses.items()
    }


def rename(key: str) -> str | None:
    """Return the manifest key of a tower's tensor in any known style; None for another tensor."""
    prefix = next((prefix for prefix in _PREFIXES if key.startswith(prefix)), None)
    return None if prefix is None or key.endswith(COMPUTED) else PREFIX + key.removeprefix(prefix)


def blockwise(merge: int, rows: int, columns: int) -> NDArray[np.int64]:
    """Return row and column [L 2] of each of rows x columns patches, in blocks of merge x merge."""
    places = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1)
    blocks = places.reshape(rows // merge, merge, columns // merge, merge, 2).transpose(0, 2, 1, 3, 4)
    return blocks.reshape(-1, 2)


def patch_rope(config: TowerConfig, rows: int, columns: int) -> rope.Table:
    """Return (cos, sin) [L, D/2] of patches, block by block: rows in the first half of the angles, columns in the
    second."""
    places, half = blockwise(config.merge_size, rows, columns), config.vision_head_dim // 2
    return rope.rope_table(places, (half, half), ROPE_THETA)
