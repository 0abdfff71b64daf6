"""Stable Cascade's VAE, the VQ-VAE of Paella (stage A): configuration and manifest.

What is unusual about it:
- its decoder takes latents as they are, and does not round them to the vectors of its codebook;
- all blocks of the decoder but one are at the size of the latents, 4 pixels a side: patches of 2 x 2 pixels are its
  output, and one transposed convolution doubles the sides before that;
- a block is a convolution of each channel alone, whose edge pixels are repeated, and a feed-forward, both of a norm
  without gain, with six numbers for the norms' scales and shifts and the results' gates;
- pixels are 0 to 1;
- its encoder, with a batch norm behind it, is not used here: Stable Cascade draws from text alone.

Source: D. Rampas et al., "A Novel Sampling Scheme for Text- and Image-Conditional Image Synthesis in Quantized Latent
Spaces" (2022); the reference class of diffusers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from qwenimg.common.base.block import Block
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks import params
from qwenimg.common.networks.network import Network
from qwenimg.common.weights.plan import ParamUse, ParamUses

CLASS_NAME = "PaellaVQModel"
NORM_EPS = 1e-6
WIDER = 4  # of a feed-forward
MODULATIONS = 6  # numbers of a block
DECODER = ("up_blocks.", "out_block.")
"""Starts of the names of the tensors that decode."""


@dataclass(frozen=True, kw_only=True)
class PaellaConfig:
    """The fields of `vqgan/config.json`. Defaults: the published one's, but for the scale."""

    in_channels: int = field(default=3, metadata={"max": 64})
    out_channels: int = field(default=3, metadata={"max": 64})
    up_down_scale_factor: int = field(default=2, metadata={"max": 8})
    levels: int = field(default=2, metadata={"max": 6})
    bottleneck_blocks: int = field(default=12, metadata={"max": 100})
    embed_dim: int = 384
    latent_channels: int = field(default=4, metadata={"max": 1024})
    num_vq_embeddings: int = field(default=8192, metadata={"max": 2**20})
    scale_factor: float = 0.3764

    def __post_init__(self) -> None:
        if (self.in_channels, self.out_channels) != (3, 3):
            raise ModelError(f"is of pictures of {self.in_channels} and {self.out_channels} channels; expected 3")
        if self.embed_dim % (1 << (self.levels - 1)):
            raise ModelError(f"embed_dim {self.embed_dim} cannot be halved for {self.levels} levels")
        if not self.scale_factor > 0:
            raise ModelError(f"scale_factor {self.scale_factor} must be positive")

    @property
    def widths(self) -> tuple[int, ...]:
        """The channels of the levels, those of the image first."""
        return tuple(self.embed_dim >> i for i in reversed(range(self.levels)))

    @property
    def scale(self) -> int:
        """The pixels per latent along each side."""
        return self.up_down_scale_factor << (self.levels - 1)

    @property
    def decoder(self) -> tuple[tuple[str, int], ...]:
        """The kinds of the decoder's layers in their order, each with its channels: `conv`, `block` and `up`."""
        made: list[tuple[str, int]] = [("conv", self.embed_dim)]
        for i, width in enumerate(reversed(self.widths)):
            made += [("block", width)] * (1 if i else self.bottleneck_blocks)
            made += [("up", width)] if i + 1 < self.levels else []
        return tuple(made)


def manifest(config: PaellaConfig) -> Manifest:
    """Return the shape of every tensor of the checkpoint, by its key in diffusers' layout."""
    widths, z, pixels = config.widths, config.latent_channels, config.up_down_scale_factor**2
    down: list[Manifest] = []
    for i, width in enumerate(widths):
        down += [params.conv("", width, widths[i - 1], 4, 4)] if i else []
        down.append(_block(width))
    last: Manifest = {"0.weight": (z, widths[-1], 1, 1)}
    last |= {f"1.{name}": (z,) for name in ("weight", "bias", "running_mean", "running_var")}
    up: list[Manifest] = []
    for kind, width in config.decoder:
        stretched = {".weight": (width, width // 2, 4, 4), ".bias": (width // 2,)}
        up.append({"conv": params.conv("0", width, z, 1, 1), "up": stretched}.get(kind) or _block(width))
    return params.merge(
        params.conv("in_block.1", widths[0], config.in_channels * pixels, 1, 1),
        *(_placed("down_blocks", place, layer) for place, layer in enumerate([*down, last])),
        {"vquantizer.embedding.weight": (config.num_vq_embeddings, z)},
        *(_placed("up_blocks", place, layer) for place, layer in enumerate(up)),
        params.conv("out_block.0", config.out_channels * pixels, widths[0], 1, 1),
    )


def _placed(name: str, place: int, layer: Manifest) -> Manifest:
    return {f"{name}.{place}.{key.removeprefix('.')}": shape for key, shape in layer.items()}


def _block(width: int) -> Manifest:
    return params.merge(
        {"gammas.weight": (MODULATIONS,)},
        params.conv("depthwise.1", width, 1, 3, 3),
        params.linear("channelwise.0", WIDER * width, width),
        params.linear("channelwise.2", width, WIDER * width),
    )


def uses(config: PaellaConfig, stored: Manifest) -> ParamUses:
    """Return the use of each tensor of the decoder: its 1x1 kernels are matrices."""
    own = {name: shape for name, shape in stored.items() if name.startswith(DECODER)}
    tables = {name: ParamUse((1, MODULATIONS)) for name in own if name.endswith("gammas.weight")}
    return {name: ParamUse(shape[:2] if shape[2:] == (1, 1) else shape) for name, shape in own.items()} | tables


def rename(key: str) -> str | None:
    """Return the manifest key of a file's key; None for a counter of the training."""
    if key.endswith("num_batches_tracked"):
        return None
    return f"{key}.weight" if key.endswith("gammas") else key.replace("vquantizer.codebook.", "vquantizer.embedding.")


def published(name: str) -> str:
    """Return the name in files of a name of the manifest."""
    return name.removesuffix(".weight") if name.endswith("gammas.weight") else name


NETWORK = Network(
    name="paella_vae",
    role="vae",
    kind=CLASS_NAME,
    config=PaellaConfig,
    manifest=manifest,
    used=uses,
    rename=rename,
    published=published,
    traced=(
        Block(name="layer", paths=re.compile(r"up_blocks\.\d+"), image=True, streams=1, depth=1),
        Block(name="decode", paths=re.compile(""), method="decode", image=True, within="up_blocks"),
    ),
)
