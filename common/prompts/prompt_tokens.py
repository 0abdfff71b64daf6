"""The token ids of a prompt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PromptTokens:
    """The ids that a text encoder reads, the number of tokens at the prompt's end that condition no image, and of pads
    behind it, which the ids have too."""

    ids: tuple[int, ...]
    lost: int
    pads: int = 0
