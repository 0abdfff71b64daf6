"""The modulation of schedules: computed once for all of their steps, by weights that are in memory only for that, and
kept for the next images."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from qwenimg.common.base.found_once import found_once
from qwenimg.common.precision.residency import ONCE
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.runtime.engine import Modulation
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.stages import Split, Stage
from qwenimg.common.weights.plan import LoadPlan

KEPT = 2  # modulations that are kept: 442 MB each for 50 steps of Qwen-Image


class Modulations:
    """The modulations of one transformer, by all that they depend on beside weights."""

    def __init__(self, residents: Residents):
        self.residents, self.runtime = residents, residents.runtime
        self._kept: dict[Hashable, Modulation] = {}

    def has(self, key: Hashable) -> bool:
        return key in self._kept

    def stage(self, component: Component, rows: int, block: str, steps: Sequence[int]) -> Stage:
        """Return the stage that computes a modulation of `rows` bytes, by one block's weights after the other; `block`
        starts the names of the largest one's. It leaves enough memory for the steps after it, which take `steps` bytes
        in each of their splits."""
        weights = block_bytes(self.runtime.load_plan(component), block)
        beside = self.runtime.call_bytes(component, weights, once=True)
        return Stage(
            name="modulation",
            resident="transformer",
            component=component,
            splits=tuple(Split(activations=rows + beside, required=rows + max(step, beside)) for step in steps),
            calls_blocks=False,
            results=rows,
        )

    def get(self, key: Hashable, stage: Stage, compute: Callable[[Any], Modulation]) -> Modulation:
        """Return the modulation of `key`: that of `compute`, which takes the transformer, in `stage`, unless it is
        kept."""
        modulation = self._kept.pop(key, None)
        if modulation is None:
            transformer, _ = self.residents.enter(stage)
            self.runtime.notify("stage", "computing modulation")
            while len(self._kept) >= KEPT:
                del self._kept[next(iter(self._kept))]
            with self.runtime.clock.timed("modulate"):
                modulation = compute(transformer)
        self._kept[key] = modulation
        return modulation

    def renew(self, before: Component, now: Component) -> None:
        """Drop all if LoRAs change other weights of the modulation than `before`."""
        if not before.plan.when(ONCE).same_deltas(now.plan.when(ONCE)):
            self.clear()

    def clear(self) -> None:
        self._kept.clear()


@found_once
def block_bytes(plan: LoadPlan, block: str) -> int:
    """Return the bytes of the weights that one block, with names that start with `block`, needs for its modulation."""
    return sum(e.nbytes for name, e in plan.entries.items() if name.startswith(block) and e.residency is ONCE)
