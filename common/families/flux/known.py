"""The FLUX.1 models that are known by name."""

from __future__ import annotations

from qwenimg.common.families.known_model import KnownModel

KNOWN = (
    KnownModel(
        name="flux-schnell",
        repo="black-forest-labs/FLUX.1-schnell",
        title="FLUX.1 schnell, 12B",
        license="Apache-2.0",
        purpose="pictures from English text in 4 steps",
        width=1024,
        height=1024,
        steps=4,
        guidance=0.0,
        negative_prompt="",
        bytes=33_740_000_000,
        memory=20_000_000_000,
        family="flux",
        aliases=("flux", "flux.1-schnell"),
        files=("flux1-schnell", "flux1-schnell-fp8"),
    ),
    KnownModel(
        name="flux-dev",
        repo="black-forest-labs/FLUX.1-dev",
        title="FLUX.1 dev, 12B",
        license="FLUX.1 dev Non-Commercial",
        purpose="pictures with more detail than schnell's, in 28 steps; gated",
        width=1024,
        height=1024,
        steps=28,
        guidance=3.5,
        negative_prompt="",
        bytes=33_760_000_000,
        memory=20_000_000_000,
        family="flux",
        aliases=("flux.1-dev",),
        files=("flux1-dev", "flux1-dev-fp8"),
    ),
)
# Why others are not supported
REFUSED = {
    "flux.1-kontext-dev": "edits images; this version makes images from text",
    "flux.1-fill-dev": "an inpainting model of its own, which this version does not support; flux-dev takes --mask",
}
