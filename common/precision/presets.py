"""Presets: a wish for precision, time and memory, as a policy for each kind of denoiser; and the choice of `auto`.

The policy of a preset is data of the denoiser's kind (`DenoiserKind.presets`); `choose` picks the one for a device and
a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from qwenimg.common.base.amounts import size_text
from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.precision.devices import Device
from qwenimg.common.precision.precision import DTYPES, DenoiserKind, Precision, parse

AUTO = "auto"
SMALL = 10**9  # bytes in float32; for smaller models 16 bit spares a CPU nothing


@dataclass(frozen=True, kw_only=True)
class Preset:
    purpose: str
    tiled: bool = False  # the VAE decodes large images in bands, and blocks that do not fit are streamed
    bits: str = ""  # bits of weights that would not fit otherwise
    compiled: bool = False  # whether the denoiser is compiled if that saves anything, however long it takes


PRESETS: Mapping[str, Preset] = {
    "quality": Preset(purpose="float32 everywhere: the fewest roundings, the most memory"),
    "balanced": Preset(purpose="16-bit products with float32 where it is worth most"),
    "fast": Preset(purpose="16 bit everywhere, as other programs run it; compiled on a GPU", compiled=True),
    "memory": Preset(
        purpose="the least memory: 16-bit weights, 8-bit where those do not fit; bands; blocks streamed",
        tiled=True,
        bits="8",
    ),
}
NAMES = (*PRESETS, AUTO)
_OWN = Preset(purpose="")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A chosen policy. `precision` is its text without `auto`. `reason` is empty if the user chose it."""

    preset: str
    precision: str
    reason: str = ""
    fallback: str = ""  # why it is no longer the policy of the start
    asked: str = ""  # the user's text of the policy, with `auto` if he chose that

    @property
    def wishes(self) -> Preset:
        """The choices of the preset besides the policy (tiling, quantization, compiling); `auto` makes none."""
        return PRESETS.get(self.preset, _OWN)

    def recorded(self) -> dict[str, str]:
        """Return the fields for a recipe."""
        fields = {"preset": self.preset, "reason": self.reason, "fallback": self.fallback}
        return {name: text for name, text in fields.items() if text}


def check(preset: str) -> None:
    """Raise UsageError unless there is a preset of that name."""
    if preset not in NAMES:
        raise UsageError(f"--preset {clean(preset, 40)!r} is not one of {', '.join(NAMES)}")


def choose(
    preset: str, precision: str, kind: DenoiserKind, device: Device, weights: Callable[[Precision], int], free: int
) -> Choice:
    """Return the policy for this kind of denoiser on `device`, from `preset`, or from `precision` if that names one.
    `auto` and overrides (`auto,vae=bf16`) start from the preset's policy. weights: returns, for a policy, the bytes of
    the largest part of the model in memory at once; free: bytes free on the device. Raises UsageError."""
    assert preset in NAMES, preset
    base, *overrides = precision.split(",")
    if base.strip().lower() != AUTO:
        return Choice(preset="" if preset == AUTO else preset, precision=precision, asked=precision)
    chosen, reason = _auto(kind, device, weights, free) if preset == AUTO else (kind.presets[preset], "")
    return Choice(preset=preset, precision=",".join([chosen, *overrides]), reason=reason, asked=precision)


def _auto(kind: DenoiserKind, device: Device, weights: Callable[[Precision], int], free: int) -> tuple[str, str]:
    """Return the text of a policy, and the reason for it."""

    @cache
    def size(text: str) -> int:
        return weights(parse(text, on_gpu=False, kind=kind))

    policy, reason = (_on_gpu if device.on_gpu else _on_cpu)(kind, device, size("fp32"))
    small = kind.presets["memory"]
    if not device.emulates and size(policy) > free and size(small) < size(policy):
        return small, f"{policy} would take {size_text(size(policy))} for weights, {size_text(free)} are free"
    return policy, reason


def _on_gpu(kind: DenoiserKind, device: Device, size: int) -> tuple[str, str]:
    for policy in kind.prefers:
        if DTYPES[policy] in device.units:
            why = f"; {kind.preferred}" if kind.preferred and policy == kind.prefers[0] else ""
            return policy, f"{device.name} {device.about}{why}"
    return kind.without_units, f"{device.name} {device.about}"


def _on_cpu(kind: DenoiserKind, device: Device, size: int) -> tuple[str, str]:
    if not device.emulates and size <= SMALL:
        return "fp32", f"a model of {size_text(size)} needs no 16 bit on a CPU"
    if "bfloat16" in device.units:
        return "bf16", f"{device.name} {device.about}"
    return "fp32", f"{device.name} {device.about}"
