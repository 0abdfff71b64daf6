"""The variation of a seed: its noise, turned towards the noise of a second seed, the same bits on every machine.

Its text is read where numpy is not imported: `slerp.py` computes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.numbers.seeds import check_seed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_TEXT = re.compile(r"([0-9]{1,20}):([0-9]{1,3}|[0-9]{0,3}\.[0-9]{1,17})", re.ASCII)
_DIGITS = 17  # of a strength, behind the point, as in _TEXT


@dataclass(frozen=True)
class Variation:
    """A second seed, and how far the noise is turned towards its noise: 0 not at all, 1 all the way."""

    seed: int
    strength: float

    def __str__(self) -> str:
        digits = format(round(Decimal(repr(self.strength)), _DIGITS), "f")
        return f"{self.seed}:{digits.rstrip('0') + '0' * digits.rstrip('0').endswith('.')}"

    def next(self, count: int) -> Variation:
        """Return the variation whose seed is larger by `count`. Raises UsageError."""
        check_seed(self.seed + count)
        return Variation(self.seed + count, self.strength)

    def applied(self, noise: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return `noise` [..., h, w], turned towards that of the second seed."""
        from qwenimg.common.numbers.noise import normal
        from qwenimg.common.numbers.slerp import slerp

        return slerp(self.strength, noise, normal(noise.shape, self.seed)) if self.strength else noise


def parse(text: str) -> Variation:
    """Return the variation of `SEED:STRENGTH`. Raises UsageError."""
    match = _TEXT.fullmatch(text.strip())
    if match is None or float(match[2]) > 1:
        raise UsageError(f"variation is {clean(text, 40)!r}; expected SEED:STRENGTH, of 0 to 1, as 7:0.2")
    check_seed(int(match[1]))
    return Variation(int(match[1]), float(match[2]))


def check(text: str) -> None:
    """Raise UsageError for a text, other than "", that is no variation."""
    if text:
        parse(text)
