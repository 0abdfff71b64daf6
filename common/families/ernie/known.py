"""The ERNIE-Image models that are known by name."""

from __future__ import annotations

from functools import partial

from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.parts.downloads import ConfigDownload

_ernie = partial(KnownModel, family="ernie", license="Apache-2.0", bytes=24_100_000_000, memory=17_500_000_000)
TURBO = _ernie(
    name="ernie-image-turbo",
    repo="baidu/ERNIE-Image-Turbo",
    title="ERNIE-Image-Turbo, 8B",
    purpose="posters, comics and dense writing, English and Chinese, in 8 steps",
    steps=8,
    guidance=1.0,
    files=("ernie-image-turbo",),
)
IMAGE = _ernie(
    name="ernie-image",
    repo="baidu/ERNIE-Image",
    title="ERNIE-Image, 8B",
    purpose="the model that ERNIE-Image-Turbo is distilled from, which follows long prompts more closely",
    steps=50,
    guidance=4.0,
    files=("ernie-image",),
)
KNOWN = (TURBO, IMAGE)
SMALL_FILES = ConfigDownload(
    name="ernie-files",
    repo="baidu/ERNIE-Image",
    title="the small files of ERNIE-Image",
    family="ernie",
)


def of_name(name: str) -> KnownModel:
    """Return the known model that a file or folder called `name` is of: no tensor tells them apart."""
    return TURBO if "turbo" in name.lower() else IMAGE
