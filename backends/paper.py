"""Engines on paper: what can be known of a backend and its device without importing a framework."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

from qwenimg.backends import NAMES, installed, workspaces
from qwenimg.common.base.errors import BackendMissing, UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.memory.memory import free_ram
from qwenimg.common.precision import devices
from qwenimg.common.precision.devices import Device
from qwenimg.common.runtime.paper import OnPaper

SECONDS = 5.0  # for a program of the system to answer
SHARE = 0.75  # of a Mac's memory that its GPU may have, about
MODERN = (8, 0)  # compute capability of a card that is not here: of Ampere and later
SIDE = 512  # of the matrices that a CPU's rate is measured with


def on_paper(name: str, memory: int | None) -> OnPaper:
    """Backend `name` with `memory` bytes free; None: what is free here. Raises UsageError and BackendMissing."""
    if name not in NAMES:
        raise UsageError(f"backend {clean(name, 40)!r} is not one of {', '.join(NAMES)}")
    name = _choose() if name == "auto" else name
    if name == "cuda":
        return _cuda(memory)
    if name == "mlx" and sys.platform == "darwin":
        facts, work = devices.apple(_answer("sysctl", "-n", "machdep.cpu.brand_string")), workspaces.MLX_GPU
        return OnPaper(name=name, facts=facts, workspace=work, free=memory or int(SHARE * 2 * free_ram()), rate=None)
    on_mlx = name == "mlx"
    facts = _cpu("mlx" if on_mlx else "torch")
    work = workspaces.MLX_CPU if on_mlx else workspaces.TORCH
    return OnPaper(name=name, facts=facts, workspace=work, free=memory or free_ram(), rate=_cpu_rate())


def _choose() -> str:
    """As `backends.load` does, by what is installed."""
    if sys.platform == "darwin" and installed("mlx"):
        return "mlx"
    if installed("cuda"):
        return "cuda" if _card() else "cpu"
    return "mlx" if installed("mlx") else "cpu"


def _cuda(memory: int | None) -> OnPaper:
    """The card that is here, or with `memory` any."""
    found = _card()
    if not found and memory is None:
        raise BackendMissing("--backend cuda: no NVIDIA GPU is here; say with --memory for how much to plan")
    card, major, minor, free = found or ("an NVIDIA GPU", *MODERN, 0)
    facts = devices.nvidia(card, (major, minor))
    return OnPaper(name="cuda", facts=facts, workspace=workspaces.TORCH, free=memory or free, rate=None)


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
    info = Path("/proc/cpuinfo")
    words = set(info.read_text().split()) if info.exists() else set[str]()
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return devices.cpu("CPU (torch)", bf16=bool(words & ({"avx512_bf16", "amx_tile"} if x86 else {"bf16"})))


def _cpu_rate() -> float:
    """Operations a second of a float32 product here: the best of some, since the first one is slow."""
    import numpy as np

    x = np.ones((SIDE, SIDE), np.float32)
    found = []
    for _ in range(6):
        begun = time.perf_counter()
        np.matmul(x, x)
        found.append(time.perf_counter() - begun)
    return 2 * SIDE**3 / min(found)


def _answer(*command: str) -> str:
    """What a program of the system prints; nothing where it is not there or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
