"""The dtype of every matrix product, convolution, attention and norm, against the policy written out by hand.

Errors do not show a missing FP32 place (the head measures 0.96 u without it and 0.69 u with it), nor that a bfloat16
run is float32 by accident. The record does.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.dtype_record import Call, recorded
from support.parity_bench import NO_HEAD, Bench, whole_runs
from support.parity_blocks import BLOCKS
from support.parity_cases import DIT, MLX, TORCH, Files, Twin
from support.parity_verdict import Verdict, judge
from support.policies import BF16, BF16_PLAIN, FP16_PLAIN, FP32, MMDIT, parse

from qwenimg.common.networks.denoisers import qwen_dit
from qwenimg.common.networks.encoders import qwen
from qwenimg.common.parity import parity
from qwenimg.common.precision import precision
from qwenimg.common.precision.precision import Precision
from qwenimg.common.weights import quantize
from qwenimg.common.weights.storage import Packed

F, B, H = "float32", "bfloat16", "float16"
ALL_BF16 = replace(BF16, name="bf16,vae=bf16", vae="bfloat16")
POLICIES = (FP32, BF16, BF16_PLAIN, FP16_PLAIN, NO_HEAD, ALL_BF16)

ATTENTION = "attention"
# Component, whose call, what it calls, and the dtype of all inputs under each of the policies, in order.
TABLE = (
    ("text", r"layers\.\d+\.(self_attn|mlp)\.[a-z]+_proj", "product", (F, B, B, H, B, B)),
    ("text", ATTENTION, "attention", (F, B, B, H, B, B)),
    ("text", r"(layers\.\d+\.\w+)?norm", "rms_norm", (F, F, F, F, F, F)),
    ("text", "residual", "stream", (F, F, B, H, F, F)),
    ("transformer", r"(img|txt)_in", "product", (F, F, B, H, F, F)),
    ("transformer", r"time_text_embed\..*", "product", (F, F, B, H, F, F)),
    ("transformer", r"transformer_blocks\.\d+\.(img|txt)_mod\.1", "product", (F, F, B, H, F, F)),
    ("transformer", r"transformer_blocks\.\d+\.(attn|img_mlp|txt_mlp)\..*", "product", (F, B, B, H, B, B)),
    ("transformer", r"norm_out\.linear", "product", (F, F, B, H, B, F)),
    ("transformer", r"proj_out", "product", (F, F, B, H, B, F)),
    ("transformer", ATTENTION, "attention", (F, B, B, H, B, B)),
    ("transformer", "norm_modulate", "layer_norm", (F, F, B, H, F, F)),
    ("transformer", r"txt_norm|.*\.attn\.norm_\w+", "rms_norm", (F, F, F, F, F, F)),
    ("transformer", "gated", "stream", (F, F, B, H, F, F)),
    ("vae", r"(encoder|decoder)\..*|(post_)?quant_conv", "convolution", (F, F, F, F, F, B)),
    ("vae", "spatial_attention", "attention", (F, F, F, F, F, B)),
    ("vae", r".*norm\w*", "sum", (F, F, F, F, F, F)),
    ("vae", "residual", "stream", (F, F, F, F, F, B)),
)
LAYERS = {"product", "convolution"}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("dtypes"))


# On a CPU without a kernel for it a 16-bit product may be computed in float32: of rounded inputs, its result rounded
# once, which is what a kernel does. MLX has no fused attention there, torch no products without instructions for them.
WIDENED = {("mlx", "attention"), ("torch", "product"), ("torch", "convolution")}


def right(twin: Twin, call: Call, want: str) -> bool:
    if set(call.dtypes) == {want}:
        return True
    may_widen = (twin.name, call.kind) in WIDENED and not twin.engine.on_gpu and not call.result
    return may_widen and set(call.dtypes) == {F} and want in call.holds


def record(bench: Bench, twin: Twin, policy: Precision, fresh: bool = False) -> dict[str, list[Call]]:
    """The calls of each component."""
    found = {}
    for part, run in whole_runs(bench, twin, policy, fresh).items():
        with recorded(twin) as calls:
            run()
        found[part] = calls
    return found


def faults(twin: Twin, policy: Precision, found: dict[str, list[Call]]) -> list[str]:
    """What in the record is not as the table says, a call that it does not know and a row without a call included."""
    column = [p.name for p in POLICIES].index(policy.name)
    wrong, met = [], set()
    for part, calls in found.items():
        for call in calls:
            rows = [r for r in TABLE if r[0] == part and r[2] == call.kind and re.fullmatch(r[1], call.label)]
            want = rows[0][3][column] if rows else "no such call"
            met.update(rows)
            if len(rows) != 1 or not right(twin, call, want):
                what = f"{call.kind} {'result' if call.result else 'inputs'}"
                wrong.append(f"{part} {call.label} {what}: {', '.join(call.dtypes)}, expected {want}")
    return wrong + [f"{row[0]} {row[1]}: never called" for row in TABLE if row not in met]


@pytest.fixture(params=[TORCH, MLX], ids=["torch", "mlx"])
def twin(request: pytest.FixtureRequest) -> Twin:
    return request.param()


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.sample(1)
def test_every_call_is_in_the_dtype_of_the_policy(bench: Bench, twin: Twin, policy: Precision) -> None:
    found = record(bench, twin, policy)
    counts = {part: len(calls) for part, calls in found.items()}
    print(f"{twin.name} {policy.name}: {counts} calls")
    assert faults(twin, policy, found) == []


@pytest.mark.parametrize("name", ["fp16", "fp16-upcast", "bf16,attention=fp32"])
@pytest.mark.sample(1)
def test_layers_that_compute_in_their_own_way(bench: Bench, twin: Twin, name: str) -> None:
    """fp16: products of scaled inputs in float16; fp16-upcast: all in float32; attention=fp32: queries, keys and values
    in float32, the products beside it as they were."""
    found = record(bench, twin, parse(name, on_gpu=False))["transformer"]
    inputs = [call for call in found if not call.result]
    blocks = [c for c in inputs if re.fullmatch(r"transformer_blocks\.\d+\.(attn|\w+_mlp)\..*", c.label)]
    products = [c for c in blocks if c.kind == "product"]
    attended = [c for c in inputs if c.kind == "attention"]
    want = {"fp16": (H, H), "fp16-upcast": (F, F), "bf16,attention=fp32": (B, F)}[name]
    print(f"{twin.name} {name}: {len(products)} products in {want[0]}, {len(attended)} attentions in {want[1]}")
    layers = {call.label for call in products}  # one makes a product for each row of a batch where those lie apart
    assert len(layers) == 12 * DIT.num_layers and len(attended) == DIT.num_layers
    assert [c for c in products if not right(twin, c, want[0])] == []
    assert [c for c in attended if not right(twin, c, want[1])] == []


class QuantizedTensor(Files):
    """The same with all weights of blocks kept in 4, 6 and 8 bits."""

    def __init__(self, folder: Path, stored: str):
        super().__init__(folder, stored)
        for part, role, blocks in (
            ("transformer", "transformer", qwen_dit.NETWORK.blocks),
            ("text", "text", qwen.QWEN2_5_VL.blocks),
        ):
            assert blocks is not None
            self.plans[part] = quantize.quantized(self.plans[part], quantize.POLICIES["4"][role], blocks)


class CodedBench(Bench):
    make_files = QuantizedTensor


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return CodedBench(tmp_path_factory.mktemp("codes"))


@pytest.mark.parametrize("policy", [BF16, BF16_PLAIN], ids=lambda policy: policy.name)
@pytest.mark.sample(1)
def test_layers_of_codes_compute_in_the_dtypes_of_the_policy(coded: Bench, twin: Twin, policy: Precision) -> None:
    codes = sum(isinstance(e.storage, Packed) for plan in coded.files(B).plans.values() for e in plan.entries.values())
    found = record(coded, twin, policy)
    print(f"{twin.name} {policy.name}: {codes} layers of codes, {sum(map(len, found.values()))} calls")
    assert codes > 40 and faults(twin, policy, found) == []


@pytest.mark.sample(1)
def test_a_float32_place_that_codes_lose_is_caught(coded: Bench, twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "ONCE", None)  # the modulation's
    found = faults(twin, BF16, record(coded, twin, BF16, fresh=True))
    assert any("img_mod.1 product result: bfloat16, expected float32" in fault for fault in found), found[:2]


def test_every_weight_was_in_a_call(bench: Bench, twin: Twin) -> None:
    found, files = record(bench, twin, BF16), bench.files("bfloat16")
    for part, calls in found.items():
        called = {call.label for call in calls if call.kind in LAYERS}
        weights = {name.removesuffix(".bias").removesuffix(".weight") for name in files.plans[part].entries}
        weights = {name for name in weights if "norm" not in name.rpartition(".")[2] and not name.endswith("gamma")}
        assert called == weights - {"embed_tokens"}, part


def test_mlx_attends_in_float32_on_the_cpu(bench: Bench) -> None:
    """Its unfused attention would round the scores of 16-bit queries and keys."""
    if MLX().engine.on_gpu:
        pytest.skip("a GPU has a fused kernel")
    for calls in record(bench, MLX(), ALL_BF16).values():
        attended = [call for call in calls if call.kind == "attention" and not call.result]
        assert attended and all(set(call.dtypes) == {F} and "bfloat16" in call.holds for call in attended)


# Planted


def _no_upcast(patch: pytest.MonkeyPatch, twin: Twin, place: str) -> None:
    patch.setitem(MMDIT.keys, place, re.compile("(?!)"))


PLANTS = {
    "no head upcast": lambda patch, twin: _no_upcast(patch, twin, "final_norm"),
    "no modulation upcast": lambda patch, twin: patch.setattr(precision, "ONCE", None),
    "no upcast of what starts the streams": lambda patch, twin: _no_upcast(patch, twin, "residual"),
    "residual stream in bfloat16": lambda patch, twin: patch.setattr(
        Precision, "residual_dtype", lambda self, part: self.compute_dtype(part)
    ),
    "float32 by accident": lambda patch, twin: patch.setitem(twin.nn.DTYPES, "bfloat16", twin.nn.DTYPES["float32"]),
    "float16 instead": lambda patch, twin: patch.setitem(twin.nn.DTYPES, "bfloat16", twin.nn.DTYPES["float16"]),
    "RMSNorm in bfloat16": lambda patch, twin: patch.setattr(twin.nn.RMSNorm, *narrow_norm(twin)),
}


def narrow_norm(twin: Twin):
    """An RMSNorm that computes in bfloat16 and returns float32: no later dtype shows it."""
    half, wide = twin.nn.DTYPES["bfloat16"], twin.nn.DTYPES[F]
    if twin.name == "torch":
        norm = torch.nn.functional.rms_norm
        return "forward", lambda self, x: norm(x.to(half), x.shape[-1:], self.weight.to(half), self.eps).to(wide)
    import mlx.core as mx

    return "__call__", lambda self, x: mx.fast.rms_norm(x.astype(half), self.weight.astype(half), self.eps).astype(wide)


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.sample(1)
def test_planted_dtype_is_caught(bench: Bench, twin: Twin, plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTS[plant](monkeypatch, twin)
    found = faults(twin, BF16, record(bench, twin, BF16, fresh=True))
    print(f"{twin.name} {plant}: {len(found)} wrong calls, as {found[:1]}")
    assert found


def test_forgotten_cast_is_caught_where_mlx_would_promote(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses to multiply bfloat16 by float32; MLX promotes, and a whole run is float32 in silence."""
    import mlx.core as mx

    def forgetful(self, x):
        return mx.addmm(self.bias, x, self.weight.T) if "bias" in self else mx.matmul(x, self.weight.T)

    monkeypatch.setattr(MLX().nn.Linear, "__call__", forgetful)
    found = faults(MLX(), BF16, record(bench, MLX(), BF16, fresh=True))
    print(found[:2])
    assert any("bfloat16" in fault and "float32" in fault for fault in found)


def test_products_outside_of_layers_are_seen(twin: Twin) -> None:
    """By an operator, by a function, in inference mode and out of it."""
    a, b = (twin.array(np.ones((4, 4)), dtype) for dtype in ("bfloat16", "bfloat16"))
    with recorded(twin) as calls:
        _ = a @ b
        if twin.name == "torch":
            torch.nn.functional.linear(a, b)
            with torch.inference_mode():
                torch.bmm(a[None], b[None])
        else:
            import mlx.core as mx

            mx.matmul(a, b)
            mx.addmm(a, a, b)
    assert [call.kind for call in calls] == ["product"] * 3
    assert all(set(call.dtypes) == {"bfloat16"} and call.label == "" for call in calls)


# The head alone, on a given input, before any cast

HEAD = next(block for block in BLOCKS if block.name == "dit.head")


def head(bench: Bench, twin: Twin) -> Verdict:
    """The head under bf16, its weights loaded now, against float64 by the limits of float32."""
    values = HEAD.values("normal", "bfloat16")
    reference = bench.reference(HEAD, "normal", "bfloat16")[0]
    made = HEAD.on(twin, twin.component(bench.files("bfloat16"), "transformer", BF16), BF16, values)
    case = parity.Case(component="dit.head", dtype="float32", returned="float32")
    return judge(case, reference, {twin.name: made[0]})


def rounded_inside(patch: pytest.MonkeyPatch, twin: Twin) -> None:
    """The head's norm rounds to bfloat16 and widens again: every dtype is right, and the values are not."""
    original = twin.nn.norm_modulate
    wide = twin.nn.DTYPES["float32"]
    patch.setattr(
        twin.nn, "norm_modulate", lambda x, shift, scale, dtype, eps: twin.nn.stream(
            original(x, shift, scale, twin.nn.DTYPES["bfloat16"], eps), wide
        )
    )  # fmt: skip


@pytest.mark.parametrize("plant", [PLANTS["no head upcast"], rounded_inside], ids=["no upcast", "rounded inside"])
def test_head_alone_shows_a_missing_upcast(bench: Bench, twin: Twin, plant, monkeypatch: pytest.MonkeyPatch) -> None:
    clean = head(bench, twin)
    print(clean.row("as it is"))
    assert clean.ok, clean.failures
    plant(monkeypatch, twin)
    spoiled = head(bench, twin)
    print(spoiled.row("spoiled"))
    assert not spoiled.ok and spoiled.worst > 1000


@pytest.mark.sample(0)
def test_prediction_is_float32_under_every_policy(bench: Bench, twin: Twin) -> None:
    for policy in POLICIES:
        result = whole_runs(bench, twin, policy)["transformer"]()
        assert parity.dtype_name(result) == "float32", policy.name
