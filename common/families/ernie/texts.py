"""The texts of ERNIE-Image: prompts as they are, behind the special tokens that the tokenizer's own file has before a
text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qwenimg.common.prompts.language import LanguageTokenizer
from qwenimg.common.prompts.prompt_tokens import PromptTokens
from qwenimg.common.prompts.qwen import Template

LIMIT = 2048  # tokens: `model_max_length` of the published tokenizer


@dataclass(frozen=True, kw_only=True)
class BareTemplate(Template):
    """A prompt without a text around it. A marker such as `[INST]` that is typed in it stays text; in transformers it
    would be that token."""

    def fill(self, tokenizer: Any, prompt: str) -> PromptTokens:
        """Return the ids of `prompt`, cut on the right; of an empty one the token that begins a text. Raises UsageError
        as `check_prompt` does."""
        made: LanguageTokenizer = tokenizer
        ids = [*map(made.special, made.before), *made.encode(prompt)] or [made.special("<s>")]
        return PromptTokens(tuple(ids[: self.limit]), max(0, len(ids) - self.limit), 0)


PROMPT = BareTemplate(text="{}", dropped=0, limit=LIMIT, seen=LIMIT)
