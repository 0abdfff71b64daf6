"""Classifier-free guidance (J. Ho, T. Salimans, 2022), the only place where branches become one prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qwenimg.common.runtime.engine import Array, Engine


@dataclass(frozen=True, kw_only=True)
class Guidance:
    """How the branches of a step, the prompt's first and the negative one's second, become one prediction."""

    scale: float
    keep_norm: bool = False  # each token's norm stays that of the prompt's branch, as Qwen-Image takes it
    rescale: float = 0.0  # share by which the deviation moves to that of the prompt's branch (S. Lin et al., 2023)

    def __call__(self, engine: Engine, branches: Sequence[Array]) -> Array:
        """One branch is the prediction as it is."""
        if len(branches) == 1:
            return branches[0]
        conditional, unconditional = branches
        if self.keep_norm:
            return engine.guide(conditional, unconditional, self.scale)
        guided = unconditional + self.scale * (conditional - unconditional)
        return engine.rescale(guided, conditional, self.rescale) if self.rescale else guided
