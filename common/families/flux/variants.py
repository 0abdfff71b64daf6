"""The models that share FLUX.1's networks: text to image (dev and schnell), Kontext, Fill, Canny and Depth.

Fill's transformer takes more channels: the masked picture and the mask. So does that of Canny and of Depth: a control
picture; these two are told apart by the name of their file or folder. Nothing in a file tells Kontext from dev: a
folder in diffusers layout does, by the class of its pipeline; else the user says it, or the name of the file. Nor does
a file tell schnell from a dev that was trained without the embedding of its guidance (de-distilled): a folder does, by
its scheduler.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from qwenimg.common.families.flux import known
from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.request.few_steps import FewSteps
from qwenimg.common.request.request import Defaults

EDITED = 1024**2  # pixels of an edited image in the proportions of its reference


@dataclass(frozen=True, kw_only=True)
class FluxVariant:
    """One of these models. The numbers are its defaults for a request."""

    name: str
    pipeline: str  # its class in model_index.json
    title: str
    purpose: str
    known: KnownModel
    strength: float = 0.6
    mask_strength: float = 0.6
    edited: int = 0

    @property
    def defaults(self) -> Defaults:
        return Defaults(
            **self.known.usual, strength=self.strength, mask_strength=self.mask_strength, edited=self.edited
        )


TEXT = FluxVariant(
    name="text", pipeline="FluxPipeline", title="dev or schnell", purpose="text to image", known=known.DEV
)
KONTEXT = FluxVariant(
    name="kontext",
    pipeline="FluxKontextPipeline",
    title="Kontext",
    purpose="edits a picture",
    known=known.KONTEXT,
    strength=1.0,
    mask_strength=1.0,
    edited=EDITED,
)
FILL = FluxVariant(
    name="fill",
    pipeline="FluxFillPipeline",
    title="Fill",
    purpose="draws the masked part of a picture",
    known=known.FILL,
    mask_strength=1.0,
)
CANNY = FluxVariant(
    name="canny",
    pipeline="FluxControlPipeline",
    title="Canny",
    purpose="keeps to the edges of a picture",
    known=known.CANNY,
)
DEPTH = FluxVariant(
    name="depth",
    pipeline="FluxControlPipeline",
    title="Depth",
    purpose="keeps to the depth of a picture",
    known=known.DEPTH,
)
VARIANTS = {variant.name: variant for variant in (TEXT, KONTEXT, FILL, CANNY, DEPTH)}
DEV, SCHNELL = "dev", "schnell"
ASKED = ("text", "kontext", DEV, SCHNELL)
"""The values of --variant: models that files of weights do not tell apart."""
PIPELINES = frozenset(variant.pipeline for variant in VARIANTS.values()) | {
    "FluxImg2ImgPipeline",
    "FluxInpaintPipeline",
    "FluxKontextInpaintPipeline",
    "FluxControlImg2ImgPipeline",
    "FluxControlInpaintPipeline",
}


def of_pipeline(pipeline: str) -> FluxVariant:
    """Return the variant of a folder in diffusers layout, by its `pipeline`, one of PIPELINES."""
    starts = ((one, one.pipeline.removesuffix("Pipeline")) for one in (KONTEXT, FILL, CANNY))
    return next((one for one, start in starts if pipeline.startswith(start)), TEXT)


def of_control(name: str) -> FluxVariant:
    """Return the variant of a model with a control picture, by the `name` of its file or folder."""
    return DEPTH if "depth" in name.lower() else CANNY


def of_name(name: str) -> FluxVariant | None:
    """Return the variant that the `name` of a file or folder says; None if it says nothing."""
    return KONTEXT if "kontext" in name.lower() else None


_UNDISTILLED = re.compile(r"(de|un)[-_ ]?distill|openflux|(^|flux|[^a-z])dev([^a-z]|$)")


def is_schnell(name: str) -> bool | None:
    """Return whether the `name` of a file or folder without guidance is that of a schnell, or of a model that was not
    distilled to few steps; None if it says neither."""
    undistilled = _UNDISTILLED.search(name.lower())
    if "schnell" in name.lower():
        return undistilled is None or "distill" not in undistilled[0]
    return False if undistilled else None


# Few steps: LoRAs for dev by their files on the hub, with the settings of their model cards

_HYPER = "ByteDance/Hyper-SD/Hyper-FLUX.1-dev"
_TURBO = "alimama-creative/FLUX.1-Turbo-Alpha/diffusion_pytorch_model.safetensors"


def few_steps(*, guided: bool) -> Mapping[str, FewSteps]:
    """Return the few-step LoRAs of a model that is guidance-distilled; the other one has none."""
    if not guided:
        return {}
    hyper = {steps: (f"{_HYPER}-{steps}steps-lora.safetensors",) for steps in (8, 16)}
    return {
        "hyper": FewSteps(steps=(8, 16), sampler="euler", guidance=3.5, loras=hyper, strength=0.125),
        "turbo": FewSteps(steps=(8,), sampler="euler", guidance=3.5, loras={8: (_TURBO,)}),
    }
