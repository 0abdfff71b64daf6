"""The pipelines of diffusers whose models are drawn here: of each class the family, the task and its default values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Task = Literal["text", "image", "mask", "edit"]
"""Text alone; a picture to start from; one with a mask; pictures that the model sees."""
_SIDE = 1024  # pixels of a picture without a size, of the models whose configuration names none


@dataclass(frozen=True, kw_only=True)
class Row:
    """One class of diffusers."""

    family: str  # its name in `registry.FAMILIES`
    task: Task = "text"
    steps: int = 50
    guidance: float | None = None  # the default of guidance_scale; None: it has no effect
    true_cfg: float | None = None  # the default of true_cfg_scale; None: there is no such keyword
    strength: float | None = None
    side: int | None = None  # pixels of a picture without width and height; None: the model's own, or the picture's
    image_size: bool = False  # a picture has its own size, of at most side x side pixels and in whole latents
    first: tuple[str, ...] = ("prompt",)  # the keywords that may come without their names
    negative: bool = True  # there is a negative prompt
    tokens: int = 512  # the default of max_sequence_length

    @property
    def by_negative_prompt(self) -> bool:
        """True if classifier-free guidance needs a negative prompt to be given."""
        return self.true_cfg is not None


_IMAGE, _MASK, _SEEN = ("prompt", "image"), ("prompt", "image", "mask_image"), ("image", "prompt")

ROWS: Mapping[str, Row] = MappingProxyType({
    "QwenImagePipeline": Row(family="qwen-image", true_cfg=4.0, side=_SIDE),
    "QwenImageImg2ImgPipeline": Row(
        family="qwen-image", task="image", true_cfg=4.0, strength=0.6, side=_SIDE, first=("prompt",)
    ),
    "QwenImageInpaintPipeline": Row(
        family="qwen-image", task="mask", true_cfg=4.0, strength=0.6, side=_SIDE, first=("prompt",)
    ),
    "QwenImageEditPipeline": Row(family="qwen-image", task="edit", true_cfg=4.0, first=_SEEN),
    "QwenImageEditPlusPipeline": Row(family="qwen-image", task="edit", true_cfg=4.0, first=_SEEN),
    "QwenImageLayeredPipeline": Row(family="qwen-image", task="edit", true_cfg=4.0, first=_SEEN),
    "QwenImage21Pipeline": Row(family="qwen-image-2.1", task="edit", steps=40, true_cfg=1.0, first=_IMAGE),
    "ZImagePipeline": Row(family="z-image", guidance=5.0, side=_SIDE),
    "ZImageImg2ImgPipeline": Row(
        family="z-image", task="image", guidance=5.0, strength=0.6, side=_SIDE, first=_IMAGE
    ),
    "ZImageInpaintPipeline": Row(family="z-image", task="mask", guidance=5.0, strength=1.0, side=_SIDE, first=_MASK),
    "FluxPipeline": Row(family="flux", steps=28, guidance=3.5, true_cfg=1.0, side=_SIDE),
    "FluxImg2ImgPipeline": Row(
        family="flux", task="image", steps=28, guidance=7.0, true_cfg=1.0, strength=0.6, side=_SIDE
    ),
    "FluxInpaintPipeline": Row(
        family="flux", task="mask", steps=28, guidance=7.0, true_cfg=1.0, strength=0.6, side=_SIDE
    ),
    "FluxKontextPipeline": Row(
        family="flux", task="edit", steps=28, guidance=3.5, true_cfg=1.0, side=_SIDE, first=_SEEN
    ),
    "FluxFillPipeline": Row(
        family="flux", task="mask", guidance=30.0, strength=1.0, side=_SIDE, negative=False
    ),
    "Flux2KleinPipeline": Row(
        family="flux2", task="edit", guidance=4.0, side=_SIDE, image_size=True, first=_SEEN, negative=False
    ),
    "StableDiffusionPipeline": Row(family="stable-diffusion", guidance=7.5),
    "StableDiffusionImg2ImgPipeline": Row(
        family="stable-diffusion", task="image", guidance=7.5, strength=0.8, image_size=True, first=_IMAGE
    ),
    "StableDiffusionInpaintPipeline": Row(
        family="stable-diffusion", task="mask", guidance=7.5, strength=1.0, first=_MASK
    ),
    "StableDiffusionXLPipeline": Row(family="stable-diffusion", guidance=5.0),
    "StableDiffusionXLImg2ImgPipeline": Row(
        family="stable-diffusion", task="image", guidance=5.0, strength=0.3, image_size=True
    ),
    "StableDiffusionXLInpaintPipeline": Row(family="stable-diffusion", task="mask", guidance=7.5, strength=0.9999),
    "StableDiffusion3Pipeline": Row(family="sd3", tokens=256, steps=28, guidance=7.0),
    "StableDiffusion3Img2ImgPipeline": Row(family="sd3", tokens=256, task="image", guidance=7.0, strength=0.6),
    "StableDiffusion3InpaintPipeline": Row(family="sd3", tokens=256, task="mask", guidance=7.0, strength=0.6),
})  # fmt: skip
"""By the name of the class."""

AUTO: Mapping[str, tuple[Task, ...]] = MappingProxyType({
    "DiffusionPipeline": ("text", "image", "mask", "edit"),
    "AutoPipelineForText2Image": ("text", "edit"),
    "AutoPipelineForImage2Image": ("image", "edit"),
    "AutoPipelineForInpainting": ("mask", "edit"),
})  # fmt: skip
"""Classes that take any model, and the tasks of the class that they become, in the order of preference."""


def row_for(name: str, own: str, family: str) -> tuple[str, Row]:
    """Return the class, and its row, that the class `name` becomes for a model of `family` whose own class is `own`.
    Raises KeyError if there is none."""
    if name in ROWS:
        return name, ROWS[name]
    kind = own.removesuffix("Pipeline").replace("Img2Img", "").replace("Inpaint", "")
    for task in AUTO[name]:
        end = {"image": "Img2Img", "mask": "Inpaint"}.get(task, "")
        if (found := ROWS.get(f"{kind}{end}Pipeline")) is not None and found.task == task:
            return f"{kind}{end}Pipeline", found
    return next((title, row) for title, row in ROWS.items() if row.family == family and row.task in AUTO[name])
