"""The LongCat-Image models that are known by name."""

from __future__ import annotations

from functools import partial

from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.parts.downloads import ConfigDownload

_longcat = partial(KnownModel, family="longcat", license="Apache-2.0", bytes=29_300_000_000, memory=15_000_000_000)
IMAGE = _longcat(
    name="longcat-image",
    repo="meituan-longcat/LongCat-Image",
    title="LongCat-Image, 6B",
    purpose='photographs, and writing in English and Chinese: text in "quotes" is spelled',
    steps=50,
    guidance=4.0,
    files=("longcat_image_bf16",),
)
EDIT = _longcat(
    name="longcat-image-edit",
    repo="meituan-longcat/LongCat-Image-Edit",
    title="LongCat-Image-Edit, 6B",
    purpose="edits a picture and keeps the rest of it: -i",
    memory=16_500_000_000,
    steps=50,
    guidance=4.5,
    files=("longcat_image_edit_bf16",),
)
KNOWN = (IMAGE, EDIT)
SMALL_FILES = ConfigDownload(
    name="longcat-files",
    repo="meituan-longcat/LongCat-Image",
    title="the small files of LongCat-Image",
    family="longcat",
)


def of_name(name: str) -> KnownModel:
    """Return the known model that a file or folder called `name` is of."""
    return EDIT if "edit" in name.lower() else IMAGE
