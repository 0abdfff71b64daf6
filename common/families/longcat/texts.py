"""The texts of LongCat-Image: prompts whose quoted parts are encoded character by character, filled up with pads, whose
states condition an image too.

With a picture all pads stand at position 0, so that they have one state, which is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.shape import Shape
from qwenimg.common.networks.encoders.vision_tower import PicturePlace
from qwenimg.common.parts.texts.picture_texts import PAD, VISION, PicturePrompt, PictureTemplate, PictureTexts
from qwenimg.common.pictures.patches import QWEN2_VL
from qwenimg.common.prompts import quoted
from qwenimg.common.prompts.quoted import QuotedTemplate
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.residents import Residents

LENGTH = 512  # tokens of a prompt with its pads
_START, _USER, _FILL = "<|im_start|>system\n", "<|im_end|>\n<|im_start|>user\n", "<|endoftext|>"
DRAWS = QuotedTemplate(
    text=f"{_START}As an image captioning expert, generate a descriptive text prompt based on an image content, "
    f"suitable for input to a text-to-image model.{_USER}",
    dropped=36,
    limit=LENGTH,
    seen=LENGTH,
    pad=_FILL,
)
EDITS = QuotedTemplate(
    text=f"{_START}As an image editing expert, first analyze the content and attributes of the input image(s). Then, "
    "based on the user's editing instructions, clearly and precisely determine how to modify the given image(s), "
    "ensuring that only the specified parts are altered and all other aspects remain consistent with the original(s)."
    f"{_USER}{VISION}",
    dropped=67,  # up to the picture
    limit=LENGTH,
    seen=LENGTH,
    pad=_FILL,
)
_AROUND = PictureTemplate(template=EDITS, before=lambda count: "", form=QWEN2_VL)


class QuotedPictureTexts(PictureTexts):
    """The text states [1 S C] of prompts with a picture: of the picture's slots between their two signs, and of the
    prompt with its pads."""

    def __init__(self, residents: Residents, checkpoint: Checkpoint):
        super().__init__(residents, checkpoint, _AROUND)

    def fill(self, prompt: PicturePrompt) -> tuple[list[int], list[PicturePlace]]:
        """Return the ids with one for each slot, and one pad for all, and the place of the picture."""
        tokenizer = self._tokenizer.tokenizer
        pad, found = tokenizer.special(PAD), quoted.ids(tokenizer, prompt.text)[:LENGTH]
        if pad in found:
            raise UsageError(f"the prompt has {PAD}, which stands for a picture: leave it out")
        before = tokenizer.ids(EDITS.text)
        start, [(columns, rows)] = before.index(pad), self._slots(prompt)
        fill = [tokenizer.special(EDITS.pad)] if len(found) < LENGTH else []
        ids = [*before[:start], *[pad] * (rows * columns), *before[start + 1 :], *found, *fill]
        return ids, [PicturePlace(start, rows, columns)]

    def shapes(self, key: PicturePrompt) -> list[Shape]:
        return [(1, self._count(key), self.config.state_size)]

    def cut(self, prompt: PicturePrompt) -> str:
        lost = len(quoted.ids(self._tokenizer.tokenizer, prompt.text)) - LENGTH
        return f"the model sees its first {LENGTH} tokens, not the last {lost}" if lost > 0 else ""

    def lengths(self, prompts: Sequence[PicturePrompt], counted: bool) -> list[int]:
        return list(map(self._count, prompts))

    def pads(self, ids: Sequence[int]) -> Sequence[int]:
        return [int(ids[-1] == self._tokenizer.tokenizer.special(EDITS.pad))]

    def used(self, states: NDArray[Any], prompt: PicturePrompt) -> NDArray[Any]:
        _, [place] = self.fill(prompt)
        own = states[:, place.start - 1 :]
        return np.concatenate([own, np.repeat(own[:, -1:], self._count(prompt) - own.shape[1], axis=1)], axis=1)

    def _count(self, prompt: PicturePrompt) -> int:
        """Return the number of states of `prompt`."""
        [(columns, rows)] = self._slots(prompt)
        return 2 + rows * columns + LENGTH
