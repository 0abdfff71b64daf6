"""Group norms of images against float64, also of images that are nearly flat, and of images that come in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import mlx.core as mx
import numpy as np
import pytest
import torch
from support.relative import relative

from qwenimg.backends.mlx import ops as mlx_ops
from qwenimg.backends.mlx.ops import layers as mlx_layers
from qwenimg.backends.torch import ops
from qwenimg.common.numbers.moments import combined

GROUPS, CHANNELS, EPS = 5, 15, 1e-6
SHAPE = (2, 97, 130, CHANNELS)
RNG = np.random.default_rng(3)
WEIGHT, BIAS = RNG.normal(1, 0.3, CHANNELS).astype(np.float32), RNG.normal(0, 0.3, CHANNELS).astype(np.float32)
IMAGES = {
    "noise": RNG.normal(1, 1, SHAPE).astype(np.float32),
    "nearly flat": (3.7 + RNG.normal(0, 1e-3, SHAPE)).astype(np.float32),
}
# Shares of float64's length, of one norm. The nearly flat image keeps 12 of its 24 bits behind the mean: torch rounds
# the mean to float32, so it loses up to 3.7 * 2**-24 / 1e-3 = 2.2e-4. Ours subtracts what is left of it too.
LIMITS = {("noise", "mlx"): 3e-7, ("nearly flat", "mlx"): 3e-7, ("noise", "cpu"): 3e-7, ("nearly flat", "cpu"): 4e-4}


@pytest.fixture(autouse=True)
def on_a_cpu() -> Iterator[None]:
    """Compute there on a Mac too: the error of a GPU's kernel is not known."""
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(device)


def expected(x: np.ndarray) -> np.ndarray:
    """Return the norm of [B h w C] in float64."""
    groups = x.astype(np.float64).reshape(*x.shape[:3], GROUPS, -1)
    centered = groups - groups.mean((1, 2, 4), keepdims=True)
    normed = centered / np.sqrt(np.square(centered).mean((1, 2, 4), keepdims=True) + EPS)
    return normed.reshape(x.shape) * WEIGHT + BIAS


def mlx_norm() -> mlx_ops.GroupNorm:
    norm = mlx_ops.GroupNorm(GROUPS, CHANNELS, EPS)
    norm.weight, norm.bias = mx.array(WEIGHT), mx.array(BIAS)
    return norm


def torch_norm() -> ops.GroupNorm:
    norm = ops.GroupNorm(GROUPS, CHANNELS, EPS)
    norm.load_state_dict({"weight": torch.from_numpy(WEIGHT), "bias": torch.from_numpy(BIAS)})
    return norm


def in_torch(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x.transpose(0, 3, 1, 2).copy())


@torch.inference_mode()
def result(backend: str, x: np.ndarray) -> np.ndarray:
    if backend == "mlx":
        return np.array(mlx_norm()(mx.array(x)))
    return torch_norm()(in_torch(x)).permute(0, 2, 3, 1).numpy()


@pytest.mark.parametrize(("image", "backend"), LIMITS)
def test_a_norm_is_float64s(image: str, backend: str) -> None:
    error = relative(result(backend, IMAGES[image]), expected(IMAGES[image]))
    print(f"{image} on {backend}: {error:.1e}")
    assert error < LIMITS[image, backend]


def test_the_norm_of_a_gpu_is_the_same_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of noise, and with the digits that MLX's kernel leaves on a CPU."""
    monkeypatch.setattr(mlx_layers, "on_gpu", lambda: True)
    error = relative(result("mlx", IMAGES["noise"]), expected(IMAGES["noise"]))
    print(f"in one row: {error:.1e}")
    assert error < 1e-4


@pytest.mark.parametrize("image", IMAGES)
def test_a_norm_of_parts_is_float64s(image: str) -> None:
    """MLX's, of an image in two parts: what a VAE in tiles uses."""
    x, norm = IMAGES[image], mlx_norm()
    parts = [mx.array(x[:, :40]), mx.array(x[:, 40:])]
    by = norm.by(combined([norm.moments(part) for part in parts]))
    error = relative(np.concatenate([np.array(by(part)) for part in parts], axis=1), expected(x))
    print(f"{image}: {error:.1e}")
    assert error < 3e-7


def in_parts(backend: str, x: np.ndarray) -> np.ndarray:
    """The norm by the moments of the two halves of an image, as a VAE in bands takes it."""
    halves = [x[:, :40], x[:, 40:]]
    if backend == "mlx":
        norm, parts = mlx_norm(), [mx.array(half) for half in halves]
        return np.concatenate(
            [np.array(part) for part in map(norm.by(combined([*map(norm.moments, parts)])), parts)], 1
        )
    other, tensors = torch_norm(), [in_torch(half) for half in halves]
    by = other.by(combined([*map(other.moments, tensors)]))
    return np.concatenate([by(part).permute(0, 2, 3, 1).numpy() for part in tensors], axis=1)


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.parametrize("way", [result, in_parts])
@torch.inference_mode()
def test_values_whose_squares_float32_does_not_hold_are_refused_alike(
    way: Callable[[str, np.ndarray], np.ndarray], backend: str
) -> None:
    """Below its largest number the sum of a group's squares gives float64's norm, above it NaN, and never the biases
    alone, which look like a picture."""
    x = IMAGES["noise"][:1]
    centered = x.astype(np.float64).reshape(*x.shape[:3], GROUPS, -1)
    centered -= centered.mean((1, 2, 4), keepdims=True)
    edge = np.sqrt(np.finfo(np.float32).max / np.square(centered).sum((1, 2, 4)).max())
    for share in (0.5, 0.9, 1.1, 2.0, 1e2, 1e4, 1e8, 1e15):
        large = (x * (edge * share)).astype(np.float32)
        made = way(backend, large)
        error = relative(made, expected(large))
        print(f"{way.__name__} on {backend}: {share:g} of {edge:.1e}: {error:.1e}")
        assert error < 1e-6 if share < 1 else np.isnan(made).any()


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_a_length_that_float32_does_not_hold(backend: str) -> None:
    x = np.full((1, 4, 4, CHANNELS), 1.0, np.float32)
    edge = np.sqrt(np.finfo(np.float32).max / CHANNELS)
    for share in (0.9, 1.1, 1e10):
        if backend == "mlx":
            norm = mlx_ops.ChannelNorm(CHANNELS)
            norm.gamma = mx.array(WEIGHT)
            made = np.array(norm(mx.array((x * (edge * share)).astype(np.float32))))
        else:
            other = ops.ChannelNorm(CHANNELS)
            other.load_state_dict({"gamma": torch.from_numpy(WEIGHT)})
            made = other(in_torch((x * (edge * share)).astype(np.float32))).detach().permute(0, 2, 3, 1).numpy()
        assert np.allclose(made[0, 0, 0], WEIGHT, rtol=1e-5) if share < 1 else np.isnan(made).all()
