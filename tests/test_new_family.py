"""A family that is added by its row alone: `generate`, `info` and the hub's folders know it like the others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from toy_family import add_toy, write_toy

from qwenimg.cli.main import run
from qwenimg.common.pipeline.recipe import recipe_from_png

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
