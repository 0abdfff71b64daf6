"""The Qwen-Image-2.1 models that are known by name."""

from __future__ import annotations

from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.parts.texts.piece import CONFIGURATIONS, TOKENIZER_FILES, Piece

LICENSE = "Qwen Research (non-commercial)"
KNOWN = (
    KnownModel(
        name="qwen-image-2.1",
        repo="Qwen/Qwen-Image-2.1",
        title="Qwen-Image-2.1, 7B",
        license=LICENSE,
        purpose="pictures from text and up to ten pictures (-i), with transparency; not for commercial use",
        width=1024,
        height=1024,
        steps=40,
        guidance=1.0,
        negative_prompt="",
        bytes=32_400_000_000,
        memory=17_200_000_000,
        family="qwen-image-2.1",
        files=("qwen_image_2.1_bf16",),
    ),
    KnownModel(
        name="qwen-image-2.1-turbo",
        repo="Qwen/Qwen-Image-2.1-Turbo",
        title="Qwen-Image-2.1-Turbo, 7B",
        license=LICENSE,
        purpose="qwen-image-2.1 in 8 steps; not for commercial use",
        width=1024,
        height=1024,
        steps=8,
        guidance=1.0,
        negative_prompt="",
        bytes=32_400_000_000,
        memory=17_200_000_000,
        family="qwen-image-2.1",
        files=("qwen_image_2.1_turbo_bf16",),
    ),
)
SMALL_FILES = Piece(
    name="qwen-image-2.1-files",
    repo="Qwen/Qwen-Image-2.1",
    title="the small files of Qwen-Image-2.1",
    bytes=15_900_000,
    license="Qwen Research (non-commercial)",
    purpose="tokenizer and configurations, where the weights are in other files",
    files=(*CONFIGURATIONS, *(f"processor/{name}" for name in TOKENIZER_FILES)),
    tokenizer="processor",
    family="qwen-image-2.1",
)
