"""The policy int8 on models of two families: the picture of the emulation on MLX and in numpy, its error in
`precision`, passports that notice faults of its own, what it works with, and where it is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from support import comfy_files, in_8_bits, tiny_qwen21
from support.cli_runner import cli
from support.family_cases import ASKED, PROMPT, see_few_pixels
from support.folder_tensors import tensors
from support.relative import relative
from support.rotated_models import write_wide, written

import qwenimg
from qwenimg import Result, UsageError
from qwenimg.backends.torch.ops import layers, quantized
from qwenimg.backends.torch.ops.quantized import QuantizedLinear, rounded
from qwenimg.common.families import registry
from qwenimg.common.measure.precision import PolicyRun, recommend
from qwenimg.common.memory import overhead
from qwenimg.common.parity import check, record
from qwenimg.common.parity.passport.passport import Passport
from qwenimg.common.precision.precision import bases, parse
from qwenimg.common.quant.rotated import ROWS
from qwenimg.common.weights import streaming

FAMILIES = ("qwen", "z-image")
INT8, EXACT = "int8", "int8,text=fp32,transformer=fp32"


@pytest.fixture(autouse=True)
def few_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    see_few_pixels(monkeypatch)
    tiny_qwen21.see_small_pictures(monkeypatch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A model of a family whose transformer alone has layers in int8_convrot."""
    place, made = tmp_path_factory.mktemp("int8"), dict[str, Path]()

    def of(kind: str) -> Path:
        if kind not in made:
            made[kind], _ = written(write_wide(kind, place / kind), place / f"{kind}-8", "convrot", ("transformer",))
        return made[kind]

    return of


def drawn(folder: Path, precision: str, backend: str = "cpu", **options: Any) -> Result:
    asked = {name: options.pop(name) for name in ("lora", "cached_calls") if name in options}
    with closing(qwenimg.load(folder, backend=backend, precision=precision, **options)) as pipe:
        return pipe(PROMPT, **ASKED, **asked)


def rounding(folder: Path) -> set[str]:
    """The layers of the transformer that round their input."""
    with closing(registry.open_model(folder).checkpoint) as checkpoint:
        kind = registry.open_model(folder).family.precision
        plan = checkpoint["transformer"].stored(parse(INT8, on_gpu=False, kind=kind))
        return {e.name.removesuffix(".weight") for e in plan.entries.values() if getattr(e.storage, "int8", False)}


# Pictures


class Emulated:
    """Of every call of a layer that rounds, beside its result: float64's by the definition, and MLX's in float32 from
    the same rotated input."""

    def __init__(self) -> None:
        self.own, self.errors, self.ulps = QuantizedLinear._in_8_bits, list[float](), 0.0

    def __call__(self, layer: QuantizedLinear, x: torch.Tensor) -> torch.Tensor:
        made = self.own(layer, x)
        y, codes = made.reshape(-1, layer.out_features).numpy(), layer.codes.view(torch.int8).numpy()
        scales, bias = layer.scales.numpy(), 0.0 if layer.bias is None else layer.bias.numpy()
        rows = x.double().numpy().reshape(-1, layer.in_features)
        whole, steps = in_8_bits.rounded(rows @ comfy_files.rotation(layer.in_features, layer.rotation))
        exact = (whole * steps) @ (codes * scales.astype(np.float64)).T + bias
        self.errors.append(relative(y, exact))
        turned = mx.array(layers.rotate(x, layer.rotation).reshape(rows.shape).numpy())
        other = np.array(in_8_bits.mlx_linear(*in_8_bits.mlx_rounded(turned), mx.array(codes), mx.array(scales)))
        other += np.asarray(bias, np.float32)
        self.ulps = max(self.ulps, float((np.abs(y - other) / np.spacing(np.abs(y))).max()))
        return made


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_product_of_a_picture_is_that_of_the_emulation(
    model: Callable[[str], Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer by layer on the run's own inputs: a whole number that falls to the other side, as rarely one does, moves
    later ones, and two pictures are soon as far from each other as from float32. With the same numbers, by the
    framework's product and by float32's, a picture is the same."""
    folder, emulated = model(kind), Emulated()
    made, exact = drawn(folder, EXACT), drawn(folder, "fp32")
    monkeypatch.setattr(QuantizedLinear, "_in_8_bits", lambda layer, x: emulated(layer, x))
    again = drawn(folder, EXACT)
    monkeypatch.setattr(quantized, "multiplies_int8", lambda device: False)
    other, lost = drawn(folder, EXACT), relative(made.latents, exact.latents)
    few, worst = np.median(emulated.errors), max(emulated.errors)
    print(
        f"{kind}: {lost:.1e} lost; {len(emulated.errors)} products, in the middle {few:.1e} from float64, at most"
        f" {worst:.1e}; {emulated.ulps} ulp from MLX"
    )
    assert 2e-3 < lost < 5e-2 and few < 5e-7 and worst < 2e-3 and emulated.ulps <= 1
    assert np.array_equal(made.latents, again.latents) and np.array_equal(made.latents, other.latents)


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_layers_that_round(model: Callable[[str], Path], kind: str) -> None:
    """They are in int8_convrot, in no FP32 place, and compute in the policy's dtype."""
    coded = {name.removesuffix(".comfy_quant") for name in tensors(model(kind) / "transformer") if "comfy" in name}
    opened = registry.open_model(model(kind))
    with closing(opened.checkpoint) as checkpoint:
        part, policies = checkpoint["transformer"], opened.family.precision
        assert not any(part.multiplies_int8(policy) for policy in bases(policies).values())
        storages = part.stored(parse(INT8, on_gpu=False, kind=policies)).entries
        dtypes = {name: storages[f"{name}.weight"].storage.dtype for name in rounding(model(kind))}
    print(f"{kind}: {len(dtypes)} of {len(coded)} layers in int8_convrot round")
    assert dtypes.keys() <= coded and set(dtypes.values()) == {"bfloat16"}


def test_it_works_with_everything_else(model: Callable[[str], Path], tmp_path: Path) -> None:
    """Streamed, the same bits; beside a LoRA, as near to float32 as without; with calls left out, checked, and in a
    recipe, which draws the same again."""
    folder, rng, layer = model("qwen"), np.random.default_rng(1), "transformer.transformer_blocks.0.attn.to_q"
    width = tensors(folder / "transformer")["transformer_blocks.0.attn.to_q.weight"].shape[1]
    low = {f"{layer}.lora_{x}.weight": rng.standard_normal(s) for x, s in (("A", (4, width)), ("B", (width, 4)))}
    save_file({name: torch.from_numpy(v).float() for name, v in low.items()}, tmp_path / "l.safetensors")
    lora = f"{tmp_path / 'l.safetensors'}:0.2"
    made, fitting = drawn(folder, INT8), streaming.stream_to_fit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            streaming,
            "stream_to_fit",
            lambda plan, blocks, budget, moved: fitting(plan, blocks, min(budget, plan.nbytes * 4 // 5), moved),
        )
        assert np.array_equal(drawn(folder, INT8, max_memory="1000GB").pixels, made.pixels)
    errors = [
        relative(drawn(folder, INT8, **o).latents, drawn(folder, "fp32", **o).latents) for o in ({}, {"lora": lora})
    ]
    print("lost without and with a LoRA:", ", ".join(f"{error:.1e}" for error in errors))
    assert errors[1] < 2 * errors[0] and not np.array_equal(drawn(folder, INT8, lora=lora).pixels, made.pixels)
    assert not np.array_equal(drawn(folder, INT8, cached_calls="2-3").pixels, made.pixels)
    assert made.recipe["precision"]["name"] == INT8 and made.recipe["precision"]["products"] == "int8, lossy"
    one, two = tmp_path / "a.png", tmp_path / "b.png"
    asked = ("-m", str(folder), "--steps", "2", "--size", "52x36", "-s", "7", "--backend", "cpu")
    assert cli(PROMPT, *asked, "--precision", INT8, "--check", "-o", str(one)).code == 0
    ran = cli("--from", str(one), "-m", str(folder), "--backend", "cpu", "-o", str(two))
    assert ran.code == 0 and "lossy: products in 8 bits" in ran.err, ran
    first, again = (np.asarray(Image.open(path)) for path in (one, two))
    assert np.array_equal(first, again)


# What it costs


def test_its_error_is_measured_by_block_and_picture(model: Callable[[str], Path], tmp_path: Path) -> None:
    """`precision` takes it along where the model has such layers, says that it is lossy, and never recommends it."""
    options = ("--backend", "cpu", "--size", "48x48", "--steps", "3", "--json", str(tmp_path / "a.json"))
    ran = cli("precision", str(model("qwen")), *options)
    report = json.loads((tmp_path / "a.json").read_text())
    runs = {run["policy"]: run for run in report["runs"]}
    assert ran.code == 0 and "int8 (lossy)" in ran.out.decode() and report["recommended"] != INT8
    print(ran.out.decode())
    assert runs["bf16"]["latents_error"] < runs[INT8]["latents_error"] < 5e-2 and runs[INT8]["psnr"] > 30
    blocks = {name: {b["name"]: b["errors"]["fp64"] for b in runs[name]["blocks"]} for name in ("bf16", INT8)}
    worse = [name for name, error in blocks[INT8].items() if error > 1.2 * blocks["bf16"][name]]
    assert any("transformer_blocks" in name for name in worse) and not any(name.startswith("layers.") for name in worse)
    exact = PolicyRun(policy=INT8, where="", seconds=0.1, latents_error=1e-9, pixels_error=0.0)
    assert recommend([exact])[0] == ""


@pytest.fixture(scope="module")
def passport(model: Callable[[str], Path]) -> Passport:
    with pytest.MonkeyPatch.context() as patch:
        see_few_pixels(patch)
        with closing(qwenimg.load(model("qwen"), "cpu", INT8)) as pipe:
            asked = {"prompt": "a cat", "width": 48, "height": 48, "steps": 2, "seed": 0}
            return record.record(pipe, asked, exact=pipe.engine, notify=lambda text: None)


def judged(model: Path, passport: Passport) -> list[check.Judged]:
    with closing(qwenimg.load(model, "cpu", INT8)) as pipe:
        return list(check.blocks(passport, pipe))


def towards_zero(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = x.abs().amax(-1, keepdim=True).float() / 127
    return (x / scales).trunc().to(torch.int8), scales


def to_a_smaller_one(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    whole, scales = rounded(x)
    return whole, scales * (127 / 128)


def of_other_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    whole, scales = rounded(x)
    return whole, scales.roll(1, 0)


FAULTS: dict[str, tuple[str, Any]] = {
    "rounded towards zero": ("rounded", towards_zero),
    "the scale of 128": ("rounded", to_a_smaller_one),
    "the scale of the row before": ("rounded", of_other_rows),
    "not rotated": ("rotate", lambda x, group: x),
}


def test_passports_judge_it(model: Callable[[str], Path], passport: Passport) -> None:
    """Blocks with such layers have limits in units of 8 bits; a CPU without instructions for 8 or 16 bits passes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized, "multiplies_int8", lambda device: False)
        for module in (quantized, layers):
            patch.setattr(module, "multiplies", lambda dtype, device: dtype == torch.float32)
        found = judged(model("qwen"), passport)
    in_8_bits = [one for one in found if one.dtype == INT8]
    shares = [figure.error / figure.allowed for one in in_8_bits for figure in one.figures]
    ratios = [f.error / r.error for one in in_8_bits for f, r in zip(one.figures, one.recorded, strict=True)]
    print(f"errors {min(ratios):.3f} to {max(ratios):.3f} of the recorded")
    print(
        f"{len(in_8_bits)} of {len(found)} blocks in 8 bits, errors {min(shares):.2f} to {max(shares):.2f} of the limit"
    )
    assert (
        in_8_bits
        and not any(one.failures for one in found)
        and all(one.name.startswith("transformer") for one in in_8_bits)
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_passports_notice(fault: str, model: Callable[[str], Path], passport: Passport) -> None:
    name, other = FAULTS[fault]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized, name, other)
        found = [one for one in judged(model("qwen"), passport) if one.dtype == INT8]
    caught = [one for one in found if one.failures]
    ratios = [f.error / r.error for one in found for f, r in zip(one.figures, one.recorded, strict=True)]
    print(
        f"{fault}: {len(caught)} of {len(found)} blocks, errors {min(ratios):.2f} to {max(ratios):.1f} of the recorded"
    )
    assert caught, fault


def test_a_plan_counts_its_sums(model: Callable[[str], Path]) -> None:
    """ROWS of the widest layer: 5 bytes of each input and 12 of each output, in place of its decoded weight."""
    opened = registry.open_model(model("qwen"))
    with closing(opened.checkpoint) as checkpoint:
        part, kind = checkpoint["transformer"], opened.family.precision
        plans = {name: part.stored(parse(name, on_gpu=False, kind=kind)) for name in ("bf16", INT8)}
        widest = max(
            5 * e.shape[1] + 12 * e.shape[0] for e in plans[INT8].entries.values() if getattr(e.storage, "int8", False)
        )
        assert overhead.decoded(plans[INT8]) == ROWS * widest and plans[INT8].nbytes == plans["bf16"].nbytes
        decoded = overhead.decoded(plans["bf16"])
    taken = {}
    for name in ("bf16", INT8):
        ran = cli("plan", str(model("qwen")), "--backend", "cpu", "--precision", name, "--json")
        assert ran.code == 0 and ran.events[0]["precision"] == name, ran
        taken[name] = {stage["name"]: stage["activation_bytes"] for stage in ran.events[0]["stages"]}["denoise"]
    assert taken[INT8] - taken["bf16"] == ROWS * widest - decoded


# Refusals


@pytest.mark.slow
def test_compiled(model: Callable[[str], Path]) -> None:
    """Blocks compile whole; a number that falls to the other side moves the picture as far as rounding itself does."""
    made, exact = (drawn(model("qwen"), name) for name in (INT8, "fp32"))
    said: list[str] = []
    load = qwenimg.load(model("qwen"), "cpu", INT8, compile="on", notify=lambda kind, text: said.append(text))
    with closing(load) as pipe:
        compiled = pipe(PROMPT, **ASKED)
    lost, apart = (relative(other.latents, exact.latents) for other in (made, compiled))
    print(f"lost {lost:.1e}, compiled {apart:.1e}; {said}")
    assert apart < 1.5 * lost


def test_where_it_is_refused(model: Callable[[str], Path], tmp_path: Path) -> None:
    out, folder = ("-o", str(tmp_path / "a.png")), str(model("qwen"))
    int8 = ("--precision", INT8)
    cli(PROMPT, "-m", folder, "--backend", "mlx", *int8, *out).refused(2, "mlx has no products in 8 bits", "bf16")
    cli("plan", folder, "--backend", "mlx", *int8).refused(2, "mlx has no products in 8 bits")
    cli("precision", folder, "--backend", "mlx", "--policies", "bf16,int8").refused(2, "mlx has no products in 8 bits")
    plain = str(Path(folder).parent.parent / "qwen")
    for more in ((), ("-q", "8")):
        cli(PROMPT, "-m", plain, "--backend", "cpu", *int8, *more, *out).refused(
            2, "not in int8_convrot", "--transformer"
        )
    cli("precision", plain, "--backend", "cpu", "--policies", INT8).refused(2, "not in int8_convrot")
    cli(PROMPT, "-m", folder, "--precision", "int8,matmul=fp32", *out).refused(2, "leave matmul=fp32 out")
    cli(PROMPT, "-m", folder, "--precision", "int9", *out).refused(2, "int8 (lossy)")
    train = ("--data", str(tmp_path), "-m", folder, "-o", str(tmp_path / "l.safetensors"))
    cli("train", "lora", *train, *int8).refused(2, "--precision 'int8' is not one of")
    with pytest.raises(UsageError, match="products in 8 bits"):
        qwenimg.load(folder, "mlx", INT8)
