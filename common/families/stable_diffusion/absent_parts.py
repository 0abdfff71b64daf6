"""Parts that a model lacks and the user gives from elsewhere: they stand in until they are replaced.

A part that stands in has the configuration of its type as published, and no files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import bad
from qwenimg.common.families.choices import Choices
from qwenimg.common.families.stable_diffusion.kinds import KINDS
from qwenimg.common.families.stable_diffusion.published import models, vae
from qwenimg.common.families.stable_diffusion.single_file import SingleFile
from qwenimg.common.networks import clip, kl_vae, unet
from qwenimg.common.networks.clip import CLIPConfig
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.unet import UNetConfig
from qwenimg.common.parts.components import on_paper
from qwenimg.common.parts.ldm_configs import HEAD_DIM, Text
from qwenimg.common.runtime.checkpoint import Component

_OPTIONS = {"unet": "--unet", "vae": "--vae"}  # all others are text encoders


def lacks(source: Path, names: Iterable[str], *, parts_help: bool = True) -> ModelError:
    """Return the error of a model without the parts `names`; `parts_help`: options that give them would do."""
    names = list(names)
    options = " ".join(f"{_OPTIONS.get(name, '--text-encoder')} FILE" for name in names) if parts_help else ""
    add = f"add {options}, or " if options else ""
    return bad(source, f"lacks {', '.join(names)}: {add}give a file or a folder that has the whole model")


def may_be_given(choices: Choices) -> frozenset[str]:
    """Return the parts that may be elsewhere: of two text encoders either, until the file that is given is read."""
    given = choices.elsewhere
    texts = frozenset({"text_encoder", "text_encoder_2"})
    return given | texts if given & texts else given


def absent_of_file(opened: SingleFile, choices: Choices) -> dict[str, Component]:
    """Return what stands in for each part that a single file lacks. Raise ModelError where `choices` do not give it."""
    kind, absent = opened.found.kind, opened.found.lacks
    if kind is None:
        raise lacks(opened.path, absent, parts_help=False)
    return stand_ins(opened.path, kind, absent, opened.unet, opened.texts, choices)


def stand_ins(
    source: Path,
    kind: str,
    absent: Collection[str],
    unet_config: UNetConfig | None,
    texts: Mapping[str, CLIPConfig],
    choices: Choices,
) -> dict[str, Component]:
    """Return what stands in for the `absent` parts of a model of type `kind` with this UNet and these `texts`. Raise
    ModelError where `choices` do not give all of them."""
    absent_texts = [text for text in KINDS[kind].texts if text.component in absent]
    given_texts = sum(part.startswith("text_encoder") for part in choices.parts)
    missing = [name for name in absent if name in _OPTIONS and name not in choices.elsewhere]
    missing += [text.component for text in absent_texts][given_texts:]
    if missing:
        raise lacks(source, missing)
    own_unet = unet_config or _unet(kind)
    configs: dict[str, tuple[Network, Any]] = {
        "unet": (unet.NETWORK, own_unet),
        "vae": (kl_vae.NETWORK, replace(vae(), scaling_factor=KINDS[kind].scaling_factor)),
    }
    width = own_unet.cross_attention_dim - sum(config.hidden_size for config in texts.values())
    for text, own_width in zip(absent_texts, _widths(width, len(absent_texts)), strict=True):
        configs[text.component] = (clip.NETWORK, _text(source, text, own_width))
    return {name: on_paper(*row, "float32") for name, row in configs.items() if name in absent}


def _unet(kind: str) -> UNetConfig:
    """Return the published configuration of a type, which holds for a file in diffusers' names."""
    known = models()
    if kind == "sd2":
        return replace(
            known["sd15"].unet, cross_attention_dim=1024, attention_head_dim=(5, 10, 20, 20), use_linear_projection=True
        )
    return known["sd15" if kind == "sd1" else "sdxl"].unet


def _widths(width: int, count: int) -> list[int]:
    """Return the widths of the text encoders that together are `width` wide: of two the first is a ViT-L."""
    return [clip.VIT_L.hidden_size, width - clip.VIT_L.hidden_size] if count == 2 else [width] * count


def _text(path: Path, text: Text, width: int) -> CLIPConfig:
    """Return the published configuration of a text encoder, at another width. Raise ModelError."""
    known = clip.VIT_L
    if text.open_clip:
        known = clip.OPEN_CLIP_BIG_G if text.projected else clip.OPEN_CLIP_H
    if width < HEAD_DIM or width % HEAD_DIM:
        raise bad(path, f"lacks {text.component}, which would have to be {width} wide: no text encoder is")
    return replace(known, hidden_size=width, num_attention_heads=width // HEAD_DIM)
