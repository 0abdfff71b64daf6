"""IP-Adapters for Stable Diffusion, by which a picture is a prompt: configuration, manifest, kinds and names.

What is unusual about them:
- in each cross attention the queries also attend to keys and values of the picture, and this result is added to that of
  the text, times a scale; `to_k_ip` and `to_v_ip` have no bias, and the rest of the attention is the UNet's;
- files number the cross attentions 1, 3, 5, ... in the order of diffusers: down blocks, up blocks, and the mid block
  last;
- the base kind makes four tokens of the picture's embedding; Plus has a resampler, which makes 16 tokens of the states
  of all patches; Full-Face takes each of these 257 states as a token, through a feed-forward;
- a picture's tokens, keys and values depend on no step.

Source: H. Ye et al., IP-Adapter: Text Compatible Image Prompt Adapter for Text-to-Image Diffusion Models (2023), and
its published files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from qwenimg.common.base.block import Block
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest, Shape
from qwenimg.common.networks import params
from qwenimg.common.networks.network import Network
from qwenimg.common.weights.plan import ParamUse, ParamUses, stored_uses

KINDS = ("base", "plus", "full-face")
HEAD_DIM = 64  # of the resampler
NORM_EPS = 1e-5
_LATENTS = "image_proj.latents"
_PAIR = re.compile(r"ip_adapter\.(\d{1,4})\.(to_[kv]_ip\.weight)")
_PARTS = {"0": "attention", "1": "ff"}  # of a layer of the resampler, which files number
_LAYER = re.compile(r"(image_proj\.layers\.\d{1,4})\.(\w+)\.(.+)")
_FACE_ID = re.compile(r"ip_adapter\.\d+\.to_\w+_lora\..*|image_proj\.perceiver_resampler\..*|image_proj\.proj\.2\.bias")


@dataclass(frozen=True, kw_only=True)
class IPAdapterConfig:
    """The sizes of an adapter, which its tensors show. Defaults: the base kind for Stable Diffusion 1.5."""

    kind: str = KINDS[0]
    features: int = 1024  # of the picture's embedding, or of each state of its patches
    text: int = field(default=768, metadata={"max": 16384})  # channels of a text state
    tokens: int = 4  # of a picture; 0: one for each state
    widths: tuple[int, ...] = (320, 320, 640, 640, 1280, 1280, 1280, 1280, 1280, 640, 640, 640, 320, 320, 320, 1280)
    inner: int = 0  # channels of the resampler, or of the feed-forward
    attention: int = 0  # channels of all heads of the resampler
    feed_forward: int = 0  # of the resampler
    depth: int = 0  # of the resampler

    def __post_init__(self) -> None:
        if self.kind == "plus" and (self.attention % HEAD_DIM or not self.depth):
            raise ModelError(
                f"its resampler has {self.attention} channels in heads of {HEAD_DIM}, in {self.depth} layers"
            )

    @property
    def heads(self) -> int:
        return self.attention // HEAD_DIM

    @property
    def sees_states(self) -> bool:
        """True if it takes the states of a picture's patches, and not its embedding."""
        return self.kind != KINDS[0]


def like(kind: str, embedding: int, states: int, *, text: int, widths: tuple[int, ...]) -> IPAdapterConfig:
    """Return the configuration of an adapter as it is published, for an encoder with `embedding` numbers of a picture
    and `states` of each patch."""
    sizes: dict[str, int] = {"features": embedding}
    if kind == "plus":
        inner = min(states, text)
        sizes = {"features": states, "tokens": 16, "inner": inner, "attention": inner, "feed_forward": 4 * inner}
        sizes |= {"depth": 4}
    elif kind == "full-face":
        sizes = {"features": states, "tokens": 0, "inner": states}
    return IPAdapterConfig(kind=kind, text=text, widths=widths, **sizes)


def manifest(config: IPAdapterConfig) -> Manifest:
    """Return the shape of every tensor, by its key after `rename`."""
    projection = {"base": _linear, "plus": _resampler, "full-face": _feed_forward}[config.kind](config)
    pairs = (
        params.under(
            f"ip_adapter.{i}",
            *(params.linear(f"to_{name}_ip", width, config.text, bias=False) for name in "kv"),
        )
        for i, width in enumerate(config.widths)
    )
    return params.merge(params.under("image_proj", projection), *pairs)


def _linear(config: IPAdapterConfig) -> Manifest:
    return params.merge(
        params.linear("proj", config.tokens * config.text, config.features), params.affine("norm", config.text)
    )


def _feed_forward(config: IPAdapterConfig) -> Manifest:
    return params.merge(
        params.linear("proj.0", config.inner, config.features),
        params.linear("proj.2", config.text, config.inner),
        params.affine("proj.3", config.text),
    )


def _resampler(config: IPAdapterConfig) -> Manifest:
    width = config.inner
    layer = params.merge(
        params.affine("attention.norm1", width),
        params.affine("attention.norm2", width),
        params.linear("attention.to_q", config.attention, width, bias=False),
        params.linear("attention.to_kv", 2 * config.attention, width, bias=False),
        params.linear("attention.to_out", width, config.attention, bias=False),
        params.affine("ff.0", width),
        params.linear("ff.1", config.feed_forward, width, bias=False),
        params.linear("ff.3", width, config.feed_forward, bias=False),
    )
    return params.merge(
        {"latents.weight": (1, config.tokens, width)},
        params.linear("proj_in", width, config.features),
        params.repeat("layers", config.depth, layer),
        params.linear("proj_out", config.text, width),
        params.affine("norm_out", config.text),
    )


def used(config: IPAdapterConfig, stored: Manifest) -> ParamUses:
    """Return all of `stored`, the latents of the resampler as a table."""
    name = f"{_LATENTS}.weight"
    latents = {name: ParamUse(stored[name][1:])} if name in stored else {}
    return stored_uses(stored) | latents


def rename(key: str) -> str | None:
    """Return the manifest key of a file's key: pairs are counted 0, 1, 2, ..., and not 1, 3, 5. None for a number that
    no cross attention has."""
    if match := _PAIR.fullmatch(key):
        number = int(match[1])
        return f"ip_adapter.{number // 2}.{match[2]}" if number % 2 else None
    if (match := _LAYER.fullmatch(key)) and match[2] in _PARTS:
        return f"{match[1]}.{_PARTS[match[2]]}.{match[3]}"
    return f"{_LATENTS}.weight" if key == _LATENTS else key


def published(name: str) -> str:
    """Return the name in published files of a name of the manifest."""
    if match := _PAIR.fullmatch(name):
        return f"ip_adapter.{2 * int(match[1]) + 1}.{match[2]}"
    if match := _LAYER.fullmatch(name):
        return f"{match[1]}.{list(_PARTS.values()).index(match[2])}.{match[3]}"
    return _LATENTS if name == f"{_LATENTS}.weight" else name


def is_in(names: Mapping[str, object]) -> bool:
    """Return whether a file with these tensors is an IP-Adapter, of any kind."""
    return any(name.startswith("ip_adapter.") for name in names) and any(
        name.startswith("image_proj.") for name in names
    )


def config_of(shapes: Mapping[str, Shape]) -> IPAdapterConfig:
    """Return the configuration of an adapter whose tensors, by their names in the file, have these shapes. Raises
    ModelError for a kind that is not read."""
    if any(_FACE_ID.fullmatch(name) for name in shapes) and "image_proj.proj.3.weight" not in shapes:
        raise ModelError(
            "is a FaceID adapter, which needs a network that recognizes faces, and none is here; take a Plus-Face or "
            "Full-Face adapter"
        )
    numbers = {int(match[1]) for name in shapes if (match := _PAIR.fullmatch(name))}
    count = sum(number % 2 for number in numbers)
    pairs = [_shape(shapes, f"ip_adapter.{2 * i + 1}.to_k_ip.weight", 2) for i in range(count)]
    if not pairs:
        raise ModelError("has no keys and values of a cross attention")
    text, widths = pairs[0][1], tuple(pair[0] for pair in pairs)
    if _LATENTS in shapes:
        _, tokens, inner = _shape(shapes, _LATENTS, 3)
        starts = {name.split(".")[2] for name in shapes if name.startswith("image_proj.layers.")}
        return IPAdapterConfig(
            kind="plus",
            features=_shape(shapes, "image_proj.proj_in.weight", 2)[1],
            tokens=tokens,
            inner=inner,
            attention=_shape(shapes, "image_proj.layers.0.0.to_q.weight", 2)[0],
            feed_forward=_shape(shapes, "image_proj.layers.0.1.1.weight", 2)[0],
            depth=len(starts),
            text=text,
            widths=widths,
        )
    if "image_proj.proj.3.weight" in shapes:
        inner, features = _shape(shapes, "image_proj.proj.0.weight", 2)
        return IPAdapterConfig(kind="full-face", features=features, tokens=0, inner=inner, text=text, widths=widths)
    outputs, features = _shape(shapes, "image_proj.proj.weight", 2)
    return IPAdapterConfig(kind="base", features=features, tokens=max(1, outputs // text), text=text, widths=widths)


def _shape(shapes: Mapping[str, Shape], name: str, rank: int) -> Shape:
    shape = shapes.get(name)
    if shape is None or len(shape) != rank or 0 in shape:
        fault = "lacks tensor" if shape is None else f"has not {rank} dimensions in tensor"
        raise ModelError(f"{fault} '{name}': it is no IP-Adapter as it is published")
    return shape


NETWORK = Network(
    name="ip_adapter",
    role="text",
    kind="IPAdapter",
    config=IPAdapterConfig,
    manifest=manifest,
    used=used,
    tables=frozenset({f"{_LATENTS}.weight"}),
    rename=rename,
    published=published,
    traced=(
        Block(name="projection", paths=re.compile("image_proj")),
        Block(name="layer", paths=re.compile(r"image_proj\.layers\.\d+"), streams=1, depth=2),
        Block(name="end", paths=re.compile(r"image_proj\.(proj_in|proj_out|norm_out)")),
        Block(name="pair", paths=re.compile(r"ip_adapter\.\d+")),
        Block(name="model", paths=re.compile("")),
    ),
)
