"""The models that are known by name: where they are, and their defaults.

Another model (a folder, another hub id) takes its family's `Defaults` and nothing from here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches

from qwenimg.common.base.hf_cache import REPO
from qwenimg.common.parts.piece import CLIP_TOKENIZER, PIECES, T5_TOKENIZER, Piece


@dataclass(frozen=True)
class KnownModel:
    """One model. Sizes, steps, guidance and negative prompt are those of its model card."""

    name: str
    repo: str | None  # hub id, owner/name; None: it ships with this package, see `shapes.builtin`
    width: int  # pixels
    height: int
    steps: int
    guidance: float
    negative_prompt: str
    bytes: int  # of the files that are used, about; for messages
    memory: int  # bytes at its peak on a GPU or a Mac, at its size in the precision of `auto`, about; for messages
    title: str
    license: str
    purpose: str
    family: str


_QWEN, _Z, _FLUX, _F2, _SD = "qwen-image", "z-image", "flux", "flux2", "stable-diffusion"
_RAIL, _FLUX_NC = "CreativeML Open RAIL++-M", "FLUX Non-Commercial"
_SD3, _STABILITY = "sd3", "Stability AI Community"
# name, hub id, width, height, steps, guidance, negative prompt, bytes, memory; title, license, purpose, family
_ROWS = (
    ("qwen-image", "Qwen/Qwen-Image", 1328, 1328, 50, 4.0, " ", 57_700_000_000, 30_000_000_000, "Qwen-Image, 20B",
     "Apache-2.0", "pictures from text, with readable writing, English and Chinese", _QWEN),
    ("qwen-image-2512", "Qwen/Qwen-Image-2512", 1328, 1328, 50, 4.0, " ", 57_700_000_000, 30_000_000_000,
     "Qwen-Image, 20B, of December 2025", "Apache-2.0", "the same with more natural people and detail", _QWEN),
    ("z-image-turbo", "Tongyi-MAI/Z-Image-Turbo", 1024, 1024, 8, 0.0, "", 32_850_000_000, 14_000_000_000,
     "Z-Image-Turbo, 6B", "Apache-2.0", "photographs and writing, English and Chinese, in 8 steps", _Z),
    ("z-image", "Tongyi-MAI/Z-Image", 1024, 1024, 50, 4.0, "", 20_540_000_000, 14_000_000_000, "Z-Image, 6B",
     "Apache-2.0", "the model that Turbo is distilled from, with negative prompts and more variety", _Z),
    ("flux2-klein-4b", "black-forest-labs/FLUX.2-klein-4B", 1024, 1024, 4, 1.0, "", 15_980_000_000, 9_500_000_000,
     "FLUX.2 klein, 4B", "Apache-2.0", "pictures from text and a reference picture, in 4 steps", _F2),
    ("flux2-klein-9b", "black-forest-labs/FLUX.2-klein-9B", 1024, 1024, 4, 1.0, "", 34_730_000_000, 20_200_000_000,
     "FLUX.2 klein, 9B", _FLUX_NC, "the same with more detail; ask for access on its page first", _F2),
    ("flux2-klein-base-4b", "black-forest-labs/FLUX.2-klein-base-4B", 1024, 1024, 50, 4.0, "", 15_980_000_000,
     9_500_000_000, "FLUX.2 klein base, 4B", "Apache-2.0", "the model that klein 4B is distilled from", _F2),
    ("flux2-klein-base-9b", "black-forest-labs/FLUX.2-klein-base-9B", 1024, 1024, 50, 4.0, "", 34_730_000_000,
     20_200_000_000, "FLUX.2 klein base, 9B", _FLUX_NC, "the model that klein 9B is distilled from", _F2),
    ("flux-schnell", "black-forest-labs/FLUX.1-schnell", 1024, 1024, 4, 0.0, "", 33_740_000_000, 20_000_000_000,
     "FLUX.1 schnell, 12B", "Apache-2.0", "pictures from English text in 4 steps", _FLUX),
    ("flux-dev", "black-forest-labs/FLUX.1-dev", 1024, 1024, 28, 3.5, "", 33_760_000_000, 20_000_000_000,
     "FLUX.1 dev, 12B", "FLUX.1 dev Non-Commercial", "the same in 28 steps, with more detail; gated", _FLUX),
    ("sd15", "stable-diffusion-v1-5/stable-diffusion-v1-5", 512, 512, 50, 7.5, "", 4_270_000_000, 4_000_000_000,
     "Stable Diffusion 1.5", "CreativeML Open RAIL-M",
     "small pictures on small machines; inpainting by -i and --mask", _SD),
    ("sdxl", "stabilityai/stable-diffusion-xl-base-1.0", 1024, 1024, 50, 5.0, "", 13_880_000_000, 8_000_000_000,
     "Stable Diffusion XL 1.0", _RAIL, "pictures of 1024 pixels on ordinary machines", _SD),
    ("sdxl-turbo", "stabilityai/sdxl-turbo", 512, 512, 1, 0.0, "", 13_880_000_000, 8_000_000_000,
     "SDXL Turbo", "Stability AI Community", "pictures of 512 pixels in 1 to 4 steps", _SD),
    ("sdxl-refiner", "stabilityai/stable-diffusion-xl-refiner-1.0", 1024, 1024, 50, 5.0, "", 12_150_000_000,
     8_000_000_000, "the refiner of Stable Diffusion XL 1.0", _RAIL,
     "ends pictures of sdxl: --refiner sdxl-refiner", _SD),
    ("sd3-medium", "stabilityai/stable-diffusion-3-medium-diffusers", 1024, 1024, 28, 7.0, "", 15_500_000_000,
     10_000_000_000, "Stable Diffusion 3 medium, 2B", _STABILITY, "pictures that follow long prompts",
     _SD3),
    ("sd3.5-medium", "stabilityai/stable-diffusion-3.5-medium", 1024, 1024, 40, 4.5, "", 16_300_000_000,
     10_000_000_000, "Stable Diffusion 3.5 medium, 2.5B", _STABILITY,
     "sd3-medium, improved; its makers add --skip-layers 7-9", _SD3),
    ("sd3.5-large", "stabilityai/stable-diffusion-3.5-large", 1024, 1024, 28, 3.5, "", 27_600_000_000, 12_000_000_000,
     "Stable Diffusion 3.5 large, 8B", _STABILITY, "the largest Stable Diffusion, for long prompts", _SD3),
    ("sd3.5-large-turbo", "stabilityai/stable-diffusion-3.5-large-turbo", 1024, 1024, 4, 0.0, "", 27_600_000_000,
     12_000_000_000, "Stable Diffusion 3.5 large turbo, 8B", _STABILITY, "sd3.5-large in 4 steps, without guidance",
     _SD3),
    ("shapes-v1", None, 256, 256, 20, 3.0, " ", 0, 400_000_000, "shapes, the built-in demo model",
     "Apache-2.0", "coloured shapes; shows that everything works here", _QWEN),
)  # fmt: skip
KNOWN = {row[0]: KnownModel(*row) for row in _ROWS}
BUILT_IN = KNOWN["shapes-v1"]  # what the gate in tools/gate.py judges, and `qwenimg selftest` on the user's machine
DEFAULT = "qwen-image"

_FILE = re.compile(rf"(?P<repo>{REPO})/(?P<file>([A-Za-z0-9_][\w.-]*/)*[\w.-]+\.(safetensors|gguf))", re.ASCII)


def find_piece(name: str) -> Piece | None:
    """Find the piece with this name or hub id, or one file of a repository, such as a LoRA, by
    owner/name/file.safetensors."""
    if match := _FILE.fullmatch(name):
        return Piece(
            name=name,
            repo=match["repo"],
            title="one file of a repository",
            bytes=0,
            license="",
            purpose="a LoRA, or a part of a model",
            files=(match["file"],),
        )
    lower = name.lower()
    return next((one for one in PIECES if lower == one.name or (not one.family and lower == one.repo)), None)


def small_files(family: str) -> Piece | None:
    """Return the small files beside the weights of a `family`, if they are a piece of their own."""
    return next((piece for piece in PIECES if piece.family == family), None)


ALIASES = {
    "shapes": BUILT_IN.name,
    "sd1.5": "sd15",
    "sd-1.5": "sd15",
    "sdxl-base": "sdxl",
    "flux": "flux-schnell",
    "flux.1-schnell": "flux-schnell",
    "flux.1-dev": "flux-dev",
    "sd3": "sd3-medium",
    "sd35-medium": "sd3.5-medium",
    "sd35-large": "sd3.5-large",
    "sd35-large-turbo": "sd3.5-large-turbo",
    "zimage": "z-image",
    "z-image-base": "z-image",
    "zimage-turbo": "z-image-turbo",
    **{f"flux.2-{name}": f"flux2-{name}" for name in ("klein-4b", "klein-9b", "klein-base-4b", "klein-base-9b")},
    "flux2-klein": "flux2-klein-4b",
}

_EDITS = "edits images; this version makes images from text"
_SD21 = "has no repository of its maker any more; give its folder, its file, or a hub id that you trust"
_VOCABULARY = f"a vocabulary for Stable Diffusion files, and no model; get it by: qwenimg pull {CLIP_TOKENIZER.name}"
_SMALL = "files beside the weights, and no model; get them by: qwenimg pull "
_FLUX_2_DEV = "has a text encoder of 24 B parameters (Mistral Small 3) that is not supported; FLUX.2 klein is"
REFUSED = {
    CLIP_TOKENIZER.name: _VOCABULARY,
    **{piece.name: _SMALL + piece.name for piece in PIECES if piece.family},
    T5_TOKENIZER.name: f"a vocabulary for T5, and no model; get it by: qwenimg pull {T5_TOKENIZER.name}",
    "clip-vit-large-patch14": _VOCABULARY,
    "qwen-image-edit": _EDITS,
    "qwen-image-edit-2509": _EDITS,
    "qwen-image-edit-2511": _EDITS,
    "qwen-image-layered": "makes the layers of an image; this version makes images from text",
    "qwen-image-2.1": "a different architecture that this version does not support",
    "flux.2-dev": _FLUX_2_DEV,
    "flux2-dev": _FLUX_2_DEV,
    "z-image-edit": _EDITS,
    "z-image-omni-base": _EDITS,
    "flux.1-kontext-dev": _EDITS,
    "flux.1-fill-dev": "an inpainting model of its own, which this version does not support; flux-dev takes --mask",
    "sd21": _SD21,
    "sd2.1": _SD21,
    "sd-2.1": _SD21,
}


def find(name: str) -> KnownModel | None:
    """Find the known model with this name or hub id; upper and lower case are the same."""
    lower = name.lower()
    lower = ALIASES.get(lower, lower)
    return KNOWN.get(lower) or next((r for r in KNOWN.values() if r.repo and r.repo.lower() == lower), None)


def nearest(name: str) -> str | None:
    """Return the known name that is most like `name`: of a model, a piece, or a repository of theirs."""
    plain = name.lower()
    names = [*KNOWN, *(piece.name for piece in PIECES)]
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
