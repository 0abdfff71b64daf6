"""Both frameworks as the tests want them; imported by the conftest of each room that computes."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

# MLX's Linux wheel carries a reference BLAS. With torch's own library loaded globally first, MLX's float32 matrix
# products resolve to that one: over a hundred times faster when wide, and less error. Tests only.
_TORCH_CPU = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
if _TORCH_CPU.exists():
    ctypes.CDLL(str(_TORCH_CPU), mode=ctypes.RTLD_GLOBAL)
torch.set_num_threads(1)  # several threads on few cores stall tiny models
