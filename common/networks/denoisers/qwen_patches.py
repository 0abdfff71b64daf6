"""Block-wise patches, a small ControlNet for Qwen-Image: configuration and manifest.

What is unusual about it:
- it has neither text nor timestep: it embeds the latents of a picture once;
- after each block of the transformer a patch of two linear layers changes the image stream by the stream itself and
  the picture, each after an RMSNorm, so that each branch of guidance has changes of its own.

Its files have no configuration: it is read from their tensors. Source: DiffSynth-Studio's published
Qwen-Image-Blockwise-ControlNet-Canny, -Depth and -Inpaint (4 channels more, a mask in patches).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from qwenimg.common.base.block import Block
from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks import params
from qwenimg.common.networks.network import Network

NORM_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class QwenPatchesConfig:
    """The sizes. Defaults: the published patches for canny edges and depth."""

    dim: int = 3072
    picture_channels: int = 64  # of one packed token of a picture, and of its mask
    num_layers: int = field(default=60, metadata={"max": 1000})  # of the transformer


def manifest(config: QwenPatchesConfig) -> Manifest:
    """Return the shape of every tensor of the checkpoint, by its key."""
    dim = config.dim
    patch = params.merge(
        params.norm("x_rms", dim),
        params.norm("y_rms", dim),
        params.linear("input_proj", dim, dim),
        params.linear("output_proj", dim, dim),
    )
    return params.merge(
        params.linear("img_in", dim, config.picture_channels),
        params.repeat("controlnet_blocks", config.num_layers, patch),
    )


NETWORK = Network(
    name="qwen_patches",
    role="transformer",
    kind="QwenImageBlockWiseControlNet",
    config=QwenPatchesConfig,
    manifest=manifest,
    blocks=re.compile(r"controlnet_blocks\.(\d+)\..*\.weight"),
    streamable=re.compile(r"(controlnet_blocks\.\d+)\."),
    compiled=re.compile(r"controlnet_blocks\.\d+"),
    traced=(
        Block(name="start", paths=re.compile("img_in")),
        Block(name="patch", paths=re.compile(r"controlnet_blocks\.\d+")),
    ),
)
