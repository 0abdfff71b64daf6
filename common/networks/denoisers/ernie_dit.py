"""ERNIE-Image's transformer: configuration and manifest.

What is unusual about it:
- one stream, image tokens before text tokens; text has no pads, and no more than one layer of its own;
- one modulation for all blocks, of shift, scale and gate, made with SiLU; that of the final norm is made without;
- the norms that are modulated are RMSNorms with a gain; attention and feed-forward (GELU by its definition) have no
  bias;
- the sinusoid of the time is as wide as the stream, sines first;
- RoPE is no rotation: a head's first half is paired with its second, and the two channels of a pair turn by angles of
  their own, since each angle is that of two neighbours; text counts along the first axis, where an image stands at the
  text's length, with rows and columns from 0;
- a latent in patches is a token: the layer of the image is a 1x1 kernel.

Source: the published configurations of ERNIE-Image and -Turbo, which differ in their weights alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from qwenimg.common.base.block import Block, CachedBlocks
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks import params
from qwenimg.common.networks.denoisers.diffusion_transformer import attention, vector_embedding
from qwenimg.common.networks.layout import with_parts
from qwenimg.common.networks.network import Network
from qwenimg.common.weights.plan import ParamUse, ParamUses, stored_uses

CLASS_NAME = "ErnieImageTransformer2DModel"

KERNEL = "x_embedder.proj.weight"
# Parts of names that only mflux has
_MFLUX = {
    "adaln_modulation.": "adaLN_modulation.1.",
    ".self_attention.to_out.weight": ".self_attention.to_out.0.weight",
}


@dataclass(frozen=True, kw_only=True)
class ErnieConfig:
    """The fields of `transformer/config.json`; the defaults are the published 8 B models'."""

    hidden_size: int = 4096
    num_attention_heads: int = field(default=32, metadata={"max": 1024})
    num_layers: int = field(default=36, metadata={"max": 1000})
    ffn_hidden_size: int = 12288
    in_channels: int = 128
    out_channels: int = 128
    patch_size: int = 1
    text_in_dim: int = 3072
    rope_theta: int = 256
    rope_axes_dim: tuple[int, ...] = (32, 48, 48)
    eps: float = 1e-6
    qk_layernorm: bool = True

    def __post_init__(self) -> None:
        expected = {"patch_size": 1, "out_channels": self.in_channels, "qk_layernorm": True}
        for name, value in expected.items():
            if getattr(self, name) != value:
                raise ModelError(f"{name} is {getattr(self, name)}: not supported; expected {value}")
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ModelError(
                f"hidden_size {self.hidden_size} must be an even width for each of num_attention_heads "
                f"{self.num_attention_heads}"
            )
        if len(self.rope_axes_dim) != 3 or sum(self.rope_axes_dim) != self.head_dim:
            raise ModelError(
                f"rope_axes_dim {list(self.rope_axes_dim)} must be three numbers that add up to the width of a head, "
                f"hidden_size {self.hidden_size} / num_attention_heads {self.num_attention_heads}"
            )
        if any(axis % 2 for axis in self.rope_axes_dim):
            raise ModelError(
                f"rope_axes_dim {list(self.rope_axes_dim)} must be even: RoPE has an angle for two channels"
            )
        if not self.eps > 0:
            raise ModelError(f"eps {self.eps} is not positive")

    @property
    def dim(self) -> int:
        return self.hidden_size

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def has_text_layer(self) -> bool:
        """True if text states have another width than the stream."""
        return self.text_in_dim != self.hidden_size


def manifest(config: ErnieConfig) -> Manifest:
    """Return the shape of every tensor of the checkpoint."""
    dim = config.dim
    return params.merge(
        params.conv("x_embedder.proj", dim, config.in_channels, 1, 1),
        params.linear("text_proj", dim, config.text_in_dim, bias=False) if config.has_text_layer else {},
        vector_embedding("time_embedding", dim, dim),
        params.linear("adaLN_modulation.1", 6 * dim, dim),
        params.repeat("layers", config.num_layers, _block(config)),
        params.linear("final_norm.linear", 2 * dim, dim),
        params.linear("final_linear", config.out_channels, dim),
    )


def used(config: ErnieConfig, stored: Manifest) -> ParamUses:
    """Return all of `stored`, the kernel of the image's layer as a matrix."""
    return {key: ParamUse(use.shape[:2]) if key == KERNEL else use for key, use in stored_uses(stored).items()}


def rename(key: str) -> str:
    """Return the manifest key of a file's key, in diffusers' names or mflux's."""
    return with_parts(key, _MFLUX)


def _block(config: ErnieConfig) -> Manifest:
    dim, hidden = config.dim, config.ffn_hidden_size
    return params.merge(
        *(params.norm(name, dim) for name in ("adaLN_sa_ln", "adaLN_mlp_ln")),
        attention("self_attention", dim, config.head_dim, bias=False),
        *(params.linear(f"mlp.{name}", hidden, dim, bias=False) for name in ("gate_proj", "up_proj")),
        params.linear("mlp.linear_fc2", dim, hidden, bias=False),
    )


NETWORK = Network(
    name="ernie_dit",
    role="transformer",
    kind=CLASS_NAME,
    config=ErnieConfig,
    manifest=manifest,
    used=used,
    ignored=frozenset({"lora_rank", "use_lora"}),  # left over from the training of Turbo
    blocks=re.compile(r"layers\.(\d+)\.(?:self_attention|mlp)\..*\.weight"),
    streamable=re.compile(r"(layers\.\d+)\."),
    lora_prefix="diffusion_model.",
    compiled=re.compile(r"layers\.\d+"),
    cached_blocks=lambda config: CachedBlocks.but_first("layers", config.num_layers),
    traced=(
        Block(name="block", paths=re.compile(r"layers\.\d+"), streams=1, depth=1),
        Block(name="time", paths=re.compile("time_embedding")),
        Block(name="start", paths=re.compile("x_embedder.proj|text_proj")),
        Block(name="head", paths=re.compile("final_norm|final_linear")),
        Block(name="model", paths=re.compile("")),
    ),
    rename=rename,
    mflux_signs=("adaln_modulation.",),
    channels_last="adaln_modulation.",
    architectures=frozenset({"ernie_image"}),
)
