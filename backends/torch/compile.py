"""Compilation of a denoiser by torch's compiler, from outside of the network.

Each module that the network's description names (`Network.compiled`) is compiled by itself and in place. Modules of
one class and of the same shapes share compiled code. Text lengths, sizes and branches are not fixed in it.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils._triton import has_triton_package

from qwenimg.backends.torch import code_folder, ops
from qwenimg.common.runtime import observers

KINDS = 64  # variants of one class: torch's own limit is 8, and a UNet has residual blocks of 12 shapes
CACHE = "TORCHINDUCTOR_CACHE_DIR"  # names the folder where torch's compiler keeps its results
# Torch's mode that tries several kernels for each product and keeps the fastest. Its modes with CUDA graphs are not
# used: such graphs overwrite the results that blocks compiled one by one pass to each other.
AUTOTUNE = "max-autotune-no-cudagraphs"


def units(model: torch.nn.Module, paths: re.Pattern[str]) -> list[torch.nn.Module]:
    """Return the modules at `paths`, which are compiled, each by itself."""
    modules = [module for path, module in model.named_modules() if paths.fullmatch(path)]
    assert modules, f"no module of {type(model).__name__} is at {paths.pattern}"
    return modules


def missing(on_gpu: bool) -> str:
    """Return the name of a program that torch's compiler needs and this machine lacks, or nothing."""
    if on_gpu and not has_triton_package():
        return "needs the package triton on an NVIDIA GPU"
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++", "cl")):
        return "needs a C++ compiler on this machine (g++ or clang++)"
    return ""


def compile(
    model: torch.nn.Module, paths: re.Pattern[str], folder: Path, backend: str = "inductor", autotune: bool = False
) -> str:
    """Compile the modules at `paths` at their first call. Return a message for the user, or "". folder: keeps compiled
    code for later runs, unless the environment names another. autotune: use torch's mode `AUTOTUNE`, with a slower
    first run."""
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

    mark_constants()
    dynamo.recompile_limit = max(KINDS, dynamo.recompile_limit)
    for unit in units(model, paths):
        unit.compile(fullgraph=True, dynamic=True, backend=backend, mode=AUTOTUNE if autotune else None)
    return line


def mark_constants() -> None:
    """Declare to the compiler that the results of these functions do not change after compilation."""
    for function in (observers.observed, ops.multiplies, ops.multiplies_int8):
        function.__dict__["_dynamo_marked_constant"] = True


def eager(compiled: bool) -> AbstractContextManager[Any]:
    """Call nothing compiled while the context is open, so that an observer sees every operation."""
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()
