"""What weights are read into, the look at every value, and reading ahead."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import torch
from support.policies import FP32

from qwenimg.backends.mlx import load as mlx_load
from qwenimg.backends.torch import load as torch_load
from qwenimg.common.base.errors import ModelError
from qwenimg.common.formats import arrays, tensor_file
from qwenimg.common.weights import keys
from qwenimg.common.weights.plan import LoadPlan

SHAPE = (1031, 1027)  # more than is looked at in one go, and no multiple of it


def bits_of(values: np.ndarray, dtype: str) -> np.ndarray:
    """As it lies in a file: bfloat16 by torch's own rounding, as its bits."""
    if dtype == "bfloat16":
        return torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    return values.astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("odd", [None, -np.inf, np.inf, np.nan, -np.nan, 5e-42, -3.5])
def test_the_largest_value(dtype: str, odd: float | None) -> None:
    values = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32).clip(-3, 3)
    if odd is not None:
        values[-1, -1] = odd
    stored = bits_of(values, dtype)
    wide = torch.from_numpy(stored).view(torch.bfloat16).double() if dtype == "bfloat16" else torch.from_numpy(stored)
    expected = float(wide.double().abs().max())  # NaN where there is one
    found = arrays.value(arrays.largest_bits(stored), dtype)
    print(dtype, odd, found)
    assert found == expected or (math.isnan(found) and math.isnan(expected))


def test_nothing_has_no_largest_value() -> None:
    assert arrays.value(arrays.largest_bits(np.empty((0, 3), np.float32)), "float32") == 0


@pytest.mark.parametrize("shape", [(), (3,), SHAPE, (5, 1024, 1024)])
def test_memory_is_of_its_own_and_can_be_written(shape: tuple[int, ...]) -> None:
    made, other = arrays.empty(shape, "<f4"), arrays.empty(shape, "<f4")
    made[...], other[...] = 1, 2
    assert made.shape == shape and made.dtype == np.float32 and (made == 1).all() and made.flags.writeable


LARGE, SMALL = 10**9, 200_000  # bytes of an item: a batch of its own, and six to a batch


@pytest.mark.parametrize("size", [LARGE, SMALL, 0])
def test_what_is_ahead_comes_in_order_and_from_other_threads(size: int) -> None:
    seen: list[int] = []

    def fetch(item: int) -> int:
        seen.append(threading.get_ident())
        return item * item

    assert list(arrays.ahead(range(40), fetch, lambda item: size)) == [(i, i * i) for i in range(40)]
    assert len(seen) == 40 and threading.get_ident() not in seen


@pytest.mark.parametrize(("size", "together"), [(LARGE, 1), (SMALL, 6)])
def test_no_more_is_fetched_than_the_threads_and_what_they_raise_comes_out(size: int, together: int) -> None:
    fetched: list[int] = []

    def fetch(item: int) -> int:
        fetched.append(item)
        if item == 5 * together:
            raise ModelError("five")
        return item

    given = iter(range(1000))
    coming = arrays.ahead(given, fetch, lambda item: size)
    assert next(coming) == (0, 0)
    assert next(given) == (arrays.THREADS + 1) * together  # so many were asked for
    with pytest.raises(ModelError, match="five"):
        list(coming)
    assert max(fetched) <= (5 + arrays.THREADS + 1) * together


@pytest.fixture
def plan(tmp_path: Path) -> Iterator[LoadPlan]:
    import safetensors.numpy

    path = tmp_path / "w.safetensors"
    safetensors.numpy.save_file({"w": np.full(SHAPE, 1.5, np.float32)}, path)
    made = keys.plan(path, "transformer", {"w": SHAPE}).stored(FP32)
    yield made
    made.close()


@pytest.mark.parametrize("backend", ["torch", "mlx"])
@pytest.mark.parametrize("how", ["shorter", "other"])
def test_a_file_that_changes_under_the_reader_is_one_line(plan: LoadPlan, backend: str, how: str) -> None:
    """MLX reads in a thread of its own, where an exception would end the process."""
    entry = plan.entries["w"]
    assert float(np.asarray(mlx_load.tensor(entry)).max()) == 1.5
    with entry.source.first.file.path.open("r+b") as file:
        if how == "shorter":
            file.truncate(2000)
        else:
            file.seek(1000)
            file.write(b"12345678")
    with pytest.raises(ModelError, match=r"w\.safetensors: (ended at byte 2000|changed while)") as caught:
        mlx_load.tensor(entry) if backend == "mlx" else torch_load.tensor(entry, torch.device("cpu"))
    assert str(caught.value).isprintable()


def test_the_file_of_one_tensor_is_a_safetensors_file(plan: LoadPlan) -> None:
    """Read whole by numpy's reader of that format, by the calls that MLX makes."""
    import safetensors.numpy

    file = tensor_file.TensorFile(plan.entries["w"].source.first)
    head = file.read()
    data = bytearray(math.prod(SHAPE) * 4)
    assert file.tell() == len(head) and file.readinto(memoryview(data)) == len(data)
    found = safetensors.numpy.load(head + bytes(data))
    assert list(found) == [tensor_file.NAME] and (found[tensor_file.NAME] == 1.5).all()
    assert arrays.value(file.largest, "float32") == 1.5
    assert mx.array_equal(mx.load(tensor_file.TensorFile(plan.entries["w"].source.first), "safetensors")["tensor"],
                          mx.full(SHAPE, 1.5))  # fmt: skip


@pytest.mark.parametrize("dtype", ["F32", "F16"])
@pytest.mark.parametrize("at", [0, math.prod(SHAPE) // 2, math.prod(SHAPE) // 2 + 1, -1])
def test_every_share_of_a_large_tensor_is_read_and_looked_at(tmp_path: Path, dtype: str, at: int) -> None:
    """The largest value is found in either thread's share; an odd number of values does not cut one in two."""
    import safetensors.numpy

    values = np.random.default_rng(0).standard_normal(SHAPE).astype({"F32": "f4", "F16": "f2"}[dtype])
    values.reshape(-1)[at] = -77
    safetensors.numpy.save_file({"w": values}, path := tmp_path / "w.safetensors")
    plan = keys.plan(path, "transformer", {"w": SHAPE}).stored(FP32)
    file = tensor_file.TensorFile(plan.entries["w"].source.first)
    head, data = file.read(), bytearray(values.nbytes)
    assert file.readinto(memoryview(data)) == len(data) and bytes(data) == values.tobytes() and head
    assert abs(arrays.value(file.largest, values.dtype.name)) == 77
    plan.close()
