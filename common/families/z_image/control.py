"""Control of Z-Image by pictures: its networks in a folder or a file, their stages in a run, and what they do in each
step.

A network runs inside the transformer, which gives it its streams, in each branch of guidance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qwenimg.common.base.safe_files import bad, closed_on_error, is_file, is_folder
from qwenimg.common.families.z_image import memory
from qwenimg.common.families.z_image.known import PUBLISHED, TURBO
from qwenimg.common.formats.files import find_files
from qwenimg.common.formats.headers import open_header
from qwenimg.common.formats.stored import TensorSlice, raw
from qwenimg.common.memory.memory import scores
from qwenimg.common.networks.denoisers import zimage_control, zimage_control_names, zimage_dit
from qwenimg.common.networks.denoisers.zimage_control import ZImageControlConfig
from qwenimg.common.networks.denoisers.zimage_dit import ZImageConfig
from qwenimg.common.networks.layout import Layouts
from qwenimg.common.numbers import packing
from qwenimg.common.parts import known_configs
from qwenimg.common.parts.components import config_at, on_paper
from qwenimg.common.parts.control_net import ControlNet, check_sizes
from qwenimg.common.parts.open_file import open_part
from qwenimg.common.pipeline.models.control_stages import ControlStages, in_its_steps
from qwenimg.common.pipeline.models.flow_model import Controlling
from qwenimg.common.pipeline.steps.inpaint import Latents
from qwenimg.common.pipeline.steps.plan import SamplingPlan
from qwenimg.common.precision.precision import BYTES
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.checkpoint import Checkpoint, Component
from qwenimg.common.runtime.engine import Array, ControlNetwork
from qwenimg.common.runtime.stages import Stage

_REFUSED = {
    "QwenImage": "is a ControlNet of Qwen-Image, and the model is Z-Image",
    "Flux": "is a ControlNet of FLUX.1, and the model is Z-Image",
    "SD3": "is a ControlNet of Stable Diffusion 3, and the model is Z-Image",
    "ControlNet": "is a ControlNet of Stable Diffusion, and the model is Z-Image",
}


def open_control(path: Path, checkpoint: Checkpoint) -> ControlNet:
    """Open the control network in the folder or file `path` for a model. Raises ModelError and UsageError."""
    base: ZImageConfig = checkpoint["transformer"].config
    config: ZImageControlConfig = config_at(zimage_control.NETWORK, path, config_like(base), _REFUSED)
    if not is_file(path / "config.json") and len(files := find_files(path).files) == 1:  # as it is published
        [path] = files
    component = open_part(_layouts(path), path, config, "control network")
    config = component.config
    net = _net(config.control_in_dim > base.in_channels, component)
    with closed_on_error(net):
        beside = 2 * base.in_channels + 1  # a mask and a second picture behind the first
        if config.control_in_dim not in (base.in_channels, beside):
            taken = f"pictures of {config.control_in_dim} channels; the model's latents have {base.in_channels}"
            raise bad(path, f"takes {taken}, and {beside} with a mask and a second picture")
        pairs: dict[str, tuple[object, object]] = {
            "channels in its stream": (config.dim, base.dim),
            "heads": (config.n_heads, base.n_heads),
            "refiner blocks": (config.n_refiner_layers, base.n_refiner_layers),
        }
        if config.control_layers_places[-1] >= base.n_layers:
            pairs["blocks"] = (f"more than {config.control_layers_places[-1]}", base.n_layers)
        check_sizes(path, "transformer", pairs)
    return net


def published(name: str) -> ControlNet | None:
    """Return the control network known as `name`, without its files; None for another name."""
    if name not in PUBLISHED:
        return None
    base: ZImageConfig = known_configs.read(TURBO.name, "transformer", zimage_dit.NETWORK)
    every, fills = PUBLISHED[name]
    config = replace(config_like(base), control_layers_places=tuple(range(0, base.n_layers, every)))
    if not fills:
        config = replace(config, control_in_dim=base.in_channels, add_control_noise_refiner=None)
    return _net(fills, on_paper(zimage_control.NETWORK, config, "bfloat16"))


def config_like(base: ZImageConfig) -> ZImageControlConfig:
    """Return the configuration of a control network for a transformer, with a layer for each of its blocks."""
    shared = ("all_patch_size", "all_f_patch_size", "dim", "n_refiner_layers", "n_heads", "n_kv_heads", "norm_eps")
    return ZImageControlConfig(
        **{name: getattr(base, name) for name in shared},
        control_layers_places=tuple(range(base.n_layers)),
        control_refiner_layers_places=tuple(range(base.n_refiner_layers)),
        control_in_dim=2 * base.in_channels + 1,
    )


def _net(fills: bool, component: Component) -> ControlNet:
    return ControlNet(name="", component=component, mask="optional" if fills else "none", fills=fills)


def _layouts(path: Path) -> Layouts:
    """Return the layouts of the control network at `path`: of version 2.0, a file whose refiner blocks were never
    trained, they leave these out."""
    own = zimage_control_names.LAYOUTS
    if is_folder(path):
        return own
    header = open_header(path)
    with closing(header.file):
        naming = own.find(header.tensors)
        tensor = None if naming is None else header.tensors.get(naming.prefix + zimage_control_names.CHANGES)
        if tensor is None or raw(TensorSlice(zimage_control_names.CHANGES, header.file, *tensor)).any():
            return own
    return zimage_control_names.untrained()


@dataclass(frozen=True, kw_only=True)
class ControlRun:
    """The facts of a run that the stages of its control networks depend on."""

    plan: SamplingPlan
    tokens: int  # of image and longest text, with their pads
    calls: float  # of the transformer in the run


class ControlNetworks(ControlStages[ControlRun]):
    """The control networks of one model."""

    def stages_of(
        self,
        request: Request,
        net: ControlNet,
        run: ControlRun,
        co_resident: frozenset[str],
        later: tuple[Stage, ...],
    ) -> list[Stage]:
        config: ZImageControlConfig = net.component.config
        limit = self.engine.workspace.score_bytes
        peak = memory.block_peak(config, run.tokens) + scores(config.n_heads, 1, run.tokens, limit)
        activations = self.runtime.call_bytes(net.component, peak) + self.kept_bytes(request, run.tokens)
        passes = run.calls * self.steps_under(request, net, run.plan)
        per_pass = memory.control_operations(config, run.tokens)
        return [self.stage(net, activations, passes, per_pass, co_resident, later)]

    def kept_bytes(self, request: Request, tokens: int) -> int:
        """Return the bytes that the controls of a request keep while the transformer computes a step of `tokens`: each
        its embedded picture, a stream, and the change that is added next."""
        itemsize = BYTES[self.runtime.precision.compute_dtype("transformer")]
        widths = [net.component.config.dim for _, net in self.controls(request)]
        return sum(tokens * width * (4 + 4 + itemsize) for width in widths)

    def open(self, request: Request, run: ControlRun, steps: Sequence[Stage]) -> dict[str, ControlNetwork]:
        """Open the networks of a request, by their names in memory. steps: the later stages, of the transformer."""
        by_net = self.by_net(request, run, steps)
        return {name: self.residents.acquire(stages[-1])[0] for name, stages in by_net.items()}

    def controlling(
        self,
        request: Request,
        plan: SamplingPlan,
        opened: Mapping[str, ControlNetwork],
        grid: tuple[int, int],
        pictures: Sequence[Latents],
    ) -> Controlling | None:
        """Return a function of x and sigma that returns the networks that the transformer calls; None without controls.
        pictures: the latents of each control's picture."""
        active = []
        for (control, net), picture in zip(self.controls(request), pictures, strict=True):
            network = opened[net.name]
            packed = self.engine.array(packing.pack(picture, channels_last=True))
            condition = network.condition(None, grid, packed)
            active.append(in_its_steps(plan, control, network, condition))

        def control_step(x: Array, sigma: float) -> list[Any] | None:
            now = [one for one in active if one.holds(sigma)]
            return [one.network.predict(x, None, one.condition, one.scale) for one in now] or None

        return control_step if active else None
