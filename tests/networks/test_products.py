"""Products that take over what is next to them: what they give is as near to float64 as the plain operations are, they
do so only where nothing else is asked of the layer, and a compiler leaves them as they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import comfy_files

from qwenimg.backends.mlx import ops as mlx_ops
from qwenimg.backends.mlx.ops import products as mlx_products
from qwenimg.backends.mlx.ops.quantized import QuantizedLinear as MlxQuantized
from qwenimg.backends.torch import compile as compiling_torch
from qwenimg.backends.torch import ops
from qwenimg.backends.torch.networks.denoisers.unet import ResidualBlock
from qwenimg.backends.torch.ops import images, layers, products, whole
from qwenimg.backends.torch.ops.cpu import laid_out, multiplies
from qwenimg.backends.torch.ops.products import _can_fuse
from qwenimg.backends.torch.ops.quantized import QuantizedLinear
from qwenimg.common.networks.denoisers.unet import UNetConfig
from qwenimg.common.quant.affine import BITS4, Affine, encode
from qwenimg.common.runtime.observers import observe

# The largest share of float64's length that 16 bit may be off: one rounding of the sum, one of the stream's bias.
LIMITS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


@pytest.fixture
def on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of this CPU taken for a card's, and of MLX for a GPU's."""
    monkeypatch.setattr(products, "_can_fuse", lambda layer: layer.plain and layer.dtype.itemsize == 2)
    monkeypatch.setattr(mlx_products, "on_gpu", lambda: True)


def given(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def on_torch(made: Any, dtype: str, inputs: int, outputs: int) -> Any:
    for name, value in weights(made.weight.shape, inputs, outputs):
        value = torch.nn.Parameter(torch.from_numpy(value).to(ops.DTYPES[dtype]), requires_grad=False)
        setattr(made, name, value)
    return made


def on_mlx(made: Any, dtype: str, inputs: int, outputs: int) -> Any:
    for name, value in weights(made.weight.shape, inputs, outputs):
        setattr(made, name, mx.array(value).astype(mlx_ops.DTYPES[dtype]))
    return made


def weights(shape: Any, inputs: int, outputs: int) -> Iterator[tuple[str, np.ndarray]]:
    yield "weight", given(outputs, inputs, seed=1).reshape(tuple(shape)) / inputs**0.5
    yield "bias", given(outputs, seed=2)


def exact(x: torch.Tensor, layer: torch.nn.Module, update: torch.Tensor) -> torch.Tensor:
    weight = layer.weight.double().flatten(1)
    return x.double() + F.linear(update.double(), weight, layer.bias.double())


def error(made: torch.Tensor, right: torch.Tensor) -> float:
    return float((made.double() - right).norm() / right.norm())


@pytest.mark.parametrize("dtype", LIMITS)
@torch.inference_mode()
def test_a_sum_with_the_stream(dtype: str, on_a_card: None) -> None:
    layer = on_torch(ops.Linear(24, 40), dtype, 24, 40)
    x, update = (torch.from_numpy(given(2, 7, n, seed=n)).to(ops.DTYPES[dtype]) for n in (40, 24))
    before = x.clone()
    made, right = ops.add_linear(x, layer, update), exact(x, layer, update)
    plain = ops.add(x, layer(update))
    print(f"{dtype}: {error(made, right):.1e}, by plain operations {error(plain, right):.1e}")
    assert made.dtype == x.dtype and made.is_contiguous() and torch.equal(x, before), (
        "the stream that came is as it was"
    )
    assert error(made, right) < LIMITS[dtype] and not torch.equal(made, before)


@pytest.mark.parametrize("dtype", LIMITS)
@torch.inference_mode()
def test_a_shortcut(dtype: str, on_a_card: None) -> None:
    """Images with channels last, as they are on a card, and images that are not."""
    layer = on_torch(ops.Conv2d(24, 40, 1), dtype, 24, 40)
    update, x = (torch.from_numpy(given(2, n, 3, 5, seed=n)).to(ops.DTYPES[dtype]) for n in (40, 24))
    right = images.image(exact(images.tokens(update), layer, images.tokens(x)), update)
    for order in (torch.channels_last, torch.contiguous_format):
        there = update.contiguous(memory_format=order)
        made = ops.add_shortcut(there, layer, x.contiguous(memory_format=order))
        plain = ops.add(layer(x), update)
        print(f"{dtype}: {error(made, right):.1e}, by plain operations {error(plain, right):.1e}")
        assert made.shape == update.shape and made.dtype == update.dtype and torch.equal(there, update)
        assert made.is_contiguous(memory_format=torch.channels_last) and error(made, right) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", LIMITS)
@torch.inference_mode()
def test_a_layer_that_rotates_its_input(dtype: str, on_a_card: None) -> None:
    """The same products by codes of rotated rows, against float64 with the matrix of the rotation."""
    linear, kept = on_torch(ops.Linear(96, 40), dtype, 96, 40), ops.DTYPES[dtype]
    coded = encode([linear.weight.float().numpy()], (40, 96), BITS4)
    weight = Affine(4, 32).values(coded.arrays).astype(np.float64) @ comfy_files.rotation(96, BITS4.rotation)
    layer = QuantizedLinear(linear, BITS4, kept)
    words, *ends = map(torch.from_numpy, coded.arrays)
    layer.put(words.view(torch.int32), *ends)
    x, update = (torch.from_numpy(given(2, 7, n, seed=n)).to(kept) for n in (40, 96))
    right = F.linear(update.double(), torch.from_numpy(weight), linear.bias.double())
    made = {
        "sum": (ops.add_linear(x, layer, update), x.double() + right),
        "gelu": (ops.linear_gelu(layer, update), F.gelu(right, approximate="tanh")),
        "joined": (ops.joined_linears(layer, update, layer, update), torch.cat((right, right), 1)),
    }
    for name, (found, expected) in made.items():
        print(f"{dtype}, {name}: {error(found, expected):.1e}")
        assert found.dtype == kept and error(found, expected) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", LIMITS)
def test_the_same_on_mlx(dtype: str, on_a_card: None) -> None:
    linear, conv = on_mlx(mlx_ops.Linear(24, 40), dtype, 24, 40), on_mlx(mlx_ops.Conv2d(24, 40, 1), dtype, 24, 40)
    x, update = (mx.array(given(2, 7, n, seed=n)).astype(mlx_ops.DTYPES[dtype]) for n in (40, 24))
    wide, image = x.reshape(2, 7, 1, 40), update.reshape(2, 7, 1, 24)
    right = exact(numbers(x), on_torch(ops.Linear(24, 40), dtype, 24, 40), numbers(update)).float()
    for made in (mlx_ops.add_linear(x, linear, update), mlx_ops.add_shortcut(wide, conv, image).reshape(x.shape)):
        print(f"{dtype}: {error(numbers(made), right.double()):.1e}")
        assert made.dtype == x.dtype and error(numbers(made), right.double()) < LIMITS[dtype]


def numbers(x: mx.array) -> torch.Tensor:
    return torch.from_numpy(np.array(x.astype(mx.float32)))


@torch.inference_mode()
def test_plain_layers_on_a_card_alone() -> None:
    """Whether a layer's product takes over what is next to it: not on a CPU, not in float32, not with a LoRA beside it,
    not where its own result is looked at, not for a larger kernel; and not in a training."""
    low = on_torch(ops.Linear(8, 8), "bfloat16", 8, 8)
    assert not _can_fuse(low)
    low.to("meta")
    assert _can_fuse(low) and not _can_fuse(ops.Linear(8, 8).to("meta"))
    with observe(lambda *_: None):
        assert not _can_fuse(low)
    with torch.inference_mode(False), torch.enable_grad():
        assert not _can_fuse(low)
    low.branch = (torch.zeros(2, 8), torch.zeros(8, 2))
    assert not _can_fuse(low)
    assert not _can_fuse(ops.Linear(8, 8, bias=False).to("meta", torch.bfloat16))
    assert _can_fuse(ops.Conv2d(8, 8, 1).to("meta", torch.bfloat16))
    assert not _can_fuse(ops.Conv2d(8, 8, 3, padding=1).to("meta", torch.bfloat16))


def test_plain_layers_on_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    low = on_mlx(mlx_ops.Linear(32, 32), "bfloat16", 32, 32)
    assert not mlx_products._can_fuse(low)
    monkeypatch.setattr(mlx_products, "on_gpu", lambda: True)
    assert mlx_products._can_fuse(low) and not mlx_products._can_fuse(mlx_ops.Linear(8, 8))
    assert not mlx_products._can_fuse(MlxQuantized(low, Affine(4, 32), mx.bfloat16)), "its kernel multiplies codes"
    with observe(lambda *_: None):
        assert not mlx_products._can_fuse(low)
    low.branch = (mx.zeros((2, 32)), mx.zeros((32, 2)))
    assert not mlx_products._can_fuse(low)


@torch.inference_mode()
def test_a_probe_sees_the_layers(on_a_card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is inside a product cannot be seen: with an observer everything is done apart."""
    monkeypatch.setattr(products, "_can_fuse", _can_fuse)
    layer, seen = on_torch(ops.Linear(8, 16), "bfloat16", 8, 16), list[str]()
    with observe(lambda operation, path, result: seen.append(operation)):
        ops.add_linear(torch.ones(1, 2, 16), layer, torch.ones(1, 2, 8))
        ops.linear_geglu(layer, torch.ones(1, 2, 8))
    assert seen == ["linear", "add", "linear", "geglu"]


# Compiled


class Block(torch.nn.Module):
    """A norm, a product and the stream twice, and a shortcut: what a UNet's blocks are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = ops.LayerNorm(32, 1e-5)
        self.gated = ops.Linear(32, 96)
        self.out = ops.Linear(48, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = ops.add_linear(x, self.out, ops.linear_geglu(self.gated, self.norm(x)))
        return x


def random(made: torch.nn.Module) -> torch.nn.Module:
    """With weights in bfloat16, those of convolutions with channels last."""
    torch.manual_seed(0)
    for name, parameter in list(made.named_parameters()):
        path, _, leaf = name.rpartition(".")
        value = laid_out((torch.randn(parameter.shape) * 0.2).bfloat16(), "cuda")
        setattr(made.get_submodule(path), leaf, torch.nn.Parameter(value, requires_grad=False))
    return made


@pytest.fixture
def compiles(on_a_card: None) -> Iterator[None]:
    assert whole.accumulate, "importing it makes it known"
    compiling_torch.mark_constants()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@torch.inference_mode()
@pytest.mark.sample(0)
def test_a_compiler_calls_them_whole(compiles: None) -> None:
    """Traced without a break, and the sum is one operation of ours, added in place."""
    made, x = random(Block()), torch.randn(2, 5, 32).bfloat16()
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(made, fullgraph=True, dynamic=True, backend=keep)(x)
    (graph,) = graphs
    called = [str(node.target) for node in graph.graph.nodes if "qwenimg" in str(node.target)]
    print(called, error(compiled, made(x).double()))
    assert called == ["qwenimg.accumulate"] * 2
    assert error(compiled, made(x).double()) < LIMITS["bfloat16"]


@pytest.mark.slow
@torch.inference_mode()
def test_what_the_compiler_makes_of_them(compiles: None) -> None:
    """By the code that it writes for this CPU: one kernel for a norm and the stream's bias, one for GEGLU behind its
    product, and nothing is copied."""
    call, kernels = compiled_to(random(Block()), torch.randn(2, 50, 32).bfloat16())
    norms, gates = kernels[::2], kernels[1::2]
    assert len(norms) == len(gates) == 2 and all("gelu_mul" in name for name in gates)
    assert all("add" in name and "native_layer_norm" in name for name in norms)
    assert called(call, "accumulate") == 2


@pytest.mark.slow
@torch.inference_mode()
def test_what_the_compiler_makes_of_a_residual_block(compiles: None) -> None:
    """Two norms, and the biases of the convolution and of the shortcut, which is added in place."""
    config = UNetConfig(norm_num_groups=8)
    made, temb = random(ResidualBlock(16, 32, config)), torch.randn(1, config.time_width).bfloat16()
    x = torch.randn(2, 16, 8, 8).bfloat16().contiguous(memory_format=torch.channels_last)
    call, kernels = compiled_to(made, x, temb)
    wider = not multiplies(torch.bfloat16, "cpu")  # then the convolution's weight is widened by one more
    assert len(kernels) == 3 + wider and called(call, "accumulate") == 1 and "native_" not in kernels[-1]


def called(call: str, name: str) -> int:
    return call.count(f"torch.ops.qwenimg.{name}.default(")


def compiled_to(made: torch.nn.Module, *given: torch.Tensor) -> tuple[str, list[str]]:
    """What is called of the code that the compiler writes, and the names of the kernels in it."""
    from torch._inductor.utils import run_and_get_code

    result, (code, *_) = run_and_get_code(torch.compile(made, fullgraph=True, dynamic=True), *given)
    call = code[code.index("def call(") : code.index("def get_args")]
    kernels = [line.strip().partition("(")[0] for line in call.splitlines() if line.strip().startswith("cpp_fused")]
    print(kernels, error(result, made(*given).double()))
    assert "copy_" not in call.replace("_to_copy", "") and "clone" not in call and "mm(reinterpret" not in call
    assert error(result, made(*given).double()) < LIMITS["bfloat16"]
    return call, kernels


@pytest.mark.parametrize("shape", [(3, 1), (1, 4), (8,), (4, 2), (9,), (2,)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_a_few_rows(shape: tuple[int, ...], bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As texts that are written at once have: computed as the transpose, where the product is in float32."""
    layer = on_torch(ops.Linear(24, 40, bias=bias), "float32", 24, 40)
    if not bias:
        layer.bias = None
    x, few = torch.from_numpy(given(*shape, 24, seed=3)), list[int]()
    transposed = layers._linear_of_few
    monkeypatch.setattr(layers, "MANY_WEIGHTS", 24 * 40)
    monkeypatch.setattr(layers, "_linear_of_few", lambda *given: [few.append(1), transposed(*given)][1])
    found = layer(x)
    right = F.linear(x.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double())
    print(f"{error(found, right):.1e}")
    assert found.shape == right.shape and found.is_contiguous() and error(found, right) < 1e-6
    assert len(few) == (3 <= x.numel() // 24 <= 8)
    layer(x.bfloat16()), layer(torch.cat((x, x.new_zeros((*shape, 24))), dim=-1)[..., :24])
    assert len(few) == (3 if 3 <= x.numel() // 24 <= 8 else 0), "in the layer's dtype, and of parts"
