"""Control of Qwen-Image by pictures: its networks, their stages in a run, and what they do in each step.

A network makes changes of the transformer's image stream once for each evaluation, with the prompt's text, and all
branches of guidance get them. Control by a LoRA has no network: the transformer sees the picture's latents as tokens
behind those of the image, of the same grid and one frame further.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qwenimg.common.families.qwen_image import memory
from qwenimg.common.memory.memory import scores
from qwenimg.common.networks.denoisers import qwen_conditioning, qwen_controlnet
from qwenimg.common.numbers import packing
from qwenimg.common.parts.control_net import ControlLora, ControlNet
from qwenimg.common.pipeline.models.control_stages import ModulatedControls, in_its_steps, spread
from qwenimg.common.pipeline.models.flow_model import Controlling
from qwenimg.common.pipeline.steps.inpaint import Latents
from qwenimg.common.pipeline.steps.plan import SamplingPlan
from qwenimg.common.precision.precision import BYTES
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.engine import Array, ControlNetwork
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.stages import Stage

Grid = tuple[int, int]  # rows and columns of tokens


@dataclass(frozen=True, kw_only=True)
class ControlSchedule:
    """The steps of a run, for its control networks."""

    plan: SamplingPlan
    timesteps: tuple[float, ...]  # of the evaluations
    tokens: int  # of the image
    length: int  # of the prompt's text
    branches: float  # of guidance, averaged over the steps


class ControlNetworks(ModulatedControls[ControlSchedule]):
    """The control networks of one model, whose transformer has `blocks` blocks."""

    def __init__(self, residents: Residents, blocks: int):
        super().__init__(residents)
        self.blocks = blocks

    def is_modulated(self, net: ControlNet) -> bool:
        return _is_timed(net)

    def seen(self, request: Request) -> list[int]:
        """Return which controls of a request have a picture that the transformer itself sees."""
        nets = [(self.nets[control.network], control.scale) for control in request.controls]
        return [i for i, (net, scale) in enumerate(nets) if isinstance(net, ControlLora) and scale]

    def kept_bytes(self, request: Request, tokens: int) -> int:
        """Return the bytes that the controls of a request keep while the transformer computes a step of `tokens` image
        tokens: each its embedded picture, and a residual for each block of a ControlNet."""
        itemsize = BYTES[self.runtime.precision.compute_dtype("transformer")]
        configs = [(net.component.config, _is_timed(net)) for _, net in self.controls(request)]
        return sum(tokens * config.dim * (4 + itemsize * config.num_layers * timed) for config, timed in configs)

    def open(
        self, request: Request, schedule: ControlSchedule, steps: Sequence[Stage]
    ) -> dict[str, tuple[ControlNetwork, Any]]:
        """Open the networks of a request, each with its modulation, by their names in the request. steps: as in
        `stages`."""
        by_net = self.by_net(request, schedule, steps)
        opened = {net.name: self._opened(net, schedule, by_net[net.name]) for net in self.nets_of(request)}
        return {control.network: opened[net.name] for control, net in self.controls(request)}

    def controlling(
        self,
        request: Request,
        plan: SamplingPlan,
        opened: Mapping[str, tuple[ControlNetwork, Any]],
        grid: Grid,
        text: Array,
        pictures: Sequence[Latents],
    ) -> Controlling | None:
        """Return a function of x and sigma that returns what the control networks add after each block; None without
        controls. text: the states of the prompt. pictures: the latents of each control's picture."""
        rows = {sigma: row for row, sigma in enumerate(plan.evaluated_sigmas())}
        active = []
        for control, picture in zip(request.controls, pictures, strict=True):
            if control.network not in opened:
                continue  # a LoRA
            network, modulation = opened[control.network]
            condition = network.condition(text, grid, self.engine.array(packing.pack(picture)))
            active.append(in_its_steps(plan, control, network, condition, modulation))

        def control_step(x: Array, sigma: float) -> list[list[Any]] | None:
            now = [one for one in active if one.holds(sigma)]
            changes = [one.network.predict(x, one.step(rows[sigma]), one.condition, one.scale) for one in now]
            return spread(changes, self.blocks) if changes else None

        return control_step if active else None

    def _opened(
        self, net: ControlNet, schedule: ControlSchedule, stages: Sequence[Stage]
    ) -> tuple[ControlNetwork, Any]:
        modulation = None
        if _is_timed(net):
            dtype = self.runtime.precision.time_dtype()
            rows = qwen_conditioning.time_rows(net.component.config, schedule.timesteps, dtype)
            kept = self.modulations[net.name]
            modulation, _ = kept.get(schedule.timesteps, stages[0], lambda network, _: network.modulate(rows))
        network, _ = self.residents.acquire(stages[-1])
        return network, modulation

    def stages_of(
        self,
        request: Request,
        net: ControlNet,
        run: ControlSchedule,
        co_resident: frozenset[str],
        later: tuple[Stage, ...],
    ) -> list[Stage]:
        """Return the stages of one network: its modulation, unless it is kept or it has none, and all steps."""
        activations, operations = self._needs(net, run)
        activations += self.kept_bytes(request, run.tokens)
        control = self.stage(net, activations, self._passes(request, net, run), operations, co_resident, later)
        if not _is_timed(net):
            return [control]
        component, steps = net.component, len(run.timesteps)
        rows = memory.modulation_rows(component.config, self.runtime.load_plan(component), steps)
        return self.with_modulation(net, control, rows, run.timesteps)

    def _needs(self, net: ControlNet, schedule: ControlSchedule) -> tuple[int, float]:
        """Return the bytes of activations and the operations of one call of a network."""
        component, config = net.component, net.component.config
        if not _is_timed(net):
            activations = memory.patch_peak(config.dim, schedule.tokens)
            return self.runtime.call_bytes(component, activations), memory.patches_operations(config, schedule.tokens)
        tokens, limit = schedule.tokens + schedule.length, self.engine.workspace.score_bytes
        activations = memory.step_peak(config, 1, tokens) + scores(config.num_attention_heads, 1, tokens, limit)
        return self.runtime.call_bytes(component, activations), memory.step_operations(config, tokens)

    def _passes(self, request: Request, net: ControlNet, schedule: ControlSchedule) -> float:
        """Return the calls of a network in a run: patches are called by each branch of guidance."""
        steps = self.steps_under(request, net, schedule.plan)
        return schedule.plan.evaluations * steps * (1 if _is_timed(net) else schedule.branches)


def _is_timed(net: ControlNet) -> bool:
    """Return whether a network has blocks with a timestep, and so a modulation."""
    return net.component.network == qwen_controlnet.NETWORK.name
