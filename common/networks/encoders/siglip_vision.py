"""SigLIP's image encoder, that of FLUX.1 Redux: configuration, manifest and names.

What is unusual about it:
- its layers are CLIP's, with GELU in its tanh approximation; no class token and no norm stand before the first;
- a picture is stretched to a square. Its sides are 384 pixels and no multiple of the patches of 14 pixels: the last 6
  rows and columns are not seen;
- the patches are a convolution with bias, and positions are added: 27 x 27 = 729 states;
- the result is the states after the last layer and a norm. A file also has a head that attends to them (`head`), which
  makes one vector of a picture, and perhaps the text encoder: neither is read;
- a file shows neither its heads, 16 of 72 channels, nor the pixels that no patch has.

Source: X. Zhai et al., Sigmoid Loss for Language Image Pre-Training (2023); the published configuration of
siglip-so400m-patch14-384.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from qwenimg.common.base.block import Block
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest, Shape
from qwenimg.common.networks import params
from qwenimg.common.networks.encoders import clip
from qwenimg.common.networks.encoders.clip_vision import (
    CHANNELS,
    FIRST_INNER,
    PatchSizes,
    count_layers,
    fields_of_half,
    named_shapes,
)
from qwenimg.common.networks.network import Network
from qwenimg.common.weights.plan import ParamUse, ParamUses, stored_uses

CLASS_NAME = "SiglipVisionModel"
MODEL_TYPE = "siglip_vision_model"
ACTIVATIONS = ("gelu_pytorch_tanh",)
_PREFIX = "vision_model."
_NOT_READ = ("text_model.", "logit_", "head.", "embeddings.position_ids")
_PATCHES = "embeddings.patch_embedding.weight"
_BIAS = "embeddings.patch_embedding.bias"
_POSITIONS = "embeddings.position_embedding.weight"
_SIDES = {(27, 14): 384}  # pixels a side, by the patches a side and their pixels, where some pixels are not seen
_HEADS = {768: 12}  # of published encoders by their widths; 16 in all others


@dataclass(frozen=True, kw_only=True)
class SiglipVisionConfig(PatchSizes):
    """The fields of `image_encoder/config.json`. Defaults: so400m-patch14-384."""

    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_hidden_layers: int = field(default=27, metadata={"max": 1000})
    num_attention_heads: int = field(default=16, metadata={"max": 1024})
    image_size: int = field(default=384, metadata={"max": 4096})  # pixels a side
    patch_size: int = field(default=14, metadata={"max": 256})  # pixels a side
    hidden_act: str = ACTIVATIONS[0]
    layer_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        self.check_layers(ACTIVATIONS)
        if self.image_size < self.patch_size:
            raise ModelError(f"image_size {self.image_size} is less than patch_size {self.patch_size}")


SO400M = SiglipVisionConfig()


def fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `SiglipVisionConfig` from a config.json, of an encoder alone or of a whole SigLIP. Raises
    ModelError for an unsupported value."""
    # transformers' own defaults, which a saved configuration may leave out
    usual = {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "image_size": 224, "patch_size": 16,
    }  # fmt: skip
    return usual | fields_of_half(data, SiglipVisionConfig, MODEL_TYPE, "siglip")


def manifest(config: SiglipVisionConfig) -> Manifest:
    """Return the shape of every tensor of the encoder, by its key without `vision_model.` (see `rename`)."""
    width = config.hidden_size
    return params.merge(
        {_PATCHES: (width, CHANNELS, config.patch_size, config.patch_size)},
        {_BIAS: (width,)},
        {_POSITIONS: (config.patches, width)},
        params.repeat("encoder.layers", config.num_hidden_layers, clip.layer(config)),
        params.affine("post_layernorm", width),
    )


def used(config: SiglipVisionConfig, stored: Manifest) -> ParamUses:
    """Return all of `stored`, the kernel of the patches as a matrix."""
    return stored_uses(stored) | {_PATCHES: ParamUse((config.hidden_size, config.patch_values))}


def rename(key: str) -> str | None:
    """Return the manifest key of a file's key; None for the head, and for the text encoder of a whole SigLIP."""
    name = key.removeprefix(_PREFIX)
    return None if name.startswith(_NOT_READ) else name


def published(name: str) -> str:
    """Return the name in published files of a name of the manifest."""
    return _PREFIX + name


def is_in(names: Collection[str]) -> bool:
    """Return whether a file with tensors of these names has such an encoder: CLIP's has no bias of the patches."""
    plain = {name.removeprefix(_PREFIX) for name in names if ".embeddings." in f".{name}"}
    return {_PATCHES, _BIAS, _POSITIONS} <= plain


def config_of(shapes: Mapping[str, Shape]) -> SiglipVisionConfig:
    """Return the configuration of an encoder whose tensors, by their names in a file, have these shapes. Raises
    ModelError."""
    wanted = {_PATCHES: 4, _BIAS: 1, _POSITIONS: 2, FIRST_INNER: 2}
    ranks = {published(name): rank for name, rank in wanted.items()}
    named = named_shapes(shapes, rename, ranks, "image encoder of SigLIP")
    width, _, patch, _ = named[_PATCHES]
    side = math.isqrt(named[_POSITIONS][0])
    return SiglipVisionConfig(
        hidden_size=width,
        intermediate_size=named[FIRST_INNER][0],
        num_hidden_layers=count_layers(named),
        num_attention_heads=_HEADS.get(width, SO400M.num_attention_heads),
        image_size=_SIDES.get((side, patch), side * patch),
        patch_size=patch,
    )


NETWORK = Network(
    name="siglip_vision",
    role="text",
    kind=MODEL_TYPE,
    key="model_type",
    config=SiglipVisionConfig,
    manifest=manifest,
    used=used,
    fields=fields,
    streamable=re.compile(r"(encoder\.layers\.\d+)\."),
    tables=frozenset({_POSITIONS}),
    rename=rename,
    published=published,
    described=lambda config: {"architectures": [CLASS_NAME]},
    traced=(
        Block(name="layer", paths=re.compile(r"encoder\.layers\.\d+"), streams=1, depth=1),
        Block(name="end", paths=re.compile("embeddings|post_layernorm")),
        Block(name="model", paths=re.compile("")),
    ),
)
