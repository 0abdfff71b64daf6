"""Z-Image's transformer in one file, with its authors' names or diffusers': configuration, and place of each parameter.

Unusual about its authors' names: q, k and v are rows of one tensor; the layers are those of Lumina-Image 2.0, whose
files differ in the width of text and in the modulation's layer, and GGUF files name that architecture.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qwenimg.common.base.config import parse
from qwenimg.common.base.safe_files import bad, closed_on_error
from qwenimg.common.formats import gguf
from qwenimg.common.formats.headers import open_header
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.denoisers import zimage_dit
from qwenimg.common.networks.denoisers.zimage_dit import PATCH, ZImageConfig
from qwenimg.common.parts import authors_names, merged_file
from qwenimg.common.parts.components import open_component
from qwenimg.common.parts.ldm_configs import Shapes, behind, shape_of
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.weights.keys import Place, Rows, check_architecture

SIGN = "layers.0.adaLN_modulation.0.weight"
_FUSED_SIGN = "layers.0.attention.qkv.weight"
_IGNORED = "norm_final.weight"  # left over from the class of Lumina-Image 2.0
# A tensor that only another model with similar names has, and which model that is.
_OTHERS = {
    "layers.0.adaLN_modulation.1.weight": "Lumina-Image 2.0's transformer, which this version does not draw with",
    "siglip_embedder.1.weight": "the transformer of Z-Image-Omni or -Edit: this version makes images from text only",
    "siglip_refiner.0.attention_norm1.weight": "the transformer of Z-Image-Omni or -Edit: this version makes images "
    "from text only",
}
_PART = re.compile(r"(?P<block>.+)\.attention\.(?P<layer>to_[qkv]|to_out\.0|norm_[qk])\.weight")
_BLOCKS = re.compile(r"(layers|noise_refiner)\.(\d{1,4})\.")


def prefix_of(names: Collection[str]) -> str | None:
    """Return the prefix of the transformer's names in a file with these `names`; None in a file without it."""
    return authors_names.prefix_of(names, SIGN)


def is_model(header: Header) -> bool:
    """Return whether a file with this header has another part of the model beside the transformer."""
    known = prefix_of(header.tensors) is not None and gguf.may_be(header, zimage_dit.NETWORK.architectures)
    return known and bool(merged_file.parts_of(header))


def other_model(names: Collection[str]) -> str | None:
    """Return the title of the similar model that is in a file with these `names`, or None."""
    titles = (title for sign, title in _OTHERS.items() if authors_names.prefix_of(names, sign) is not None)
    return next(titles, None)


def open_transformer(path: Path, like: ZImageConfig, *, whole: bool = False) -> Component:
    """Open the transformer in the file `path`. Its sizes are those of the file; `like` has the axes of positions,
    which no tensor shows. Raises ModelError."""
    network, title = zimage_dit.NETWORK, "transformer"
    header = open_header(path)
    with closed_on_error(header.file):
        check_architecture(header, network.architectures, title)
        prefix = _checked_prefix(header)
        config = config_of(header, prefix, like)
        if prefix + _FUSED_SIGN in header.tensors:
            return authors_names.open_transformer(
                header, prefix, network, config, place, "Z-Image", ignored=(_IGNORED,), whole=whole
            )
    header.file.close()
    return open_component(network, path, config, title, lambda key: _renamed(key, prefix), whole=whole)


def _checked_prefix(header: Header) -> str:
    """Return the prefix of the transformer's names. Raise ModelError for a file of another model."""
    if (other := other_model(header.tensors)) is not None:
        raise bad(header.file.path, f"is {other}")
    prefix = prefix_of(header.tensors)
    if prefix is None:
        raise bad(header.file.path, "holds no transformer of Z-Image, by its authors' names or diffusers'")
    return prefix


def _renamed(key: str, prefix: str) -> str | None:
    """Return the manifest's name of a tensor in diffusers' names behind `prefix`; None if it is not used."""
    name = key.removeprefix(prefix)
    return None if name == _IGNORED else zimage_dit.rename(name)


# Configuration


def config_of(header: Header, prefix: str, like: ZImageConfig) -> ZImageConfig:
    """Return the configuration of the transformer behind `prefix`; axes of positions are those of `like`. Raises
    ModelError."""
    path, stored = header.file.path, behind(header, prefix)
    shapes: Shapes = {zimage_dit.rename(key): shape for key, shape in stored.items()}
    norm = "norm_q" if "layers.0.attention.norm_q.weight" in shapes else "q_norm"
    dim, features = shape_of(path, shapes, "x_embedder.weight", 2)
    [head_dim] = shape_of(path, shapes, f"layers.0.attention.{norm}.weight", 1)
    blocks = {match.groups() for key in shapes if (match := _BLOCKS.match(key))}
    heads = dim // max(1, head_dim)
    data: dict[str, Any] = asdict(like) | {
        "in_channels": features // PATCH**2,
        "dim": dim,
        "n_layers": sum(kind == "layers" for kind, _ in blocks),
        "n_refiner_layers": sum(kind == "noise_refiner" for kind, _ in blocks),
        "n_heads": heads,
        "n_kv_heads": heads,
        "cap_feat_dim": shape_of(path, shapes, "cap_embedder.1.weight", 2)[1],
    }
    return parse(ZImageConfig, data, source=path)


# Names


def place(name: str) -> Place:
    """Return the place of a parameter in a file with its authors' names."""
    if (part := _PART.fullmatch(name)) is None:
        return Place(name.removesuffix(".weight") if "pad_token" in name else name)
    block, layer = part.groups()
    if layer.startswith("norm_"):
        return Place(f"{block}.attention.{layer[-1]}_norm.weight")
    if layer == "to_out.0":
        return Place(f"{block}.attention.out.weight")
    index = "qkv".index(layer[-1])
    return Place(f"{block}.attention.qkv.weight", Rows(index, index + 1, 3))
