"""Control of Stable Diffusion by pictures: ControlNets in a folder or a file, their stages in a run, and what they do
in each step.

A ControlNet sees the pixels of its picture, and the text of each branch of guidance; what it adds to the UNet's results
is made once for each of the UNet's calls. The refiner of SDXL is not controlled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.hf_cache import display_name
from qwenimg.common.base.safe_files import bad, closed_on_error, is_file
from qwenimg.common.base.text import clean
from qwenimg.common.families.stable_diffusion import adapter, derived_control, ip_adapter
from qwenimg.common.families.stable_diffusion.checkpoint import facts
from qwenimg.common.families.stable_diffusion.expert import Conditioning, sinusoids, step_peak
from qwenimg.common.families.stable_diffusion.ip_adapter import ActivePictures
from qwenimg.common.families.stable_diffusion.known import CONTROLS, SDXL_CONTROLS
from qwenimg.common.formats.files import find_files
from qwenimg.common.memory import operations
from qwenimg.common.networks.denoisers import (
    t2i_adapter,
    t2i_adapter_names,
    unet,
    unet_controlnet,
    unet_controlnet_names,
    unet_controlnet_union,
    unet_controlnet_union_names,
)
from qwenimg.common.networks.denoisers.unet import UNetConfig
from qwenimg.common.networks.denoisers.unet_controlnet import UNetControlNetConfig
from qwenimg.common.networks.denoisers.unet_controlnet_union import UNetControlNetUnionConfig
from qwenimg.common.networks.layout import Layouts
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts import known_configs
from qwenimg.common.parts.components import config_at, on_paper
from qwenimg.common.parts.control_net import Controller, ControlNet, IPAdapter, check_sizes
from qwenimg.common.parts.open_file import open_part, stored_shape
from qwenimg.common.pipeline.models.control_stages import ControlStages, levels
from qwenimg.common.pipeline.steps.plan import SamplingPlan
from qwenimg.common.precision.precision import BYTES
from qwenimg.common.request.names import CONTROL_MODES
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.engine import Array, Condition, ControlNetwork, DenoiserNetwork, TimeStep
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.skipping import Skipping
from qwenimg.common.runtime.stages import Stage

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
    **dict.fromkeys(("ControlNetXS", "UNetControlNetXS"), "is a ControlNet-XS, which is not built: give a ControlNet"),
    "Z": "is a ControlNet of Z-Image, and the model is Stable Diffusion",
}
_PICKLED = "diffusion_pytorch_model.bin"  # as older versions of diffusers write it: read as a file, not in a folder
_TEXT = "mid_block.attentions.0.transformer_blocks.0.attn2.to_k.weight"
_KINDS = {768: "Stable Diffusion 1.x", 1024: "Stable Diffusion 2.x", 1280: "the refiner of SDXL", 2048: "SDXL"}
BALANCED, PROMPT, CONTROL = CONTROL_MODES


def open_control(path: Path, checkpoint: Checkpoint) -> Controller:
    """Open the ControlNet, T2I-Adapter or IP-Adapter in the folder or file `path` for a model. Raises ModelError and
    UsageError."""
    model = facts(checkpoint)
    if model.refiner:
        raise UsageError("--control is for Stable Diffusion models, and not for a refiner alone")
    base: UNetConfig = checkpoint["unet"].config
    if is_file(pickled := path / _PICKLED) and not any(path.glob("*.safetensors")):
        raise bad(path, f"has its weights in a PyTorch file alone: give that file, {clean(pickled, 120)}")
    if ip_adapter.is_at(path):
        return ip_adapter.open_adapter(path, base)
    layouts = _layouts(path)
    if layouts is t2i_adapter_names.LAYOUTS:
        return adapter.open_adapter(path, checkpoint, _REFUSED)
    _check_text(layouts, path, base)
    if is_file(path) and derived_control.is_derived(layouts.peek(path).tensors):
        return _open_derived(path, checkpoint)
    union = layouts is unet_controlnet_union_names.LAYOUTS
    if union and base.addition_time_embed_dim is None:
        raise bad(path, "is a ControlNet Union for SDXL, and the model is Stable Diffusion 1.x or 2.x")
    like = union_like(base) if union else config_like(base)
    component = open_part(layouts, path, config_at(layouts.network, path, like, _REFUSED), "ControlNet")
    order: Any = component.config.controlnet_conditioning_channel_order
    net = ControlNet(
        name="",
        component=component,
        mask="none" if union else _mask(Path(display_name(path))),
        picture=order,
        kinds=component.config.kinds if union else (),
    )
    with closed_on_error(net):
        _check_fit(path, component.config, base, checkpoint["vae"].config.scale)
    return net


def _open_derived(path: Path, checkpoint: Checkpoint) -> ControlNet:
    """Open the ControlNet in the file `path` that changes the model's weights. Raises ModelError."""
    header, unet_part = unet_controlnet_names.LAYOUTS.opened(path), checkpoint["unet"]
    with closed_on_error(header.file):
        base: UNetConfig = unet_part.config
        component = derived_control.open_derived(header, config_like(base), unet_part)
        _check_fit(path, component.config, base, checkpoint["vae"].config.scale)
    return ControlNet(name="", component=component, mask=_mask(path), picture="rgb")


def published(name: str) -> Controller | None:
    """Return the ControlNet or IP-Adapter known as `name`, without its files; None for another name."""
    if (adapter_net := ip_adapter.published(name)) is not None:
        return adapter_net
    known = next((one for one in CONTROLS if one.name == name), None)
    if known is None:
        return None
    base: UNetConfig = known_configs.read("sdxl" if name.startswith(SDXL_CONTROLS) else "sd15", "unet", unet.NETWORK)
    if "union" in name:
        config = replace(union_like(base), num_control_type=8 if name.endswith("promax") else 6)
        component = on_paper(unet_controlnet_union.NETWORK, config, "float16")
        return ControlNet(name="", component=component, picture="rgb", kinds=config.kinds)
    component = on_paper(unet_controlnet.NETWORK, config_like(base), "float32")
    return ControlNet(name="", component=component, mask=_mask(Path(name)), picture="rgb")


def check_published(name: str, net: Controller, checkpoint: Checkpoint) -> None:
    """Raise ModelError for a network known as `name` that was made for another kind of Stable Diffusion."""
    base: UNetConfig = checkpoint["unet"].config
    if isinstance(net, ControlNet) and net.component.config.cross_attention_dim != base.cross_attention_dim:
        ours, theirs = _kind(net.component.config.cross_attention_dim), _kind(base.cross_attention_dim)
        raise ModelError(f"{clean(name)}: is a ControlNet for {ours}; the model is {theirs}")
    if isinstance(net, IPAdapter):
        ip_adapter.check_fit(name, net.component.config, base)


def _mask(path: Path) -> Literal["none", "needed"]:
    """Return whether the ControlNet at `path` fills a mask, which its name alone says."""
    return "needed" if _PAINTS.search(path.name) else "none"


def config_like(base: UNetConfig) -> UNetControlNetConfig:
    """Return the configuration of a ControlNet for a UNet, as it is published."""
    return UNetControlNetConfig(**_shared(base), in_channels=base.out_channels)


def union_like(base: UNetConfig) -> UNetControlNetUnionConfig:
    """Return the configuration of a Union for SDXL's UNet, as it is published."""
    width = base.block_out_channels[0]
    own: dict[str, Any] = {"num_trans_channel": width, "num_proj_channel": width, "in_channels": base.out_channels}
    return UNetControlNetUnionConfig(**_shared(base), **own)


def _shared(base: UNetConfig) -> dict[str, Any]:
    return {name: value for name, value in asdict(base).items() if name not in ("in_channels", "out_channels")}


def _layouts(path: Path) -> Layouts:
    """Return the layouts of the kind of network in the folder or file `path`. Raises ModelError."""
    usual = unet_controlnet_names.LAYOUTS
    kinds = (unet_controlnet_union_names.LAYOUTS, t2i_adapter_names.LAYOUTS, usual)
    names = {name for file in find_files(path).files for name in usual.peek(file).tensors}
    return next((layouts for layouts in kinds if layouts.find(names) is not None), usual)


def _check_text(layouts: Layouts, path: Path, base: UNetConfig) -> None:
    """Raise ModelError for a ControlNet that takes other text states: it was made for another kind of model."""
    shape = stored_shape(layouts, path, _TEXT)
    if shape is None and is_file(path):
        shape = derived_control.text_factor(layouts.peek(path))
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
    """A control of a run whose network is open, or all of a Union, which it computes at once."""

    numbers: tuple[int, ...]  # among the controls of the request
    network: ControlNetwork
    windows: tuple[tuple[float, float], ...]  # of each: it controls noise levels up to the first and above the second
    weights: tuple[float, ...]  # the scale of each
    scales: Sequence[float]  # of the change of each result, the mid block's last
    union: UNetControlNetUnionConfig | None = None
    kinds: tuple[int, ...] = ()  # of the pictures of a Union

    def weights_at(self, sigma: float) -> tuple[float, ...]:
        """Return the scale of each picture at a noise level, 0 outside its window."""
        held = (end < sigma <= begin for begin, end in self.windows)
        return tuple(weight * holds for weight, holds in zip(self.weights, held, strict=True))

    def condition(self, own: Conditioning, branches: int, pictures: Sequence[Array]) -> Condition:
        """Return the condition of its network for the controlled ones of `branches`."""
        if self.union is None:
            return self.network.condition(own.texts, (own.added, branches), pictures[self.numbers[0]])
        flags = [float(kind in self.kinds) for kind in range(self.union.num_control_type)]
        features = sinusoids(self.union, flags, self.union.addition_time_embed_dim or 0).reshape(1, -1)
        extra = (own.added, branches, np.array(self.kinds), features)
        return self.network.condition(own.texts, extra, [pictures[i] for i in self.numbers])


@dataclass(frozen=True, kw_only=True)
class HeldControl:
    """A control at one noise level."""

    control: ActiveControl
    factors: Any  # as its network takes them


@dataclass(frozen=True, kw_only=True)
class ControlledCondition:
    """The conditions of one call of the UNet, for the numbers of the pictures that are prompts now, and of the
    ControlNets, by the numbers of their first controls."""

    unet: Callable[[tuple[int, ...]], Condition]
    nets: Mapping[int, Condition]


@dataclass(frozen=True, kw_only=True)
class Holding:
    """The controls that hold at a noise level, and the numbers of the pictures that are prompts there."""

    controls: Sequence[HeldControl]
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
            one.control.network.predict(x, step, condition.nets[one.control.numbers[0]], one.factors)
            for one in control.controls
            if one.control.numbers[0] in condition.nets
        ]
        return self.unet.predict(x, step, condition.unet(control.pictures), changes or None)


class ControlNetworks(ControlStages[ControlRun]):
    """The ControlNets and T2I-Adapters of one model, whose VAE has `scale` pixels to a latent."""

    def __init__(self, residents: Residents, scale: int):
        super().__init__(residents)
        self.scale = scale

    def stages_of(
        self,
        request: Request,
        net: ControlNet,
        run: ControlRun,
        co_resident: frozenset[str],
        later: tuple[Stage, ...],
    ) -> list[Stage]:
        config, rows, columns = net.component.config, run.shape.rows, run.shape.columns
        held = run
        if _is_adapter(net):  # called once for each picture, before the UNet, whose branches take scaled copies
            held = replace(run, branches=0)
            pixels = rows * columns * self.scale**2
            peak, passes = (
                adapter.activations(config, pixels),
                float(sum(one is net for _, one in self.controls(request))),
            )
            per_pass = adapter.count_operations(net, pixels)
        else:
            peak = step_peak(config, run.branches, rows, columns)
            passes = run.calls * self.steps_under(request, net, run.plan)
            per_pass = operations.unet(net.component.plan, len(config.block_out_channels), rows, columns) * run.branches
        activations = self.runtime.call_bytes(net.component, peak) + self.kept_bytes(request, held)
        return [self.stage(net, activations, passes, per_pass, co_resident, later)]

    def kept_bytes(self, request: Request, run: ControlRun) -> int:
        """Return the bytes that the controls of a request keep while the UNet computes: each its embedded picture, and
        the changes of each."""
        itemsize = BYTES[self.runtime.precision.compute_dtype("transformer")]
        pixels = run.shape.rows * run.shape.columns
        total, unions = 0, set[str]()
        for _, net in self.controls(request):
            if _is_adapter(net):
                total += adapter.kept_bytes(net.component.config, pixels * self.scale**2, run.branches)
                continue
            config: UNetControlNetConfig = net.component.config
            total += 4 * pixels * config.block_out_channels[0]
            if net.name not in unions:
                changes = sum(width * -(-pixels // 4**halved) for width, halved in config.skips)
                total += run.branches * itemsize * changes
            unions |= {net.name} if net.kinds else set()
        return total

    def steps_under(self, request: Request, net: ControlNet, plan: SamplingPlan) -> float:
        """Return the share of the steps in which a network is called: a Union once for all its controls."""
        if not net.kinds:
            return super().steps_under(request, net, plan)
        windows = [control.steps(plan.steps) for control, other in self.controls(request) if other is net]
        return len({step for first, last in windows for step in range(first, last)}) / plan.steps

    def open(self, request: Request, run: ControlRun, steps: Sequence[Stage]) -> list[ActiveControl]:
        """Open the networks of a request. steps: the later stages, of the UNet."""
        opened = {
            name: self.residents.acquire(stages[-1])[0] for name, stages in self.by_net(request, run, steps).items()
        }
        calls: dict[object, list[int]] = {}
        for number, control in enumerate(request.controls):
            net = self.nets[control.network]
            if not isinstance(net, ControlNet):
                continue
            calls.setdefault(net.name if net.kinds else number, []).append(number)
        return [self._active(request, run, numbers, opened) for numbers in calls.values()]

    def _active(
        self, request: Request, run: ControlRun, numbers: Sequence[int], opened: Mapping[str, ControlNetwork]
    ) -> ActiveControl:
        """Return the controls with these `numbers`, which one call of a network computes."""
        controls = [request.controls[i] for i in numbers]
        net = self.nets[controls[0].network]
        assert isinstance(net, ControlNet)
        config = net.component.config
        weakened = request.family_options.control_mode != BALANCED
        scale = controls[0].scale if len(controls) == 1 else 1.0  # the pictures of several are scaled
        return ActiveControl(
            numbers=tuple(numbers),
            network=opened[net.name],
            windows=tuple(levels(run.plan, *control.steps(run.plan.steps)) for control in controls),
            weights=tuple(control.scale for control in controls),
            scales=(adapter.scales if _is_adapter(net) else scales)(config, scale, weakened=weakened),
            union=config if net.kinds else None,
            kinds=tuple(unet_controlnet_union.KINDS[control.kind] for control in controls) if net.kinds else (),
        )


def _is_adapter(net: ControlNet) -> bool:
    return net.component.network == t2i_adapter.NETWORK.name


def scales(config: UNetControlNetConfig, scale: float, *, weakened: bool) -> list[float]:
    """Return the factor of each change of a ControlNet: the `scale`, or less of it for the results of higher levels,
    from a tenth on, in even steps of their logarithm (diffusers' guess mode)."""
    last = len(config.skips)
    if not weakened or config.global_pool_conditions:
        return [scale] * (last + 1)
    return [scale * 10.0 ** (i / last - 1) for i in range(last + 1)]


def holding(controls: Sequence[ActiveControl], pictures: Sequence[ActivePictures], sigma: float) -> Holding | None:
    """Return the controls and pictures that hold at a noise level; None for none. Of a Union's several pictures each is
    scaled before the network; the kinds of all count while one of them holds, as in diffusers."""
    held = []
    for one in controls:
        weights = one.weights_at(sigma)
        if any(weights):
            of_pictures = weights if len(weights) > 1 else (1.0,)
            factors = one.scales if one.union is None else (of_pictures, one.scales)
            held.append(HeldControl(control=one, factors=factors))
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
    return {one.numbers[0]: one.condition(own, len(rows.texts), pictures) for one in controls}


def controlled(request: Request, positions: Sequence[int], branches: int) -> int:
    """Return how many branches of a batch, the first ones, are controlled: all, or by the mode those of the prompt. The
    last of several `branches` is that of the negative prompt."""
    prompts_only = request.family_options.control_mode == CONTROL and branches > 1
    return sum(position < branches - 1 for position in positions) if prompts_only else len(positions)
