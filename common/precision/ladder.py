"""The next wider precision for each part of a model, for values that a policy does not hold.

bfloat16 and float32 have the same range, so the last step only spares roundings; after an overflow in float16, bfloat16
is the cure.
"""

from __future__ import annotations

from qwenimg.common.precision.precision import DENOISERS, INT8, DenoiserKind, Precision, parse, short
from qwenimg.common.precision.residency import Residency

PARTS = ("text", "transformer", "vae")  # roles of components
_STREAMS = ("add", "gated")  # operations whose result is a residual stream
_DTYPES = {"float16": "bfloat16", "bfloat16": "float32"}
_BASES = {
    "fp16-plain": "bf16",
    "fp16": "bf16",
    "fp16-upcast": "fp32",
    "bf16": "fp32",
    "bf16-plain": "fp32",
    INT8: "fp32",
}


def higher(precision: Precision, part: str, operation: str = "") -> str | None:
    """Return the text of the policy above `precision` for `part`, when it does not hold a value that is the result
    of `operation`; None if there is none. The user's other choices stay."""
    base, *overrides = precision.name.split(",")
    kind = precision.kind
    names = (kind.denoiser, *DENOISERS) if part == "transformer" else (part,)
    overridden = any(override.partition("=")[0] in names for override in overrides)
    if part == "transformer" and not overridden:
        above = _base_above(base, kind, operation)
        return None if above is None else ",".join([above, *overrides])
    dtype = _DTYPES.get(precision.stored_dtype(part))
    if dtype is None:
        return None
    others = [override for override in overrides if override.partition("=")[0] not in names]
    return ",".join([base, *others, f"{names[0]}={short(dtype)}"])


def holding(precision: Precision, part: str, key: str, residency: Residency) -> str | None:
    """Return the text of the first policy above `precision` that stores the parameter `key` of `part` in another
    dtype, or None."""
    dtype = precision.weight_dtype(part, key, residency)
    above = higher(precision, part)
    while above is not None:
        policy = parse(above, on_gpu=False, kind=precision.kind)
        if policy.weight_dtype(part, key, residency) != dtype:
            return above
        above = higher(policy, part)
    return None


def _base_above(base: str, kind: DenoiserKind, operation: str) -> str | None:
    """Return the policy above `base`. After plain float16 that may be `fp16`, if float32 streams, or scaled
    products, are enough."""
    if base == "fp16-plain" and "fp16" in kind.bases and (kind.scales or operation in _STREAMS):
        return "fp16"
    above = _BASES.get(base)
    return above if above in kind.bases else None


def advice(precision: Precision, part: str, operation: str = "") -> str:
    """Return the advice about a value that is not finite, as the end of a sentence."""
    above = higher(precision, part, operation)
    if above is None:
        return f"{precision.stored_dtype(part)} has the widest range, so what went in is at fault"
    exact = f"{above.rpartition('=')[0]}=fp32" if part == "vae" else above
    return f"use --precision {' or '.join(dict.fromkeys((exact, above)))}"
