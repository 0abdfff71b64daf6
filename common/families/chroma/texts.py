"""The texts of Chroma: T5's states of the prompt and of the first token of its padding, which no token sees."""

from __future__ import annotations

from collections.abc import Sequence

from qwenimg.common.base.shape import Shape
from qwenimg.common.parts.texts.padded_texts import T5Texts
from qwenimg.common.prompts.prompt_tokens import PromptTokens
from qwenimg.common.runtime.engine import Array, TextEncoder
from qwenimg.common.runtime.stages import Stage


class ChromaTexts(T5Texts):
    """The text states [1 S C] of T5 for prompts of up to `length` tokens."""

    def fill(self, prompt: str) -> PromptTokens:
        tokens = super().fill(prompt)
        words = len(tokens.ids) - self._pads(tokens.ids)
        kept = tokens.ids[: words + 1]
        return PromptTokens(kept, tokens.lost, len(kept) - words)

    def shapes(self, key: str) -> list[Shape]:
        return [(1, len(self.fill(key).ids), self.encoder.config.d_model)]

    def results(self, encoder: TextEncoder, ids: Sequence[int]) -> Sequence[Array]:
        return (encoder.encode(ids, min(1, self._pads(ids))),)

    def lengths(self, prompts: Sequence[str], counted: bool) -> list[int]:
        """Return the number of states of each prompt."""
        return [len(self.fill(prompt).ids) if counted else self.length for prompt in prompts]

    def encodings(self, prompts: Sequence[str], counted: bool) -> list[Stage]:
        """Return the stage of T5, which reads no more than one pad."""
        return [self.encoding(max(self.lengths(prompts, counted)))]

    def cut(self, prompt: str) -> str:
        """Return the numbers of tokens that are seen and that are not."""
        lost = self.fill(prompt).lost
        return f"the model sees its first {self.length - 1} tokens, not the last {lost}" if lost else ""

    def _pads(self, ids: Sequence[int]) -> int:
        """Return the number of pads at the end of `ids`."""
        pad = self._tokenizer.tokenizer.pad
        return next((i for i, token in enumerate(reversed(ids)) if token != pad), len(ids))
