"""The Qwen-Image-2.1 models that are known by name."""

from __future__ import annotations

from functools import partial

from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.parts.downloads import CONFIGURATIONS, TOKENIZER_FILES, ConfigDownload

LICENSE = "Qwen Research (non-commercial)"
_qwen = partial(
    KnownModel, family="qwen-image-2.1", license=LICENSE, guidance=1.0, bytes=32_400_000_000, memory=17_200_000_000
)
BASE = _qwen(
    name="qwen-image-2.1",
    repo="Qwen/Qwen-Image-2.1",
    title="Qwen-Image-2.1, 7B",
    purpose="pictures from text and up to ten pictures (-i), with transparency; not for commercial use",
    steps=40,
    files=("qwen_image_2.1_bf16",),
)
TURBO = _qwen(
    name="qwen-image-2.1-turbo",
    repo="Qwen/Qwen-Image-2.1-Turbo",
    title="Qwen-Image-2.1-Turbo, 7B",
    purpose="qwen-image-2.1 in 8 steps; not for commercial use",
    steps=8,
    files=("qwen_image_2.1_turbo_bf16",),
)
KNOWN = (BASE, TURBO)


def of_name(name: str) -> KnownModel:
    """Return the known model that a file or folder called `name` is of: Turbo if it says so."""
    return TURBO if "turbo" in name.lower() else BASE


SMALL_FILES = ConfigDownload(
    name="qwen-image-2.1-files",
    repo="Qwen/Qwen-Image-2.1",
    title="the small files of Qwen-Image-2.1",
    license=LICENSE,
    files=(*CONFIGURATIONS, *(f"processor/{name}" for name in TOKENIZER_FILES)),
    tokenizer="processor",
    family="qwen-image-2.1",
)
