"""Memory on top of stored weights: decoded weights, repacked matrices, and tensors while they are loaded."""

from __future__ import annotations

from math import prod

from qwenimg.common.base.found_once import found_once
from qwenimg.common.base.shape import Shape
from qwenimg.common.formats.arrays import THREADS
from qwenimg.common.precision.precision import BYTES
from qwenimg.common.precision.residency import ALWAYS, ONCE
from qwenimg.common.quant.rotated import ROWS
from qwenimg.common.weights import streaming
from qwenimg.common.weights.plan import LoadPlan
from qwenimg.common.weights.storage import Packed


@found_once
def decoded(plan: LoadPlan, once: bool = False) -> int:
    """Return the bytes of the array for the largest quantized weight that a step (`once`: the modulation) decodes.
    Other weights are decoded into the same array. A layer that multiplies in 8 bits decodes none: it has ROWS of its
    input in float32 and 8 bits, and of its sums as whole numbers, twice where they are emulated, and in float32."""
    chosen = [e for e in plan.entries.values() if (e.residency is ONCE) == once]
    return max((_array(e.storage, e.shape) for e in chosen if isinstance(e.storage, Packed)), default=0)


def _array(storage: Packed, shape: Shape) -> int:
    if not storage.int8:
        return prod(shape) * BYTES[storage.dtype]
    outputs, inputs = shape
    return ROWS * (5 * inputs + 12 * outputs)


@found_once
def packed(plan: LoadPlan) -> int:
    """Return the bytes of the largest matrix as two threads pack it for their halves of a product."""
    matrices = [e for e in plan.entries.values() if len(e.shape) == 2]
    return max((2 * prod(e.shape) * BYTES[e.storage.dtype] for e in matrices), default=0)


@found_once
def loading(plan: LoadPlan, moved: streaming.Moved) -> int:
    """Return the bytes that loading takes at its peak beyond all weights that are later in memory at once: a tensor as
    it is read, if it is stored in another dtype, and the tensors that are read ahead."""
    entries = [entry for entry in plan.entries.values() if entry.residency is ALWAYS]
    reading = [streaming.read_bytes(entry) for entry in entries]
    done = peak = 0
    for i, entry in enumerate(entries):
        done += entry.nbytes
        ahead = sum(reading[i + 1 : i + 1 + THREADS])
        cast = not isinstance(entry.storage, Packed) and entry.dtype != entry.storage.dtype
        peak = max(peak, done + ahead + cast * reading[i])
    return max(0, peak - streaming.peak_weight_bytes(plan, moved))
