"""The models that share Qwen-Image's networks: text to image, three that edit pictures, and one that makes layers.

Files of weights alone tell only the last one, which has a tensor more: all others have the same tensors. A folder in
diffusers layout does, by the class of its pipeline and the configuration of its transformer; else the user says it, or
the name of the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.families.qwen_image.known import BUILT_IN
from qwenimg.common.networks.denoisers.qwen_dit import QwenDiTConfig
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.vaes.qwen_vae import QwenVAEConfig
from qwenimg.common.parts.texts.picture_texts import NO_LIMIT, VISION, PictureTemplate
from qwenimg.common.pictures.patches import QWEN2_VL
from qwenimg.common.prompts.qwen import Template
from qwenimg.common.request.few_steps import FewSteps

_START = "<|im_start|>system\n"
_USER = "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
DRAWS = Template(
    text=f"{_START}Describe the image by detailing the color, shape, size, texture, quantity, text, "
    f"spatial relationships of the objects and background:{_USER}",
    dropped=34,
    limit=1024,
    seen=512,
)
EDITS = Template(
    text=f"{_START}Describe the key features of the input image (color, shape, size, texture, objects, background), "
    "then explain how the user's text instruction should alter or modify the image. Generate a new image that meets "
    f"the user's requirements while maintaining consistency with the original input where appropriate.{_USER}",
    dropped=64,
    limit=NO_LIMIT,
    seen=NO_LIMIT,
)


def _plain(pictures: int) -> str:
    return VISION * pictures


def _numbered(pictures: int) -> str:
    return "".join(f"Picture {i}: {VISION}" for i in range(1, pictures + 1))


@dataclass(frozen=True, kw_only=True)
class QwenVariant:
    """One of these models."""

    name: str  # a value of --variant
    pipeline: str  # its class in model_index.json
    title: str
    template: Template = EDITS
    images: tuple[int, int] = (0, 1)  # the fewest and the most of a request
    copy: int = 0  # pixels of a picture for the text encoder; 0: it sees none
    numbered: bool = False  # each picture has its number before it in the prompt
    zero_cond_t: bool = False  # it sees pictures at timestep 0
    layered: bool = False  # it takes a picture apart into layers

    @property
    def channels(self) -> int:
        """The channels of a picture for the VAE."""
        return 4 if self.layered else 3

    @property
    def edits(self) -> bool:
        return bool(self.copy)

    @property
    def around(self) -> PictureTemplate:
        """The text around prompts with pictures."""
        return PictureTemplate(template=self.template, before=_numbered if self.numbered else _plain, form=QWEN2_VL)


TEXT = QwenVariant(name="text", pipeline="QwenImagePipeline", title="Qwen-Image, text to image", template=DRAWS)
EDIT = QwenVariant(
    name="edit",
    pipeline="QwenImageEditPipeline",
    title="Qwen-Image-Edit, edits one picture",
    images=(1, 1),
    copy=1024**2,
)
EDIT_2509 = QwenVariant(
    name="2509",
    pipeline="QwenImageEditPlusPipeline",
    title="Qwen-Image-Edit-2509, edits one or several pictures",
    images=(1, 10),
    copy=384**2,
    numbered=True,
)
EDIT_2511 = QwenVariant(
    name="2511",
    pipeline="QwenImageEditPlusPipeline",
    title="Qwen-Image-Edit-2511, edits one or several pictures",
    images=(1, 10),
    copy=384**2,
    numbered=True,
    zero_cond_t=True,
)
LAYERED = QwenVariant(
    name="layered",
    pipeline="QwenImageLayeredPipeline",
    title="Qwen-Image-Layered, takes a picture apart into layers",
    template=DRAWS,
    images=(1, 1),
    layered=True,
)
VARIANTS = {one.name: one for one in (TEXT, EDIT, EDIT_2509, EDIT_2511, LAYERED)}  # `load_options.VARIANTS`
PIPELINES = frozenset(variant.pipeline for variant in VARIANTS.values()) | {"QwenImageEditInpaintPipeline"}
_EDIT = re.compile(r"(?<![a-z])edit", re.ASCII)
_LAYERED = re.compile(r"(?<![a-z])layered", re.ASCII)
_PLAIN = re.compile(r"qwen[-_. ]?image[-_. ]?edit(?![-_. ]?plus)", re.ASCII)


def published_config(network: Network, kind: QwenVariant) -> Any:
    """Return the configuration of one of a variant's networks as it is published."""
    return of_kind(network.config(), kind)


def of_kind(config: Any, kind: QwenVariant) -> Any:
    """Return `config`, of any network, with the fields that tell a variant from the others."""
    if isinstance(config, QwenDiTConfig):
        layered = kind.layered
        return replace(config, zero_cond_t=kind.zero_cond_t, use_additional_t_cond=layered, use_layer3d_rope=layered)
    return replace(config, input_channels=kind.channels) if isinstance(config, QwenVAEConfig) else config


def of_pipeline(pipeline: str, zero_cond_t: bool, layered: bool) -> QwenVariant:
    """Return the variant of a folder in diffusers layout, by its pipeline and its transformer's configuration. Raises
    ModelError if these do not go together."""
    name = pipeline.replace("Inpaint", "")
    for variant in VARIANTS.values():
        if (variant.pipeline, variant.zero_cond_t, variant.layered) == (name, zero_cond_t, layered):
            return variant
    flags = {"zero_cond_t": zero_cond_t, "use_layer3d_rope": layered}
    has = " and ".join(flag for flag, is_on in flags.items() if is_on) or "no use_layer3d_rope"
    known = EDIT_2511 if zero_cond_t else LAYERED if layered else TEXT
    raise ModelError(
        f"its transformer has {has}, but its pipeline is {clean(pipeline, 60)}: if the transformer is that of "
        f"{known.title.partition(',')[0]}, say --variant {known.name}"
    )


def of_name(name: str) -> QwenVariant | None:
    """Return the variant that the `name` of a file or folder says; None if it says nothing. Raises UsageError for one
    that may be several."""
    plain = name.lower()
    if _LAYERED.search(plain):
        return LAYERED
    if not _EDIT.search(plain):
        return None
    numbers = [variant for variant in (EDIT_2509, EDIT_2511) if variant.name in plain]
    if len(numbers) == 1:
        return numbers[0]
    if numbers or not _PLAIN.search(plain):
        raise UsageError(
            f"{clean(name, 80)}: the file does not say which Qwen-Image-Edit it is: give --variant edit, 2509 or 2511"
        )
    return EDIT


# Few steps: the Lightning LoRAs of ModelTC, by their files on the hub

_REPO = "lightx2v/Qwen-Image-Lightning/Qwen-Image-Lightning"
_REPO_2512 = "lightx2v/Qwen-Image-2512-Lightning/Qwen-Image-2512-Lightning"
_EDITS = {
    "edit": "lightx2v/Qwen-Image-Lightning/Qwen-Image-Edit-Lightning",
    "2509": "lightx2v/Qwen-Image-Lightning/Qwen-Image-Edit-2509/Qwen-Image-Edit-2509-Lightning",
    "2511": "lightx2v/Qwen-Image-Edit-2511-Lightning/Qwen-Image-Edit-2511-Lightning",
}


def _files(start: str, versions: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{start}-{version}.safetensors" for version in versions)


def few_steps(folder: str, kind: QwenVariant) -> Mapping[str, FewSteps]:
    """Return the few-step LoRAs of the model in `folder`. The model of December 2025, known by its name only, has its
    own LoRAs, and so does each that edits; the built-in model and the one that makes layers have none."""
    if folder.endswith(BUILT_IN.name) or kind.layered:
        return {}
    versions: tuple[str, ...]
    steps = (4,) if kind is EDIT_2511 else (8, 4)
    if kind.edits:
        start, versions = _EDITS[kind.name], ("V1.0-bf16", "V1.0", "V1.0-fp32")
    elif re.search("image[-_.]2512", folder.lower()):
        start, versions = _REPO_2512, ("V1.0-bf16", "V1.0-fp32")
    else:
        start, versions = _REPO, ("V2.0-bf16", "V2.0", "V1.1-bf16", "V1.1", "V1.0-bf16", "V1.0")
    loras = {count: _files(f"{start}-{count}steps", versions) for count in steps}
    return {"lightning": FewSteps(steps=steps, sampler="euler", schedule="lightning", loras=loras)}
