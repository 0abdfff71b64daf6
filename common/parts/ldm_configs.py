"""The configuration of a CLIP in a single file, from the shapes of their tensors.

Such a file has no configuration. It follows from the shapes, and from published values that shapes do not show: the
heads of text encoders have 64 channels.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qwenimg.common.base.config import parse
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.encoders import clip
from qwenimg.common.networks.encoders.clip import CLIPConfig
from qwenimg.common.networks.layout import shape_of, without_prefix
from qwenimg.common.parts.ldm_keys import CLIP_H_LAYERS
from qwenimg.common.prompts.clip import EOS_PAD, OPEN_CLIP_PAD

HEAD_DIM = 64


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text encoder of a single file: its folder in diffusers' layout, its prefix, and what pads its prompts."""

    component: str
    prefix: str
    open_clip: bool = False  # trained by OpenCLIP, and in its names
    projected: bool = False
    converted: str = ""  # the prefix where stable-diffusion.cpp gave it transformers' names
    renamed: bool = False  # it has transformers' names

    @property
    def pad(self) -> str:
        return OPEN_CLIP_PAD if self.open_clip else EOS_PAD

    @property
    def fused(self) -> bool:
        """True if q, k and v are one matrix and the names are OpenCLIP's."""
        return self.open_clip and not self.renamed

    def within(self, names: Collection[str]) -> Text | None:
        """Return this text encoder with the prefix that it has in `names`; None if it is not there."""
        if self.converted and any(name.startswith(f"{self.converted}text_model.encoder.") for name in names):
            return replace(self, prefix=self.converted, renamed=True)
        return self if any(name.startswith(self.prefix) for name in names) else None


def clip_config(path: Path, header: Header, text: Text) -> tuple[str, CLIPConfig]:
    """Return the prefix before the manifest's or OpenCLIP's names, and the configuration. Raises ModelError."""
    prefix = text.prefix
    if not text.fused and any(key.startswith(f"{prefix}text_model.") for key in header.tensors):
        prefix += "text_model."
    shapes = without_prefix(header, prefix)
    layer = r"transformer\.resblocks\.(\d+)\." if text.fused else r"encoder\.layers\.(\d+)\."
    layers = len({match[1] for key in shapes if (match := re.match(layer, key))})
    names = {"token": "token_embedding.weight", "position": "positional_embedding", "inner": "0.mlp.c_fc.weight"}
    if not text.fused:
        token, position = (f"embeddings.{name}_embedding.weight" for name in ("token", "position"))
        names = {"token": token, "position": position, "inner": "0.mlp.fc1.weight"}
    inner = ("transformer.resblocks." if text.fused else "encoder.layers.") + names["inner"]
    vocabulary, width = shape_of(path, shapes, names["token"], 2)
    data: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": shape_of(path, shapes, inner, 2)[0],
        "num_hidden_layers": layers if text.projected or not text.open_clip else min(layers, CLIP_H_LAYERS),
        "num_attention_heads": max(1, width // HEAD_DIM),
        "max_position_embeddings": shape_of(path, shapes, names["position"], 2)[0],
        "hidden_act": "gelu" if text.open_clip else "quick_gelu",
        "eos_token_id": clip.LEGACY_EOS,
    }
    if text.projected and f"{text.prefix}text_projection.weight" in header.tensors:  # as transformers has it
        data["projection_dim"] = shape_of(path, without_prefix(header, text.prefix), "text_projection.weight", 2)[0]
    elif text.projected:
        data["projection_dim"] = shape_of(path, shapes, "text_projection", 2)[1]
    return prefix, parse(CLIPConfig, data, source=path)
