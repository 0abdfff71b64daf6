"""The Ovis-Image models that are known by name."""

from __future__ import annotations

from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.parts.downloads import ConfigDownload

IMAGE = KnownModel(
    name="ovis-image",
    repo="AIDC-AI/Ovis-Image-7B",
    title="Ovis-Image, 7B",
    license="Apache-2.0",
    purpose="posters, logos and pages with much writing, English and Chinese",
    steps=50,
    guidance=5.0,
    bytes=18_350_000_000,
    memory=13_400_000_000,
    family="ovis",
    aliases=("ovis-image-7b", "ovis"),
    files=("ovis_image_bf16", "ovis_image"),
)
KNOWN = (IMAGE,)
SMALL_FILES = ConfigDownload(
    name="ovis-files",
    repo="AIDC-AI/Ovis-Image-7B",
    title="the small files of Ovis-Image",
    family="ovis",
)
