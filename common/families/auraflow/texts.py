"""The texts of AuraFlow: UMT5's states of a prompt, filled up with zeros, which condition an image too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from qwenimg.common.parts.texts.padded_texts import T5Texts
from qwenimg.common.parts.texts.states import States
from qwenimg.common.prompts.language import LanguageTokenizer
from qwenimg.common.prompts.prompt_tokens import PromptTokens
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.stages import Stage

LENGTH = 256  # states of a prompt with its zeros
END = "</s>"


class AuraTexts(T5Texts):
    """The text states [1 LENGTH C] of prompts. Pads are not encoded: nothing sees them, and their states are zeros."""

    def __init__(self, residents: Residents, checkpoint: Checkpoint):
        super().__init__(residents, checkpoint, "text_encoder", LENGTH)

    def fill(self, prompt: str) -> PromptTokens:
        """Return the ids of `prompt` with the end token, cut to LENGTH. A marker such as `</s>` that is typed in it
        stays text; in transformers it would be that token. Raises UsageError as `check_prompt` does, and ModelError for
        a vocabulary without that token."""
        tokenizer: LanguageTokenizer = self._tokenizer.tokenizer
        # LLaMA's vocabulary begins words with a space
        words = tokenizer.encode(prompt if prompt.startswith(" ") or not prompt else f" {prompt}")
        ids = (*words[: LENGTH - 1], tokenizer.special(END))
        return PromptTokens(ids, max(0, len(words) + 1 - LENGTH))

    def lengths(self, prompts: Sequence[str], counted: bool) -> list[int]:
        """Return the number of states of each prompt."""
        return [LENGTH] * len(prompts)

    def encodings(self, prompts: Sequence[str], counted: bool) -> list[Stage]:
        """Return the stage of the text encoder, which reads no pads."""
        return [self.encoding(max(len(self.fill(prompt).ids) if counted else LENGTH for prompt in prompts))]

    def cut(self, prompt: str) -> str:
        """Return the numbers of tokens that are seen and that are not."""
        lost = self.fill(prompt).lost
        return f"the model sees its first {LENGTH - 1} tokens, not the last {lost}" if lost else ""

    def _encoded(self, encoder: Any, ids: Sequence[int]) -> States:
        [states] = super()._encoded(encoder, ids)
        return (np.pad(states, ((0, 0), (0, LENGTH - states.shape[1]), (0, 0))),)
