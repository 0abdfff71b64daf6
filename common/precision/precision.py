"""The dtypes of computation: a dtype per component, and the named places that stay float32.

The policy is data. A load plan asks `weight_dtype` for every parameter, so a linear layer computes in the dtype in
which its weight was loaded; the models ask `residual_dtype` for their streams. Dtypes are named as in torch and MLX.
Each family has its places and policies in a `DenoiserKind`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.precision.residency import ALWAYS, ONCE, Residency

COMPONENTS = ("text", "transformer", "vae")
DENOISERS = ("transformer", "unet")
TEXT_ENCODER = "text_encoder"  # the folder of the first text encoder; the next ones end with their number

# What every denoiser computes in float32 beside its own places
PLACES: Mapping[str, str] = {
    "timestep": "the timestep and its sinusoid",
    "softmax": "attention scores and their softmax",
    "guidance": "classifier-free guidance",
    "scheduler": "sigmas and latents between steps",
}

ROTARY_PLACES: Mapping[str, str] = {
    "rope": "RoPE tables, made in float64, and the rotation",
    "rms_norm": "RMSNorm, gain included",
    **PLACES,
}


def block_scales(attention: str, feed_forward: str, inputs: str = "to_[qkv]") -> Mapping[re.Pattern[str], float]:
    """Return FLUX.2's factors under fp16, for the paths of the attentions of blocks with a dot behind them, of the
    layers of feed-forwards, and of the attentions' first layers."""
    return {
        re.compile(rf"{attention}({inputs}|attend)"): 2.0**-3,
        re.compile(rf"{attention}to_out\.0"): 2.0**-4,
        re.compile(feed_forward): 2.0**-5,
    }


BASES = ("fp32", "bf16", "bf16-plain", "fp16", "fp16-upcast", "fp16-plain")
INT8 = "int8"  # lossy: a policy of every kind that no preset chooses, since nobody has measured it on a card
_ALIASES = {
    "f32": "fp32", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "f16": "fp16",
}  # fmt: skip
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def _presets() -> Mapping[str, str]:
    """Return the policies of a denoiser whose weights are published in bfloat16."""
    return {"quality": "fp32", "balanced": "bf16", "fast": "bf16-plain", "memory": "bf16"}


@dataclass(frozen=True)
class Compute:
    """The computation of a layer that differs from its weight's dtype: it takes and returns float32, and its
    products are of `scale` times its input in `dtype`. `scale` is a power of two, so it rounds nothing."""

    dtype: str
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class DenoiserKind:
    """The policies of one kind of denoiser, and its data for them."""

    denoiser: str  # the user's name of its component
    places: Mapping[str, str]  # the FP32 places, each described
    bases: tuple[str, ...] = BASES  # its policies
    presets: Mapping[str, str] = field(default_factory=_presets)  # the policy of each of `presets.PRESETS`
    prefers: tuple[str, ...]  # `auto` on a GPU: the first with a dtype that the GPU has units for
    preferred: str = ""  # the reason for that order, if it is not the hardware
    without_units: str = "fp32"  # `auto` on a GPU without units for 16 bit
    # The starts of parameter names, by switchable place. Parameters loaded once for a schedule are modulation.
    keys: Mapping[str, re.Pattern[str]]
    # The factor of inputs in float16 that are scaled down, since they or their products exceed 65504
    scales: Mapping[re.Pattern[str], float] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)  # the text encoder's dtype, by base, where it differs
    refused: Mapping[str, str] = field(default_factory=dict)  # dtypes that it does not compute in, each with the reason
    in_4_bits: str = ""  # what 4 bits cost its pictures, where they are advised against
    rounds_time: bool = False  # whether timesteps can be rounded as in diffusers' half precision

    @property
    def names(self) -> tuple[str, ...]:
        """Its policies and the lossy one, for messages."""
        return (*self.bases, labelled(INT8))

    @property
    def syntax(self) -> str:
        """The policies that `parse` reads, for messages."""
        overrides = "[,final_norm=fp32|off][,attention=fused|fp32][,matmul=fp32]"
        timestep = "[,timestep=fp32|rounded]" if self.rounds_time else ""
        return f"BASE[,text|{self.denoiser}|vae=DTYPE]{overrides}{timestep}"

    def place(self, key: str, residency: Residency) -> str | None:
        """Return the switchable place of the denoiser's parameter `key`, or None."""
        places = (place for place, keys in self.keys.items() if keys.match(key))
        return next(places, "modulation" if residency is ONCE else None)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtype of each component's weights, and the computations in other dtypes: the FP32 places that can be
    switched, attention, and all products. An FP32 place is float32 *at least*."""

    name: str
    text: str
    transformer: str
    vae: str
    final_norm: bool = True
    modulation: bool = True
    residual: bool = True
    timestep: str = "fp32"
    attention: str = "fused"  # or fp32: queries, keys and values too, not only scores and softmax
    upcast: bool = False  # whether every product is in float32
    scaled: bool = False  # whether the denoiser's inputs are scaled by its kind's factors
    int8: bool = False  # whether the denoiser multiplies in 8 bits where its weights are rotated 8-bit numbers
    kind: DenoiserKind = field(hash=False)
    wide: re.Pattern[str] | None = None  # layers of one network that compute in float32 where it is in float16

    def __post_init__(self) -> None:
        assert {self.text, self.transformer, self.vae} <= BYTES.keys(), self
        assert self.timestep in ("fp32", "rounded") and self.attention in ("fused", "fp32"), self

    @property
    def is_reduced(self) -> bool:
        """True if the weights of a component are in 16 bit, or products in 8."""
        return self.int8 or bool({self.text, self.transformer, self.vae} & {"bfloat16", "float16"})

    def compute_dtype(self, component: str) -> str:
        """Return the dtype of a component's matrix products, but for the FP32 places."""
        dtype = self.stored_dtype(component)
        return at_least_float32(dtype) if self.upcast else dtype

    def stored_dtype(self, component: str) -> str:
        """Return the dtype of a component's weights, but for the FP32 places."""
        name = "text" if component.startswith(TEXT_ENCODER) else "transformer" if component == "unet" else component
        assert name in COMPONENTS, component
        dtype: str = getattr(self, name)
        return dtype

    def residual_dtype(self, component: str) -> str:
        """Return the dtype of a component's residual streams: float32 too where layers are `wide`, since their results
        go there."""
        dtype = self.compute_dtype(component)
        return at_least_float32(dtype) if self.residual or (self.wide and dtype == "float16") else dtype

    def weight_dtype(self, component: str, key: str, residency: Residency = ALWAYS) -> str:
        """Return the dtype in which the tensor `key` of `component` is loaded, hence in which its layer computes."""
        dtype = self.stored_dtype(component)
        return at_least_float32(dtype) if self._in_float32(component, key, residency) else dtype

    def rounds(self, component: str, key: str, residency: Residency = ALWAYS) -> bool:
        """Return whether the input of the weight `key` of `component` is rounded to 8 bits: a denoiser's, but for its
        FP32 places."""
        return self.int8 and component in DENOISERS and not self._in_float32(component, key, residency)

    def _in_float32(self, component: str, key: str, residency: Residency) -> bool:
        place = self.kind.place(key, residency) if component in DENOISERS else None
        return bool(place and getattr(self, place))

    def computes(self, component: str, path: str) -> Compute | None:
        """Return how the layer at `path` computes. None: in its weight's dtype; for attention, in the dtype of its
        values."""
        if self.stored_dtype(component) not in ("bfloat16", "float16"):
            return None
        attends = path.endswith("attend")
        if self.upcast or (attends and self.attention == "fp32"):
            return Compute("float32")
        if self.wide and self.wide.fullmatch(path) and self.stored_dtype(component) == "float16":
            return Compute("float32")
        if not self.scaled or component not in DENOISERS:
            return None
        scale = next((scale for pattern, scale in self.kind.scales.items() if pattern.fullmatch(path)), None)
        return None if scale is None else Compute(self.stored_dtype(component), scale)

    def time_dtype(self) -> Literal["float32", "bfloat16", "float16"]:
        """Return the dtype to which a timestep is rounded before its sinusoid is made in float64."""
        low = self.compute_dtype("transformer")
        if self.timestep == "fp32" or low not in ("bfloat16", "float16"):
            return "float32"
        return "bfloat16" if low == "bfloat16" else "float16"

    def places(self) -> dict[str, str]:
        """Return the dtype of every named place, for recipes and the documentation."""
        low = self.compute_dtype("transformer")
        switched = {
            "final_norm": at_least_float32(low) if self.final_norm else low,
            "modulation": at_least_float32(low) if self.modulation else low,
            "residual": self.residual_dtype("transformer"),
            "timestep": "float32" if self.timestep == "fp32" else f"rounded to {low}",
        }
        found = {place: switched.get(place, at_least_float32(low)) for place in self.kind.places}
        return found | ({"products": "int8, lossy"} if self.int8 else {})

    def summary(self) -> str:
        """Return one line for messages: `bf16 (text bf16, transformer bf16, vae fp32; final_norm fp32 ...)`."""
        shown = {"text": "text", "transformer": self.kind.denoiser, "vae": "vae"}
        parts = ", ".join(f"{name} {short(self.stored_dtype(part))}" for part, name in shown.items())
        in_fp32 = [p for p in ("final_norm", "modulation", "residual") if getattr(self, p)]
        low = self.compute_dtype("transformer") in ("bfloat16", "float16")
        fp32 = f"; fp32: {' '.join(in_fp32)}" if low and in_fp32 else ""
        rounded = "; timestep rounded" if self.timestep == "rounded" else ""
        more = "; every product in fp32" if self.upcast else "; attention in fp32" if self.attention == "fp32" else ""
        lossy = "; lossy: products in 8 bits" if self.int8 else ""
        return f"{self.name} ({parts}{fp32}{rounded}{more}{lossy})"


def labelled(name: str) -> str:
    """Return the name of a policy with what a list says of it."""
    return f"{name} (lossy)" if name == INT8 else name


def at_least_float32(dtype: str) -> str:
    return dtype if dtype in ("float32", "float64") else "float32"


def short(dtype: str) -> str:
    """Return the policies' name of a dtype: fp32 for float32."""
    return ({long: name for name, long in DTYPES.items()} | {INT8: INT8}).get(dtype, "fp64")


def dtype_named(text: str) -> str | None:
    """Return the dtype that a user calls `text`, or None. fp32, f32 and float32 are one."""
    name = text.strip().lower()
    return DTYPES.get(_ALIASES.get(name, name))


def bases(kind: DenoiserKind) -> dict[str, Precision]:
    """Return the policies of `kind`, by name, without the lossy one."""
    named = _policies(kind)
    return {name: named[name] for name in kind.bases}


def _policies(kind: DenoiserKind) -> dict[str, Precision]:
    bf16 = Precision(name="bf16", text="bfloat16", transformer="bfloat16", vae="float32", kind=kind)
    bf16_plain = replace(bf16, name="bf16-plain", final_norm=False, modulation=False, residual=False)
    fp16 = replace(bf16, name="fp16", text="float16", transformer="float16", scaled=True)
    policies = (
        Precision(name="fp32", text="float32", transformer="float32", vae="float32", kind=kind),
        bf16,
        bf16_plain,
        replace(bf16_plain, name="fp16-plain", text="float16", transformer="float16"),
        fp16,
        replace(fp16, name="fp16-upcast", scaled=False, upcast=True),
        replace(bf16, name=INT8, int8=True),
    )
    return {one.name: replace(one, text=kind.texts.get(one.name, one.text)) for one in policies}


def float64(kind: DenoiserKind) -> Precision:
    """Return the policy of reference runs, all in float64, which torch alone has."""
    return Precision(name="fp64", text="float64", transformer="float64", vae="float64", kind=kind)


def parse(text: str, *, on_gpu: bool, kind: DenoiserKind) -> Precision:
    """Return the policy that `text` (`kind.syntax`) names; `auto` is fp32 on a CPU. Raises UsageError."""
    base, *overrides = (part.strip() for part in text.strip().lower().split(","))
    base = _ALIASES.get(base, base)
    if base == "auto":
        base = kind.prefers[0] if on_gpu else "fp32"
    if base not in (*kind.bases, INT8):
        known = ", ".join(kind.names)
        _check_dtype(text, kind, dtype_named(base.partition("-")[0]))
        fewer = (
            "; weights in fewer bits are -q 8, 6 or 4"
            if re.fullmatch(r"\D*[468]", base)
            else f"; syntax: {kind.syntax}"
        )
        raise UsageError(f"--precision {clean(text, 40)!r}: {clean(base, 40)!r} is not one of auto, {known}{fewer}")
    precision = _policies(kind)[base]
    for override in overrides:
        changed = _override(precision, override)
        if changed is None:
            raise UsageError(
                f"--precision {clean(text, 40)!r}: cannot read {clean(override, 40)!r}; syntax: {kind.syntax}"
            )
        precision = changed
    if precision.int8 and precision.upcast:
        raise UsageError(f"--precision {clean(text, 40)!r}: int8 multiplies in 8 bits; leave matmul=fp32 out")
    _check_dtype(text, kind, precision.transformer)
    return replace(precision, name=",".join([base, *overrides]))


def check(text: str) -> None:
    """Check the syntax of a policy, before it is known which model is opened. Raises UsageError."""
    pairs = (override.strip().partition("=") for override in text.lower().split(",")[1:])
    names = [key for key, _, value in pairs if dtype_named(value) and key.isidentifier() and key not in ("text", "vae")]
    denoiser = names[0] if names else "transformer"
    parse(text, on_gpu=False, kind=DenoiserKind(denoiser=denoiser, places={}, prefers=BASES, keys={}, rounds_time=True))


def _check_dtype(text: str, kind: DenoiserKind, dtype: str | None) -> None:
    """Raise UsageError if the denoiser of `kind` does not compute in `dtype`, which the policy `text` asks for."""
    if dtype is not None and dtype in kind.refused:
        raise UsageError(f"--precision {clean(text, 40)!r}: {kind.refused[dtype]}; use one of {', '.join(kind.bases)}")


def _override(precision: Precision, override: str) -> Precision | None:
    """Return `precision` with one thing changed, or None if `override` names nothing that its family has."""
    key, _, value = override.partition("=")
    dtype = dtype_named(value)
    if dtype and key == "text":
        return replace(precision, text=dtype)
    if dtype and key == "vae":
        return replace(precision, vae=dtype)
    if dtype and key == precision.kind.denoiser:
        return replace(precision, transformer=dtype)
    if key == "final_norm" and _ALIASES.get(value, value) in ("fp32", "off"):
        return replace(precision, final_norm=value != "off")
    if key == "attention" and _ALIASES.get(value, value) in ("fused", "fp32"):
        return replace(precision, attention=_ALIASES.get(value, value))
    if key == "matmul" and _ALIASES.get(value, value) == "fp32":
        return replace(precision, upcast=True)
    if key == "timestep" and precision.kind.rounds_time and _ALIASES.get(value, value) in ("fp32", "rounded"):
        return replace(precision, timestep=_ALIASES.get(value, value))
    return None
