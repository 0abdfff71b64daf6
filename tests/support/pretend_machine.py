"""Another machine than the one that is here, for the tests and every command that they start.

    PRETEND_CPU=avx2 python -m pytest tests/pipeline     # no AVX-512 and no instructions for bfloat16
    PRETEND_CPU=baseline ...                             # nothing after SSE 4
    PRETEND_CPU=avx512_bf16 ...                          # the probes alone say yes: kernels are those of this processor
    PRETEND_MEMORY=2e9 PRETEND_DISK=1e9 ...              # bytes that the machine has, all of them free

One core is `taskset -c 0`. `tests/conftest.py` imports this before anything that reads the machine.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path

PROBES = Path(__file__).parent / "pretended"
AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "OPENBLAS_CORETYPE": "Haswell",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
    "PRETEND_BF16": "0",
}
BASELINE = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "OPENBLAS_CORETYPE": "Nehalem",
    "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR",
    "PRETEND_BF16": "0",
}
PROCESSORS = {"avx2": AVX2, "baseline": BASELINE, "avx512_bf16": {"PRETEND_BF16": "1"}}


def pretend() -> None:
    """Set up the machine that the variables PRETEND_... name, here and for each Python that this one starts."""
    if not any(name.startswith("PRETEND_") for name in os.environ):
        return
    if kind := os.environ.get("PRETEND_CPU"):
        os.environ.update(PROCESSORS[kind])
    os.environ["PYTHONPATH"] = os.pathsep.join([str(PROBES), *filter(None, [os.environ.get("PYTHONPATH")])])
    runpy.run_path(str(PROBES / "sitecustomize.py"))


pretend()
