"""Initial noise against torch, and its float64 functions against NumPy's and the standard library's."""

import ast
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from qwenimg.common.base.errors import UsageError
from qwenimg.common.numbers import noise, portable_math

SEEDS = [0, 1, 42, 2**31, 2**32 - 1, 2**32 + 5, 2**63, 2**64 - 1]
SIZES = [16, 17, 31, 48, 100, 1000, 16 * 10 * 14, 65536 + 7, 2 * 65536 + 16]

# One float32 ulp at the largest values (up to 5.8) is 4.8e-7: torch's vectorised log and cos are float32.
TORCH_TOLERANCE = 5e-7
# Without AVX2 torch rounds the angle 2 pi u differently: half an ulp of 6.3, times a radius of up to 5.8.
TORCH_SCALAR_TOLERANCE = 4e-6

# Two correctly working float64 implementations differ in the last place at most.
ULPS = 1.0

# SHA-256 of the float32 bytes. These never change: a seed in an old picture must stay valid.
PINNED = {
    (0, (1, 16, 166, 166)): "6127d34b1a5a7acd41e29e60afb62a03f9a173ad02bb7759980b04041699c337",
    (42, (1, 16, 13, 27)): "083a733eb2ee3badd441b0030e88a0ee4b94907603ddd5fcd56994f9d96a3b3e",
    (2**32 - 1, (17,)): "86f9ec42a0e56b2002cc794100980d6b50a2a57e0d3a8331868cd82d993d07bd",
    (2**63 + 7, (3, 5, 7)): "dcf8956aca6d72e15c7a82a507eed5eb5a67fc2541c2bcf1a99db7fe2c8d403b",
}


def torch_normal(count: int, seed: int) -> np.ndarray:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).numpy()


def torch_is_vectorised() -> bool:
    return torch.backends.cpu.get_cpu_capability().startswith("AVX")


def ulps(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.max(np.abs(a - b) / np.spacing(np.abs(b))))


@pytest.mark.parametrize("seed", SEEDS)
def test_equals_torch_cpu_generator(seed):
    tolerance = TORCH_TOLERANCE if torch_is_vectorised() else TORCH_SCALAR_TOLERANCE
    worst, equal, total = 0.0, 0, 0
    for size in SIZES:
        ours, reference = noise.normal((size,), seed), torch_normal(size, seed)
        assert ours.shape == (size,) and ours.dtype == np.float32
        worst = max(worst, float(np.abs(ours - reference).max()))
        equal, total = equal + int((ours == reference).sum()), total + size
    print(f"seed {seed}: max difference {worst:.3g}, bit-equal {equal / total:.3f}")
    assert worst <= tolerance
    assert equal / total > (0.8 if torch_is_vectorised() else 0.5)


def test_shape_only_reshapes():
    flat = noise.normal((2 * 3 * 5 * 7,), 9)
    np.testing.assert_array_equal(noise.normal((2, 3, 5, 7), 9), flat.reshape(2, 3, 5, 7))


@pytest.mark.parametrize(("seed", "shape"), PINNED)
def test_bits_are_pinned(seed, shape):
    assert noise.sha256(noise.normal(shape, seed)) == PINNED[seed, shape]


def test_bits_do_not_depend_on_the_cpu():
    """The same bits when NumPy and the C library use their code for old CPUs.

    Control, printed: NumPy's own sine and logarithm change with it (on x86 with glibc).
    """
    from numpy._core._multiarray_umath import __cpu_dispatch__

    program = (
        "import numpy as np; from qwenimg.common.numbers import noise\n"
        f"for seed, shape in {list(PINNED)}: print(noise.sha256(noise.normal(shape, seed)))\n"
        "x = np.linspace(0.001, 6, 100_001); print(noise.sha256(np.stack([np.sin(x), np.log(x)])))"
    )
    old_cpu = {
        "NPY_DISABLE_CPU_FEATURES": " ".join(__cpu_dispatch__),
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4,-AVX2_Usable,-FMA_Usable",
        "PYTHONWARNINGS": "ignore",
    }
    outputs = []
    for changes in ({}, old_cpu):
        env = os.environ | {"PYTHONPATH": str(Path(noise.__file__).parents[2])} | changes
        run = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
        outputs.append(run.stdout.split())
    print("NumPy's own functions differ:", outputs[0][-1] != outputs[1][-1])
    assert outputs[0][:-1] == outputs[1][:-1] == list(PINNED.values())


def test_mean_and_variance():
    """Mean and variance of n numbers spread by 1/sqrt(n) and sqrt(2/n); 5 of those is one seed in a million."""
    values = noise.normal((1 << 20,), 123).astype(np.float64)
    mean, variance = values.mean(), values.var()
    print(f"mean {mean:.2e}, variance - 1 {variance - 1:.2e}, largest {np.abs(values).max():.3f}")
    assert abs(mean) < 5 / 1024 and abs(variance - 1) < 5 * math.sqrt(2) / 1024


def test_the_extreme_uniforms_are_finite():
    zero, one = np.float32(0), np.float32(1 - 2.0**-24)
    values = noise._box_muller(np.array([zero] * 4 + [one] * 8 + [zero] * 4, np.float32))
    assert np.isfinite(values).all()
    assert np.abs(values).max() <= math.sqrt(-2 * math.log(2.0**-24)) * (1 + 1e-7)


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, None])
def test_bad_seed_is_a_usage_error(seed):
    with pytest.raises(UsageError, match="0 to 18446744073709551615"):
        noise.normal((16,), seed)


@pytest.mark.parametrize("shape", [(15,), (3, 5), (0, 16), (1,)])
def test_too_few_numbers(shape):
    with pytest.raises(ValueError, match="at least 16"):
        noise.normal(shape, 0)


def test_low_bits_warning():
    assert noise.low_bits_warning(2**32 - 1) is None
    warning = noise.low_bits_warning(2**32 + 5)
    assert warning is not None and warning.endswith("seed 5") and "\n" not in warning
    np.testing.assert_array_equal(noise.normal((100,), 2**32 + 5), noise.normal((100,), 5))


def test_sha256_is_of_values_not_of_memory_layout():
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert noise.sha256(a) == noise.sha256(np.asfortranarray(a)) == noise.sha256(a.astype(">f4"))
    assert noise.sha256(a) != noise.sha256(a.T)


def test_log():
    every_uniform_step = np.arange(1, 2**24 + 1, 61) / 2**24
    near_one = 1 - np.arange(1, 2**16) / 2**24
    wide = np.exp(np.linspace(-700, 700, 200_001))
    for name, x in {"uniform": every_uniform_step, "near 1": near_one, "wide": wide}.items():
        x = x[x != 1]
        figure = ulps(portable_math.log(x), np.log(x))
        print(f"log, {name}: {figure} ulp")
        assert figure <= ULPS
    assert portable_math.log(np.ones(1))[0] == 0


def test_sincos():
    angles = (np.float32(6.2831855) * (np.arange(0, 2**24, 61) / 2**24).astype(np.float32)).astype(np.float64)
    for name, x in {"noise angles": angles, "wide": np.linspace(-5000, 5000, 300_007)}.items():
        sine, cosine = portable_math.sincos(x)
        figures = ulps(sine, np.sin(x)), ulps(cosine, np.cos(x))
        print(f"sin, cos, {name}: {figures} ulp")
        assert max(figures) <= ULPS


@pytest.mark.sample(0)
def test_each_of_the_uniforms_gives_the_same_float32() -> None:
    """The functions with tables, against those without, at all 2**24 numbers that noise is made from."""
    numbers = wrong = 0
    for start in range(0, 2**24, 2**17):
        u = np.arange(start, start + 2**17).astype(np.float32) * np.float32(2.0**-24)
        left, angle = (np.float32(1) - u).astype(np.float64), (noise._TWO_PI * u).astype(np.float64)
        pairs = [(portable_math.near_log(left), portable_math.log(left))]
        pairs += zip(portable_math.near_sincos(angle), portable_math.sincos(angle), strict=True)
        wrong += sum(int((a.astype(np.float32) != b.astype(np.float32)).sum()) for a, b in pairs)
        numbers += u.size
    print(f"{wrong} of {3 * numbers} values differ")
    assert numbers == 2**24 and wrong == 0


def test_functions_against_the_standard_library():
    rng = np.random.default_rng(3)
    x = rng.uniform(1e-9, 50, 5000)
    sine, cosine = portable_math.sincos(x)
    assert ulps(portable_math.log(x), np.array([math.log(v) for v in x])) <= ULPS
    assert ulps(sine, np.array([math.sin(v) for v in x])) <= ULPS
    assert ulps(cosine, np.array([math.cos(v) for v in x])) <= ULPS


def test_angles_beyond_the_reduction_are_refused():
    for bad in (2.0**20, np.nan, np.inf):
        with pytest.raises(ValueError, match="524288"):
            portable_math.sincos(np.array([bad]))


# What the two modules may take from NumPy: types, array shuffling and operations that IEEE 754 defines exactly.
EXACT = {
    *("ndarray", "float32", "float64", "int64", "intp", "uint32", "random", "random.RandomState"),
    *(
        "add",
        "arange",
        "empty",
        "full",
        "multiply",
        "full_like",
        "where",
        "stack",
        "ascontiguousarray",
        "abs",
        "max",
        "rint",
        "frexp",
        "sqrt",
    ),
}
FROM_MATH = {"prod", "factorial"}


@pytest.mark.parametrize("module", [noise, portable_math])
def test_no_transcendental_of_the_machine(module):
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "np":
                assert node.attr in EXACT, f"np.{node.attr}"
            if node.value.id == "math":
                assert node.attr in FROM_MATH, f"math.{node.attr}"
        if isinstance(node, ast.ImportFrom):
            assert node.module not in ("numpy", "math"), node.module
        # ** of arrays is a transcendental; of two Python numbers with a whole exponent it is not.
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            assert isinstance(node.left, ast.Constant | ast.UnaryOp), ast.unparse(node)
        assert not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult))
