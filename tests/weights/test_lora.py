"""LoRA files: every dialect means its formula, on both backends bit for bit; every other file is refused by name."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import lora_cases as cases
from support.cli_runner import cli
from support.parity_cases import DIT, MLX, TORCH, Files, rounded
from support.policies import BF16, FP32

from qwenimg.common.base.errors import ModelError
from qwenimg.common.networks.denoisers import qwen_dit
from qwenimg.common.quant.bits import widened
from qwenimg.common.weights.loras import lora as loras
from qwenimg.common.weights.loras import lora_keys, module_patterns, peft_config
from qwenimg.common.weights.loras.lora_names import DENOISER, Names, component_names
from qwenimg.common.weights.plan import Entry, LoadPlan
from qwenimg.common.weights.values import fused, read

TOLERANCE = 1e-6  # of the largest value: float32 sums of a few products, against float64
MANIFEST = qwen_dit.manifest(DIT)
LINEAR = [name.removesuffix(".weight") for name, shape in MANIFEST.items() if len(shape) == 2]
PATH = "transformer_blocks.1.attn.to_q"
SHAPE = MANIFEST[f"{PATH}.weight"]
NAMES: Names = (component_names("transformer", MANIFEST, DENOISER),)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("lora"), "bfloat16")


def fitted(path: Path, names: Names = NAMES, strength: float = 1.0) -> dict[str, tuple[loras.LowRank, ...]]:
    """What the file adds to the transformer, by path."""
    found = loras.strengthened(loras.fit(loras.read_lora(path), names), strength)
    assert found.keys() == {"transformer"}
    return {name.removesuffix(".weight"): deltas for name, deltas in found["transformer"].items()}


def with_file(plan: LoadPlan, path: Path, strength: float = 1.0) -> LoadPlan:
    found = loras.strengthened(loras.fit(loras.read_lora(path), NAMES), strength)
    return plan.with_deltas(found["transformer"])


def weight_of(entry: Entry) -> np.ndarray:
    """As it is stored, in float32."""
    plain = Entry(name=entry.name, shape=entry.shape, source=entry.source, storage=entry.storage)
    return widened(read(plain))


def close(found: np.ndarray, expected: np.ndarray, what: str = "") -> None:
    error = np.abs(found - expected).max() / np.abs(expected).max()
    print(f"{what} {error:.1e}")
    assert found.dtype == np.float32 and error < TOLERANCE


# Dialects


@pytest.mark.parametrize("name", cases.QWEN)
@pytest.mark.sample(3)
def test_a_dialect_reaches_every_linear_layer_and_means_its_formula(name: str, tmp_path: Path) -> None:
    dialect = cases.QWEN[name]
    modules = {path: cases.lora(MANIFEST[f"{path}.weight"], i) for i, path in enumerate(LINEAR)}
    found = fitted(cases.written(tmp_path / "a.safetensors", modules, dialect))
    assert found.keys() == modules.keys()
    for path, arrays in modules.items():
        shape = MANIFEST[f"{path}.weight"]
        weight = cases.rng(9).standard_normal(shape).astype(np.float32)
        close(found[path][0].added(weight), cases.added(arrays, dialect.scale, shape), path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_factors_in_fewer_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    arrays = cases.lora(SHAPE, 1)
    path = cases.written(tmp_path / "a.safetensors", {PATH: arrays}, cases.QWEN["bare"], dtype)
    stored = {role: torch.from_numpy(a).to(dtype).double().numpy() for role, a in arrays.items()}
    made = fitted(path)[PATH][0].added(np.zeros(SHAPE, np.float32))
    close(made, cases.added(stored, 1.0, SHAPE))


def test_a_folder_that_peft_saved_has_its_alpha_beside(tmp_path: Path) -> None:
    cases.written(tmp_path / peft_config.ADAPTER, {PATH: cases.lora(SHAPE, 1)}, cases.QWEN["PEFT"])
    (tmp_path / peft_config.ADAPTER_CONFIG).write_text(json.dumps({"lora_alpha": 2, "r": 4, "use_rslora": False}))
    assert fitted(tmp_path)[PATH][0].scale == 0.5
    config = {"lora_alpha": 2, "r": 4, "alpha_pattern": {"attn.to_q": 8}}
    (tmp_path / peft_config.ADAPTER_CONFIG).write_text(json.dumps(config))
    assert fitted(tmp_path)[PATH][0].scale == 2.0


# Fused into the weights


@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
def test_fused_weights_are_the_formula_rounded_once_and_the_same_bits_on_both(
    precision: object, files: Files, tmp_path: Path
) -> None:
    paths = [PATH, "transformer_blocks.0.img_mod.1", "proj_out", "img_in"]
    modules = {path: cases.lora(MANIFEST[f"{path}.weight"], i) for i, path in enumerate(paths)}
    file = cases.written(tmp_path / "a.safetensors", modules, cases.QWEN["Lightning"])
    plan = with_file(files.plans["transformer"], file, 0.7).stored(precision)  # type: ignore[arg-type]
    torch_, mlx = TORCH(), MLX()
    for path in paths:
        entry = plan.entries[f"{path}.weight"]
        exact = weight_of(entry) + 0.7 * cases.added(modules[path], 0.25, entry.shape)
        a = torch_.engine.numpy(torch_.load.tensor(entry, torch.device("cpu")))
        b = mlx.engine.numpy(mlx.load.tensor(entry))
        assert (a.view(np.uint32) == b.view(np.uint32)).all(), path
        if entry.storage.dtype == "float32":
            close(a, exact, path)
        else:  # one rounding: but for ties, what the exact sum rounds to
            assert (a != rounded(exact, "bfloat16")).mean() < 1e-3, path


@pytest.mark.parametrize("strength", [-1.0, 0.0, 0.5])
def test_strengths_are_exact(strength: float, files: Files, tmp_path: Path) -> None:
    file = cases.written(tmp_path / "a.safetensors", {PATH: cases.lora(SHAPE, 1)}, cases.QWEN["bare"])
    entry = files.plans["transformer"].entries[f"{PATH}.weight"]
    weight = weight_of(entry)
    once = fitted(file)[PATH][0].added(weight)
    expected = weight if strength == 0 else weight + np.float32(strength) * once
    got = fused(weight, fitted(file, strength=strength)[PATH])
    assert (got.view(np.uint32) == expected.view(np.uint32)).all()


def test_several_add_up(tmp_path: Path) -> None:
    found = []
    arrays = [cases.lora(SHAPE, seed) for seed in (1, 2)]
    for i, strength in enumerate((0.5, -0.25)):
        path = cases.written(tmp_path / f"{i}.safetensors", {PATH: arrays[i]}, cases.QWEN["bare"])
        found.append(loras.strengthened(loras.fit(loras.read_lora(path), NAMES), strength))
    deltas = loras.joined(found)["transformer"][f"{PATH}.weight"]
    weight = cases.rng(1).standard_normal(SHAPE).astype(np.float32)
    exact = weight + cases.added(arrays[0], 0.5, SHAPE) + cases.added(arrays[1], -0.25, SHAPE)
    close(fused(weight, deltas), exact)


# Convolutions, LoHa, LoKr, DoRA

CONV = {"conv.weight": (6, 8, 3, 3), "linear.weight": (6, 8), "point.weight": (6, 8)}
CONV_NAMES: Names = (component_names("transformer", CONV, DENOISER),)


def made_by(
    tensors: Mapping[str, np.ndarray], path: str, tmp_path: Path, weight: np.ndarray | None = None
) -> np.ndarray:
    file = tmp_path / "a.safetensors"
    save_file({key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in tensors.items()}, file)
    found = fitted(file, CONV_NAMES)
    shape = CONV[f"{path}.weight"]
    assert found.keys() == {path}
    return found[path][0].added(np.zeros(shape, np.float32) if weight is None else weight)


def normal(seed: int, *shape: int) -> np.ndarray:
    return cases.rng(seed).standard_normal(shape).astype(np.float32)


def test_locon_of_a_kernel_and_of_a_point(tmp_path: Path) -> None:
    arrays = cases.lora((6, 8, 3, 3), 1)
    halves = {"conv.lora_down.weight": arrays["down"], "conv.lora_up.weight": arrays["up"]}
    close(made_by(halves, "conv", tmp_path), cases.added(arrays, 1, (6, 8, 3, 3)))
    point = cases.lora((6, 8, 1, 1), 2)  # for what the forward uses as a linear layer
    halves = {"point.lora_down.weight": point["down"], "point.lora_up.weight": point["up"]}
    close(made_by(halves, "point", tmp_path), cases.added(point, 1, (6, 8)))


def test_locon_in_the_tucker_form(tmp_path: Path) -> None:
    up, mid, down = normal(1, 6, 3, 1, 1), normal(2, 3, 3, 3, 3), normal(3, 3, 8, 1, 1)
    tensors = {"conv.lora_up.weight": up, "conv.lora_mid.weight": mid, "conv.lora_down.weight": down}
    tensors["conv.alpha"] = np.float32(1.5)
    exact = 0.5 * np.einsum("or,rskl,si->oikl", *(a.astype(np.float64) for a in (up[..., 0, 0], mid, down[..., 0, 0])))
    close(made_by(tensors, "conv", tmp_path), exact)


def test_matrices_may_be_written_as_kernels_of_one_point(tmp_path: Path) -> None:
    """WeightFiles by random files."""
    ones = (1, 1)
    a = [normal(i, *shape) for i, shape in enumerate(((6, 3), (3, 8), (6, 3), (3, 8)))]
    names = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
    tensors = {f"point.{name}": v.reshape(*v.shape, *ones) for name, v in zip(names, a, strict=True)}
    exact = (a[0].astype(np.float64) @ a[1]) * (a[2].astype(np.float64) @ a[3])
    close(made_by(tensors, "point", tmp_path), exact)
    w1, w2 = normal(5, 2, 4), normal(6, 3, 2)
    tensors = {"point.lokr_w1": w1.reshape(2, 4, *ones), "point.lokr_w2": w2.reshape(3, 2, *ones)}
    close(made_by(tensors, "point", tmp_path), np.kron(w1.astype(np.float64), w2))


@pytest.mark.parametrize("path", ["linear", "conv"])
def test_loha(path: str, tmp_path: Path) -> None:
    shape = CONV[f"{path}.weight"]
    sizes = {"w1_a": (6, 3), "w1_b": (3, int(np.prod(shape[1:]))), "w2_a": (6, 3), "w2_b": (3, int(np.prod(shape[1:])))}
    a = {name: normal(i, *size) for i, (name, size) in enumerate(sizes.items())}
    exact = (a["w1_a"].astype(np.float64) @ a["w1_b"]) * (a["w2_a"].astype(np.float64) @ a["w2_b"]) / 3 * 2
    tensors = {f"{path}.hada_{name}": value for name, value in a.items()} | {f"{path}.alpha": np.float32(2)}
    close(made_by(tensors, path, tmp_path), exact.reshape(shape))


def test_loha_in_the_tucker_form(tmp_path: Path) -> None:
    sizes = {"w1_a": (3, 6), "w1_b": (3, 8), "w2_a": (3, 6), "w2_b": (3, 8), "t1": (3, 3, 3, 3), "t2": (3, 3, 3, 3)}
    a = {name: normal(i, *size).astype(np.float64) for i, (name, size) in enumerate(sizes.items())}
    halves = [np.einsum("ijkl,jr,ip->prkl", a[f"t{n}"], a[f"w{n}_b"], a[f"w{n}_a"]) for n in (1, 2)]
    tensors = {f"conv.hada_{name}": value.astype(np.float32) for name, value in a.items()}
    close(made_by(tensors, "conv", tmp_path), halves[0] * halves[1])


# Of LoKr: its factors, and the rank that alpha is divided by.
LOKR: dict[str, tuple[str, dict[str, tuple[int, ...]], int | None]] = {
    "both whole": ("linear", {"w1": (2, 4), "w2": (3, 2)}, None),
    "second split": ("linear", {"w1": (2, 4), "w2_a": (3, 2), "w2_b": (2, 2)}, 2),
    "first split": ("linear", {"w1_a": (2, 1), "w1_b": (1, 4), "w2": (3, 2)}, 1),
    "both split": ("linear", {"w1_a": (2, 2), "w1_b": (2, 4), "w2_a": (3, 2), "w2_b": (2, 2)}, 2),
    "kernel, whole": ("conv", {"w1": (2, 4), "w2": (3, 2, 3, 3)}, None),
    "kernel, split": ("conv", {"w1": (2, 4), "w2_a": (3, 2), "w2_b": (2, 18)}, 2),
    "kernel, Tucker": ("conv", {"w1": (2, 4), "w2_a": (2, 3), "w2_b": (2, 2), "t2": (2, 2, 3, 3)}, 2),
}


@pytest.mark.parametrize("name", LOKR)
def test_lokr(name: str, tmp_path: Path) -> None:
    path, sizes, rank = LOKR[name]
    shape = CONV[f"{path}.weight"]
    a = {part: normal(i, *size).astype(np.float64) for i, (part, size) in enumerate(sizes.items())}
    first = a["w1"] if "w1" in a else a["w1_a"] @ a["w1_b"]
    kernel = shape[2:]
    if "t2" in a:
        second = np.einsum("ijkl,jr,ip->prkl", a["t2"], a["w2_b"], a["w2_a"])
    else:
        second = a["w2"] if "w2" in a else (a["w2_a"] @ a["w2_b"]).reshape(3, 2, *kernel)
    exact = np.kron(first.reshape(*first.shape, *(1,) * len(kernel)), second) * (1 if rank is None else 0.5 / rank)
    tensors = {f"{path}.lokr_{part}": value.astype(np.float32) for part, value in a.items()}
    tensors[f"{path}.alpha"] = np.float32(0.5)
    close(made_by(tensors, path, tmp_path), exact)


@pytest.mark.parametrize("path", ["linear", "conv"])
@pytest.mark.parametrize("kind", ["dora_scale", "dora_scale, inputs", "lora_magnitude_vector"])
def test_dora(path: str, kind: str, tmp_path: Path) -> None:
    shape = CONV[f"{path}.weight"]
    axis = 1 if "inputs" in kind else 0
    weight, arrays = normal(5, *shape), cases.lora(shape, 1)
    magnitude = 1 + np.abs(normal(6, shape[axis]))
    ones = [1] * len(shape)
    ones[1 if kind == "lora_magnitude_vector" and len(shape) == 4 else axis] = shape[axis]
    stored = magnitude if kind == "lora_magnitude_vector" and len(shape) == 2 else magnitude.reshape(ones)
    key = kind.split(",")[0]
    tensors = {f"{path}.lora_A.weight": arrays["down"], f"{path}.lora_B.weight": arrays["up"], f"{path}.{key}": stored}
    changed = weight + cases.added(arrays, 1, shape)
    axes = tuple(i for i in range(len(shape)) if i != axis)
    norm = np.sqrt((changed**2).sum(axis=axes, keepdims=True))
    exact = changed * magnitude.reshape(norm.shape) / norm
    close(weight + made_by(tensors, path, tmp_path, weight), exact)


# Refused


def refusal(tensors: Mapping[str, torch.Tensor], tmp_path: Path, metadata: dict[str, str] | None = None) -> str:
    file = tmp_path / "bad.safetensors"
    save_file(dict(tensors), file, metadata=metadata)
    with pytest.raises(ModelError) as caught:
        found = fitted(file)
        found[PATH][0].added(np.zeros(SHAPE, np.float32))
    message = str(caught.value)
    print(message)
    assert "bad.safetensors" in message
    assert "\n" not in message and len(message) <= 280
    return message


N = SHAPE[0]
DOWN, UP = torch.ones(4, N), torch.ones(N, 4)
GOOD = {f"{PATH}.lora_A.weight": DOWN, f"{PATH}.lora_B.weight": UP}
KOHYA = {f"{PATH}.lora_down.weight": DOWN, f"{PATH}.lora_up.weight": UP}
FLAT = PATH.replace(".", "_")
HALVES = {"lora_A.weight": DOWN, "lora_B.weight": UP}
SPLIT = [f"{PATH[:-4]}to_{x}" for x in "qkv"]
FUSED = {f"{PATH[:-4]}to_qkv.lora_A.weight": DOWN, f"{PATH[:-4]}to_qkv.lora_B.weight": torch.ones(3 * N, 4)}
REFUSED: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "a half is missing": ({f"{PATH}.lora_A.weight": DOWN}, "has only down"),
    "another model": (
        {"double_blocks.0.img_attn.qkv.lora_A.weight": DOWN, "double_blocks.0.img_attn.qkv.lora_B.weight": UP},
        "none of its 1 modules, such as 'double_blocks.0.img_attn.qkv'",
    ),
    "one module too many": (GOOD | {f"other.{k}": v for k, v in GOOD.items()}, f"module 'other.{PATH}' is no layer"),
    "text encoder of no model": (
        GOOD | {f"lora_te3_x.{k.rpartition('.l')[2]}": v for k, v in GOOD.items()},
        "'lora_te3_x",
    ),
    "shape": ({f"{PATH}.lora_A.weight": DOWN, f"{PATH}.lora_B.weight": torch.ones(N + 1, 4)}, f"[{N + 1}, {N}]"),
    "ranks": ({f"{PATH}.lora_A.weight": DOWN, f"{PATH}.lora_B.weight": torch.ones(N, 5)}, "ranks 5 and 4"),
    "no rank": ({f"{PATH}.lora_A.weight": torch.ones(0, N), f"{PATH}.lora_B.weight": torch.ones(N, 0)}, "shape"),
    "rank": ({f"{PATH}.lora_A.weight": torch.ones(4097, N), f"{PATH}.lora_B.weight": torch.ones(N, 4097)}, "4097"),
    "integers": ({k: v.to(torch.int32) for k, v in GOOD.items()}, "I32"),
    "alpha nan": (KOHYA | {f"{PATH}.alpha": torch.tensor(float("nan"))}, "alpha is nan"),
    "alpha inf": (KOHYA | {f"{PATH}.alpha": torch.tensor(float("inf"))}, "alpha is inf"),
    "alpha of two": (KOHYA | {f"{PATH}.alpha": torch.ones(2)}, "alpha is F32 [2]"),
    "alpha alone": ({f"{PATH}.alpha": torch.ones(1)}, "without factors"),
    "value nan": (GOOD | {f"{PATH}.lora_A.weight": DOWN * float("nan")}, "not finite"),
    "value too large": ({k: v * 1e30 for k, v in GOOD.items()}, "not finite"),
    "twice, by two names": (GOOD | {f"transformer.{k}": v for k, v in GOOD.items()}, "are of one weight"),
    "twice, by two endings": (GOOD | KOHYA, "are the same"),
    "two adapters": (GOOD | {f"{PATH}.lora_A.other.weight": DOWN}, "are the same"),
    "mixed kinds": (GOOD | {f"{PATH}.lokr_w1": torch.ones(2, 2)}, "has only"),
    "kronecker of another size": (
        {f"{PATH}.lokr_w1": torch.ones(100, 100), f"{PATH}.lokr_w2": torch.ones(100, 100)},
        "makes [10000, 10000]",
    ),
    "magnitude": (GOOD | {f"{PATH}.dora_scale": torch.ones(3, 1)}, "magnitude has shape [3, 1]"),
    "OFT": ({f"{PATH}.oft_blocks": torch.ones(2, 2, 2)}, "is an OFT or BOFT adapter"),
    "BOFT": ({f"{PATH}.boft_R": torch.ones(2, 2, 2)}, "is an OFT or BOFT adapter"),
    "GLoRA": ({f"{PATH}.a1.weight": DOWN}, "is a GLoRA adapter"),
    "magnitude in mixed names, of another length": (
        {f"lora_unet_{FLAT}.lora_down.weight": DOWN, f"lora_unet_{FLAT}.lora_up.weight": UP}
        | {f"lora_unet_{FLAT[:-5]}.to_q.lora_magnitude_vector": torch.ones(3)},
        "magnitude has shape [3]",
    ),
    "a magnitude without halves": (GOOD | {"transformer.proj_out.lora_magnitude_vector": torch.ones(3)}, "incomplete"),
    "one layer with an underscore behind and without": (
        GOOD | {f"{PATH}_.lora_A.weight": DOWN, f"{PATH}_.lora_B.weight": UP},
        "are the same",
    ),
    "one layer wrapped and not": (GOOD | {k.replace("attn", "attn._orig_mod"): v for k, v in GOOD.items()}, "same"),
    "one layer by two programs": (GOOD | {f"pipe.dit.{k}": v for k, v in GOOD.items()}, "are of one weight"),
    "a fused layer and one of its three": (GOOD | FUSED, "are of one weight"),
    "a fused layer of another shape beside its three": (
        {f"{layer}.{half}": v for layer in SPLIT for half, v in HALVES.items()}
        | {k: v[:, :5] if "lora_A" in k else v for k, v in FUSED.items()},
        f"[{3 * N}, 5] of a weight [{3 * N}, {N}]",
    ),
    "two fused layers": (FUSED | {f"unet.{k}": v for k, v in FUSED.items()}, "are of one weight"),
    "half of a fused layer beside its three": (
        {f"{layer}.{half}": v for layer in SPLIT for half, v in HALVES.items()}
        | {k: v for k, v in FUSED.items() if "lora_A" in k},
        "has only down",
    ),
    "a text encoder of another model in ComfyUI's names": (
        {f"text_encoders.clip_l.transformer.{k}": v for k, v in GOOD.items()},
        "none of its 1 modules",
    ),
    "diff nan": (GOOD | {f"{PATH}.diff_b": torch.full((3,), float("nan"))}, "(diff)"),
    "diff small": (GOOD | {f"{PATH}.diff_b": torch.tensor([0.0, 1e-45])}, "(diff)"),
    "diff of integers": (GOOD | {f"{PATH}.diff_b": torch.zeros(3, dtype=torch.int32)}, "(diff)"),
    "diff of zeros alone": ({f"{PATH}.diff": torch.zeros(N, N)}, "(diff)"),
    "bias of something": (GOOD | {f"{PATH}.lora_B.bias": torch.ones(2)}, "the bias has 2 values"),
    "a weight of zeros": (GOOD | {f"{PATH}.set_weight": torch.zeros(N, N)}, "set_weight"),
    "diff": (GOOD | {f"{PATH}.diff": DOWN}, "(diff)"),
    "diff_b": (GOOD | {f"{PATH}.diff_b": DOWN}, "(diff)"),
    "bias": (GOOD | {f"{PATH}.lora_B.bias": DOWN}, "which no bias is"),
    "ControlNet-LoRA": (GOOD | {"lora_controlnet": DOWN}, "is a ControlNet-LoRA"),
    "textual inversion": (GOOD | {"bundle_emb.x.string_to_param.*": DOWN}, "textual inversion"),
    "no LoRA": ({"transformer_blocks.0.attn.to_q.weight": DOWN}, "is of no LoRA that is known"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_is_not_understood_is_refused_by_its_key(name: str, tmp_path: Path) -> None:
    tensors, says = REFUSED[name]
    assert says in refusal({key: value.clone() for key, value in tensors.items()}, tmp_path)


def test_differences_of_zeros_are_read_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many bytes as a whole file of differences has are not read to find that all are zeros."""
    tensors = GOOD | {f"{PATH}.diff": torch.zeros(N, N), "proj_out.diff_b": torch.zeros(3)}
    save_file(tensors, tmp_path / "a.safetensors")
    assert fitted(tmp_path / "a.safetensors").keys() == {PATH}
    monkeypatch.setattr(lora_keys, "MAX_ZEROS", 4 * N * N)
    assert "(diff)" in refusal(tensors, tmp_path)
    monkeypatch.setattr(lora_keys, "_CHUNK", 64)
    monkeypatch.setattr(lora_keys, "MAX_ZEROS", 1 << 30)
    assert fitted(tmp_path / "a.safetensors").keys() == {PATH}
    tensors[f"{PATH}.diff"][-1, -1] = 1e-30
    assert "(diff)" in refusal(tensors, tmp_path)


@pytest.mark.sample(0)
def test_info_of_factors_without_numbers(tmp_path: Path) -> None:
    file = tmp_path / "bad.safetensors"
    for down, up in (((0, N), (N, 0)), ((4, 0), (0, 4)), ((N,), (N,)), ((), ())):
        save_file({f"{PATH}.lora_A.weight": torch.ones(down), f"{PATH}.lora_B.weight": torch.ones(up)}, file)
        ran = cli("info", str(file))
        assert ran.code == 5 and "which no factor has" in ran.err + ran.out.decode() and "Traceback" not in ran.err
    for role in ("hada_w1_a", "lokr_w1", "lora_mid.weight"):
        save_file({f"{PATH}.{role}": torch.ones(0, N)}, file)
        ran = cli("info", str(file))
        assert ran.code == 5 and "which no factor has" in ran.err + ran.out.decode()


METADATA = {
    "not json": ({"lora_adapter_metadata": "{"}, "lora_adapter_metadata"),
    "a list": ({"lora_adapter_metadata": "[]"}, "is not a JSON object"),
    "deep": ({"lora_adapter_metadata": "[" * 50 + "]" * 50}, "nested"),
    "alpha of peft": ({"lora_adapter_metadata": '{"transformer.lora_alpha": "x"}'}, "lora_alpha is 'x'"),
    "alpha of kohya": ({"ss_network_alpha": "many"}, "ss_network_alpha is 'many'"),
    "infinite": ({"ss_network_alpha": "inf"}, "ss_network_alpha"),
}


def peft(**config: object) -> dict[str, str]:
    return {"lora_adapter_metadata": json.dumps({"lora_alpha": 2, "r": 4} | config)}


METADATA |= {
    "rank of peft": (peft(r=8), "its factors have rank 4, PEFT's configuration says 8"),
    "rank by a pattern": (peft(rank_pattern={".*to_q": 5}), "rank 4, PEFT's configuration says 5"),
    "no rank": (peft(r=True), "r is 'True', not a whole number"),
    "rank 0": (peft(r=0), "r is '0', not a whole number"),
    "alpha by a pattern": (peft(alpha_pattern={"to_q": [1]}), "lora_alpha is '[1]', not a number"),
    "no alpha by a pattern": (peft(alpha_pattern={"to_q": None}), "lora_alpha is 'None', not a number"),
    "rank-stabilised, as a text": (peft(use_rslora="true"), "use_rslora is 'true', not true or false"),
    "rank-stabilised, as a number": (peft(use_rslora=1), "use_rslora is '1', not true or false"),
    "a list of patterns": (peft(alpha_pattern=["to_q"]), "alpha_pattern is \"['to_q']\", not an object"),
    "of no module": (peft(alpha_pattern={"to_q": 1, "to_k": 2}), "alpha_pattern pattern 'to_k' matches none"),
    "of no module, ranks": (peft(rank_pattern={"attn": 4}), "rank_pattern pattern 'attn' matches none"),
    "of a component that is not there": (
        {"lora_adapter_metadata": json.dumps({"text_encoder.alpha_pattern": {"to_q": 1}, "transformer.r": 4})},
        "'to_q' matches none",
    ),
    "changes the base": (peft(init_lora_weights="pissa_niter_4"), "init_lora_weights 'pissa_niter_4'"),
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata_is_read_strictly(name: str, tmp_path: Path) -> None:
    metadata, says = METADATA[name]
    assert says in refusal({key: value.clone() for key, value in GOOD.items()}, tmp_path, metadata)


# PEFT's patterns

NAMES_OF_MODULES = ["a.b", "ab", "b.a.ab", "blocks.0.attn.to_q", "blocks.10.attn.to_k", "a", "aab.bba", "0.a-b_c"]
PIECES = (
    "a", "b", ".", "\\.", "[ab]", "[^.]", "\\d", "\\w+", "*", "+", "?", "(", ")", "|", "(?:", "^", "$", "{1,2}", "{2}",
    "*?", "0", "attn", "to_q", "[0-9]", "{,1}", "{1,}", "]", "}", "[]a]", "\\-", "_", "??", "\\D", "(?=", "\\1", "\\b",
    "{", "[",
)  # fmt: skip
HOSTILE = {
    "repeats of repeats": "(a+)+$",
    "repeats of repeats, hidden": "((a|b)*c?)*x",
    "counted repeats of repeats": "((a{1,99}){1,99}){1,99}",
    "deep groups": "(" * 200 + "a" + ")" * 200,
    "not closed": "(to_q",
    "closed twice": "to_q)|(to_k",  # ends PEFT's own group
    "a class that is not closed": "[to_q",
    "a class the wrong way round": "[z-a]",
    "a set of sets": "[[a]&&[b]]",
    "a repeat of nothing": "*to_q",
    "a possessive repeat": "a++",
    "a reference back": "(a)\\1",
    "a look ahead": "(?!to_k).*",
    "flags": "(?i)TO_Q",
    "numbers the wrong way round": "a{5,2}",
    "a long one": "a" * 513,
    "a zero byte in an escape": "\\",
}


def test_patterns_match_what_peft_matches() -> None:
    """Random expressions: each that is read is one of `re` and matches the same names; enough of both kinds."""
    generator = random.Random(1)
    read_ = matches = 0
    for _ in range(8_000):
        pattern = "".join(generator.choice(PIECES) for _ in range(generator.randint(0, 9)))
        expected = []
        try:
            made = [name for name in NAMES_OF_MODULES if name in first_matches(pattern, NAMES_OF_MODULES)]
        except ValueError as error:
            if "matches none" not in str(error):
                continue
            made = []
        expected = [name for name in NAMES_OF_MODULES if re.match(rf"(.*\.)?({pattern})$", name)]
        assert made == expected, pattern
        read_, matches = read_ + 1, matches + len(made)
    print(f"{read_} patterns read, {matches} matches")
    assert read_ > 1_500 and matches > 500


def first_matches(pattern: str, names: list[str]) -> dict[str, str]:
    return module_patterns.first_matches([pattern], names)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_pattern_that_is_not_read_is_refused(name: str, tmp_path: Path) -> None:
    message = refusal(GOOD, tmp_path, peft(alpha_pattern={HOSTILE[name]: 1}))
    assert "alpha_pattern pattern" in message and "is not read: " in message


@pytest.mark.parametrize("pattern", ["a?" * 100 + "a{99}", "(?:a|a)" * 60 + "x", ".*" * 200 + "x", "a*" * 200 + "x"])
def test_a_pattern_that_takes_backtracking_for_ever_takes_few_steps(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_patterns, "MAX_STEPS", 20_000)
    with pytest.raises(ValueError, match="matches none"):
        first_matches(pattern, ["a" * 90 + "b"])


def test_patterns_that_take_long_together_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patterns = {f"{'.*' * 100}z{i}.*": 1 for i in range(100)}
    monkeypatch.setattr(module_patterns, "MAX_STEPS", 10_000)
    assert "take too long" in refusal(GOOD, tmp_path, peft(alpha_pattern=patterns))
    many = {str(i): 1 for i in range(module_patterns.MAX_PATTERNS + 1)}
    assert "at most 5000 are read" in refusal(GOOD, tmp_path, peft(alpha_pattern=many))
    wide = {f"{i}".rjust(module_patterns.MAX_PATTERN, "a"): 1 for i in range(600)}
    assert "characters together; at most 300000 are read" in refusal(GOOD, tmp_path, peft(alpha_pattern=wide))


@pytest.mark.sample(0)
def test_finding_a_class_in_long_names_counts_as_the_steps_that_it_takes() -> None:
    """90 patterns of 100 classes each, no two alike, and 3,000 long names took minutes within the limit of steps."""
    classes = [f"[^{chr(0x4E00 + i)}]*" for i in range(9_000)]
    patterns = ["".join(classes[i : i + 100]) + "Z" for i in range(0, len(classes), 100)]
    started = time.process_time()
    with pytest.raises(ValueError, match="take too long"):
        module_patterns.first_matches(patterns, [f"{'a.' * 250}{i}" for i in range(3_000)])
    assert time.process_time() - started < 60  # 2 on a core from 2018


@pytest.mark.parametrize("form", ["{}", "^{}", "{}$", "^{}$"])
@pytest.mark.sample(1)
def test_a_pattern_for_each_module_of_a_large_model_is_read(form: str) -> None:
    """Diffusers writes `^name` for every module whose rank is not the commonest."""
    layers = ("attn.to_q", "attn.add_q_proj", "attn.to_out.0", "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mod.1")
    names = [
        f"transformer_blocks.{i}.{layer}{twin}" for i in range(60) for layer in layers for twin in ("", "_b", "_c")
    ]
    patterns = [form.format(name.replace(".", "\\.")) for name in names]
    assert module_patterns.first_matches(patterns, names) == dict(zip(names, patterns, strict=True))


def test_a_pickle_is_never_read(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    torch.save({"a.lora_A.weight": DOWN}, file)
    with pytest.raises(ModelError, match="pickle"):
        loras.read_lora(file)
