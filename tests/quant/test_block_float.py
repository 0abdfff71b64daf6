"""mxfp4, mxfp8 and nvfp4 against MLX's own quantizing and decoding: bit for bit, and kept as they are in memory."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from qwenimg.backends.mlx.ops import quantized as on_mlx
from qwenimg.backends.mlx.ops.layers import Linear as MLXLinear
from qwenimg.backends.torch.ops import quantized as on_torch
from qwenimg.backends.torch.ops.layers import Linear
from qwenimg.common.base.errors import ModelError
from qwenimg.common.quant.bits import narrowed
from qwenimg.common.quant.block_float import MODES, BlockFloat, of_widths
from qwenimg.common.weights import keys, quantize
from qwenimg.common.weights.storage import Packed
from qwenimg.common.weights.values import read, read_quantized

CASES = [BlockFloat(mode) for mode in MODES]


def quantized(code: BlockFloat, rows: int = 7, width: int = 96) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(code.bits)
    given = rng.standard_normal((rows, width)) * np.exp(2 * rng.standard_normal((rows, 1)))
    codes, scales = mx.quantize(mx.array(given.astype(np.float32)), mode=code.mode)
    return np.array(codes), np.array(scales)


def every(code: BlockFloat) -> tuple[np.ndarray, np.ndarray]:
    """Every code under every scale that is a number."""
    raw = (np.arange(256) if code.bits == 8 else np.arange(32) * 17 % 256).astype(np.uint8)
    numbers = [s for s in range(256) if (s & 127 != 127 if code.mode == "nvfp4" else s != 255)]
    if code.bits == 8:
        raw[[0x7F, 0xFF]] = 0
    scales = np.array(numbers, np.uint8)[:, None].repeat(len(raw) * 8 // code.bits // code.group, 1)
    return raw[None].repeat(len(numbers), 0).view(np.uint32), scales


@pytest.mark.parametrize("code", CASES, ids=lambda code: code.mode)
@pytest.mark.parametrize("made", [quantized, every])
def test_values_are_those_of_mlx(code: BlockFloat, made: Any) -> None:
    codes, scales = made(code)
    ours = code.values([codes, scales])
    given = {"mode": code.mode, "group_size": code.group, "bits": code.bits}
    theirs = mx.dequantize(mx.array(codes), mx.array(scales), dtype=mx.float32, **given)
    assert np.array_equal(ours, np.array(theirs))
    assert np.array_equal(np.signbit(ours), np.signbit(np.array(theirs))), "negative zero too"
    rounded = mx.dequantize(mx.array(codes), mx.array(scales), dtype=mx.bfloat16, **given)
    assert np.array_equal(narrowed(ours, "bfloat16"), np.array(rounded.view(mx.uint16)))
    words = torch.from_numpy(codes).view(torch.int32)
    assert np.array_equal(on_torch.decode(words, torch.from_numpy(scales), None, code).numpy(), ours)
    assert np.array_equal(np.array(on_mlx.decode(mx.array(codes), mx.array(scales), code=code)), ours)
    width = ours.shape[1]
    assert of_widths(width, codes.shape[1], scales.shape[1]) == code
    assert of_widths(width, codes.shape[1], scales.shape[1] + 1) is None


@pytest.fixture(params=CASES, ids=lambda code: code.mode)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, BlockFloat, dict[str, np.ndarray]]:
    codes, scales = quantized(request.param)
    tensors = {"a.weight": codes, "a.scales": scales, "a.bias": np.ones(7, np.float32)}
    save_file(tensors, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors", request.param, tensors


def test_a_file_of_mlx_without_metadata(tmp_path: Path) -> None:
    """Which says null where safetensors' own writers say nothing."""
    mx.save_safetensors(str(tmp_path / "x.safetensors"), {"a.weight": mx.zeros((7, 96)), "a.bias": mx.zeros(7)})
    assert b'"__metadata__":null' in (tmp_path / "x.safetensors").read_bytes()
    keys.plan(tmp_path / "x.safetensors", "transformer", MANIFEST).close()


MANIFEST = {"a.weight": (7, 96), "a.bias": (7,)}


def test_they_stay_as_they_are_and_multiply(file: tuple[Path, BlockFloat, dict[str, np.ndarray]]) -> None:
    path, code, tensors = file
    plan = quantize.keep(keys.plan(path, "transformer", MANIFEST), frozenset())
    entry = plan.entries["a.weight"]
    assert entry.storage == Packed(code, "float32", scale=1)
    assert entry.nbytes == tensors["a.weight"].nbytes + tensors["a.scales"].nbytes
    kept = read_quantized(entry)
    assert np.array_equal(kept.codes, tensors["a.weight"]) and np.array_equal(kept.scales, tensors["a.scales"])
    weight = read(entry).astype(np.float64)
    x = np.random.default_rng(1).standard_normal((5, 96)).astype(np.float32)
    theirs = on_torch.QuantizedLinear(Linear(96, 7), code, torch.float32)
    theirs.bias = torch.nn.Parameter(torch.ones(7))
    theirs.put(torch.from_numpy(kept.codes).view(torch.int32), torch.from_numpy(kept.scales))
    ours = on_mlx.QuantizedLinear(MLXLinear(96, 7), code, mx.float32)
    ours.bias = mx.ones(7)
    ours.put(mx.array(kept.codes), mx.array(kept.scales))
    exact = x @ weight.T + 1
    for made in (theirs(torch.from_numpy(x)).detach().numpy(), np.array(ours(mx.array(x)))):
        error = np.abs(made - exact).max() / np.abs(exact).max()
        print(f"{code.mode}: {error:.1e} of float64")
        assert error < 96 * 2.0**-24
    theirs.drop()
    ours.drop()
    assert theirs.codes.is_meta and theirs.biases is None
    plan.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("a.scales"), "without scales"),
        (lambda t: t.update({"a.scales": t["a.scales"][:, :2].copy()}), "are no weight [7, 96] in mxfp4, mxfp8, nvfp4"),
        (lambda t: t.update({"a.scales": t["a.scales"].astype(np.float32)}), "scales F32"),
        (lambda t: t.update({"a.scales": t["a.scales"][:6].copy()}), "are no weight"),
        (lambda t: t.update({"a.weight": t["a.weight"][:, :11].copy()}), "are no weight"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, file: tuple[Path, BlockFloat, dict[str, np.ndarray]], change: Any, said: str
) -> None:
    tensors = dict(file[2])
    change(tensors)
    save_file(tensors, tmp_path / "y.safetensors")
    with pytest.raises(ModelError, match=r"y\.safetensors") as caught:
        keys.plan(tmp_path / "y.safetensors", "transformer", MANIFEST)
    assert said in str(caught.value)


def test_a_scale_that_is_no_number(tmp_path: Path, file: tuple[Path, BlockFloat, dict[str, np.ndarray]]) -> None:
    tensors = {name: value.copy() for name, value in file[2].items()}
    tensors["a.scales"][3, 1] = 255
    save_file(tensors, tmp_path / "z.safetensors")
    plan = quantize.keep(keys.plan(tmp_path / "z.safetensors", "transformer", MANIFEST), frozenset())
    with pytest.raises(ModelError, match=r"tensor a\.weight has \d+ non-finite"):
        read_quantized(plan.entries["a.weight"])
    plan.close()
