"""IP-Adapters of Stable Diffusion: their files, their stages in a run, and the pictures that they make prompts of.

An adapter and the encoder of its pictures are computed once for an image, before the UNet is loaded: what is kept is
the keys and values of the pictures in each cross attention. SDXL's refiner sees no pictures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import bad, closed_on_error
from qwenimg.common.base.text import clean
from qwenimg.common.families.stable_diffusion import known
from qwenimg.common.formats.files import first
from qwenimg.common.formats.headers import open_weights
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.denoisers import unet
from qwenimg.common.networks.denoisers.unet import UNetConfig
from qwenimg.common.networks.encoders import clip_vision, ip_adapter
from qwenimg.common.networks.encoders.clip_vision import VIT_BIG_G, VIT_H, CLIPVisionConfig
from qwenimg.common.networks.encoders.ip_adapter import IPAdapterConfig
from qwenimg.common.numbers import resampling
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts import image_encoders, known_configs
from qwenimg.common.parts.components import component, on_paper
from qwenimg.common.parts.control_net import Controller, Encoders, IPAdapter, PictureAdapter
from qwenimg.common.parts.image_encoders import NeededEncoder
from qwenimg.common.pictures.patches import in_patches
from qwenimg.common.pipeline.adapter_uses import AdapterUse, adapter_uses
from qwenimg.common.pipeline.models.control_stages import levels
from qwenimg.common.pipeline.steps.inpaint import Latents
from qwenimg.common.pipeline.steps.plan import SamplingPlan
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.runtime.engine import Array
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.stages import Split, Stage
from qwenimg.common.weights.keys import Place, plan_places

TEXTS = {768: "Stable Diffusion 1.x", 1024: "Stable Diffusion 2.x", 2048: "SDXL"}
"""The models by the channels of their text states."""
# The blocks that lead the style and the layout of the picture, as measured for InstantStyle (H. Wang et al., 2024)
_SD = {"style": ("up_blocks.1",), "layout": ("down_blocks.2", "mid_block")}
_SDXL = {"style": ("up_blocks.0.attentions.1",), "layout": ("down_blocks.2.attentions.1",)}


# Files


def is_in(header: Header) -> bool:
    """Return whether a file is an IP-Adapter."""
    return ip_adapter.is_in(header.tensors)


def is_at(path: Path) -> bool:
    """Return whether the one file at `path`, a file or a folder, is an IP-Adapter. Raises ModelError."""
    return path.is_file() and _peeked(path)


def _peeked(path: Path) -> bool:
    header = open_weights(path)
    header.file.close()
    return is_in(header)


def open_file(path: Path) -> Component:
    """Open the adapter in the file `path`. Raises ModelError."""
    header = open_weights(path)
    with closed_on_error(header.file):
        config = image_encoders.config_shown(header, path, ip_adapter.config_of)
        manifest = ip_adapter.manifest(config)
        places = {name: Place(ip_adapter.published(name)) for name in manifest}
        unknown = header.tensors.keys() - {place.key for place in places.values()}
        if unknown:
            raise bad(path, f"holds unknown tensor {first(sorted(unknown))}: it is no IP-Adapter as it is published")
        plan = plan_places(header, "IP-Adapter", places, manifest, ip_adapter.used(config, manifest))
        return component(ip_adapter.NETWORK, config, plan)


def open_adapter(path: Path, base: UNetConfig) -> IPAdapter:
    """Open the adapter in the file `path` for a UNet. Its encoder is found later. Raises ModelError and UsageError."""
    part = open_file(path)
    with closed_on_error(part.plan):
        check_fit(path, part.config, base)
    return IPAdapter(
        name="",
        component=part,
        encoder=None,
        attentions=tuple(one.attention for one in unet.cross_attentions(base)),
        named=_named(base),
    )


def check_fit(path: Path | str, config: IPAdapterConfig, base: UNetConfig) -> None:
    """Raise ModelError for the adapter at `path`, or known by that name, that was made for another UNet."""
    widths = tuple(one.width for one in unet.cross_attentions(base))
    if config.text != base.cross_attention_dim:
        theirs, ours = (model_of(width) for width in (config.text, base.cross_attention_dim))
        raise ModelError(f"{clean(path)}: is an IP-Adapter for {theirs}; the model is {ours}")
    if config.widths != widths:
        raise ModelError(
            f"{clean(path)}: is an IP-Adapter for a model of {len(config.widths)} cross attentions with "
            f"{_shown(config.widths)} channels; the model has {len(widths)} with {_shown(widths)}"
        )


def published(name: str) -> IPAdapter | None:
    """Return the adapter known as `name` with its image encoder, without their files; None for another name."""
    if all(one.name != name for one in known.ADAPTERS):
        return None
    base: UNetConfig = known_configs.read("sdxl" if known.SDXL_ADAPTER in name else "sd15", "unet", unet.NETWORK)
    encoder, dtype = (VIT_BIG_G, "float16") if name == known.BIG_G else (VIT_H, "float32")
    attentions = unet.cross_attentions(base)
    kind = next((kind for kind in ip_adapter.KINDS if f"-{kind}" in name), ip_adapter.KINDS[0])
    text, widths = base.cross_attention_dim, tuple(one.width for one in attentions)
    config = ip_adapter.like(kind, encoder.projection_dim, encoder.hidden_size, text=text, widths=widths)
    return IPAdapter(
        name="",
        component=on_paper(ip_adapter.NETWORK, config, "float16"),
        encoder=on_paper(clip_vision.NETWORK, encoder, dtype),
        attentions=tuple(one.attention for one in attentions),
        named=_named(base),
    )


def _named(base: UNetConfig) -> dict[str, tuple[str, ...]]:
    """Return the blocks of a UNet by the names of what they lead."""
    named = _SDXL if base.addition_embed_type else _SD
    return {**named, "composition": named["layout"]}


def model_of(width: int) -> str:
    """Return the kind of model whose text states have `width` channels."""
    return TEXTS.get(width, f"a model with {width} channels in a text")


def title_of(config: CLIPVisionConfig) -> str:
    """Return the name of an image encoder."""
    names = {VIT_H: "CLIP ViT-H", VIT_BIG_G: "CLIP ViT-bigG"}
    return names.get(config, f"states of {config.hidden_size} numbers, embeddings of {config.projection_dim}")


def _shown(widths: Sequence[int]) -> str:
    return ", ".join(map(str, widths[:4])) + (", ..." if len(widths) > 4 else "")


def with_encoder(net: PictureAdapter, encoders: Encoders) -> PictureAdapter:
    """Return an adapter with the first of `encoders` that is its own. Raises ModelError."""
    config: IPAdapterConfig = net.component.config
    needed = NeededEncoder(
        title=encoder_of(config),
        result="states" if config.sees_states else "embeddings",
        size=config.features,
        of=lambda encoder: encoder.hidden_size if config.sees_states else encoder.projection_dim,
        open=open_encoder,
    )
    return image_encoders.with_encoder(net, encoders, needed)


def open_encoder(path: Path) -> Component:
    """Open the image encoder in a folder, or in a file alone, as ComfyUI has it. Raises ModelError."""
    return image_encoders.open_encoder(clip_vision.NETWORK, path, clip_vision.config_of)


def encoder_of(config: IPAdapterConfig) -> str:
    """Return the name of the encoder that an adapter takes."""
    names = {(False, 1024): "CLIP ViT-H", (False, 1280): "CLIP ViT-bigG", (True, 1280): "CLIP ViT-H"}
    return names.get((config.sees_states, config.features), f"one with {config.features} numbers")


# In a run


@dataclass(frozen=True)
class Pictures:
    """The pictures of a run under one IP-Adapter."""

    pairs: Sequence[tuple[Array, Array]]
    weights: Sequence[Latents | None]


@dataclass(frozen=True, kw_only=True)
class ActivePictures:
    """Pictures that are prompts between two noise levels: up to the first and above the second."""

    pictures: Sequence[Pictures]
    begin: float
    end: float


class PicturePrompts:
    """The pictures that are prompts, of one model."""

    def __init__(self, residents: Residents, base: UNetConfig):
        self.residents, self.runtime = residents, residents.runtime
        self.attentions = unet.cross_attentions(base)

    def uses(self, request: Request, nets: Mapping[str, Controller]) -> list[tuple[AdapterUse, IPAdapter]]:
        """Return the uses of adapters in a request, each with its adapter."""
        if not nets:
            return []
        pairs = ((use, nets[use.control.network]) for use in adapter_uses(request.controls, nets))
        return [(use, net) for use, net in pairs if isinstance(net, IPAdapter)]

    def stages(self, request: Request, nets: Mapping[str, Controller]) -> list[Stage]:
        """Return the stages of a request's adapters: each first encodes its pictures."""
        uses = self.uses(request, nets)
        return [stage for use, net in uses for stage in (self._encoding(use, net), self._projecting(use, net))]

    def open(
        self,
        request: Request,
        nets: Mapping[str, Controller],
        plan: SamplingPlan,
        shape: LatentShape,
        seen: Sequence[Latents],
    ) -> list[ActivePictures]:
        """Compute the keys and values of a request's pictures. seen: of each control, the pixels [1 3 H W] of a picture
        or a mask [1 1 H W]."""
        active = []
        for use, net in self.uses(request, nets):
            features = self._features(use, net, [seen[number] for number in use.pictures])
            adapter, _ = self.residents.acquire(self._projecting(use, net))
            scales = net.scales(use.control.scale, use.control.parts)
            groups = [features[:-1]] if not use.masks else [features[i : i + 1] for i in range(len(use.pictures))]
            masks: list[Latents | None] = [seen[number] for number in use.masks] if use.masks else [None]
            with self.runtime.clock.timed("encode"):
                pictures = [
                    Pictures(adapter.pairs(group, features[-1:]), self._weights(scales, mask, shape))
                    for group, mask in zip(groups, masks, strict=True)
                ]
            del adapter
            begin, end = levels(plan, *use.control.steps(plan.steps))
            active.append(ActivePictures(pictures=pictures, begin=begin, end=end))
        return active

    def _features(self, use: AdapterUse, net: IPAdapter, pictures: Sequence[Latents]) -> Latents:
        """Return the embeddings or the states of the pictures, and of the empty one after them."""
        assert net.encoder is not None
        config: CLIPVisionConfig = net.encoder.config
        adapter: IPAdapterConfig = net.component.config
        empty = [np.zeros_like(pictures[0])] if adapter.sees_states else []
        patches = np.concatenate(
            [in_patches(one[0].transpose(1, 2, 0), config.patch_size) for one in (*pictures, *empty)]
        )
        encoder, _ = self.residents.acquire(self._encoding(use, net))
        part = 1 if adapter.sees_states else 0
        with self.runtime.clock.timed("encode"):
            made = encoder.encode(patches)[part]
            self.runtime.check_finite(made, "image encoder", "text", lambda: encoder.encode(patches)[part])
            features = self.runtime.engine.numpy(made).astype(np.float32)
        # Without states the negative prompt's picture is an embedding of zeros
        return features if empty else np.concatenate([features, np.zeros_like(features[:1])])

    def _weights(self, scales: Sequence[float], mask: Latents | None, shape: LatentShape) -> list[Latents | None]:
        """Return the weight of the pictures in each cross attention; None where they do not count."""
        if mask is None:
            return [np.full((1, 1, 1), scale, np.float32) if scale else None for scale in scales]
        sizes = [(shape.rows, shape.columns)]
        for _ in range(max(one.halved for one in self.attentions)):
            sizes.append((-(-sizes[-1][0] // 2), -(-sizes[-1][1] // 2)))
        within = [_resized(mask, rows, columns) for rows, columns in sizes]
        pairs = zip(scales, self.attentions, strict=True)
        return [np.float32(scale) * within[one.halved] if scale else None for scale, one in pairs]

    def _encoding(self, use: AdapterUse, net: IPAdapter) -> Stage:
        """Return the stage that encodes the pictures of a use."""
        assert net.encoder is not None
        count, tokens = len(use.pictures) + 1, net.encoder.config.patches + 1
        return image_encoders.encoding(self.runtime, net, count, tokens, keeps=True)

    def _projecting(self, use: AdapterUse, net: IPAdapter) -> Stage:
        """Return the stage that makes keys and values of the pictures of a use."""
        config: IPAdapterConfig = net.component.config
        assert net.encoder is not None
        states = net.encoder.config.patches + 1 if config.sees_states else 1
        count = len(use.pictures)
        results = 2 * 2 * 4 * count * (config.tokens or states) * sum(config.widths)
        widths = 4 * config.inner + 2 * config.attention + config.feed_forward + 2 * config.text + config.features
        activations = (count + 1) * (states + config.tokens) * widths * 4
        return Stage(
            name="adapter",
            resident=net.name,
            component=net.component,
            splits=(Split(activations=self.runtime.call_bytes(net.component, activations) + results, results=results),),
        )


def holding(active: Sequence[ActivePictures], sigma: float) -> tuple[int, ...]:
    """Return the numbers of those that hold at a noise level."""
    return tuple(i for i, one in enumerate(active) if one.end < sigma <= one.begin)


def rows(positions: Sequence[int], branches: int) -> list[int]:
    """Return for each branch of a batch whether it has the pictures, 0, or empty ones, 1: the negative prompt's, which
    is the last of several `branches`."""
    return [int(branches > 1 and position == branches - 1) for position in positions]


def _resized(mask: Latents, rows: int, columns: int) -> Latents:
    """Return a mask [1 1 H W] as the weights [1 L 1] of rows x columns pixels."""
    factors = rows / mask.shape[-2], columns / mask.shape[-1]
    return resampling.resampled(mask, rows, columns, factors, "latent-bicubic").reshape(1, -1, 1)
