"""The row of a family whose models learn LoRAs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from qwenimg.common.runtime.checkpoint import Checkpoint


@dataclass(frozen=True, kw_only=True)
class TrainingRow:
    """The parts of a training step that differ between families. All others follow from how the family draws: inputs,
    noise levels, and the prediction that a loss compares."""

    layers: re.Pattern[str]  # paths of the denoiser's linear layers that learn: those of its blocks, no modulation
    text_layers: re.Pattern[str] | None = None  # of each text encoder; None: text encoders do not learn
    guidance: float = 1.0  # of a request, so that one branch is computed; of a model that sees it, what it sees
    # Why a model of this family is not trained, as a predicate for a message, or ""
    refusal: Callable[[Checkpoint], str] = lambda checkpoint: ""
