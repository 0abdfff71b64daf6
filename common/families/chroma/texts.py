"""The texts of Chroma: T5's states of the prompt and of the first token of its padding, which no token sees."""

from __future__ import annotations

from qwenimg.common.parts.texts.padded_texts import MaskedT5Texts


class ChromaTexts(MaskedT5Texts):
    """The text states [1 S C] of T5 for prompts of up to `length` tokens."""

    pads = 1
