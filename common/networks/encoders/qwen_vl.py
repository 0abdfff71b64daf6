"""Qwen2.5-VL's language model, Qwen-Image's text encoder: configuration, key styles and manifest.

What is unusual about it:
- the configuration is flat in published folders and nested under `text_config` in newly saved ones;
- the keys start with `model.` in published files and with `model.language_model.` in others;
- in GGUF the names are llama.cpp's, for the same tensors: q and k keep their order of rows, unlike those of a Llama;
- the vision tower and `lm_head` are in the files and are not needed for text to image;
- q, k and v have biases, the output projection has none; fewer key than query heads;
- for text alone its three-axis RoPE has three equal positions, which is plain one-axis RoPE (half-split layout);
- the conditioning is the last hidden state *after* the final norm.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qwenimg.common.base.block import Block
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks import params
from qwenimg.common.networks.encoders import language_model
from qwenimg.common.networks.network import Network

MODEL_TYPE = "qwen2_5_vl"
_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
MFLUX = "encoder."
"""Before all names of mflux's."""
_NOT_NEEDED = (
    "model.visual.", "visual.", "lm_head.", "output.",
    "vision_tower.", "language_model.lm_head.",  # as mlx-vlm writes them
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class QwenVLConfig:
    """The language part of `text_encoder/config.json`. Defaults: Qwen2.5-VL-7B."""

    hidden_size: int = 3584
    intermediate_size: int = 18944
    num_hidden_layers: int = field(default=28, metadata={"max": 1000})
    num_attention_heads: int = field(default=28, metadata={"max": 1024})
    num_key_value_heads: int = field(default=4, metadata={"max": 1024})
    vocab_size: int = field(default=152064, metadata={"max": 2**20})
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6

    def __post_init__(self) -> None:
        for name, width in (("hidden_size", self.hidden_size), ("num_key_value_heads", self.num_attention_heads)):
            divisor = self.num_attention_heads if name == "hidden_size" else self.num_key_value_heads
            if width % divisor:
                raise ModelError(f"{name}: {width} is not a multiple of {divisor}")
        if not self.rms_norm_eps > 0 or not self.rope_theta > 1:
            raise ModelError(f"rms_norm_eps {self.rms_norm_eps} or rope_theta {self.rope_theta} is out of range")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def taps(self) -> tuple[int, ...]:
        """None: the states after the final norm condition an image."""
        return ()

    @property
    def state_size(self) -> int:
        """The channels of a token's states."""
        return self.hidden_size


def language_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `QwenVLConfig` from a config.json. Raises ModelError for an unsupported value."""
    return language_model.language_fields(data, QwenVLConfig, MODEL_TYPE)


def manifest(config: QwenVLConfig) -> Manifest:
    """Return the shape of every tensor of the language model, by its key after the file's prefix (see `rename`)."""
    return language_model.manifest(config, _attention(config))


def rename(key: str) -> str | None:
    """Return the manifest key of a file's key in any known style; None if text to image does not need the tensor."""
    key = key.removeprefix(MFLUX)
    if key.startswith(_NOT_NEEDED) or key.endswith(language_model.COMPUTED):
        return None
    for prefix in _PREFIXES:
        if key.startswith(prefix):
            return key.removeprefix(prefix)
    return language_model.from_llama_cpp(key)


def _attention(config: QwenVLConfig) -> Manifest:
    width = config.hidden_size
    keys = config.num_key_value_heads * config.head_dim
    return params.merge(
        params.linear("q_proj", width, width),
        params.linear("k_proj", keys, width),
        params.linear("v_proj", keys, width),
        params.linear("o_proj", width, width, bias=False),
    )


NETWORK = Network(
    name="qwen_vl",
    role="text",
    kind=MODEL_TYPE,
    key="model_type",
    config=QwenVLConfig,
    manifest=manifest,
    fields=language_fields,
    blocks=re.compile(r"layers\.\d+\..*_proj\.weight"),
    streamable=re.compile(r"(layers\.\d+)\."),
    tables=frozenset({"embed_tokens.weight"}),
    rename=rename,
    traced=(
        Block(name="layer", paths=re.compile(r"layers\.\d+"), streams=1, depth=1),
        Block(name="model", paths=re.compile("")),
    ),
    published=lambda name: f"model.{name}",
    architectures=frozenset({"qwen2vl"}),
)
