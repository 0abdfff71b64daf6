"""ComfyUI's weights in 8 and 4 bits against their formula in float64, on both backends; and what of them is refused."""

from __future__ import annotations

import json
import resource
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import safetensors.torch
import torch
from support import comfy_files

from qwenimg.backends.mlx import load as mlx_load
from qwenimg.backends.mlx import ops as mlx_ops
from qwenimg.backends.mlx.ops import quantized as mlx_quantized
from qwenimg.backends.torch import load as torch_load
from qwenimg.backends.torch import ops as torch_ops
from qwenimg.backends.torch.ops import quantized as torch_quantized
from qwenimg.common.base.errors import ModelError
from qwenimg.common.quant.affine import BITS4, BITS8, Affine, encode
from qwenimg.common.quant.quantized_tensor import QuantStorage
from qwenimg.common.quant.rotated import RotatedInt8, rotated
from qwenimg.common.weights import comfy
from qwenimg.common.weights.keys import plan
from qwenimg.common.weights.plan import LoadPlan
from qwenimg.common.weights.quantize import keep
from qwenimg.common.weights.storage import Dense, Packed
from qwenimg.common.weights.values import read, read_finite, read_quantized

SHAPES = {"a.weight": (6, 64), "b.weight": (4, 3, 3, 3), "c.weight": (5, 64), "d.weight": (3, 7)}
FP8, FP8_WIDE = torch.float8_e4m3fn, torch.float8_e5m2
Tensors = dict[str, torch.Tensor]


def said(**fields: object) -> torch.Tensor:
    """A descriptor as ComfyUI stores it: JSON's bytes."""
    return torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)


def weights(seed: int = 3) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def coded(dtype: torch.dtype, scale: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    spread = scale.reshape(-1, *[1] * (value.ndim - 1)) if scale.ndim < 3 and scale.numel() > 1 else scale
    if scale.ndim == 3:
        spread = scale.expand(-1, -1, value.shape[1] // scale.shape[1]).reshape(value.shape)
    scaled = value / spread.float()
    return scaled.round().clamp(-127, 127).to(torch.int8) if dtype is torch.int8 else scaled.to(dtype)


def formula(code: torch.Tensor, scale: torch.Tensor | None) -> np.ndarray:
    """Code times scale in float64, which is exact."""
    value = code.double()
    if scale is None:
        return value.numpy()
    if scale.ndim == 3:
        return (value.reshape(*scale.shape[:2], -1) * scale.double()).reshape(value.shape).numpy()
    return (value * scale.double().reshape(-1, *[1] * (value.ndim - 1))).numpy()


Case = tuple[Tensors, dict[str, str], dict[str, np.ndarray]]


def older(marker: torch.dtype = FP8, scales: torch.dtype = torch.float32) -> Case:
    """With the marker: a scale for all, one for each row, one for each block; and a plain float beside them."""
    every = {"a": torch.tensor(0.021), "b": torch.full((4, 1), 0.03) + torch.arange(4)[:, None] / 99}
    every["c"] = 0.01 + torch.rand(5, 4, 1, generator=torch.Generator().manual_seed(1)) / 9
    made: Tensors = {"scaled_fp8": torch.zeros(2 if marker is FP8 else 0, dtype=marker)}
    expected = {}
    for layer, scale in every.items():
        kept = scale.to(scales)
        made[f"{layer}.weight"] = coded(FP8, kept, weights()[f"{layer}.weight"])
        made[f"{layer}.scale_weight"] = kept
        expected[f"{layer}.weight"] = formula(made[f"{layer}.weight"], kept)
    made["a.scale_input"] = torch.tensor(1.5)
    made["d.weight"] = weights()["d.weight"].to(FP8_WIDE)
    return made, {}, expected | {"d.weight": formula(made["d.weight"], None)}


def newer(table: bool, prefix: str = "") -> Case:
    """Mixed: E4M3, int8 by rows, E5M2 kept as bytes, and a layer in 16 bit. Said by tensors, or in the metadata."""
    kinds = {"a": ("float8_e4m3fn", FP8), "b": ("int8_tensorwise", torch.int8), "c": ("float8_e5m2", FP8_WIDE)}
    scales = {"a": torch.tensor([0.02]), "b": 0.01 + torch.arange(4.0)[:, None] / 99, "c": torch.tensor(0.5)}
    made: Tensors = {"d.weight": weights()["d.weight"].bfloat16()}
    expected = {"d.weight": made["d.weight"].double().numpy()}
    for layer, (_, dtype) in kinds.items():
        code = coded(dtype, scales[layer], weights()[f"{layer}.weight"])
        made[f"{layer}.weight"] = code.view(torch.uint8) if layer == "c" else code
        made[f"{layer}.weight_scale"] = scales[layer]
        expected[f"{layer}.weight"] = formula(code, scales[layer])
    made["a.input_scale"] = torch.tensor(0.7)
    layers = {layer: {"format": kind, "full_precision_matrix_mult": True} for layer, (kind, _) in kinds.items()}
    if table:
        shown = {prefix + layer: fields for layer, fields in layers.items()}
        return made, {comfy.METADATA: json.dumps({"format_version": "1.0", "layers": shown})}, expected
    return made | {f"{layer}.comfy_quant": said(**fields) for layer, fields in layers.items()}, {}, expected


CASES: dict[str, Callable[[], Case]] = {
    "older": older,
    "older, marker float32, scales bfloat16": lambda: older(torch.float32, torch.bfloat16),
    "newer, by tensors": lambda: newer(table=False),
    "newer, in the metadata": lambda: newer(table=True),
}


def planned(path: Path, made: Tensors, notes: dict[str, str], prefix: str = "") -> LoadPlan:
    safetensors.torch.save_file({prefix + name: value for name, value in made.items()}, path, notes or None)
    return plan(path, "transformer", dict(SHAPES), rename=lambda key: key.removeprefix(prefix))


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("case", CASES)
def test_values_are_code_times_scale_rounded_once(tmp_path: Path, case: str, prefix: str) -> None:
    made, notes, expected = CASES[case]()
    opened = planned(tmp_path / "a.safetensors", made, notes, prefix)
    for name, entry in opened.entries.items():
        once = expected[name].astype(np.float32)  # of the exact product
        assert np.array_equal(np.asarray(torch_load.tensor(entry, torch.device("cpu")).float()), once), name
        on_mlx = mlx_load.tensor(entry)
        on_mlx = on_mlx.transpose(0, 3, 1, 2) if on_mlx.ndim == 4 else on_mlx
        assert np.array_equal(np.array(on_mlx.astype(mx.float32)), once), name
    rest = {prefix + name for name in made} - opened.known
    assert not rest, rest
    opened.close()


def test_metadata_with_the_prefix_of_the_model(tmp_path: Path) -> None:
    prefix = "model.diffusion_model."
    made, notes, expected = newer(table=True, prefix=prefix)
    opened = planned(tmp_path / "a.safetensors", made, notes, prefix)
    assert np.array_equal(read(opened.entries["b.weight"]), expected["b.weight"].astype(np.float32))
    opened.close()


def test_they_are_coded_again_where_that_is_asked_for(tmp_path: Path) -> None:
    """-q of a file in 8 bits: what its values would give, were they kept in float32."""
    made, notes, expected = newer(table=True)
    opened = planned(tmp_path / "a.safetensors", made, notes)
    plain = {name: torch.from_numpy(value.astype(np.float32)) for name, value in expected.items()}
    reference = planned(tmp_path / "b.safetensors", plain, {})
    packed = [
        one.packed(lambda e: QuantStorage(BITS8, 2) if e.name == "a.weight" else None) for one in (opened, reference)
    ]
    assert isinstance(packed[0].entries["a.weight"].storage, Packed)
    first, second = (read_quantized(one.entries["a.weight"]) for one in packed)
    assert all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))
    opened.close(), reference.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"a.comfy_quant": said(format="nvfp4")}, "format nvfp4"),
        ({"a.comfy_quant": said(format="mxfp8")}, "format mxfp8"),
        ({"a.comfy_quant": said(format="convrot_w4a4", convrot_groupsize=64)}, "F8_E4M3 [6, 64]; its descriptor says"),
        (
            {"b.comfy_quant": said(format="int8_tensorwise", convrot=True)},
            "[4, 3, 3, 3]: no rows of 3 that groups of 256",
        ),
        ({"b.comfy_quant": said(format="int8_tensorwise", params={"convrot": True})}, "that groups of 256 rotate"),
        ({"a.comfy_quant": said(format="float8_e4m3fn", convrot=True)}, "has convrot True in float8_e4m3fn"),
        ({"b.comfy_quant": said(convrot=True, per_row=True)}, "names no format"),
        ({"a.comfy_quant": said(format="float8_e5m2")}, "is F8_E4M3; its descriptor says float8_e5m2"),
        ({"b.comfy_quant": said(format="float8_e4m3fn")}, "'b.weight' is I8"),
        ({"a.comfy_quant": said(format="int8_tensorwise")}, "is F8_E4M3; its descriptor says int8_tensorwise"),
        ({"d.comfy_quant": said(format="float8_e4m3fn")}, "is BF16; its descriptor says float8_e4m3fn"),
        ({"b.weight_scale": None}, "without weight_scale"),
        ({"b.comfy_quant": None}, "'b.weight' is I8"),
        ({"c.comfy_quant": None}, "'c.weight' is U8"),
        ({"a.weight_scale": torch.ones(7)}, "'a.weight_scale' is F32 [7], for a weight [6, 64]"),
        ({"a.weight_scale": torch.ones(6, 5, 1)}, "[6, 5, 1]"),
        ({"a.weight_scale": torch.ones(6, 0, 1)}, "[6, 0, 1]"),
        ({"a.weight_scale": torch.ones(6, 2, dtype=torch.uint8)}, "is U8 [6, 2]"),
        ({"d.weight_scale": torch.ones(1)}, "unknown tensor 'd.weight_scale'"),
        ({"e.comfy_quant": said(format="float8_e4m3fn")}, "'e.comfy_quant' is U8, which is not read"),
        ({"a.pre_quant_scale": torch.ones(64)}, "unknown tensor 'a.pre_quant_scale'"),
        ({"a.comfy_quant": torch.zeros(5000, dtype=torch.uint8)}, "U8 of 5000 bytes"),
        ({"a.comfy_quant": torch.full((40,), 255, dtype=torch.uint8)}, "is not UTF-8"),
        ({"a.comfy_quant": torch.tensor(list(b"[" * 900), dtype=torch.uint8)}, "more values than are allowed"),
        ({"a.comfy_quant": torch.tensor(list(b'{"format": "f", "format": "g"}'), dtype=torch.uint8)}, "twice"),
        ({"a.comfy_quant": torch.zeros(5, dtype=torch.float32)}, "is F32 of 20 bytes"),
        ({"a.weight.absmax": torch.ones(3)}, "bitsandbytes"),
        ({"a.qweight": torch.ones(3)}, "Nunchaku"),
        ({"a.weight_qdata": torch.ones(3)}, "torchao"),
    ],
)
def test_what_is_not_read_is_one_line(tmp_path: Path, change: dict, words: str) -> None:
    made, notes, _ = newer(table=False)
    made = {name: value for name, value in (made | change).items() if value is not None}
    with pytest.raises(ModelError) as caught:
        planned(tmp_path / "a.safetensors", made, notes)
    shown = str(caught.value)
    print(shown)
    assert words in shown and "a.safetensors" in shown and shown.isprintable() and len(shown) <= 300


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("[]", "has no table `layers`"),
        ('{"layers": 3}', "has no table `layers`"),
        ('{"layers": {"a": 3}}', "its descriptor of 'a' names no format"),
        ('{"layers": {"a": {"format": 3}}}', "names no format"),
        ('{"layers": {"a": {"format": "\\u001b[2J"}}}', "\\x1b"),
        ('{"layers": {"a": {"format": "float8_e4m3fn"}, "a": {"format": "float8_e5m2"}}}', "twice"),
        ('{"layers": ' + "[" * 10**5 + "]" * 10**5 + "}", "nested"),
        ('{"layers": {' + ",".join(f'"{i}": 1' for i in range(300_000)) + "}}", "more values"),
        (" " * (9 << 20) + "{}", "characters; at most"),
    ],
)
def test_metadata_that_is_not_what_it_should_be(tmp_path: Path, text: str, words: str) -> None:
    """One line within a second and 300 MB."""
    made, _, _ = newer(table=True)
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file(made, path, {comfy.METADATA: text})
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(ModelError) as caught:
        plan(path, "transformer", dict(SHAPES))
    seconds = time.process_time() - start
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    shown = str(caught.value)
    print(f"{seconds:.2f} s, {more:.0f} MB: {shown}")
    assert words in shown and "a.safetensors" in shown and shown.isprintable() and len(shown) <= 300
    assert seconds < 1 and more < 300


def test_layers_of_no_use_may_be_in_any_format(tmp_path: Path) -> None:
    """Such as those of a vision tower, which is not loaded."""
    made, _, expected = newer(table=False)
    made |= {"visual.x.weight": torch.ones(3, 3, dtype=torch.uint8), "visual.x.comfy_quant": said(format="nvfp4")}
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file(made, path)
    opened = plan(path, "text", dict(SHAPES), rename=lambda key: None if key.startswith("visual.") else key)
    assert opened.entries.keys() == expected.keys()
    opened.close()


def test_a_scale_that_is_not_finite_is_named(tmp_path: Path) -> None:
    made, notes, _ = newer(table=False)
    made["a.weight_scale"] = torch.tensor(float("nan"))
    opened = planned(tmp_path / "a.safetensors", made, notes)
    for load in (lambda entry: torch_load.tensor(entry, torch.device("cpu")), mlx_load.tensor):
        with pytest.raises(ModelError, match=r"a\.weight has 384 non-finite"):
            load(opened.entries["a.weight"])
    opened.close()


def test_a_damaged_header_is_one_line_or_another_file(tmp_path: Path) -> None:
    """Bytes of the header and of the descriptors changed: refused in one line, or planned. Both backends read the plan
    and no header, so that the verdict is one."""
    made, _, _ = newer(table=False)
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file(made, path)
    whole = path.read_bytes()
    chance, refused, start = np.random.default_rng(5), 0, time.process_time()
    for _ in range(800):
        data = bytearray(whole)
        for _ in range(chance.integers(1, 4)):
            data[chance.integers(8, len(data))] = chance.choice(list(b'"{}[]:,0179aF8_.\0\xff'))
        path.write_bytes(bytes(data))
        try:
            plan(path, "transformer", dict(SHAPES)).close()
        except ModelError as error:
            refused += 1
            assert str(error).isprintable() and len(str(error)) <= 300
    seconds = time.process_time() - start
    print(f"{refused} of 800 refused, {seconds / 800 * 1e3:.1f} ms each")
    assert refused > 400 and seconds < 60


@pytest.mark.sample(0)
def test_ten_thousand_descriptors_are_read_in_a_second(tmp_path: Path) -> None:
    names = [f"l{i}" for i in range(10_000)]
    shapes = {f"{name}.weight": (1, 1) for name in names}
    made: Tensors = {name: torch.zeros(shape, dtype=FP8) for name, shape in shapes.items()}
    made |= {f"{name}.comfy_quant": said(format="float8_e4m3fn", index=i) for i, name in enumerate(names)}
    safetensors.torch.save_file(made, tmp_path / "a.safetensors")
    start = time.process_time()
    plan(tmp_path / "a.safetensors", "transformer", shapes).close()
    assert time.process_time() - start < 3


# Rotated


def rotated_case(layout: str) -> Case:
    """Two matrices in this layout, of which b is of 16 rows, beside a kernel and a bias as they are."""
    made = weights() | {"b.weight": weights(5)["a.weight"].repeat(3, 1)[:16], "d.weight": torch.randn(3)}
    for name in ("a.weight", "c.weight"):
        made[name] = made[name].repeat(1, 4)
    written = comfy_files.comfy(made, layout, lambda name: True)
    return written.tensors, written.notes, {name: value.double().numpy() for name, value in written.values.items()}


ROTATED_SHAPES = {"a.weight": (6, 256), "b.weight": (16, 64), "c.weight": (5, 256), "d.weight": (3,)}


def opened_rotated(path: Path, made: Tensors) -> LoadPlan:
    safetensors.torch.save_file(made, path)
    return keep(plan(path, "transformer", dict(ROTATED_SHAPES)), frozenset())


@pytest.mark.parametrize("layout", comfy_files.ROTATED)
def test_rotated_values_have_one_rounding_on_both_backends(tmp_path: Path, layout: str) -> None:
    """Against the matrix R of the published formula in float64; and what a layer holds are the same codes."""
    made, _, expected = rotated_case(layout)
    opened = opened_rotated(tmp_path / "a.safetensors", made)
    for name in ("a.weight", "b.weight"):
        entry = opened.entries[name]
        once = expected[name].astype(np.float32)
        assert np.array_equal(read(entry), once), name
        dense = replace(entry, storage=Dense("float32"))
        assert np.array_equal(torch_load.tensor(dense, torch.device("cpu")).numpy(), once)
        assert np.array_equal(np.array(mlx_load.tensor(dense)), once)
        assert isinstance(entry.storage, Packed) and isinstance(code := entry.storage.code, RotatedInt8)
        codes, scales = read_quantized(entry).arrays
        assert np.array_equal(code.values([codes.view("i1"), scales]), once)
        assert entry.nbytes == once.size + 4 * len(once) == codes.nbytes + scales.nbytes
    opened.close()


def test_rows_worked_out_by_hand() -> None:
    """Two rows of 8 values in groups of 4, worked out by hand: H4 rotates a value alone to its column, and four equal
    ones to themselves."""
    codes = np.array([[2, 0, 0, 0, 0, 0, 0, 4], [6, 6, 6, 6, -8, 0, 0, 0]], np.int8)
    scale = np.array([[0.5], [0.25]], np.float32)
    found = RotatedInt8(4).values([codes, scale])
    assert found.tolist() == [[0.5, 0.5, 0.5, -0.5, -1, 1, 1, 1], [1.5, 1.5, 1.5, 1.5, -1, -1, -1, 1]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("code", [*map(RotatedInt8, (4, 16, 64, 256)), BITS4, Affine(6, 64, rotation=256)], ids=str)
def test_a_layer_that_rotates_its_input_gives_what_its_weight_gives(
    code: RotatedInt8 | Affine, lora: bool, dtype: str
) -> None:
    """On both backends, against float64 with the values of the file: with a bias, and beside a LoRA."""
    group = code.rotation
    rng = np.random.default_rng(group)
    given = rng.standard_normal((40, 512)).astype(np.float32)
    if isinstance(code, RotatedInt8):
        coded = code.encode(given)
        weight = code.values([coded.codes.view("i1"), coded.scales]).astype(np.float64)
    else:
        coded = encode([given], given.shape, code)
        weight = code._replace(rotation=0).values(coded.arrays) @ comfy_files.rotation(512, group)
    x = torch.from_numpy(rng.standard_normal((3, 7, 512))).to(getattr(torch, dtype))
    bias, down, up = (rng.standard_normal(size).astype(np.float32) for size in (40, (4, 512), (40, 4)))
    exact = x.double().numpy() @ (weight + (up.astype(np.float64) @ down if lora else 0)).T + bias
    on_torch = torch_quantized.QuantizedLinear(torch_ops.Linear(512, 40), code, getattr(torch, dtype))
    words, *ends = map(torch.from_numpy, coded.arrays)
    on_torch.put(words.view(torch.int32), *ends)
    on_torch.bias = torch.nn.Parameter(torch.from_numpy(bias).to(x.dtype), requires_grad=False)
    on_mlx = mlx_quantized.QuantizedLinear(mlx_ops.Linear(512, 40), code, getattr(mx, dtype))
    on_mlx.put(*map(mx.array, coded.arrays))
    on_mlx.bias = mx.array(bias).astype(getattr(mx, dtype))
    if lora:
        turned = rotated(down, group)
        on_torch.branch = tuple(torch.from_numpy(part).to(x.dtype) for part in (turned, up))
        on_mlx.branch = tuple(mx.array(part).astype(getattr(mx, dtype)) for part in (turned, up))
    on_input = mx.array(x.float().numpy()).astype(getattr(mx, dtype))
    with torch.inference_mode():
        found = {"cpu": on_torch(x).double().numpy(), "mlx": np.array(on_mlx(on_input).astype(mx.float32))}
    for backend, made in found.items():
        error = np.linalg.norm(made - exact) / np.linalg.norm(exact)
        print(f"{backend} {dtype}, {code}: {error:.1e}")
        assert error < (1e-6 if dtype == "float32" else 6e-3 if lora else 4e-3)


def test_a_lora_that_is_no_product_is_fused_and_coded_again(tmp_path: Path) -> None:
    made, _, expected = rotated_case("convrot")
    opened = opened_rotated(tmp_path / "a.safetensors", made)
    change = np.random.default_rng(1).standard_normal((6, 256)).astype(np.float32) * 0.3

    class Whole:
        strength, mode, is_product, rank, inputs = 1.0, "auto", False, None, None

        def added(self, weight: np.ndarray) -> np.ndarray:
            return change.copy()

    entry = replace(opened.entries["a.weight"], deltas=(Whole(),))
    codes, scales = read_quantized(entry).arrays
    assert isinstance(entry.storage, Packed)
    found = entry.storage.code.values([codes.view("i1"), scales])
    wanted = expected["a.weight"] + change
    step = np.abs(wanted @ comfy_files.rotation(256, 256)).max(1, keepdims=True) / 127
    assert (np.abs((found - wanted) @ comfy_files.rotation(256, 256)) <= step / 2 * 1.001).all()
    opened.close()


INT8 = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64}


@pytest.mark.parametrize(
    ("layout", "change", "words"),
    [
        *[
            ("convrot", {"a.comfy_quant": said(**INT8 | {"convrot_groupsize": size})}, words)
            for size, words in [
                (0, "convrot_groupsize 0: expected a power of 4"),
                (-64, "convrot_groupsize -64"),
                (1, "convrot_groupsize 1:"),
                (32, "convrot_groupsize 32"),
                (1024, "[6, 256]: no rows of 256 that groups of 1024 rotate"),
                (4**9, "convrot_groupsize 262144"),
                (2**70, "an integer has 22 digits"),
                (64.0, "convrot_groupsize 64.0: expected a whole number"),
                (float("1e308"), "expected a whole number"),
                ("64", "convrot_groupsize '64'"),
                (True, "convrot_groupsize True"),
                (None, "convrot_groupsize None"),
                ([64], "convrot_groupsize [64]"),
                ("\ud800" * 60, "expected a whole number"),
            ]
        ],
        ("convrot", {"a.comfy_quant": said(**INT8 | {"convrot": "yes"})}, "has convrot 'yes'"),
        ("convrot", {"a.comfy_quant": said(**INT8 | {"convrot": 1})}, "has convrot 1"),
        ("convrot", {"a.comfy_quant": said(**INT8 | {"format": "\ud800"})}, "which is not read"),
        ("convrot", {"a.comfy_quant": torch.tensor(list(b'{"format": NaN}'), dtype=torch.uint8)}, "NaN"),
        ("convrot", {"a.comfy_quant": torch.tensor(list(b'{"format": "' + b"x" * 1100), dtype=torch.uint8)}, "bytes"),
        ("convrot", {"a.weight_scale": None}, "without weight_scale"),
        ("convrot", {"a.weight_scale": torch.ones(6, 2)}, "[6, 2]"),
        ("convrot", {"a.weight_scale": torch.ones(6, 4, 1)}, "[6, 4, 1]"),
        ("convrot", {"a.weight_scale": torch.ones(5, 1)}, "[5, 1]"),
        ("convrot", {"a.weight_scale": torch.ones(6, 1, dtype=torch.int8)}, "I8 [6, 1]"),
        ("convrot", {"a.weight": torch.ones(6, 255, dtype=torch.int8)}, "no rows of 255"),
        ("convrot", {"a.weight": torch.ones(6, 192, dtype=torch.int8)}, "that groups of 256 rotate"),
        ("convrot", {"a.weight": torch.ones(6, 512, dtype=torch.int8)}, "[6, 512], expected [6, 256]"),
        ("convrot", {"a.weight": torch.ones(5, 256, dtype=torch.int8)}, "for a weight [5, 256]"),
        ("convrot", {"a.weight": torch.ones(1536, dtype=torch.int8)}, "'a.weight"),
        ("convrot", {"a.weight": torch.ones(6, 256, dtype=torch.uint8)}, "is U8; its descriptor says int8_tensorwise"),
        ("convrot", {"a.weight": torch.ones(6, 256)}, "is F32; its descriptor says int8_tensorwise"),
        ("convrot", {"a.weight_zero": torch.ones(6)}, "unknown tensor 'a.weight_zero'"),
        ("w4a4", {"a.weight_scale": None}, "without weight_scale"),
        ("w4a4", {"a.weight_scale": torch.ones(12)}, "F32 [12]: expected F32 [6]"),
        ("w4a4", {"a.weight": torch.ones(6, 256, dtype=torch.int8)}, "[6, 512], expected [6, 256]"),
        ("w4a4", {"a.comfy_quant": said(format="convrot_w4a4", convrot=False)}, "has convrot False in convrot_w4a4"),
        ("w4a8", {"a.weight_s_rel": None}, "without weight_s_rel"),
        ("w4a8", {"a.weight_s_channel": None}, "without weight_s_channel"),
        ("w4a8", {"a.weight_codebook": torch.ones(15)}, "F32 [15]: expected F32 [16]"),
        ("w4a8", {"a.weight_s_rel": torch.ones(6, 63)}, "[6, 63]: expected F8_E4M3 [6, 64]"),
        ("w4a8", {"a.weight_correction": torch.ones(64, 6)}, "unknown tensor 'a.weight_correction'"),
        ("w4a8", {"a.comfy_quant": said(format="asym_w4a8_int8", group_size=24)}, "group_size 24"),
        ("w4a8", {"a.comfy_quant": said(format="asym_w4a8_int8", group_size=0)}, "group_size 0"),
        ("w6a8", {"a.weight": torch.ones(6, 190, dtype=torch.int8)}, "'a.weight"),
    ],
)
def test_what_is_no_rotated_weight_is_one_line(tmp_path: Path, layout: str, change: dict, words: str) -> None:
    made, _, _ = rotated_case(layout)
    made = {name: value for name, value in (made | change).items() if value is not None}
    with pytest.raises(ModelError) as caught:
        opened_rotated(tmp_path / "a.safetensors", made)
    shown = str(caught.value)
    print(shown)
    assert words in shown and "a.safetensors" in shown and shown.isprintable() and len(shown) <= 300


SIGNALLING = 0x7F80_0001  # the bits of a NaN of which numpy warns in any product


@pytest.mark.parametrize(
    ("layout", "part", "value"),
    [
        ("convrot", "weight_scale", float("nan")),
        ("convrot", "weight_scale", SIGNALLING),
        ("convrot", "weight_scale", float("inf")),
        ("convrot", "weight_scale", 3e38),
        ("w4a8", "weight_s_rel", float("nan")),
        ("w4a8", "weight_s_channel", float("inf")),
        ("w4a8", "weight_codebook", float("nan")),
        ("w6a8", "weight_s_rel", float("inf")),
    ],
)
def test_a_scale_of_rotated_rows_that_is_not_finite_is_named(
    tmp_path: Path, layout: str, part: str, value: float
) -> None:
    made, _, _ = rotated_case(layout)
    held = made[f"a.{part}"]
    if value == SIGNALLING:
        held.view(torch.int32).fill_(SIGNALLING)
    else:
        made[f"a.{part}"] = torch.full_like(held.float(), value).to(held.dtype)
    opened = opened_rotated(tmp_path / "a.safetensors", made)
    entry = opened.entries["a.weight"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ModelError, match=r"a\.weight has \d+ non-finite"):
            read_quantized(entry)
        with pytest.raises(ModelError, match=r"a\.weight has \d+ non-finite"):
            read_finite(replace(entry, storage=Dense("float32")))
    opened.close()


def test_rows_of_zeros_and_of_a_negative_scale_have_the_formula_s_values(tmp_path: Path) -> None:
    made, _, expected = rotated_case("convrot")
    made["a.weight_scale"][0], made["a.weight_scale"][1] = 0, -made["a.weight_scale"][1]
    opened = opened_rotated(tmp_path / "a.safetensors", made)
    found = read(opened.entries["a.weight"])
    assert not found[0].any() and np.array_equal(found[1], -expected["a.weight"][1].astype(np.float32))
    opened.close()


def test_zero_points(tmp_path: Path) -> None:
    """awq_w4a16, by its formula in float64 with the float16 numbers that it has."""
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 16, (6, 256))
    scales, zeros = ((rng.standard_normal((4, 6)) * 0.1).astype(np.float16) for _ in range(2))
    made: Tensors = {
        "a.weight": comfy_files.nibbles(torch.from_numpy(codes)),
        "a.weight_scale": torch.from_numpy(scales),
        "a.weight_zeros": torch.from_numpy(zeros),
        "a.comfy_quant": said(format="awq_w4a16", group_size=64),
    }
    safetensors.torch.save_file(made, tmp_path / "a.safetensors")
    opened = plan(tmp_path / "a.safetensors", "transformer", {"a.weight": (6, 256)})
    spread = [np.repeat(part.T.astype(np.float64), 64, 1) for part in (scales, zeros)]
    once = (((codes - 8) * spread[0]).astype(np.float32).astype(np.float64) + spread[1]).astype(np.float32)
    assert np.array_equal(read(opened.entries["a.weight"]), once)
    opened.close()
    for name, shape in (("a.weight_zeros", (6, 4)), ("a.weight_scale", (4, 5))):
        wrong = made | {name: torch.ones(shape)}
        safetensors.torch.save_file(wrong, tmp_path / "b.safetensors")
        with pytest.raises(ModelError, match=f"'{name}' is F32"):
            plan(tmp_path / "b.safetensors", "transformer", {"a.weight": (6, 256)})
