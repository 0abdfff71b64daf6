"""Qwen-Image-Edit: Qwen-Image with pictures, which its transformer sees as tokens of their own, and its text encoder in
the prompt.

Below a strength of 1, and with a mask, the run starts from the first picture too.
"""

from __future__ import annotations

from collections.abc import Sequence

from qwenimg.common.families.qwen_image import references
from qwenimg.common.families.qwen_image.model import QwenImage
from qwenimg.common.families.qwen_image.variants import QwenVariant
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts.texts.picture_texts import PicturePrompt, SeenPictures
from qwenimg.common.pipeline.models.diffusion_model import Image
from qwenimg.common.pipeline.steps.inpaint import Latents
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.runtime import Runtime

RECOMMENDED = 3  # pictures


class QwenImageEdit(QwenImage):
    """A Qwen-Image-Edit model for `Pipeline`."""

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint, kind: QwenVariant):
        super().__init__(runtime, checkpoint, kind)
        self._seen = SeenPictures(lambda image: references.copy(image, kind.copy))

    def prompt(self, text: str, images: Sequence[Image]) -> PicturePrompt:
        return PicturePrompt(text, tuple(map(self._seen.of, images)))

    def references(self, request: Request) -> list[Latents]:
        for i, image in enumerate(request.images, 1):
            width, height = references.size(image)
            name = f"Picture {i} of the prompt" if self.kind.numbered else "the picture"
            self.runtime.notify("stage", f"{name} is seen at {width}x{height}, whatever the size of the result")
        return [references.values(image) for image in request.images]

    def reference_shapes(self, request: Request) -> list[LatentShape]:
        return [self.shape_of(*references.size(image)) for image in request.images]

    def warnings(self, request: Request) -> list[str]:
        count = len(request.images)
        many = f"{count} pictures are given: the model was trained with at most {RECOMMENDED}"
        return [*super().warnings(request), *([many] if count > RECOMMENDED else [])]

    def forget(self) -> None:
        super().forget()
        self._seen.clear()
