"""Stable Diffusion 3's variants: their sizes, T5 left out, and broken folders."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from support import passport_runs

import qwenimg
from qwenimg.cli.main import run
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.families import catalog, registry
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.families.sd3.texts import T5
from qwenimg.common.networks.denoisers import sd3_dit


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
@pytest.mark.sample(0)
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
