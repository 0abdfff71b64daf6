"""A whole model in one file, as ComfyUI saves it: which parts are in it, by the prefixes of their names."""

from __future__ import annotations

from collections.abc import Mapping

from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.layout import Layouts
from qwenimg.common.networks.vaes import kl_vae_names
from qwenimg.common.weights.part_names import PARTS, part_of


def parts_of(header: Header) -> list[str]:
    """Return the parts behind prefixes of their own in a file with this header: text_encoder, vae."""
    there = {part_of(key) for key in header.tensors}
    return [part for part in PARTS if part in there]


def is_model(header: Header, denoiser: Layouts) -> bool:
    """Return whether a file with this header has the transformer and another part of the model."""
    return denoiser.find_in(header) is not None and bool(parts_of(header))


def named_parts(header: Header, denoiser: Layouts, prefixes: Mapping[str, str]) -> list[str]:
    """Return the parts in a file with this header that has a transformer with its authors' names; none of another file.
    prefixes: the starts of the names of the text encoders."""
    naming = denoiser.find_in(header)
    if naming is None or naming.layout.place is None:
        return []
    texts = [part for part, prefix in prefixes.items() if any(name.startswith(prefix) for name in header.tensors)]
    return ["transformer", *texts, *(["vae"] if kl_vae_names.LAYOUTS.find_placed(header.tensors) else [])]
