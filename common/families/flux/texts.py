"""Text states of Flux.1: T5's for the text stream, and the pooled vector of CLIP for the modulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qwenimg.common.parts.texts.padded_texts import ClipPooled, PaddedTexts, T5Texts
from qwenimg.common.prompts.prompt_tokens import PromptTokens
from qwenimg.common.runtime.checkpoint import Checkpoint, Component
from qwenimg.common.runtime.engine import Array
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.stages import Stage

CLIP, T5 = "text_encoder", "text_encoder_2"


class FluxTexts:
    """The states [1 S C] of T5 and the pooled vector [1 P] of CLIP of each prompt, for `length` tokens S of T5."""

    def __init__(self, residents: Residents, checkpoint: Checkpoint, length: int):
        self.engine = residents.runtime.engine
        self.clip, self.t5 = ClipPooled(residents, checkpoint, CLIP), T5Texts(residents, checkpoint, T5, length)

    @property
    def both(self) -> tuple[PaddedTexts, PaddedTexts]:
        return self.clip, self.t5

    def states(self, prompts: Sequence[str]) -> list[tuple[Array, Array]]:
        """Return states and pooled vector of each prompt on the device."""
        pooled = map(self.engine.array, self.clip.states(prompts))
        return list(zip(self.t5.states(prompts), pooled, strict=True))

    def fill(self, prompt: str) -> PromptTokens:
        """Return the tokens of a prompt for T5."""
        return self.t5.fill(prompt)

    def cut(self, prompt: str) -> str:
        lost, seen = self.fill(prompt).lost, self.t5.length - 1
        return f"the model sees its first {seen} tokens, not the last {lost}" if lost else ""

    def lengths(self, prompts: Sequence[str], counted: bool) -> list[int]:
        return [self.t5.length] * len(prompts)

    def has(self, prompts: Sequence[str]) -> bool:
        return all(texts.has(prompts) for texts in self.both)

    def encodings(self, prompts: Sequence[str], counted: bool) -> list[Stage]:
        return [stage for texts in self.both if not texts.has(prompts) for stage in texts.stages()]

    def announce(self, prompts: Sequence[str]) -> None:
        for texts in self.both:
            texts.announce(prompts)

    def renew(self, encoders: Mapping[str, Component]) -> None:
        for texts in self.both:
            texts.renew(encoders)

    def forget(self) -> None:
        for texts in self.both:
            texts.forget()

    def close(self) -> None:
        for texts in self.both:
            texts.close()
