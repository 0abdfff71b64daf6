"""The texts of PixArt: T5's states of the prompt in lower case, without its padding.

Its pipeline in diffusers, with two more packages, also takes links, tags and most signs out of a prompt: not done here,
where a prompt is read as it is typed."""

from __future__ import annotations

from qwenimg.common.parts.texts.padded_texts import MaskedT5Texts
from qwenimg.common.prompts.prompt_tokens import PromptTokens


class PixArtTexts(MaskedT5Texts):
    """The text states [1 S C] of T5 for prompts of up to `length` tokens."""

    def fill(self, prompt: str) -> PromptTokens:
        return super().fill(prompt.lower().strip())
