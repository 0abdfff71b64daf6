"""Parameters that are ranges of rows of one tensor, of several sizes, or whose halves stand in another order."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import safetensors.torch
import torch
from gguf import GGMLQuantizationType, quants
from support.gguf_files import write as write_gguf

from qwenimg.backends.mlx import load as mlx_load
from qwenimg.backends.torch import load as torch_load
from qwenimg.common.base.errors import ModelError
from qwenimg.common.formats.headers import open_header
from qwenimg.common.weights.keys import Place, Rows, plan_places
from qwenimg.common.weights.plan import LoadPlan, stored_uses
from qwenimg.common.weights.values import read, read_chunks

Q8 = GGMLQuantizationType.Q8_0
WIDTH = 32  # of a layer whose q, k and v have as many rows, and whose feed-forward has four times as many
PLACES = {
    "q.weight": Place("linear1.weight", Rows(0, 1, 7)),
    "k.weight": Place("linear1.weight", Rows(1, 2, 7)),
    "v.weight": Place("linear1.weight", Rows(2, 3, 7)),
    "mlp.weight": Place("linear1.weight", Rows(3, 7, 7)),
    "norm.weight": Place("modulation.weight", decode="swapped"),
    "norm.bias": Place("modulation.bias", decode="swapped"),
}
SHAPES = {
    **{f"{name}.weight": (WIDTH, 5) for name in "qkv"},
    "mlp.weight": (4 * WIDTH, 5),
    "norm.weight": (2 * WIDTH, 5),
    "norm.bias": (2 * WIDTH,),
}


def tensors(columns: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"linear1.weight": (7 * WIDTH, columns), "modulation.weight": (2 * WIDTH, columns)}
    return {
        name: torch.randn(shape, generator=generator)
        for name, shape in (shapes | {"modulation.bias": (2 * WIDTH,)}).items()
    }


def expected(stored: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """By torch's own split and chunk."""
    q, k, v, mlp = stored["linear1.weight"].float().split([WIDTH, WIDTH, WIDTH, 4 * WIDTH])
    swapped = {
        f"norm.{leaf}": torch.cat(stored[f"modulation.{leaf}"].float().chunk(2)[::-1]) for leaf in ("weight", "bias")
    }
    parts = {"q.weight": q, "k.weight": k, "v.weight": v, "mlp.weight": mlp} | swapped
    return {name: part.numpy() for name, part in parts.items()}


def planned(path: Path, shapes: dict[str, tuple[int, ...]]) -> LoadPlan:
    return plan_places(open_header(path), "transformer", PLACES, shapes, stored_uses(shapes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_ranges_and_halves(tmp_path: Path, dtype: torch.dtype) -> None:
    stored = {name: tensor.to(dtype) for name, tensor in tensors().items()}
    safetensors.torch.save_file(stored, tmp_path / "a.safetensors")
    plan = planned(tmp_path / "a.safetensors", SHAPES)
    for name, values in expected(stored).items():
        entry = plan.entries[name]
        on_torch, on_mlx = torch_load.tensor(entry, torch.device("cpu")), mlx_load.tensor(entry)
        assert np.array_equal(on_torch.float().numpy(), values), name
        assert np.array_equal(np.array(on_mlx.astype(mx.float32)), values), name
        assert sum(len(chunk) for chunk in read_chunks(entry)) == len(values)
    plan.close()


def test_ranges_of_codes(tmp_path: Path) -> None:
    """Blocks of GGUF lie along a row: a range of rows is a range of bytes. Halves are swapped once decoded."""
    stored = {name: tensor.numpy() for name, tensor in tensors(64).items()}
    codes = {name: quants.quantize(array, Q8) for name, array in stored.items() if array.ndim == 2}
    write_gguf(
        tmp_path / "a.gguf", {name: (array, "Q8_0" if name in codes else "F32") for name, array in stored.items()}, None
    )
    decoded = {name: torch.from_numpy(quants.dequantize(array, Q8)) for name, array in codes.items()}
    decoded["modulation.bias"] = torch.from_numpy(stored["modulation.bias"])
    plan = planned(tmp_path / "a.gguf", {name: (shape[0], 64)[: len(shape)] for name, shape in SHAPES.items()})
    for name, values in expected(decoded).items():
        assert np.array_equal(read(plan.entries[name]), values), name
    plan.close()


@pytest.mark.parametrize("rows", [7 * WIDTH + 1, 6 * WIDTH, 14 * WIDTH])
def test_a_tensor_of_another_height_is_refused(tmp_path: Path, rows: int) -> None:
    stored = tensors() | {"linear1.weight": torch.zeros(rows, 5)}
    safetensors.torch.save_file(stored, tmp_path / "a.safetensors")
    with pytest.raises(ModelError, match=r"a\.safetensors: .*linear1\.weight"):
        planned(tmp_path / "a.safetensors", SHAPES)
