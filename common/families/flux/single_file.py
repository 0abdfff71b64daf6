"""A FLUX.1 in one file, as ComfyUI has it: the transformer, CLIP, T5 and the VAE, each behind its prefix."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from qwenimg.common.base.safe_files import closed_on_error
from qwenimg.common.families.flux.texts import CLIP, T5
from qwenimg.common.formats.headers import open_header, peek
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.denoisers.flux_dit import FluxConfig
from qwenimg.common.networks.denoisers.flux_names import LAYOUTS
from qwenimg.common.networks.vaes import kl_vae, kl_vae_names
from qwenimg.common.parts import open_file
from qwenimg.common.parts.ldm_configs import Text
from qwenimg.common.parts.texts import clip_files, t5_files
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.weights.part_names import VAES
from qwenimg.common.weights.plan import closed_on_failure

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


def open_parts(path: Path) -> dict[str, Component]:
    """Open the components in the file of a model. Raises ModelError."""
    components: dict[str, Component] = {}
    with closed_on_failure() as keep:
        for name in parts_of(peek(path)):
            components[name] = open_part(path, name)
            keep(components[name].plan)
        check_known(path, components, ())
    return components


def open_part(path: Path, name: str, *, for_rewrite: bool = False) -> Component:
    """Open the component `name` in the file of a model. Raises ModelError."""
    if name == "transformer":
        return open_file.open_part(LAYOUTS, path, FluxConfig(), name, for_rewrite=for_rewrite)
    if name == "vae":
        return open_file.open_part(kl_vae_names.LAYOUTS, path, kl_vae.FLUX_1, name, for_rewrite=for_rewrite)
    header = open_header(path)
    with closed_on_error(header.file):
        if name == T5:
            return t5_files.within(header, PREFIXES[T5], T5, for_rewrite=for_rewrite)
        return clip_files.within(
            header, Text(component=CLIP, prefix=PREFIXES[CLIP], renamed=True), for_rewrite=for_rewrite
        )


def check_known(path: Path, opened: Mapping[str, Component], elsewhere: Collection[str]) -> None:
    """Check that each tensor in the file of a model belongs to one of the components `opened` from it, or to one
    that the user gave from `elsewhere`. Raises ModelError."""
    header = peek(path)
    prefixes: dict[str, Any] = {"vae": VAES, **{part: (prefix,) for part, prefix in PREFIXES.items()}}
    naming = LAYOUTS.find(header.tensors)
    prefixes["transformer"] = (naming.prefix if naming else "",)
    others = [prefix for part in elsewhere for prefix in prefixes[part] if prefix]
    others.append(f"{PREFIXES[CLIP]}text_projection.")  # published with it; the pooled text is not projected
    open_file.check_whole(header, opened.values(), "FLUX.1", others)
