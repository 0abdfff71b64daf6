"""The texts of Lumina-Image 2.0: a prompt behind an instruction, a negative prompt as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qwenimg.common.prompts.language import LanguageTokenizer
from qwenimg.common.prompts.prompt_tokens import PromptTokens
from qwenimg.common.prompts.qwen import Template

START = "<Prompt Start>"
INSTRUCTION = (
    "You are an assistant designed to generate superior images with the superior degree of image-text alignment based "
    "on textual prompts or user prompts."
)


def instructed(prompt: str) -> str:
    """Return a prompt behind the instruction of the model's pipeline, unless it has one of its own."""
    return prompt if START in prompt else f"{INSTRUCTION} {START} {prompt}"


@dataclass(frozen=True, kw_only=True)
class BegunTemplate(Template):
    """A text behind the token that begins one, which Gemma's tokenizer puts there. A marker such as `<eos>` that is
    typed in it stays text; in transformers it would be that token."""

    def fill(self, tokenizer: Any, prompt: str) -> PromptTokens:
        """Return the ids of `prompt`, cut on the right. Raises UsageError as `check_prompt` does, and ModelError for a
        vocabulary without that token."""
        made: LanguageTokenizer = tokenizer
        ids = (made.special("<bos>"), *made.encode(prompt))
        return PromptTokens(ids[: self.limit], max(0, len(ids) - self.limit), 0)


TEXT = BegunTemplate(text="{}", dropped=0, limit=256, seen=256)
