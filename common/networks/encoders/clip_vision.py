"""CLIP's image encoders, those of IP-Adapters: configuration, manifest, and the form of their pictures.

What is unusual about them:
- two kinds are used: OpenCLIP's ViT-H and ViT-bigG, with the exact GELU; a file shows neither their heads (16 in both)
  nor their activation;
- the patches of 14 pixels are a convolution without bias; before them stands a class token, and positions are added;
- a norm, which files call `pre_layrnorm`, comes before the first layer; the states before the last layer have no norm;
- the embedding is the class token's last state after a norm, times a matrix without bias.

Source: A. Radford et al., Learning Transferable Visual Models From Natural Language Supervision (2021); the published
configurations of the two encoders.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from qwenimg.common.base.block import Block
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest, Shape
from qwenimg.common.base.text import clean
from qwenimg.common.networks import params
from qwenimg.common.networks.encoders import clip
from qwenimg.common.networks.encoders.clip import LayerSizes
from qwenimg.common.networks.network import Network
from qwenimg.common.weights.plan import ParamUse, ParamUses, stored_uses

CLASS_NAME = "CLIPVisionModelWithProjection"
MODEL_TYPE = "clip_vision_model"
ACTIVATIONS = ("gelu", "quick_gelu")
CHANNELS = 3
_HEADS = 16  # of every published encoder
_PREFIX = "vision_model."
_OF_TEXTS = ("text_model.", "text_projection.", "logit_scale")
_COMPUTED = ("embeddings.position_ids",)
_PATCHES = "embeddings.patch_embedding.weight"
_CLASS = "embeddings.class_embedding"
FIRST_INNER = "encoder.layers.0.mlp.fc1.weight"
"""The tensor that shows the width of the feed-forward."""


@dataclass(frozen=True, kw_only=True)
class PatchSizes(LayerSizes):
    """The sizes of an encoder that sees a square picture in square patches."""

    image_size: int
    patch_size: int

    @property
    def patches(self) -> int:
        """The number of patches of a picture."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def patch_values(self) -> int:
        """The numbers of one patch: channels, rows and columns."""
        return CHANNELS * self.patch_size**2


@dataclass(frozen=True, kw_only=True)
class CLIPVisionConfig(PatchSizes):
    """The fields of `image_encoder/config.json`. Defaults: ViT-H."""

    hidden_size: int = 1280
    intermediate_size: int = 5120
    projection_dim: int = 1024
    num_hidden_layers: int = field(default=32, metadata={"min": 2, "max": 1000})
    num_attention_heads: int = field(default=_HEADS, metadata={"max": 1024})
    image_size: int = field(default=224, metadata={"max": 4096})  # pixels a side
    patch_size: int = field(default=14, metadata={"max": 256})  # pixels a side
    hidden_act: str = ACTIVATIONS[0]
    layer_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        self.check_layers(ACTIVATIONS)
        if self.image_size % self.patch_size:
            raise ModelError(f"image_size {self.image_size} is not a multiple of patch_size {self.patch_size}")


VIT_H = CLIPVisionConfig()
VIT_BIG_G = CLIPVisionConfig(hidden_size=1664, intermediate_size=8192, projection_dim=1280, num_hidden_layers=48)


def fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `CLIPVisionConfig` from a config.json, of an encoder alone or of a whole CLIP. Raises
    ModelError for an unsupported value."""
    # transformers' own defaults, which a saved configuration may leave out
    usual = {
        "hidden_size": 768, "intermediate_size": 3072, "projection_dim": 512, "num_hidden_layers": 12,
        "num_attention_heads": 12, "patch_size": 32, "hidden_act": "quick_gelu",
    }  # fmt: skip
    known = fields_of_half(data, CLIPVisionConfig, MODEL_TYPE, "clip")
    return usual | known | ({"projection_dim": data["projection_dim"]} if "projection_dim" in data else {})


def fields_of_half(data: Mapping[str, Any], config: type[PatchSizes], kind: str, whole: str) -> dict[str, Any]:
    """Return the fields of `config` that a config.json has, of an image encoder alone, of the model type `kind`, or of
    a `whole` model with a text encoder too. Raises ModelError for an unsupported value."""
    if data.get("model_type", kind) not in (kind, whole):
        raise ModelError(f"model_type {clean(data['model_type'], 60)!r} is not supported; expected {kind!r}")
    own = data.get("vision_config") if data.get("model_type") == whole else data
    if not isinstance(own, Mapping):
        raise ModelError("vision_config is missing: it is the configuration of no image encoder")
    if own.get("num_channels", CHANNELS) != CHANNELS:
        raise ModelError(f"num_channels is {clean(own['num_channels'], 40)}; pictures have {CHANNELS}")
    return {name: own[name] for name in config.__dataclass_fields__ if name in own}


def manifest(config: CLIPVisionConfig) -> Manifest:
    """Return the shape of every tensor of the encoder, by its key without `vision_model.` (see `rename`)."""
    width = config.hidden_size
    return params.merge(
        {f"{_CLASS}.weight": (width,)},
        {_PATCHES: (width, CHANNELS, config.patch_size, config.patch_size)},
        {"embeddings.position_embedding.weight": (config.patches + 1, width)},
        params.affine("pre_layrnorm", width),
        params.repeat("encoder.layers", config.num_hidden_layers, clip.layer(config)),
        params.affine("post_layernorm", width),
        params.linear("visual_projection", config.projection_dim, width, bias=False),
    )


def used(config: CLIPVisionConfig, stored: Manifest) -> ParamUses:
    """Return all of `stored`, the kernel of the patches as a matrix and the class token as a table of one row."""
    width = config.hidden_size
    return stored_uses(stored) | {
        _PATCHES: ParamUse((width, config.patch_values)),
        f"{_CLASS}.weight": ParamUse((1, width)),
    }


def rename(key: str) -> str | None:
    """Return the manifest key of a file's key; None for a buffer and for CLIP's text half."""
    name = key.removeprefix(_PREFIX)
    name = f"{_CLASS}.weight" if name == _CLASS else name
    return None if name in _COMPUTED or key.startswith(_OF_TEXTS) else name


def published(name: str) -> str:
    """Return the name in published files of a name of the manifest."""
    name = name.removesuffix(".weight") if name.startswith(_CLASS) else name
    return name if name.startswith("visual_projection.") else _PREFIX + name


def is_in(names: Collection[str]) -> bool:
    """Return whether a file with tensors of these names has such an encoder."""
    return _PREFIX + _PATCHES in names and "visual_projection.weight" in names


def config_of(shapes: Mapping[str, Shape]) -> CLIPVisionConfig:
    """Return the configuration of an encoder whose tensors, by their names in a file, have these shapes. Raises
    ModelError."""
    wanted = {_PATCHES: 4, "embeddings.position_embedding.weight": 2, "visual_projection.weight": 2, FIRST_INNER: 2}
    named = named_shapes(shapes, rename, {published(name): rank for name, rank in wanted.items()}, "image encoder")
    width, _, patch, _ = named[_PATCHES]
    return CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=named[FIRST_INNER][0],
        projection_dim=named["visual_projection.weight"][0],
        num_hidden_layers=count_layers(named),
        image_size=math.isqrt(max(named["embeddings.position_embedding.weight"][0] - 1, 0)) * patch,
        patch_size=patch,
        hidden_act=ACTIVATIONS[1] if width == 1024 else ACTIVATIONS[0],  # OpenAI's ViT-L
    )


def named_shapes(
    shapes: Mapping[str, Shape], rename: Callable[[str], str | None], wanted: Mapping[str, int], title: str
) -> dict[str, Shape]:
    """Return `shapes` by the manifest's names. wanted: the rank of each tensor that shows a size, by its name in a
    file. Raises ModelError for one that is absent, empty or of another rank."""
    named = {name: shape for key, shape in shapes.items() if (name := rename(key)) is not None}
    for key, rank in wanted.items():
        shape = named.get(rename(key) or "", ())
        if len(shape) != rank or 0 in shape:
            raise ModelError(f"lacks tensor '{key}' of {rank} dimensions: it is no {title}")
    return named


def count_layers(names: Iterable[str]) -> int:
    """Return how many layers have tensors with these names of the manifest."""
    return len({match[1] for name in names if (match := re.match(r"encoder\.layers\.(\d{1,4})\.", name))})


NETWORK = Network(
    name="clip_vision",
    role="text",
    kind=MODEL_TYPE,
    key="model_type",
    config=CLIPVisionConfig,
    manifest=manifest,
    used=used,
    fields=fields,
    streamable=re.compile(r"(encoder\.layers\.\d+)\."),
    tables=frozenset({"embeddings.position_embedding.weight", f"{_CLASS}.weight"}),
    rename=rename,
    published=published,
    described=lambda config: {"architectures": [CLASS_NAME]},
    traced=(
        Block(name="layer", paths=re.compile(r"encoder\.layers\.\d+"), streams=1, depth=1),
        Block(name="end", paths=re.compile("embeddings|pre_layrnorm|post_layernorm|visual_projection")),
        Block(name="model", paths=re.compile("")),
    ),
)
