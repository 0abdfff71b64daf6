"""The Chroma models that are known by name."""

from __future__ import annotations

from qwenimg.common.families.known_model import KnownModel

HD = KnownModel(
    name="chroma1-hd",
    repo="lodestones/Chroma1-HD",
    title="Chroma1-HD, 9B",
    license="Apache-2.0",
    purpose="pictures of every style from English text, with negative prompts: an open FLUX.1",
    steps=40,
    guidance=3.0,
    bytes=27_480_000_000,
    memory=19_000_000_000,
    family="chroma",
    aliases=("chroma", "chroma-hd"),
    files=("chroma1-hd", "chroma1-hd-fp8mixed"),
)
KNOWN = (HD,)
