"""`qwenimg lora merge` and `resize`: the sums and the nearest ranks of float64, whatever the files' names and kinds.
Nothing is left of a run that fails."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support import lora_cases as cases
from support import processes
from support.cli_runner import cli
from support.lora_spellings import Modules, denoiser, flat

from qwenimg.common.families import registry
from qwenimg.common.networks.denoisers import zimage_dit
from qwenimg.common.weights.loras import lora as loras
from qwenimg.common.weights.loras.lora_names import Names, find

KINDS = ("qwen", "qwen21", "z-image", "flux-dev", "flux2-klein", "sd3", "sd15", "sdxl")
TOLERANCE = 2e-6  # of the largest value: float32 sums of a few products, rounded once more in the file
PREFIX = {"qwen": "diffusion_model.", "qwen21": "diffusion_model.", "z-image": "diffusion_model."}
A, B = 0.5, -0.7
FLAT = cases.QWEN["kohya, musubi"]
DOTTED = cases.Dialect("transformer.", cases.PEFT_HALVES)


def names_of(folder: Path) -> Names:
    opened = registry.open_model(folder)
    opened.checkpoint.close()
    return opened.family.lora_names(opened.checkpoint)


def layers(kind: str, folder: Path, names: Names, first: int, step: int) -> Modules:
    """Factors for some of the denoiser's layers."""
    known = [path for path in cases.shapes(folder, denoiser(kind)) if find(names, path)]
    there = cases.shapes(folder, denoiser(kind))
    return {path: cases.lora(there[path], i + first) for i, path in enumerate(known[first::step])}


def change(file: Path, names: Names) -> dict[str, np.ndarray]:
    """What a file adds to each weight of the denoiser, by this project's loader."""
    lora = loras.read_lora(file)
    found = {}
    for by_name in loras.fit(lora, names).values():
        for name, deltas in by_name.items():
            [target] = [one for table in names for every in table.names.values() for one in every if one.name == name][
                :1
            ]
            found[name.removesuffix(".weight")] = deltas[0].added(np.zeros(target.shape, np.float32))
    lora.close()
    return found


def worst(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return max(
        float(np.abs(found[path].reshape(want.shape) - want).max() / np.abs(want).max())
        for path, want in expected.items()
    )


def zimage(path: str) -> str:
    """The manifest's path of a layer of Z-Image in diffusers' files."""
    return str(zimage_dit.rename(f"{path}.weight")).removesuffix(".weight")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(3)
def test_a_sum_is_exact_in_every_family(kind: str, tiny: dict[str, Path], tmp_path: Path) -> None:
    """Of two files in different names, with layers in common; the names of the result are those of the family."""
    folder, names = tiny[kind], names_of(tiny[kind])
    first, second = layers(kind, folder, names, 0, 2), layers(kind, folder, names, 0, 3)
    a = cases.written(tmp_path / "a.safetensors", first, FLAT)
    b = cases.written(tmp_path / "b.safetensors", second, DOTTED)
    out = tmp_path / "c.safetensors"
    ran = cli("lora", "merge", f"{a}:{A}", f"{b}:{B}", "-m", str(folder), "-o", str(out))
    assert ran.code == 0 and ran.paths == [out], ran.err
    shapes = cases.shapes(folder, denoiser(kind))
    rename = zimage if kind == "z-image" else str
    first, second = ({rename(path): one for path, one in some.items()} for some in (first, second))
    shapes = {rename(path): shape for path, shape in shapes.items()}
    expected = {path: A * cases.added(arrays, FLAT.scale, shapes[path]) for path, arrays in first.items()}
    for path, arrays in second.items():
        expected[path] = expected.get(path, 0) + B * cases.added(arrays, 1.0, shapes[path])
    found = change(out, names)
    print(f"{kind}: {worst(found, expected):.1e} ({ran.err.strip()})")
    assert worst(found, expected) <= TOLERANCE
    prefix = PREFIX.get(kind, "lora_unet_" if denoiser(kind) == "unet" else "transformer.")
    assert all(key.startswith(prefix) for key in load_file(out))
    alphas = [key for key in load_file(out) if key.endswith(".alpha")]
    if kind == "sd15":  # as other programs know it: a convolution
        assert {value.ndim for key, value in load_file(out).items() if "proj_in.lora" in key} == {4}
    assert len(alphas) == (len(found) if denoiser(kind) == "unet" else 0)


@pytest.fixture(scope="module")
def qwen(tiny: dict[str, Path]) -> Iterator[tuple[Path, Names]]:
    yield tiny["qwen"], names_of(tiny["qwen"])


@pytest.fixture
def file(qwen: tuple[Path, Names], tmp_path: Path) -> Path:
    return cases.written(tmp_path / "a.safetensors", layers("qwen", *qwen, 0, 4), DOTTED)


# Kinds

PATH = "transformer_blocks.1.attn.to_q"


def hada(shape: tuple[int, ...]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    made = cases.rng(5)
    out, inputs = shape
    parts = {f"hada_w{n}_a": made.standard_normal((out, 3)) for n in "12"}
    parts |= {f"hada_w{n}_b": made.standard_normal((3, inputs)) for n in "12"}
    first, second = (parts[f"hada_w{n}_a"] @ parts[f"hada_w{n}_b"] for n in "12")
    return parts | {"alpha": np.array(6.0)}, 2.0 * first * second


def lokr(shape: tuple[int, ...]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    made = cases.rng(6)
    first, a = made.standard_normal((2, 3)), made.standard_normal((shape[0] // 2, 2))
    right = made.standard_normal((2, shape[1] // 3))
    parts = {"lokr_w1": first, "lokr_w2_a": a, "lokr_w2_b": right, "alpha": np.array(1.0)}
    return parts, 0.5 * np.kron(first, a @ right)


def whole_lokr(shape: tuple[int, ...]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    made = cases.rng(7)
    first, second = made.standard_normal((2, 2)), made.standard_normal((shape[0] // 2, shape[1] // 2))
    return {"lokr_w1": first, "lokr_w2": second}, np.kron(first, second)


def stored(path: Path, module: str, parts: dict[str, np.ndarray]) -> Path:
    """A file of float32 values."""
    save_file({f"{module}.{role}": torch.from_numpy(np.array(part, np.float32)) for role, part in parts.items()}, path)
    return path


@pytest.mark.parametrize("made", [hada, lokr, whole_lokr])
def test_other_kinds_become_factors(
    made: Callable[..., tuple[dict[str, np.ndarray], np.ndarray]], qwen: tuple[Path, Names], tmp_path: Path
) -> None:
    folder, names = qwen
    shape = cases.shapes(folder, "transformer")[PATH]
    parts, exact = made(shape)
    file = stored(tmp_path / "a.safetensors", f"lycoris_{flat(PATH)}", parts)
    out = tmp_path / "b.safetensors"
    assert cli("lora", "merge", f"{file}:2", "-m", str(folder), "-o", str(out)).code == 0
    error = worst(change(out, names), {PATH: 2 * exact})
    print(f"{made.__name__}: {error:.1e}")
    assert error <= TOLERANCE


def test_a_tucker_kernel_becomes_factors(tiny: dict[str, Path], tmp_path: Path) -> None:
    folder, module = tiny["sd15"], "down_blocks.0.resnets.0.conv1"
    names = names_of(folder)
    out_, in_ = cases.shapes(folder, "unet")[module][:2]
    made = cases.rng(8).standard_normal
    up, mid, down = made((out_, 3, 1, 1)), made((3, 3, 3, 3)), made((3, in_, 1, 1))
    parts = {"lora_up.weight": up, "lora_mid.weight": mid, "lora_down.weight": down}
    exact = np.einsum("or,rskl,si->oikl", up[..., 0, 0], mid, down[..., 0, 0])
    file = stored(tmp_path / "a.safetensors", f"lora_unet_{flat(module)}", parts)
    out = tmp_path / "b.safetensors"
    assert cli("lora", "merge", str(file), "-m", str(folder), "-o", str(out)).code == 0
    assert worst(change(out, names), {module: exact}) <= TOLERANCE


# Ranks


@pytest.mark.parametrize("rank", [1, 2, 3, 9])
def test_a_lower_rank_is_the_nearest(rank: int, file: Path, qwen: tuple[Path, Names], tmp_path: Path) -> None:
    """As near as numpy's own singular values in float64 say that a matrix of this rank can be."""
    folder, names = qwen
    out = tmp_path / "b.safetensors"
    ran = cli("lora", "resize", str(file), "--rank", str(rank), "-m", str(folder), "-o", str(out))
    assert ran.code == 0, ran.err
    before, after = change(file, names), change(out, names)
    for path, whole in before.items():
        values = np.linalg.svd(whole.astype(np.float64), compute_uv=False)
        best = np.sqrt(np.square(values[rank:]).sum())
        distance = np.linalg.norm(whole.astype(np.float64) - after[path])
        assert distance <= best * (1 + 1e-5) + 1e-5 * values[0], (path, distance, best)
    ranks = {tensor.shape[0] for key, tensor in load_file(out).items() if "lora_A" in key}
    assert ranks == {min(rank, cases.RANK)}
    print(ran.err.strip())
    assert ("exact" in ran.err) == (rank >= cases.RANK)


def test_a_sum_of_a_lower_rank(file: Path, qwen: tuple[Path, Names], tmp_path: Path) -> None:
    """A file less itself in part is the file at the rest's strength, exactly of its own rank."""
    folder, names = qwen
    out = tmp_path / "b.safetensors"
    args = ["lora", "merge", f"{file}:1.5", f"{file}:-0.5", "--rank", str(cases.RANK), "-m", str(folder)]
    assert cli(*args, "-o", str(out)).code == 0
    assert worst(change(out, names), {k: v.astype(np.float64) for k, v in change(file, names).items()}) <= TOLERANCE


# The file


@pytest.mark.parametrize(
    ("dtype", "code"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_dtypes_and_metadata(
    dtype: str, code: torch.dtype, file: Path, qwen: tuple[Path, Names], tmp_path: Path
) -> None:
    out = tmp_path / "both.safetensors"
    assert cli("lora", "merge", f"{file}:2", "-m", str(qwen[0]), "-o", str(out), "--dtype", dtype).code == 0
    assert {tensor.dtype for tensor in load_file(out).values()} == {code}
    with safe_open(out, "pt") as opened:
        texts = opened.metadata()
    run = json.loads(texts["qwenimg.run"])
    assert run["made"] == "change of rank" and [(one["file"], one["strength"]) for one in run["of"]] == [(file.name, 2)]
    assert texts["format"] == "pt" and texts["modelspec.architecture"] == "qwen-image/lora"
    assert texts["ss_network_dim"] == texts["ss_network_alpha"] == str(cases.RANK)
    assert str(tmp_path) not in out.read_bytes().decode("latin-1")
    said = cli("info", str(out)).out.decode()
    assert "made: both, qwen-image/lora" in said and file.name in said


@pytest.mark.parametrize(("kind", "version", "v2"), [("sd15", "sd_v1", "False"), ("sdxl", "sdxl_base_v1-0", "False")])
def test_a1111_sees_the_base(kind: str, version: str, v2: str, tiny: dict[str, Path], tmp_path: Path) -> None:
    file = cases.write_lora(tiny[kind], "sdxl", tmp_path / "a.safetensors") if kind == "sdxl" else None
    names = names_of(tiny[kind])
    file = file or cases.written(tmp_path / "a.safetensors", layers(kind, tiny[kind], names, 0, 9), FLAT)
    out = tmp_path / "b.safetensors"
    assert cli("lora", "merge", str(file), "-m", str(tiny[kind]), "-o", str(out)).code == 0
    with safe_open(out, "pt") as opened:
        texts = opened.metadata()
    assert (texts["ss_base_model_version"], texts["ss_v2"], texts["ss_network_module"]) == (
        version,
        v2,
        "networks.lora",
    )
    keys = {key.partition(".")[0] for key in load_file(out)}
    assert (
        kind != "sdxl"
        or {
            "lora_te1_text_model_encoder_layers_0_self_attn_q_proj",
            "lora_te2_text_model_encoder_layers_1_mlp_fc1",
            "lora_te2_text_projection",
        }
        <= keys
    ), keys


# Refusals


def test_what_is_refused(file: Path, qwen: tuple[Path, Names], tiny: dict[str, Path], tmp_path: Path) -> None:
    model, out = str(qwen[0]), str(tmp_path / "out.safetensors")
    shape = cases.shapes(qwen[0], "transformer")[PATH]
    wrong = cases.written(tmp_path / "wrong.safetensors", {PATH: cases.lora((shape[0], shape[1] + 1), 1)}, DOTTED)
    half = tmp_path / "half.safetensors"
    save_file({f"transformer.{PATH}.lora_A.weight": torch.ones(2, shape[1])}, half)
    good = cases.lora(shape, 1)
    dora = stored(tmp_path / "dora.safetensors", PATH, {"lora_down.weight": good["down"], "lora_up.weight": good["up"],
                                                         "dora_scale": np.ones((shape[0], 1))})  # fmt: skip
    nan = cases.written(tmp_path / "nan.safetensors", {PATH: {"down": good["down"], "up": good["up"] * np.nan}}, DOTTED)
    zero = cases.written(tmp_path / "zero.safetensors", {PATH: {"down": good["down"], "up": good["up"] * 0}}, DOTTED)
    large = cases.written(
        tmp_path / "large.safetensors", {PATH: {"down": good["down"], "up": good["up"] * 1e30}}, DOTTED
    )
    other = cases.write_lora(tiny["z-image"], "z-image", tmp_path / "other.safetensors")
    loop = tmp_path / "loop.safetensors"
    loop.symlink_to(loop)
    (tmp_path / "folder.safetensors").mkdir()
    there = processes.listing(tmp_path)
    table: list[tuple[list[str], int, str]] = [
        ([f"{file}:x"], 2, "no number"),
        ([f"{file}:nan"], 2, "finite number"),
        ([f"{file}:0"], 2, "every strength is 0"),
        ([str(tmp_path / "no.safetensors")], 5, "no such LoRA file"),
        ([str(loop)], 5, "loop.safetensors"),
        ([str(wrong)], 5, "wrong.safetensors"),
        ([str(half)], 5, "incomplete"),
        ([str(dora)], 5, "DoRA"),
        ([str(nan)], 5, "not finite"),
        ([str(zero)], 6, "changes nothing"),
        ([str(large), "--dtype", "fp16"], 6, "--dtype fp32"),
        ([str(file), str(other)], 5, "other.safetensors"),
        ([str(file), "--rank", "0"], 2, "--rank is 0"),
        ([str(file), "--rank", "5000"], 2, "--rank is 5000"),
    ]
    for args, code, words in table:
        ran = cli("lora", "merge", *args, "-m", model, "-o", out)
        ran.refused(code, words)
        print(ran.err.strip())
    for name, words in (
        ("out.txt", ".safetensors"),
        ("no/out.safetensors", "does not exist"),
        ("folder.safetensors", "exists"),
    ):
        cli("lora", "merge", str(file), "-m", model, "-o", str(tmp_path / name)).refused(2, words)
    before = file.read_bytes()
    cli("lora", "resize", str(file), "--rank", "1", "-m", model, "-o", str(file)).refused(2, "--overwrite")
    assert file.read_bytes() == before and processes.listing(tmp_path) == there


def test_an_output_over_its_own_input(file: Path, qwen: tuple[Path, Names]) -> None:
    """With --overwrite the file is read whole before it is replaced."""
    names = qwen[1]
    before = change(file, names)
    args = ["lora", "merge", f"{file}:2", "-m", str(qwen[0]), "-o", str(file), "--overwrite"]
    assert cli(*args).code == 0
    assert worst(change(file, names), {path: 2.0 * value.astype(np.float64) for path, value in before.items()}) < 1e-6


@pytest.mark.rest
def test_without_a_model_the_known_one_is_found(tmp_path: Path) -> None:
    """By the sizes of the published models; two of different models are refused with what each is for."""
    shape = (3072, 3072)
    qwen = cases.written(tmp_path / "q.safetensors", {PATH: cases.lora(shape, 1)}, DOTTED)
    sdxl = stored(
        tmp_path / "x.safetensors",
        "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn2_to_k",
        {"lora_down.weight": cases.lora((640, 2048), 1)["down"], "lora_up.weight": cases.lora((640, 2048), 1)["up"]},
    )
    out = tmp_path / "o.safetensors"
    assert cli("lora", "merge", str(qwen), "-o", str(out)).code == 0 and "Qwen" in cli("info", str(out)).out.decode()
    assert list(load_file(out)) == sorted(f"diffusion_model.{PATH}.lora_{half}.weight" for half in "AB")
    cli("lora", "merge", str(qwen), str(sdxl), "-o", str(tmp_path / "n.safetensors")).refused(5, "qwen-image", "sdxl")
    tiny = cases.written(tmp_path / "t.safetensors", {PATH: cases.lora((7, 5), 1)}, DOTTED)
    cli("lora", "merge", str(tiny), "-o", str(tmp_path / "n.safetensors")).refused(5, "none of the known models", "-m")


@pytest.mark.rest
def test_kills_leave_a_whole_file_or_none(file: Path, qwen: tuple[Path, Names], tmp_path: Path) -> None:
    """At moments in the whole run: by the time that one takes."""
    import time

    folder = tmp_path / "out"
    folder.mkdir()

    def start(name: str) -> object:
        return processes.start("lora", "merge", file, "-m", qwen[0], "-o", folder / name, cwd=tmp_path)

    begin = time.monotonic()
    run = start("whole.safetensors")
    assert run.wait() == 0  # type: ignore[attr-defined]
    whole, seconds = load_file(folder / "whole.safetensors"), time.monotonic() - begin
    for i in range(10):
        run = start(f"{i}.safetensors")
        time.sleep(seconds * (0.3 + 0.07 * i))
        run.send_signal(signal.SIGKILL)  # type: ignore[attr-defined]
        run.wait()  # type: ignore[attr-defined]
        if (path := folder / f"{i}.safetensors").exists():
            assert all(torch.equal(value, whole[key]) for key, value in load_file(path).items())
