"""The texts of Ovis-Image: states of the prompt in a template, filled up with zeros, which condition an image too."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qwenimg.common.base.shape import Shape
from qwenimg.common.parts.texts.states import States
from qwenimg.common.parts.texts.template_texts import TemplateTexts
from qwenimg.common.prompts.prompt_tokens import PromptTokens
from qwenimg.common.prompts.qwen import Template
from qwenimg.common.runtime.engine import TextEncoder

LENGTH = 256  # states of a prompt with its zeros
TEMPLATE = Template(
    text="<|im_start|>user\nDescribe the image by detailing the color, quantity, text, shape, size, texture, spatial "
    "relationships of the objects and background: {}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    dropped=28,
    limit=LENGTH,
    seen=LENGTH,
)


class OvisTexts(TemplateTexts):
    """The text states [1 LENGTH C] of prompts. Pads are not encoded: nothing sees them, and their states are zeros."""

    def shapes(self, key: str) -> list[Shape]:
        return [(1, LENGTH, self.encoder.config.state_size)]

    def lengths(self, prompts: Sequence[str], counted: bool) -> list[int]:
        return [LENGTH] * len(prompts)

    def _encoded(self, encoder: TextEncoder, prompt: PromptTokens) -> States:
        [states] = super()._encoded(encoder, prompt)
        return (np.pad(states, ((0, 0), (0, LENGTH - states.shape[1]), (0, 0))),)
