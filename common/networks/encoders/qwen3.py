"""Qwen3, a language model as a text encoder: configuration and manifest.

What is unusual about it:
- each head of q and k goes through an RMSNorm before RoPE, which is plain and in half-split layout;
- the width of a head is a field of its own, so q is wider than the stream; fewer key than query heads; no bias;
- the conditioning is the states before the last layer, or those after several layers side by side, as the family
  says; later layers and the final norm are in the files and not loaded;
- where prompts are padded, pads see the real tokens only, and all their states condition an image too;
- the keys start with `model.` in published files, and with nothing where the model was saved alone; in GGUF the names
  are llama.cpp's, for the same tensors: q and k keep their order of rows.
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
from qwenimg.common.networks.encoders.language_model import LLAMA_CPP, from_llama_cpp
from qwenimg.common.networks.network import Network
from qwenimg.common.weights.plan import ParamUses, stored_uses

MODEL_TYPE = "qwen3"
_PREFIX, _NOT_NEEDED = "model.", ("lm_head.", "output.")
_LLAMA_CPP = {**LLAMA_CPP, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class Qwen3Config:
    """The fields of `text_encoder/config.json`. Defaults: Qwen3-4B."""

    hidden_size: int = 2560
    intermediate_size: int = 9728
    num_hidden_layers: int = field(default=36, metadata={"min": 2, "max": 1000})
    num_attention_heads: int = field(default=32, metadata={"max": 1024})
    num_key_value_heads: int = field(default=8, metadata={"max": 1024})
    head_dim: int = field(default=128, metadata={"max": 1024})
    vocab_size: int = field(default=151936, metadata={"max": 2**20})
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    attention_bias: bool = False
    # The layers behind which states are taken; (): the last but one
    taps: tuple[int, ...] = field(default=(), metadata={"in_files": False})

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim {self.head_dim} is odd: RoPE turns pairs of channels")
        if self.attention_bias:
            raise ModelError("attention_bias is true: projections with a bias are not supported")
        if max(self.taps, default=0) >= self.num_hidden_layers:
            raise ModelError(
                f"num_hidden_layers {self.num_hidden_layers} is too small: states behind layer {max(self.taps)} of "
                "more layers condition an image"
            )
        if not self.rms_norm_eps > 0 or not self.rope_theta > 1:
            raise ModelError(f"rms_norm_eps {self.rms_norm_eps} or rope_theta {self.rope_theta} is out of range")

    @property
    def used_layers(self) -> int:
        """The layers that are computed."""
        return max(self.taps, default=self.num_hidden_layers - 1)

    @property
    def state_size(self) -> int:
        """The channels of a token's states."""
        return self.hidden_size * max(1, len(self.taps))


def fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `Qwen3Config` from a config.json. Raises ModelError for an unsupported value."""
    fields = language_model.language_fields(data, Qwen3Config, MODEL_TYPE)
    fields.pop("taps", None)
    return fields


def manifest(config: Qwen3Config) -> Manifest:
    """Return the shape of every tensor of the language model, by its key after the file's prefix (see `rename`)."""
    return language_model.manifest(config, _attention(config))


def uses(stored: Manifest, layers: int) -> ParamUses:
    """Return `stored` with only the first `layers`, and without the final norm."""
    numbers = {key: int(match[1]) for key in stored if (match := _LAYER.match(key))}
    return stored_uses(
        {key: shape for key, shape in stored.items() if numbers.get(key, 0) < layers and not key.startswith("norm.")}
    )


def rename(key: str) -> str | None:
    """Return the manifest key of a file's key in any style; None for the output layer."""
    if key.startswith(_NOT_NEEDED) or key.endswith(language_model.COMPUTED):
        return None
    return from_llama_cpp(key.removeprefix(_PREFIX), _LLAMA_CPP)


def _attention(config: Qwen3Config) -> Manifest:
    queries, keys = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    return params.merge(
        params.linear("q_proj", queries, config.hidden_size, bias=False),
        params.linear("k_proj", keys, config.hidden_size, bias=False),
        params.linear("v_proj", keys, config.hidden_size, bias=False),
        params.linear("o_proj", config.hidden_size, queries, bias=False),
        params.norm("q_norm", config.head_dim),
        params.norm("k_norm", config.head_dim),
    )


NETWORK = Network(
    name="qwen3",
    role="text",
    kind=MODEL_TYPE,
    key="model_type",
    config=Qwen3Config,
    manifest=manifest,
    used=lambda config, stored: uses(stored, config.used_layers),
    fields=fields,
    blocks=re.compile(r"layers\.\d+\..*_proj\.weight"),
    streamable=re.compile(r"(layers\.\d+)\."),
    tables=frozenset({"embed_tokens.weight"}),
    rename=rename,
    traced=(
        Block(name="layer", paths=re.compile(r"layers\.\d+"), streams=1, depth=1),
        Block(name="model", paths=re.compile("")),
    ),
    published=lambda name: _PREFIX + name,
    architectures=frozenset({"qwen3"}),
)
