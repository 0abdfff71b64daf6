"""What cards and chips can do at most, and what is reached of it, for figures on paper.

Each row says where its numbers come from. Nothing here was measured by this project.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean

PASSES = 0.85  # of the bandwidth that memory-bound kernels reach
LAUNCH = 3e-6  # seconds that the smallest kernel takes


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates are dense, with sums in float32. The shares are those of a card whose attention keeps no scores."""

    name: str
    title: str
    gigabytes: float  # bandwidth, a second
    teraflops: float  # of products in 16 bit, at most
    teraflops32: float  # in float32
    products: float = 0.85  # share of its rate that products of these shapes reach
    attention: float = 0.5  # share of its rate that attention reaches
    source: str

    @property
    def is_apple(self) -> bool:
        """Whether it has kernels of its own, and not torch's."""
        return self.title.startswith("Apple")

    @property
    def bandwidth(self) -> float:
        """Bytes a second."""
        return self.gigabytes * 1e9

    def peak(self, dtype: str) -> float:
        """Operations a second."""
        return 1e12 * (self.teraflops if dtype in ("bfloat16", "float16") else self.teraflops32)


_SHEET = "NVIDIA's data sheet"
_BEST = "bandwidth from NVIDIA's data sheet; 790 TFLOP/s is the best that others measured, of 989 there"
_CHIP = "data sheet; up to M4 16 bit is no faster than float32"
# Of Apple's chips attention reaches 0.9 of what products reach.
_MACHINES = (
    Machine(name="h100", title="NVIDIA H100 SXM", gigabytes=3350, teraflops=790, teraflops32=67, source=_BEST),
    Machine(name="h200", title="NVIDIA H200", gigabytes=4800, teraflops=790, teraflops32=67, source=_BEST),
    Machine(name="a100", title="NVIDIA A100 80 GB", gigabytes=2039, teraflops=312, teraflops32=19.5, source=_SHEET),
    Machine(name="4090", title="NVIDIA RTX 4090", gigabytes=1008, teraflops=165.2, teraflops32=82.6, source=_SHEET),
    Machine(name="5090", title="NVIDIA RTX 5090", gigabytes=1792, teraflops=209.5, teraflops32=104.8, source=_SHEET),
    Machine(
        name="m1-max",
        title="Apple M1 Max",
        gigabytes=400,
        teraflops=10.4,
        teraflops32=10.4,
        products=0.76,
        attention=0.68,
        source=f"{_CHIP}; the share that products reach is that of the M4 Max",
    ),
    Machine(
        name="m2-ultra",
        title="Apple M2 Ultra",
        gigabytes=800,
        teraflops=27.2,
        teraflops32=27.2,
        products=0.76,
        attention=0.68,
        source=f"{_CHIP}; the share that products reach is that of the M4 Max",
    ),
    Machine(
        name="m3-ultra",
        title="Apple M3 Ultra",
        gigabytes=819,
        teraflops=28.4,
        teraflops32=28.4,
        products=0.61,
        attention=0.55,
        source=f"{_CHIP}; others measured 17.4 TFLOP/s",
    ),
    Machine(
        name="m4-max",
        title="Apple M4 Max",
        gigabytes=546,
        teraflops=18.4,
        teraflops32=18.4,
        products=0.76,
        attention=0.68,
        source=f"{_CHIP}; the speed at which others' language models read prompts means 14 TFLOP/s",
    ),
    Machine(
        name="m5-max",
        title="Apple M5 Max",
        gigabytes=614,
        teraflops=60,
        teraflops32=30,
        products=1.0,
        attention=0.9,
        source="bandwidth from the data sheet; 60 TFLOP/s in float16 is the best that others measured, float32 a guess",
    ),
)
MACHINES = {machine.name: machine for machine in _MACHINES}


def of_device(device: str) -> Machine | None:
    """The machine that a driver calls `device`: NVIDIA H100 80GB HBM3, Apple M4 Max."""
    words = [(one, rf"\b{name.replace('-', ' ')}\b") for name, one in MACHINES.items()]
    return next((one for one, word in words if re.search(word, device, re.IGNORECASE)), None)


def machine(name: str, option: str = "--on-paper") -> Machine:
    """That `option` names. Raises UsageError."""
    found = MACHINES.get(name.strip().lower().replace("_", "-").replace(" ", "-"))
    if found is None:
        raise UsageError(f"{option} {clean(name, 40)!r} is not one of {', '.join(MACHINES)}")
    return found
