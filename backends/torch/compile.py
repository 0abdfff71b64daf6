"""Compiles a denoiser by torch's own compiler, from outside: each transformer block, and of a UNet each residual block
and each norm in front of transformer blocks, by itself and in place. Blocks of one kind, which have weights of the same
shapes, share what is compiled; lengths of texts, sizes and branches are not fixed in it.
"""

from __future__ import annotations

import os
import shutil
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils._triton import has_triton_package

from qwenimg.backends.torch import code_folder, ops
from qwenimg.common.runtime import observers

UNITS = ("TransformerBlock", "ResidualBlock", "TokenNorm")  # the classes of what repeats in denoisers
KINDS = 64  # of one class, each with its variants: torch's own limit is 8, and a UNet's residual blocks are of 12
CACHE = "TORCHINDUCTOR_CACHE_DIR"  # names the folder where torch's compiler keeps its results
# Torch's mode that tries several kernels for each product and keeps the fastest. Its modes with CUDA graphs are not
# used: blocks that are compiled one by one pass results to each other, which such graphs overwrite.
AUTOTUNE = "max-autotune-no-cudagraphs"


def units(model: torch.nn.Module) -> list[torch.nn.Module]:
    """What is compiled, each by itself."""
    return [module for module in model.modules() if type(module).__name__ in UNITS]


def missing(on_gpu: bool) -> str:
    """What is missing of what torch's compiler calls."""
    if on_gpu and not has_triton_package():
        return "needs the package triton on an NVIDIA GPU"
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++", "cl")):
        return "needs a C++ compiler on this machine (g++ or clang++)"
    return ""


def compile(model: torch.nn.Module, folder: Path, backend: str = "inductor", autotune: bool = False) -> str:
    """Have the blocks of `model` compiled when they are first called. Return what to tell the user, or nothing.

    folder: where results are kept for later runs, unless the environment names another. autotune: with torch's mode
    `AUTOTUNE`, which takes longer once."""
    line = ""
    if not os.environ.get(CACHE):  # before the import, which would name a folder that is cleared
        try:
            folder, line = code_folder.take(folder)
        except OSError as error:
            return f"nothing is compiled: no temporary folder can be made: {error.strerror}"
        os.environ[CACHE] = str(folder)
        os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))  # of kernels that are not torch's own
    from torch._dynamo import config as dynamo  # 800 modules, which only a compiler needs

    from qwenimg.backends.torch.ops import whole  # noqa: F401  an operation that compiled blocks call

    settle()
    dynamo.recompile_limit = max(KINDS, dynamo.recompile_limit)
    for unit in units(model):
        unit.compile(fullgraph=True, dynamic=True, backend=backend, mode=AUTOTUNE if autotune else None)
    return line


def settle() -> None:
    """What is asked once, when something is compiled: whether it is observed, and what the processor multiplies."""
    for settled in (observers.observed, ops.multiplies):
        settled.__dict__["_dynamo_marked_constant"] = True


def eager(compiled: bool) -> AbstractContextManager[Any]:
    """Within it nothing compiled is called: an observer sees every operation."""
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()
