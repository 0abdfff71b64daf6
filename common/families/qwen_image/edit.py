"""Qwen-Image-Edit: Qwen-Image with pictures, which its transformer sees as tokens of their own, and its text encoder in
the prompt.

Below a strength of 1, and with a mask, the run starts from the first picture too.
"""

from __future__ import annotations

from collections.abc import Sequence

from qwenimg.common.families.qwen_image import references
from qwenimg.common.families.qwen_image.model import QwenImage
from qwenimg.common.parts.texts.picture_texts import PicturePrompt, SeenPictures
from qwenimg.common.pipeline.models.diffusion_model import Image
from qwenimg.common.pipeline.models.inputs import PictureInputs, each_picture
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.runtime import Runtime

RECOMMENDED = 3  # pictures


class QwenImageEdit(QwenImage):
    """A Qwen-Image-Edit model for `Pipeline`."""

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint):
        super().__init__(runtime, checkpoint)
        kind, (fewest, most) = self.kind, self.kind.images
        self._seen = SeenPictures(lambda image: references.copy(image, kind.copy))
        self.inputs = PictureInputs(
            fewest=fewest,
            most=most,
            references=each_picture(
                lambda image: references.size(image),
                lambda image: references.values(image),
                lambda i: f"Picture {i} of the prompt" if kind.numbered else "the picture",
            ),
        )

    def prompt(self, text: str, images: Sequence[Image]) -> PicturePrompt:
        return PicturePrompt(text, tuple(map(self._seen.of, images)))

    def warnings(self, request: Request) -> list[str]:
        count = len(request.images)
        many = f"{count} pictures are given: the model was trained with at most {RECOMMENDED}"
        return [*super().warnings(request), *([many] if count > RECOMMENDED else [])]

    def forget(self) -> None:
        super().forget()
        self._seen.clear()
