"""`qwenimg doctor`: what a dtype is on a device, told from what it is called."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.cli_runner import cli

from qwenimg import backends
from qwenimg.common.measure import exactness
from qwenimg.common.measure.exactness import LIMITS, OPERATIONS, measure
from qwenimg.common.numbers.rounding import nearest
from qwenimg.common.runtime.engine import Engine

BACKENDS = ("cpu", "mlx")
TF32 = 10  # bits after the first that it keeps of a product's inputs


@pytest.fixture(params=BACKENDS)
def engine(request: pytest.FixtureRequest) -> Engine:
    return backends.load(request.param)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.sample(1)
def test_every_dtype_is_what_its_name_says(engine: Engine, dtype: str) -> None:
    found = measure(engine, dtype)
    print(engine.name, dtype, {name: f"{error:.1e}" for name, error in found.errors.items()}, found.verdict())
    assert found.faults == [] and found.errors.keys() == OPERATIONS.keys() and found.flops > 1e6
    rounded = {"float32": 1e-9, "bfloat16": 1e-3, "float16": 1e-4}[dtype]
    assert all(error > rounded for error in found.errors.values()), "computed in a wider dtype than it says"


def cut(values: np.ndarray, bits: int) -> np.ndarray:
    """`values` with so many bits after the first."""
    mantissa, exponent = np.frexp(values.astype(np.float64))
    return np.ldexp(np.round(np.ldexp(mantissa, bits + 1)), exponent - bits - 1).astype(np.float32)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.sample(0)
def test_tf32_is_caught_in_each_operation(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = backends.load("cpu")
    exact = type(engine).operate

    def coarse(self, name, dtype, arrays):
        return exact(self, name, dtype, [cut(a, TF32) for a in arrays] if name == operation else arrays)

    monkeypatch.setattr(type(engine), "operate", coarse)
    found = measure(engine, "float32")
    print(operation, found.verdict())
    assert found.faults == [operation] and "is not float32" in found.verdict()
    assert "11 bits" in found.verdict() or "12 bits" in found.verdict()
    ran = cli("doctor", "--backend", "cpu")
    assert ran.code == 6 and operation in ran.err and "is not float32" in ran.err
    assert "fp32" in ran.out.decode(), "the table is printed all the same"


def test_sums_in_16_bit_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = backends.load("cpu")

    def sequential(self, name, dtype, arrays):
        x, weight = arrays
        total = np.zeros((len(x), len(weight)), np.float32)
        for i in range(x.shape[1]):
            total = nearest(total + np.outer(x[:, i], weight[:, i]), dtype)
        return total

    monkeypatch.setattr(type(engine), "operate", sequential)
    for dtype in ("bfloat16", "float16"):
        error = exactness.error(engine, dtype, "matmul")
        print(dtype, f"{error:.1e}")
        assert error > LIMITS[dtype]


def test_held_rounds_to_the_nearest() -> None:
    values = np.array([1 + 2**-8, 1 + 2**-9, 1 + 3 * 2**-8, -1.0, 0.0], np.float32)
    assert nearest(values, "bfloat16").tolist() == [1.0, 1.0, 1 + 2**-6, -1.0, 0.0]


@pytest.mark.sample(0)
def test_what_it_prints() -> None:
    ran = cli("doctor", "--backend", "cpu")
    text = ran.out.decode()
    assert ran.code == 0 and ran.err == "" and text.isascii()
    for part in ("torch", "python", "CPU threads", "cache of models", "free", "GFLOP/s", "--preset auto, qwen-image"):
        assert part in text
    made = json.loads(cli("doctor", "--backend", "cpu", "--json").out)
    assert [row["dtype"] for row in made["dtypes"]] == list(LIMITS) and all(row["ok"] for row in made["dtypes"])
    assert (
        made["free_disk"] > 0 and made["free_memory"] > 0 and {"qwenimg", "python", "torch"} <= made["versions"].keys()
    )
    assert [row["preset"] for row in made["auto"]] == ["auto"] * len(made["auto"]) and len(made["auto"]) >= 2


@pytest.mark.sample(0)
def test_of_a_model() -> None:
    made = json.loads(cli("doctor", "shapes", "--backend", "mlx", "--json").out)
    assert [(row["model"], row["precision"]) for row in made["auto"]] == [("shapes-v1", "fp32")]
    cli("doctor", "/no/such/model").refused(5, "/no/such/model")
