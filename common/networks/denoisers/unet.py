"""Stable Diffusion's UNet (UNet2DConditionModel): configuration and manifest.

What is unusual about it:
- the configuration's `attention_head_dim` is the number of heads;
- the time enters every residual block between its two convolutions, as one number per channel;
- every result of the down blocks is kept and concatenated to the channels in the up blocks, so an up block starts wider
  than it ends, and image sides that do not halve evenly come back to the size of the kept result;
- each transformer block attends to the pixels, then to the text; its feed-forward is a GELU gate (erf);
- the two projections around the transformer blocks are stored as 1x1 convolutions or as linear layers, which compute
  the same;
- SDXL adds the pooled text and six sizes (the refiner: five) to the time: `text_time`.

Source: the published configurations of Stable Diffusion 1.5, 2.1, SDXL base and refiner.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from qwenimg.common.base.block import Block, CachedBlocks
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.base.text import clean
from qwenimg.common.networks import params
from qwenimg.common.networks.network import Network
from qwenimg.common.weights.plan import ParamUse, ParamUses

CLASS_NAME = "UNet2DConditionModel"
# Fields without effect here: dropout is for training, attention scores are always float32 at least, and the number of
# heads of an addition embedding belongs to another type than `text_time`.
IGNORED_CONFIG = frozenset({"dropout", "upcast_attention", "addition_embed_type_num_heads"})
# Fields that must have this value, which is the default, since the forward does nothing else.
FIXED_CONFIG: Mapping[str, object] = {
    "act_fn": "silu",
    "attention_type": "default",
    "center_input_sample": False,
    "class_embed_type": None,
    "class_embeddings_concat": False,
    "conv_in_kernel": 3,
    "conv_out_kernel": 3,
    "cross_attention_norm": None,
    "downsample_padding": 1,
    "dual_cross_attention": False,
    "encoder_hid_dim": None,
    "encoder_hid_dim_type": None,
    "mid_block_only_cross_attention": None,
    "mid_block_scale_factor": 1,
    "mid_block_type": "UNetMidBlock2DCrossAttn",
    "num_attention_heads": None,
    "num_class_embeds": None,
    "only_cross_attention": False,
    "resnet_out_scale_factor": 1,
    "resnet_skip_time_act": False,
    "resnet_time_scale_shift": "default",
    "reverse_transformer_layers_per_block": None,
    "time_cond_proj_dim": None,
    "time_embedding_act_fn": None,
    "time_embedding_dim": None,
    "time_embedding_type": "positional",
    "timestep_post_act": None,
}
PER_BLOCK = ("layers_per_block", "attention_head_dim", "transformer_layers_per_block")

TRANSFORMER_NORM_EPS = 1e-6  # for the group norm in front of the transformer blocks
LAYER_NORM_EPS = 1e-5
MLP_RATIO = 4
_PLAIN = ("DownBlock2D", "UpBlock2D")
_CROSS = ("CrossAttnDownBlock2D", "CrossAttnUpBlock2D")


class Level(NamedTuple):
    """One down, mid or up block."""

    resnets: tuple[tuple[int, int], ...]  # channels in and out of each residual block
    width: int  # channels out
    depth: int  # transformer blocks in each attention; 0 where the block has none
    heads: int
    resampled: bool  # whether it ends in a down- or upsampler


@dataclass(frozen=True, kw_only=True)
class UNetConfig:
    """The fields of `unet/config.json` after `unet_fields`; the defaults are the reference class's."""

    in_channels: int = field(default=4, metadata={"max": 1024})
    out_channels: int = field(default=4, metadata={"max": 1024})
    sample_size: int | None = None
    block_out_channels: tuple[int, ...] = (320, 640, 1280, 1280)
    down_block_types: tuple[str, ...] = (_CROSS[0], _CROSS[0], _CROSS[0], _PLAIN[0])
    up_block_types: tuple[str, ...] = (_PLAIN[1], _CROSS[1], _CROSS[1], _CROSS[1])
    layers_per_block: tuple[int, ...] = field(default=(2, 2, 2, 2), metadata={"max": 64})
    transformer_layers_per_block: tuple[int, ...] = field(default=(1, 1, 1, 1), metadata={"max": 256})
    attention_head_dim: tuple[int, ...] = field(default=(8, 8, 8, 8), metadata={"max": 1024})
    cross_attention_dim: int = 1280
    use_linear_projection: bool = False
    norm_num_groups: int = 32
    norm_eps: float = 1e-5
    flip_sin_to_cos: bool = True
    freq_shift: int = field(default=0, metadata={"min": 0, "max": 1})
    addition_embed_type: str | None = None
    addition_time_embed_dim: int | None = None
    projection_class_embeddings_input_dim: int | None = None

    def __post_init__(self) -> None:
        count = len(self.block_out_channels)
        for name in (*PER_BLOCK, "down_block_types", "up_block_types"):
            if not count or len(getattr(self, name)) != count:
                raise ModelError(f"{name} has {len(getattr(self, name))} entries, block_out_channels {count}")
        for name, known in (("down_block_types", 0), ("up_block_types", 1)):
            for kind in getattr(self, name):
                if kind not in (_PLAIN[known], _CROSS[known]):
                    expected = f"expected {_PLAIN[known]} or {_CROSS[known]}"
                    raise ModelError(f"{name}: {clean(kind, 60)!r} is not supported; {expected}")
        if not self.norm_eps > 0:
            raise ModelError(f"norm_eps {self.norm_eps} must be positive")
        self._check_widths()
        self._check_addition()

    def _check_widths(self) -> None:
        for level in (*self.down, self.mid, *self.up):
            for width in {width for resnet in level.resnets for width in resnet}:
                if width % self.norm_num_groups:
                    raise ModelError(f"norm_num_groups {self.norm_num_groups} does not divide {width} channels")
            if level.depth and level.width % level.heads:
                raise ModelError(f"attention_head_dim {level.heads} (heads) does not divide {level.width} channels")
        if self.time_channels % 2 or self.time_channels <= 2 * self.freq_shift:
            least = f"an even number above {2 * self.freq_shift}"
            raise ModelError(f"block_out_channels begin with {self.time_channels}: the time needs {least}")

    def _check_addition(self) -> None:
        kind, sizes = self.addition_embed_type, self.addition_time_embed_dim
        if kind not in (None, "text_time"):
            raise ModelError(f"addition_embed_type {clean(kind, 40)!r} is not supported; expected null or 'text_time'")
        if kind is not None and (sizes is None or self.projection_class_embeddings_input_dim is None):
            raise ModelError("text_time needs addition_time_embed_dim and projection_class_embeddings_input_dim")
        if kind is not None and sizes is not None and (sizes % 2 or sizes <= 2 * self.freq_shift):
            raise ModelError(f"addition_time_embed_dim {sizes} must be even and above {2 * self.freq_shift}")

    @property
    def time_channels(self) -> int:
        """The number of sinusoids of the time."""
        return self.block_out_channels[0]

    @property
    def time_width(self) -> int:
        """The channels of the time embedding."""
        return 4 * self.block_out_channels[0]

    @property
    def down(self) -> tuple[Level, ...]:
        widths, levels = self.block_out_channels, []
        for i, width in enumerate(widths):
            before = widths[i - 1] if i else widths[0]
            resnets = tuple((width if j else before, width) for j in range(self.layers_per_block[i]))
            depth = self.transformer_layers_per_block[i] if self.down_block_types[i] == _CROSS[0] else 0
            levels.append(Level(resnets, width, depth, self.attention_head_dim[i], i + 1 < len(widths)))
        return tuple(levels)

    @property
    def skips(self) -> tuple[tuple[int, int], ...]:
        """The results of the down path that the up blocks join, in their order: the channels of each, and how often
        its sides were halved."""
        widths = self.block_out_channels
        first = (widths[0], *widths)
        return tuple(
            (width, i)
            for i, level in enumerate(self.down)
            for width in (first[i], *(outputs for _, outputs in level.resnets))
        )

    @property
    def mid(self) -> Level:
        width = self.block_out_channels[-1]
        depth, heads = self.transformer_layers_per_block[-1], self.attention_head_dim[-1]
        return Level(((width, width), (width, width)), width, depth, heads, False)

    @property
    def up(self) -> tuple[Level, ...]:
        """The up blocks. Each residual block also gets a result of the down blocks, after its other channels."""
        widths, levels, last = self.block_out_channels, [], len(self.block_out_channels) - 1
        for i, kind in zip(range(last, -1, -1), self.up_block_types, strict=True):
            width, before, skipped = widths[i], widths[min(i + 1, last)], widths[max(i - 1, 0)]
            count = self.layers_per_block[i] + 1
            skips = [skipped if j + 1 == count else width for j in range(count)]
            resnets = tuple(((width if j else before) + skip, width) for j, skip in enumerate(skips))
            depth = self.transformer_layers_per_block[i] if kind == _CROSS[1] else 0
            levels.append(Level(resnets, width, depth, self.attention_head_dim[i], i > 0))
        return tuple(levels)


def unet_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `UNetConfig` from a config.json: one number for all blocks becomes one for each. Raises
    ModelError for an unsupported value."""
    fields = {key: value for key, value in data.items() if key not in FIXED_CONFIG}
    for key in FIXED_CONFIG.keys() & data.keys():
        _check_fixed(key, data[key])
    blocks = data.get("block_out_channels", UNetConfig.block_out_channels)
    count = len(blocks) if isinstance(blocks, (list, tuple)) else 0
    for key in PER_BLOCK:
        value = data.get(key, getattr(UNetConfig, key)[0])
        fields[key] = value if isinstance(value, (list, tuple)) else [value] * count
    return fields


def _check_fixed(key: str, value: object) -> None:
    wanted = FIXED_CONFIG[key]
    values = value if isinstance(value, (list, tuple)) and value else [value]  # one for each block
    off = wanted in (None, False)
    if any(not (item is None or item is False) if off else item != wanted for item in values):
        expected = "null" if wanted is None else str(wanted).lower() if isinstance(wanted, bool) else repr(wanted)
        raise ModelError(f"{key} is {clean(repr(value), 60)}: not supported; expected {expected}")


def manifest(config: UNetConfig) -> Manifest:
    """Return the shape of every tensor of the checkpoint, by its key in diffusers layout."""
    width = config.block_out_channels[0]
    up = (params.under(f"up_blocks.{i}", _level(config, level, "up")) for i, level in enumerate(config.up))
    return params.merge(
        half(config),
        *up,
        params.affine("conv_norm_out", width),
        params.conv("conv_out", config.out_channels, width, 3, 3),
    )


def half(config: UNetConfig) -> Manifest:
    """Return the shapes of the tensors up to the mid block, which a ControlNet has too."""
    time = config.time_width
    parts = [
        params.conv("conv_in", config.block_out_channels[0], config.in_channels, 3, 3),
        params.linear("time_embedding.linear_1", time, config.time_channels),
        params.linear("time_embedding.linear_2", time, time),
    ]
    if config.projection_class_embeddings_input_dim is not None and config.addition_embed_type is not None:
        parts.append(params.linear("add_embedding.linear_1", time, config.projection_class_embeddings_input_dim))
        parts.append(params.linear("add_embedding.linear_2", time, time))
    parts += [params.under(f"down_blocks.{i}", _level(config, level, "down")) for i, level in enumerate(config.down)]
    parts.append(params.under("mid_block", _level(config, config.mid, "mid")))
    return params.merge(*parts)


def uses(stored: Manifest) -> ParamUses:
    """Return `stored` in the shapes of the forward: all projections around transformer blocks are linear layers."""
    return {
        key: ParamUse(shape[:2] if key.endswith((".proj_in.weight", ".proj_out.weight")) else shape)
        for key, shape in stored.items()
    }


def _level(config: UNetConfig, level: Level, way: str) -> Manifest:
    parts = [
        params.under(f"resnets.{j}", _resnet(inputs, outputs, config.time_width))
        for j, (inputs, outputs) in enumerate(level.resnets)
    ]
    if level.depth:
        count = 1 if way == "mid" else len(level.resnets)
        parts.append(params.repeat("attentions", count, _transformer(config, level)))
    if level.resampled:
        parts.append(params.conv(f"{way}samplers.0.conv", level.width, level.width, 3, 3))
    return params.merge(*parts)


def _resnet(inputs: int, outputs: int, time: int) -> Manifest:
    return params.merge(
        params.affine("norm1", inputs),
        params.conv("conv1", outputs, inputs, 3, 3),
        params.linear("time_emb_proj", outputs, time),
        params.affine("norm2", outputs),
        params.conv("conv2", outputs, outputs, 3, 3),
        params.conv("conv_shortcut", outputs, inputs, 1, 1) if inputs != outputs else {},
    )


def _transformer(config: UNetConfig, level: Level) -> Manifest:
    width, kernel = level.width, () if config.use_linear_projection else (1, 1)
    return params.merge(
        params.affine("norm", width),
        params.conv("proj_in", width, width, *kernel),
        params.repeat("transformer_blocks", level.depth, _transformer_block(width, config.cross_attention_dim)),
        params.conv("proj_out", width, width, *kernel),
    )


def _transformer_block(width: int, text: int) -> Manifest:
    return params.merge(
        *(params.affine(name, width) for name in ("norm1", "norm2", "norm3")),
        params.under("attn1", _attention(width, width)),
        params.under("attn2", _attention(width, text)),
        params.linear("ff.net.0.proj", 2 * MLP_RATIO * width, width),
        params.linear("ff.net.2", width, MLP_RATIO * width),
    )


def _attention(width: int, keys: int) -> Manifest:
    return params.merge(
        params.linear("to_q", width, width, bias=False),
        params.linear("to_k", width, keys, bias=False),
        params.linear("to_v", width, keys, bias=False),
        params.linear("to_out.0", width, width),
    )


class CrossAttention(NamedTuple):
    """A cross attention of the UNet."""

    attention: str  # the path of the attention that its transformer block is in
    width: int  # channels
    halved: int  # how often the sides of the latents were halved before it


def cross_attentions(config: UNetConfig) -> tuple[CrossAttention, ...]:
    """Return the cross attentions in the order of diffusers: down blocks, up blocks, and the mid block last."""
    last = len(config.down) - 1
    levels = [(f"down_blocks.{i}", level, i, len(level.resnets)) for i, level in enumerate(config.down)]
    levels += [(f"up_blocks.{i}", level, last - i, len(level.resnets)) for i, level in enumerate(config.up)]
    return tuple(
        CrossAttention(f"{path}.attentions.{j}", level.width, halved)
        for path, level, halved, count in [*levels, ("mid_block", config.mid, last, 1)]
        for j in range(count)
        for _ in range(level.depth)
    )


def cached_blocks(config: UNetConfig) -> CachedBlocks:
    """Return what lies between the first down block and the last up block."""
    last = len(config.down) - 1
    sampler = ("down_blocks.0.downsamplers.0",) if last else ()
    down, up = ([f"down_blocks.{i + 1}" for i in range(last)], [f"up_blocks.{i}" for i in range(last)])
    return CachedBlocks(after="down_blocks.0", paths=(*sampler, *down, "mid_block", *up), adds=False, image=True)


NETWORK = Network(
    name="unet",
    role="transformer",
    kind=CLASS_NAME,
    config=UNetConfig,
    manifest=manifest,
    used=lambda config, stored: uses(stored),
    fields=unet_fields,
    ignored=IGNORED_CONFIG,
    blocks=re.compile(r".*\.attentions\.\d+\..*\.weight"),
    # the projections of the text to keys and values are not needed by the block's own call
    streamable=re.compile(r"(.*\.(?:resnets|transformer_blocks|downsamplers|upsamplers)\.\d+)\.(?!attn2\.to_[kv]\.)"),
    lora_prefix="lora_unet_",
    compiled=re.compile(r".*\.(?:resnets|transformer_blocks)\.\d+|.*\.attentions\.\d+\.norm"),
    cached_blocks=cached_blocks,
    traced=(
        Block(name="resnet", paths=re.compile(r".*\.resnets\.\d+"), image=True, streams=1, depth=1),
        Block(name="attention", paths=re.compile(r".*\.attentions\.\d+"), image=True, streams=1),
        Block(name="context", paths=re.compile(r".*\.attentions\.\d+"), method="context"),
        Block(name="tokens", paths=re.compile(r".*\.transformer_blocks\.\d+"), streams=1, depth=3),
        Block(name="sampler", paths=re.compile(r".*\.(down|up)samplers\.\d+"), image=True),
        Block(name="time", paths=re.compile("time_embedding|add_embedding")),
        Block(name="end", paths=re.compile("conv_in|conv_norm_out|conv_out"), image=True),
        Block(name="model", paths=re.compile(""), image=True),
    ),
    architectures=frozenset({"sd1", "sdxl"}),
)
