"""The Qwen-Image models that are known by name."""

from __future__ import annotations

from functools import partial

from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.parts.downloads import ConfigDownload, Download

_qwen = partial(
    KnownModel,
    family="qwen-image",
    license="Apache-2.0",
    guidance=4.0,
    negative_prompt=" ",
    bytes=57_700_000_000,
    memory=30_000_000_000,
)
_edit = partial(_qwen, memory=32_700_000_000)  # it sees a picture too
KNOWN = (
    _qwen(
        name="qwen-image",
        repo="Qwen/Qwen-Image",
        title="Qwen-Image, 20B",
        purpose="pictures from text, with readable writing, English and Chinese",
        width=1328,
        height=1328,
        steps=50,
        files=("qwen_image_bf16",),
    ),
    _qwen(
        name="qwen-image-2512",
        repo="Qwen/Qwen-Image-2512",
        title="Qwen-Image, 20B, of December 2025",
        purpose="qwen-image with more natural people and detail",
        width=1328,
        height=1328,
        steps=50,
        files=("qwen_image_2512_bf16",),
    ),
    _edit(
        name="qwen-image-edit-2511",
        repo="Qwen/Qwen-Image-Edit-2511",
        title="Qwen-Image-Edit, 20B, of November 2025",
        purpose="edits a picture, or makes one of several: -i, up to three",
        steps=40,
        files=("qwen_image_edit_2511_bf16",),
    ),
    _edit(
        name="qwen-image-edit-2509",
        repo="Qwen/Qwen-Image-Edit-2509",
        title="Qwen-Image-Edit, 20B, of September 2025",
        purpose="the Edit model of September 2025, for LoRAs made for it",
        steps=40,
        files=("qwen_image_edit_2509_bf16",),
    ),
    _edit(
        name="qwen-image-edit",
        repo="Qwen/Qwen-Image-Edit",
        title="Qwen-Image-Edit, 20B",
        purpose="the first Edit model: edits one picture",
        steps=50,
        files=("qwen_image_edit_bf16",),
    ),
    _qwen(
        name="qwen-image-layered",
        repo="Qwen/Qwen-Image-Layered",
        title="Qwen-Image-Layered, 20B",
        purpose="takes a picture apart into layers with transparency: -i",
        width=640,
        height=640,
        steps=50,
        files=("qwen_image_layered_bf16",),
    ),
)
SMALL_FILES = ConfigDownload(
    name="qwen-image-files",
    repo="Qwen/Qwen-Image",
    title="the small files of Qwen-Image",
    bytes=4_700_000,
    family="qwen-image",
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

_FOLDER = ("config.json", "diffusion_pytorch_model.safetensors")
_PATCHES = ("model.safetensors",)
_control = partial(Download, license="Apache-2.0", files=_PATCHES, controls="qwen-image")
CONTROLS = (
    _control(
        name="qwen-image-controlnet-union",
        repo="InstantX/Qwen-Image-ControlNet-Union",
        title="a ControlNet for Qwen-Image, 1.8B",
        bytes=3_540_000_000,
        purpose="--control by canny edges, soft edges, depth or a pose",
        files=_FOLDER,
    ),
    _control(
        name="qwen-image-controlnet-inpainting",
        repo="InstantX/Qwen-Image-ControlNet-Inpainting",
        title="a ControlNet for Qwen-Image that paints within a mask, 2.1B",
        bytes=4_230_000_000,
        purpose="--control by a picture with --mask, to paint it anew there",
        files=_FOLDER,
    ),
    _control(
        name="qwen-image-patches-canny",
        repo="DiffSynth-Studio/Qwen-Image-Blockwise-ControlNet-Canny",
        title="patches for Qwen-Image's blocks, 1.1B",
        bytes=2_270_000_000,
        purpose="--control by canny edges, by a smaller network",
    ),
    _control(
        name="qwen-image-patches-depth",
        repo="DiffSynth-Studio/Qwen-Image-Blockwise-ControlNet-Depth",
        title="patches for Qwen-Image's blocks, 1.1B",
        bytes=2_270_000_000,
        purpose="--control by depth, by a smaller network",
    ),
    _control(
        name="qwen-image-patches-inpaint",
        repo="DiffSynth-Studio/Qwen-Image-Blockwise-ControlNet-Inpaint",
        title="patches for Qwen-Image's blocks, 1.1B",
        bytes=2_270_000_000,
        purpose="--control by a picture with --mask, by a smaller network",
    ),
    _control(
        name="qwen-image-in-context-control-union",
        repo="DiffSynth-Studio/Qwen-Image-In-Context-Control-Union",
        title="a LoRA with which Qwen-Image sees a control picture, 0.5B",
        bytes=944_000_000,
        purpose="--control by canny, soft or line edges, depth, normals or a pose, by a LoRA",
    ),
)
