"""The Z-Image models that are known by name."""

from __future__ import annotations

import re
from functools import partial

from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.parts.downloads import ConfigDownload, Download

_z_image = partial(KnownModel, family="z-image", license="Apache-2.0", memory=14_000_000_000)
TURBO = _z_image(
    name="z-image-turbo",
    repo="Tongyi-MAI/Z-Image-Turbo",
    title="Z-Image-Turbo, 6B",
    purpose="photographs and writing, English and Chinese, in 8 steps",
    steps=8,
    guidance=0.0,
    bytes=32_850_000_000,
    denoiser_dtype="float32",
    aliases=("zimage-turbo",),
    files=("z_image_turbo_bf16",),
)
BASE = _z_image(
    name="z-image",
    repo="Tongyi-MAI/Z-Image",
    title="Z-Image, 6B",
    purpose="the model that Z-Image-Turbo is distilled from, with negative prompts and more variety",
    steps=50,
    guidance=4.0,
    bytes=20_540_000_000,
    aliases=("zimage", "z-image-base"),
    files=("z_image_bf16",),
)
KNOWN = (TURBO, BASE)
SMALL_FILES = ConfigDownload(
    name="z-image-files",
    repo="Tongyi-MAI/Z-Image-Turbo",
    title="the small files of Z-Image",
    family="z-image",
)

_control = partial(Download, license="Apache-2.0", controls="z-image")
CONTROLS = (
    _control(
        name="z-image-controlnet-union",
        repo="alibaba-pai/Z-Image-Turbo-Fun-Controlnet-Union-2.1",
        title="a control network for Z-Image-Turbo, 3.4B",
        bytes=6_710_000_000,
        purpose="--control by canny or soft edges, lines, depth or a pose; with -i and --mask it paints within a mask",
        files=("Z-Image-Turbo-Fun-Controlnet-Union-2.1.safetensors",),
    ),
    _control(
        name="z-image-controlnet-union-1",
        repo="alibaba-pai/Z-Image-Turbo-Fun-Controlnet-Union",
        title="the first control network for Z-Image-Turbo, 1.6B",
        bytes=3_110_000_000,
        purpose="--control by canny or soft edges, depth or a pose, by a smaller network",
        files=("Z-Image-Turbo-Fun-Controlnet-Union.safetensors",),
    ),
)
# Published control networks: for how many blocks they have a layer; whether they take a mask and a second picture
PUBLISHED = {"z-image-controlnet-union": (2, True), "z-image-controlnet-union-1": (5, False)}


def of_name(name: str) -> KnownModel:
    """Return the known model that a file or folder called `name` is of: Turbo, unless it is called Z-Image without that
    word."""
    lower = name.lower()
    return BASE if "turbo" not in lower and re.search("z[-_]?image", lower) else TURBO


_WHY = "edits images; this version makes images from text"
# Why others are not supported
REFUSED = {
    "z-image-edit": _WHY,
    "z-image-omni-base": _WHY,
}
