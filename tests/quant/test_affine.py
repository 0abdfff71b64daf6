"""Affine codes against MLX's own packing, at every width, group and dtype of the scales; the codes that are chosen
against MLX's quantizing and against float64."""

import warnings

import mlx.core as mx
import numpy as np
import pytest

from qwenimg.common.quant.affine import GROUPS, WIDTHS, Affine, encode, of_widths
from qwenimg.common.quant.bits import widened
from qwenimg.common.quant.eight_bits import EightBits
from qwenimg.common.quant.quantized_tensor import pack, unpack

CASES = [Affine(bits, group) for bits in WIDTHS for group in GROUPS]
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def named(code):
    return f"{code.bits} bits, {code.group}"


def weights(rows, width, seed=0):
    """Rows of different sizes and offsets; a group of one value, one of zeros, one below zero alone."""
    rng = np.random.default_rng(seed)
    made = rng.standard_normal((rows, width)) * np.exp(rng.standard_normal((rows, 1))) + rng.standard_normal((rows, 1))
    made[0, :128], made[1, :128], made[2] = 0.25, 0, -np.abs(made[2])
    return made.astype(np.float32)


def stored(array):
    """As `plan.raw` gives a piece."""
    return np.array(array.view(mx.uint16)) if array.dtype == mx.bfloat16 else np.array(array)


@pytest.mark.parametrize("code", CASES, ids=named)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_mlx_quantizes_is_read(code, dtype):
    """54 cases. The values in float32, where MLX's own decode has one rounding only, are its bits."""
    given = mx.array(weights(7, 3 * 128)).astype(DTYPES[dtype])
    codes, scales, biases = mx.quantize(given, group_size=code.group, bits=code.bits)
    made = code.values([np.array(codes), stored(scales), stored(biases)])
    exact = unpack(np.array(codes), code.bits).reshape(7, -1, code.group).astype(np.float64)
    exact = exact * widened(stored(scales))[..., None] + widened(stored(biases))[..., None]
    assert np.allclose(made, exact.reshape(made.shape), rtol=0, atol=2.0**-22 * np.abs(exact).max())
    wider = mx.dequantize(
        codes, scales.astype(mx.float32), biases.astype(mx.float32), group_size=code.group, bits=code.bits
    )
    assert np.array_equal(made, np.array(wider))
    assert of_widths(384, codes.shape[1], scales.shape[1]) == code


@pytest.mark.parametrize("code", [code for code in CASES if code.bits >= 6], ids=named)
def test_codes_are_those_that_mlx_chooses(code):
    given = weights(9, 2 * 128, seed=code.bits)
    given[8] *= 1e-6  # scales that float16 does not hold
    codes, scales, biases = (np.array(x) for x in mx.quantize(mx.array(given), group_size=code.group, bits=code.bits))
    made = encode([given], given.shape, code)
    assert np.array_equal(made.codes, codes)
    assert made.scales.dtype == made.biases.dtype == np.float32
    assert np.array_equal(made.scales, scales) and np.array_equal(made.biases, biases)


def fitted(group, code, scale, bias):
    """One group in float64: from MLX's scale and bias, twice least squares on the codes, then the nearest codes."""
    for turn in range(3):
        codes = np.clip(np.rint((group - bias) / scale), 0, 2**code.bits - 1)
        if turn < 2 and np.ptp(codes):
            scale, bias = np.polyfit(codes, group, 1)
    return codes * scale + bias


@pytest.mark.parametrize("code", CASES, ids=named)
def test_one_group_is_coded_as_among_others(code):
    given = weights(3, 2 * code.group, seed=4)
    one, among = encode([given[2:, : code.group]], (1, code.group), code), encode([given], given.shape, code)
    assert np.array_equal(one.codes[0], among.codes[2, : code.group * code.bits // 32])
    assert one.scales[0, 0] == among.scales[2, 0] and one.biases[0, 0] == among.biases[2, 0]


@pytest.mark.parametrize("code", [code for code in CASES if code.bits < 6], ids=named)
def test_few_bits_are_fitted_by_least_squares(code):
    """As in float64, but for values halfway between two codes; and no group is further from its values than MLX's."""
    given = weights(9, 2 * 128, seed=code.bits)
    given[8] *= 1e-6  # scales that float16 does not hold
    codes, scales, biases = (np.array(x) for x in mx.quantize(mx.array(given), group_size=code.group, bits=code.bits))
    groups = given.reshape(-1, code.group).astype(np.float64)
    starts = zip(groups, scales.ravel().astype(np.float64), biases.ravel().astype(np.float64), strict=True)
    exact = np.stack([fitted(group, code, *start) for group, *start in starts])
    made, mlxs = (
        code.values(arrays).reshape(groups.shape)
        for arrays in (encode([given], given.shape, code).arrays, [codes, scales, biases])
    )
    own, theirs, best = (np.square(values - groups).sum(1) for values in (made, mlxs, exact))
    near = np.abs(made - exact).max(1) <= 1e-4 * np.abs(groups).max(1)
    print(f"{named(code)}: {near.mean():.1%} as in float64, error {(own.sum() / theirs.sum()) ** 0.5:.3f} of MLX's")
    assert near.mean() > 0.95 and abs(own.sum() / best.sum() - 1) < 0.01
    assert np.all(own <= theirs * 1.0001 + 1e-12 * np.square(groups).sum(1)) and own.sum() < 0.97 * theirs.sum()


def test_four_bits_are_near_the_best_that_there_are():
    """Of each group the best of 10,000 pairs of scale and bias, in float64."""
    code, given = Affine(4, 32), np.random.default_rng(7).standard_normal((6, 64)).astype(np.float32)
    made = code.values(encode([given], given.shape, code).arrays)
    groups = given.reshape(-1, 32).astype(np.float64)
    best = []
    for group in groups:
        reach = np.ptp(group)
        scales = np.linspace(0.6, 1.05, 100)[:, None, None] * reach / 15
        biases = group.min() + np.linspace(-0.1, 0.35, 100)[:, None] * reach
        codes = np.clip(np.rint((group - biases) / scales), 0, 15)
        best.append(np.square(codes * scales + biases - group).sum(-1).min())
    over = float(np.square(made.reshape(groups.shape) - groups).sum() / sum(best))
    print(f"squared error {over:.3f} of the best; by least and largest it is 1.3")
    assert 1 <= over < 1.2


@pytest.mark.parametrize("code", CASES, ids=named)
def test_scales_are_float16_where_they_fit(code):
    given = weights(5, 256, seed=3)
    made = encode([given], given.shape, code)
    assert made.scales.dtype == made.biases.dtype == np.float16
    steps = np.abs(made.scales.astype(np.float32))[..., None]
    error = np.abs(code.values(made) - given).reshape(*made.scales.shape, -1)
    print(f"{named(code)}: largest error {(error / steps).max():.2f} steps")
    # Half a step, and one at the end that the code of the other end pushes out; then float16's rounding of the group's
    assert np.all(error <= 1.5 * steps + 2**-10 * np.abs(given).reshape(error.shape).max(-1, keepdims=True))
    assert encode([given * 1e5], given.shape, code).scales.dtype == np.float32


@pytest.mark.parametrize("bits", WIDTHS)
def test_packing_is_one_string_of_bits(bits):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (3, 5, 96), dtype=np.uint8)
    words = pack(codes, bits)
    assert words.shape == (3, 5, 3 * bits) and np.array_equal(unpack(words, bits), codes)
    row = int.from_bytes(words[1, 2].tobytes(), "little")
    assert [row >> i * bits & 2**bits - 1 for i in range(96)] == codes[1, 2].tolist()


def test_many_rows_are_coded_in_parts(monkeypatch):
    given, code = weights(11, 64), Affine(4, 32)
    whole = encode([given], given.shape, code)
    monkeypatch.setattr("qwenimg.common.quant.affine.VALUES", 3 * 64)
    apart = encode([given[:5], given[5:]], given.shape, code)
    assert all(np.array_equal(a, b) for a, b in zip(whole, apart, strict=True))


@pytest.mark.parametrize(
    "widths", [(0, 1, 1), (64, 0, 1), (64, 8, 0), (64, 7, 1), (64, 14, 1), (96, 12, 2), (64, 8, 4)]
)
def test_widths_that_no_code_has(widths):
    """7 bits, a width that does not divide, groups of 48 and of 16."""
    assert of_widths(*widths) is None


@pytest.mark.parametrize("scale", [np.inf, np.nan, 3e38])
def test_values_that_are_not_finite_are_told_by_no_warning(scale: float) -> None:
    """Which would be lines beside the one that names the tensor."""
    codes, one = np.array([[0, 1, 255, 129] * 8], np.uint8), np.array([[scale]], np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = [
            Affine(8, 32).values((codes.view("<u4"), one, -one)),
            EightBits("F8_E4M3").values((codes, one)),
            EightBits("I8").values((codes.view(np.int8), one)),
        ]
    assert not any(np.isfinite(values).all() for values in made)
