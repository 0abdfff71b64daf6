"""What is in memory beside weights as they are kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from random_model import DIT, TEXT, write_random_model
from support.policies import parse

import qwenimg
from qwenimg.common.memory import overhead
from qwenimg.common.pipeline import fit_options
from qwenimg.common.runtime.group import ALONE
from qwenimg.common.weights import streaming


def test_the_array_that_codes_are_decoded_to_is_in_the_plan(tmp_path: Path) -> None:
    """One weight of those that a step needs is decoded at once, and one of those that the modulation needs."""
    write_random_model(tmp_path / "model", dit=DIT, text=TEXT, dtype="bfloat16")
    pipe = qwenimg.load(tmp_path / "model", backend="cpu", precision="fp32", quantize="8")
    transformer = pipe.model.checkpoint["transformer"]
    plan = pipe.runtime.load_plan(transformer)
    sizes = {name: 4 * int(np.prod(e.shape)) for name, e in plan.entries.items() if len(e.shape) == 2}
    always = max(size for name, size in sizes.items() if ".mlp." in name or "_mlp." in name)
    once = max(size for name, size in sizes.items() if "_mod." in name)
    print(f"a step decodes to {always} bytes, the modulation to {once}")
    assert (overhead.decoded(plan), overhead.decoded(plan, once=True)) == (always, once)
    assert overhead.decoded(plan.stored(parse("bf16", on_gpu=False))) == always // 2
    assert pipe.model._step_bytes(1, 8, 0, ALONE) == pipe.model._step_bytes(1, 0, 0, ALONE) + 8 * DIT.dim * 40
    assert pipe.model._step_bytes(1, 0, 0, ALONE) == always + overhead.packed(plan)
    request = pipe.check("a", width=32, height=32, steps=1)
    modulation = next(s for s in fit_options.plan_memory(pipe.model, request).stages if s.name == "modulation")
    assert modulation.activations > once
    pipe.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_read_on_the_way_counts_only_at_the_end(tmp_path: Path, precision: str) -> None:
    """A table of 16 bit that is kept in 32 is there twice while it is cast; what comes after it in the file is not
    there yet."""
    write_random_model(tmp_path / "model", dit=DIT, text=TEXT, dtype="bfloat16")
    pipe = qwenimg.load(tmp_path / "model", backend="cpu", precision=precision)
    plan = pipe.runtime.load_plan(pipe.model.checkpoint["text_encoder"])
    last = list(plan.entries.values())[-1]
    found = overhead.loading(plan, None)
    print(
        f"{found} of {streaming.peak_weight_bytes(plan, None)} bytes; the last weight is {last.name}, of {last.nbytes}"
    )
    assert 0 <= found <= max(e.nbytes for e in plan.entries.values())
    assert (found > 0) == (precision == "fp32")
    pipe.close()


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_a_weight_is_decoded_in_parts_to_the_same_bits(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    """On a CPU MLX makes an array of every bit on the way."""
    import mlx.core as mx

    from qwenimg.backends.mlx.ops import quantized
    from qwenimg.backends.mlx.ops.layers import Linear
    from qwenimg.common.quant.affine import Affine

    group = 32 if bits == 4 else 64
    codes, *rest = mx.quantize(mx.random.normal((40, 128)), group_size=group, bits=bits)
    layer = quantized.QuantizedLinear(Linear(128, 40, bias=False), Affine(bits, group), mx.float32)
    layer.put(codes, *(part.astype(mx.float16) for part in rest))
    whole = layer.weight
    monkeypatch.setattr(quantized, "IN_CACHE", 7 * 128)
    parts = layer.weight
    assert parts.shape == whole.shape == (40, 128) and mx.array_equal(parts, whole).item()
