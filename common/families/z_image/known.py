"""The Z-Image models that are known by name."""

from __future__ import annotations

from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.parts.texts.piece import SMALL_FILE_NAMES, Piece

KNOWN = (
    KnownModel(
        name="z-image-turbo",
        repo="Tongyi-MAI/Z-Image-Turbo",
        title="Z-Image-Turbo, 6B",
        license="Apache-2.0",
        purpose="photographs and writing, English and Chinese, in 8 steps",
        width=1024,
        height=1024,
        steps=8,
        guidance=0.0,
        negative_prompt="",
        bytes=32_850_000_000,
        memory=14_000_000_000,
        family="z-image",
        aliases=("zimage-turbo",),
        files=("z_image_turbo_bf16",),
    ),
    KnownModel(
        name="z-image",
        repo="Tongyi-MAI/Z-Image",
        title="Z-Image, 6B",
        license="Apache-2.0",
        purpose="the model that Z-Image-Turbo is distilled from, with negative prompts and more variety",
        width=1024,
        height=1024,
        steps=50,
        guidance=4.0,
        negative_prompt="",
        bytes=20_540_000_000,
        memory=14_000_000_000,
        family="z-image",
        aliases=("zimage", "z-image-base"),
        files=("z_image_bf16",),
    ),
)
SMALL_FILES = Piece(
    name="z-image-files",
    repo="Tongyi-MAI/Z-Image-Turbo",
    title="the small files of Z-Image",
    bytes=15_900_000,
    license="Apache-2.0",
    purpose="tokenizer and configurations, where the weights are in other files",
    files=SMALL_FILE_NAMES,
    family="z-image",
)
_WHY = "edits images; this version makes images from text"
# Why others are not supported
REFUSED = {
    "z-image-edit": _WHY,
    "z-image-omni-base": _WHY,
}
