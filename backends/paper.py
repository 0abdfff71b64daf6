"""Engines on paper: what is known of a backend and its device without importing a framework."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from qwenimg.backends import NAMES, installed, known, load, rates, workspaces
from qwenimg.common.base.amounts import size_text
from qwenimg.common.base.errors import BackendMissing, UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.memory import share
from qwenimg.common.memory.memory import free_ram, machine_ram
from qwenimg.common.precision import devices
from qwenimg.common.precision.devices import Device
from qwenimg.common.runtime.paper import OnPaper
from qwenimg.common.runtime.rates import Rates

if TYPE_CHECKING:
    from qwenimg.common.precision.machines import Machine

SECONDS = 5.0  # how long a program of the system may take to answer
MODERN = (8, 0)  # compute capability assumed of a card that is not here: Ampere's
TURING = (7, 5)


def for_hints(name: str) -> OnPaper:
    """Return backend `name` of this machine on paper, at rates that were measured before or are usual: nothing is
    loaded. Raises UsageError and BackendMissing."""
    engine = on_paper(name, None)
    return replace(engine, rate=engine.rate.expected) if isinstance(engine.rate, Rates) else engine


def on_paper(name: str, memory: int | None, machine: Machine | None = None) -> OnPaper:
    """Return backend `name` on paper. machine: another machine's name. memory: free bytes, or the memory of `machine`;
    None: this machine's free bytes, or the memory that `machine` has by default. Raises UsageError and
    BackendMissing."""
    if not known(name):
        raise UsageError(f"backend {clean(name, 40)!r} is not one of {', '.join(NAMES)}")
    if machine is not None:
        return _elsewhere(name, memory, machine)
    name = _choose() if name == "auto" else name
    name, _, place = name.partition(":")
    if name == "cuda":
        return _cuda(memory, int(place or 0))
    if name == "mlx" and sys.platform == "darwin":
        return _mac(memory)
    on_mlx = name == "mlx"
    facts = _cpu("mlx" if on_mlx else "torch")
    work = workspaces.MLX_CPU if on_mlx else workspaces.TORCH_CPU
    total, limit = machine_ram() if memory is None else (0, "")
    free = memory or free_ram()
    rate = rates(name, partial(load, "mlx:cpu" if on_mlx else "cpu")) if installed(name) else None
    return OnPaper(name=name, facts=facts, workspace=work, free=free, total=total, limit=limit, rate=rate)


def _choose() -> str:
    """Return the backend that `backends.load` would choose, judged by what is installed."""
    if sys.platform == "darwin" and installed("mlx"):
        return "mlx"
    if installed("cuda"):
        return "cuda" if _card() else "cpu"
    return "mlx" if installed("mlx") else "cpu"


def backend_of(device: str, name: str) -> str:
    """Return the backend of a card or chip, by its title. Raises UsageError if `name`, which the user asked for, is
    another one."""
    needed = "mlx" if device.startswith("Apple") else "cuda"
    if name.partition(":")[0] not in ("auto", needed):
        raise UsageError(f"--backend {name}: {device} is a device of --backend {needed}")
    return needed


def _elsewhere(name: str, memory: int | None, machine: Machine) -> OnPaper:
    """Return `machine` with `memory` bytes, or with its usual memory."""
    needed = backend_of(machine.title, name)
    if memory is None and len(machine.memory) > 1:
        *others, last = machine.memory
        listed = f"{', '.join(map(str, others))} or {last} GB"
        raise UsageError(f"{machine.title} comes with {listed}; say which with --memory, such as {last}GB")
    total = share.on_the_box(memory) if memory else machine.memory[0] * share.GIB
    if needed == "mlx":
        return _apple(share.of_mac(total), machine.title, total)
    return _nvidia(share.of_card(total), machine.title, TURING if machine.name.startswith("20") else MODERN, total)


def _apple(free: int, name: str, memory: int) -> OnPaper:
    facts, about = devices.apple(name), _share_text(memory, "the GPU", free)
    return OnPaper(name="mlx", facts=facts, workspace=workspaces.MLX_GPU, free=free, about=about, rate=None)


def _mac(memory: int | None) -> OnPaper:
    """Return this Mac, with `memory` bytes or the working set that Metal recommends."""
    total, raised = (_number(_answer("sysctl", "-n", name)) for name in ("hw.memsize", "iogpu.wired_limit_mb"))
    chip = _answer("sysctl", "-n", "machdep.cpu.brand_string")
    return _apple(memory or raised * 2**20 or share.of_mac(total), chip, 0 if memory else total)


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _nvidia(free: int, name: str, capability: tuple[int, int], memory: int = 0) -> OnPaper:
    facts, about = devices.nvidia(name, capability), _share_text(memory, "a program", free)
    return OnPaper(name="cuda", facts=facts, workspace=workspaces.TORCH, free=free, about=about, rate=None)


def _share_text(memory: int, whom: str, free: int) -> str:
    """Return a sentence on how much of a machine's `memory` is `free`; nothing where `memory` is not known."""
    if not memory:
        return ""
    total = f"{memory / share.GIB:.4g} GiB ({size_text(memory)})" if memory >= share.GIB else size_text(memory)
    return f"of {total} {whom} may have {size_text(free)}"


def _cuda(memory: int | None, number: int) -> OnPaper:
    """Return the card `number` of this machine, or any card with `memory` bytes."""
    here = _card(number)
    if not here and memory is None:
        which = f"cuda:{number}: no NVIDIA GPU of this number" if number else "cuda: no NVIDIA GPU"
        raise BackendMissing(f"--backend {which} is here; name one with --on, or say its --memory")
    card, major, minor, free = here or ("an NVIDIA GPU", *MODERN, 0)
    return _nvidia(memory or free, card, (major, minor))


def _card(number: int = 0) -> tuple[str, int, int, int] | None:
    """Return name, compute capability and free bytes of the card `number`, or None."""
    text = _answer("nvidia-smi", "--query-gpu=name,compute_cap,memory.free", "--format=csv,noheader,nounits")
    try:
        name, capability, free = text.splitlines()[number].rsplit(", ", 2)
        major, minor = capability.split(".")
        return name, int(major), int(minor), int(free) << 20
    except (IndexError, ValueError):  # no card, or no driver that says so much
        return None


def _cpu(library: str) -> Device:
    if library == "mlx":
        return devices.cpu("CPU (mlx)", bf16=False, emulates=True)
    return devices.cpu("CPU (torch)", bf16=_multiplies_bf16())


def _multiplies_bf16() -> bool:
    """Return whether this processor has instructions for products in bfloat16."""
    info = Path("/proc/cpuinfo")
    words = set(info.read_text().split()) if info.exists() else set[str]()
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return bool(words & ({"avx512_bf16", "amx_tile"} if x86 else {"bf16"}))


def _answer(*command: str) -> str:
    """Return the output of a program of the system, or nothing if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
