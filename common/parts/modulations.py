"""The modulation of schedules: computed once for all of their steps, by weights that are in memory only for that, and
kept for the next images. Where it depends on the texts too, it is computed for announced ones at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

from qwenimg.common.base.found_once import found_once
from qwenimg.common.base.latest import drop_oldest
from qwenimg.common.precision.residency import ONCE
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.runtime.engine import Modulation
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.stages import Split, Stage
from qwenimg.common.weights.plan import LoadPlan

KEPT = 2  # modulations that are kept: 442 MB each for 50 steps of Qwen-Image
TOGETHER = 2**29  # bytes of a modulation with the rows of announced prompts: nine of Flux.1 dev in 28 steps

Prompts: TypeAlias = tuple[Hashable, ...]  # or other keys of pooled texts


class Modulations:
    """The kept modulations of one transformer. Each belongs to a schedule, the key of all that it depends on besides
    weights and texts, and to the prompts whose rows follow each other in it; to none if it does not depend on texts."""

    def __init__(self, residents: Residents, resident: str = "transformer"):
        """Set the parts. resident: the name of the transformer in memory."""
        self.residents, self.runtime, self.resident = residents, residents.runtime, resident
        self._kept: dict[tuple[Hashable, Prompts], Modulation] = {}

    def has(self, schedule: Hashable, prompts: Sequence[Hashable] = ()) -> bool:
        """Return whether a modulation of `schedule` with the rows of `prompts` is kept."""
        return self._find(schedule, prompts) is not None

    def counts(self, rows: int, needed: int, announced: int) -> list[int]:
        """Return the numbers of prompts whose rows, of `rows` bytes each, may be computed at once, the preferred one
        first and the `needed` one last. A run that streams computes no others: it has no memory to spare."""
        most = needed if self.runtime.streams else min(needed + announced, TOGETHER // rows)
        more = [most >> i for i in range(most.bit_length()) if most >> i > needed]
        return [*more, needed]

    def stage(
        self,
        component: Component,
        rows: int,
        block: str,
        steps: Sequence[int],
        counts: Sequence[int] = (1,),
        co_resident: frozenset[str] = frozenset(),
    ) -> Stage:
        """Return the stage that computes a modulation, with the weights of one block in memory at a time. block: the
        prefix of the largest block's names. rows: the bytes of the result for one prompt. counts: the numbers of
        prompts that it may be computed for at once. steps: the bytes that later steps take in each of their splits,
        which stay free. co_resident: see `Stage`."""
        weights = block_bytes(self.runtime.load_plan(component), block)
        called = self.runtime.call_bytes(component, weights, once=True)
        splits = (
            Split(
                activations=count * rows + called,
                required=count * rows + max(step, called),
                size=count,
                results=count * rows,
            )
            for count in counts
            for step in steps
        )
        return Stage(
            name="modulation",
            resident=self.resident,
            component=component,
            splits=tuple(splits),
            co_resident=co_resident,
            calls_blocks=False,
        )

    def get(
        self,
        schedule: Hashable,
        stage: Stage,
        compute: Callable[[Any, Prompts], Modulation],
        needed: Sequence[Hashable] = (),
        announced: Sequence[Hashable] = (),
    ) -> tuple[Modulation, Prompts]:
        """Return a modulation of `schedule` and the prompts of its rows, among them those `needed`. Unless one is
        kept, enter `stage`, and call `compute` with the transformer and prompts: those needed, and the first ones
        `announced`."""
        key = self._find(schedule, needed)
        if key is None:
            transformer, split = self.residents.acquire(stage)
            self.runtime.notify("stage", "preparing the steps")
            drop_oldest(self._kept, KEPT - 1)
            every = dict.fromkeys([*needed, *announced])
            prompts = tuple(every)[: split.size] if needed else ()
            with self.runtime.clock.timed("modulate"):
                modulation = compute(transformer, prompts)
            key = schedule, prompts
        else:
            modulation = self._kept.pop(key)
        self._kept[key] = modulation
        return modulation, key[1]

    def renew(self, before: Component, now: Component) -> None:
        """Drop all if LoRAs change other weights of the modulation than `before`."""
        if not before.plan.when(ONCE).same_deltas(now.plan.when(ONCE)):
            self.clear()

    def clear(self) -> None:
        self._kept.clear()

    def _find(self, schedule: Hashable, prompts: Sequence[Hashable]) -> tuple[Hashable, Prompts] | None:
        return next((key for key in self._kept if key[0] == schedule and set(prompts) <= set(key[1])), None)


@found_once
def block_bytes(plan: LoadPlan, block: str) -> int:
    """Return the bytes of the weights that one block, with names that start with `block`, needs for its modulation."""
    return sum(e.nbytes for name, e in plan.entries.items() if name.startswith(block) and e.residency is ONCE)
