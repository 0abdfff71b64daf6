"""The Stable Diffusion 1.x, 2.x and XL models that are known by name."""

from __future__ import annotations

from functools import partial

from qwenimg.common.families.known_model import KnownModel

_sd = partial(KnownModel, family="stable-diffusion", dtype="float32")
KNOWN = (
    _sd(
        name="sd15",
        repo="stable-diffusion-v1-5/stable-diffusion-v1-5",
        title="Stable Diffusion 1.5",
        license="CreativeML Open RAIL-M",
        purpose="small pictures on small machines; inpainting by -i and --mask",
        width=512,
        height=512,
        steps=50,
        guidance=7.5,
        bytes=4_270_000_000,
        memory=4_000_000_000,
        aliases=("sd1.5", "sd-1.5"),
        files=("v1-5-pruned", "v1-5-pruned-emaonly", "v1-5-pruned-emaonly-fp16"),
    ),
    _sd(
        name="sdxl",
        repo="stabilityai/stable-diffusion-xl-base-1.0",
        title="Stable Diffusion XL 1.0",
        license="CreativeML Open RAIL++-M",
        purpose="pictures of 1024 pixels on ordinary machines",
        steps=50,
        guidance=5.0,
        bytes=13_880_000_000,
        memory=8_000_000_000,
        aliases=("sdxl-base",),
        files=("sd_xl_base_1.0", "sd_xl_base_1.0_0.9vae", "stable-diffusion-xl-base-1-0"),
    ),
    _sd(
        name="sdxl-turbo",
        repo="stabilityai/sdxl-turbo",
        title="SDXL Turbo",
        license="Stability AI Community",
        purpose="pictures of 512 pixels in 1 to 4 steps",
        width=512,
        height=512,
        steps=1,
        guidance=0.0,
        bytes=13_880_000_000,
        memory=8_000_000_000,
    ),
    _sd(
        name="sdxl-refiner",
        repo="stabilityai/stable-diffusion-xl-refiner-1.0",
        title="the refiner of Stable Diffusion XL 1.0",
        license="CreativeML Open RAIL++-M",
        purpose="ends pictures of sdxl: --refiner sdxl-refiner",
        steps=50,
        guidance=5.0,
        bytes=12_150_000_000,
        memory=8_000_000_000,
    ),
)
_WHY = "has no repository of its maker any more; give its folder, its file, or a hub id that you trust"
# Why others are not supported
REFUSED = {
    "sd21": _WHY,
    "sd2.1": _WHY,
    "sd-2.1": _WHY,
}
