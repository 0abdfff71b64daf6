"""The control networks of one model and their stages in a run: each stays in memory together with the earlier ones and
the denoiser, which calls them in every step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, ClassVar, Generic, TypeVar

from qwenimg.common.parts.control_net import Controller, ControlNet, networks
from qwenimg.common.parts.modulations import Modulations
from qwenimg.common.pipeline.steps.plan import SamplingPlan
from qwenimg.common.request.control_text import Control
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.engine import Condition, ControlNetwork, TimeStep
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.stages import Split, Stage

Run = TypeVar("Run")  # the facts of a run that a family's stages depend on


class ControlStages(ABC, Generic[Run]):
    """The control networks and LoRAs of one model."""

    by_block: ClassVar[bool] = False  # True: its changes are functions of the denoiser's stream, one after each block

    def __init__(self, residents: Residents):
        self.residents, self.runtime, self.engine = residents, residents.runtime, residents.runtime.engine
        self.nets: Mapping[str, Controller] = {}

    @abstractmethod
    def stages_of(
        self, request: Request, net: ControlNet, run: Run, co_resident: frozenset[str], later: tuple[Stage, ...]
    ) -> list[Stage]:
        """Return the stages of one control network. `co_resident`: networks in memory with it; `later`: stages that
        follow."""

    def give(self, nets: Mapping[str, Controller]) -> None:
        """Replace the networks and LoRAs, by their names in requests."""
        self.nets = nets

    def clear(self) -> None:
        """Drop what is kept for later images."""

    def co_resident(self, request: Request) -> frozenset[str]:
        """Return the names of the networks in memory that a step of the denoiser calls too."""
        return frozenset(net.name for net in self.nets_of(request))

    def controls(self, request: Request) -> list[tuple[Control, ControlNet]]:
        """Return the controls of a request that are by a network, with their networks."""
        nets = ((control, self.nets[control.network]) for control in request.controls)
        return [(control, net) for control, net in nets if isinstance(net, ControlNet)]

    def nets_of(self, request: Request) -> list[ControlNet]:
        """Return the networks of a request, each once."""
        return list({net.name: net for _, net in self.controls(request)}.values())

    def stages(self, request: Request, run: Run, steps: Sequence[Stage]) -> list[Stage]:
        """Return the stages of a request's control networks. steps: the later stages, of the denoiser."""
        return [stage for stages in self.by_net(request, run, steps).values() for stage in stages]

    def by_net(self, request: Request, run: Run, steps: Sequence[Stage]) -> dict[str, list[Stage]]:
        """Return the stages of each network, by its name in memory. The networks before it stay in memory, and it
        leaves room for those after it and for the denoiser."""
        stages: dict[str, list[Stage]] = {}
        later = list(steps)
        nets = self.nets_of(request)
        for i, net in reversed(list(enumerate(nets))):
            co_resident = frozenset(one.name for one in nets[:i])
            stages[net.name] = self.stages_of(request, net, run, co_resident, tuple(later))
            later = [*stages[net.name], *later]
        return {net.name: stages[net.name] for net in nets}

    def stage(
        self,
        net: ControlNet,
        activations: int,
        passes: float,
        per_pass: float,
        co_resident: frozenset[str],
        later: tuple[Stage, ...],
    ) -> Stage:
        """Return the stage of all calls of a network, each with `activations` bytes and `per_pass` operations."""
        required = max([activations, *(stage.splits[-1].needed for stage in later)])
        return Stage(
            name="control",
            resident=net.name,
            component=net.component,
            splits=(Split(activations=activations, required=required, size=1, passes=passes),),
            co_resident=co_resident,
            partners=later,
            operations=passes * per_pass,
        )

    def steps_under(self, request: Request, net: ControlNet, plan: SamplingPlan) -> float:
        """Return the share of the steps in which a network is called, once for each control by it."""
        windows = [control.steps(plan.steps) for control, other in self.controls(request) if other is net]
        return sum(last - first for first, last in windows) / plan.steps


class ModulatedControls(ControlStages[Run]):
    """Control networks with blocks as those of the transformer, each with a modulation of its own, which is kept. Their
    changes are those of the image stream behind each of the transformer's blocks."""

    by_block = True

    def __init__(self, residents: Residents):
        super().__init__(residents)
        self.modulations: dict[str, Modulations] = {}  # by the networks' names in memory

    def is_modulated(self, net: ControlNet) -> bool:
        """Return whether a network has a modulation."""
        return True

    def give(self, nets: Mapping[str, Controller]) -> None:
        """Replace the networks and LoRAs, by their names in requests. Kept modulation of others is dropped."""
        super().give(nets)
        names = [net.name for net in networks(nets.values()) if self.is_modulated(net)]
        self.modulations = {name: self.modulations.get(name, Modulations(self.residents, name)) for name in names}

    def clear(self) -> None:
        for modulations in self.modulations.values():
            modulations.clear()

    def with_modulation(
        self, net: ControlNet, control: Stage, rows: int, schedule: Hashable, texts: Sequence[Hashable] = ()
    ) -> list[Stage]:
        """Return the stages of a network: its modulation of `rows` bytes, unless that of `schedule` and `texts` is
        kept, and `control`, all steps."""
        modulations = self.modulations[net.name]
        kept = modulations.has(schedule, texts)
        control = replace(control, checked=kept)
        if kept:
            return [control]
        first = modulations.stage(
            net.component,
            rows,
            "transformer_blocks.0.",
            [control.splits[-1].needed],
            co_resident=control.co_resident,
        )
        return [replace(first, name=control.name, partners=control.partners), control]


def spread(controls: Sequence[Sequence[Any]], blocks: int) -> list[list[Any]]:
    """Return the changes behind each of `blocks` by several controls: one with fewer changes has each for as many
    blocks in a row, and the last for what is left; one without changes has none."""
    some = [changes for changes in controls if changes]
    return [[changes[block // -(-blocks // len(changes))] for changes in some] for block in range(blocks)]


@dataclass(frozen=True, kw_only=True)
class OpenControl:
    """A control of a run whose network is open."""

    network: ControlNetwork
    condition: Condition
    scale: float
    begin: float  # it controls noise levels up to this one
    end: float  # and above this one
    modulation: Any = None  # of a network that has one, for each row of the run's schedule

    def holds(self, sigma: float) -> bool:
        """Return whether it changes something at a noise level."""
        return self.end < sigma <= self.begin and self.scale != 0

    def step(self, row: int) -> TimeStep:
        """Return the time of a step at a row of the schedule."""
        return None if self.modulation is None else (self.modulation, row)


def in_its_steps(
    plan: SamplingPlan, control: Control, network: ControlNetwork, condition: Condition, modulation: Any = None
) -> OpenControl:
    """Return a control of a run by `plan`, at the noise levels of its steps."""
    begin, end = levels(plan, *control.steps(plan.steps))
    return OpenControl(
        network=network, condition=condition, scale=control.scale, begin=begin, end=end, modulation=modulation
    )


def levels(plan: SamplingPlan, first: int, last: int) -> tuple[float, float]:
    """Return the noise levels between which the steps after `first` and up to `last` lie: sigma <= the first and >
    the second."""
    end = plan.sigmas[last] if last < plan.steps else -1.0
    return (plan.sigmas[first] if first else inf), (inf if first == last else end)
