"""The ranks of a run: which one this process is, by its launcher's environment, and the engine of a rank."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from qwenimg.backends import load
from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean

if TYPE_CHECKING:
    from qwenimg.common.runtime.engine import Engine
    from qwenimg.common.runtime.group import RankPlace

# What torchrun sets; `spawned` sets the same
_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MLX = ("MLX_RANK", "MLX_HOSTFILE")
MOST = 64  # ranks


def place(devices: int) -> RankPlace | None:
    """Return this process's place among the ranks that torchrun, accelerate or mlx.launch has started; None without
    a launcher. devices: the number of ranks that the user asked for. Raises UsageError."""
    environment = os.environ
    if all(environment.get(name) for name in _MLX):
        here = _of_mlx(environment)
    elif all(environment.get(name) for name in _TORCH):
        here = _of_torch(environment)
    else:
        return None
    if here.size != devices:
        raise UsageError(f"--devices {devices}: the launcher has started {here.size} ranks; give it the same number")
    return here


def _of_torch(environment: Mapping[str, str]) -> RankPlace:
    from qwenimg.common.runtime.group import RankPlace

    rank, size, port = (_number(environment, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    _check(rank, size)
    if not 0 < port < 1 << 16:
        raise UsageError(f"MASTER_PORT is {port}, which is no port")
    local = _number(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else rank
    neighbours = _number(environment, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environment else size
    host = environment["MASTER_ADDR"]
    return RankPlace(rank=rank, size=size, local=local, neighbours=neighbours, host=host, port=port)


def _of_mlx(environment: Mapping[str, str]) -> RankPlace:
    from qwenimg.common.runtime.group import RankPlace

    rank, path = _number(environment, "MLX_RANK"), environment["MLX_HOSTFILE"]
    try:
        hosts = [addresses[0].rpartition(":")[0] for addresses in json.loads(Path(path).read_text("utf-8"))]
    except (OSError, ValueError, AttributeError, IndexError, TypeError):
        raise UsageError(f"MLX_HOSTFILE {clean(path, 80)} is no list of ranks with their addresses") from None
    _check(rank, len(hosts))
    neighbours = hosts.count(hosts[rank])
    return RankPlace(rank=rank, size=len(hosts), neighbours=neighbours, host=hosts[0])


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not (text.isdecimal() and len(text) < 7):
        raise UsageError(f"{name} is {clean(text, 40)!r} in the environment: a launcher sets a number")
    return int(text)


def _check(rank: int, size: int) -> None:
    if not 0 < size <= MOST:
        raise UsageError(f"the launcher has started {size} ranks; 1 to {MOST} can draw one picture")
    if rank >= size:
        raise UsageError(f"the launcher says rank {rank} of {size}: ranks count from 0")


def check_backend(name: str, *, launched_by_mlx: bool) -> str:
    """Return the backend of every rank: MLX if mlx.launch has started them, else torch. Raises UsageError."""
    is_mlx = name.partition(":")[0] == "mlx"
    if launched_by_mlx:
        if not is_mlx and name != "auto":
            raise UsageError(f"--backend {name}: ranks that mlx.launch started compute with mlx")
        return name if is_mlx else "mlx"
    if is_mlx or (name == "auto" and sys.platform == "darwin"):
        raise UsageError("--devices: a Mac has one GPU for MLX; start a rank on each Mac with mlx.launch")
    if name.partition(":")[2]:
        raise UsageError(f"--backend {name} with --devices: rank i takes GPU i; CUDA_VISIBLE_DEVICES chooses them")
    return name


def by_mlx() -> bool:
    """Return whether mlx.launch has started this process."""
    return all(os.environ.get(name) for name in _MLX)


def engine(name: str, place: RankPlace, store: Any = None) -> Engine:
    """Return the engine of a rank once all ranks have met. store: rank 0's, if it is open. Raises BackendMissing,
    UsageError and RankLost."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else torch tells of each try to reach a rank
    name = _of_torch_here(name)
    opened: Any = load(f"cuda:{place.local}" if name == "cuda" else name)
    opened.meet(place, store)
    return cast("Engine", opened)


def store(name: str, size: int) -> tuple[Any, int]:
    """Return a store of this machine, at which torch's ranks meet, and its port. Raises BackendMissing if there are
    fewer GPUs than ranks."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    load("cpu" if _of_torch_here(name) == "cpu" else f"cuda:{size - 1}")
    from qwenimg.backends.torch.group import local_store

    return local_store()


def _of_torch_here(name: str) -> str:
    """Return the torch backend that `auto` means on this machine; any other name unchanged."""
    if name != "auto":
        return name
    load("cpu")  # only for its error where torch is missing
    from qwenimg.backends.torch.engine import has_cuda

    return "cuda" if has_cuda() else "cpu"
