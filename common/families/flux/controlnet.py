"""ControlNets of Flux.1: a folder or a file, their stages in a run, and what they do in each step.

A network makes changes of the transformer's image stream once for each evaluation, with the prompt's text, pooled text
and the guidance, and all branches of guidance get them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qwenimg.common.base.safe_files import closed_on_error, is_file
from qwenimg.common.families.flux import known
from qwenimg.common.formats.files import find_files
from qwenimg.common.formats.stored import Header
from qwenimg.common.memory.memory import scores
from qwenimg.common.networks.denoisers import flux_controlnet, flux_controlnet_names
from qwenimg.common.networks.denoisers.flux_conditioning import Grid, guidance_row, time_rows
from qwenimg.common.networks.denoisers.flux_controlnet import FluxControlNetConfig
from qwenimg.common.networks.denoisers.flux_dit import FluxConfig
from qwenimg.common.numbers import packing
from qwenimg.common.parts import flux_blocks
from qwenimg.common.parts.components import config_at, on_paper
from qwenimg.common.parts.control_net import ControlNet, check_sizes
from qwenimg.common.parts.open_file import open_part
from qwenimg.common.pipeline.models.control_stages import ModulatedControls, in_its_steps, spread
from qwenimg.common.pipeline.models.flow_model import Controlling
from qwenimg.common.pipeline.steps.inpaint import Latents
from qwenimg.common.pipeline.steps.plan import SamplingPlan
from qwenimg.common.precision.precision import BYTES
from qwenimg.common.request.control_text import Control
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.checkpoint import Checkpoint, Component
from qwenimg.common.runtime.engine import Array, ControlNetwork
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.stages import Stage

_REFUSED = {
    "QwenImage": "is a ControlNet of Qwen-Image, and the model is FLUX.1",
    "SD3": "is a ControlNet of Stable Diffusion 3, and the model is FLUX.1",
    "ControlNet": "is a ControlNet of Stable Diffusion, and the model is FLUX.1",
    "Z": "is a ControlNet of Z-Image, and the model is FLUX.1",
}


# Files


def is_control(header: Header, *, kinds: bool) -> bool:
    """Return whether a file with this header is a ControlNet for Flux.1 that is told the kind of its picture, or none
    with `kinds` False."""
    return _is_ours(header) and kinds == (flux_controlnet_names.MODES in header.tensors)


def _is_ours(header: Header) -> bool:
    layouts = flux_controlnet_names.LAYOUTS
    return layouts.find_in(header) is not None and layouts.similar_model(header.tensors) is None


def open_control(path: Path, checkpoint: Checkpoint) -> ControlNet:
    """Open the ControlNet in the folder or file `path` for a model. Raises ModelError."""
    if not is_file(path / "config.json") and len(files := find_files(path).files) == 1:
        [path] = files
    base: FluxConfig = checkpoint["transformer"].config
    config: FluxControlNetConfig = config_at(flux_controlnet.NETWORK, path, config_like(base), _REFUSED)
    component = open_part(flux_controlnet_names.LAYOUTS, path, config, "ControlNet")
    net = _net(component)
    with closed_on_error(net):
        config = component.config
        pairs: dict[str, tuple[object, object]] = {
            "channels in its streams": (config.dim, base.dim),
            "channels in a latent": (config.in_channels, base.out_features),
            "channels in a text": (config.joint_attention_dim, base.joint_attention_dim),
            "channels in a pooled text": (config.pooled_projection_dim, base.pooled_projection_dim),
        }
        check_sizes(path, "transformer", pairs)
    return net


def published(name: str) -> ControlNet | None:
    """Return the ControlNet known as `name`, without its files; None for another name."""
    if name not in known.CONTROL_LAYERS:
        return None
    double, single, kinds = known.CONTROL_LAYERS[name]
    config = FluxControlNetConfig(num_layers=double, num_single_layers=single, num_mode=kinds)
    return _net(on_paper(flux_controlnet.NETWORK, config, "bfloat16"))


def config_like(base: FluxConfig) -> FluxControlNetConfig:
    """Return the configuration of a ControlNet for a transformer, as it is published."""
    own = asdict(FluxControlNetConfig())
    names = ("num_layers", "num_single_layers", "guidance_embeds", "in_channels", "out_channels")
    shared = {name: value for name, value in asdict(base).items() if name not in names}
    return FluxControlNetConfig(**(own | shared | {"in_channels": base.out_features}))


def _net(component: Component) -> ControlNet:
    return ControlNet(name="", component=component, samples=True, kinds=component.config.kinds)


# A run


@dataclass(frozen=True, kw_only=True)
class ControlRun:
    """The facts of a run that the stages of its ControlNets depend on."""

    plan: SamplingPlan
    timesteps: tuple[float, ...]  # of the evaluations
    guidance: float
    pooled: Hashable  # the key of the pooled text of the branch that leads
    tokens: int  # of the image
    length: int  # of the prompt's text

    def schedule(self, net: ControlNet) -> Hashable:
        """Return the key of a network's modulation, besides its weights and the prompt."""
        return self.timesteps, self.guidance if net.component.config.guidance_embeds else 0.0


class ControlNetworks(ModulatedControls[ControlRun]):
    """The ControlNets of one model."""

    def __init__(self, residents: Residents, config: FluxConfig):
        super().__init__(residents)
        self.config = config

    def guidance(self, request: Request) -> float:
        """Return the guidance that the networks see: the transformer's; that of dev beside a transformer that sees
        none, unless the user gives one."""
        return request.guidance if self.config.guidance_embeds or request.guidance else known.DEV.guidance

    def kept_bytes(self, request: Request, tokens: int) -> int:
        """Return the bytes that the controls of a request keep while the transformer computes a step of `tokens` image
        tokens: each its embedded picture, and a residual for each of its blocks."""
        itemsize = BYTES[self.runtime.precision.compute_dtype("transformer")]
        configs = [net.component.config for _, net in self.controls(request)]
        blocks = [(config.dim, config.num_layers + config.num_single_layers) for config in configs]
        return sum(tokens * width * (4 + itemsize * count) for width, count in blocks)

    def stages_of(
        self,
        request: Request,
        net: ControlNet,
        run: ControlRun,
        co_resident: frozenset[str],
        later: tuple[Stage, ...],
    ) -> list[Stage]:
        """Return the stages of one network: its modulation, unless it is kept, and all steps."""
        config: FluxControlNetConfig = net.component.config
        tokens, limit = run.tokens + run.length + bool(config.num_mode), self.engine.workspace.score_bytes
        peak = flux_blocks.step_peak(config, tokens) + scores(config.num_attention_heads, 1, tokens, limit)
        activations = self.runtime.call_bytes(net.component, peak) + self.kept_bytes(request, run.tokens)
        passes = run.plan.evaluations * self.steps_under(request, net, run.plan)
        per_pass = flux_blocks.control_operations(config, run.tokens, tokens)
        control = self.stage(net, activations, passes, per_pass, co_resident, later)
        rows = flux_blocks.modulation_rows(
            config, self.runtime.load_plan(net.component), len(run.timesteps), head=False
        )
        return self.with_modulation(net, control, rows, run.schedule(net), [run.pooled])

    def open(
        self, request: Request, run: ControlRun, steps: Sequence[Stage], pooled: Array
    ) -> dict[str, tuple[ControlNetwork, Any]]:
        """Open the networks of a request, each with its modulation, by their names in memory. steps: the later stages,
        of the transformer; pooled: the prompt's pooled text."""
        by_net = self.by_net(request, run, steps)
        return {net.name: self._opened(net, run, by_net[net.name], pooled) for net in self.nets_of(request)}

    def _opened(
        self, net: ControlNet, run: ControlRun, stages: Sequence[Stage], pooled: Array
    ) -> tuple[ControlNetwork, Any]:
        dtype = self.runtime.precision.time_dtype()
        times, guidance = time_rows(run.timesteps, dtype), guidance_row(run.guidance, dtype)
        modulation, _ = self.modulations[net.name].get(
            run.schedule(net),
            stages[0],
            lambda network, _: network.modulate(times, guidance, [pooled]),
            [run.pooled],
        )
        network, _ = self.residents.acquire(stages[-1])
        return network, modulation

    def controlling(
        self,
        request: Request,
        plan: SamplingPlan,
        opened: Mapping[str, tuple[ControlNetwork, Any]],
        grid: Grid,
        text: Array,
        pictures: Sequence[Latents],
    ) -> Controlling | None:
        """Return a function of x and sigma that returns what the networks add after each block; None without controls.
        text: the states of the prompt. pictures: the latents of each control's picture."""
        rows = {sigma: row for row, sigma in enumerate(plan.evaluated_sigmas())}
        active = []
        for control, picture in zip(request.controls, pictures, strict=True):
            net = self.nets[control.network]
            if not isinstance(net, ControlNet):
                continue  # the transformer itself sees it
            network, modulation = opened[net.name]
            packed = self.engine.array(packing.pack(picture))
            condition = network.condition(text, (grid, _kind(net, control)), packed)
            active.append(in_its_steps(plan, control, network, condition, modulation))

        def control_step(x: Array, sigma: float) -> list[list[Any]] | None:
            now = [one for one in active if one.holds(sigma)]
            made = [one.network.predict(x, one.step(rows[sigma]), one.condition, one.scale) for one in now]
            double, single = ([changes[i] for changes in made] for i in range(2))
            of_both = spread(double, self.config.num_layers) + spread(single, self.config.num_single_layers)
            return of_both if now else None

        return control_step if active else None


def _kind(net: ControlNet, control: Control) -> int | None:
    """Return the number of the kind of a control's picture; None for a network that is told none."""
    return flux_controlnet.KINDS[control.kind_among(net.kinds)] if net.kinds else None
