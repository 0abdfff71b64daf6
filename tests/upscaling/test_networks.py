"""The networks of the ESRGAN family on both backends: spandrel's values, their formula in float64, and bands."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from support import upscalers
from support.upscalers import Tensors, as_safetensors, as_torch
from write_spandrel import CASES, DATA, picture, sampled

from qwenimg import backends
from qwenimg.common.base.errors import ModelError, NumericsError
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.upscaling.network_file import open_upscaler
from qwenimg.common.upscaling.upscaling import WHOLE, Upscaling, policy

BACKENDS = ("cpu", "mlx")
NEAR = 1e-5  # of values up to 5: float32 through at most 50 convolutions; measured 1.2e-6
# Measured 1.3e-3 and 1.1e-2 of values up to 2; one rounding is 2**-11 and 2**-8 of a value
HALF = {"fp16": 4e-3, "bf16": 4e-2}
IN_BANDS = 4e-6  # a CPU's library sums in another order at another size; MLX's bits are the same. Measured 1.6e-6

KINDS = {
    "x4": upscalers.rrdbnet,
    "x2 in patches": lambda: upscalers.rrdbnet(patch=2),
    "x8": lambda: upscalers.rrdbnet(enlarged=3, blocks=1),
    "compact x4": upscalers.srvgg,
    "compact x3": lambda: upscalers.srvgg(scale=3),
}


def opened(path: Path, backend: str, precision: str = "fp32") -> Upscaling:
    runtime = Runtime(backends.load(backend), policy(precision), lambda kind, text: None)
    return Upscaling(runtime, open_upscaler(path))


def values(upscaling: Upscaling, pixels: np.ndarray, rows: int = WHOLE) -> np.ndarray:
    """What the network returns [1, 3, H, W], without the rows and columns that fill up its patches."""
    height, width = pixels.shape[:2]
    network, _ = upscaling.residents.acquire(upscaling.stage(height, width))
    patch, scale = upscaling.upscaler.patch, upscaling.upscaler.scale
    filled = np.pad(pixels, ((0, -height % patch), (0, -width % patch), (0, 0)), mode="reflect")
    x = np.ascontiguousarray((filled / np.float32(255)).transpose(2, 0, 1)[None], np.float32)
    result: np.ndarray = network.upscale(x, rows)
    assert result.dtype == np.float32
    return result[:, :, : height * scale, : width * scale]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(9)
def test_values_are_spandrels(tmp_path: Path, backend: str, name: str) -> None:
    recorded = json.loads(DATA.read_text())[name]
    path = as_safetensors(tmp_path / "u.safetensors", CASES[name]())
    with closing(opened(path, backend)) as upscaling:
        result = values(upscaling, picture())
        assert upscaling.upscaler.scale == recorded["scale"] and list(result.shape) == recorded["shape"]
    apart = np.abs(np.array(sampled(result)) - recorded["values"]).max()
    print(f"{name} on {backend}: {apart:.1e} apart")
    assert apart < NEAR


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(1)
def test_values_are_the_formulas_and_those_of_bands(tmp_path: Path, backend: str, kind: str) -> None:
    tensors: Tensors = KINDS[kind]()
    pixels = np.random.default_rng(2).integers(0, 256, (43, 22, 3), dtype=np.uint8)
    with closing(opened(as_torch(tmp_path / "u.pth", tensors), backend)) as upscaling:
        whole = values(upscaling, pixels)
        banded = {rows: np.abs(values(upscaling, pixels, rows) - whole).max() for rows in (16, 7)}
    wanted = upscalers.formula(tensors, pixels)
    apart = np.abs(whole - wanted).max()
    print(f"{kind} on {backend}: {apart:.1e} from float64, bands {banded}, values up to {np.abs(wanted).max():.1f}")
    assert apart < NEAR and wanted.std() > 0.1
    assert max(banded.values()) <= (0 if backend == "mlx" else IN_BANDS)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("precision", HALF)
def test_half_precision_is_as_near_as_its_roundings(tmp_path: Path, backend: str, precision: str) -> None:
    for name, tensors in {"esrgan": upscalers.rrdbnet(), "compact": upscalers.srvgg()}.items():
        path = as_safetensors(tmp_path / f"{name}.safetensors", tensors)
        pixels = np.random.default_rng(3).integers(0, 256, (20, 24, 3), dtype=np.uint8)
        with closing(opened(path, backend, precision)) as upscaling:
            apart = np.abs(values(upscaling, pixels) - upscalers.formula(tensors, pixels)).max()
        print(f"{name} in {precision} on {backend}: {apart:.1e}")
        assert NEAR < apart < HALF[precision]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_picture_is_the_formulas_rounded_and_keeps_its_alpha(tmp_path: Path, backend: str) -> None:
    tensors = upscalers.srvgg(scale=2)
    pixels = np.random.default_rng(4).integers(0, 256, (9, 7, 4), dtype=np.uint8)
    with closing(opened(as_torch(tmp_path / "u.pth", tensors, "params", old=True), backend)) as upscaling:
        twice, four, same = (upscaling.enlarged(pixels, by) for by in (2, 4, 1))
    assert [one.shape for one in (twice, four, same)] == [(18, 14, 4), (36, 28, 4), (9, 7, 4)]

    def rounded(part: np.ndarray) -> np.ndarray:
        return (upscalers.formula(tensors, part)[0].clip(0, 1) * 255).round().transpose(1, 2, 0)

    grey = rounded(np.repeat(pixels[..., 3:], 3, axis=2)).mean(axis=2)
    assert np.abs(twice[..., :3] - rounded(pixels[..., :3])).max() <= 1
    assert np.abs(twice[..., 3] - grey).max() <= 1.5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(1)
def test_no_picture_of_values_that_are_not_finite(tmp_path: Path, backend: str) -> None:
    pixels = np.full((8, 8, 3), 200, np.uint8)
    hot = {name: values * np.float32(1e9 if "conv_hr" in name else 1) for name, values in upscalers.rrdbnet().items()}
    path = as_safetensors(tmp_path / "hot.safetensors", hot)
    with (
        closing(opened(path, backend, "fp16")) as upscaling,
        pytest.raises(ModelError, match="--precision bf16 or fp32"),
    ):
        upscaling.enlarged(pixels, 4)
    large = {name: values * np.float32(3e3 if "conv_up1" in name else 1) for name, values in hot.items()}
    large = {name: values * np.float32(1e-5 if "conv_hr" in name else 1) for name, values in large.items()}
    path = as_safetensors(tmp_path / "large.safetensors", large)
    with closing(opened(path, backend, "fp16")) as upscaling, pytest.raises(NumericsError) as caught:
        upscaling.enlarged(pixels, 4)
    assert "large.safetensors" in str(caught.value) and "no file was written" in str(caught.value)
    assert "--precision bf16 or fp32" in str(caught.value) and "conv_" in str(caught.value), caught.value
    with closing(opened(path, backend)) as upscaling:
        assert upscaling.enlarged(pixels, 4).shape == (32, 32, 3)
