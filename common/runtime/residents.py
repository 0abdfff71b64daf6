"""The components of a model in memory: which of them is opened, used again, streamed or freed for the stages of a run.

The rule is `Occupancy.place`. `Residents.plan` applies it to a copy of the state of memory, `Residents.acquire` to the
memory itself, so that a run does what its plan says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qwenimg.common.base.amounts import counted, size_text
from qwenimg.common.base.errors import DoesNotFit
from qwenimg.common.memory.memory_plan import MemoryPlan, StageMemory
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.runtime.rates import SMALL
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.runtime.stages import DECODE, Split, Stage
from qwenimg.common.weights import streaming

DENOISERS = "transformer"  # the role of transformers and UNets


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The form in which a stage runs: the component, with blocks that do not fit streamed, and the chosen split."""

    component: Component
    split: Split
    opens: bool  # True: the component is not in memory in this form
    weights: int  # bytes of the component in memory during the stage
    activations: int


class Occupancy:
    """The components in memory by name, and the budget for others."""

    def __init__(self, runtime: Runtime, budget: Callable[[int], int], free: Callable[[Sequence[str]], None]):
        """Start empty. budget(taken): the bytes that a run may take in all, of which it has `taken` already. free:
        frees components."""
        self.runtime, self._budget, self._free = runtime, budget, free
        self.opened: dict[str, Component] = {}
        self.results = 0  # bytes of results that stay in memory

    def place(self, stage: Stage) -> Placement:
        """Free the other components if they do not fit together with `stage`. Return how it runs."""
        opened = self.opened.get(stage.resident)
        self._make_room(stage, self.runtime.weight_bytes(opened or stage.component) + stage.frees_for)
        component, split = self._chosen(stage, opened, self._left(stage))
        opens = component is not opened
        weights = self.runtime.weight_bytes(component)
        if opens and not stage.calls_blocks:
            weights = self.runtime.opened_bytes(component)
        activations = max(split.activations, self.runtime.loading_bytes(component) if opens else 0)
        self._make_room(stage, weights + activations)
        return Placement(component=component, split=split, opens=opens, weights=weights, activations=activations)

    def _chosen(self, stage: Stage, opened: Component | None, left: int) -> tuple[Component, Split]:
        """Return the first split that fits into `left` bytes with all weights in memory, else the first that fits with
        streamed blocks, else the split with the least memory."""
        ways = [(self._form(stage.component, opened, left - split.needed), split) for split in stage.splits]
        fits = [(form, split) for form, split in ways if self.runtime.weight_bytes(form) + split.needed <= left]
        whole = [(form, split) for form, split in fits if not self.runtime.streamed_bytes(form)]
        return [*whole, *fits, ways[-1]][0]

    def _form(self, component: Component, opened: Component | None, budget: int) -> Component:
        """Return the `opened` component if it fits into `budget`, else `component` with the blocks streamed that do
        not fit."""
        if opened is not None and (not self.runtime.streams or self.runtime.weight_bytes(opened) <= budget):
            return opened
        return self.runtime.with_streaming(component, budget)

    def peak(self, stage: Stage, use: Placement) -> int:
        """Return the bytes in memory during `stage`."""
        return self.without(stage.resident) + use.weights + use.activations

    def commit(self, stage: Stage, component: Component) -> None:
        """Note whether the component of `stage` stays in memory."""
        if stage.keeps:
            self.opened[stage.resident] = component
        else:
            self.opened.pop(stage.resident, None)

    @property
    def weights(self) -> int:
        """The bytes of the weights in memory."""
        return self._weights_without("")

    def without(self, name: str) -> int:
        """Return the bytes in memory, not counting component `name`."""
        return self._weights_without(name) + self.results

    def _weights_without(self, name: str) -> int:
        return sum(self.runtime.weight_bytes(part) for other, part in self.opened.items() if other != name)

    def _left(self, stage: Stage) -> int:
        """Return the bytes left for the component of `stage` and its activations, after reserving the least that
        partners still to be opened need."""
        missing = {one.resident: one.component for one in stage.partners if one.resident not in self.opened}
        least = sum(self.runtime.weight_bytes(self.runtime.with_streaming(one, 0)) for one in missing.values())
        results = sum(max(split.results for split in one.splits) for one in stage.partners)
        return self._budget(self.weights + self.results) - self.without(stage.resident) - least - results

    def _make_room(self, stage: Stage, needed: int) -> None:
        """Free all components that `stage` does not call if fewer than `needed` bytes are left for it."""
        if stage.optional:
            return
        others = [other for other in self.opened if other != stage.resident and other not in stage.co_resident]
        if others and needed > self._left(stage):
            self._free(others)
            for other in others:
                del self.opened[other]


class Residents:
    """The opened networks of a model by name."""

    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        self._memory = Occupancy(runtime, runtime.budget, self._close_networks)
        self._networks: dict[str, Any] = {}
        self._checked: set[str] = set()

    @property
    def weights(self) -> int:
        """The bytes of the weights in memory."""
        return self._memory.weights

    @property
    def opened(self) -> frozenset[str]:
        """The names of the networks in memory."""
        return frozenset(self._memory.opened)

    def plan(self, stages: Sequence[Stage]) -> MemoryPlan:
        """Return the memory plan of a run of `stages`; load and free nothing."""
        budget = self.runtime.budget(self.weights)
        memory = Occupancy(self.runtime, lambda taken: budget, lambda names: None)
        memory.opened |= self._memory.opened
        plan = MemoryPlan(budget=budget, loaded=self.weights)
        for stage in stages:
            use = memory.place(stage)
            if stage.optional and memory.peak(stage, use) > budget:
                continue
            plan.add(
                StageMemory(
                    name=stage.name,
                    title=self._title(stage),
                    weights=memory.without(stage.resident) + use.weights,
                    activations=use.activations,
                    about=use.split.about,
                )
            )
            memory.commit(stage, use.component)
            memory.results += use.split.results
            plan.streamed += use.split.passes * self.runtime.streamed_bytes(use.component)
            small = stage.operations > 0 and use.component.plan.parameters < SMALL
            if stage.name == DECODE:
                plan.decoding += stage.operations
                plan.small_decoder = small
            else:
                plan.steps += stage.operations
                plan.small_denoiser |= small
                plan.quantized |= stage.operations > 0 and use.component.is_quantized
        return plan

    def begin(self) -> None:
        """Begin a run. Results of its stages count as memory in use from now on."""
        self._memory.results = 0

    def acquire(self, stage: Stage) -> tuple[Any, Split]:
        """Return the network of `stage`, opened or used again, and the split of the work. Only the caller has the
        network of a stage that does not keep it. Raises DoesNotFit."""
        use, name = self._memory.place(stage), stage.resident
        if stage.optional:
            self._check_optional(stage, self._memory.peak(stage, use))
        self._memory.results += use.split.results
        needed = use.split.needed if stage.checked else 0
        if not use.opens:
            if stage.checked:
                self.runtime.check_fit(self._title(stage), needed)
            network = self._networks[name] if stage.keeps else self._networks.pop(name)
            self._memory.commit(stage, use.component)
            return network, use.split
        self._drop([name])
        network = self.runtime.open(use.component, name, needed)
        if stage.keeps:
            self._networks[name] = network
        self._memory.commit(stage, use.component)
        return network, use.split

    def network(self, name: str) -> Any:
        """Return the network `name`, which is open."""
        return self._networks[name]

    def _check_optional(self, stage: Stage, peak: int) -> None:
        budget = self.runtime.budget(self.weights)
        if peak > budget:
            raise DoesNotFit(
                f"{self._title(stage)} takes {size_text(peak)} with what is in memory, "
                f"{self.runtime.budget_text(budget)}"
            )

    def _title(self, stage: Stage) -> str:
        return stage.title or ("a step of this size" if stage.resident in self._networks else f"the {stage.resident}")

    def adapt(self, name: str, component: Component) -> None:
        """Read again those weights of an open network that the LoRAs of `component` change."""
        if (before := self._memory.opened.get(name)) is None:
            return
        now = replace(component, plan=streaming.with_streams_of(component.plan, before.plan))
        pairs = [(key, entry, now.plan.entries[key]) for key, entry in before.plan.entries.items()]
        fused = [key for key, old, new in pairs if old.fused != new.fused]
        branches = [key for key, old, new in pairs if old.fused == new.fused and old.branch != new.branch]
        if fused or branches:
            self.runtime.notify("stage", f"changing {counted(len(fused + branches), 'weight')} of the {name} by LoRA")
            try:
                with self.runtime.clock.timed(f"load {name}"):
                    self.runtime.engine.refill(self._networks[name], self.runtime.load_plan(now), fused, branches)
            except BaseException:  # some weights are still the old ones
                self._drop([name])
                raise
        self._memory.opened[name] = now

    def check_weights(self, name: str, component: Component) -> None:
        """Read every weight of a component that is loaded only after some steps, once, without keeping any. Raises
        ModelError."""
        if name not in self._networks and name not in self._checked:
            self.runtime.check_weights(component, name)
        self._checked.add(name)

    def free(self, role: str = "") -> None:
        """Free the networks of a role (text, transformer or vae), or all."""
        self._drop([name for name, part in self._memory.opened.items() if role in ("", part.role)])

    def drop(self, name: str) -> None:
        """Free the network `name`, if it is open."""
        self._drop([name] if name in self._memory.opened else [])

    def _close_networks(self, names: Sequence[str]) -> None:
        for name in names:
            if self._memory.opened[name].role == DENOISERS:
                self.runtime.notify("stage", f"freeing the {name}, since what comes next does not fit beside it")
        for name in names:
            del self._networks[name]
        self.runtime.engine.release()

    def _drop(self, names: Sequence[str]) -> None:
        """Free these networks, if they are open."""
        for name in names:
            self._networks.pop(name, None)
            self._memory.opened.pop(name, None)
        if names:
            self.runtime.engine.release()
