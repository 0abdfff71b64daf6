"""When a parameter's weights are in memory."""

from __future__ import annotations

from enum import Enum


class Residency(Enum):
    ALWAYS = "from when its component is loaded until that is freed"
    ONCE = "only while what depends on the timestep alone is made, once for a whole schedule"


ALWAYS, ONCE = Residency.ALWAYS, Residency.ONCE
