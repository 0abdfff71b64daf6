"""Text states of Stable Diffusion 3: two CLIPs' joined by channels, then T5's, and both CLIPs' pooled vectors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.amounts import counted
from qwenimg.common.parts.texts.padded_texts import PaddedClip, SeparateTexts, T5Texts
from qwenimg.common.parts.texts.states import States
from qwenimg.common.prompts.clip import EOS_PAD, OPEN_CLIP_PAD
from qwenimg.common.prompts.weighted import LENGTH
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.residents import Residents

T5 = "text_encoder_3"
T5_ROWS = 256
PADS = {"text_encoder": EOS_PAD, "text_encoder_2": OPEN_CLIP_PAD}
"""The padding token of each CLIP."""


class SD3Texts(SeparateTexts):
    """The text states [1 77+`rows` `width`] and the pooled vectors [1 P] of prompts. Without T5 its `rows`
    are zeros."""

    def __init__(self, residents: Residents, checkpoint: Checkpoint, width: int, rows: int = T5_ROWS):
        self.width = width
        encoders = [
            T5Texts(residents, checkpoint, T5, rows) if name == T5 else PaddedClip(residents, checkpoint, name)
            for name in checkpoint.texts
        ]
        super().__init__(encoders, LENGTH + rows)

    def states(self, prompts: Sequence[str]) -> list[States]:
        """Return text states and pooled vectors of each prompt."""
        return list(map(self._joined, zip(*(texts.arrays(prompts) for texts in self.every), strict=True)))

    def pooled(self, prompts: Sequence[str]) -> list[NDArray[np.float32]]:
        """Return the pooled vector of each prompt."""
        both = (texts.arrays(prompts) for texts in self.pooling)
        return [np.concatenate((first, second), axis=-1) for (_, first), (_, second) in zip(*both, strict=True)]

    def cut(self, prompt: str) -> str:
        """Return how many tokens each text encoder does not see."""
        lost = {texts.name: texts.fill(prompt).lost for texts in self.every}
        return " and ".join(f"{name} does not see the last {counted(n, 'token')}" for name, n in lost.items() if n)

    def _joined(self, results: Sequence[States]) -> States:
        """Return text states and pooled vectors for one prompt's results of all text encoders."""
        (first, first_pooled), (second, second_pooled), *t5 = results
        states = np.zeros((1, self.rows, self.width), np.float32)
        both = np.concatenate((first, second), axis=-1)
        states[:, :LENGTH, : both.shape[-1]] = both
        if t5:
            [[states[:, LENGTH:]]] = t5
        return states, np.concatenate((first_pooled, second_pooled), axis=-1)
