"""Weights kept in codes: read from files, made while loading, the same on both backends, and what may not be coded."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from support import comfy_files

import qwenimg
from qwenimg import backends
from qwenimg.backends.mlx.ops import quantized as on_mlx
from qwenimg.backends.torch.ops import Linear
from qwenimg.backends.torch.ops import quantized as on_torch
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.quant.affine import BITS4, GROUPS, WIDTHS, Affine, encode
from qwenimg.common.weights import keys, quantize
from qwenimg.common.weights.storage import Dense, Packed
from qwenimg.common.weights.values import read, read_chunks, read_quantized
from qwenimg.common.weights.write import Weight, write_shard

CASES = [Affine(bits, group) for bits in WIDTHS for group in GROUPS]
MODEL = Path(qwenimg.__file__).parent / "common" / "data" / "shapes-v1"
BACKENDS = ["cpu", "mlx"]


@pytest.mark.parametrize("code", CASES, ids=lambda code: f"{code.bits} bits, {code.group}")
def test_both_backends_decode_the_same_bits(code: Affine) -> None:
    values = np.random.default_rng(code.bits).standard_normal((5, 3 * 128)).astype(np.float32)
    kept = encode([values], values.shape, code)
    expected = code.values(kept)
    words, scales, biases = map(torch.from_numpy, kept.arrays)
    assert np.array_equal(on_torch.decode(words.view(torch.int32), scales, biases, code).numpy(), expected)
    assert np.array_equal(np.array(on_mlx.decode(*map(mx.array, kept.arrays), code=code)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_decode_to_the_same_memory(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows at a time, the last ones fewer; a smaller layer after a larger one, and the larger one again."""
    monkeypatch.setattr(on_torch, "IN_CACHE", 4 * 128)
    rng, shared = np.random.default_rng(1), on_torch.DecodeBuffer()
    layers, expected = [], []
    for code, (height, width) in ((Affine(4, 32), (11, 128)), (Affine(6, 64), (6, 64)), (Affine(8, 64), (9, 128))):
        kept = encode([rng.standard_normal((height, width)).astype(np.float32)], (height, width), code)
        layer = on_torch.QuantizedLinear(Linear(width, height, bias=False), code, dtype, shared)
        words, *rest = map(torch.from_numpy, kept.arrays)
        layer.put(words.view(torch.int32), *rest)
        layers.append(layer)
        expected.append(torch.from_numpy(code.values(kept.arrays)).to(dtype))
    for i in (0, 1, 2, 0):  # without gradients, as layers compute
        with torch.inference_mode():
            assert torch.equal(layers[i].weight, expected[i]) and layers[i].weight.dtype == dtype
        assert shared.memory.numel() == 11 * 128
        x = torch.from_numpy(rng.standard_normal((3, expected[i].shape[1])).astype(np.float32)).to(dtype)
        assert torch.equal(layers[i](x), x @ expected[i].T)


@pytest.fixture
def file(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """A layer of 5 bits by 32 and one that is dense, with the scales in float16."""
    rng = np.random.default_rng(0)
    kept = encode([rng.standard_normal((6, 96)).astype(np.float32)], (6, 96), Affine(5, 32))
    tensors = {
        "a.weight": kept.codes, "a.scales": kept.scales, "a.biases": kept.biases,
        "a.bias": rng.standard_normal(6).astype(np.float32),
        "b.weight": rng.standard_normal((4, 64)).astype(np.float32),
    }  # fmt: skip
    save_file(tensors, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors", tensors


MANIFEST = {"a.weight": (6, 96), "a.bias": (6,), "b.weight": (4, 64)}


def test_codes_of_a_file_stay_as_they_are(file: tuple[Path, dict[str, np.ndarray]]) -> None:
    path, tensors = file
    plan = quantize.keep(keys.plan(path, "transformer", MANIFEST), frozenset())
    entry = plan.entries["a.weight"]
    assert entry.storage == Packed(Affine(5, 32), "float32") and isinstance(plan.entries["b.weight"].storage, Dense)
    made = read_quantized(entry)
    assert all(
        np.array_equal(x, tensors[f"a.{name}"]) for name, x in zip(("weight", "scales", "biases"), made, strict=True)
    )
    assert np.array_equal(read(entry), Affine(5, 32).values(made))
    table = quantize.keep(plan, frozenset({"a.weight"}))
    print("bytes:", entry.nbytes, "dense:", 6 * 96 * 4)
    assert entry.nbytes == 6 * 96 * 5 // 8 + 6 * 3 * 4 and table.entries["b.weight"].nbytes == 4 * 64 * 4
    plan.close()


def test_a_table_is_decoded(file: tuple[Path, dict[str, np.ndarray]]) -> None:
    plan = quantize.keep(keys.plan(file[0], "text", MANIFEST), frozenset({"a.weight"}))
    assert plan.entries["a.weight"].storage == Dense("float32")
    plan.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("a.scales"), "without scales"),
        (lambda t: t.pop("a.biases"), "without biases are no weight"),
        (
            lambda t: t.update({"a.scales": t["a.scales"][:, :2].copy()}),
            "are no weight [6, 96] in 2, 3, 4, 5, 6, 8 bits",
        ),
        (lambda t: t.update({"a.weight": t["a.weight"][:, :14].copy()}), "are no weight [6, 96]"),
        (lambda t: t.update({"a.biases": t["a.biases"][:5].copy()}), "are no weight [6, 96]"),
        (lambda t: t.update({"a.biases": t["a.biases"].astype(np.float32)}), "are no weight [6, 96]"),
        (lambda t: t.update({"c.scales": t["a.scales"]}), "unknown tensor 'c.scales'"),
    ],
)
def test_triplets_that_do_not_fit_are_refused(
    tmp_path: Path, file: tuple[Path, dict[str, np.ndarray]], change: Any, said: str
) -> None:
    tensors = dict(file[1])
    change(tensors)
    save_file(tensors, tmp_path / "y.safetensors")
    with pytest.raises(ModelError, match=r"y\.safetensors") as caught:
        keys.plan(tmp_path / "y.safetensors", "transformer", MANIFEST)
    assert said in str(caught.value)


def test_four_bits_of_rotated_rows(tmp_path: Path, file: tuple[Path, dict[str, np.ndarray]]) -> None:
    """Written and read again bit for bit, by the tensors alone; the values by the matrix in float64; a smaller error
    of weights with a few large ones."""
    rng, shape = np.random.default_rng(1), (6, 96)
    given = (rng.standard_normal(shape) * np.where(rng.random(shape) < 0.02, 12, 1)).astype(np.float32)
    dense = {"a.weight": given, "a.bias": file[1]["a.bias"], "b.weight": file[1]["b.weight"]}
    save_file(dense, tmp_path / "dense.safetensors")
    plan = keys.plan(tmp_path / "dense.safetensors", "transformer", MANIFEST)
    coded = quantize.quantized(plan, quantize.Policy(BITS4), re.compile("a.weight"))
    entry = coded.entries["a.weight"]
    write_shard(tmp_path / "q.safetensors", [Weight("a.weight", shape, entry)], {}, lambda size: None)
    made = load_file(tmp_path / "q.safetensors")
    assert made["a.rotation"].dtype == np.uint32 and made["a.rotation"].tolist() == [16]
    again = quantize.keep(keys.plan(tmp_path / "q.safetensors", "transformer", {"a.weight": shape}), frozenset())
    assert again.entries["a.weight"].storage == entry.storage == Packed(BITS4, "float32")
    for one, other in zip(read_quantized(again.entries["a.weight"]).arrays, read_quantized(entry).arrays, strict=True):
        assert one.dtype == other.dtype and np.array_equal(one, other)
    exact = Affine(4, 32).values([made["a.weight"], made["a.scales"], made["a.biases"]]).astype(np.float64)
    exact = exact @ comfy_files.rotation(96, 16)
    found, plain = read(again.entries["a.weight"]), Affine(4, 32)
    print("off by", worst := np.abs(found - exact).max() / np.abs(exact).max())
    errors = [np.linalg.norm(one - given) for one in (found, plain.values(encode([given], shape, plain).arrays))]
    print("error: rotated {:.3f}, as they are {:.3f}".format(*errors))
    assert worst < 2e-7 and errors[0] < 0.9 * errors[1]
    coded.close()
    again.close()


MARKERS: dict[str, tuple[dict[str, np.ndarray | None], str]] = {
    **{
        f"groups of {group}": ({"a.rotation": np.array([group], np.uint32)}, f"a.rotation' says groups of {group}:")
        for group in (0, 1, 2, 8, 17, 32, 64, 256, 4**8, 4**9, 2**32 - 1)  # of rows of 96
    },
    "two": ({"a.rotation": np.array([16, 16], np.uint32)}, "is U32 [2]: expected U32 [1]"),
    "none": ({"a.rotation": np.zeros(0, np.uint32)}, "is U32 [0]: expected U32 [1]"),
    "a number alone": ({"a.rotation": np.array(16, np.uint32)}, "is U32 []: expected U32 [1]"),
    "a float": ({"a.rotation": np.array([16], np.float32)}, "is F32 [1]: expected U32 [1]"),
    "signed": ({"a.rotation": np.array([-16], np.int32)}, "is I32 [1]: expected U32 [1]"),
    "of a plain weight": ({"b.rotation": np.array([16], np.uint32)}, "tensor 'b.rotation' is U32, which is not read"),
    "of no weight": ({"c.rotation": np.array([16], np.uint32)}, "tensor 'c.rotation' is U32, which is not read"),
    "without biases": ({"a.rotation": np.array([16], np.uint32), "a.biases": None}, "without biases are no weight"),
}


@pytest.mark.parametrize("case", MARKERS)
def test_a_marker_of_a_rotation_that_is_none_is_one_line(
    tmp_path: Path, file: tuple[Path, dict[str, np.ndarray]], case: str
) -> None:
    change, words = MARKERS[case]
    made = {name: value for name, value in (file[1] | change).items() if value is not None}
    save_file(made, tmp_path / "y.safetensors")
    with pytest.raises(ModelError) as caught:
        keys.plan(tmp_path / "y.safetensors", "transformer", MANIFEST)
    shown = str(caught.value)
    print(shown)
    assert words in shown and "y.safetensors" in shown and shown.isprintable() and len(shown) <= 300


@pytest.mark.parametrize("code", [BITS4, Affine(8, 64)], ids=str)
def test_values_that_no_scale_reaches_are_refused(tmp_path: Path, code: Affine) -> None:
    """Finite in float32, but not their sums and differences."""
    weight = np.where(np.arange(6 * 96).reshape(6, 96) % 3 == 0, -3e38, 3e38).astype(np.float32)
    save_file({"a.weight": weight}, tmp_path / "x.safetensors")
    plan = keys.plan(tmp_path / "x.safetensors", "transformer", {"a.weight": (6, 96)})
    coded = quantize.quantized(plan, quantize.Policy(code), re.compile("a.weight"))
    with pytest.raises(ModelError) as caught:
        read_quantized(coded.entries["a.weight"])
    print(caught.value)
    assert f"tensor 'a.weight' has values too large for {code.bits} bits; leave out -q" in str(caught.value)
    coded.close()


def test_a_scale_that_is_not_finite_is_named(tmp_path: Path, file: tuple[Path, dict[str, np.ndarray]]) -> None:
    tensors = dict(file[1])
    tensors["a.scales"] = tensors["a.scales"].copy()
    tensors["a.scales"][2, 1] = np.inf
    save_file(tensors, tmp_path / "z.safetensors")
    plan = quantize.keep(keys.plan(tmp_path / "z.safetensors", "transformer", MANIFEST), frozenset())
    with pytest.raises(ModelError, match=r"tensor a\.weight has 1 non-finite"):
        read_quantized(plan.entries["a.weight"])
    plan.close()


def test_values_are_coded_a_few_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same codes, and every value that is not finite is counted, in whichever rows it is."""
    monkeypatch.setattr("qwenimg.common.weights.values.CHUNK", 4 * 96)
    good = np.random.default_rng(2).standard_normal((11, 96)).astype(np.float32)
    bad = good.copy()
    bad[(3, 4, 10), 5] = np.nan, np.inf, np.nan
    save_file({"good.weight": good, "bad.weight": bad}, tmp_path / "rows.safetensors")
    plan = keys.plan(tmp_path / "rows.safetensors", "transformer", {"good.weight": (11, 96), "bad.weight": (11, 96)})
    good_entry, bad_entry = (
        replace(plan.entries[f"{name}.weight"], storage=Packed(Affine(4, 32), "float32")) for name in ("good", "bad")
    )
    assert [len(part) for part in read_chunks(good_entry)] == [4, 4, 3]
    made, whole = read_quantized(good_entry), encode([good], good.shape, Affine(4, 32))
    assert all(np.array_equal(a, b) for a, b in zip(made.arrays, whole.arrays, strict=True))
    with pytest.raises(ModelError, match=r"bad\.weight has 3 non-finite"):
        read_quantized(bad_entry)
    plan.close()


@pytest.mark.parametrize("stored", ["values", "codes"])
def test_codes_of_more_than_float16_holds_are_named(tmp_path: Path, stored: str) -> None:
    """As dense weights are: 70000 in a layer of codes is no number in float16, and is one in bfloat16. A group's ends
    may be beyond without a code that is there."""
    rng, code = np.random.default_rng(3), Affine(8, 32)
    values = {name: rng.standard_normal((6, 96)).astype(np.float32) for name in ("a.weight", "b.weight")}
    values["a.weight"][1, 2] = -70000.0
    tensors = dict(values)
    if stored == "codes":
        for name, made in ((name, encode([value], value.shape, code)) for name, value in values.items()):
            layer = name.removesuffix(".weight")
            tensors |= {name: made.codes, f"{layer}.scales": made.scales, f"{layer}.biases": made.biases}
        tensors["b.scales"] = np.full((6, 3), 500, tensors["b.scales"].dtype)
        tensors["b.weight"] = tensors["b.weight"] & 0x3F3F3F3F  # at most 63 of 255, hence 31500 and the bias
    save_file(tensors, tmp_path / "large.safetensors")
    plan = keys.plan(tmp_path / "large.safetensors", "transformer", dict.fromkeys(values, (6, 96)))
    entries = {
        (name, dtype): replace(plan.entries[name], storage=Packed(code, dtype))
        for name in values
        for dtype in ("float16", "bfloat16")
    }
    for key in (("a.weight", "bfloat16"), ("b.weight", "float16"), ("b.weight", "bfloat16")):
        read_quantized(entries[key])
    with pytest.raises(ModelError, match=r"a\.weight reaches 7e\+04, too large for float16; use --precision bf16"):
        read_quantized(entries["a.weight", "float16"])
    plan.close()


def test_policies() -> None:
    assert quantize.parse("8") == quantize.POLICIES["8"]
    assert quantize.parse("text=8,transformer=4") == {
        "text": quantize.Policy(Affine(8, 64)),
        "transformer": quantize.Policy(Affine(4, 32, rotation=16)),
    }
    assert quantize.parse("unet=6") == {"transformer": quantize.Policy(Affine(6, 64))}
    for bad in ("", "7", "vae=8", "4bit", "text", "text=", "8;4"):
        with pytest.raises(UsageError, match=r"(give|It takes) 8, 6 or 4"):
            quantize.parse(bad)
    assert quantize.parse("4,text=8") == quantize.POLICIES["4"] | quantize.parse("text=8")
    for bad in ("text=8,text=4", "8,4", "text=8,4", "unet=8,transformer=8"):
        with pytest.raises(UsageError, match="says again what stands before it"):
            quantize.parse(bad)


# The built-in model


def drawn(backend: str, **choices: Any) -> tuple[Any, np.ndarray]:
    pipe = qwenimg.load("shapes", backend, "fp32", **choices)
    result = pipe("a red circle", seed=1, width=128, height=128, steps=4)
    return pipe, result.pixels.astype(np.float64)


@pytest.fixture(scope="module")
def plain() -> np.ndarray:
    return drawn("cpu")[1]


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    return float(10 * np.log10(255**2 / max(np.mean((a - b) ** 2), 1e-9)))


@pytest.mark.parametrize(
    ("policy", "least"), [("8", 40.0), ("4", 22.0), pytest.param("6", 32.0, marks=pytest.mark.slow), ("text=8", 40.0)]
)
@pytest.mark.sample(0)
def test_a_picture_in_codes(plain: np.ndarray, policy: str, least: float) -> None:
    """The floors are some 3 dB below what was seen: a layer decoded by the wrong scales is below 15. Between backends
    the weights are the same bits, so that float32 differs by its order of sums only."""
    made = {backend: drawn(backend, quantize=policy) for backend in BACKENDS}
    (pipe, torchs), (_, mlxs) = made["cpu"], made["mlx"]
    print(f"{policy}: {psnr(torchs, plain):.1f} dB against float32, {psnr(torchs, mlxs):.1f} dB between backends")
    assert psnr(torchs, plain) > least and np.abs(torchs - mlxs).max() <= 1
    assert pipe("a red circle", steps=1, width=64, height=64, seed=0).recipe["quantize"] == policy


@pytest.mark.sample(0)
def test_a_picture_of_codes_is_made_again(tmp_path: Path) -> None:
    """`--from` takes the codes from the recipe; without them it says what differs."""
    from support.cli_runner import cli

    small = ("--size", "64x64", "--steps", "2", "--backend", "cpu")
    first = cli("a red circle", "-q", "4", *small, "-o", str(tmp_path / "a.png"))
    again = cli("--from", str(tmp_path / "a.png"), "--backend", "cpu", "-o", str(tmp_path / "b.png"))
    plain = cli("a red circle", "-s", "1", *small, "-o", str(tmp_path / "c.png"))
    assert (first.code, again.code, plain.code) == (0, 0, 0), again.err
    from PIL import Image

    a, b = (np.array(Image.open(tmp_path / f"{name}.png")) for name in "ab")
    assert np.array_equal(a, b)


@pytest.mark.sample(0)
def test_a_lora_is_fused_before_its_weights_are_coded(tmp_path: Path) -> None:
    """The same picture as the LoRA on dense weights, up to the codes; another one than without it."""
    rng, width = np.random.default_rng(5), 128
    low = {
        f"transformer.transformer_blocks.{block}.attn.{name}.lora_{side}.weight": rng.standard_normal(shape) * 0.4
        for block in range(6)
        for name in ("to_q", "to_v")
        for side, shape in (("A", (4, width)), ("B", (width, 4)))
    }
    save_file({name: value.astype(np.float32) for name, value in low.items()}, tmp_path / "l.safetensors")
    ask: dict[str, Any] = {"seed": 1, "width": 128, "height": 128, "steps": 4}
    made = {}
    for name, backend, policy in (("dense", "cpu", None), ("cpu", "cpu", "8"), ("mlx", "mlx", "8")):
        pipe = qwenimg.load("shapes", backend, "fp32", quantize=policy)
        with_it = pipe("a red circle", lora=str(tmp_path / "l.safetensors"), **ask).pixels.astype(np.float64)
        made[name] = with_it, pipe("a red circle", **ask).pixels.astype(np.float64)
    own, effect = psnr(made["cpu"][0], made["dense"][0]), psnr(made["cpu"][0], made["cpu"][1])
    print(f"codes {own:.1f} dB from dense, the LoRA {effect:.1f} dB from none")
    assert own > effect + 10 and np.abs(made["cpu"][0] - made["mlx"][0]).max() <= 1
    assert np.abs(made["cpu"][1] - made["mlx"][1]).max() <= 1, "and taken away again"


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_coded_and_what_is_not(backend: str) -> None:
    """Blocks by the policy, the first and the last two and modulation in 8 bits, all else as it was."""
    from qwenimg.common.families import registry
    from qwenimg.common.families.load_options import LoadOptions

    opened = registry.open_model(MODEL, LoadOptions(quantize="4"))
    entries = opened.checkpoint["transformer"].plan.entries
    bits = {name: e.storage.code.bits if isinstance(e.storage, Packed) else 0 for name, e in entries.items()}
    layers = ("attn.to_q", "txt_mlp.net.2")
    by_block = [{bits[f"transformer_blocks.{block}.{layer}.weight"] for layer in layers} for block in range(6)]
    assert by_block == [{8}, {4}, {4}, {4}, {8}, {8}]
    assert bits["transformer_blocks.2.img_mod.1.weight"] == 8
    outside = {name: kept for name, kept in bits.items() if not name.startswith("transformer_blocks.")}
    assert set(outside.values()) == {0} and "proj_out.weight" in outside
    assert not any(isinstance(e.storage, Packed) for e in opened.checkpoint["vae"].plan.entries.values())
    engine, part = backends.load(backend), opened.checkpoint["transformer"]
    from support.policies import BF16

    planned = part.plan.stored(BF16, part.role)
    model = engine.open(part.network, part.config, planned, BF16).model
    layer = model.transformer_blocks[2].attn.to_q
    assert type(layer).__name__ == "QuantizedLinear" and "bfloat16" in str(layer.dtype)
    assert layer.path == "transformer_blocks.2.attn.to_q"
    opened.checkpoint.close()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_a_file_of_codes_is_the_same_as_codes_made_while_loading(tmp_path: Path, backend: str) -> None:
    """A folder with the triplets of `-q 8`, written here from the dense weights by MLX, which names nothing of them."""
    import shutil

    from safetensors.numpy import load_file

    shutil.copytree(MODEL, tmp_path / "m")
    path = tmp_path / "m" / "transformer" / "diffusion_pytorch_model.safetensors"
    dense = {name: np.array(value) for name, value in mx.load(str(path)).items() if value.dtype != mx.bfloat16}
    dense |= {
        name: np.array(value.astype(mx.float32))
        for name, value in mx.load(str(path)).items()
        if value.dtype == mx.bfloat16
    }
    tensors = {}
    for name, value in dense.items():
        if name.startswith("transformer_blocks.") and value.ndim == 2:
            kept = encode([value], value.shape, Affine(8, 64))
            layer = name.removesuffix(".weight")
            tensors |= {name: kept.codes, f"{layer}.scales": kept.scales, f"{layer}.biases": kept.biases}
        else:
            tensors[name] = value
    save_file(tensors, path)
    assert load_file(path)
    pipe = qwenimg.load(tmp_path / "m", backend, "fp32")
    ask: dict[str, Any] = {"seed": 1, "width": 128, "height": 128, "steps": 4}
    own = qwenimg.load(MODEL, backend, "fp32", quantize="transformer=8")("a red circle", **ask).pixels
    assert np.array_equal(pipe("a red circle", **ask).pixels, own)
