"""The models of Lumina-Image 2.0's form that are known by name."""

from __future__ import annotations

from functools import partial

from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.parts.downloads import ConfigDownload

_lumina = partial(KnownModel, family="lumina", memory=6_200_000_000)
IMAGE = _lumina(
    name="lumina-image-2",
    repo="Alpha-VLLM/Lumina-Image-2.0",
    title="Lumina-Image 2.0, 2.6B",
    license="Apache-2.0, text encoder Gemma",
    purpose="pictures of many kinds by a small model that reads long English prompts",
    steps=50,
    guidance=4.0,
    bytes=16_030_000_000,
    denoiser_dtype="float32",
    aliases=("lumina2", "lumina-2", "lumina-image-2.0"),
    files=("lumina_2", "lumina_2_model_bf16"),
)
YUME = _lumina(
    name="netayume-lumina",
    repo="duongve/NetaYume-Lumina-Image-2.0-Diffusers-v40",
    title="NetaYume Lumina 4.0, 2.6B",
    license="Apache-2.0, text encoder Gemma",
    purpose="anime and illustrations from tags and English text",
    steps=30,
    guidance=4.0,
    bytes=10_620_000_000,
    aliases=("netayume", "neta-yume-lumina"),
    files=("netayumev35_pretrained_all_in_one", "netayumev4_all_in_one"),
)
KNOWN = (IMAGE, YUME)
SMALL_FILES = ConfigDownload(
    name="lumina-files",
    repo="Alpha-VLLM/Lumina-Image-2.0",
    title="the small files of Lumina-Image 2.0",
    family="lumina",
)


def of_name(name: str) -> KnownModel:
    """Return the known model that a file or folder called `name` is of: no tensor tells them apart."""
    return YUME if "yume" in name.lower() else IMAGE
