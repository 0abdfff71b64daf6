"""The time for which a parameter is in memory."""

from __future__ import annotations

from enum import Enum


class Residency(Enum):
    ALWAYS = "from when its component is loaded until that is freed"
    STREAMED = "while the block that it belongs to computes, in every pass"
    ONCE = "only while what depends on the timestep alone is made, once for a whole schedule"


ALWAYS, STREAMED, ONCE = Residency.ALWAYS, Residency.STREAMED, Residency.ONCE
