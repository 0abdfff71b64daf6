"""Dynamic loss scaling for float16."""

from __future__ import annotations

from dataclasses import dataclass, field

from qwenimg.common.training.config import MAX_STEPS

COUNT = {"min": 0, "max": 32 * MAX_STEPS}  # a step may back off more than once
MOST = 2.0**64  # the largest loss scale: scaled float32 stays far below its maximum


@dataclass
class LossScaler:
    """Dynamic loss scaling (P. Micikevicius et al., "Mixed Precision Training", 2018).

    The scale doubles after `interval` steps without overflow and halves at each overflow. It has collapsed when it
    would fall below `least`, where it no longer protects anything.
    """

    scale: float = 2.0**14
    interval: int = 200
    least: float = 1.0
    largest: float = 2.0**24
    good: int = field(default=0, metadata=COUNT)
    growths: int = field(default=0, metadata=COUNT)
    back_offs: int = field(default=0, metadata=COUNT)
    collapsed: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.least <= self.scale <= self.largest <= MOST:
            raise ValueError(f"the loss scale {self.scale:g} is not between {self.least:g} and {self.largest:g}")

    def finite(self) -> None:
        """Count a step with finite gradients."""
        self.good += 1
        if self.good >= self.interval and self.scale < self.largest:
            self.scale, self.good, self.growths = self.scale * 2, 0, self.growths + 1

    def overflow(self) -> None:
        """Count a step with gradients that are not finite, and lower the scale."""
        self.good, self.back_offs = 0, self.back_offs + 1
        if self.scale / 2 < self.least:
            self.collapsed = True
        else:
            self.scale /= 2
