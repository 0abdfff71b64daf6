"""The types of Stable Diffusion, and the configuration of a single file's UNet from the shapes of its tensors.

The type says what no shape shows: SD 1.x has 8 heads in every attention of its UNet, all others heads of 64 channels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from qwenimg.common.base.config import parse
from qwenimg.common.base.safe_files import bad
from qwenimg.common.networks.denoisers import unet
from qwenimg.common.networks.denoisers.unet import UNetConfig
from qwenimg.common.networks.denoisers.unet_names import SIGN
from qwenimg.common.networks.encoders import clip
from qwenimg.common.networks.encoders.clip_names import HEAD_DIM
from qwenimg.common.networks.layout import Shapes, StoredShapes, shape_of
from qwenimg.common.parts.texts.clip_files import Text

HEADS_SD1 = 8
SIZE_CHANNELS = 256  # of each size in SDXL's conditioning

_DEPTH = re.compile(r"(?P<block>(?:in|out)put_blocks\.\d+\.1|middle_block\.1)\.transformer_blocks\.(?P<index>\d+)\..*")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A type of Stable Diffusion, with facts that no header shows."""

    title: str
    texts: tuple[Text, ...]
    scaling_factor: float
    sample_size: int  # latents along a side that it was trained on


KINDS: Mapping[str, Kind] = {
    "sd1": Kind(
        title="Stable Diffusion 1.x",
        texts=(Text(component="text_encoder", prefix="cond_stage_model.transformer.", like=clip.VIT_L),),
        scaling_factor=0.18215,
        sample_size=64,
    ),
    "sd2": Kind(
        title="Stable Diffusion 2.x",
        texts=(
            Text(
                component="text_encoder",
                prefix="cond_stage_model.model.",
                like=clip.OPEN_CLIP_H,
                converted="cond_stage_model.transformer.",
            ),
        ),
        scaling_factor=0.18215,
        sample_size=64,
    ),
    "sdxl": Kind(
        title="Stable Diffusion XL base",
        texts=(
            Text(
                component="text_encoder",
                prefix="conditioner.embedders.0.transformer.",
                like=clip.VIT_L,
                converted="cond_stage_model.transformer.",
            ),
            Text(
                component="text_encoder_2",
                prefix="conditioner.embedders.1.model.",
                like=clip.OPEN_CLIP_BIG_G,
                converted="cond_stage_model.1.transformer.",
            ),
        ),
        scaling_factor=0.13025,
        sample_size=128,
    ),
    "sdxl-refiner": Kind(
        title="Stable Diffusion XL refiner",
        texts=(Text(component="text_encoder_2", prefix="conditioner.embedders.0.model.", like=clip.OPEN_CLIP_BIG_G),),
        scaling_factor=0.13025,
        sample_size=128,
    ),
}


# The UNet


def unet_config(stored: StoredShapes, like: object, kind: str, prediction: str) -> UNetConfig:
    """Return the configuration of the UNet with these stored shapes, by ldm's names. Raises ModelError."""
    path, shapes = stored.path, stored.shapes
    first, last = shape_of(path, shapes, SIGN, 4), shape_of(path, shapes, "out.2.weight", 4)
    depths = _depths(shapes)
    levels = _levels(path, shapes, depths)
    mid = depths.get("middle_block.1", 1)
    attends = [depth > 0 for _, _, depth in levels]
    text = shape_of(path, shapes, "middle_block.1.transformer_blocks.0.attn2.to_k.weight", 2)
    sd1, sd2 = kind == "sd1", kind == "sd2"
    data: dict[str, Any] = {
        "in_channels": first[1],
        "out_channels": last[0],
        "sample_size": 96 if sd2 and prediction == "v" else KINDS[kind].sample_size,
        "block_out_channels": [width for width, _, _ in levels],
        "down_block_types": ["CrossAttnDownBlock2D" if a else "DownBlock2D" for a in attends],
        "up_block_types": ["CrossAttnUpBlock2D" if a else "UpBlock2D" for a in reversed(attends)],
        "layers_per_block": [layers for _, layers, _ in levels],
        # a level without attention does not use its number, but the middle uses the last level's
        "transformer_layers_per_block": [depth or 1 for _, _, depth in levels[:-1]] + [levels[-1][2] or mid],
        "attention_head_dim": [HEADS_SD1 if sd1 else max(1, width // HEAD_DIM) for width, _, _ in levels],
        "cross_attention_dim": text[1],
        # in GGUF even linear projections are stored as 1x1 convolutions
        "use_linear_projection": not sd1 or len(shapes.get("middle_block.1.proj_in.weight", ())) == 2,
        "norm_num_groups": 32,
    }
    if "label_emb.0.0.weight" in shapes:
        data["addition_embed_type"] = "text_time"
        data["addition_time_embed_dim"] = SIZE_CHANNELS
        data["projection_class_embeddings_input_dim"] = shape_of(path, shapes, "label_emb.0.0.weight", 2)[1]
    return parse(UNetConfig, unet.unet_fields(data), source=path)


def _depths(shapes: Iterable[str]) -> dict[str, int]:
    """Return the number of transformer blocks of each attention."""
    blocks: dict[str, set[str]] = {}
    for key in shapes:
        if match := _DEPTH.fullmatch(key):
            blocks.setdefault(match["block"], set()).add(match["index"])
    return {block: len(indices) for block, indices in blocks.items()}


def _levels(path: Path, shapes: Shapes, depths: Mapping[str, int]) -> list[tuple[int, int, int]]:
    """Return channels, residual blocks, and transformer blocks in each attention for each level of the down blocks."""
    levels: list[tuple[int, int, int]] = []
    width = layers = depth = 0
    for number in count(1):
        block = f"input_blocks.{number}"
        if f"{block}.0.out_layers.3.weight" in shapes:
            width = shape_of(path, shapes, f"{block}.0.out_layers.3.weight", 4)[0]
            layers, depth = layers + 1, depths.get(f"{block}.1", 0)
            continue
        if not layers:
            raise bad(path, f"lacks tensor '{block}.0.out_layers.3.weight' of its UNet: download it again")
        levels.append((width, layers, depth))
        layers = 0
        if f"{block}.0.op.weight" not in shapes:
            break
    return levels
