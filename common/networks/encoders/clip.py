"""CLIP's text encoders, those of Stable Diffusion: configuration, key styles, manifest, and which states are used.

What is unusual about them:
- three kinds: ViT-L (quick_gelu), OpenCLIP-H cut to 23 of its 24 layers (gelu), and bigG with a projection (gelu);
- keys start with `text_model.` in published files; transformers 5 leaves it out for a model without projection;
- `position_ids`, a buffer, is in older files;
- attention is causal and padding is not masked: the padded positions are part of the conditioning. Stable Cascade masks
  it, and takes the states of the padded positions all the same;
- SD 1.x and 2.x use the last state after the final norm, SDXL and SD3 the last but one without it, Flux.1 none;
- the pooled vector is that of the end token: the first with `eos_token_id`, or where that is the wrong 2 of older
  configurations the largest id, which is the same token in CLIP's own vocabulary;
- vectors of textual inversion take the places of tokens, before the positions are added. Such a place has the id of the
  start token, so that the end token is found whatever stands before it.

Source: A. Radford et al., Learning Transferable Visual Models From Natural Language Supervision (2021); the published
configurations of SD 1.5, SD 2.1 and SDXL 1.0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qwenimg.common.base.block import Block
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.base.text import clean
from qwenimg.common.networks import params
from qwenimg.common.networks.network import Network

CLASS_NAMES = ("CLIPTextModel", "CLIPTextModelWithProjection")
MODEL_TYPE = "clip_text_model"
ACTIVATIONS = ("quick_gelu", "gelu")
Place = tuple[int, int]  # of a token: the chunk, and the position in it
LEGACY_EOS = 2  # the eos_token_id of older configurations, whatever the vocabulary

_PREFIX = "text_model."
_NOT_NEEDED = ("embeddings.position_ids",)
_OF_PICTURES = ("vision_model.", "visual_projection.", "logit_scale")


class LayerSizes:
    """The sizes of a layer, in the text encoder and in image encoders."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    hidden_act: str
    layer_norm_eps: float

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def check_layers(self, activations: tuple[str, ...]) -> None:
        """Raise ModelError for sizes of no layer, and for another activation."""
        if self.hidden_size % self.num_attention_heads:
            raise ModelError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}"
            )
        if self.hidden_act not in activations:
            raise ModelError(
                f"hidden_act {clean(self.hidden_act, 40)!r} is not supported; expected one of {activations}"
            )
        if not self.layer_norm_eps > 0:
            raise ModelError(f"layer_norm_eps {self.layer_norm_eps} is out of range")


@dataclass(frozen=True, kw_only=True)
class CLIPConfig(LayerSizes):
    """The fields of `text_encoder/config.json`. Defaults: ViT-L in SD 1.5.

    `projection_dim` is None for a model without projection, although its file may give a number: see `text_fields`.
    """

    vocab_size: int = field(default=49408, metadata={"max": 2**20})
    hidden_size: int = 768
    intermediate_size: int = 3072
    projection_dim: int | None = None
    num_hidden_layers: int = field(default=12, metadata={"max": 1000})
    num_attention_heads: int = field(default=12, metadata={"max": 1024})
    max_position_embeddings: int = field(default=77, metadata={"min": 77})  # a chunk of a prompt has 77 tokens
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5
    eos_token_id: int = field(default=LEGACY_EOS, metadata={"min": 0, "max": 2**20})
    masks_padding: bool = field(default=False, metadata={"in_files": False})  # True: no token sees padding

    def __post_init__(self) -> None:
        self.check_layers(ACTIVATIONS)

    @property
    def pooled_dim(self) -> int:
        """The width of the pooled vector."""
        return self.projection_dim or self.hidden_size


VIT_L = CLIPConfig()
OPEN_CLIP_H = CLIPConfig(
    hidden_size=1024, intermediate_size=4096, num_hidden_layers=23, num_attention_heads=16, hidden_act="gelu"
)
OPEN_CLIP_BIG_G = CLIPConfig(
    hidden_size=1280,
    intermediate_size=5120,
    projection_dim=1280,
    num_hidden_layers=32,
    num_attention_heads=20,
    hidden_act="gelu",
)


def text_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `CLIPConfig` from a config.json. Raises ModelError for an unsupported value.

    The class in `architectures` says whether there is a projection: a CLIPTextModel has none, whatever its
    `projection_dim`.
    """
    if data.get("model_type", MODEL_TYPE) != MODEL_TYPE:
        raise ModelError(f"model_type {clean(data['model_type'], 60)!r} is not supported; expected {MODEL_TYPE!r}")
    architectures = data.get("architectures") or [CLASS_NAMES[0]]
    if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in CLASS_NAMES:
        raise ModelError(f"architectures {clean(architectures, 60)} is not supported; expected one of {CLASS_NAMES}")
    if data.get("use_attention_mask"):
        raise ModelError("use_attention_mask is true: a text encoder that masks padding is not supported")
    values = {name: data[name] for name in CLIPConfig.__dataclass_fields__ if name in data}
    # transformers' own defaults, which a saved configuration may leave out
    return {"projection_dim": 512} | values if architectures[0] == CLASS_NAMES[1] else values | {"projection_dim": None}


def manifest(config: CLIPConfig) -> Manifest:
    """Return the shape of every tensor of the text encoder, by its key without `text_model.` (see `rename`)."""
    width, projection = config.hidden_size, config.projection_dim
    return params.merge(
        {"embeddings.token_embedding.weight": (config.vocab_size, width)},
        {"embeddings.position_embedding.weight": (config.max_position_embeddings, width)},
        params.repeat("encoder.layers", config.num_hidden_layers, layer(config)),
        params.affine("final_layer_norm", width),
        params.linear("text_projection", projection, width, bias=False) if projection else {},
    )


def rename(key: str) -> str | None:
    """Return the manifest key of a file's key in either style; None for a buffer and for CLIP's vision half."""
    name = key.removeprefix(_PREFIX)
    return None if name in _NOT_NEEDED or name.startswith(_OF_PICTURES) else name


def published(name: str) -> str:
    """Return the name in published files of a name of the manifest."""
    return name if name.startswith("text_projection.") else _PREFIX + name


def eos_position(config: CLIPConfig, ids: Sequence[int]) -> int:
    """Return the pooled state's index: the first end token, or with `LEGACY_EOS` the largest id. Raises ModelError."""
    wanted = max(ids) if config.eos_token_id == LEGACY_EOS else config.eos_token_id
    if wanted not in ids:
        raise ModelError(
            f"text encoder: its eos_token_id {wanted} is not in what the tokenizer gives: use the tokenizer and the "
            "config.json of one model"
        )
    return list(ids).index(wanted)


def used_states(config: CLIPConfig, penultimate: bool, clip_skip: int = 0) -> tuple[int, bool]:
    """Return how many of the last layers are left out, and whether the final norm follows. `penultimate`: the model
    takes the last state but one, without the norm. `clip_skip` counts as in diffusers: 0 is the model's default.
    Raises UsageError if no layer would remain."""
    skipped = clip_skip + 1 if penultimate else clip_skip
    if clip_skip < 0 or skipped >= config.num_hidden_layers:
        most = config.num_hidden_layers - (2 if penultimate else 1)
        raise UsageError(f"--clip-skip {clip_skip}: this text encoder allows 0 to {most}")
    return skipped, not penultimate


def layer(config: LayerSizes) -> Manifest:
    """Return the shapes of the tensors of a layer."""
    width, inner = config.hidden_size, config.intermediate_size
    return params.merge(
        params.affine("layer_norm1", width),
        *(params.linear(f"self_attn.{name}_proj", width, width) for name in ("q", "k", "v", "out")),
        params.affine("layer_norm2", width),
        params.linear("mlp.fc1", inner, width),
        params.linear("mlp.fc2", width, inner),
    )


NETWORK = Network(
    name="clip",
    role="text",
    kind=MODEL_TYPE,
    key="model_type",
    config=CLIPConfig,
    manifest=manifest,
    fields=text_fields,
    blocks=re.compile(r"encoder\.layers\.\d+\..*\.weight"),
    streamable=re.compile(r"(encoder\.layers\.\d+)\."),
    tables=frozenset({"embeddings.token_embedding.weight", "embeddings.position_embedding.weight"}),
    rename=rename,
    traced=(
        Block(name="layer", paths=re.compile(r"encoder\.layers\.\d+"), streams=1, depth=1),
        Block(name="model", paths=re.compile("")),
    ),
    published=published,
    described=lambda config: {"architectures": [CLASS_NAMES[1 if config.projection_dim else 0]]},
)
