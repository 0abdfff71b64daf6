"""What is computed in which dtype: a dtype per component and the named places that stay float32.

The policy is data. The loaders ask `weight_dtype` for every tensor, so a linear layer computes in the dtype that its
weight was loaded in; the models ask `residual_dtype` for their streams. Dtypes are named as torch and MLX name them.

Why the three switchable places exist (measured against float64 on two full-width blocks with bfloat16 weights,
normalised mean square error, docs/precision.md): everything in bfloat16 4.5e-5; residual stream and modulation in
float32 1.7e-5; the head as well 6.7e-6. They spare roundings, not overflow: bfloat16 has float32's range.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from qwenimg.common.errors import UsageError

COMPONENTS = ("text", "transformer", "vae")
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

PLACES: Mapping[str, str] = {
    "final_norm": "norm_out, its modulation and proj_out; the prediction stays float32 for the sampler (switchable)",
    "modulation": "the timestep embedding and every block's shift, scale and gate",
    "residual": "the residual streams of transformer and text encoder, from img_in and txt_in on, which start them",
    "timestep": "the timestep and its sinusoid (switchable: `rounded` is what diffusers does in half precision)",
    "rope": "RoPE tables, made in float64, and the rotation",
    "softmax": "attention scores and their softmax",
    "rms_norm": "RMSNorm, gain included",
    "guidance": "classifier-free guidance and its norms",
    "scheduler": "sigmas and latents between steps",
}

_FINAL_NORM = re.compile(r"(norm_out|proj_out)\.")
_STREAM_START = re.compile(r"(img_in|txt_in)\.")
_MODULATION = re.compile(r"time_text_embed\.|transformer_blocks\.\d+\.(img|txt)_mod\.")
_ALIASES = {
    "f32": "fp32", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "f16": "fp16",
}  # fmt: skip
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A dtype per component and the FP32 places that can be switched. An FP32 place is float32 *at least*."""

    name: str
    text: str
    transformer: str
    vae: str
    final_norm: bool = True
    modulation: bool = True
    residual: bool = True
    timestep: str = "fp32"

    def __post_init__(self) -> None:
        assert {self.text, self.transformer, self.vae} <= BYTES.keys(), self
        assert self.timestep in ("fp32", "rounded"), self

    def compute_dtype(self, component: str) -> str:
        """The dtype of a component's weights and matrix products, but for the FP32 places."""
        assert component in COMPONENTS, component
        dtype: str = getattr(self, component)
        return dtype

    def residual_dtype(self, component: str) -> str:
        dtype = self.compute_dtype(component)
        return at_least_float32(dtype) if self.residual else dtype

    def weight_dtype(self, component: str, key: str) -> str:
        """The dtype that the tensor `key` of `component` is loaded in, hence that its layer computes in."""
        dtype = self.compute_dtype(component)
        if component == "transformer" and self.final_norm and _FINAL_NORM.match(key):
            return at_least_float32(dtype)
        if component == "transformer" and self.residual and _STREAM_START.match(key):
            return at_least_float32(dtype)
        if component == "transformer" and self.modulation and _MODULATION.match(key):
            return at_least_float32(dtype)
        return dtype

    def time_dtype(self) -> Literal["float32", "bfloat16", "float16"]:
        """What a timestep is rounded to before its sinusoid is made in float64."""
        low = self.compute_dtype("transformer")
        if self.timestep == "fp32" or low not in ("bfloat16", "float16"):
            return "float32"
        return "bfloat16" if low == "bfloat16" else "float16"

    def places(self) -> dict[str, str]:
        """Every named place and what it is now, for recipes and the documentation."""
        low = self.compute_dtype("transformer")
        switched = {
            "final_norm": at_least_float32(low) if self.final_norm else low,
            "modulation": at_least_float32(low) if self.modulation else low,
            "residual": self.residual_dtype("transformer"),
            "timestep": "float32" if self.timestep == "fp32" else f"rounded to {low}",
        }
        return {place: switched.get(place, at_least_float32(low)) for place in PLACES}

    def summary(self) -> str:
        """One line for people: `bf16 (text bf16, transformer bf16, vae fp32; final_norm fp32 ...)`."""
        short = {long: name for name, long in _DTYPES.items()} | {"float64": "fp64"}
        parts = ", ".join(f"{c} {short[self.compute_dtype(c)]}" for c in COMPONENTS)
        kept = [p for p in ("final_norm", "modulation", "residual") if getattr(self, p)]
        low = self.compute_dtype("transformer") in ("bfloat16", "float16")
        fp32 = f"; fp32: {' '.join(kept)}" if low and kept else ""
        rounded = "; timestep rounded" if self.timestep == "rounded" else ""
        return f"{self.name} ({parts}{fp32}{rounded})"


def at_least_float32(dtype: str) -> str:
    return dtype if dtype in ("float32", "float64") else "float32"


FP64 = Precision(name="fp64", text="float64", transformer="float64", vae="float64")  # for reference runs, torch only
FP32 = Precision(name="fp32", text="float32", transformer="float32", vae="float32")
BF16 = Precision(name="bf16", text="bfloat16", transformer="bfloat16", vae="float32")
BF16_PLAIN = replace(BF16, name="bf16-plain", final_norm=False, modulation=False, residual=False)
FP16_PLAIN = replace(BF16_PLAIN, name="fp16-plain", text="float16", transformer="float16")
BASES: Mapping[str, Precision] = {p.name: p for p in (FP32, BF16, BF16_PLAIN, FP16_PLAIN)}

SYNTAX = "BASE[,text|transformer|vae=DTYPE][,final_norm=fp32|off][,timestep=fp32|rounded]"


def parse(text: str, *, on_gpu: bool) -> Precision:
    """The policy that `text` (`SYNTAX`) names; `auto` is bf16 on a GPU and fp32 on a CPU. Raises UsageError."""
    base, *overrides = (part.strip() for part in text.strip().lower().split(","))
    base = _ALIASES.get(base, base)
    if base == "auto":
        base = "bf16" if on_gpu else "fp32"
    if base == "fp16":
        raise UsageError(
            "--precision fp16: a float16 that holds Qwen-Image's activations is not built yet; "
            "use bf16, or fp16-plain to see it overflow"
        )
    if base not in BASES:
        raise UsageError(f"--precision {text!r}: {base!r} is not one of auto, {', '.join(BASES)}; syntax: {SYNTAX}")
    precision = BASES[base]
    for override in overrides:
        precision = _override(precision, override, text)
    return replace(precision, name=",".join([base, *overrides]))


def _override(precision: Precision, override: str, text: str) -> Precision:
    key, _, value = override.partition("=")
    if key in COMPONENTS and _ALIASES.get(value, value) in _DTYPES:
        dtype = _DTYPES[_ALIASES.get(value, value)]
        if key == "text":
            return replace(precision, text=dtype)
        return replace(precision, transformer=dtype) if key == "transformer" else replace(precision, vae=dtype)
    if key == "final_norm" and _ALIASES.get(value, value) in ("fp32", "off"):
        return replace(precision, final_norm=value != "off")
    if key == "timestep" and _ALIASES.get(value, value) in ("fp32", "rounded"):
        return replace(precision, timestep=_ALIASES.get(value, value))
    raise UsageError(f"--precision {text!r}: cannot read {override!r}; syntax: {SYNTAX}")
