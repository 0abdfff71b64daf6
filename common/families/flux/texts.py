"""Text states of Flux.1: T5's for the text stream, and the pooled vector of CLIP for the modulation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from qwenimg.common.parts.texts.padded_texts import ClipPooled, SeparateTexts, T5Texts
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.engine import Array
from qwenimg.common.runtime.residents import Residents

CLIP, T5 = "text_encoder", "text_encoder_2"


class PooledText(NamedTuple):
    """A pooled text other than a prompt's: that one times a scale, or zeros if the prompt is blank."""

    prompt: str
    scale: float


class FluxTexts(SeparateTexts):
    """The states [1 S C] of T5 and the pooled vector [1 P] of CLIP of each prompt, for `length` tokens S of T5."""

    def __init__(self, residents: Residents, checkpoint: Checkpoint, length: int):
        self.engine = residents.runtime.engine
        self.clip, self.t5 = ClipPooled(residents, checkpoint, CLIP), T5Texts(residents, checkpoint, T5, length)
        super().__init__((self.clip, self.t5), length)

    def states(self, prompts: Sequence[str]) -> list[tuple[Array, Array]]:
        """Return states and pooled vector of each prompt on the device."""
        pooled = self.pooled(prompts)
        return list(zip(self.t5.states(prompts), pooled, strict=True))

    def pooled(self, texts: Sequence[str | PooledText]) -> list[Array]:
        """Return the pooled vector of each prompt on the device."""
        scaled = [PooledText(one, 1.0) if isinstance(one, str) else one for one in texts]
        zeros = [isinstance(one, PooledText) and not one.prompt.strip() for one in texts]
        read = iter(self.clip.states([one.prompt for one, zero in zip(scaled, zeros, strict=True) if not zero]))
        [shape] = self.clip.shapes("")
        vectors = [np.zeros(shape, np.float32) if zero else next(read) for zero in zeros]
        return [self.engine.array(np.float32(one.scale) * v) for one, v in zip(scaled, vectors, strict=True)]

    def cut(self, prompt: str) -> str:
        lost, seen = self.t5.fill(prompt).lost, self.t5.length - 1
        return f"the model sees its first {seen} tokens, not the last {lost}" if lost else ""
