"""Qwen-Image-2.1's transformer: configuration and manifest.

What is unusual about it:
- one stream in the order of the prompt: text, with the latent tokens of each reference image in place of the picture's
  slots in the prompt, and the image last; a slot stands for 2 x 2 latent tokens, which come row by row of the image;
- text and references are modulated for time 0, and see only what is before them (an image also all of itself). They do
  not depend on the step, so their keys and values are made once and kept (`--step-cache` is something else);
- one modulation for all blocks, of two scales and two gates through a tanh, and no shift;
- the gain of the text's norm is stored minus one; no layer has a bias; a latent is a token, without patches;
- RoPE turns adjacent pairs by (frame, row, column): text counts on all three, an image stands at the frame that the
  text has reached, with rows and columns around zero, and moves the count on by its longer side.

Source: the published configurations of Qwen-Image-2.1 and -2.1-Turbo, which differ in their weights alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from qwenimg.common.base.block import Block, CachedBlocks
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks import params
from qwenimg.common.networks.denoisers.diffusion_transformer import attention, vector_embedding
from qwenimg.common.networks.network import Network

CLASS_NAME = "QwenImage21Transformer2DModel"

TIME_CHANNELS = 256  # of the sinusoid
ROPE_THETA = 10000.0
SLOT = 2  # latent tokens a side of a picture's slot in the prompt


@dataclass(frozen=True, kw_only=True)
class Qwen21Config:
    """The fields of `transformer/config.json`; the defaults are the published 7 B model's."""

    patch_size: int = 1
    in_channels: int = 64
    out_channels: int | None = 64
    num_layers: int = field(default=32, metadata={"max": 1000})
    attention_head_dim: int = field(default=128, metadata={"max": 1024})
    num_attention_heads: int = field(default=32, metadata={"max": 1024})
    context_in_dim: int = 4096
    mlp_ratio: int = field(default=3, metadata={"max": 64})
    axes_dims_rope: tuple[int, ...] = (16, 56, 56)
    eps: float = 1e-6
    causal_condition: bool = True

    def __post_init__(self) -> None:
        expected = {"patch_size": 1, "out_channels": self.in_channels, "causal_condition": True}
        for name, value in expected.items():
            if (given := getattr(self, name)) not in (value, None):
                raise ModelError(f"{name} is {given}: not supported; expected {value}")
        if len(self.axes_dims_rope) != 3 or sum(self.axes_dims_rope) != self.attention_head_dim:
            raise ModelError(
                f"axes_dims_rope {list(self.axes_dims_rope)} must be three numbers that add up to attention_head_dim "
                f"{self.attention_head_dim}"
            )
        if any(axis % 2 for axis in self.axes_dims_rope):
            raise ModelError(f"axes_dims_rope {list(self.axes_dims_rope)} must be even: RoPE turns pairs of channels")
        if not self.eps > 0:
            raise ModelError(f"eps {self.eps} is not positive")

    @property
    def dim(self) -> int:
        return self.attention_head_dim * self.num_attention_heads

    @property
    def hidden(self) -> int:
        """The width of the feed-forward."""
        return self.mlp_ratio * self.dim


def manifest(config: Qwen21Config) -> Manifest:
    """Return the shape of every tensor of the checkpoint."""
    dim = config.dim
    return params.merge(
        vector_embedding("time_text_embed.timestep_embedder", dim, TIME_CHANNELS, bias=False),
        params.norm("txt_in.text_norm", config.context_in_dim),
        _matrix("txt_in.in_layer", dim, config.context_in_dim),
        _matrix("txt_in.out_layer", dim, dim),
        _matrix("img_in", dim, config.in_channels),
        _matrix("modulation.1", 4 * dim, dim),
        params.repeat("transformer_blocks", config.num_layers, _block(config)),
        _matrix("norm_out.linear", dim, dim),
        _matrix("proj_out", config.in_channels, dim),
    )


def _matrix(name: str, outputs: int, inputs: int) -> Manifest:
    return params.linear(name, outputs, inputs, bias=False)


def _block(config: Qwen21Config) -> Manifest:
    dim = config.dim
    return params.merge(
        attention("attn", dim, config.attention_head_dim, bias=False),
        *(_matrix(f"img_mlp.{name}", config.hidden, dim) for name in ("proj", "gate_layer")),
        _matrix("img_mlp.out", dim, config.hidden),
    )


NETWORK = Network(
    name="qwen21_dit",
    role="transformer",
    kind=CLASS_NAME,
    config=Qwen21Config,
    manifest=manifest,
    blocks=re.compile(r"transformer_blocks\.(\d+)\.(?:attn|img_mlp)\..*\.weight"),
    streamable=re.compile(r"(transformer_blocks\.\d+)\."),
    lora_prefix="diffusion_model.",
    compiled=re.compile(r"transformer_blocks\.\d+"),
    cached_blocks=lambda config: CachedBlocks.but_first("transformer_blocks", config.num_layers),
    traced=(
        Block(name="block", paths=re.compile(r"transformer_blocks\.\d+"), streams=1, depth=1),
        Block(name="context", paths=re.compile(r"transformer_blocks\.\d+"), method="run_context", streams=1),
        Block(name="time", paths=re.compile(r"time_text_embed\.timestep_embedder")),
        Block(name="start", paths=re.compile("img_in|txt_in")),
        Block(name="head", paths=re.compile("norm_out|proj_out")),
        Block(name="model", paths=re.compile("")),
    ),
    architectures=frozenset({"qwen_image"}),
)
