"""LongCat-Image: text states and guidance for the denoise loop.

Edit sees the picture of a request as a reference, and its text encoder sees it in the prompt; below a strength of 1,
and with a mask, the run starts from it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qwenimg.common.families.longcat import references
from qwenimg.common.families.longcat.texts import DRAWS, QuotedPictureTexts
from qwenimg.common.networks.denoisers.flux_conditioning import guidance_row, time_rows
from qwenimg.common.numbers.timesteps import TimeDtype
from qwenimg.common.parts.texts.picture_texts import PicturePrompt, SeenPictures
from qwenimg.common.parts.texts.states import ModelTexts
from qwenimg.common.parts.texts.template_texts import TemplateTexts
from qwenimg.common.pipeline.models.diffusion_model import Image
from qwenimg.common.pipeline.models.inputs import PictureInputs, each_picture
from qwenimg.common.pipeline.models.time_modulated import TimeModulated
from qwenimg.common.pipeline.steps.guidance import Guidance, cfg
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.engine import Array, Engine, Modulation
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Runtime


def _shortened_cfg(engine: Engine, request: Request, predictions: Sequence[Array]) -> Array:
    """Apply classifier-free guidance in which no token is longer than in the prompt's prediction."""
    return engine.shortened(cfg(engine, request, predictions), predictions[0], 1.0, each=True)


class LongCat(TimeModulated):
    """A LongCat-Image model for `Pipeline`."""

    guidance = Guidance(formula=_shortened_cfg)
    made_by = ("transformer_blocks.0.", "transformer_blocks.0.norm1.linear")

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint):
        residents = Residents(runtime)
        super().__init__(runtime, checkpoint, residents, self.made_texts(residents, checkpoint))

    def made_texts(self, residents: Residents, checkpoint: Checkpoint) -> ModelTexts:
        return TemplateTexts(residents, checkpoint, DRAWS)

    def modulate(self, transformer: Any, timesteps: Sequence[float], dtype: TimeDtype) -> Modulation:
        made: Modulation = transformer.modulate(time_rows(timesteps, dtype), guidance_row(0.0, dtype), [None])
        return made


class LongCatEdit(LongCat):
    """A LongCat-Image-Edit model for `Pipeline`."""

    guidance = Guidance(formula=cfg)
    inputs = PictureInputs(
        fewest=1,
        references=each_picture(
            lambda image: references.size(image), lambda image: references.values(image), lambda i: "the picture"
        ),
    )

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint):
        super().__init__(runtime, checkpoint)
        self._seen = SeenPictures(lambda image: references.copy(image))

    def made_texts(self, residents: Residents, checkpoint: Checkpoint) -> ModelTexts:
        return QuotedPictureTexts(residents, checkpoint)

    def prompt(self, text: str, images: Sequence[Image]) -> PicturePrompt:
        return PicturePrompt(text, tuple(map(self._seen.of, images)))

    def forget(self) -> None:
        super().forget()
        self._seen.clear()
