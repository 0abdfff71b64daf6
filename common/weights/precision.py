"""What is computed in which dtype: a dtype per component and the named places that stay float32.

The policy is data. The loaders ask `weight_dtype` for every tensor, so a linear layer computes in the dtype that its
weight was loaded in; the models ask `residual_dtype` for their streams. Dtypes are named as torch and MLX name them.

Why the three switchable places exist (measured against float64 on two full-width blocks with bfloat16 weights,
normalised mean square error, docs/precision.md): everything in bfloat16 4.5e-5; residual stream and modulation in
float32 1.7e-5; the head as well 6.7e-6. They spare roundings, not overflow: bfloat16 has float32's range.

Stable Diffusion's UNet has the same places. The same figure for two UNets (136 M and 63 M random parameters), in
bfloat16 and in float16: all low 1.4e-4, 2.0e-4; 3.6e-6, 4.0e-6. Head and modulation 1.2e-4, 2.2e-4; 3.6e-6, 4.1e-6.
The residual stream as well 7.9e-5, 1.4e-4; 2.0e-6, 2.0e-6. And the 1x1 convolutions that carry the stream where its
width changes 4.8e-5, 6.8e-5; 1.4e-6, 1.5e-6. Its samplers too 4.5e-5, 6.1e-5; 1.2e-6, 1.6e-6, which would cost 3x3
convolutions in float32: they stay low. Its weights are published in float16, which is a base of its own for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from qwenimg.common.base.errors import UsageError

Family = Literal["qwen", "sd"]

COMPONENTS = ("text", "transformer", "vae")
DENOISERS: Mapping[Family, str] = {"qwen": "transformer", "sd": "unet"}  # what the family calls its denoiser
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

SD_PLACES: Mapping[str, str] = {
    "final_norm": "conv_norm_out and conv_out; the prediction stays float32 for the sampler (switchable)",
    "modulation": "the embeddings of time, sizes and pooled text, and each residual block's projection of them",
    "residual": "the residual streams of UNet and text encoders, and the convolutions that start or carry the UNet's: "
    "conv_in and the 1x1 conv_shortcut; what is kept for the way up",
    "timestep": "the timestep and its sinusoid",
    "softmax": "attention scores and their softmax",
    "group_norm": "the statistics of group and layer norms",
    "guidance": "classifier-free guidance",
    "scheduler": "sigmas and latents between steps",
}

# The keys of both families' denoisers: none of one is like one of the other.
_FINAL_NORM = re.compile(r"(norm_out|proj_out|conv_norm_out|conv_out)\.")
_STREAM_START = re.compile(r"(img_in|txt_in|conv_in)\.|.*\.conv_shortcut\.")
_MODULATION = re.compile(
    r"time_text_embed\.|transformer_blocks\.\d+\.(img|txt)_mod\.|(time|add)_embedding\.|.*\.time_emb_proj\."
)
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
    family: Family = "qwen"

    def __post_init__(self) -> None:
        assert {self.text, self.transformer, self.vae} <= BYTES.keys(), self
        assert self.timestep in ("fp32", "rounded"), self

    def compute_dtype(self, component: str) -> str:
        """The dtype of a component's weights and matrix products, but for the FP32 places."""
        name = "transformer" if component == "unet" else component
        assert name in COMPONENTS, component
        dtype: str = getattr(self, name)
        return dtype

    def residual_dtype(self, component: str) -> str:
        dtype = self.compute_dtype(component)
        return at_least_float32(dtype) if self.residual else dtype

    def weight_dtype(self, component: str, key: str) -> str:
        """The dtype that the tensor `key` of `component` is loaded in, hence that its layer computes in."""
        dtype = self.compute_dtype(component)
        if component not in DENOISERS.values():
            return dtype
        places = ((self.final_norm, _FINAL_NORM), (self.residual, _STREAM_START), (self.modulation, _MODULATION))
        return at_least_float32(dtype) if any(on and keys.match(key) for on, keys in places) else dtype

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
        named = PLACES if self.family == "qwen" else SD_PLACES
        return {place: switched.get(place, at_least_float32(low)) for place in named}

    def summary(self) -> str:
        """One line for people: `bf16 (text bf16, transformer bf16, vae fp32; final_norm fp32 ...)`."""
        denoiser = DENOISERS[self.family]
        short = {long: name for name, long in _DTYPES.items()} | {"float64": "fp64"}
        parts = ", ".join(f"{c} {short[self.compute_dtype(c)]}" for c in ("text", denoiser, "vae"))
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
_ALL = (FP32, BF16, BF16_PLAIN, FP16_PLAIN)
BASES: Mapping[str, Precision] = {p.name: p for p in _ALL}

FP16 = replace(BF16, name="fp16", text="float16", transformer="float16")
SD_BASES: Mapping[str, Precision] = {p.name: replace(p, family="sd") for p in (*_ALL, FP16)}
FAMILIES: Mapping[Family, Mapping[str, Precision]] = {"qwen": BASES, "sd": SD_BASES}

SYNTAX = "BASE[,text|transformer|vae=DTYPE][,final_norm=fp32|off][,timestep=fp32|rounded]"
SD_SYNTAX = "BASE[,text|unet|vae=DTYPE][,final_norm=fp32|off]"


def parse(text: str, *, on_gpu: bool, family: Family = "qwen") -> Precision:
    """The policy that `text` (`SYNTAX`, `SD_SYNTAX`) names; `auto` is fp32 on a CPU, and on a GPU bf16, or fp16 for
    Stable Diffusion. Raises UsageError."""
    base, *overrides = (part.strip() for part in text.strip().lower().split(","))
    base = _ALIASES.get(base, base)
    if base == "auto":
        base = "fp32" if not on_gpu else "fp16" if family == "sd" else "bf16"
    bases, syntax = FAMILIES[family], SD_SYNTAX if family == "sd" else SYNTAX
    if base == "fp16" and base not in bases:
        raise UsageError(
            "--precision fp16: a float16 that holds Qwen-Image's activations is not built yet; "
            "use bf16, or fp16-plain to see it overflow"
        )
    if base not in bases:
        raise UsageError(f"--precision {text!r}: {base!r} is not one of auto, {', '.join(bases)}; syntax: {syntax}")
    precision = bases[base]
    for override in overrides:
        changed = _override(precision, override)
        if changed is None:
            raise UsageError(f"--precision {text!r}: cannot read {override!r}; syntax: {syntax}")
        precision = changed
    return replace(precision, name=",".join([base, *overrides]))


def check(text: str) -> None:
    """Raises UsageError for a policy that no family knows: what can be said before a model is opened."""
    try:
        parse(text, on_gpu=False)
    except UsageError as error:
        try:
            parse(text, on_gpu=False, family="sd")
        except UsageError:
            raise error from None


def _override(precision: Precision, override: str) -> Precision | None:
    """`precision` with one thing changed; None where `override` does not say one that its family has."""
    key, _, value = override.partition("=")
    dtype = _DTYPES.get(_ALIASES.get(value, value))
    if dtype and key == "text":
        return replace(precision, text=dtype)
    if dtype and key == "vae":
        return replace(precision, vae=dtype)
    if dtype and key == DENOISERS[precision.family]:
        return replace(precision, transformer=dtype)
    if key == "final_norm" and _ALIASES.get(value, value) in ("fp32", "off"):
        return replace(precision, final_norm=value != "off")
    if key == "timestep" and precision.family == "qwen" and _ALIASES.get(value, value) in ("fp32", "rounded"):
        return replace(precision, timestep=_ALIASES.get(value, value))
    return None
