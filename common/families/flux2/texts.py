"""The texts of FLUX.2: prompts in the chat templates of two language models.

Unusual about dev's: its pads stand before a text, and a marker such as `[INST]` that is typed in a prompt stays text;
in transformers it would be that token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qwenimg.common.prompts.language import LanguageTokenizer
from qwenimg.common.prompts.prompt_tokens import PromptTokens
from qwenimg.common.prompts.qwen import Template

KLEIN = Template(
    text="<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    dropped=0,
    limit=512,
    seen=512,
    pad="<|endoftext|>",
)
_PICTURE = "[IMG]"  # left out of prompts


@dataclass(frozen=True, kw_only=True)
class InstructionTemplate(Template):
    """A prompt behind an instruction, `text`, between Mistral's special tokens."""

    def fill(self, tokenizer: Any, prompt: str) -> PromptTokens:
        """Return the ids of the template filled with `prompt`, cut on the right, behind pads. Raises UsageError as
        `check_prompt` does, and ModelError for a vocabulary without these tokens."""
        made: LanguageTokenizer = tokenizer
        one, instruction = made.special, made.plain(self.text)
        start = [one("<s>"), one("[SYSTEM_PROMPT]"), *instruction, one("[/SYSTEM_PROMPT]"), one("[INST]")]
        ids = [*start, *made.encode(prompt.replace(_PICTURE, "")), one("[/INST]")]
        kept = ids[: self.limit]
        pads = self.limit - len(kept)
        return PromptTokens((*[one(self.pad)] * pads, *kept), len(ids) - len(kept), pads)


DEV = InstructionTemplate(
    text="You are an AI that reasons about image descriptions. You give structured responses focusing on object "
    "relationships, object\nattribution and actions without speculation.",
    dropped=0,
    limit=512,
    seen=512,
    pad="<pad>",
)
