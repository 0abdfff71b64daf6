"""The texts of Krea 2: Qwen-Image's template, whose end is behind every prompt, also behind one that is cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qwenimg.common.prompts.check import check_prompt
from qwenimg.common.prompts.prompt_tokens import PromptTokens
from qwenimg.common.prompts.qwen import QwenTokenizer, Template

END = "<|im_end|>\n<|im_start|>assistant\n"
END_TOKENS = 5  # of END, by Qwen's vocabulary


@dataclass(frozen=True, kw_only=True)
class EndedTemplate(Template):
    """A template of which a long prompt is cut, and not its end. diffusers has pads between both, which nothing sees
    and which take no positions: there are none here."""

    def fill(self, tokenizer: Any, prompt: str) -> PromptTokens:
        """Return the ids of the template filled with `prompt`. Raises UsageError as `check_prompt` does."""
        check_prompt(prompt)
        made: QwenTokenizer = tokenizer
        ids, most = made.ids(self.text.replace("{}", prompt)), self.dropped + self.limit - END_TOKENS
        return PromptTokens((*ids[:most], *made.ids(END)), max(0, len(ids) - most), 0)


TEMPLATE = EndedTemplate(
    text="<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}",
    dropped=34,
    limit=512,
    seen=512,
)
