"""8-bit floats against torch's own, code by code, and through a plan on both backends."""

import mlx.core as mx
import numpy as np
import pytest
import safetensors.torch
import torch

from qwenimg.backends.mlx import load as mlx_load
from qwenimg.backends.torch import load as torch_load
from qwenimg.common.formats.safetensors import read_header
from qwenimg.common.quant.eight_bits import EightBits, table
from qwenimg.common.weights.keys import Place, Rows, plan, plan_places
from qwenimg.common.weights.plan import stored_uses
from qwenimg.common.weights.values import read

DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


@pytest.mark.parametrize(("format", "dtype"), [*DTYPES.items(), ("I8", torch.int8)])
def test_every_code_is_torchs(format, dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(dtype).float().numpy()
    assert np.array_equal(table(format), expected, equal_nan=True)
    numbers = ~np.isnan(expected)
    assert np.array_equal(np.signbit(table(format))[numbers], np.signbit(expected)[numbers]), "the zeros' signs"


@pytest.mark.parametrize("scale", [np.float32(0.37), np.linspace(0.1, 3, 4, dtype=np.float32)[:, None]])
def test_scales(scale):
    codes = np.random.default_rng(3).integers(0, 127, (4, 6), dtype=np.uint8)
    made = EightBits("F8_E4M3").values([codes, np.asarray(scale)])
    assert made.dtype == np.float32
    assert np.array_equal(made, torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy() * scale)


@pytest.mark.parametrize("format", DTYPES)
def test_a_file_of_them_loads_the_same_on_both_backends(tmp_path, format):
    weights = {
        "proj.weight": (torch.randn(6, 10, generator=torch.Generator().manual_seed(1))).to(DTYPES[format]),
        "conv.weight": torch.randn(4, 3, 3, 3).to(DTYPES[format]),
        "proj.bias": torch.randn(6).half(),
    }
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file(weights, path)
    manifest = {name: tuple(value.shape) for name, value in weights.items()}
    made = plan(path, "transformer", manifest)
    for name, entry in made.entries.items():
        expected = weights[name].float()
        assert torch.equal(torch.from_numpy(np.asarray(read(entry), np.float32)), expected), name
        on_torch = torch_load.tensor(entry, torch.device("cpu"))
        on_mlx = mlx_load.tensor(entry)
        on_mlx = on_mlx.transpose(0, 3, 1, 2) if on_mlx.ndim == 4 else on_mlx
        assert torch.equal(on_torch.float(), expected), name
        assert np.array_equal(np.array(on_mlx.astype(mx.float32)), expected.numpy()), name
    made.close()


def test_a_range_of_rows(tmp_path):
    joined = torch.randn(6, 5).to(torch.float8_e4m3fn)
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file({"qkv": joined}, path)
    header = read_header(path)
    places = {name: Place("qkv", Rows(part, part + 1, 3)) for part, name in enumerate("qkv")}
    manifest = dict.fromkeys("qkv", (2, 5))
    made = plan_places(header, "text", places, manifest, stored_uses(manifest))
    for part, name in enumerate("qkv"):
        assert np.array_equal(read(made.entries[name]), joined[2 * part : 2 * part + 2].float().numpy()), name
    made.close()
