"""Estimates of how long images take: first from their operations at a rate measured on this device, then from the first
step.

The rate is measured on one product while other programs run as usual. The estimate is an order of magnitude: networks
reach a half to twice that rate, and loading comes on top."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qwenimg.common.base.amounts import duration, size_text
from qwenimg.common.memory.memory_plan import MemoryPlan
from qwenimg.common.precision.devices import Device

# Bytes a second at which streamed blocks are read, at most: to a card through 16 lanes of PCI Express 4.0, from a file
# on an NVMe disk through four lanes of PCI Express 3.0. Files in the system's cache are read faster.
TO_CARD, FROM_FILE = 31.5e9, 3.94e9
LONG = 600  # seconds; for a longer run the estimate is shown before it starts
MUCH = 2.0  # the first step corrects an estimate that is wrong by this factor
SOON = 10  # seconds; a shorter run needs no correction


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The memory and time of one image."""

    memory: int  # bytes at the peak
    seconds: float
    step: float  # seconds of one step, on average


def steps_seconds(needs: MemoryPlan, operation: float, device: Device) -> float:
    """Return the seconds of all steps at `operation` seconds for each multiplication or addition. Streamed blocks are
    read while others compute, so the longer of both counts."""
    return max(needs.steps * operation, needs.streamed / streaming_rate(device))


def streaming_rate(device: Device) -> float:
    """Return the bytes a second at which streamed blocks are read."""
    return TO_CARD * device.lanes / 16 if device.own_memory else FROM_FILE


def summary(memory: int, seconds: float) -> str:
    """Return `takes about 1.3 GB of memory and roughly 2 min`."""
    return f"takes about {size_text(memory)} of memory and {duration(seconds)}"


def left(expected: Sequence[Estimate], step: float) -> tuple[float, bool]:
    """Return the seconds that remain after the first step, which took `step` seconds, and whether to tell the user: if
    they are more than ten minutes, or the estimate was wrong by a factor of MUCH."""
    ratio = step / expected[0].step
    estimated = sum(one.seconds for one in expected)
    rest = max(0.0, ratio * estimated - step)
    differs = not 1 / MUCH < ratio < MUCH and max(rest, estimated) > SOON
    return rest, rest > LONG or differs
