"""The FLUX.2 klein models that are known by name."""

from __future__ import annotations

from functools import partial

from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.parts.downloads import ConfigDownload

_small = partial(KnownModel, family="flux2", license="Apache-2.0", bytes=15_980_000_000, memory=9_500_000_000)
_large = partial(KnownModel, family="flux2", license="FLUX Non-Commercial", bytes=34_730_000_000, memory=20_200_000_000)
KLEIN_4B = _small(
    name="flux2-klein-4b",
    repo="black-forest-labs/FLUX.2-klein-4B",
    title="FLUX.2 klein, 4B",
    purpose="pictures from text and a reference picture, in 4 steps",
    steps=4,
    guidance=1.0,
    aliases=("flux.2-klein-4b", "flux2-klein"),
    files=("flux-2-klein-4b",),
)
KLEIN_9B = _large(
    name="flux2-klein-9b",
    repo="black-forest-labs/FLUX.2-klein-9B",
    title="FLUX.2 klein, 9B",
    purpose="klein 4B with more detail",
    gated=True,
    steps=4,
    guidance=1.0,
    aliases=("flux.2-klein-9b",),
    files=("flux-2-klein-9b",),
)
KLEIN_9B_KV = _large(
    name="flux2-klein-9b-kv",
    repo="black-forest-labs/FLUX.2-klein-9b-kv",
    title="FLUX.2 klein, 9B KV",
    purpose="klein 9B whose reference pictures are computed once for all steps",
    gated=True,
    steps=4,
    guidance=1.0,
    aliases=("flux.2-klein-9b-kv",),
    files=("flux-2-klein-9b-kv", "flux-2-klein-9b-kv-fp8"),
)
BASE_4B = _small(
    name="flux2-klein-base-4b",
    repo="black-forest-labs/FLUX.2-klein-base-4B",
    title="FLUX.2 klein base, 4B",
    purpose="the model that klein 4B is distilled from, with guidance",
    steps=50,
    guidance=4.0,
    aliases=("flux.2-klein-base-4b",),
    files=("flux-2-klein-base-4b",),
)
BASE_9B = _large(
    name="flux2-klein-base-9b",
    repo="black-forest-labs/FLUX.2-klein-base-9B",
    title="FLUX.2 klein base, 9B",
    purpose="the model that klein 9B is distilled from",
    gated=True,
    steps=50,
    guidance=4.0,
    aliases=("flux.2-klein-base-9b",),
    files=("flux-2-klein-base-9b",),
)
KNOWN = (KLEIN_4B, KLEIN_9B, KLEIN_9B_KV, BASE_4B, BASE_9B)
SMALL_FILES = ConfigDownload(
    name="flux2-files",
    repo="black-forest-labs/FLUX.2-klein-4B",
    title="the small files of FLUX.2 klein",
    family="flux2",
)
