"""The only place that names the backends. `load` is a call: importing this module imports no framework."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING

from qwenimg.common.base import forked
from qwenimg.common.base.errors import BackendMissing, DoesNotFit, UsageError, out_of_memory
from qwenimg.common.base.text import clean
from qwenimg.common.memory import limits, memory

if TYPE_CHECKING:
    from qwenimg.common.runtime.engine import Engine
    from qwenimg.common.runtime.rates import Rates

NAMES = ("auto", "mlx", "cuda", "cpu")
_NUMBERED = re.compile("cuda:(0|[1-9][0-9]?)")  # one of several GPUs
PLACED = ("mlx:cpu", "mlx:gpu")  # for comparisons: MLX on that device, while no other is loaded
MISSING = "not available: "  # how `available` begins the reason of a missing backend
_LOADED_BY: dict[str, int] = {}  # the process that first loaded a package
_PACKAGES = {"mlx": "mlx", "cuda": "torch", "cpu": "torch"}
# Bytes of address space and of data that loading takes: with less, the package ends the process itself
_ROOM = {"mlx": (320 << 20, 120 << 20), "torch": (700 << 20, 300 << 20)}
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is the name before torch 2.9
# qwenimg itself is on no index: it is installed from a clone.
_INSTALL = "in the clone of qwenimg: pip install '.[{}]' (README.md: Install)"


def installed(name: str) -> bool:
    """Return whether the package that backend `name` needs can be imported. Imports nothing."""
    return importlib.util.find_spec(_PACKAGES[name]) is not None


def known(name: str) -> bool:
    """Return whether `name` is one of NAMES or an NVIDIA GPU by its number, such as `cuda:1`."""
    return name in NAMES or _NUMBERED.fullmatch(name) is not None


def load(name: str = "auto") -> Engine:
    """Return the engine of backend `name`.

    `mlx` is MLX's default device (Metal, its CUDA build, else the CPU); `cuda` is torch on the first NVIDIA GPU,
    `cuda:1` on the second; `cpu` is torch on the CPU; `auto` is mlx on Metal, else cuda, else cpu, else mlx on the
    CPU. Raises BackendMissing where the package or the device is missing: never a silent change.
    """
    if not known(name) and name not in PLACED:
        raise UsageError(f"backend {clean(name, 40)!r} is not one of {', '.join(NAMES)}")
    _set_allocator()
    if name == "auto":
        name = _choose()
    name, _, place = name.partition(":")
    if not installed(name):
        raise BackendMissing(f"--backend {name} needs {_PACKAGES[name]}; {_INSTALL.format(_PACKAGES[name])}")
    _check_room(_PACKAGES[name])
    forked.check(_LOADED_BY.setdefault(_PACKAGES[name], os.getpid()))
    if name == "mlx":
        # MLX reads this once per process: fp32 must mean fp32 even where a faster, coarser mode is its default.
        os.environ.setdefault("MLX_ENABLE_TF32", "0")
    with _loading(name):
        if name == "mlx":
            from qwenimg.backends.mlx.engine import MLXEngine

            return MLXEngine(place)
        from qwenimg.backends.torch.engine import TorchEngine
    return TorchEngine(name, int(place or 0))


def available() -> dict[str, str]:
    """Return for each backend the device on which it would run here, or why it cannot. Imports the frameworks."""
    devices = {}
    for name in NAMES[1:]:
        try:
            devices[name] = load(name).device
        except BackendMissing as error:
            devices[name] = f"{MISSING}{error}"
    if not devices["cuda"].startswith(MISSING):
        for number in count(1):
            try:
                devices[f"cuda:{number}"] = load(f"cuda:{number}").device
            except BackendMissing:  # the number after the last
                break
    return devices


def rates(name: str, engine: Callable[[], Engine], device: str = "") -> Rates:
    """Return the rates of backend `name`, which is installed, as its engine has them. engine: called to measure one.
    device: a GPU."""
    from importlib.metadata import version  # which takes a fifth of `qwenimg --help`

    from qwenimg.common.runtime.rates import Rates

    package = _PACKAGES[name]
    return Rates(f"{name} of {package} {version(package)}", engine, device)


def _set_allocator() -> None:
    """Have torch's CUDA allocator use segments that grow, against fragments that hold a third of a card.

    Torch reads this when it is imported, and warns on systems without such segments. A value that the user has set
    stays.
    """
    if "torch" in sys.modules or sys.platform != "linux" or not installed("cuda"):
        return
    if not any(name in os.environ for name in _ALLOCATOR):
        from importlib.metadata import version

        recent = tuple(map(int, version("torch").split(".")[:2])) >= (2, 9)
        os.environ[_ALLOCATOR[0] if recent else _ALLOCATOR[1]] = "expandable_segments:True"


def _check_room(package: str) -> None:
    limits.check_room(package, _ROOM[package])


@contextmanager
def _loading(name: str) -> Iterator[None]:
    """Name the package if it does not load. `_ROOM` is too little for torch's build for CUDA, which maps 3.2 GB."""
    package = _PACKAGES[name]
    try:
        yield
    except (ImportError, OSError) as error:
        if out_of_memory(error):
            limit = memory.machine_ram()[1]
            change = f"raise {limit}" if limit else "close other programs"
            raise DoesNotFit(f"loading {package} takes more memory than is free; {change}") from None
        raise BackendMissing(
            f"--backend {name}: {package} is installed but does not load ({clean(error, 80)}); install it again"
        ) from None


def _choose() -> str:
    if sys.platform == "darwin" and installed("mlx") and load("mlx").on_gpu:
        return "mlx"
    if installed("cuda"):
        _check_room("torch")
        with _loading("cpu"):
            from qwenimg.backends.torch.engine import has_cuda

        return "cuda" if has_cuda() else "cpu"
    return "mlx" if installed("mlx") else "cpu"
