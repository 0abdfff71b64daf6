"""The SANA models that are known by name."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.networks.denoisers.sana_dit import SanaConfig
from qwenimg.common.parts.downloads import ConfigDownload

LICENSE = "NVIDIA non-commercial (NSCL v2), text encoder Gemma"
_sana = partial(
    KnownModel, family="sana", license=LICENSE, steps=20, guidance=4.5, bytes=9_730_000_000, memory=6_200_000_000
)
LARGE_15 = _sana(
    name="sana-1.5-4.8b",
    repo="Efficient-Large-Model/SANA1.5_4.8B_1024px_diffusers",
    title="SANA 1.5, 4.8B",
    purpose="pictures of many kinds; the largest SANA; not for commercial use",
    bytes=15_950_000_000,
    memory=11_000_000_000,
    aliases=("sana1.5-4.8b",),
    files=("sana1.5_4.8b_1024px",),
)
SANA_15 = _sana(
    name="sana-1.5",
    repo="Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers",
    title="SANA 1.5, 1.6B",
    purpose="pictures of many kinds by a small and fast model; not for commercial use",
    aliases=("sana", "sana1.5", "sana-1.5-1.6b", "sana1.5-1.6b"),
    files=("sana1.5_1.6b_1024px",),
)
SANA = _sana(
    name="sana-1.6b",
    repo="Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers",
    title="SANA 1.0, 1.6B",
    purpose="the first SANA; not for commercial use",
    aliases=("sana-1.0",),
    files=("sana_1600m_1024px_bf16", "sana_1600m_1024px", "sana_1600m_1024px_multiling", "sana_1600m_512px"),
)
SMALL = _sana(
    name="sana-0.6b",
    repo="Efficient-Large-Model/Sana_600M_1024px_diffusers",
    title="SANA 1.0, 0.6B",
    purpose="the smallest SANA; not for commercial use",
    bytes=8_840_000_000,
    dtype="float16",
    denoiser_dtype="float32",
    files=("sana_600m_1024px_multiling", "sana_600m_512px_multiling"),
)
LARGE_PICTURES = _sana(
    name="sana-4k",
    repo="Efficient-Large-Model/Sana_1600M_4Kpx_BF16_diffusers",
    title="SANA 1.0, 1.6B for 4K",
    purpose="pictures of 4096 x 4096 pixels at once; not for commercial use",
    width=4096,
    height=4096,
    guidance=5.0,
    memory=24_000_000_000,
    files=("sana_1600m_4kpx_bf16",),
)
MEDIUM_PICTURES = replace(
    LARGE_PICTURES,
    name="sana-2k",
    repo="Efficient-Large-Model/Sana_1600M_2Kpx_BF16_diffusers",
    title="SANA 1.0, 1.6B for 2K",
    purpose="pictures of 2048 x 2048 pixels at once; not for commercial use",
    width=2048,
    height=2048,
    memory=9_000_000_000,
    files=("sana_1600m_2kpx_bf16",),
)
SPRINT = _sana(
    name="sana-sprint",
    repo="Efficient-Large-Model/Sana_Sprint_1.6B_1024px_diffusers",
    title="SANA-Sprint, 1.6B",
    purpose="pictures in 1 to 4 steps; not for commercial use",
    steps=2,
    aliases=("sana-sprint-1.6b",),
    files=("sana_sprint_1.6b_1024px",),
)
SMALL_SPRINT = _sana(
    name="sana-sprint-0.6b",
    repo="Efficient-Large-Model/Sana_Sprint_0.6B_1024px_diffusers",
    title="SANA-Sprint, 0.6B",
    purpose="pictures in 1 to 4 steps by the smallest SANA; not for commercial use",
    steps=2,
    bytes=7_660_000_000,
    files=("sana_sprint_0.6b_1024px",),
)
KNOWN = (SANA_15, LARGE_15, SPRINT, SMALL_SPRINT, SANA, SMALL, MEDIUM_PICTURES, LARGE_PICTURES)
SMALL_FILES = ConfigDownload(
    name="sana-files",
    repo="Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers",
    title="the small files of SANA",
    license=LICENSE,
    family="sana",
)


def of_name(name: str) -> KnownModel:
    """Return the known model that a file or folder called `name` is of, for what no tensor shows."""
    plain = name.lower()
    is_small = any(word in plain for word in ("0.6b", "600m"))
    if "sprint" in plain:
        return SMALL_SPRINT if is_small else SPRINT
    if any(word in plain for word in ("4.8b", "4800m")):
        return LARGE_15
    if is_small:
        return SMALL
    sizes = {"4k": LARGE_PICTURES, "2k": MEDIUM_PICTURES, "1.5": SANA_15, "1600m": SANA, "1.0": SANA}
    return next((known for word, known in sizes.items() if word in plain), SANA_15)


def of_config(config: SanaConfig) -> KnownModel:
    """Return the known model that a transformer of this configuration is nearest to."""
    is_small = config.dim < (SanaConfig().dim + 1152) // 2
    if config.guidance_embeds:
        return SMALL_SPRINT if is_small else SPRINT
    if config.interpolation_scale is not None:
        return LARGE_PICTURES if config.sample_size > 64 else MEDIUM_PICTURES
    if config.qk_norm is not None:
        return LARGE_15 if config.num_layers > 40 else SANA_15
    return SMALL if is_small else SANA
