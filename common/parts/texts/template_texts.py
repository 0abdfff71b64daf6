"""Text states of prompts from a language model, which reads each prompt in a template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from qwenimg.common.base.shape import Shape
from qwenimg.common.parts.texts.states import PromptTexts, States
from qwenimg.common.prompts.prompt_tokens import PromptTokens
from qwenimg.common.prompts.qwen import Template
from qwenimg.common.runtime.checkpoint import Checkpoint, Component
from qwenimg.common.runtime.engine import TextEncoder
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.stages import Stage

USUAL = 50  # tokens of a prompt of some forty words, with the end of its template
LONG_PROMPT = 512  # tokens of a long prompt; some models take thousands


class TemplateTexts(PromptTexts[str]):
    """The text states [1 S C] of prompts in a `template`."""

    feed_forward = 3  # it is gated
    assumed = 2**31  # the most tokens of a prompt that is not counted, besides what the template drops

    def __init__(self, residents: Residents, checkpoint: Checkpoint, template: Template):
        super().__init__(residents, checkpoint.texts)
        self.template = template
        [self._tokenizer] = checkpoint.tokenizers.values()

    @property
    def encoder(self) -> Component:
        """The language model."""
        [component] = self.encoders.values()
        return component

    def fill(self, prompt: str) -> PromptTokens:
        """Return the tokens of `prompt` in the template."""
        return self.template.fill(self._tokenizer.tokenizer, prompt)

    def shapes(self, key: str) -> list[Shape]:
        """Return the shape of the states that condition an image."""
        return [(1, self.template.used(len(self.fill(key).ids)), self.encoder.config.state_size)]

    def tokens(self, key: str) -> list[object]:
        """Return the ids with the number of pads among them, and which of their states condition an image."""
        tokens, template = self.fill(key), self.template
        return [list(tokens.ids), tokens.pads, template.dropped, template.seen, list(self.encoder.config.taps)]

    def cut(self, prompt: str) -> str:
        """Return the numbers of tokens that are seen and that are not."""
        lost = self.fill(prompt).lost
        return f"the model sees its first {self.template.seen} tokens, not the last {lost}" if lost else ""

    def lengths(self, prompts: Sequence[str], counted: bool) -> list[int]:
        """Return the numbers of states that condition an image."""
        return [self.template.used(length) for length in self._token_counts(prompts, counted)]

    def encodings(self, prompts: Sequence[str], counted: bool) -> list[Stage]:
        """Return the stage of the language model."""
        return [self._encoding(max(self._token_counts(prompts, counted)))]

    @contextmanager
    def of_usual_length(self, tokens: int = USUAL) -> Iterator[None]:
        """Take prompts that are not counted to be `tokens` long, where the template does not fill them up."""
        self.assumed = self.template.filled(tokens)
        try:
            yield
        finally:
            del self.assumed  # of the instance

    def _token_counts(self, prompts: Sequence[str], counted: bool) -> list[int]:
        """Return the number of tokens of each filled template."""
        longest = self.template.dropped + min(self.template.seen, self.assumed)
        return [len(self.fill(prompt).ids) if counted else longest for prompt in prompts]

    def _encoding(self, length: int) -> Stage:
        """Return the stage that encodes prompts of at most `length` tokens, the template's among them."""
        return self.stage(self.encoder, 1, length)

    def encode(self, keys: Sequence[str]) -> Iterator[States]:
        """Encode `keys` one after the other."""
        prompts = [self.fill(key) for key in keys]
        return self.run(self._encoding(max(len(prompt.ids) for prompt in prompts)), self._encoded, prompts)

    def _encoded(self, encoder: TextEncoder, prompt: PromptTokens) -> States:
        """Return the states that condition an image, without the template's start."""
        asked = (prompt.ids, prompt.pads) if prompt.pads else (prompt.ids,)
        start = self.template.start(len(prompt.ids))
        used = self.computed(lambda: encoder.encode(*asked))[:, start : start + self.template.seen]
        return (np.ascontiguousarray(used),)
