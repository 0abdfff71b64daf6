"""Layers that round their input to 8 bits: against float64 by the definition, and whole numbers bit for bit on both
backends, by the framework's product and emulated."""

from __future__ import annotations

import os
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
import torch
from support import comfy_files, in_8_bits

from qwenimg.backends.torch import compile
from qwenimg.backends.torch.ops import Linear, quantized
from qwenimg.backends.torch.ops.cpu import multiplies, multiplies_int8
from qwenimg.backends.torch.ops.quantized import QuantizedLinear, linear_in_8_bits, padded, rounded
from qwenimg.common.quant.rotated import RotatedInt8
from qwenimg.common.quant.rotated import rotated as turned

SHAPES = ((33, 64, 24), (5, 300, 7), (3, 4096, 40), (2, 12288, 8))  # rows, inputs, outputs
DTYPES = ("float32", "bfloat16", "float16")


def codes_of(rng: np.random.Generator, rows: int, width: int) -> np.ndarray:
    codes = rng.integers(-127, 128, (rows, width), np.int8)
    codes[0] = 127  # the largest sum
    return codes


@pytest.fixture(params=["framework", "emulated"])
def product(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The framework's product, where this CPU has instructions for it, and the emulation."""
    if request.param == "emulated":
        monkeypatch.setattr(quantized, "multiplies_int8", lambda device: False)
    elif not multiplies_int8("cpu"):
        pytest.skip("this CPU has no VNNI")
    return str(request.param)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_that_of_float64(dtype: str) -> None:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((200, 257)) * rng.lognormal(0, 3, (200, 1))).to(getattr(torch, dtype))
    x[3, 5] = 300
    whole, scales = rounded(x)
    expected, exact = in_8_bits.rounded(x.double().numpy())
    off = np.abs(x.double().numpy() / exact - whole.numpy()).max()
    other = (whole.numpy() != expected).mean()
    print(f"{dtype}: at most {off:.7f} from the whole number, {other:.1e} are others than in float64")
    halves = 1e-6 if dtype == "float32" else 2e-3  # values of 16 bits are often a half, also where a scale is rounded
    assert whole.dtype == torch.int8 and scales.dtype == torch.float32 and off < 0.5 + 2e-5 and other < halves
    assert np.abs(scales.numpy() / exact - 1).max() < 1e-7 and (np.abs(whole.numpy()).max(1) == 127).all()


def test_half_goes_to_even_and_zeros_stay_zeros() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5], [0.0, -0.0, 0, 0, 0, 0, 0]])
    whole, scales = rounded(x)
    assert whole.tolist() == [[127, 0, 2, 2, 0, -2, -2], [0] * 7] and scales.flatten().tolist() == [1, 0]
    tiny = torch.full((1, 4), 2.0**-149) * torch.tensor([[190.0, -190, 1, 0]])  # whose scale rounds to one such unit
    whole, _ = rounded(tiny)
    assert whole.tolist() == [[127, -127, 1, 0]], "cut off, and not around to the other sign"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_that_is_not_finite_is_in_its_whole_row(value: float, dtype: str, product: str) -> None:
    x = torch.ones(2, 64, dtype=getattr(torch, dtype))
    x[1, 7] = value
    y = linear_in_8_bits(x, torch.ones(8, 64, dtype=torch.int8), torch.ones(8, 1), None)
    assert torch.isfinite(y[0]).all() and not torch.isfinite(y[1]).any()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_are_those_of_whole_numbers_on_both_backends(shape: tuple[int, int, int], product: str) -> None:
    rows, inputs, outputs = shape
    rng = np.random.default_rng(inputs)
    x, codes = rng.standard_normal((rows, inputs)).astype(np.float32), codes_of(rng, outputs, inputs)
    x[0] = 3  # all 127: of 12288 the sum is 12288 * 127^2, beyond the 24 bits of float32
    scales = rng.uniform(1e-3, 1, (outputs, 1)).astype(np.float32)
    whole, steps = rounded(torch.from_numpy(x))
    exact = whole.numpy().astype(np.int64) @ codes.astype(np.int64).T
    on_torch, on_mlx = torch.from_numpy(codes), mx.array(codes)
    mlx_whole, mlx_steps = in_8_bits.mlx_rounded(mx.array(x))
    assert np.array_equal(np.array(mlx_whole), whole.numpy()) and np.array_equal(np.array(mlx_steps), steps.numpy())
    assert np.array_equal(quantized._sums(whole, on_torch).numpy(), exact)
    assert np.array_equal(np.array(in_8_bits.mlx_sums(mlx_whole, on_mlx)), exact)
    made = linear_in_8_bits(torch.from_numpy(x), on_torch, torch.from_numpy(scales), None).numpy()
    other = np.array(in_8_bits.mlx_linear(mlx_whole, mlx_steps, on_mlx, mx.array(scales)))
    wide = exact * steps.double().numpy() * scales.T.astype(np.float64)
    error = np.abs(made - wide).max() / np.abs(wide).max()
    print(f"{shape} {product}: {error:.1e} of the largest; MLX {np.abs(made - other).max():.1e} away")
    assert (np.abs(made - other) <= np.spacing(np.abs(made))).all() and error < 2e-7


@pytest.mark.parametrize("isa", ["AVX2", "AVX512_CORE", "DEFAULT"])
def test_a_processor_that_loses_sums_is_noticed(isa: str) -> None:
    """oneDNN without VNNI adds pairs of products in 16 bit, on a processor that has it too where a user or a virtual
    machine keeps it from that."""
    code = """
import torch
from qwenimg.backends.torch.ops.cpu import multiplies_int8
x, y = (torch.full((33, 300), n, dtype=torch.int8) for n in (127, -127))
print(multiplies_int8("cpu"), int(torch._int_mm(x, y.t())[0, 0]) == -300 * 127**2)
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"ONEDNN_MAX_CPU_ISA": isa}, capture_output=True, text=True
    )
    print(isa, ran.stdout)
    taken, right = ran.stdout.split()
    assert right == "True" or taken == "False", ran.stderr


@pytest.mark.parametrize("shape", [(1, 4, 1), (16, 20, 3), (17, 8, 8), (40, 64, 33)], ids=str)
def test_what_is_padded_for_a_card_has_the_same_sums(shape: tuple[int, int, int]) -> None:
    """More than 16 rows, inputs and outputs in multiples of 8: what torch's `_int_mm` takes on CUDA."""
    rows, inputs, outputs = shape
    rng = np.random.default_rng(1)
    x, codes = (torch.from_numpy(codes_of(rng, count, inputs)) for count in (rows, outputs))
    wider, more = padded(x, codes)
    assert len(wider) > 16 and wider.shape[1] == more.shape[1] and not (more.shape[0] % 8 or more.shape[1] % 8)
    whole = wider.int() @ more.int().T
    assert torch.equal(whole[:rows, :outputs], x.int() @ codes.int().T)


def layer_of(
    weight: np.ndarray, group: int, dtype: str, lora: bool, rng: np.random.Generator
) -> tuple[QuantizedLinear, np.ndarray, np.ndarray, np.ndarray]:
    """A layer that rounds, with a bias, and what its weight, bias and LoRA are in float64."""
    code, kind = RotatedInt8(group), getattr(torch, dtype)
    outputs, inputs = weight.shape
    coded = code.encode(weight)
    layer = QuantizedLinear(Linear(inputs, outputs), code, kind)
    layer.put(torch.from_numpy(coded.codes).view(torch.int32), torch.from_numpy(coded.scales))
    bias = torch.from_numpy(rng.standard_normal(outputs)).to(kind)
    layer.bias, layer.int8 = torch.nn.Parameter(bias, requires_grad=False), True
    down, up = (torch.from_numpy(rng.standard_normal(size) * 0.1).to(kind) for size in ((4, inputs), (outputs, 4)))
    if lora:
        layer.branch = (torch.from_numpy(turned(down.float().numpy(), group)).to(kind), up)
    change = up.double() @ down.double() * lora
    values = coded.codes.view("i1") * coded.scales.astype(np.float64)
    return layer, values, bias.double().numpy(), change.numpy()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("group", [4, 64, 256])
def test_a_layer_is_what_the_definition_says(group: int, lora: bool, dtype: str, product: str) -> None:
    """Rotated, rounded, multiplied and scaled back in float64; and as far from the product without rounding as the
    roundings make it."""
    rng = np.random.default_rng(group)
    layer, values, bias, change = layer_of(rng.standard_normal((40, 512)), group, dtype, lora, rng)
    x = torch.from_numpy(rng.standard_normal((3, 7, 512))).to(getattr(torch, dtype))
    rows = x.double().numpy().reshape(-1, 512)
    straight = rows @ comfy_files.rotation(512, group)
    if dtype == "bfloat16" and multiplies(torch.bfloat16, "cpu"):
        straight = torch.from_numpy(straight).bfloat16().double().numpy()  # rounded once, as it is rotated
    whole, steps = in_8_bits.rounded(straight)
    exact = (whole * steps) @ values.T + bias + rows @ change.T
    unrounded = straight @ values.T + bias + rows @ change.T
    with torch.inference_mode():
        made = layer(x).double().numpy().reshape(-1, 40)
    error, lost = (np.linalg.norm(made - other) / np.linalg.norm(other) for other in (exact, unrounded))
    print(f"groups of {group}, {dtype}, {product}: {error:.1e} from the definition, {lost:.4f} from no rounding")
    assert error < (1e-5 if dtype == "float32" else 5e-3) and 5e-3 < lost < 1.5e-2 and layer(x).dtype == x.dtype


def test_many_rows_are_multiplied_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    layer, *_ = layer_of(rng.standard_normal((24, 64)), 16, "float32", False, rng)
    x = torch.from_numpy(rng.standard_normal((2, 11, 64))).float()
    whole = layer(x)
    monkeypatch.setattr(quantized, "ROWS", 5)
    assert torch.equal(layer(x), whole)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_it_compiles_whole_and_for_any_number_of_rows(backend: str, product: str) -> None:
    rng = np.random.default_rng(4)
    layer, *_ = layer_of(rng.standard_normal((24, 64)), 16, "float32", True, rng)
    torch._dynamo.reset()
    compile.mark_constants()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    with torch.inference_mode():
        for rows in (33, 40, 2100):
            x = torch.from_numpy(rng.standard_normal((1, rows, 64))).float()
            error = ((compiled(x) - layer(x)).norm() / layer(x).norm()).item()
            print(f"{rows} rows, {product}: {error:.1e}")
            assert error < 2e-3, "a rounding that falls to the other side"
    torch._dynamo.reset()
