"""Qwen-Image-Layered: Qwen-Image that takes a picture apart into layers, each of which has alpha.

All layers are drawn at once, as frames after a first one, their composite, which is dropped. The transformer sees the
picture as tokens of its own, in the size of the layers. The text encoder sees it only to describe it, if there is no
prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from qwenimg.common.base.errors import UsageError
from qwenimg.common.families.qwen_image import captions, references
from qwenimg.common.families.qwen_image.model import QwenImage
from qwenimg.common.numbers import sizes
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts.texts.captions import CaptionTexts
from qwenimg.common.parts.texts.picture_texts import SeenPicture, SeenPictures
from qwenimg.common.pictures import pixels
from qwenimg.common.pictures.pixels import Uint8
from qwenimg.common.pipeline.models.inputs import PictureInputs, References
from qwenimg.common.pipeline.steps.guidance import Guidance, cfg, cfg_with_norm
from qwenimg.common.pipeline.steps.inpaint import Latents
from qwenimg.common.pipeline.steps.plan import SamplingPlan
from qwenimg.common.request.request import MULTIPLE, Request
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.engine import Array, Engine
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.runtime.stages import Stage
from qwenimg.common.sampling.flow_match import FlowLevels, FlowMatchConfig

AREAS = (640**2, 1024**2)  # pixels of the pictures that it was trained with, the usual ones first
BASE_TOKENS = 256  # of a picture whose noise levels are shifted by 1


def shift(config: FlowMatchConfig, tokens: int, steps: int) -> float:
    """Return the shift of the noise levels for a picture of `tokens` tokens."""
    return math.sqrt(tokens / BASE_TOKENS)


def guided(engine: Engine, request: Request, predictions: Sequence[Array]) -> Array:
    """Apply classifier-free guidance; with --cfg-normalization 1 each token keeps the norm of the prompt's."""
    return (cfg_with_norm if request.family_options.cfg_normalization else cfg)(engine, request, predictions)


# The picture, in the size of the layers


def _sizes(request: Request) -> list[tuple[int, int]]:
    return [sizes.render_size(request.width, request.height, MULTIPLE) for _ in request.images]


def _values(request: Request) -> list[Latents]:
    fitted = (pixels.fit(pixels.with_alpha(one), request.width, request.height) for one in request.images)
    extended = (pixels.extend(one, *size) for one, size in zip(fitted, _sizes(request), strict=True))
    return [pixels.from_uint8(one) for one in extended]


def _notes(request: Request) -> list[str]:
    usual, larger = trained_sizes(request.images[0])
    if (request.width, request.height) != usual:
        return []
    texts = ["x".join(map(str, size)) for size in (usual, larger)]
    return [f"layers of {texts[0]}; --size {texts[1]} makes larger ones"]


REFERENCES = References(sizes=_sizes, values=_values, notes=_notes)


class QwenImageLayered(QwenImage):
    """A Qwen-Image-Layered model for `Pipeline`."""

    levels = FlowLevels(mu=shift)
    guidance = Guidance(formula=guided)
    options = QwenImage.options | {"layers", "cfg_normalization", "caption"}
    texts: CaptionTexts

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint):
        super().__init__(runtime, checkpoint)
        self._seen = SeenPictures(described)
        fewest, most = self.kind.images
        self.inputs = PictureInputs(
            fewest=fewest,
            most=most,
            alpha=True,
            references=REFERENCES,
            layers=lambda request: request.family_options.layers,
            describe=self._with_caption,
        )

    def plan(self, request: Request) -> SamplingPlan:
        if request.mask is not None or request.strength != 1:
            option = "--strength" if request.mask is None else "--mask"
            raise UsageError(f"{option} is for models that draw from a picture; this one takes all of it apart")
        if request.controls:
            raise UsageError("--control is for Qwen-Image, text to image; this model takes a picture apart")
        if (most := request.family_options.cfg_normalization) not in (0, 1):
            raise UsageError(f"cfg-normalization is {most:g}; this model takes 0, without, or 1")
        trained_sizes(request.images[0])  # only for its errors
        if not has_prompt(request):
            captions.check(self.checkpoint["text_encoder"])
        return super().plan(request)

    # The prompt, if the model writes it

    def announce(self, requests: Sequence[Request]) -> None:
        """Announce nothing where only captions are to come, which open the text encoder anyway."""
        if any(map(has_prompt, requests)):
            super().announce([one for one in requests if one.prompt])

    def stages(self, request: Request, plan: SamplingPlan, shape: LatentShape, counted: bool = True) -> list[Stage]:
        caption = None if has_prompt(request) else self.texts.known(*self._to_describe(request))
        request = request if caption is None else replace(request, prompt=caption)
        return super().stages(request, plan, shape, counted and has_prompt(request))

    def writing(self, request: Request) -> list[Stage]:
        return [] if has_prompt(request) else [self.texts.writing(*self._to_describe(request))]

    def _with_caption(self, request: Request) -> Request:
        if has_prompt(request):
            return request
        request = replace(request, prompt=self.texts.caption(*self._to_describe(request)))
        if self.texts.has(self.prompts(request)):
            self.residents.free("text")
        return request

    def _to_describe(self, request: Request) -> tuple[SeenPicture, str]:
        """Return the picture and the language of its description."""
        return self._seen.of(request.images[0], request.width, request.height), request.family_options.caption

    def forget(self) -> None:
        super().forget()
        self._seen.clear()

    def warnings(self, request: Request) -> list[str]:
        lines, size = super().warnings(request), (request.width, request.height)
        trained = trained_sizes(request.images[0])
        if size not in trained:
            shown = " or ".join(f"{width}x{height}" for width, height in trained)
            lines.append(
                f"{size[0]}x{size[1]}: for this picture the model was trained with {shown}; give one as --size"
            )
        return lines


def has_prompt(request: Request) -> bool:
    return bool(request.prompt.strip())


def described(picture: Uint8, width: int, height: int) -> Uint8:
    """Return `picture` as it is described: in the size of its layers, on white."""
    return pixels.over_white(pixels.fit(pixels.with_alpha(picture), width, height))


def trained_sizes(picture: Uint8) -> list[tuple[int, int]]:
    """Return width and height of layers of `picture`, for each of AREAS. Raises UsageError for one that is too
    narrow."""
    return [references.size(picture, area) for area in AREAS]
