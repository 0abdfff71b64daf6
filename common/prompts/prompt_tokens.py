"""The token ids of a prompt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PromptTokens:
    """A prompt's token ids for a text encoder, pads included; how many tokens at its end were cut off (they condition
    no image); and the number of pads."""

    ids: tuple[int, ...]
    lost: int
    pads: int = 0
