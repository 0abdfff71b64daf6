"""The encoder of Stable Cascade's prior, an EfficientNetV2-S with a layer behind it: configuration and manifest.

What is unusual about it:
- it is a classifier of pictures without its head, and encodes alone: what its latents, 16 channels of a 32nd of the
  sides, become pixels by is the decoder of Stable Cascade with its VAE;
- pixels are 0 to 1, less the mean of ImageNet's and divided by their deviation; a picture is resized first, so that its
  latents have the size of the prior's;
- its norms are batch norms, and take the statistics of the training; the last one has no gain and no bias;
- the first stages expand by the 3x3 kernel itself; the others have a kernel for each channel, and weigh channels by
  their means over the whole image, so that no part of an image is encoded alone;
- its files come without a configuration: the shapes of the tensors are the configuration.

Source: M. Tan, Q. Le, "EfficientNetV2: Smaller Models and Faster Training", 2021; its authors' `effnet.py` over
torchvision's class.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from qwenimg.common.base.block import Block
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks import params
from qwenimg.common.networks.layout import Layout, Layouts, StoredShapes
from qwenimg.common.networks.network import Network
from qwenimg.common.weights.plan import ParamUse, ParamUses

CLASS_NAME = "EfficientNetEncoder"
NORM_EPS, LAST_NORM_EPS = 1e-3, 1e-5
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SCALE = 32  # pixels to a latent
FUSED = 3  # the first stages, whose kernels see all channels
EXPANSIONS, STRIDES = (1, 4, 4, 4, 6, 6), (1, 2, 2, 2, 1, 2)  # of each stage
SQUEEZED = 4  # times fewer numbers weigh the channels than a block has inputs
_STATISTICS = ("running_mean", "running_var")


class MBConv(NamedTuple):
    """A block: its channels in, between and out, and the stride of its kernel."""

    inputs: int
    hidden: int
    outputs: int
    stride: int
    fused: bool

    @property
    def is_one(self) -> bool:
        """True of a block that is one convolution."""
        return self.fused and self.hidden == self.inputs

    @property
    def squeezed(self) -> int:
        return max(1, self.inputs // SQUEEZED)


@dataclass(frozen=True, kw_only=True)
class EffnetConfig:
    """The sizes of an encoder. Defaults: the published one's."""

    widths: tuple[int, ...] = (24, 24, 48, 64, 128, 160, 256)  # channels of the first layer and of each stage
    layers: tuple[int, ...] = field(default=(2, 4, 4, 6, 9, 15), metadata={"max": 100})
    features: int = 1280
    latent_channels: int = field(default=16, metadata={"max": 1024})

    def __post_init__(self) -> None:
        if (len(self.widths), len(self.layers)) != (len(STRIDES) + 1, len(STRIDES)):
            raise ModelError(f"has {len(self.layers)} stages with {len(self.widths)} widths; expected {len(STRIDES)}")

    @property
    def stages(self) -> tuple[tuple[MBConv, ...], ...]:
        """The blocks of each stage, of which the first has the stride."""
        return tuple(tuple(self._block(stage, i) for i in range(count)) for stage, count in enumerate(self.layers))

    def _block(self, stage: int, i: int) -> MBConv:
        inputs = self.widths[stage + 1 if i else stage]
        hidden = EXPANSIONS[stage] * inputs
        return MBConv(inputs, hidden, self.widths[stage + 1], 1 if i else STRIDES[stage], stage < FUSED)


def manifest(config: EffnetConfig) -> Manifest:
    """Return the shape of every tensor of the file that its authors published."""
    last = len(STRIDES) + 1
    return params.merge(
        _conv("backbone.0", config.widths[0], 3, 3),
        *(
            params.under(f"backbone.{stage}.{i}.block", _block(block))
            for stage, blocks in enumerate(config.stages, 1)
            for i, block in enumerate(blocks)
        ),
        _conv(f"backbone.{last}", config.features, config.widths[-1], 1),
        {"mapper.0.weight": (config.latent_channels, config.features, 1, 1)},
        {f"mapper.1.{name}": (config.latent_channels,) for name in _STATISTICS},
    )


def _block(block: MBConv) -> Manifest:
    if block.is_one:
        return _conv("0", block.outputs, block.inputs, 3)
    if block.fused:
        return params.merge(_conv("0", block.hidden, block.inputs, 3), _conv("1", block.outputs, block.hidden, 1))
    return params.merge(
        _conv("0", block.hidden, block.inputs, 1),
        _conv("1", block.hidden, 1, 3),
        params.conv("2.fc1", block.squeezed, block.hidden, 1, 1),
        params.conv("2.fc2", block.hidden, block.squeezed, 1, 1),
        _conv("3", block.outputs, block.hidden, 1),
    )


def _conv(name: str, outputs: int, inputs: int, kernel: int) -> Manifest:
    """Return the shapes of a convolution without bias and of the norm behind it."""
    norm: Manifest = {f"{name}.1.{leaf}": (outputs,) for leaf in ("weight", "bias", *_STATISTICS)}
    return {f"{name}.0.weight": (outputs, inputs, kernel, kernel)} | norm


def uses(config: EffnetConfig, stored: Manifest) -> ParamUses:
    """Return the use of each tensor: the kernels that weigh channels are matrices."""
    return {name: ParamUse(shape[:2] if ".fc" in name else shape) for name, shape in stored.items()}


def rename(key: str) -> str | None:
    """Return the manifest key of a file's key, which ComfyUI has behind `encoder.`; None for a counter of the training,
    and for what is beside the encoder there."""
    name = key.removeprefix("encoder.")
    return name if name.startswith(("backbone.", "mapper.")) and not name.endswith("num_batches_tracked") else None


NETWORK = Network(
    name="effnet",
    role="vae",
    kind=CLASS_NAME,
    config=EffnetConfig,
    manifest=manifest,
    used=uses,
    rename=rename,
    traced=(
        Block(name="block", paths=re.compile(r"backbone\.\d\.\d+"), image=True),
        Block(name="encode", paths=re.compile(""), method="encode", image=True, within="backbone"),
    ),
)


def _config(stored: StoredShapes, like: EffnetConfig) -> EffnetConfig:
    """Return the configuration for stored shapes."""
    lasts = (1 if expansion > 1 else 0 for expansion in EXPANSIONS[:FUSED])
    names = [
        f"backbone.{stage}.0.block.{last}.1.bias"
        for stage, last in enumerate((*lasts, *[3] * (len(EXPANSIONS) - FUSED)), 1)
    ]
    return stored.config(
        like,
        widths=[stored.shape(name, 1)[0] for name in ("backbone.0.1.bias", *names)],
        layers=[len(stored.blocks(f"backbone.{stage}.0.block.0.0.weight")) for stage in range(1, len(names) + 1)],
        features=stored.shape(f"backbone.{len(names) + 1}.1.bias", 1)[0],
        latent_channels=stored.shape("mapper.1.running_mean", 1)[0],
    )


LAYOUTS = Layouts(
    network=NETWORK,
    title="the encoder of Stable Cascade",
    rows=(
        Layout(names="its authors' names", signs=("backbone.1.0.block.0.0.weight", "mapper.0.weight")),
        Layout(names="ComfyUI's names", signs=("encoder.backbone.1.0.block.0.0.weight", "encoder.mapper.0.weight")),
    ),
    config=_config,
)
