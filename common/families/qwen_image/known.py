"""The Qwen-Image models that are known by name."""

from __future__ import annotations

from qwenimg.common.families.known_model import KnownModel

KNOWN = (
    KnownModel(
        name="qwen-image",
        repo="Qwen/Qwen-Image",
        title="Qwen-Image, 20B",
        license="Apache-2.0",
        purpose="pictures from text, with readable writing, English and Chinese",
        width=1328,
        height=1328,
        steps=50,
        guidance=4.0,
        negative_prompt=" ",
        bytes=57_700_000_000,
        memory=30_000_000_000,
        family="qwen-image",
        files=("qwen_image_bf16",),
    ),
    KnownModel(
        name="qwen-image-2512",
        repo="Qwen/Qwen-Image-2512",
        title="Qwen-Image, 20B, of December 2025",
        license="Apache-2.0",
        purpose="the same with more natural people and detail",
        width=1328,
        height=1328,
        steps=50,
        guidance=4.0,
        negative_prompt=" ",
        bytes=57_700_000_000,
        memory=30_000_000_000,
        family="qwen-image",
        files=("qwen_image_2512_bf16",),
    ),
)
BUILT_IN = KnownModel(
    name="shapes-v1",
    repo=None,
    title="shapes, the built-in demo model",
    license="Apache-2.0",
    purpose="coloured shapes; shows that everything works here",
    width=256,
    height=256,
    steps=20,
    guidance=3.0,
    negative_prompt=" ",
    bytes=0,
    memory=400_000_000,
    family="qwen-image",
    aliases=("shapes",),
)
"""The model that ships with this package: `qwenimg selftest` judges its images."""

_EDITS = "edits images; this version makes images from text"
# Why others are not supported
REFUSED = {
    "qwen-image-edit": _EDITS,
    "qwen-image-edit-2509": _EDITS,
    "qwen-image-edit-2511": _EDITS,
    "qwen-image-layered": "makes the layers of an image; this version makes images from text",
    "qwen-image-2.1": "a different architecture that this version does not support",
}
