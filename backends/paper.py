"""Engines on paper: what can be known of a backend and its device without importing a framework."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from qwenimg.backends import NAMES, installed, workspaces
from qwenimg.common.base.amounts import size_text
from qwenimg.common.base.errors import BackendMissing, UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.memory import share
from qwenimg.common.memory.memory import free_ram, machine_ram
from qwenimg.common.precision import devices
from qwenimg.common.precision.devices import Device
from qwenimg.common.runtime.paper import OnPaper

if TYPE_CHECKING:
    from qwenimg.common.measure.machines import Machine

SECONDS = 5.0  # for a program of the system to answer
CLOCK = 1e-4  # seconds, below which a system's clock says nothing
MODERN = (8, 0)  # compute capability of a card that is not here: of Ampere and later
TURING = (7, 5)
# Of what a CPU's rate is measured with: so small a product is of one thread in every library, and as many fill it.
SIDE, PRODUCTS, TRIALS = 64, 512, 6
# Of that rate MLX's build for Linux reaches: its reference library takes 59 times as long as torch's (512 x 512).
MLX_SHARE = 1 / 50


def on_paper(name: str, memory: int | None, machine: Machine | None = None) -> OnPaper:
    """Return backend `name` on paper. machine: one that is not here. memory: bytes that are free, or that `machine`
    has; None: as here, or what `machine` comes with. Raises UsageError and BackendMissing."""
    if name not in NAMES:
        raise UsageError(f"backend {clean(name, 40)!r} is not one of {', '.join(NAMES)}")
    if machine is not None:
        return _elsewhere(name, memory, machine)
    name = _choose() if name == "auto" else name
    if name == "cuda":
        return _cuda(memory)
    if name == "mlx" and sys.platform == "darwin":
        return _mac(memory)
    on_mlx = name == "mlx"
    facts = _cpu("mlx" if on_mlx else "torch")
    work = workspaces.MLX_CPU if on_mlx else workspaces.TORCH
    total, limit = machine_ram() if memory is None else (0, "")
    free = memory or free_ram()
    rate = _cpu_rate() * (MLX_SHARE if on_mlx else 1)
    return OnPaper(name=name, facts=facts, workspace=work, free=free, total=total, limit=limit, rate=rate)


def _choose() -> str:
    """As `backends.load` does, by what is installed."""
    if sys.platform == "darwin" and installed("mlx"):
        return "mlx"
    if installed("cuda"):
        return "cuda" if _card() else "cpu"
    return "mlx" if installed("mlx") else "cpu"


def backend_of(device: str, name: str) -> str:
    """The backend of a card or chip, by its title; `name` is what was asked for. Raises UsageError."""
    needed = "mlx" if device.startswith("Apple") else "cuda"
    if name not in ("auto", needed):
        raise UsageError(f"--backend {name}: {device} is a device of --backend {needed}")
    return needed


def _elsewhere(name: str, memory: int | None, machine: Machine) -> OnPaper:
    """Return `machine` with `memory` bytes, or with what it comes with."""
    needed = backend_of(machine.title, name)
    if memory is None and len(machine.memory) > 1:
        *others, last = machine.memory
        listed = f"{', '.join(map(str, others))} or {last} GB"
        raise UsageError(f"{machine.title} comes with {listed}; say which with --memory, such as {last}GB")
    total = share.on_the_box(memory) if memory else machine.memory[0] * share.GIB
    if needed == "mlx":
        return _apple(share.of_mac(total), machine.title, total)
    return _nvidia(share.of_card(total), machine.title, _capability(machine), total)


def _capability(machine: Machine) -> tuple[int, int]:
    """Return the compute capability of a card that is not here, as far as precision depends on it."""
    return TURING if machine.name.startswith("20") else MODERN


def _apple(free: int, name: str, memory: int) -> OnPaper:
    facts, about = devices.apple(name), _leaves(memory, "the GPU", free)
    return OnPaper(name="mlx", facts=facts, workspace=workspaces.MLX_GPU, free=free, about=about, rate=None)


def _mac(memory: int | None) -> OnPaper:
    """Return the Mac that is here, with `memory` bytes or what Metal recommends as its working set."""
    total, raised = (_number(_answer("sysctl", "-n", name)) for name in ("hw.memsize", "iogpu.wired_limit_mb"))
    chip = _answer("sysctl", "-n", "machdep.cpu.brand_string")
    return _apple(memory or raised * 2**20 or share.of_mac(total), chip, 0 if memory else total)


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _nvidia(free: int, name: str, capability: tuple[int, int], memory: int = 0) -> OnPaper:
    facts, about = devices.nvidia(name, capability), _leaves(memory, "a program", free)
    return OnPaper(name="cuda", facts=facts, workspace=workspaces.TORCH, free=free, about=about, rate=None)


def _leaves(memory: int, whom: str, free: int) -> str:
    """Return what of a machine's `memory` is `free`; nothing where that memory is not known."""
    return "" if not memory else f"of {memory / share.GIB:.4g} GB {whom} may have {size_text(free)}"


def _cuda(memory: int | None) -> OnPaper:
    """Return the card that is here, or with `memory` any."""
    found = _card()
    if not found and memory is None:
        raise BackendMissing("--backend cuda: no NVIDIA GPU is here; name one with --on, or say its --memory")
    card, major, minor, free = found or ("an NVIDIA GPU", *MODERN, 0)
    return _nvidia(memory or free, card, (major, minor))


def _card() -> tuple[str, int, int, int] | None:
    """Name, compute capability and free bytes of the first card."""
    text = _answer("nvidia-smi", "--query-gpu=name,compute_cap,memory.free", "--format=csv,noheader,nounits")
    try:
        name, capability, free = text.splitlines()[0].rsplit(", ", 2)
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


def _cpu_rate() -> float:
    """Operations a second of float32 products on all cores here: those of one thread in the time that it computes,
    which other programs hardly change. The best of some, since the first one is slow."""
    import numpy as np

    x = np.ones((PRODUCTS, SIDE, SIDE), np.float32)
    found = []
    for _ in range(TRIALS):
        begun = time.thread_time()
        np.matmul(x, x)
        found.append(time.thread_time() - begun)
    return _cores() * 2 * PRODUCTS * SIDE**3 / max(min(found), CLOCK)


def _cores() -> int:
    """That this process may use, of which a system may count each twice."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    counts = dict(re.findall(r"^(siblings|cpu cores)\s*: (\d+)$", text, re.MULTILINE))
    several = max(1, int(counts.get("siblings", 1)) // max(1, int(counts.get("cpu cores", 1))))
    able = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, able // several)


def _answer(*command: str) -> str:
    """What a program of the system prints; nothing where it is not there or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
