"""FLUX.2 dev as it is known by name."""

from __future__ import annotations

from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.parts.downloads import ConfigDownload

LICENSE = "FLUX Non-Commercial"
DEV = KnownModel(
    name="flux2-dev",
    repo="black-forest-labs/FLUX.2-dev",
    title="FLUX.2 dev, 32B",
    purpose="pictures from text and up to ten reference pictures, the largest of its makers' open models",
    steps=50,
    guidance=4.0,
    bytes=112_800_000_000,
    memory=68_100_000_000,
    family="flux2-dev",
    license=LICENSE,
    gated=True,
    aliases=("flux.2-dev",),
    files=("flux2-dev", "flux2_dev_fp8mixed"),
)
KNOWN = (DEV,)
SMALL_FILES = ConfigDownload(
    name="flux2-dev-files",
    repo="black-forest-labs/FLUX.2-dev",
    title="the small files of FLUX.2 dev",
    family="flux2-dev",
    license=LICENSE,
    bytes=17_200_000,
)
