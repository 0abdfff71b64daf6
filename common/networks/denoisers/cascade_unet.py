"""Stable Cascade's two UNets, of one class: configuration and manifest.

What is unusual about them:
- the prior makes an embedding of the image from text, 16 channels of 24 x 24 for 1024 pixels; the decoder makes the
  latents of a VAE from that embedding, which is stretched and added to its first tokens;
- a layer is two or three blocks: a convolution of each channel alone with a feed-forward, a scale and a shift by the
  time, and in the wide levels attention to all pixels and to the condition in one softmax;
- a feed-forward has a norm of each channel's length over the whole image, relative to the other channels', so that no
  part of an image is drawn alone;
- no norm has a gain or a bias, but that one;
- the prior's two levels are of one size; the decoder goes down by convolutions, and where a side was odd the tokens
  from below are stretched;
- an up level of the decoder runs several times with the same weights, with a layer between;
- the condition is text, its pooled vector and an embedding of a picture, each of `clip_seq` tokens; without a picture
  its layer's bias. The decoder sees the pooled vector alone;
- further values with a sinusoid each stand beside the time (`sca`, `crp`), and pixels beside the embedding: all 0 here.

Source: P. Pernias et al., "Wuerstchen: An Efficient Architecture for Large-Scale Text-to-Image Diffusion Models"
(2024); the reference class of diffusers, and its authors' configurations in its conversion.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from qwenimg.common.base.block import Block
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.base.text import clean
from qwenimg.common.networks import params
from qwenimg.common.networks.denoisers.diffusion_transformer import attention
from qwenimg.common.networks.network import Network
from qwenimg.common.weights.plan import ParamUse, ParamUses

CLASS_NAME = "StableCascadeUNet"
NORM_EPS = 1e-6
WIDER = 4  # of a feed-forward, and of the layers that take an embedding or pixels
_BLOCKS = ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock")
_TYPES, _LEVELS = "block_types_per_layer", "switch_level"


class Level(NamedTuple):
    """A level on its way down or up."""

    width: int
    heads: int  # 0: without attention
    layers: int
    repeats: int  # how often its layers run
    skip: int  # channels that its first block takes besides its own


@dataclass(frozen=True, kw_only=True)
class CascadeConfig:
    """The fields of `prior/config.json` after `fields`. Defaults: the prior of 3.6 B."""

    in_channels: int = 16
    out_channels: int = 16
    timestep_ratio_embedding_dim: int = field(default=64, metadata={"min": 4, "max": 4096})
    patch_size: int = field(default=1, metadata={"max": 8})
    conditioning_dim: int = 2048
    block_out_channels: tuple[int, ...] = (2048, 2048)
    num_attention_heads: tuple[int, ...] = field(default=(32, 32), metadata={"min": -1, "max": 1024})
    down_num_layers_per_block: tuple[int, ...] = field(default=(8, 24), metadata={"max": 100})
    up_num_layers_per_block: tuple[int, ...] = field(default=(24, 8), metadata={"max": 100})
    down_blocks_repeat_mappers: tuple[int, ...] = field(default=(1, 1), metadata={"max": 16})
    up_blocks_repeat_mappers: tuple[int, ...] = field(default=(1, 1), metadata={"max": 16})
    attending: tuple[bool, ...] = field(default=(True, True), metadata={"in_files": False})
    clip_text_in_channels: int | None = None
    clip_text_pooled_in_channels: int = 1280
    clip_image_in_channels: int | None = None
    clip_seq: int = field(default=4, metadata={"max": 256})
    effnet_in_channels: int | None = None
    pixel_mapper_in_channels: int | None = None
    kernel_size: int = field(default=3, metadata={"max": 9})
    timestep_conditioning_type: tuple[str, ...] = ("sca", "crp")
    one_size: bool = field(default=False, metadata={"in_files": False})  # True: no level is smaller than another

    def __post_init__(self) -> None:
        count = len(self.block_out_channels)
        for name in (
            *("num_attention_heads", "down_num_layers_per_block", "up_num_layers_per_block", "attending"),
            *("down_blocks_repeat_mappers", "up_blocks_repeat_mappers"),
        ):
            if len(getattr(self, name)) != count or not count:
                raise ModelError(f"{name} has {len(getattr(self, name))} levels, block_out_channels {count}")
        for width, heads, attends in zip(
            self.block_out_channels, self.num_attention_heads, self.attending, strict=True
        ):
            if attends and (heads < 1 or width % heads):
                raise ModelError(f"block_out_channels {width} is no multiple of num_attention_heads {heads}")
        if self.kernel_size % 2 == 0 or self.timestep_ratio_embedding_dim % 2:
            raise ModelError(
                f"kernel_size {self.kernel_size} is even, or timestep_ratio_embedding_dim "
                f"{self.timestep_ratio_embedding_dim} odd"
            )
        if bool(self.clip_text_in_channels) != bool(self.clip_image_in_channels):
            raise ModelError("clip_text_in_channels and clip_image_in_channels: one of them is missing")
        if any(not re.fullmatch(r"[a-z]{1,20}", name) for name in self.timestep_conditioning_type):
            raise ModelError(f"timestep_conditioning_type is {clean(self.timestep_conditioning_type, 60)}")

    @property
    def is_prior(self) -> bool:
        """True of the prior, which sees the states of text."""
        return self.clip_text_in_channels is not None

    @property
    def times(self) -> int:
        """The number of values beside each other in a row of sinusoids: the time and all zeros."""
        return 1 + len(self.timestep_conditioning_type)

    @property
    def down(self) -> tuple[Level, ...]:
        """The levels on the way down."""
        return tuple(self._level(i, self.down_num_layers_per_block[i], self.down_blocks_repeat_mappers[i], 0)
                     for i in range(len(self.block_out_channels)))  # fmt: skip

    @property
    def up(self) -> tuple[Level, ...]:
        """The levels on the way up, the smallest first."""
        widths, last = self.block_out_channels, len(self.block_out_channels) - 1
        return tuple(
            self._level(last - i, self.up_num_layers_per_block[i], self.up_blocks_repeat_mappers[i],
                        widths[last - i] if i else 0)
            for i in range(len(widths))
        )  # fmt: skip

    def _level(self, level: int, layers: int, repeats: int, skip: int) -> Level:
        heads = self.num_attention_heads[level] if self.attending[level] else 0
        return Level(self.block_out_channels[level], heads, layers, repeats, skip)

    def text_tokens(self, text: int) -> int:
        """Return the tokens of the condition with `text` states."""
        return text + 2 * self.clip_seq if self.is_prior else self.clip_seq


def fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `CascadeConfig` from a config.json. Raises ModelError for an unsupported value."""
    given = dict(data)
    count = len(given.get("block_out_channels", CascadeConfig.block_out_channels))
    types, switch = given.pop(_TYPES, [list(_BLOCKS)] * count), given.pop(_LEVELS, None)
    if not isinstance(types, list | tuple) or any(list(one) not in (list(_BLOCKS[:2]), list(_BLOCKS)) for one in types):
        raise ModelError(f"{_TYPES} is {clean(types, 60)}: not supported")
    if switch is not None and (not isinstance(switch, list | tuple) or any(switch)):
        raise ModelError(f"{_LEVELS} is {clean(switch, 40)}: not supported; expected null or false")
    attention = given.pop("self_attn", True)
    if not all(attention if isinstance(attention, list | tuple) else [attention]):
        raise ModelError(f"self_attn is {clean(attention, 40)}: not supported; expected true")
    return given | {"attending": [len(one) == len(_BLOCKS) for one in types], "one_size": switch is not None}


def _described(config: CascadeConfig) -> dict[str, object]:
    """Return the keys of config.json that `fields` reads."""
    types = [list(_BLOCKS if attends else _BLOCKS[:2]) for attends in config.attending]
    switch = [False] * (len(types) - 1) if config.one_size else None
    return {_TYPES: types, _LEVELS: switch, "self_attn": True}


def manifest(config: CascadeConfig) -> Manifest:
    """Return the shape of every tensor of the checkpoint, by its key in diffusers' layout."""
    first, cond, seq = config.block_out_channels[0], config.conditioning_dim, config.clip_seq
    pixels = config.patch_size**2
    return params.merge(
        *(
            _mapper(name, first, channels)
            for name, channels in (
                ("effnet_mapper", config.effnet_in_channels),
                ("pixels_mapper", config.pixel_mapper_in_channels),
            )
            if channels
        ),
        params.linear("clip_txt_pooled_mapper", seq * cond, config.clip_text_pooled_in_channels),
        params.linear("clip_txt_mapper", cond, config.clip_text_in_channels) if config.clip_text_in_channels else {},
        params.linear("clip_img_mapper", seq * cond, config.clip_image_in_channels)
        if config.clip_image_in_channels
        else {},
        params.conv("embedding.1", first, pixels * config.in_channels, 1, 1),
        *(_level(config, "down", place, level) for place, level in enumerate(config.down)),
        *(_level(config, "up", place, level) for place, level in enumerate(config.up)),
        params.conv("clf.1", pixels * config.out_channels, first, 1, 1),
    )


def _mapper(name: str, width: int, channels: int) -> Manifest:
    return params.under(
        name, params.conv("0", WIDER * width, channels, 1, 1), params.conv("2", width, WIDER * width, 1, 1)
    )


def _level(config: CascadeConfig, way: str, place: int, level: Level) -> Manifest:
    """Return the shapes of a level's blocks, of the layers between its repetitions, and of the layer that leads to it,
    on the way up from it."""
    blocks, count = [], 3 if level.heads else 2
    for layer in range(level.layers):
        kinds = [_res(config, level.width, 0 if layer else level.skip), _time(config, level.width)]
        kinds += [_attention(config, level.width)] if level.heads else []
        blocks += [params.under(str(layer * count + i), one) for i, one in enumerate(kinds)]
    repeat = [params.conv(str(i), level.width, level.width, 1, 1) for i in range(level.repeats - 1)]
    widths, last = config.block_out_channels, len(config.block_out_channels) - 1
    parts = [params.under(f"{way}_blocks.{place}", *blocks), params.under(f"{way}_repeat_mappers.{place}", *repeat)]
    if way == "down" and place:
        sizes = (widths[place], widths[place - 1])
        shape = params.conv("1.blocks.0", *sizes, 1, 1) if config.one_size else params.conv("1", *sizes, 2, 2)
        parts.append(params.under(f"down_downscalers.{place}", shape))
    if way == "up" and place < last:
        inner, outer = widths[last - place], widths[last - place - 1]
        stretched = {"1.weight": (inner, outer, 2, 2), "1.bias": (outer,)}
        shape = params.conv("1.blocks.1", outer, inner, 1, 1) if config.one_size else stretched
        parts.append(params.under(f"up_upscalers.{place}", shape))
    return params.merge(*parts)


def _res(config: CascadeConfig, width: int, skip: int) -> Manifest:
    return params.merge(
        params.conv("depthwise", width, 1, config.kernel_size, config.kernel_size),
        params.linear("channelwise.0", WIDER * width, width + skip),
        {f"channelwise.2.{name}": (1, 1, 1, WIDER * width) for name in ("gamma", "beta")},
        params.linear("channelwise.4", width, WIDER * width),
    )


def _time(config: CascadeConfig, width: int) -> Manifest:
    names = ("mapper", *(f"mapper_{name}" for name in config.timestep_conditioning_type))
    return params.merge(*(params.linear(name, 2 * width, config.timestep_ratio_embedding_dim) for name in names))


def _attention(config: CascadeConfig, width: int) -> Manifest:
    return attention("attention", width) | params.linear("kv_mapper.1", width, config.conditioning_dim)


def uses(config: CascadeConfig, stored: Manifest) -> ParamUses:
    """Return the use of each tensor: 1x1 kernels are matrices, and a norm's gains and biases vectors."""
    vectors = {name: ParamUse(shape[-1:]) for name, shape in stored.items() if name.endswith(("gamma", "beta"))}
    kernels = (name for name, shape in stored.items() if shape[2:] == (1, 1) and "depthwise" not in name)
    matrices = {name: ParamUse(stored[name][:2]) for name in kernels}
    return {name: ParamUse(shape) for name, shape in stored.items()} | matrices | vectors


NETWORK = Network(
    name="cascade_unet",
    role="transformer",
    kind=CLASS_NAME,
    older_kind="StableCascadeUnet",
    config=CascadeConfig,
    manifest=manifest,
    used=uses,
    fields=fields,
    ignored=frozenset({"dropout"}),
    blocks=re.compile(r"(?:down|up)_blocks\.\d+\.\d+\.(?:channelwise|attention|kv_mapper)\..*weight"),
    streamable=re.compile(r"((?:down|up)_blocks\.\d+\.\d+)\."),
    compiled=re.compile(r"(?:down|up)_blocks\.\d+\.\d+"),
    traced=(
        Block(name="block", paths=re.compile(r"(?:down|up)_blocks\.\d+\.\d+"), streams=1, depth=1),
        Block(name="time", paths=re.compile(r"down_blocks\.0\.1\.mapper")),
        Block(name="start", paths=re.compile("clip_txt_mapper|clip_txt_pooled_mapper|clip_img_mapper|embedding.1")),
        Block(
            name="between",
            paths=re.compile(r"(?:down_downscalers|up_upscalers|\w+_repeat_mappers)\.\d+\..+"),
            image=True,
        ),
        Block(name="head", paths=re.compile(r"clf\.1")),
        Block(name="model", paths=re.compile(""), image=True),
    ),
    described=_described,
)
