"""The models that are known by name: where they are, and their defaults.

Another model (a folder, another hub id) takes its family's `Defaults` and nothing from here.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path

from qwenimg.common.base.config import data_folder
from qwenimg.common.base.hf_cache import REPO
from qwenimg.common.families.anima import known as anima
from qwenimg.common.families.auraflow import known as auraflow
from qwenimg.common.families.cascade import known as cascade
from qwenimg.common.families.chroma import known as chroma
from qwenimg.common.families.ernie import known as ernie
from qwenimg.common.families.flux import known as flux
from qwenimg.common.families.flux2 import known as flux2
from qwenimg.common.families.flux2 import known_dev as flux2_dev
from qwenimg.common.families.flux3 import known as flux3
from qwenimg.common.families.hunyuan import known as hunyuan
from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.families.krea2 import known as krea2
from qwenimg.common.families.longcat import known as longcat
from qwenimg.common.families.lumina import known as lumina
from qwenimg.common.families.ovis import known as ovis
from qwenimg.common.families.pixart import known as pixart
from qwenimg.common.families.qwen_image import known as qwen_image
from qwenimg.common.families.qwen_image_21 import known as qwen_image_21
from qwenimg.common.families.sana import known as sana
from qwenimg.common.families.sd3 import known as sd3
from qwenimg.common.families.stable_diffusion import known as stable_diffusion
from qwenimg.common.families.z_image import known as z_image
from qwenimg.common.parts.downloads import CLIP_TOKENIZER, T5_TOKENIZER, TINY_VAES, Download

# What each `known.py` has is taken from here: KNOWN, and where it has them SMALL_FILES, PARTS, CONTROLS,
# ADAPTERS, REFUSED.
_FAMILIES = (
    *(qwen_image, qwen_image_21, z_image, flux2, flux2_dev, flux3, flux),
    *(stable_diffusion, sd3, longcat, chroma, ernie, krea2, anima, ovis, lumina, pixart, auraflow, sana, hunyuan),
    cascade,
)
BUILT_IN = qwen_image.BUILT_IN
KNOWN: dict[str, KnownModel] = {
    known.name: known for known in (*(known for family in _FAMILIES for known in family.KNOWN), BUILT_IN)
}
DEFAULT = "qwen-image"
"""The model that is drawn with if none is named."""
FIRST = "z-image-turbo"
"""The model to pull first, from 8 GB of memory on. It is drawn with if none is named and only it is here."""
EDITORS = ("qwen-image-edit-2511", "qwen-image-edit-2509", "qwen-image-2.1", "qwen-image-2.1-turbo", "flux-kontext",
           "flux3-klein", "flux3-klein-base", "flux2-dev", "flux2-klein-9b", "flux2-klein-9b-kv", "flux2-klein-4b",
           "flux2-klein-base-9b", "flux2-klein-base-4b", "longcat-image-edit", "qwen-image-edit")  # fmt: skip
"""Models that see the picture of -i and change it by what the prompt says, best first."""
INPAINTERS = ("flux-fill", "qwen-image-edit-2511", "qwen-image-2512", "qwen-image", "z-image-turbo", "flux-dev", "sdxl",
              "sd3.5-medium", "sd15")  # fmt: skip
"""Models to draw within a mask, best first: one made for it, then others, which all take a mask."""
SEVERAL = "qwen-image-edit-2511 and -2509, qwen-image-2.1, FLUX.2 and FLUX.3 klein"
"""The models that see several pictures, for messages."""
DESCRIBING = "qwen-image-layered"
"""The model that writes the prompt of a picture."""
_SMALL_FILES: list[Download] = [
    download for family in _FAMILIES if (download := getattr(family, "SMALL_FILES", None)) is not None
]
PARTS: list[Download] = [download for family in _FAMILIES for download in getattr(family, "PARTS", ())]
"""The parts of models that are published by themselves and known by name."""
CONTROLS: list[Download] = [download for family in _FAMILIES for download in getattr(family, "CONTROLS", ())]
"""The control networks that are known by name."""
ADAPTERS: list[Download] = [download for family in _FAMILIES for download in getattr(family, "ADAPTERS", ())]
"""The IP-Adapters that are known by name."""
NAMED: tuple[Download, ...] = (CLIP_TOKENIZER, T5_TOKENIZER, *_SMALL_FILES, *PARTS, *CONTROLS, *ADAPTERS, *TINY_VAES)

_FILE = re.compile(rf"(?P<repo>{REPO})/(?P<file>([A-Za-z0-9_][\w.-]*/)*[\w.-]+\.(safetensors|gguf))", re.ASCII)


def find_download(name: str) -> Download | None:
    """Find the download with this name or hub id, or one file of a repository, such as a LoRA, by
    owner/name/file.safetensors."""
    if match := _FILE.fullmatch(name):
        return Download(
            name=name,
            repo=match["repo"],
            title="one file of a repository",
            bytes=0,
            license="",
            purpose="a LoRA, or a part of a model",
            files=(match["file"],),
        )
    lower = name.lower()
    return next((one for one in NAMED if lower == one.name or (one.is_alone and lower == one.repo.lower())), None)


def configurations(known: KnownModel) -> Path | None:
    """Return the folder of a known model's configurations, which this package ships without weights and tokenizer: its
    own, or those of its family; None for a model without them."""
    folders = (data_folder(name) for name in (known.folder or known.name, known.family))
    return next((folder for folder in folders if folder.is_dir()), None)


def small_files(family: str) -> Download | None:
    """Return the small files beside the weights of a `family`, if they are a download of their own."""
    return next((download for download in _SMALL_FILES if download.family == family), None)


ALIASES = {alias: known.name for known in KNOWN.values() for alias in known.aliases}

_VOCABULARY = f"a vocabulary for Stable Diffusion files, and no model; get it by: qwenimg pull {CLIP_TOKENIZER.name}"
_SMALL = "files beside the weights, and no model; get them by: qwenimg pull "
_REFUSED: list[dict[str, str]] = [getattr(family, "REFUSED", {}) for family in _FAMILIES]
REFUSED = {
    CLIP_TOKENIZER.name: _VOCABULARY,
    **{download.name: _SMALL + download.name for download in _SMALL_FILES},
    **{one.name: f"{one.title} alone: draw with {one.needed_by}, or give it with {one.option}" for one in PARTS},
    **{download.name: f"a control network: give it with --control {download.name}=PICTURE" for download in CONTROLS},
    **{one.name: f"an IP-Adapter: give it with --ip-adapter {one.name} --ip-image PICTURE" for one in ADAPTERS},
    **{download.name: f"a tiny VAE: give it with --vae {download.name}" for download in TINY_VAES},
    T5_TOKENIZER.name: f"a vocabulary for T5, and no model; get it by: qwenimg pull {T5_TOKENIZER.name}",
    "clip-vit-large-patch14": _VOCABULARY,
    **{name: why for refused in _REFUSED for name, why in refused.items()},
}


def find(name: str) -> KnownModel | None:
    """Find the known model with this name or hub id; upper and lower case are the same."""
    lower = name.lower()
    lower = ALIASES.get(lower, lower)
    return KNOWN.get(lower) or next((r for r in KNOWN.values() if r.repo and r.repo.lower() == lower), None)


def smallest() -> KnownModel:
    """Return the smallest model to download."""
    return min((known for known in KNOWN.values() if known.repo is not None), key=lambda known: known.bytes)


def nearest(name: str) -> str | None:
    """Return the known name that is most like `name`: of a model, a download, or a repository of theirs."""
    plain = name.lower()
    names = [*KNOWN, *(download.name for download in NAMED)]
    repos = {known.repo.lower(): known.repo for known in KNOWN.values() if known.repo}
    if plain in (*names, *ALIASES, *repos):
        return None
    if "/" in plain:
        matches = get_close_matches(plain, repos, n=1, cutoff=0.8)
        return repos[matches[0]] if matches else None
    starts = [known for known in names if len(plain) > 1 and known.startswith(plain)]
    close = starts or get_close_matches(plain, [*names, *ALIASES], n=1, cutoff=0.6)
    return ALIASES.get(close[0], close[0]) if close else None


def refusal(name: str) -> str | None:
    """Return the reason why the model `name`, a name or a hub id, cannot be used; None if no reason is known."""
    return REFUSED.get(name.lower().rpartition("/")[2])
