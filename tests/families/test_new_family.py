"""A family that is added by its row alone: `generate`, `info` and the hub's folders know it like the others."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants
from PIL import Image
from support.recipe_cases import recipe_from_png
from support.toy_family import FAMILY, add_toy, write_toy

import qwenimg
from qwenimg.cli.main import run
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.families import registry, repository
from qwenimg.common.hub import resolve
from qwenimg.common.hub.describe import describe

BACKENDS = ("cpu", "mlx")


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    add_toy(monkeypatch, tmp_path / "networks")
    return write_toy(tmp_path / "toy")


def cli(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr("sys.argv", ["qwenimg", *map(str, args)])
    return run()


@pytest.mark.parametrize("backend", BACKENDS)
def test_generate_draws_it(toy: Path, backend: str, tmp_path: Path, monkeypatch, capfd) -> None:
    out = tmp_path / "a.png"
    assert cli(monkeypatch, "generate", "a red toy", "-m", toy, "--backend", backend, "-o", out) == 0, (
        capfd.readouterr()
    )
    recipe = recipe_from_png(out)
    assert np.asarray(Image.open(out)).shape == (24, 32, 3)  # the row's defaults
    assert (recipe["steps"], recipe["guidance"], recipe["negative_prompt"]) == (3, 2.0, "dull")
    assert set(recipe["precision"]) >= {"residual", "final_norm"} and "rope" not in recipe["precision"]


def test_info_describes_it(toy: Path, monkeypatch, capfd) -> None:
    assert cli(monkeypatch, "info", toy) == 0, capfd.readouterr()
    told = capfd.readouterr().out
    print(told)
    assert "pipeline: the Toy, text to image" in told and "denoiser: 8 tensors" in told and "fault" not in told


def test_info_names_a_file_of_it(toy: Path) -> None:
    found = describe(toy / "denoiser" / "diffusion_pytorch_model.safetensors")
    assert found.lines[0] == "layout: the Toy's denoiser" and not found.faults


def test_a_copy_from_the_hub_is_whole(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a model must hold, and what of a repository is fetched, is said by the row."""
    commit = "0" * 40
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = tmp_path / "hub" / "models--maker--toy" / "snapshots" / commit
    snapshot.parent.mkdir(parents=True)
    toy.rename(snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(commit)
    assert resolve.resolve("maker/toy").folder == snapshot
    assert qwenimg.load("maker/toy", backend="cpu").model_name == "maker/toy"
    files = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()]
    assert sorted(files) == sorted(filter(repository.needed, files))
    assert set(repository.required(files.__contains__)) <= set(files)
    (snapshot / "denoiser" / "config.json").unlink()
    with pytest.raises(ModelError, match="incomplete"):
        resolve.resolve("maker/toy")


def test_a_refusal_says_where_the_known_models_are(toy: Path, tmp_path: Path) -> None:
    """However many families there are, a refusal is a line that is not cut."""
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "NoSuchPipeline"}))
    for folder, about in ((tmp_path, "NoSuchPipeline"), (toy / "denoiser", "no model_index.json")):
        with pytest.raises(ModelError) as caught:
            registry.of_folder(folder)
        print(caught.value)
        text = str(caught.value)
        assert about in text and text.endswith("`qwenimg models` lists what is known") and " … " not in text


@pytest.mark.parametrize(("text", "known"), [("bf16", True), ("fp16", False), ("bf16,denoiser=fp32", True)])
def test_its_policies_are_the_rows(toy: Path, text: str, known: bool) -> None:
    if known:
        assert "denoiser" in qwenimg.load(toy, backend="cpu", precision=text).headline()
    else:
        with pytest.raises(UsageError, match="fp16"):
            qwenimg.load(toy, backend="cpu", precision=text)


def test_it_is_forgotten(tmp_path: Path) -> None:
    """After a test that added it, nothing of it is left."""
    assert FAMILY not in registry.FAMILIES
    with pytest.raises(ModelError, match="ToyPipeline"):
        qwenimg.load(write_toy(tmp_path / "toy"))
