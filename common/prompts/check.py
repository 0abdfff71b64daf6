"""Checks of a prompt, whatever the tokenizer."""

from __future__ import annotations

import re

from qwenimg.common.base.errors import UsageError, not_built
from qwenimg.common.base.text import clean

MAX_CHARACTERS = 100_000  # of a prompt


# Tags that other programs remove from a prompt and act upon.
_TAGS = ("lora", "lyco", "hypernet", "controlnet", "embedding")
_LORAS = ("lora", "lyco")
_TAG = re.compile(rf"(?i)<\s*({'|'.join(_TAGS)})\s*:[^<>]*>")
EMBEDDING = re.compile(r"(?<!\w)embedding:([^\s,()\[\]|:<>]{1,100})", re.IGNORECASE)
"""The name of an embedding in a prompt, as in ComfyUI."""


def check_not_blank(prompt: str) -> None:
    """Raise UsageError for a blank prompt."""
    if not prompt.strip():
        raise UsageError("the prompt is empty; say what to draw")


def check_text(prompt: str) -> None:
    """Check that `prompt` is Unicode text of at most MAX_CHARACTERS characters. Raises UsageError."""
    if len(prompt) > MAX_CHARACTERS:
        raise UsageError(
            f"the prompt has {len(prompt)} characters, the limit is {MAX_CHARACTERS}. Shorten it: far fewer are read."
        )
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        fault = f"the prompt has a byte that is not text ({clean(prompt[error.start])})"
        raise UsageError(f"{fault} at character {error.start + 1}. Give the prompt in UTF-8.") from None


def check_prompt(prompt: str) -> None:
    """Check a text as `check_text` does, and that it is without such tags. Raises UsageError."""
    check_text(prompt)
    if tag := _TAG.search(prompt):  # a text encoder would take it for words
        kind = tag[1].lower()
        if kind in _LORAS:
            name = "".join(tag[0].strip("<>").partition(":")[2].split())
            argument = clean(name, 60) if 0 < len(name) <= 60 else "FILE:SCALE"
            raise UsageError(f"the prompt has the tag {clean(tag[0], 60)}; leave it out and give --lora {argument}")
        if kind == "controlnet":
            raise UsageError(
                f"the prompt has the tag {clean(tag[0], 60)}; leave it out and give --control MODEL=PICTURE"
            )
        if kind == "embedding":
            raise UsageError(f"the prompt has the tag {clean(tag[0], 60)}; write embedding:NAME without < and >")
        raise UsageError(f"the prompt has a tag ({clean(tag[0], 60)}): {not_built(kind)}; leave it out")
