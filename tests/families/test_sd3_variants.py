"""Stable Diffusion 3's variants: their names, defaults, downloads and sizes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import passport_runs
from support.fake_hub import REPO
from support.hub_cases import check_complete, pulled
from support.published import write_published

import qwenimg
from qwenimg.cli.main import run
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.families import catalog, registry
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.families.sd3.texts import T5
from qwenimg.common.hub import requirements
from qwenimg.common.networks.denoisers import sd3_dit
from qwenimg.common.request.request import Defaults

NAMES = ("sd3-medium", "sd3.5-medium", "sd3.5-large", "sd3.5-large-turbo")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sample(3)
def test_names_have_the_defaults_of_their_files(name: str, tmp_path: Path) -> None:
    known = catalog.KNOWN[name]
    model = registry.published(known)
    assert model is not None and known.family == "sd3" and known.license == "Stability AI Community"
    named = Defaults(
        width=known.width,
        height=known.height,
        steps=known.steps,
        guidance=known.guidance,
        negative_prompt=known.negative_prompt,
    )
    assert named == model.defaults()
    folder = write_published(tmp_path / name, name)
    with pytest.raises(ModelError, match="tokenizer"):
        registry.open_model(folder).checkpoint.read_tokenizers()
    opened = registry.open_model(folder)
    assert opened.defaults() == named
    assert opened.checkpoint["transformer"].plan.shapes == model.checkpoint["transformer"].plan.shapes


@pytest.mark.parametrize(
    ("name", "parameters", "tensors"),
    [("sd3-medium", 2028.33, 682), ("sd3.5-medium", 2243.17, 908), ("sd3.5-large", 8056.63, 1226)],
)
def test_sizes_are_the_published_ones(name: str, parameters: float, tensors: int) -> None:
    """Without the table of positions, which is no parameter in diffusers."""
    model = registry.published(catalog.KNOWN[name])
    assert model is not None
    entries = dict(model.checkpoint["transformer"].plan.entries)
    table = entries.pop(sd3_dit.TABLE)
    assert len(entries) == tensors
    counted = model.checkpoint["transformer"].plan.parameters - table.shape[0] * table.shape[1]
    assert counted / 1e6 == pytest.approx(parameters, abs=0.01)
    assert model.checkpoint[T5].plan.parameters / 1e6 == pytest.approx(4762.31, abs=0.01)
    assert model.checkpoint["vae"].plan.parameters / 1e6 == pytest.approx(83.82, abs=0.01)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("sd3", "sd3-medium"),
        ("SD3.5-Large", "sd3.5-large"),
        ("sd35-large-turbo", "sd3.5-large-turbo"),
        ("stabilityai/stable-diffusion-3.5-medium", "sd3.5-medium"),
    ],
)
def test_names(given: str, name: str) -> None:
    known = catalog.find(given)
    assert known is not None and known.name == name


def test_a_pulled_model_draws(fake, cache, tiny_sd3: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """With all three text encoders and tokenizers; without the files of T5 it is incomplete."""
    folder = tiny_sd3["medium"]
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    fake.files = {name: path.read_bytes() for name, path in files.items() if not name.endswith(".jinja")}
    monkeypatch.setitem(catalog.KNOWN, "sd3.5-medium", replace(catalog.KNOWN["sd3.5-medium"], repo=REPO))
    found, _, _ = pulled("sd3.5-medium")
    check_complete(found, fake.files)
    result = qwenimg.load("sd3.5-medium", backend="cpu", precision="fp32")(
        "a ring", width=32, height=32, steps=1, seed=1
    )
    assert result.recipe["model"] == "sd3.5-medium" and result.recipe["guidance"] == 4.5
    next((found / T5).glob("*.safetensors")).unlink()
    with pytest.raises(ModelError, match=f"incomplete, it lacks {T5}/"):
        qwenimg.load("sd3.5-medium", backend="cpu")


def test_a_pull_names_memory_and_license_first() -> None:
    text = requirements.machine_text(catalog.KNOWN["sd3.5-large"], 0)
    assert "12.5 GB of memory on a GPU or a Mac" in text and "Stability AI Community" in text


def test_the_few_step_lora_is_for_sd3_medium(tiny_sd3: dict[str, Path]) -> None:
    with qwenimg.load(tiny_sd3["sd3"], "cpu") as pipe:
        settings = pipe.resolve({"few_steps": "hyper-cfg"})
    assert (settings["steps"], settings["guidance"]) == (8, 5.0)
    assert [*map(str, settings["lora"])] == ["ByteDance/Hyper-SD/Hyper-SD3-8steps-CFG-lora.safetensors:0.125"]
    with qwenimg.load(tiny_sd3["medium"], "cpu") as pipe, pytest.raises(UsageError, match="nothing is made"):
        pipe.resolve({"few_steps": "hyper-cfg"})


@pytest.mark.sample(0)
def test_t5_left_out_is_in_the_recipe_and_repeated(
    tiny_sd3: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = ["--backend", "cpu", "--precision", "fp32", "--size", "32x32", "--steps", "1", "--seed", "1"]
    model, first, again = str(tiny_sd3["medium"]), tmp_path / "a.png", tmp_path / "b.png"
    assert run(["a ring", "-m", model, "--text-encoder", "none", *asked, "-o", str(first)]) == 0
    assert run(["--from", str(first), "-m", model, "--backend", "cpu", "-o", str(again)]) == 0
    assert first.read_bytes()[-2000:] == again.read_bytes()[-2000:]
    whole = tmp_path / "c.png"
    assert run(["a ring", "-m", model, *asked, "-o", str(whole)]) == 0
    assert whole.read_bytes()[-2000:] != first.read_bytes()[-2000:]
    capfd.readouterr()


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.parametrize("kind", ["sd3", "large"])
@pytest.mark.sample(1)
def test_a_passport_without_t5(tiny_sd3: dict[str, Path], tmp_path: Path, kind: str, backend: str) -> None:
    """It passes on both backends, though 256 rows of its text are equal, whose roundings go one way."""
    passport = tmp_path / "passport.safetensors"
    passport_runs.record(tiny_sd3[kind], passport, backend)
    for other in ("cpu", "mlx"):
        passport_runs.check(tiny_sd3[kind], passport, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: shutil.rmtree(f / "text_encoder_2"), "text_encoder_2"),
        (lambda f: (f / "tokenizer_3" / "tokenizer.json").write_text("{"), "tokenizer"),
        (lambda f: shutil.copytree(f / "text_encoder", f / "text_encoder_2", dirs_exist_ok=True), "pooled text of 46"),
        (lambda f: (f / "scheduler" / "scheduler_config.json").write_text('{"shift": 0}'), "shift"),
    ],
    ids=["no clip", "words", "two of one", "shift"],
)
def test_broken_folders_are_refused(tiny_sd3: dict[str, Path], tmp_path: Path, change: Any, message: str) -> None:
    folder = tmp_path / "sd3"
    shutil.copytree(tiny_sd3["medium"], folder)
    change(folder)
    with pytest.raises(ModelError, match=message):
        registry.open_model(folder, LoadOptions()).checkpoint.read_tokenizers()
