"""The FLUX.3 models that are known by name."""

from __future__ import annotations

from functools import partial

from qwenimg.common.base.config import MODULAR_INDEX
from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.parts.downloads import TOKENIZER_FILES, ConfigDownload

LICENSE = "FLUX Kommunity (non-commercial)"
_klein = partial(KnownModel, family="flux3", license=LICENSE, bytes=20_150_000_000, memory=13_000_000_000)
KLEIN = _klein(
    name="flux3-klein",
    repo="black-forest-labs/flux-3-image-klein",
    title="FLUX.3 Image Klein, 5.5B",
    purpose="pictures from a long text and up to ten pictures (-i), in 16 steps; not for commercial use",
    steps=16,
    guidance=1.0,
    aliases=("flux-3-image-klein", "flux3-image-klein", "flux.3-klein"),
)
BASE = _klein(
    name="flux3-klein-base",
    repo="black-forest-labs/flux-3-image-klein-base",
    title="FLUX.3 Image Klein base, 5.5B",
    purpose="the model that flux3-klein is distilled from, with guidance; not for commercial use",
    steps=50,
    guidance=4.0,
    aliases=("flux-3-image-klein-base", "flux3-image-klein-base", "flux.3-klein-base"),
)
KNOWN = (KLEIN, BASE)
_PLACE = "text_encoder"  # of the tokenizer
SMALL_FILES = ConfigDownload(
    name="flux3-files",
    repo="black-forest-labs/flux-3-image-klein",
    title="the small files of FLUX.3 Image Klein",
    license=LICENSE,
    files=(
        MODULAR_INDEX,
        *(f"{part}/config.json" for part in ("transformer", "text_encoder", "vae")),
        *(f"{_PLACE}/{name}" for name in TOKENIZER_FILES),
    ),
    tokenizer=_PLACE,
    family="flux3",
)
