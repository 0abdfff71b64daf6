"""LoRAs of a picture: what is drawn, what is read again, and what the recipe says; from Python and the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from support import lora_cases as cases
from support.cli_runner import Library, cli
from support.crossed import crossed
from support.family_cases import BACKENDS
from support.lora_cases import LAYERS, write_lora
from support.recipe_cases import recipe_from_png

import qwenimg
from qwenimg import ModelError, Pipeline, UsageError
from qwenimg.common.hub.describe import describe
from qwenimg.common.jobs.replay import read_replay
from qwenimg.common.request.lora_text import Lora, parse
from qwenimg.common.request.recipe import png_text

ASKED: dict[str, Any] = {"width": 52, "height": 36, "steps": 2, "guidance": 3.0, "seed": 7}
KINDS = ("qwen", "sdxl", "z-image")
on_each_backend = pytest.mark.parametrize(("kind", "backend"), crossed(KINDS, BACKENDS), indirect=["kind"])


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(kind: str, tiny: dict[str, Path]) -> Path:
    return tiny[kind]


def pipeline(folder: Path, backend: str, precision: str = "fp32", **more: Any) -> Pipeline:
    return qwenimg.load(folder, backend=backend, precision=precision, **more)


def baked(folder: Path, kind: str, lora: Path, strength: float, out: Path) -> Path:
    """A copy of the model whose stored weights have the LoRA in them, by float64."""
    shutil.copytree(folder, out)
    tensors = load_file(lora)
    for component, (prefix, layers) in LAYERS[kind].items():
        for file in (out / component).glob("*.safetensors"):
            stored = load_file(file)
            for key, value in stored.items():
                layer = key.removeprefix("text_model.").removesuffix(".weight")
                if layer in layers and key.endswith("weight"):
                    halves = {role: tensors[f"{prefix}{layer}.{end}"] for role, end in cases.PEFT_HALVES.items()}
                    scale = strength * cases.ALPHA / 2
                    stored[key] = (value + cases.added(halves, scale, value.shape)).astype(np.float32)
            save_file(stored, file, metadata={"format": "pt"})
    return out


def counting(pipe: Pipeline) -> list[str]:
    """What of the model is opened from now on."""
    opened: list[str] = []
    original = pipe.runtime.engine.open
    pipe.runtime.engine.open = lambda network, *rest: (opened.append(network), original(network, *rest))[1]  # type: ignore[method-assign]
    return opened


# Drawing


@on_each_backend
@pytest.mark.sample(0)
def test_a_picture_is_that_of_the_model_with_the_lora_in_its_weights(
    kind: str, backend: str, folder: Path, tmp_path: Path
) -> None:
    lora = write_lora(folder, kind, tmp_path / "a.safetensors")
    made = pipeline(folder, backend)("a dog", lora=f"{lora}:0.7", **ASKED)
    other = pipeline(baked(folder, kind, lora, 0.7, tmp_path / "baked"), backend)("a dog", **ASKED)
    plain = pipeline(folder, backend)("a dog", **ASKED)
    error, effect = (np.abs(one.latents - made.latents).max() for one in (other, plain))
    print(f"{error:.1e}, the LoRA's effect {effect:.1e}")
    assert error < 1e-4 < effect / 100


@on_each_backend
@pytest.mark.sample(0)
def test_changing_loras_reads_only_their_weights_again_and_leaves_no_trace(
    kind: str, backend: str, folder: Path, tmp_path: Path
) -> None:
    """The same bits as a model that never had another LoRA; strengths 0 and none change nothing."""
    a, b = (write_lora(folder, kind, tmp_path / f"{i}.safetensors", 10 * i) for i in (1, 2))
    only = tuple(LAYERS[kind])[:1]
    c = write_lora(folder, kind, tmp_path / "c.safetensors", 5, components=only)  # the denoiser's alone
    asked = ("", f"{a}:0.5", f"{a}:-1; {b}:0.5", f"{c}:2", "none", f"{a}:0", f"{a}:0.5")
    pipe = pipeline(folder, backend)
    first = pipe("a dog", **ASKED)
    opened = counting(pipe)
    made = [pipe("a dog", lora=lora, **ASKED) for lora in asked]
    print(opened)
    assert not {"unet", "qwen_dit", "zimage_dit", "kl_vae", "vae"} & set(opened)
    assert kind != "qwen" or not opened
    for lora, result in zip(asked, made, strict=True):
        fresh = first if lora in ("", "none", f"{a}:0") else pipeline(folder, backend)("a dog", lora=lora, **ASKED)
        assert np.array_equal(fresh.latents, result.latents), lora
    assert not np.array_equal(made[0].latents, made[3].latents)


@on_each_backend
@pytest.mark.sample(0)
def test_a_lora_that_fails_while_it_is_read_leaves_a_model_that_draws(
    kind: str, backend: str, tmp_path: Path, folder: Path
) -> None:
    lora = write_lora(folder, kind, tmp_path / "a.safetensors", components=tuple(LAYERS[kind])[:1])
    tensors = load_file(lora)
    last = next(key for key in reversed(tensors) if key.endswith("lora_B.weight"))
    tensors[last] = np.full_like(tensors[last], np.nan)
    save_file(tensors, lora)
    pipe = pipeline(folder, backend)
    first = pipe("a dog", **ASKED)
    with pytest.raises(ModelError, match="not finite"):
        pipe("a dog", lora=str(lora), **ASKED)
    assert np.array_equal(pipe("a dog", **ASKED).latents, first.latents)


def test_a_file_that_is_replaced_is_read_again(tiny_folder: Path, tmp_path: Path) -> None:
    lora = write_lora(tiny_folder, "qwen", tmp_path / "a.safetensors")
    pipe = pipeline(tiny_folder, "cpu")
    first = pipe("a dog", lora=str(lora), **ASKED)
    write_lora(tiny_folder, "qwen", tmp_path / "b.safetensors", 30).replace(lora)
    second = pipe("a dog", lora=str(lora), **ASKED)
    assert first.recipe["lora_fingerprints"] != second.recipe["lora_fingerprints"]
    assert not np.array_equal(first.latents, second.latents)


@pytest.mark.sample(0)
def test_a_refiner_keeps_its_own_weights(folders: dict[str, Path], tmp_path: Path) -> None:
    lora = write_lora(folders["sdxl"], "sdxl", tmp_path / "a.safetensors")
    pipe = pipeline(folders["sdxl"], "cpu", refiner=folders["refiner"])
    pipe("a dog", lora=str(lora), **ASKED | {"steps": 5})
    base, refiner = (expert.checkpoint["unet"].plan for expert in pipe.model.experts())  # type: ignore[attr-defined]
    assert any(entry.deltas for entry in base.entries.values())
    assert not any(entry.deltas for entry in refiner.entries.values())


# What is asked for


def test_the_ways_to_write_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse("a.safetensors") == (Lora("a.safetensors"),)
    assert parse(" a.safetensors:0.5;b:-1 ; c/d:1e-1") == (
        Lora("a.safetensors", 0.5),
        Lora("b", -1),
        Lora("c/d", 0.1),
    )
    assert parse("") == parse(" ; ") == parse("none") == ()
    Path("x:0.5").touch()
    assert parse("x:0.5") == (Lora("x:0.5"),)  # a file of that name
    for text, says in (
        ("a:nan", "finite"), ("a:inf", "finite"), ("a:-inf", "finite"), ("a:1e9", "finite"), ("a:", "no number"),
        ("a:x", "'x' is no number"), (":0.5", "no file"), ("; ".join("abcdefghijk" * 3), "at most 32"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=says):
            parse(text)


@given(
    st.text("abc/:@. -é", min_size=1, max_size=12).map(str.strip).filter(lambda name: name not in ("", "none")),
    st.floats(-1e6, 1e6),
)
def test_a_lora_is_that_of_its_text(source: str, scale: float) -> None:
    assert parse(str(Lora(source, scale)), files=False) == (Lora(source, scale),)


def test_strong_ones_are_warned_of(tiny_folder: Path, tmp_path: Path) -> None:
    lora = write_lora(tiny_folder, "qwen", tmp_path / "a.safetensors")
    made = pipeline(tiny_folder, "cpu")("a dog", lora=[f"{lora}:10.5", f"{lora}:-10"], **ASKED)
    assert len(made.warnings) == 1 and "10.5 is far beyond" in made.warnings[0]


def test_a_hub_id_is_found_in_the_cache(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--owner--lora" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    write_lora(tiny_folder, "qwen", snapshot / "one.safetensors")
    pipe = pipeline(tiny_folder, "cpu")
    made = pipe("a dog", lora="owner/lora:0.5", **ASKED)
    assert made.recipe["lora"] == "owner/lora:0.5"  # type: ignore[typeddict-item]
    shutil.copy(snapshot / "one.safetensors", snapshot / "two.safetensors")
    with pytest.raises(ModelError, match=r"several LoRA files \(one.safetensors, two"):
        pipe.check("x", lora="owner/lora")
    assert pipe.check("x", lora="owner/lora/two.safetensors").loras
    with pytest.raises(ModelError, match="qwenimg pull owner/other"):
        pipe.check("x", lora="owner/other")
    with pytest.raises(ModelError, match="no such LoRA file"):
        pipe.check("x", lora="nothing.safetensors")


def test_a_lora_of_another_model_is_refused_before_anything_is_loaded(
    tiny_folder: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    lora = write_lora(folders["sdxl"], "sdxl", tmp_path / "a.safetensors")
    pipe = pipeline(tiny_folder, "cpu")
    opened = counting(pipe)
    with pytest.raises(ModelError, match="none of its 7 modules"):
        pipe("a dog", lora=str(lora), **ASKED)
    assert not opened


# The recipe


def test_a_recipe_names_files_and_not_folders_and_knows_them_again(tiny_folder: Path, tmp_path: Path) -> None:
    lora = write_lora(tiny_folder, "qwen", tmp_path / "secret place.safetensors")
    pipe = pipeline(tiny_folder, "cpu")
    made = pipe("a dog", lora=f"{lora}:0.5", **ASKED)
    assert made.recipe["lora"] == "secret place.safetensors:0.5"  # type: ignore[typeddict-item]
    assert str(tmp_path) not in json.dumps(png_text(made.recipe))
    made.save(tmp_path / "x.png")
    recipe = recipe_from_png(tmp_path / "x.png")
    assert recipe["lora_fingerprints"] == made.recipe["lora_fingerprints"] and len(recipe["lora_fingerprints"]) == 1
    assert "lora" not in pipe("a dog", lora="none", **ASKED).recipe


@pytest.mark.sample(0)
def test_a_picture_is_made_again_with_the_same_lora(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lora(tiny_folder, "qwen", Path("a.safetensors"))
    write_lora(tiny_folder, "qwen", Path("b.safetensors"), 30)
    fixed = ["-m", str(tiny_folder), "--backend", "cpu", "--steps", "2", "--size", "52x36", "--quiet"]
    assert (
        cli("a dog", *fixed, "-s", "3", "--lora", "a.safetensors:0.5", "--lora", "b.safetensors", "-o", "x.png").code
        == 0
    )
    assert recipe_from_png(Path("x.png"))["lora"] == "a.safetensors:0.5; b.safetensors:1"  # type: ignore[typeddict-item]
    assert "lora" not in read_replay(Path("x.png")).options  # a path in a picture is never opened
    cli("--from", "x.png", *fixed).refused(2, "made with --lora (a.safetensors:0.5; b.safetensors:1); give the same")
    again = ["--lora", "a.safetensors:0.5", "--lora", "b.safetensors"]
    assert cli("--from", "x.png", *fixed, *again, "-o", "y.png").err == ""
    other = cli("--from", "x.png", *fixed, "--lora", "b.safetensors", "-o", "z.png")
    assert other.code == 0 and "the LoRAs are not those of the picture" in other.err


# The command line


def test_the_command_line_a_prompt_file_and_a_configuration(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loras() -> list[Any]:
        return ["; ".join(map(str, asked.get("lora", ()))) for asked in library.asked]

    assert cli("x", "--lora", "a:0.5", "--lora-path", "b").code == 0
    assert loras() == ["a:0.5; b"]
    lines = ['{"prompt": "y", "lora": ["a:0.1", "b"]}', '{"prompt": "z", "lora": "c:2"}', "w"]
    Path("p").write_text("\n".join(lines))
    assert cli("--prompt-file", "p", "--lora", "d").code == 0
    assert loras() == ["a:0.1; b", "c:2", "d"]
    monkeypatch.setenv("QWENIMG_LORA", "a b.safetensors:0.5;c")
    assert cli("x").code == 0 and loras() == ["a b.safetensors:0.5; c"]
    assert cli("x", "--lora", "none").code == 0 and loras() == [""]
    monkeypatch.delenv("QWENIMG_LORA")
    config = tmp_path / "config" / "qwenimg"
    config.mkdir(parents=True)
    (config / "config.toml").write_text('lora = "e:0.25; f"\n')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(config.parent))
    assert cli("x").code == 0 and loras() == ["e:0.25; f"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--lora", "a:nan"], "finite number"),
        (["--lora", "a:strong"], "'strong' is no number"),
        (["--lora-scales", "0.5"], "once for each"),
        (["--lora-paths", "a"], "once for each"),
    ],
)
def test_wrong_options(library: Library, args: list[str], says: str) -> None:
    cli("x", *args).refused(2, says)
    assert not library.calls


def test_wrong_lines(library: Library) -> None:
    for line, says in (
        ('{"prompt": "x", "lora": [1]}', "lora has int; expected FILE"),
        ('{"prompt": "x", "lora": "a:inf"}', "finite"),
    ):
        Path("p").write_text(line)
        cli("--prompt-file", "p").refused(5, "p:1", says)


def test_a_tag_in_the_prompt_says_where_a_lora_goes(library: Library) -> None:
    for prompt, lora in (("a cat <lora:pixel:0.8>", "pixel:0.8"), ("< LoRA : x >", "x"), ("<lyco:a:1>", "a:1")):
        cli(prompt).refused(2, f"give --lora {lora}")
    assert not library.calls


# info


@pytest.mark.sample(0)
def test_info_says_what_a_file_is(tiny_folder: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    for kind, fits in (("qwen", "Qwen-Image"), ("sdxl", "Stable Diffusion")):
        folder = tiny_folder if kind == "qwen" else folders[kind]
        lines = describe(write_lora(folder, kind, tmp_path / f"{kind}.safetensors")).lines
        print(*lines, sep="\n")
        assert lines[0].startswith("layout: LoRA, as written by diffusers")
        assert "rank 2, alpha 1 (scale 0.5)" in lines[1] and lines[2] == f"fits: {fits}"
    arrays = cases.lora((320, 2048), 0)
    called = "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k"
    kohya = cases.Dialect("lora_unet_", cases.KOHYA_HALVES, flat=True)
    lines = describe(cases.written(tmp_path / "k.safetensors", {called: arrays}, kohya)).lines
    assert lines[0] == "layout: LoRA, as written by kohya, musubi" and lines[2] == "fits: SDXL"


@pytest.mark.sample(0)
def test_info_says_use_it_of_what_drawing_accepts_only(tmp_path: Path) -> None:
    """Held against the published models; SDXL's layer is 640 wide there, and another model's is nowhere."""
    called, kohya = (
        "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k",
        cases.Dialect("lora_unet_", cases.KOHYA_HALVES, flat=True),
    )
    right = {called: cases.lora((640, 2048), 0)}
    other = {"decoder_blocks.0.attn.to_q": cases.lora((64, 64), 0)}
    told = {}
    for name, modules in {
        "right": right,
        "strange": right | {"nothing.to_k": cases.lora((640, 2048), 0)},
        "other sizes": {called: cases.lora((320, 2048), 0)},
        "other model": other,
    }.items():
        found = describe(cases.written(tmp_path / "k.safetensors", modules, kohya))
        told[name] = ([line for line in found.lines if line.startswith("use")], found.faults)
        print(name, *told[name], sep="\n")
    by = ["used: 1 of 1 modules by sdxl or sdxl-turbo", "use it: qwenimg PROMPT -m sdxl --lora FILE:SCALE"]
    assert told["right"] == (by, [])
    assert told["strange"][0] == [] and "'lora_unet_nothing_to_k' is no layer" in told["strange"][1][0]
    assert told["other sizes"][0][0].startswith("use it: only with a model of its own sizes; for sdxl: ")
    assert told["other model"][0][0].startswith("use it: no, none of its modules is a layer of")
    assert not told["other model"][1]


def test_info_knows_a_lora_for_control_by_its_name_alone(tmp_path: Path) -> None:
    called = {"transformer_blocks.0.attn.to_q": cases.lora((3072, 3072), 0)}
    dialect, folder = cases.Dialect("", cases.NAMED_HALVES), tmp_path / "Qwen-Image-In-Context-Control-Union"
    folder.mkdir()
    last = {
        file: describe(cases.written(file, called, dialect)).lines[-1]
        for file in (folder / "model.safetensors", tmp_path / "model.safetensors")
    }
    print(*last.values(), sep="\n")
    control, plain = last.values()
    assert control.startswith("use it: qwenimg PROMPT -m qwen-image --control FILE=PICTURE (by its name")
    assert plain == "use it: qwenimg PROMPT -m qwen-image --lora FILE:SCALE"


def test_a_run_says_how_many_modules_are_in_use(tiny_folder: Path, tmp_path: Path) -> None:
    told: list[str] = []
    lora = write_lora(tiny_folder, "qwen", tmp_path / "a.safetensors")
    pipe = qwenimg.load(tiny_folder, backend="cpu", notify=lambda kind, text: told.append(text))
    for strength in (0.7, 0.7, 0.0, -1.0):
        pipe("a dog", lora=f"{lora}:{strength}", **ASKED)
    lines = [line for line in told if line.startswith("LoRA ")]
    assert lines == [f"LoRA a.safetensors: 5 of 5 modules at strength {one}" for one in ("0.7", "-1")]


@pytest.mark.parametrize("mode", ["auto", "fuse"])
def test_an_estimate_counts_a_lora_before_the_first_picture(tmp_path: Path, mode: str) -> None:
    """Beside quantized weights it takes room; as much as once it is there."""
    pipe = qwenimg.load("shapes", "cpu", "fp32", quantize="8")
    shapes = pipe.checkpoint["transformer"].plan.shapes  # type: ignore[index]
    layers = [name.removesuffix(".weight") for name in shapes if ".attn." in name and len(shapes[name]) == 2]
    modules = {name: cases.lora(shapes[f"{name}.weight"], i, rank=256) for i, name in enumerate(layers)}
    lora = cases.written(tmp_path / "a.safetensors", modules, cases.QWEN["diffusers"])
    asked: dict[str, Any] = {"width": 64, "height": 64, "steps": 1, "seed": 1, "lora_mode": mode}
    plain, before = (pipe.estimate("a red circle", **asked, lora=one).memory for one in ("", str(lora)))
    pipe.prepare(["a red circle"], lora=str(lora), lora_mode=mode)
    factors = sum(down.size + up.size for one in modules.values() for down, up in [one.values()]) * 4
    print(f"{plain:,} {before:,} {factors:,}")
    assert before == pipe.estimate("a red circle", **asked, lora=str(lora)).memory
    assert before - plain == pytest.approx(factors if mode == "auto" else 0, rel=0.05)
