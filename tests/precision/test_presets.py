"""Presets: what `auto` is on a list of chips and cards, and what each preset is for each kind of denoiser."""

from __future__ import annotations

import pytest
from support.policies import MMDIT, UNET, parse

from qwenimg.common.base.errors import UsageError
from qwenimg.common.precision import devices, presets
from qwenimg.common.precision.devices import Device
from qwenimg.common.precision.precision import BYTES, DenoiserKind, Precision
from qwenimg.common.precision.presets import PRESETS, Choice, choose

GB = 10**9
PUBLISHED = {"MMDIT": 20 * GB, "UNET": 3 * GB}  # parameters of the denoiser

APPLE = {
    "Apple M1": "fp16",
    "Apple M1 Ultra": "fp16",
    "Apple M2 Pro": "fp16",
    "Apple A14": "fp16",
    "Apple M3": "bf16",
    "Apple M3 Max": "bf16",
    "Apple M4 Pro": "bf16",
    "Apple M5": "bf16",
    "Apple M10": "bf16",
    "Apple A17 Pro": "bf16",
}
NVIDIA = {
    ("NVIDIA GeForce GTX 980", (5, 2)): "none",
    ("Tesla P100-PCIE-16GB", (6, 0)): "fp16",
    ("NVIDIA GeForce GTX 1080 Ti", (6, 1)): "none",
    ("Tesla V100-SXM2-32GB", (7, 0)): "fp16",
    ("Tesla T4", (7, 5)): "fp16",
    ("NVIDIA GeForce RTX 2080 Ti", (7, 5)): "fp16",
    ("NVIDIA GeForce GTX 1660 SUPER", (7, 5)): "none",
    ("NVIDIA GeForce GTX 1650", (7, 5)): "none",
    ("NVIDIA T1000 8GB", (7, 5)): "none",
    ("NVIDIA A100-SXM4-80GB", (8, 0)): "bf16",
    ("NVIDIA GeForce RTX 3060", (8, 6)): "bf16",
    ("NVIDIA GeForce RTX 4090", (8, 9)): "bf16",
    ("NVIDIA L4", (8, 9)): "bf16",
    ("NVIDIA H100 80GB HBM3", (9, 0)): "bf16",
    ("NVIDIA H200", (9, 0)): "bf16",
    ("NVIDIA B200", (10, 0)): "bf16",
    ("NVIDIA GeForce RTX 5090", (12, 0)): "bf16",
}
CHIPS: list[tuple[Device, str]] = [
    *((devices.apple(name), best) for name, best in APPLE.items()),
    *((devices.nvidia(*card), best) for card, best in NVIDIA.items()),
]
CPUS = {
    True: devices.cpu("CPU (torch, 8 threads)", bf16=True),
    False: devices.cpu("CPU (torch, 8 threads)", bf16=False),
}


def weights(parameters: int, kind: DenoiserKind):
    def size(policy: Precision) -> int:
        return parameters * BYTES[policy.compute_dtype("transformer")]

    return size


def auto(device: Device, kind: DenoiserKind, parameters: int, free: int = 10**12, precision: str = "auto") -> Choice:
    return choose("auto", precision, kind, device, weights(parameters, kind), free)


@pytest.mark.parametrize(("device", "best"), CHIPS, ids=lambda value: getattr(value, "name", value))
def test_auto_on_a_list_of_chips(device: Device, best: str) -> None:
    """bf16 where the hardware has it, float16 before; Stable Diffusion in the dtype that it is published in."""
    qwen, sd = (auto(device, kind, 3 * GB) for kind in (MMDIT, UNET))
    print(f"{device.name}: {qwen.precision}, {sd.precision}: {qwen.reason}")
    assert qwen.precision == {"bf16": "bf16", "fp16": MMDIT.prefers[-1], "none": MMDIT.without_units}[best]
    assert sd.precision == {"bf16": "fp16", "fp16": "fp16", "none": UNET.without_units}[best]
    for choice, kind in ((qwen, MMDIT), (sd, UNET)):
        assert device.name in choice.reason and choice.preset == "auto" and not choice.wishes.tiled
        parse(choice.precision, on_gpu=False, kind=kind)


@pytest.mark.parametrize("kind", [MMDIT, UNET], ids=["mmdit", "unet"])
def test_auto_on_a_cpu(kind: DenoiserKind) -> None:
    assert auto(CPUS[True], kind, 3 * GB).precision == "bf16"
    assert auto(CPUS[False], kind, 3 * GB).precision == "fp32"
    small = auto(CPUS[True], kind, 10**6)
    assert small.precision == "fp32" and "4.0 MB" in small.reason
    emulated = devices.cpu("CPU (mlx)", bf16=False, emulates=True)
    assert auto(emulated, kind, 3 * GB).precision == "fp32"
    assert auto(emulated, kind, 3 * GB, free=1).precision == "fp32", "always, for MLX on a CPU"


def test_memory_decides_too() -> None:
    """Where float32 does not fit and 16 bit takes less, it is 16 bit, with the figures."""
    choice = auto(CPUS[False], MMDIT, 20 * GB, free=48 * GB)
    assert choice.precision == MMDIT.presets["memory"]
    assert "80.0 GB" in choice.reason and "48.0 GB" in choice.reason
    assert auto(CPUS[False], MMDIT, 20 * GB, free=81 * GB).precision == "fp32"
    full = auto(devices.nvidia("NVIDIA L4", (8, 9)), MMDIT, 20 * GB, free=24 * GB)
    assert full.precision == "bf16", "nothing takes less; that it does not fit is said later"


def test_precision_overrides_the_preset_and_goes_on_from_auto() -> None:
    device = devices.apple("Apple M4")
    chosen = choose("quality", "bf16-plain", MMDIT, device, weights(1, MMDIT), 1)
    assert (chosen.precision, chosen.reason, chosen.preset) == ("bf16-plain", "", "quality")
    assert auto(device, MMDIT, GB, precision="bf16,vae=bf16").recorded() == {}
    overridden = auto(device, MMDIT, GB, precision="auto,vae=bf16")
    assert overridden.precision == "bf16,vae=bf16" and overridden.recorded().keys() == {"preset", "reason"}
    assert choose("quality", "auto,vae=bf16", MMDIT, device, weights(1, MMDIT), 1).precision == "fp32,vae=bf16"


@pytest.mark.parametrize("kind", [MMDIT, UNET], ids=["mmdit", "unet"])
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_policy_of_every_kind(name: str, kind: DenoiserKind) -> None:
    choice = choose(name, "auto", kind, devices.apple("Apple M1"), weights(1, kind), 1)
    assert parse(choice.precision, on_gpu=False, kind=kind).name == kind.presets[name]
    assert choice.wishes.tiled == (name == "memory") and choice.reason == "" and choice.recorded() == {"preset": name}


@pytest.mark.parametrize("name", ["", "Quality ", "best", "\x1b[31m", "fp32"])
def test_another_preset_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="quality, balanced, fast, memory, auto") as caught:
        presets.check(name)
    assert str(caught.value).isprintable()
