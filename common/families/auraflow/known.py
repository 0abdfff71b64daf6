"""The models of AuraFlow's form that are known by name."""

from __future__ import annotations

from functools import partial

from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.parts.downloads import ConfigDownload

_aura = partial(
    KnownModel, family="auraflow", license="Apache-2.0", steps=50, guidance=3.5, bytes=16_830_000_000,
    memory=9_800_000_000, dtype="float16",
)  # fmt: skip
AURA = _aura(
    name="auraflow",
    repo="fal/AuraFlow-v0.3",
    title="AuraFlow 0.3, 6.8B",
    purpose="pictures that follow long English prompts, in sides of up to 1536 pixels",
    aliases=("auraflow-0.3", "auraflow-v0.3", "aura-flow"),
    files=("aura_flow_0.3",),
)
AURA_2 = _aura(
    name="auraflow-0.2",
    repo="fal/AuraFlow-v0.2",
    title="AuraFlow 0.2, 6.8B",
    purpose="the version before auraflow",
    aliases=("auraflow-v0.2",),
    files=("aura_flow_0.2",),
)
AURA_1 = _aura(
    name="auraflow-0.1",
    repo="fal/AuraFlow",
    title="AuraFlow 0.1, 6.8B",
    purpose="the first version of auraflow",
    aliases=("auraflow-v0.1",),
    files=("aura_flow_0.1",),
)
PONY = _aura(
    name="pony-v7",
    repo="purplesmartai/pony-v7-base",
    title="Pony V7 base, 6.8B",
    license="Pony License (limits commercial use)",
    purpose="characters of every kind, drawn or as photos, from English text",
    steps=30,
    aliases=("pony-v7-base", "ponyv7"),
    files=("pony-v7-base",),
)
KNOWN = (AURA, AURA_2, AURA_1, PONY)
SMALL_FILES = ConfigDownload(
    name="auraflow-files",
    repo="fal/AuraFlow-v0.3",
    title="the small files of AuraFlow",
    family="auraflow",
    bytes=1_900_000,
)


def of_name(name: str) -> KnownModel:
    """Return the known model that a file or folder called `name` is of: no tensor tells them apart."""
    return PONY if "pony" in name.lower() else AURA
