"""The eager forward makes no pass over memory that it does not need, and what replaced a pass gives the same bits."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from paper.kernels import Case, Kernel, fused
from paper.torch_kernels import kernels
from support.policies import BF16

from qwenimg.backends.torch import ops
from qwenimg.backends.torch.ops import cpu
from qwenimg.common.networks.denoisers.qwen_dit import QwenDiTConfig
from qwenimg.common.runtime.observers import observe

LOW = (torch.bfloat16, torch.float16)
BLOCKS = (1, 2)


def block(branches: int) -> list[Kernel]:
    """The kernels of one block at full width, 1024x1024: those of two layers less those of one."""
    case = Case(height=128, width=128, text=64, branches=branches)
    one, two = (kernels("qwen_dit", QwenDiTConfig(num_layers=count), BF16, case) for count in BLOCKS)
    return [kernel for kernel in two if kernel.region == 1] if len(two) > len(one) else []


@pytest.mark.parametrize("branches", [1, 2])
def test_passes_of_a_block(branches: int) -> None:
    """Limits: what is there now. Compiled: at most 0.45 of the bytes that the first eager form moved (2.01 and 4.11 GB)
    and 30 kernels."""
    found = block(branches)
    names = Counter(kernel.name for kernel in found)
    bound = [kernel for kernel in found if kernel.kind == "memory"]
    moved = sum(kernel.nbytes for kernel in bound) / 1e9
    compiled = [kernel for kernel in fused(found) if kernel.kind == "memory"]
    fewest = sum(kernel.nbytes for kernel in compiled) / 1e9
    print(
        f"{branches}: {len(found)} kernels, {len(bound)} memory-bound, {moved:.2f} GB; compiled {fewest:.2f} GB", names
    )
    assert names["cat"] == names["gelu"] == names["bmm"] == names["complex"] == 0
    assert names["_to_copy"] == 8, "two norms of two streams, and q and k of both in front of their norms"
    assert names["copy_"] == 4 and names["_addmm_activation"] == 2 and names["addcmul"] == 4
    assert len(bound) <= 32 and moved <= branches * 1.34
    assert len(compiled) <= 30 and fewest <= 0.45 * (2.01, 4.11)[branches - 1]


@pytest.mark.parametrize("dtype", LOW)
@torch.inference_mode()
def test_mixed_dtypes_give_the_same_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, gate = torch.randn(2, 37, 24), torch.randn(1, 1, 24)
    update = torch.randn(2, 37, 24).to(dtype)
    assert torch.equal(ops.gated(x, gate, update), torch.addcmul(x, gate, update.float()))
    assert torch.equal(ops.add(x, update), x + update.float())
    low = x.to(dtype)
    for result in (ops.gated(low, gate, x), ops.add(low, x), ops.add(low, low)):
        assert result.dtype == dtype, "the stream's dtype holds"


@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
def test_joining_casts_on_the_way(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    first, second = torch.randn(2, 5, 3, 8), torch.randn(2, 11, 3, 8)
    expected = torch.cat((first, second), dim=1).to(dtype)
    with torch.inference_mode():
        assert torch.equal(ops.joined(first, second, dtype), expected)
    first.requires_grad_()
    made = ops.joined(first, second, dtype)
    made.sum().backward()
    assert torch.equal(made, expected) and torch.equal(first.grad, torch.ones_like(first))


def layer(inputs: int, outputs: int, dtype: torch.dtype) -> ops.Linear:
    made = ops.Linear(inputs, outputs).to(dtype).requires_grad_(False)
    made.weight = torch.nn.Parameter(torch.randn(outputs, inputs).to(dtype), requires_grad=False)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 2])
@torch.inference_mode()
def test_rows_of_a_batch_and_parts_of_a_sequence(
    dtype: torch.dtype, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of a joint sequence, and two layers into one: what the layers give alone, one rounding off at most."""
    monkeypatch.setattr(cpu, "multiplies", lambda *_: True)
    torch.manual_seed(0)
    first, second, joint = layer(24, 40, dtype), layer(24, 40, dtype), torch.randn(batch, 16, 24).to(dtype)
    txt, img = joint[:, :5], joint[:, 5:]
    alone = [linear(x.contiguous()) for linear, x in ((first, txt), (second, img))]
    exact = [F.linear(x.double(), o.weight.double(), o.bias.double()) for o, x in ((first, txt), (second, img))]
    limit = 2.0**-8 if dtype == torch.bfloat16 else 1e-6
    for made, plain, right in ((first(txt), alone[0], exact[0]), (second(img), alone[1], exact[1])):
        error = float((made.double() - right).norm() / right.norm())
        print(dtype, batch, f"{error:.1e}", torch.equal(made, plain))
        assert made.shape == plain.shape and made.is_contiguous() and error < limit
    both = ops.joined_linears(first, txt, second, img)
    assert float((both.double() - torch.cat(exact, dim=1)).norm() / both.double().norm()) < limit
    seen: list[str] = []
    with observe(lambda operation, path, result: seen.append(operation)):
        ops.joined_linears(first, txt, second, img)
        ops.linear_gelu(first, txt)
    assert seen.count("linear") == 3


@torch.inference_mode()
def test_gelu_is_inside_the_product_on_a_gpu_alone() -> None:
    dense, x = layer(24, 40, torch.bfloat16), torch.randn(2, 5, 24)
    assert torch.equal(ops.linear_gelu(dense, x), ops.gelu(dense(x)))
    away = dense.to("meta")
    assert ops.linear_gelu(away, x.to("meta")).shape == (2, 5, 40)


@torch.inference_mode()
def test_a_norms_gain_is_widened_once_and_again_after_a_change() -> None:
    norm = ops.RMSNorm(8, 1e-6).requires_grad_(False)
    for value in (1.5, 2.5):
        norm.weight = torch.nn.Parameter(torch.full((8,), value, dtype=torch.bfloat16), requires_grad=False)
        x = torch.randn(3, 8)
        expected = F.rms_norm(x, (8,), torch.full((8,), value), 1e-6)
        assert torch.equal(norm(x), expected) and torch.equal(norm(x), expected)
        assert norm(x.double()).dtype == torch.float64, "another dtype than the kept one"
    assert set(norm.state_dict()) == {"weight"}
