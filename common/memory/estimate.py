"""How long pictures will take, as a run tells it: first from their operations at a rate measured on this device, then
from the first step.

The rate is that of one product while other programs run as they do: an order of magnitude, since networks reach a half
to twice that, and loading comes on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qwenimg.common.base.amounts import duration, size_text
from qwenimg.common.memory.memory_plan import MemoryPlan
from qwenimg.common.precision.devices import Device

# Bytes a second at which streamed blocks are read, those of what they come through at most: to a card 16 lanes of PCI
# Express 4.0, from a file an NVMe disk on four lanes of PCI Express 3.0. What the system has of it is read faster.
TO_CARD, FROM_FILE = 31.5e9, 3.94e9
LONG = 600  # seconds, from which on a run says how long it takes before it starts
MUCH = 2.0  # times more or less than was said, from which on the first step corrects it
SOON = 10  # seconds: what is over sooner needs no correction


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Of one picture."""

    memory: int  # bytes at the peak
    seconds: float
    step: float  # seconds of one step, on average


def steps_seconds(needs: MemoryPlan, operation: float, device: Device) -> float:
    """Of all steps, `operation` seconds each multiplication or addition: streamed blocks are read while others compute,
    so that the longer of both counts."""
    return max(needs.steps * operation, needs.streamed / streaming_rate(device))


def streaming_rate(device: Device) -> float:
    """Bytes a second at which its streamed blocks are read."""
    return TO_CARD * device.lanes / 16 if device.own_memory else FROM_FILE


def summary(memory: int, seconds: float) -> str:
    """`takes about 1.3 GB of memory and roughly 2 min`"""
    return f"takes about {size_text(memory)} of memory and {duration(seconds)}"


def left(expected: Sequence[Estimate], step: float) -> tuple[float, bool]:
    """Seconds that are left after the first step of all, which took `step`, and whether that is worth a line: beyond
    ten minutes, or much more or less than was said."""
    ratio = step / expected[0].step
    said = sum(one.seconds for one in expected)
    rest = max(0.0, ratio * said - step)
    differs = not 1 / MUCH < ratio < MUCH and max(rest, said) > SOON
    return rest, rest > LONG or differs
