"""Stand-ins for parts that a model lacks and the user gives from elsewhere.

A stand-in has the published configuration of its type, and no files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwenimg.common.base.safe_files import bad
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.families.opening import lacks
from qwenimg.common.families.stable_diffusion.kinds import KINDS
from qwenimg.common.families.stable_diffusion.single_file import SingleFile
from qwenimg.common.networks.denoisers import unet
from qwenimg.common.networks.denoisers.unet import UNetConfig
from qwenimg.common.networks.encoders import clip
from qwenimg.common.networks.encoders.clip import CLIPConfig
from qwenimg.common.networks.encoders.clip_names import HEAD_DIM
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.vaes import kl_vae
from qwenimg.common.networks.vaes.kl_vae import KLVAEConfig
from qwenimg.common.parts import known_configs
from qwenimg.common.parts.components import on_paper
from qwenimg.common.parts.texts.clip_files import Text
from qwenimg.common.runtime.checkpoint import Component


def may_be_given(options: LoadOptions) -> frozenset[str]:
    """Return the parts that the user may give: either of two text encoders, until the given file is read."""
    chosen = options.replaced
    texts = frozenset({"text_encoder", "text_encoder_2"})
    return chosen | texts if chosen & texts else chosen


def absent_of_file(opened: SingleFile, options: LoadOptions) -> dict[str, Component]:
    """Return a stand-in for each part that a single file lacks. Raise ModelError if `options` do not give the part."""
    kind, absent = opened.detected.kind, opened.detected.lacks
    if kind is None:
        raise bad(opened.path, f"lacks {', '.join(absent)}: give a file or folder of the whole model")
    return stand_ins(opened.path, kind, absent, opened.unet, opened.texts, options)


def stand_ins(
    source: Path,
    kind: str,
    absent: Collection[str],
    unet_config: UNetConfig | None,
    texts: Mapping[str, CLIPConfig],
    options: LoadOptions,
) -> dict[str, Component]:
    """Return stand-ins for the `absent` parts of a model of type `kind` with this UNet and these `texts`. Raise
    ModelError if `options` do not give all of them."""
    absent_texts = [text for text in KINDS[kind].texts if text.component in absent]
    given_texts = sum(part.startswith("text_encoder") for part in options.parts)
    missing = [name for name in absent if name in ("unet", "vae") and name not in options.replaced]
    missing += [text.component for text in absent_texts][given_texts:]
    if missing:
        raise lacks(source, missing)
    unet_or_published = unet_config or _unet(kind)
    vae: KLVAEConfig = known_configs.read("sd15", "vae", kl_vae.NETWORK)
    configs: dict[str, tuple[Network, Any]] = {
        "unet": (unet.NETWORK, unet_or_published),
        "vae": (kl_vae.NETWORK, replace(vae, scaling_factor=KINDS[kind].scaling_factor)),
    }
    width = unet_or_published.cross_attention_dim - sum(config.hidden_size for config in texts.values())
    for text, text_width in zip(absent_texts, _widths(width, len(absent_texts)), strict=True):
        configs[text.component] = (clip.NETWORK, _text(source, text, text_width))
    return {name: on_paper(*row, "float32") for name, row in configs.items() if name in absent}


def _unet(kind: str) -> UNetConfig:
    """Return the published configuration of a type's UNet: a file with diffusers' names has none of its own."""
    known: UNetConfig = known_configs.read("sd15" if kind in ("sd1", "sd2") else "sdxl", "unet", unet.NETWORK)
    if kind == "sd2":
        return replace(known, cross_attention_dim=1024, attention_head_dim=(5, 10, 20, 20), use_linear_projection=True)
    return known


def _widths(width: int, count: int) -> list[int]:
    """Return the widths of `count` text encoders, which add up to `width`; the first of two is a ViT-L."""
    return [clip.VIT_L.hidden_size, width - clip.VIT_L.hidden_size] if count == 2 else [width] * count


def _text(path: Path, text: Text, width: int) -> CLIPConfig:
    """Return the published configuration of a text encoder with this `width`. Raise ModelError."""
    if width < HEAD_DIM or width % HEAD_DIM:
        raise bad(path, f"lacks {text.component}, which would have to be {width} wide: no text encoder is")
    return replace(text.like, hidden_size=width, num_attention_heads=width // HEAD_DIM)
