"""The texts of Anima: a language model's states of the prompt, of which the text conditioner makes text, asked by T5's
tokens of the same prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.shape import Shape
from qwenimg.common.parts.texts.states import PromptTexts, States
from qwenimg.common.prompts.check import check_prompt
from qwenimg.common.runtime.checkpoint import Checkpoint, Component
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.stages import Stage

LIMIT = 512  # tokens of either kind
RESIDENT = "text conditioner"  # its name in memory


class Tokens(NamedTuple):
    """A prompt for the text encoder, and for the text conditioner; and tokens that one of them does not see."""

    words: tuple[int, ...]
    queries: tuple[int, ...]
    lost: int


class AnimaTexts(PromptTexts[str]):
    """The text [1 S C] of prompts, without a template. It has the text encoder, then the text conditioner."""

    feed_forward = 3  # of the text encoder it is gated

    def __init__(self, residents: Residents, checkpoint: Checkpoint):
        super().__init__(residents, checkpoint.texts)
        [self._words, self._queries] = checkpoint.tokenizers.values()

    @property
    def parts(self) -> tuple[Component, Component]:
        """The text encoder and the text conditioner."""
        encoder, conditioner = self.encoders.values()
        return encoder, conditioner

    def fill(self, prompt: str) -> Tokens:
        """Return the tokens of `prompt`. Raises UsageError as `check_prompt` does."""
        check_prompt(prompt)
        words, queries = self._words.tokenizer.ids(prompt), self._queries.tokenizer.words(prompt)
        lost = max(len(words), len(queries) + 1) - LIMIT
        end = self._queries.tokenizer.eos
        return Tokens((*words[:LIMIT],), (*queries[: LIMIT - 1], end), max(0, lost))

    def shapes(self, key: str) -> list[Shape]:
        return [(1, self._length(len(self.fill(key).queries)), self.parts[1].config.target_dim)]

    def tokens(self, key: str) -> list[object]:
        tokens = self.fill(key)
        return [list(tokens.words), list(tokens.queries)]

    def cut(self, prompt: str) -> str:
        lost = self.fill(prompt).lost
        return f"the model sees its first {LIMIT} tokens, not the last {lost}" if lost else ""

    def lengths(self, prompts: Sequence[str], counted: bool) -> list[int]:
        return [self._length(len(self.fill(one).queries) if counted else LIMIT) for one in prompts]

    def encodings(self, prompts: Sequence[str], counted: bool) -> list[Stage]:
        filled = [self.fill(prompt) for prompt in prompts] if counted else []
        words = max((len(one.words) for one in filled), default=LIMIT)
        return self._stages(max(1, words), max((len(one.queries) for one in filled), default=LIMIT))

    def _length(self, queries: int) -> int:
        """Return the tokens of text for so many of T5's."""
        return max(queries, int(self.parts[1].config.min_sequence_length))

    def _stages(self, words: int, queries: int) -> list[Stage]:
        """Return the stages of the text encoder and of the text conditioner, for so many tokens."""
        encoder, conditioner = self.parts
        made = self.stage(conditioner, 1, self._length(max(words, queries)), resident=RESIDENT)
        return [self.stage(encoder, 1, words), made]

    def encode(self, keys: Sequence[str]) -> Iterator[States]:
        """Encode all of `keys`, then make their texts one after the other, so that one network is open at a time."""
        filled = [self.fill(key) for key in keys]
        first, second = self._stages(
            max(1, *(len(one.words) for one in filled)), max(len(one.queries) for one in filled)
        )
        states = list(self.run(first, self._encoded, [one.words for one in filled]))
        return self.run(second, self._conditioned, zip(filled, states, strict=True))

    def _encoded(self, encoder: Any, words: Sequence[int]) -> NDArray[np.float32]:
        """Return the states of a prompt [1 S C]; zeros of one token if it has none, which nothing sees."""
        if not words:
            return np.zeros((1, 1, self.parts[0].config.state_size), np.float32)
        return self.computed(lambda: encoder.encode(words))

    def _conditioned(self, conditioner: Any, asked: tuple[Tokens, NDArray[np.float32]]) -> States:
        (_, queries, _), states = asked
        return (self.computed(lambda: conditioner.encode(queries, states), RESIDENT),)
