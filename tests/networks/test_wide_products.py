"""16-bit layers on a CPU without instructions for them: summed in float32 and rounded once."""

import pytest
import torch

from qwenimg.backends.torch.ops import cpu, layers

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # of the result: half a unit in its last place, at most


@pytest.fixture
def without_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "multiplies", lambda dtype, device: dtype in (torch.float32, torch.float64))


def excess(found: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> float:
    """The largest error, as a multiple of one rounding of the exact result with float32's own error beside it."""
    assert found.dtype == dtype
    allowed = ROUNDING[dtype] * exact.abs() + 1e-5 * exact.abs().max()
    return float(((found.detach().double() - exact.detach()).abs() / allowed).max())


@pytest.mark.parametrize("dtype", ROUNDING)
def test_linear(without_instructions: None, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype):
    torch.manual_seed(0)
    monkeypatch.setattr(layers, "WIDE_VALUES", 300)  # several parts, the last one smaller
    layer = layers.Linear(37, 53).to(dtype)
    x = torch.randn(3, 5, 37).to(dtype)
    exact = x.double() @ layer.weight.double().T + layer.bias.double()
    worst = excess(layer(x), exact, dtype)
    print(f"{worst:.3f} of one rounding")
    assert worst <= 1


@pytest.mark.parametrize(("kernel", "stride", "side"), [(3, 1, 9), (3, 2, 9), (1, 1, 7)])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_convolution(without_instructions: None, dtype: torch.dtype, kernel: int, stride: int, side: int):
    torch.manual_seed(1)
    padding = kernel // 2 if stride == 1 else 0
    layer = layers.Conv2d(24, 40, kernel, stride=stride, padding=padding).to(dtype)
    x = torch.randn(2, 24, side, side).to(dtype)
    columns = torch.nn.functional.unfold(x.double(), kernel, padding=padding, stride=stride)
    product = layer.weight.double().flatten(1) @ columns + layer.bias.double()[:, None]
    found = layer(x)
    worst = excess(found, product.reshape(found.shape), dtype)
    print(f"{worst:.3f} of one rounding")
    assert worst <= 1


def test_large_images_are_not_widened(without_instructions: None, monkeypatch: pytest.MonkeyPatch):
    """Their float32 copies would take more memory than the run was checked for."""
    monkeypatch.setattr(layers, "WIDE_IMAGE", 100)
    seen = []
    plain = torch.nn.functional.conv2d

    def convolve(x, *rest, **options):
        seen.append(x.dtype)
        return plain(x, *rest, **options)

    monkeypatch.setattr(torch.nn.functional, "conv2d", convolve)
    layer = layers.Conv2d(2, 2, 3, padding=1).bfloat16()
    for side in (7, 8):
        layer(torch.randn(1, 2, side, side).bfloat16())
    assert seen == [torch.float32, torch.bfloat16]


def test_which_processors_multiply(monkeypatch: pytest.MonkeyPatch):
    """AVX-512 alone emulates bfloat16, whatever oneDNN says."""
    cpu._multiplies.cache_clear()
    monkeypatch.setattr(cpu.platform, "machine", lambda: "x86_64")
    for avx512, amx in ((False, False), (True, False), (False, True)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda avx512=avx512: avx512)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx)
        assert cpu.multiplies(torch.bfloat16, "cpu") == (avx512 or amx)
        cpu._multiplies.cache_clear()
    assert cpu.multiplies(torch.float32, "cpu") and cpu.multiplies(torch.bfloat16, "cuda")
    cpu._multiplies.cache_clear()
