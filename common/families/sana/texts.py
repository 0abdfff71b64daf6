"""The texts of SANA: a prompt behind an instruction, of whose states the first and those of the prompt are taken, and a
negative prompt as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from qwenimg.common.base.shape import Shape
from qwenimg.common.parts.texts.states import States
from qwenimg.common.parts.texts.template_texts import TemplateTexts
from qwenimg.common.prompts.language import LanguageTokenizer
from qwenimg.common.prompts.prompt_tokens import PromptTokens
from qwenimg.common.prompts.qwen import Template
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.engine import TextEncoder
from qwenimg.common.runtime.residents import Residents

INSTRUCTION = "\n".join(
    (
        "Given a user prompt, generate an 'Enhanced prompt' that provides detailed visual descriptions suitable for "
        "image generation. Evaluate the level of detail in the user prompt:",
        "- If the prompt is simple, focus on adding specifics about colors, shapes, sizes, textures, and spatial "
        "relationships to create vivid and concrete scenes.",
        "- If the prompt is already detailed, refine and enhance the existing details slightly without "
        "overcomplicating.",
        "Here are examples of how to transform or refine prompts:",
        "- User Prompt: A cat sleeping -> Enhanced: A small, fluffy white cat curled up in a round shape, sleeping "
        "peacefully on a warm sunny windowsill, surrounded by pots of blooming red flowers.",
        "- User Prompt: A busy city street -> Enhanced: A bustling city street scene at dusk, featuring glowing street "
        "lamps, a diverse crowd of people in colorful clothing, and a double-decker bus passing by towering glass "
        "skyscrapers.",
        "Please generate only the enhanced description for the prompt below and avoid including any additional "
        "commentary or evaluations:",
        "User Prompt: ",
    )
)
"""The instruction that the models were trained with."""
_LENGTH = 260  # of it in tokens, about, where no tokenizer is at hand
_TEXT = Template(text="{}", dropped=0, limit=300, seen=300)


def plain(prompt: str) -> str:
    """Return a text as the model's pipeline has it: in lower case, without spaces around it."""
    return prompt.lower().strip()


def instructed(prompt: str) -> str:
    """Return a prompt behind the instruction."""
    return INSTRUCTION + plain(prompt)


class SanaTexts(TemplateTexts):
    """Text states [1 S C] of prompts with and without the instruction."""

    def __init__(self, residents: Residents, checkpoint: Checkpoint):
        super().__init__(residents, checkpoint, _TEXT)

    def left_out(self, prompt: str) -> int:
        """Return how many states behind the first, all of the instruction, are left out. Its last token is the first of
        the prompt, with which its last space becomes one."""
        if not prompt.startswith(INSTRUCTION):
            return 0
        tokenizer: LanguageTokenizer = self._tokenizer.tokenizer
        return len(tokenizer.encode(INSTRUCTION)) - 1

    def fill(self, prompt: str) -> PromptTokens:
        """Return the ids of `prompt` behind the token that begins a text, cut on the right."""
        tokenizer: LanguageTokenizer = self._tokenizer.tokenizer
        ids = (tokenizer.special("<bos>"), *tokenizer.encode(prompt))
        limit = self.left_out(prompt) + self.template.limit
        return PromptTokens(ids[:limit], max(0, len(ids) - limit), 0)

    def shapes(self, key: str) -> list[Shape]:
        return [(1, len(self.fill(key).ids) - self.left_out(key), self.encoder.config.state_size)]

    def lengths(self, prompts: Sequence[str], counted: bool) -> list[int]:
        if not counted:
            return [min(self.template.seen, self.assumed) for _ in prompts]
        return [len(self.fill(prompt).ids) - self.left_out(prompt) for prompt in prompts]

    def encode(self, keys: Sequence[str]) -> Iterator[States]:
        prompts = [(self.fill(key), self.left_out(key)) for key in keys]
        stage = self._encoding(max(len(tokens.ids) for tokens, _ in prompts))
        return self.run(stage, self._selected, prompts)

    def _token_counts(self, prompts: Sequence[str], counted: bool) -> list[int]:
        if counted:
            return [len(self.fill(prompt).ids) for prompt in prompts]
        seen = min(self.template.seen, self.assumed)
        return [seen + (_LENGTH if prompt.startswith(INSTRUCTION) else 0) for prompt in prompts]

    def _selected(self, encoder: TextEncoder, prompt: tuple[PromptTokens, int]) -> States:
        """Return the state of the first token, and those behind the ones that are left out."""
        tokens, left_out = prompt
        made = self.computed(lambda: encoder.encode(tokens.ids))
        return (np.concatenate([made[:, :1], made[:, 1 + left_out :]], axis=1),)
