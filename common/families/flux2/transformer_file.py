"""Flux.2's transformer in one file, with its authors' names or diffusers': configuration, and place of each parameter.

Unusual about its authors' names, beside those of `flux_names`: in blocks of one stream every layer is one tensor in
diffusers' names too, and all blocks have the same modulation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from qwenimg.common.base.config import parse
from qwenimg.common.base.hf_cache import told_name
from qwenimg.common.networks.denoisers import flux2_dit
from qwenimg.common.networks.denoisers.flux2_dit import Flux2Config
from qwenimg.common.parts import flux_names, known_configs
from qwenimg.common.parts.authors_names import Layers, TransformerFile
from qwenimg.common.parts.ldm_configs import Shapes, shape_of
from qwenimg.common.weights.keys import Place

_ENDS: Layers = {
    **flux_names.ENDS,
    **{
        f"time_guidance_embed.{name}_embedder.linear_{i}": f"{theirs}_in.{layer}"
        for name, theirs in (("timestep", "time"), ("guidance", "guidance"))
        for i, layer in ((1, "in_layer"), (2, "out_layer"))
    },
    **{
        f"{name}.linear": f"{name}.lin"
        for name in ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation")
    },
}
_DOUBLE: Layers = {
    **flux_names.DOUBLE,
    "ff.linear_in": "img_mlp.0",
    "ff.linear_out": "img_mlp.2",
    "ff_context.linear_in": "txt_mlp.0",
    "ff_context.linear_out": "txt_mlp.2",
}
_SINGLE: Layers = {**flux_names.SINGLE, "attn.to_qkv_mlp_proj": "linear1", "attn.to_out": "linear2"}


def _config(path: Path, shapes: Shapes, like: Flux2Config, called: Callable[[str], str]) -> Flux2Config:
    """Return the configuration of the transformer with these `shapes`, whose names `called` makes of diffusers'; the
    axes of positions are those of `like`. Raises ModelError."""
    time = called("time_guidance_embed.timestep_embedder.linear_1.weight")
    hidden = shape_of(path, shapes, called("transformer_blocks.0.ff.linear_out.weight"), 2)[1]
    data = asdict(like) | {
        **flux_names.sizes(path, shapes, called),
        "out_channels": None,
        "timestep_guidance_channels": shape_of(path, shapes, time, 2)[1],
        "mlp_ratio": hidden / max(1, shape_of(path, shapes, called("x_embedder.weight"), 2)[0]),
        "guidance_embeds": called("time_guidance_embed.guidance_embedder.linear_1.weight") in shapes,
    }
    return parse(Flux2Config, data, source=path)


def place(name: str) -> Place:
    """Return the place of a parameter in a file with its authors' names."""
    return flux_names.place(name, _ENDS, _DOUBLE, _SINGLE)


FILE = TransformerFile(
    network=flux2_dit.NETWORK,
    title="FLUX.2",
    sign="single_stream_modulation.lin.weight",
    diffusers_sign="single_stream_modulation.linear.weight",
    place=place,
    config=_config,
)


def model_of(transformer: Path) -> str:
    """Return the name of the published model that the transformer in a folder or file is of: of the size that its width
    is nearer to, and distilled unless its name says `base`. Raises ModelError."""
    small, large = (known_configs.read(f"flux2-klein-{size}", "transformer", FILE.network).dim for size in ("4b", "9b"))
    width, *_ = FILE.shape(transformer, "x_embedder.weight") or (small,)
    size = "4b" if width - small < large - width else "9b"
    return f"flux2-klein-{'base-' if 'base' in told_name(transformer).lower() else ''}{size}"
