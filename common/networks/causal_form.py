"""The attention of a language model's layer, as data."""

from __future__ import annotations

from typing import NamedTuple


class CausalForm(NamedTuple):
    """scale: the factor of scores, None for 1 / sqrt(D); window: the tokens that each token sees, itself among them, 0
    for all before it; cap: the bound within which tanh keeps scores, 0 for none."""

    scale: float | None = None
    window: int = 0
    cap: float = 0.0


PLAIN = CausalForm()
