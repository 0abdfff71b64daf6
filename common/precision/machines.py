"""The peak speed, the share of it that kernels reach, and the memory of graphics cards and Apple's chips.

Rates are from the makers' data sheets: products in 16 bit are dense, with sums in float32 (on a GeForce card half of
the advertised rate). The shares of Apple's chips are fitted to times that others measured: a test holds plans to
`docs/results/published-times.json`. Nothing here was measured by this project."""

from __future__ import annotations

import re
from dataclasses import dataclass

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import aligned, clean


@dataclass(frozen=True)
class Machine:
    """A card or chip. The default shares fit a card with an attention kernel that stores no scores."""

    name: str
    title: str
    memory: tuple[int, ...]  # the sizes that it is sold with, in GiB
    gigabytes: float  # bandwidth, a second
    teraflops: float  # peak of products in 16 bit
    teraflops32: float  # peak of products in float32
    products: float = 0.85  # share of the peak that the networks' products reach
    attention: float = 0.5  # share of the peak that attention reaches
    source: str = "the maker's data sheet"
    quantized: float | None = None  # share of the peak with quantized weights; None: `products`

    def rate(self, dtype: str, quantized: bool = False) -> float:
        """Return the operations a second of a network that computes in `dtype`."""
        return self.peak(dtype) * (self.quantized if quantized and self.quantized else self.products)

    def peak(self, dtype: str) -> float:
        """Return the peak of operations a second in `dtype`."""
        return 1e12 * (self.teraflops if dtype in ("bfloat16", "float16") else self.teraflops32)


_BEST = "bandwidth from NVIDIA's data sheet; 790 TFLOP/s is the best that others measured, of 989 there"
# name, title, memory, GB/s, TFLOP/s in 16 bit and in float32
_CARDS = (
    ("2080-ti", "NVIDIA RTX 2080 Ti", (11,), 616, 53.8, 13.4),
    ("3060", "NVIDIA RTX 3060", (12,), 360, 25.5, 12.7),
    ("3060-ti", "NVIDIA RTX 3060 Ti", (8,), 448, 32.4, 16.2),
    ("3070", "NVIDIA RTX 3070", (8,), 448, 40.6, 20.3),
    ("3070-ti", "NVIDIA RTX 3070 Ti", (8,), 608, 43.5, 21.7),
    ("3080", "NVIDIA RTX 3080", (10, 12), 760, 59.5, 29.8),
    ("3080-ti", "NVIDIA RTX 3080 Ti", (12,), 912, 68.2, 34.1),
    ("3090", "NVIDIA RTX 3090", (24,), 936, 71.0, 35.6),
    ("3090-ti", "NVIDIA RTX 3090 Ti", (24,), 1008, 80.0, 40.0),
    ("4060", "NVIDIA RTX 4060", (8,), 272, 30.2, 15.1),
    ("4060-ti", "NVIDIA RTX 4060 Ti", (8, 16), 288, 44.1, 22.1),
    ("4070", "NVIDIA RTX 4070", (12,), 504, 58.3, 29.1),
    ("4070-super", "NVIDIA RTX 4070 SUPER", (12,), 504, 71.0, 35.5),
    ("4070-ti", "NVIDIA RTX 4070 Ti", (12,), 504, 80.2, 40.1),
    ("4070-ti-super", "NVIDIA RTX 4070 Ti SUPER", (16,), 672, 88.2, 44.1),
    ("4080", "NVIDIA RTX 4080", (16,), 717, 97.5, 48.7),
    ("4080-super", "NVIDIA RTX 4080 SUPER", (16,), 736, 104.4, 52.2),
    ("4090", "NVIDIA RTX 4090", (24,), 1008, 165.2, 82.6),
    ("5060", "NVIDIA RTX 5060", (8,), 448, 38.4, 19.2),
    ("5060-ti", "NVIDIA RTX 5060 Ti", (8, 16), 448, 47.4, 23.7),
    ("5070", "NVIDIA RTX 5070", (12,), 672, 61.7, 30.9),
    ("5070-ti", "NVIDIA RTX 5070 Ti", (16,), 896, 87.9, 43.9),
    ("5080", "NVIDIA RTX 5080", (16,), 960, 112.6, 56.3),
    ("5090", "NVIDIA RTX 5090", (32,), 1792, 209.5, 104.8),
    ("a10", "NVIDIA A10", (24,), 600, 125, 31.2),
    ("a40", "NVIDIA A40", (48,), 696, 149.7, 37.4),
    ("a6000", "NVIDIA RTX A6000", (48,), 768, 154.8, 38.7),
    ("6000-ada", "NVIDIA RTX 6000 Ada", (48,), 960, 364.2, 91.1),
    ("l4", "NVIDIA L4", (24,), 300, 121, 30.3),
    ("l40", "NVIDIA L40", (48,), 864, 181, 90.5),
    ("l40s", "NVIDIA L40S", (48,), 864, 362, 91.6),
    ("a100", "NVIDIA A100", (40, 80), 2039, 312, 19.5),
    ("h100", "NVIDIA H100 SXM", (80,), 3350, 790, 67, 0.85, 0.5, _BEST),
    ("h200", "NVIDIA H200", (141,), 4800, 790, 67, 0.85, 0.5, _BEST),
)
_CHIP = "the maker's data sheet; up to M4 16 bit is no faster than float32"
_M5_UNITS = "bandwidth from the data sheet; the rate in 16 bit from what others measured of its cores, float32 a guess"
# Shares of a generation: of products, of attention (0.9 of them), the source, of products with quantized weights. M1
# and M2 have no units for bfloat16, and lose a fifth by quantized weights; MLX reaches half of the M5's tensor units.
_M1 = _M2 = (0.51, 0.46, f"{_CHIP}; pictures of FLUX.2 klein on an M1 Max and an M2 Pro, in 16 and in 4 bits", 0.40)
_M3 = (0.61, 0.55, f"{_CHIP}; products of 17.4 TFLOP/s on an M3 Ultra, the same with quantized weights", None)
_M4 = (0.76, 0.68, f"{_CHIP}; the speed at which an M4 Max reads prompts of language models", None)
_M5 = (0.52, 0.47, f"{_M5_UNITS}; pictures of Z-Image-Turbo on an M5 Max, and in 8 and 4 bits", 0.37)
# Chips in their version with the most cores
_CHIPS = (
    ("m1", "Apple M1", (8, 16), 68, 2.6, 2.6, *_M1),
    ("m1-pro", "Apple M1 Pro", (16, 32), 200, 5.3, 5.3, *_M1),
    ("m1-max", "Apple M1 Max", (32, 64), 400, 10.4, 10.4, *_M1),
    ("m1-ultra", "Apple M1 Ultra", (64, 128), 800, 20.8, 20.8, *_M1),
    ("m2", "Apple M2", (8, 16, 24), 100, 3.6, 3.6, *_M2),
    ("m2-pro", "Apple M2 Pro", (16, 32), 200, 6.8, 6.8, *_M2),
    ("m2-max", "Apple M2 Max", (32, 64, 96), 400, 13.6, 13.6, *_M2),
    ("m2-ultra", "Apple M2 Ultra", (64, 128, 192), 800, 27.2, 27.2, *_M2),
    ("m3", "Apple M3", (8, 16, 24), 100, 4.1, 4.1, *_M3),
    ("m3-pro", "Apple M3 Pro", (18, 36), 150, 7.4, 7.4, *_M3),
    ("m3-max", "Apple M3 Max", (36, 48, 64, 96, 128), 400, 16.4, 16.4, *_M3),
    ("m3-ultra", "Apple M3 Ultra", (96, 256, 512), 819, 28.4, 28.4, *_M3),
    ("m4", "Apple M4", (16, 24, 32), 120, 4.6, 4.6, *_M4),
    ("m4-pro", "Apple M4 Pro", (24, 48, 64), 273, 9.3, 9.3, *_M4),
    ("m4-max", "Apple M4 Max", (36, 48, 64, 128), 546, 18.4, 18.4, *_M4),
    ("m5", "Apple M5", (16, 24, 32), 153, 16.5, 5.7, *_M5),
    ("m5-pro", "Apple M5 Pro", (24, 48, 64), 307, 30, 15, *_M5),
    ("m5-max", "Apple M5 Max", (36, 48, 64, 128), 614, 60, 30, *_M5),
)
MACHINES = {row[0]: Machine(*row) for row in (*_CARDS, *_CHIPS)}
LIST = "list"  # a value of `--on` in place of a name


def of_device(device: str) -> Machine | None:
    """Return the machine that a driver calls `device` (NVIDIA H100 80GB HBM3, Apple M4 Max), or None if it is unknown.
    A laptop GPU is unknown: its rate differs from the desktop card with the same name."""
    if "laptop" in device.lower():
        return None
    longest = sorted(MACHINES.values(), key=lambda one: -len(one.name))
    return next((one for one in longest if re.search(_words(one), device, re.IGNORECASE)), None)


def machine(name: str, option: str = "--on") -> Machine:
    """Return the machine that the value of `option` names. Raises UsageError."""
    plain = re.sub(r"[\s_-]+", "-", re.sub(r"(\d{4})(ti|super)", r"\1-\2", name.strip().lower()))
    words = () if "laptop" in plain or "mobile" in plain else sorted(MACHINES, key=len, reverse=True)
    match = next((MACHINES[one] for one in words if f"-{one}-" in f"-{plain}-"), None)
    if match is None:
        raise UsageError(f"{option} {clean(name, 40)!r} is not known; qwenimg plan --on {LIST} lists all names")
    return match


def lines() -> list[str]:
    """Return a table of all machines, a line each."""
    head = ("name", "machine", "memory, GB", "TFLOP/s, 16 bit")
    rows = ((one.name, one.title, ", ".join(map(str, one.memory)), f"{one.teraflops:g}") for one in MACHINES.values())
    return list(aligned([head, *rows]))


def _words(one: Machine) -> str:
    """Return a pattern that matches this machine's name in the name that a driver gives."""
    name = one.title.removeprefix("NVIDIA ").removesuffix(" SXM").removeprefix("RTX ")
    return rf"\b{re.escape(name)}\b"
