"""The PixArt models that are known by name."""

from __future__ import annotations

from functools import partial

from qwenimg.common.families.known_model import KnownModel

ALPHA, SIGMA = "pixart-alpha", "pixart-sigma"
"""The folders of published configurations, and the variants."""
_pixart = partial(
    KnownModel,
    family="pixart",
    license="CreativeML Open RAIL++-M",
    dtype="float32",
    memory=9_900_000_000,
    mostly_text=True,
)
SIGMA_1024 = _pixart(
    name=SIGMA,
    repo="PixArt-alpha/PixArt-Sigma-XL-2-1024-MS",
    title="PixArt-Sigma, 0.6B",
    purpose="pictures of 1024 pixels from long English prompts by a small transformer",
    steps=20,
    guidance=4.5,
    bytes=21_830_000_000,
    aliases=("pixart", "pixart-sigma-1024"),
    files=("pixart-sigma-xl-2-1024-ms", "pixart_sigma_1024"),
)
ALPHA_1024 = _pixart(
    name=ALPHA,
    repo="PixArt-alpha/PixArt-XL-2-1024-MS",
    title="PixArt-alpha, 0.6B",
    purpose="the model before pixart-sigma, which sees the size of its pictures",
    steps=20,
    guidance=4.5,
    bytes=21_830_000_000,
    aliases=("pixart-alpha-1024",),
    files=("pixart-xl-2-1024-ms",),
)
LCM = _pixart(
    name="pixart-lcm",
    repo="PixArt-alpha/PixArt-LCM-XL-2-1024-MS",
    title="PixArt-LCM, 0.6B",
    purpose="pixart-alpha in 4 steps without guidance",
    steps=4,
    guidance=1.0,
    bytes=21_830_000_000,
    files=("pixart-lcm-xl-2-1024-ms",),
)
KNOWN = (SIGMA_1024, ALPHA_1024, LCM)
LENGTHS = {ALPHA: 120, SIGMA: 300}
"""The tokens of T5 that each variant reads."""
