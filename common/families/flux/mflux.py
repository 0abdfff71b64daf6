"""A Flux.1 folder that mflux saved: its names for some layers, strings only.

mflux has the published configurations alone, so a folder without them means these. Its T5 has the table of distances in
every block, and its convolutions have their channels last.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from qwenimg.common.base.shape import Manifest
from qwenimg.common.families.flux.texts import CLIP, T5
from qwenimg.common.formats.files import find_files
from qwenimg.common.formats.headers import peek
from qwenimg.common.networks.denoisers.flux_dit import FluxConfig
from qwenimg.common.networks.encoders import clip, t5
from qwenimg.common.parts import mflux
from qwenimg.common.weights.keys import Rename

_FEED_FORWARD = {"linear1": "net.0.proj", "linear2": "net.2"}
_LAYER = re.compile(r"(transformer_blocks\.\d+\.ff(?:_context)?)\.(linear[12])\.(.+)")
SIGNS = ("transformer_blocks.0.ff.linear1.", "transformer_blocks.0.ff_context.linear1.")
GROUP = 64  # values of one scale, always in mflux
_GUIDANCE = "time_text_embed.guidance_embedder."
_T5_BLOCK = re.compile(r"t5_blocks\.(?P<block>\d+)\.(?P<part>attention|ff)\.(?P<rest>.+)")
_T5_PARTS = {"attention": "layer.0", "ff": "layer.1"}
_DISTANCES = "SelfAttention.relative_attention_bias."


def sizes(folder: Path) -> dict[str, Any]:
    """Return the fields of the transformer's configuration in which the published models differ: whether it is told
    its guidance, and the channels that it takes and makes. Raises ModelError."""
    guided, channels = False, FluxConfig.in_channels
    for path in find_files(folder / "transformer").files:
        header = peek(path)
        guided = guided or any(key.startswith(_GUIDANCE) for key in header.tensors)
        scales, weight = (header.tensors.get(f"x_embedder.{leaf}") for leaf in ("scales", "weight"))
        if scales is not None and len(scales.shape) == 2:
            channels = GROUP * scales.shape[1]
        elif weight is not None and len(weight.shape) == 2 and weight.dtype != "U32":
            channels = weight.shape[1]
    return {"guidance_embeds": guided, "in_channels": channels, "out_channels": FluxConfig.in_channels}


def _transformer(manifest: Manifest) -> Rename:
    def rename(key: str) -> str:
        layer = _LAYER.fullmatch(key)
        return f"{layer[1]}.{_FEED_FORWARD[layer[2]]}.{layer[3]}" if layer else key

    return rename


def _t5(manifest: Manifest) -> Rename:
    def rename(key: str) -> str | None:
        if block := _T5_BLOCK.fullmatch(key):
            number, part, rest = block.groups()
            again = rest.startswith(_DISTANCES) and number != "0"
            return None if again else f"encoder.block.{number}.{_T5_PARTS[part]}.{rest}"
        return f"encoder.{key}" if key.startswith("final_layer_norm.") else t5.rename(key)

    return rename


RENAMES = {"transformer": _transformer, CLIP: lambda manifest: clip.rename, T5: _t5, "vae": mflux.vae}
"""For each part, from its manifest, the function that renames keys of diffusers or mflux to those of the manifest."""
