"""GGUF's blocks: decoded as gguf decodes them, kept as codes of the same values, the same bits on both backends."""

from pathlib import Path

import k_quants
import mlx.core as mx
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize
from support.gguf_files import ENCODED, HALVES, random_blocks, write

from qwenimg.backends.mlx import load as mlx_load
from qwenimg.backends.mlx.ops import quantized as on_mlx
from qwenimg.backends.torch import load as torch_load
from qwenimg.backends.torch.ops import quantized as on_torch
from qwenimg.common.base.errors import ModelError
from qwenimg.common.formats.gguf_types import TYPES, named
from qwenimg.common.quant.affine import Affine
from qwenimg.common.quant.gguf_blocks import CHUNK, READERS, STORAGE, GGUFBlocks
from qwenimg.common.weights import keys, quantize
from qwenimg.common.weights.plan import Entry, LoadPlan
from qwenimg.common.weights.storage import Dense, Packed
from qwenimg.common.weights.values import read, read_quantized

WIDTH = 512


def reference(blocks: np.ndarray, type: str) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return dequantize(blocks, GGMLQuantizationType[type])


def test_the_types_are_those_that_are_tested() -> None:
    assert READERS.keys() == HALVES.keys() and STORAGE.keys() < READERS.keys()


@pytest.mark.parametrize("type", READERS)
def test_values_are_those_of_the_reference(type: str) -> None:
    """Bit for bit, the sign of a zero too: scales of every size, zeros, subnormal and negative ones; more than is
    decoded at once, and no whole number of that."""
    blocks = random_blocks(type, CHUNK // WIDTH + 3, WIDTH, 1)
    made, expected = GGUFBlocks(type).values([blocks.reshape(-1)]), reference(blocks, type)
    assert made.dtype == np.float32
    assert np.array_equal(made.view(np.uint32), expected.reshape(-1).view(np.uint32))
    print(f"{type}: {made.size:,} values of {np.abs(made).min():.1e} to {np.abs(made).max():.1e}")


@pytest.mark.parametrize("type", READERS)
def test_every_bit_of_a_block_counts(type: str) -> None:
    """Any bytes at all, infinite and undefined scales among them."""
    blocks = np.random.default_rng(2).integers(0, 256, (64, named(type).bytes * WIDTH // named(type).values), np.uint8)
    made, expected = GGUFBlocks(type).values([blocks.reshape(-1)]), reference(blocks, type)
    assert not np.isfinite(expected).all()
    assert np.array_equal(made.reshape(expected.shape), expected, equal_nan=True)


@pytest.mark.parametrize("type", k_quants.TYPES)
def test_the_encoder_of_the_figures_means_what_the_reference_decodes(type: str) -> None:
    """As near as so many bits allow, and decoded values encode to themselves."""
    values = np.random.default_rng(4).standard_normal((64, 256)).astype(np.float32)
    values[0], values[1] = 0, np.abs(values[1])
    made = reference(k_quants.encode(values, type), type)
    error = np.linalg.norm(made - values) / np.linalg.norm(values)
    again = np.linalg.norm(reference(k_quants.encode(made, type), type) - made) / np.linalg.norm(made)
    print(f"{type}: error {error:.4f}, of decoded values {again:.1e}")
    assert error < 1.4 * 2.0 ** -k_quants.TYPES[type].bits and again < 1e-3 and not made[0].any()


@pytest.mark.parametrize("type", ENCODED)
def test_what_the_reference_encodes(type: str, tmp_path: Path) -> None:
    values = np.random.default_rng(3).standard_normal((7, 96)).astype(np.float32)
    write(tmp_path / "a.gguf", {"a.weight": (values, type)}, None)
    plan = keys.plan(tmp_path / "a.gguf", "transformer", {"a.weight": values.shape})
    made = read(plan.entries["a.weight"])
    error = np.abs(made - values).max()
    print(f"{type}: largest error {error:.3f}")
    assert error < 8 / 2 ** int(type[1])  # of values up to 4: half a step of their range
    plan.close()


def entry_of(plan: LoadPlan) -> Entry:
    return plan.entries["a.weight"]


@pytest.fixture(params=READERS)
def planned(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, LoadPlan, np.ndarray]:
    """Type, plan and values of a file of one layer [5 512]."""
    type = request.param
    blocks = random_blocks(type, 5, WIDTH, 4)
    write(tmp_path / "a.gguf", {"a.weight": (blocks, type)}, None)
    plan = quantize.keep(keys.plan(tmp_path / "a.gguf", "transformer", {"a.weight": (5, WIDTH)}), frozenset())
    request.addfinalizer(plan.close)
    return type, plan, reference(blocks, type)


def test_both_backends_have_the_same_values(planned: tuple[str, LoadPlan, np.ndarray]) -> None:
    """Of codes that are kept, and of those that are decoded: in float32 the reference's, in bfloat16 each other's."""
    type, plan, expected = planned
    entry = entry_of(plan)
    assert isinstance(entry.storage, Packed) == (type in STORAGE)
    if not isinstance(entry.storage, Packed):
        assert entry.storage == Dense("float32")
        assert np.array_equal(torch_load.tensor(entry, torch.device("cpu")).numpy(), expected)
        assert np.array_equal(np.array(mlx_load.tensor(entry)), expected)
        return
    kept, code = read_quantized(entry), entry.storage.code
    words, scales, biases = (torch.from_numpy(part) for part in kept)
    torchs = on_torch.decode(words.view(torch.int32), scales, biases, code)
    mlxs = on_mlx.decode(*(mx.array(part) for part in kept), code=code)
    assert np.array_equal(torchs.numpy(), expected) and np.array_equal(np.array(mlxs), expected)
    rounded = np.array(mlxs.astype(mx.bfloat16).astype(mx.float32))
    assert np.array_equal(torchs.bfloat16().float().numpy(), rounded)
    print(f"{type} as {code}, scales {kept.scales.dtype}")


def test_a_type_that_is_decoded_may_be_coded_anew(planned: tuple[str, LoadPlan, np.ndarray]) -> None:
    import re

    type, plan, _ = planned
    changed = quantize.quantized(plan, quantize.Policy(Affine(8, 64)), re.compile(r"a\.weight"))
    storage = entry_of(changed).storage
    assert isinstance(storage, Packed) and storage.code == (
        Affine(STORAGE[type][0], 32) if type in STORAGE else Affine(8, 64)
    )


def test_memory_is_counted(planned: tuple[str, LoadPlan, np.ndarray]) -> None:
    """What the plan says is what the arrays take."""
    type, plan, expected = planned
    entry = entry_of(plan)
    if type in STORAGE:
        blocks = random_blocks(type, 5, WIDTH, 4).reshape(-1, named(type).bytes)
        for at in HALVES[type]:  # of sizes that trained weights have, so that float16 holds what it can
            blocks[:, at : at + 2] = np.full(len(blocks), 0.01, "<f2").view(np.uint8).reshape(-1, 2)
        taken = sum(part.nbytes for part in GGUFBlocks(type).quantized_tensor([blocks.reshape(-1)], (5, WIDTH)))
        bits = 8 * taken / expected.size
        print(f"{type}: {8 * named(type).bytes / named(type).values} bits in the file, {bits} in memory")
        assert entry.nbytes == taken
    else:
        assert entry.nbytes == 4 * expected.size


@pytest.mark.parametrize("type", READERS)
@pytest.mark.parametrize("scale", [np.inf, np.nan])
def test_a_scale_that_is_not_finite_is_named(type: str, scale: float, tmp_path: Path) -> None:
    blocks = random_blocks(type, 5, WIDTH, 4).reshape(-1, named(type).bytes)
    at = HALVES[type][-1]
    blocks[3, at : at + 2] = np.array([scale], "<f2").view(np.uint8)
    write(tmp_path / "z.gguf", {"a.weight": (blocks.reshape(5, -1), type)}, None)
    plan = quantize.keep(keys.plan(tmp_path / "z.gguf", "transformer", {"a.weight": (5, WIDTH)}), frozenset())
    loads = (
        [read_quantized] if type in STORAGE else [lambda e: torch_load.tensor(e, torch.device("cpu")), mlx_load.tensor]
    )
    for load in loads:
        with pytest.raises(ModelError, match=r"z\.gguf: tensor a\.weight has \d+ non-finite values"):
            load(entry_of(plan))
    plan.close()


def test_a_range_of_rows_and_a_true_shape(tmp_path: Path) -> None:
    """A third of a fused matrix, and a convolution that is stored as rows of 256."""
    fused, conv = random_blocks("Q4_K", 6, 256, 5), random_blocks("Q8_0", 9, 256, 6)
    write(tmp_path / "a.gguf", {"qkv": (fused, "Q4_K"), "conv": (conv, "Q8_0")}, None, {"conv": (16, 16, 3, 3)})
    header = gguf_header(tmp_path / "a.gguf")
    manifest = {**dict.fromkeys("qkv", (2, 256)), "conv": (16, 16, 3, 3)}
    places = {name: keys.Place("qkv", keys.Rows(part, part + 1, 3)) for part, name in enumerate("qkv")} | {
        "conv": keys.Place("conv")
    }
    plan = quantize.keep(keys.plan_places(header, "text", places, manifest, keys.stored_uses(manifest)), frozenset())
    for part, name in enumerate("qkv"):
        expected = reference(fused, "Q4_K")[2 * part : 2 * part + 2]
        assert np.array_equal(read(plan.entries[name]), expected)
        assert np.array_equal(Affine(4, 32).values(read_quantized(plan.entries[name])), expected)
    assert np.array_equal(read(plan.entries["conv"]), reference(conv, "Q8_0").reshape(16, 16, 3, 3))
    assert plan.entries["conv"].storage == Dense("float32")
    plan.close()


def gguf_header(path: Path):
    from qwenimg.common.formats.headers import open_header

    return open_header(path)


def test_dimensions_of_one(tmp_path: Path) -> None:
    """Programs that write GGUF drop and add them; other shapes stay refused."""
    values = np.random.default_rng(7).standard_normal((6, 5)).astype(np.float32)
    write(tmp_path / "a.gguf", {"a.weight": (values[:, :, None, None], "F32")}, None)
    for shape, fits in (((6, 5), True), ((1, 6, 5), True), ((5, 6), False), ((30,), False)):
        if fits:
            plan = keys.plan(tmp_path / "a.gguf", "transformer", {"a.weight": shape})
            assert np.array_equal(read(plan.entries["a.weight"]), values.reshape(shape))
            plan.close()
        else:
            with pytest.raises(ModelError, match="has shape"):
                keys.plan(tmp_path / "a.gguf", "transformer", {"a.weight": shape})


@pytest.mark.parametrize("type", [type.name for type in TYPES.values() if type.values > 1 and type.name not in READERS])
def test_a_type_that_is_not_read_is_named(type: str, tmp_path: Path) -> None:
    """Every one that ggml has, with those that are read."""
    blocks = np.zeros((2, named(type).bytes * 256 // named(type).values), np.uint8)
    write(tmp_path / "a.gguf", {"a.weight": (blocks, type)}, None)
    with pytest.raises(ModelError, match=rf"a\.gguf: tensor 'a\.weight' is {type}, which is not read.*Q8_0.*IQ4_XS"):
        keys.plan(tmp_path / "a.gguf", "transformer", {"a.weight": (2, 256)})


@pytest.mark.parametrize("kept", [False, True])
def test_a_layer_takes_little_memory_beside_itself(kept: bool) -> None:
    """8 M values, decoded or as codes: a chunk at a time, and of codes the parts and the whole of one layer."""
    import tracemalloc

    blocks = random_blocks("Q5_K", 16, 1 << 19, 8).reshape(-1)
    tracemalloc.start()
    if kept:
        size = sum(part.nbytes for part in GGUFBlocks("Q5_K").quantized_tensor([blocks], (16, 1 << 19)).arrays)
    else:
        size = GGUFBlocks("Q5_K").values([blocks]).nbytes
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"{size / 1e6:.0f} MB made, {peak / 1e6:.0f} MB at most")
    assert peak < (2 if kept else 1) * size + 12 * CHUNK
