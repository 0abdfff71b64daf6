"""A FLUX.1 in one file, as ComfyUI has it: the transformer, CLIP, T5 and the VAE, each behind its prefix."""

from __future__ import annotations

from qwenimg.common.families.flux.texts import CLIP, T5
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.denoisers.flux_names import LAYOUTS
from qwenimg.common.networks.vaes import kl_vae_names

PREFIXES = {CLIP: "text_encoders.clip_l.transformer.", T5: "text_encoders.t5xxl.transformer."}


def parts_of(header: Header) -> list[str]:
    """Return the names of the components in a file that has FLUX.1's transformer, in its authors' names; none of
    another file."""
    names = header.tensors
    if LAYOUTS.find_placed(names) is None:
        return []
    texts = [part for part, prefix in PREFIXES.items() if any(name.startswith(prefix) for name in names)]
    return ["transformer", *texts, *(["vae"] if kl_vae_names.LAYOUTS.find_placed(names) else [])]


def is_model(header: Header) -> bool:
    """Return whether the file has a part of the model beside the transformer."""
    return len(parts_of(header)) > 1
