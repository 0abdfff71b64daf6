"""The FLUX.2 models that are known by name."""

from __future__ import annotations

from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.parts.texts.piece import SMALL_FILE_NAMES, Piece

KNOWN = (
    KnownModel(
        name="flux2-klein-4b",
        repo="black-forest-labs/FLUX.2-klein-4B",
        title="FLUX.2 klein, 4B",
        license="Apache-2.0",
        purpose="pictures from text and a reference picture, in 4 steps",
        width=1024,
        height=1024,
        steps=4,
        guidance=1.0,
        negative_prompt="",
        bytes=15_980_000_000,
        memory=9_500_000_000,
        family="flux2",
        aliases=("flux.2-klein-4b", "flux2-klein"),
        files=("flux-2-klein-4b",),
    ),
    KnownModel(
        name="flux2-klein-9b",
        repo="black-forest-labs/FLUX.2-klein-9B",
        title="FLUX.2 klein, 9B",
        license="FLUX Non-Commercial",
        purpose="klein 4B with more detail; gated",
        width=1024,
        height=1024,
        steps=4,
        guidance=1.0,
        negative_prompt="",
        bytes=34_730_000_000,
        memory=20_200_000_000,
        family="flux2",
        aliases=("flux.2-klein-9b",),
        files=("flux-2-klein-9b",),
    ),
    KnownModel(
        name="flux2-klein-base-4b",
        repo="black-forest-labs/FLUX.2-klein-base-4B",
        title="FLUX.2 klein base, 4B",
        license="Apache-2.0",
        purpose="the model that klein 4B is distilled from, with guidance",
        width=1024,
        height=1024,
        steps=50,
        guidance=4.0,
        negative_prompt="",
        bytes=15_980_000_000,
        memory=9_500_000_000,
        family="flux2",
        aliases=("flux.2-klein-base-4b",),
        files=("flux-2-klein-base-4b",),
    ),
    KnownModel(
        name="flux2-klein-base-9b",
        repo="black-forest-labs/FLUX.2-klein-base-9B",
        title="FLUX.2 klein base, 9B",
        license="FLUX Non-Commercial",
        purpose="the model that klein 9B is distilled from; gated",
        width=1024,
        height=1024,
        steps=50,
        guidance=4.0,
        negative_prompt="",
        bytes=34_730_000_000,
        memory=20_200_000_000,
        family="flux2",
        aliases=("flux.2-klein-base-9b",),
        files=("flux-2-klein-base-9b",),
    ),
)
SMALL_FILES = Piece(
    name="flux2-files",
    repo="black-forest-labs/FLUX.2-klein-4B",
    title="the small files of FLUX.2 klein",
    bytes=15_900_000,
    license="Apache-2.0",
    purpose="tokenizer and configurations, where the weights are in other files",
    files=SMALL_FILE_NAMES,
    family="flux2",
)
_WHY = "has a text encoder of 24 B parameters (Mistral Small 3) that is not supported; FLUX.2 klein is"
# Why others are not supported
REFUSED = {
    "flux.2-dev": _WHY,
    "flux2-dev": _WHY,
}
