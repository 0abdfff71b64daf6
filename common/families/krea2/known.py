"""The Krea 2 models that are known by name."""

from __future__ import annotations

from functools import partial

from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.parts.downloads import ConfigDownload

LICENSE = "Krea 2 Community (revenue limit)"
_krea2 = partial(KnownModel, family="krea2", license=LICENSE, gated=True, bytes=35_400_000_000, memory=27_400_000_000)
TURBO = _krea2(
    name="krea-2-turbo",
    repo="krea/Krea-2-Turbo",
    title="Krea 2 Turbo, 12.8B",
    purpose="pictures of many styles in 8 steps; commercial use below $1,000,000 of revenue a year",
    steps=8,
    guidance=0.0,
    aliases=("krea2", "krea-2", "krea2-turbo"),
    files=("krea2_turbo_bf16", "krea2_turbo_fp8_scaled", "krea2_turbo_int8_convrot"),
)
RAW = _krea2(
    name="krea-2-raw",
    repo="krea/Krea-2-Raw",
    title="Krea 2 Raw, 12.8B",
    purpose="the model that krea-2-turbo is distilled from, to train LoRAs on; the same license",
    steps=52,
    guidance=3.5,
    aliases=("krea2-raw",),
    files=("krea2_raw_bf16", "krea2_raw_fp8_scaled"),
)
KNOWN = (TURBO, RAW)
SMALL_FILES = ConfigDownload(
    name="krea2-files",
    repo="krea/Krea-2-Turbo",
    title="the small files of Krea 2",
    license=LICENSE,
    family="krea2",
)


def of_name(name: str) -> KnownModel:
    """Return the known model that a file or folder called `name` is of: no tensor tells them apart."""
    return RAW if any(word in name.lower() for word in ("raw", "base")) else TURBO
