"""A control network for Z-Image: configuration and manifest.

What is unusual about it:
- it has neither text nor time of its own: the transformer gives it its streams, its time's embedding and its pad token;
- it embeds the latents of a picture; those of the second version are followed by a mask, 1 where a second picture is
  kept, and by the latents of that picture with the rest in grey. Without a mask these 17 channels are zeros;
- its refiner blocks run beside the transformer's, on image tokens; its layers run on image and text tokens;
- the first block of either row begins with the transformer's stream of its place; what a linear layer makes of the
  stream behind a block is added to the transformer's stream behind one of its blocks, text tokens included.

Three versions: 1 has refiner blocks that change nothing; 2.0 runs all its layers in their place, since its own were
never trained and stayed zeros; 2.1 has refiner blocks that change the stream behind the transformer's.

Source: the published Z-Image-Turbo-Fun-Controlnet-Union: version 1 has 6 layers, 2.0 and 2.1 have 15, lite ones 3.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from qwenimg.common.base.block import Block
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks import params
from qwenimg.common.networks.denoisers.zimage_dit import PATCH, BlockSizes, modulated_block
from qwenimg.common.networks.network import Network

CLASS_NAME = "ZImageControlNetModel"
EMBEDDER = f"control_all_x_embedder.{PATCH}-1."  # its name in files has the sizes of its patches


@dataclass(frozen=True, kw_only=True)
class ZImageControlConfig(BlockSizes):
    """The fields of its `config.json`. Defaults: the published union 2.1."""

    # Blocks of the transformer, and its refiner blocks
    control_layers_places: tuple[int, ...] = field(
        default=(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28), metadata={"min": 0}
    )
    control_refiner_layers_places: tuple[int, ...] = field(default=(0, 1), metadata={"min": 0})
    control_in_dim: int = field(default=33, metadata={"max": 4096})
    # The blocks that run beside the transformer's refiner blocks and change them; None: its own, which change nothing
    add_control_noise_refiner: str | None = "control_noise_refiner"
    all_patch_size: tuple[int, ...] = (PATCH,)
    all_f_patch_size: tuple[int, ...] = (1,)
    dim: int = 3840
    n_refiner_layers: int = field(default=2, metadata={"max": 1000})
    n_heads: int = field(default=30, metadata={"max": 1024})
    n_kv_heads: int = 30  # not read by the class that made the files
    norm_eps: float = 1e-5
    qk_norm: bool = True

    def __post_init__(self) -> None:
        expected = {"all_patch_size": (PATCH,), "all_f_patch_size": (1,), "qk_norm": True}
        for name, value in expected.items():
            if getattr(self, name) != value:
                raise ModelError(f"{name} is {getattr(self, name)}: not supported; expected {value}")
        kinds = (None, "control_layers", "control_noise_refiner")
        if self.add_control_noise_refiner not in kinds:
            raise ModelError(
                f"add_control_noise_refiner is {self.add_control_noise_refiner!r}; expected one of {kinds}"
            )
        if self.dim % self.n_heads:
            raise ModelError(f"dim {self.dim} is no multiple of n_heads {self.n_heads}")
        self._check_places("control_layers_places", 1000)
        self._check_places("control_refiner_layers_places", self.n_refiner_layers)
        if self.control_layers_places[0]:
            raise ModelError("control_layers_places must begin with 0")
        most = self.layers if self.add_control_noise_refiner == "control_layers" else self.n_refiner_layers
        if self.add_control_noise_refiner and len(self.control_refiner_layers_places) > most:
            raise ModelError(f"control_refiner_layers_places has more places than there are blocks, {most}")

    @property
    def layers(self) -> int:
        return len(self.control_layers_places)

    @property
    def own_refiner(self) -> bool:
        """True if it has refiner blocks of its own."""
        return self.add_control_noise_refiner != "control_layers"

    @property
    def features(self) -> int:
        """The channels of one packed token of a picture, of the mask and the second picture behind it included."""
        return PATCH**2 * self.control_in_dim

    def _check_places(self, name: str, count: int) -> None:
        places = getattr(self, name)
        if not places or list(places) != sorted({place for place in places if 0 <= place < count}):
            raise ModelError(f"{name} is {list(places)[:40]}; expected rising numbers of blocks from 0 to {count - 1}")


def manifest(config: ZImageControlConfig) -> Manifest:
    """Return the shape of every tensor of the checkpoint, by its key; see `rename`."""
    dim, block = config.dim, modulated_block(config)
    refiner = {}
    if config.add_control_noise_refiner == "control_noise_refiner":
        refiner = _row("control_noise_refiner", config.n_refiner_layers, block, dim)
    elif config.own_refiner:
        refiner = params.repeat("control_noise_refiner", config.n_refiner_layers, block)
    return params.merge(
        params.linear("control_x_embedder", dim, config.features),
        refiner,
        _row("control_layers", config.layers, block, dim),
    )


def rename(key: str) -> str:
    """Return the manifest key of a file's key."""
    return "control_x_embedder." + key.removeprefix(EMBEDDER) if key.startswith(EMBEDDER) else key


def published(name: str) -> str:
    """Return the name in files of a name of the manifest."""
    return EMBEDDER + name.removeprefix("control_x_embedder.") if name.startswith("control_x_embedder.") else name


def _row(name: str, count: int, block: Manifest, dim: int) -> Manifest:
    """Return `count` blocks, of which the first begins with the transformer's stream."""
    return params.merge(
        params.repeat(name, count, block | params.linear("after_proj", dim, dim)),
        params.linear(f"{name}.0.before_proj", dim, dim),
    )


NETWORK = Network(
    name="zimage_control",
    role="transformer",
    kind=CLASS_NAME,
    config=ZImageControlConfig,
    manifest=manifest,
    blocks=re.compile(r"control_layers\.(\d+)\.(?:attention|feed_forward)\..*\.weight"),
    streamable=re.compile(r"(control_(?:noise_refiner|layers)\.\d+)\."),
    compiled=re.compile(r"control_(?:noise_refiner|layers)\.\d+"),
    traced=(
        Block(name="block", paths=re.compile(r"control_(?:noise_refiner|layers)\.\d+"), streams=1, depth=1),
        Block(name="start", paths=re.compile("control_x_embedder")),
    ),
    rename=rename,
    published=published,
)
