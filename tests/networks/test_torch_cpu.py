"""A small model runs on one thread of the CPU, a large one on all; and the number is afterwards what it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from qwenimg.backends.torch.ops import cpu
from qwenimg.backends.torch.ops.cpu import computes, laid_out


class Component:
    """One layer of 6 parameters that tells how many threads it was given."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(2, 2)

    @computes
    def count(self, fail: bool = False) -> int:
        assert torch.is_inference_mode_enabled()
        if fail:
            raise ValueError("no")
        return torch.get_num_threads()


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_a_small_model_takes_one_thread() -> None:
    assert Component().count() == 1
    assert torch.get_num_threads() == 3


def test_a_large_model_takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "SMALL", 6)
    assert Component().count() == 3
    monkeypatch.setattr(cpu, "SMALL", 7)
    assert Component().count() == 1


def test_the_number_comes_back_after_an_error() -> None:
    with pytest.raises(ValueError, match="no"):
        Component().count(fail=True)
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("native", [True, False])
def test_kernels_of_convolutions_lie_as_they_are_taken(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    monkeypatch.setattr(cpu, "multiplies", lambda dtype, device: native)
    kernel = torch.arange(2 * 3 * 3 * 3.0).reshape(2, 3, 3, 3)
    half = laid_out(kernel.bfloat16(), "cpu")
    assert half.is_contiguous(memory_format=torch.channels_last) == native
    assert torch.equal(half.float(), kernel)
    assert laid_out(kernel, "cpu") is kernel
    matrix = kernel.bfloat16().flatten(1)
    assert laid_out(matrix, "cpu") is matrix
