"""A ControlNet for Qwen-Image: configuration and manifest.

What is unusual about it:
- it is a shorter Qwen-Image transformer with a text path, a timestep and blocks of its own;
- the latents of a picture, and for inpainting its mask's latents, are embedded and added to the start of its image
  stream;
- it predicts nothing: after each block a linear layer makes a residual for several blocks of the transformer.

Source: the published config of InstantX's Qwen-Image-ControlNet-Union (canny, soft edge, depth and pose: 5 layers);
-Inpainting has 6 layers and 4 channels more, a mask in patches.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from qwenimg.common.base.block import Block
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks import params
from qwenimg.common.networks.denoisers import qwen_dit
from qwenimg.common.networks.denoisers.qwen_dit import QwenDiTConfig
from qwenimg.common.networks.network import Network

CLASS_NAME = "QwenImageControlNetModel"


@dataclass(frozen=True, kw_only=True)
class QwenControlNetConfig(QwenDiTConfig):
    """The fields of its `config.json`. Defaults: the published union of four kinds of pictures."""

    num_layers: int = field(default=5, metadata={"max": 1000})
    extra_condition_channels: int = field(default=0, metadata={"min": 0, "max": 4096})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("zero_cond_t", "use_additional_t_cond", "use_layer3d_rope"):
            if getattr(self, name):
                raise ModelError(f"{name} is true: a ControlNet of such a Qwen-Image is not supported")

    @property
    def picture_channels(self) -> int:
        """The channels of one packed token of a picture, and of its mask."""
        return self.in_channels + self.extra_condition_channels


def manifest(config: QwenControlNetConfig) -> Manifest:
    """Return the shape of every tensor of the checkpoint, by its key in diffusers layout."""
    dim = config.dim
    return params.merge(
        qwen_dit.trunk(config),
        *(params.linear(f"controlnet_blocks.{i}", dim, dim) for i in range(config.num_layers)),
        params.linear("controlnet_x_embedder", dim, config.picture_channels),
    )


NETWORK = Network(
    name="qwen_controlnet",
    role="transformer",
    kind=CLASS_NAME,
    config=QwenControlNetConfig,
    manifest=manifest,
    used=lambda config, stored: qwen_dit.uses(stored),
    ignored=qwen_dit.IGNORED_CONFIG,
    blocks=qwen_dit.NETWORK.blocks,
    streamable=qwen_dit.NETWORK.streamable,
    compiled=qwen_dit.NETWORK.compiled,
    traced=(
        Block(name="block", paths=re.compile(r"transformer_blocks\.\d+"), streams=2, depth=1),
        Block(name="modulation", paths=re.compile(r"transformer_blocks\.\d+"), method="modulation", once=True),
        Block(name="time", paths=re.compile("time_text_embed"), once=True),
        Block(name="start", paths=re.compile("img_in|txt_norm|txt_in|controlnet_x_embedder")),
        Block(name="residual", paths=re.compile(r"controlnet_blocks\.\d+")),
        Block(name="model", paths=re.compile("")),
    ),
)
