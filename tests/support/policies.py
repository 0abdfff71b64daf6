"""The policies that most tests compute under: those of Qwen-Image."""

from __future__ import annotations

from qwenimg.common.families.qwen_image.family import KIND as MMDIT
from qwenimg.common.families.stable_diffusion.family import KIND as UNET
from qwenimg.common.precision import precision
from qwenimg.common.precision.precision import DenoiserKind, Precision, bases

__all__ = ["BF16", "BF16_PLAIN", "FP16_PLAIN", "FP32", "FP64", "MMDIT", "UNET", "parse"]

_BASES = bases(MMDIT)
FP32, BF16, BF16_PLAIN, FP16_PLAIN = (_BASES[name] for name in ("fp32", "bf16", "bf16-plain", "fp16-plain"))
FP64 = precision.float64(MMDIT)


def parse(text: str, *, on_gpu: bool, kind: DenoiserKind = MMDIT) -> Precision:
    """Return the policy that `text` names, of Qwen-Image unless `kind` is another's."""
    return precision.parse(text, on_gpu=on_gpu, kind=kind)
