"""Control of Stable Diffusion by pictures: ControlNets in a folder or a file, their stages in a run, and what they do
in each step.

A ControlNet sees the pixels of its picture, and the text of each branch of guidance; what it adds to the UNet's results
is made once for each of the UNet's calls. The refiner of SDXL is not controlled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.hf_cache import display_name
from qwenimg.common.base.safe_files import closed_on_error, is_file
from qwenimg.common.base.text import clean
from qwenimg.common.families.stable_diffusion import ip_adapter
from qwenimg.common.families.stable_diffusion.checkpoint import facts
from qwenimg.common.families.stable_diffusion.expert import Conditioning, step_peak
from qwenimg.common.families.stable_diffusion.ip_adapter import ActivePictures
from qwenimg.common.families.stable_diffusion.known import CONTROLS, SDXL_CONTROLS
from qwenimg.common.memory import operations
from qwenimg.common.networks.denoisers import unet, unet_controlnet, unet_controlnet_names
from qwenimg.common.networks.denoisers.unet import UNetConfig
from qwenimg.common.networks.denoisers.unet_controlnet import UNetControlNetConfig
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts import known_configs
from qwenimg.common.parts.components import on_paper, read_config
from qwenimg.common.parts.control_net import Controller, ControlNet, check_sizes
from qwenimg.common.parts.open_file import open_part, stored_shape
from qwenimg.common.pipeline.models.control_stages import ControlStages, levels
from qwenimg.common.pipeline.steps.plan import SamplingPlan
from qwenimg.common.precision.precision import BYTES
from qwenimg.common.request.names import CONTROL_MODES
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.engine import Array, Condition, ControlNetwork, DenoiserNetwork, TimeStep
from qwenimg.common.runtime.skipping import Skipping
from qwenimg.common.runtime.stages import Split, Stage

_PAINTS = re.compile(r"inpaint", re.IGNORECASE)  # in the path of a ControlNet that fills a mask: no tensor shows it
_FIT: Mapping[str, str] = {
    "cross_attention_dim": "channels in a text",
    "block_out_channels": "channels in its levels",
    "layers_per_block": "layers in its levels",
    "addition_embed_type": "kind of conditions on sizes",
}
_REFUSED = {
    "QwenImage": "is a ControlNet of Qwen-Image, and the model is Stable Diffusion",
    "Flux": "is a ControlNet of FLUX.1, and the model is Stable Diffusion",
    "SD3": "is a ControlNet of Stable Diffusion 3, and the model is Stable Diffusion",
    "ControlNetUnion": "is a ControlNet Union, which is not built: give a ControlNet of one kind",
    "ControlNetXS": "is a ControlNet-XS, which is not built: give a ControlNet",
    "T2IAdapter": "is a T2I-Adapter, which is not built: give a ControlNet",
    "Z": "is a ControlNet of Z-Image, and the model is Stable Diffusion",
}
_TEXT = "mid_block.attentions.0.transformer_blocks.0.attn2.to_k.weight"
_KINDS = {768: "Stable Diffusion 1.x", 1024: "Stable Diffusion 2.x", 1280: "the refiner of SDXL", 2048: "SDXL"}
BALANCED, PROMPT, CONTROL = CONTROL_MODES


def open_control(path: Path, checkpoint: Checkpoint) -> Controller:
    """Open the ControlNet or the IP-Adapter in the folder or file `path` for a model. Raises ModelError and
    UsageError."""
    model = facts(checkpoint)
    if model.refiner:
        raise UsageError("--control is for Stable Diffusion models, and not for a refiner alone")
    base: UNetConfig = checkpoint["unet"].config
    if ip_adapter.is_at(path):
        return ip_adapter.open_adapter(path, base)
    if is_file(path / "config.json"):
        read_config(unet_controlnet.NETWORK, path, _REFUSED)  # for its message on another kind
    _check_text(path, base)
    component = open_part(unet_controlnet_names.LAYOUTS, path, config_like(base), "ControlNet")
    order: Any = component.config.controlnet_conditioning_channel_order
    net = ControlNet(name="", component=component, mask=_mask(Path(display_name(path))), picture=order)
    with closed_on_error(net):
        _check_fit(path, component.config, base, checkpoint["vae"].config.scale)
    return net


def published(name: str) -> ControlNet | None:
    """Return the ControlNet known as `name`, without its files; None for another name."""
    known = next((one for one in CONTROLS if one.name == name), None)
    if known is None:
        return None
    base: UNetConfig = known_configs.read("sdxl" if name.startswith(SDXL_CONTROLS) else "sd15", "unet", unet.NETWORK)
    component = on_paper(unet_controlnet.NETWORK, config_like(base), "float32")
    return ControlNet(name="", component=component, mask=_mask(Path(name)), picture="rgb")


def _mask(path: Path) -> Literal["none", "needed"]:
    """Return whether the ControlNet at `path` fills a mask, which its name alone says."""
    return "needed" if _PAINTS.search(path.name) else "none"


def config_like(base: UNetConfig) -> UNetControlNetConfig:
    """Return the configuration of a ControlNet for a UNet, as it is published."""
    own = {name: value for name, value in asdict(base).items() if name not in ("in_channels", "out_channels")}
    return UNetControlNetConfig(**own, in_channels=base.out_channels)


def _check_text(path: Path, base: UNetConfig) -> None:
    """Raise ModelError for a ControlNet that takes other text states: it was made for another kind of model."""
    shape = stored_shape(unet_controlnet_names.LAYOUTS, path, _TEXT)
    if shape is not None and len(shape) == 2 and shape[1] != base.cross_attention_dim:
        ours, theirs = _kind(shape[1]), _kind(base.cross_attention_dim)
        raise ModelError(f"{clean(path)}: is a ControlNet for {ours}; the model is {theirs}")


def _kind(width: int) -> str:
    """Return the kind of model whose text states have `width` channels."""
    return _KINDS.get(width, f"a model with {width} channels in a text")


def _check_fit(path: Path, config: UNetControlNetConfig, base: UNetConfig, scale: int) -> None:
    """Raise ModelError for a ControlNet that was made for a UNet of other sizes, or another VAE. scale: the pixels to a
    latent."""
    check_sizes(path, "UNet", {what: (getattr(config, name), getattr(base, name)) for name, what in _FIT.items()})
    if config.scale != scale:
        raise ModelError(
            f"{clean(path)}: takes pictures of {config.scale} pixels to a latent; the model's VAE has {scale}"
        )
    if config.in_channels != base.out_channels:
        raise ModelError(f"{clean(path)}: takes latents of {config.in_channels} channels, not {base.out_channels}")


@dataclass(frozen=True, kw_only=True)
class ControlRun:
    """The facts of a run that the stages of its ControlNets depend on."""

    plan: SamplingPlan
    shape: LatentShape
    branches: int  # of guidance in one batch, at most
    calls: float  # of the UNet in the run


@dataclass(frozen=True, kw_only=True)
class ActiveControl:
    """A control of a run whose network is open."""

    number: int  # among the controls of the request
    network: ControlNetwork
    scales: Sequence[float]  # of the change of each result, the mid block's last
    begin: float  # it controls noise levels up to this one
    end: float  # and above this one


@dataclass(frozen=True, kw_only=True)
class ControlledCondition:
    """The conditions of one call of the UNet, for the numbers of the pictures that are prompts now, and of the
    ControlNets, by the numbers of their controls."""

    unet: Callable[[tuple[int, ...]], Condition]
    nets: Mapping[int, Condition]


@dataclass(frozen=True, kw_only=True)
class Holding:
    """The controls that hold at a noise level, and the numbers of the pictures that are prompts there."""

    controls: Sequence[ActiveControl]
    pictures: tuple[int, ...]


NOTHING = Holding(controls=(), pictures=())


@dataclass(frozen=True)
class ControlledUNet:
    """A UNet and its ControlNets, as one denoiser."""

    unet: DenoiserNetwork

    @property
    def skipping(self) -> Skipping:
        return self.unet.skipping

    def condition(self, texts: Any, extra: Any) -> ControlledCondition:
        condition = self.unet.condition(texts, extra)
        return ControlledCondition(unet=lambda pictures: condition, nets={})

    def predict(self, x: Array, step: TimeStep, condition: ControlledCondition, control: Holding = NOTHING) -> Array:
        """Return the UNet's prediction under the controls that hold now."""
        changes = [
            one.network.predict(x, step, condition.nets[one.number], one.scales)
            for one in control.controls
            if one.number in condition.nets
        ]
        return self.unet.predict(x, step, condition.unet(control.pictures), changes or None)


class ControlNetworks(ControlStages[ControlRun]):
    """The ControlNets of one model."""

    def stages_of(
        self,
        request: Request,
        net: ControlNet,
        run: ControlRun,
        co_resident: frozenset[str],
        later: tuple[Stage, ...],
    ) -> list[Stage]:
        config, rows, columns = net.component.config, run.shape.rows, run.shape.columns
        activations = self.runtime.call_bytes(net.component, step_peak(config, run.branches, rows, columns))
        activations += self.kept_bytes(request, run)
        passes = run.calls * self.steps_under(request, net, run.plan)
        required = max([activations, *(stage.splits[-1].needed for stage in later)])
        return [
            Stage(
                name="control",
                resident=net.name,
                component=net.component,
                splits=(Split(activations=activations, required=required, size=1, passes=passes),),
                co_resident=co_resident,
                partners=later,
                operations=passes
                * operations.unet(net.component.plan, len(config.block_out_channels), rows, columns)
                * run.branches,
            )
        ]

    def kept_bytes(self, request: Request, run: ControlRun) -> int:
        """Return the bytes that the controls of a request keep while the UNet computes: each its embedded picture, and
        the changes of each."""
        itemsize = BYTES[self.runtime.precision.compute_dtype("transformer")]
        pixels = run.shape.rows * run.shape.columns
        total = 0
        for _, net in self.controls(request):
            config: UNetControlNetConfig = net.component.config
            changes = sum(width * -(-pixels // 4**halved) for width, halved in config.skips)
            total += 4 * pixels * config.block_out_channels[0] + run.branches * itemsize * changes
        return total

    def open(self, request: Request, run: ControlRun, steps: Sequence[Stage]) -> list[ActiveControl]:
        """Open the networks of a request. steps: the later stages, of the UNet."""
        opened = {
            name: self.residents.acquire(stages[-1])[0] for name, stages in self.by_net(request, run, steps).items()
        }
        active = []
        for number, control in enumerate(request.controls):
            net = self.nets[control.network]
            if not isinstance(net, ControlNet):
                continue
            begin, end = levels(run.plan, *control.steps(run.plan.steps))
            weakened = request.family_options.control_mode != BALANCED
            active.append(
                ActiveControl(
                    number=number,
                    network=opened[net.name],
                    scales=scales(net.component.config, control.scale, weakened=weakened),
                    begin=begin,
                    end=end,
                )
            )
        return active


def scales(config: UNetControlNetConfig, scale: float, *, weakened: bool) -> list[float]:
    """Return the factor of each change of a ControlNet: the `scale`, or less of it for the results of higher levels,
    from a tenth on, in even steps of their logarithm (diffusers' guess mode)."""
    last = len(config.skips)
    if not weakened or config.global_pool_conditions:
        return [scale] * (last + 1)
    return [scale * 10.0 ** (i / last - 1) for i in range(last + 1)]


def holding(controls: Sequence[ActiveControl], pictures: Sequence[ActivePictures], sigma: float) -> Holding | None:
    """Return the controls and pictures that hold at a noise level; None for none."""
    held = [one for one in controls if one.end < sigma <= one.begin and any(one.scales)]
    prompts = ip_adapter.holding(pictures, sigma)
    return Holding(controls=held, pictures=prompts) if held or prompts else None


def conditions(
    controls: Sequence[ActiveControl],
    pictures: Sequence[Array],
    rows: Conditioning,
    prompts: int,
) -> dict[int, Condition]:
    """Return the condition of each control for a batch of branches, whose first `prompts` are controlled; none are
    where that is 0. pictures: the pixels [1 3 H W] of each control."""
    if not prompts:
        return {}
    own = rows.of(range(prompts))
    return {
        one.number: one.network.condition(own.texts, (own.added, len(rows.texts)), pictures[one.number])
        for one in controls
    }


def controlled(request: Request, positions: Sequence[int], branches: int) -> int:
    """Return how many branches of a batch, the first ones, are controlled: all, or by the mode those of the prompt. The
    last of several `branches` is that of the negative prompt."""
    prompts_only = request.family_options.control_mode == CONTROL and branches > 1
    return sum(position < branches - 1 for position in positions) if prompts_only else len(positions)
