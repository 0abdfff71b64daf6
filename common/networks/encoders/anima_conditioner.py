"""Anima's text conditioner, which makes the text that its transformer sees of T5's token ids and a language model's
states: configuration and manifest.

What is unusual about it:
- it embeds T5's tokens itself; no T5 reads them. Its blocks attend to these tokens, then to the states of Qwen3;
- both kinds of tokens are counted from 0 by RoPE in halves, in the attention to the states too;
- its result is filled up with zeros to `min_sequence_length` tokens, which the transformer sees;
- its authors have it in the file of the transformer (`INSIDE`); diffusers has it in a folder.

Source: the reference class of diffusers, whose defaults are the published sizes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

from qwenimg.common.base.block import Block
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks import params
from qwenimg.common.networks.network import Network
from qwenimg.common.numbers import rope

CLASS_NAME = "AnimaTextConditioner"

INSIDE = "llm_adapter."
"""Before all of its names in the file of a transformer."""
EPS, THETA = 1e-6, 1e4


@dataclass(frozen=True, kw_only=True)
class ConditionerConfig:
    """The fields of `text_conditioner/config.json`."""

    source_dim: int = 1024
    target_dim: int = 1024
    model_dim: int = 1024
    num_layers: int = field(default=6, metadata={"max": 1000})
    num_attention_heads: int = field(default=16, metadata={"max": 1024})
    mlp_ratio: float = field(default=4.0, metadata={"min": 0.01, "max": 100})
    target_vocab_size: int = field(default=32128, metadata={"max": 2**20})
    use_self_attention: bool = True
    use_layer_norm: bool = False
    min_sequence_length: int = field(default=512, metadata={"max": 4096})

    def __post_init__(self) -> None:
        if self.model_dim != self.target_dim or not self.use_self_attention or self.use_layer_norm:
            raise ModelError(
                f"model_dim {self.model_dim} with target_dim {self.target_dim}, use_self_attention "
                f"{self.use_self_attention} and use_layer_norm {self.use_layer_norm} are not supported; expected one "
                "width, true and false"
            )
        if self.model_dim % self.num_attention_heads or self.head_dim % 2:
            raise ModelError(
                f"model_dim {self.model_dim} must be {self.num_attention_heads} num_attention_heads of an even width"
            )

    @property
    def head_dim(self) -> int:
        """The width of a head."""
        return self.model_dim // self.num_attention_heads

    # By the names that all text encoders have
    @property
    def hidden_size(self) -> int:
        return self.model_dim

    @property
    def intermediate_size(self) -> int:
        return int(self.model_dim * self.mlp_ratio + 1e-6)  # a ratio that a file's shapes show is rounded

    @property
    def vocab_size(self) -> int:
        return self.target_vocab_size


def manifest(config: ConditionerConfig) -> Manifest:
    """Return the shape of every tensor, by its key in the file of a transformer."""
    dim, hidden = config.model_dim, config.intermediate_size
    block = params.merge(
        params.norm("norm_self_attn", dim),
        params.under("self_attn", _attention(config, dim)),
        params.norm("norm_cross_attn", dim),
        params.under("cross_attn", _attention(config, config.source_dim)),
        params.norm("norm_mlp", dim),
        params.linear("mlp.0", hidden, dim),
        params.linear("mlp.2", dim, hidden),
    )
    whole = params.merge(
        {"embed.weight": (config.target_vocab_size, dim)},
        params.repeat("blocks", config.num_layers, block),
        params.linear("out_proj", dim, dim),
        params.norm("norm", dim),
    )
    return params.under(INSIDE.removesuffix("."), whole)


def _attention(config: ConditionerConfig, context: int) -> Manifest:
    dim = config.model_dim
    inputs = {"q_proj": dim, "k_proj": context, "v_proj": context, "o_proj": dim}
    return params.merge(
        *(params.linear(name, dim, width, bias=False) for name, width in inputs.items()),
        *(params.norm(name, config.head_dim) for name in ("q_norm", "k_norm")),
    )


def table(config: ConditionerConfig, length: int) -> rope.Table:
    """Return (cos, sin) [S D/2] for `length` tokens."""
    return rope.rope_table(np.arange(length)[:, None], (config.head_dim,), THETA)


NETWORK = Network(
    name="anima_conditioner",
    role="text",
    kind=CLASS_NAME,
    config=ConditionerConfig,
    manifest=manifest,
    blocks=re.compile(r"llm_adapter\.blocks\.\d+\.(?:\w+_attn\.\w_proj|mlp\.\d)\.weight"),
    streamable=re.compile(r"(llm_adapter\.blocks\.\d+)\."),
    tables=frozenset({f"{INSIDE}embed.weight"}),
    rename=lambda key: key if key.startswith(INSIDE) else INSIDE + key,
    published=lambda name: name.removeprefix(INSIDE),
    traced=(
        Block(name="block", paths=re.compile(r"llm_adapter\.blocks\.\d+"), streams=1, depth=1),
        Block(name="model", paths=re.compile("")),
    ),
    architectures=frozenset({"cosmos"}),
)
