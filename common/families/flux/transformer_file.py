"""Flux.1's transformer in one file, with its authors' names or diffusers': configuration, and place of each parameter.

Unusual about its authors' names, beside those of `flux_names`: in blocks of one stream q, k and v are rows of one
tensor, and the feed-forward's rows, four times as many, follow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qwenimg.common.base.config import parse
from qwenimg.common.formats.files import find_files
from qwenimg.common.formats.headers import peek
from qwenimg.common.networks.denoisers import flux_dit
from qwenimg.common.networks.denoisers.flux_dit import FluxConfig
from qwenimg.common.parts import flux_names
from qwenimg.common.parts.authors_names import QKV, Layers, TransformerFile
from qwenimg.common.parts.ldm_configs import Shapes, shape_of
from qwenimg.common.weights.keys import Place, Rows

GROUP = 64  # values of one scale, always in mflux
_GUIDANCE = "time_text_embed.guidance_embedder."
_ENDS: Layers = {
    **flux_names.ENDS,
    **{
        f"time_text_embed.{ours}_embedder.linear_{i}": f"{theirs}_in.{layer}"
        for ours, theirs in (("timestep", "time"), ("guidance", "guidance"), ("text", "vector"))
        for i, layer in ((1, "in_layer"), (2, "out_layer"))
    },
}
_DOUBLE: Layers = {
    **flux_names.DOUBLE,
    "norm1.linear": "img_mod.lin",
    "norm1_context.linear": "txt_mod.lin",
    "ff.net.0.proj": "img_mlp.0",
    "ff.net.2": "img_mlp.2",
    "ff_context.net.0.proj": "txt_mlp.0",
    "ff_context.net.2": "txt_mlp.2",
}
_SINGLE: Layers = {
    **flux_names.SINGLE,
    **{f"attn.to_{x}": Place("linear1", Rows(i, i + 1, 7)) for i, x in QKV},
    "proj_mlp": Place("linear1", Rows(3, 7, 7)),
    "norm.linear": "modulation.lin",
    "proj_out": "linear2",
}


def _config(path: Path, shapes: Shapes, like: FluxConfig, called: Callable[[str], str]) -> FluxConfig:
    """Return the configuration of the transformer with these `shapes`, whose names `called` makes of diffusers'; the
    axes of positions are those of `like`. Raises ModelError."""
    pooled = called("time_text_embed.text_embedder.linear_1.weight")
    data = asdict(like) | {
        **flux_names.sizes(path, shapes, called),
        "out_channels": shape_of(path, shapes, called("proj_out.weight"), 2)[0],
        "pooled_projection_dim": shape_of(path, shapes, pooled, 2)[1],
        "guidance_embeds": called("time_text_embed.guidance_embedder.linear_1.weight") in shapes,
    }
    return parse(FluxConfig, data, source=path)


def mflux_sizes(folder: Path) -> dict[str, Any]:
    """Return the fields of the configuration of a transformer that mflux saved in which the published models differ:
    the input for guidance, and the channels that it takes and makes. Raises ModelError."""
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


def place(name: str) -> Place:
    """Return the place of a parameter in a file with its authors' names."""
    return flux_names.place(name, _ENDS, _DOUBLE, _SINGLE)


FILE = TransformerFile(
    network=flux_dit.NETWORK,
    title="Flux.1",
    sign="single_blocks.0.modulation.lin.weight",
    diffusers_sign="single_transformer_blocks.0.norm.linear.weight",
    place=place,
    config=_config,
)
