"""`train lora --lora`: a LoRA that is loaded while another learns, on the tiny Z-Image."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file as load_torch
from support.cli_runner import cli
from support.lora_cases import write_lora


def load_file(path: Path) -> dict[str, np.ndarray]:
    return {key: one.float().numpy() for key, one in load_torch(path).items()}


BACKENDS = ("cpu", pytest.param("mlx", marks=pytest.mark.rest))
FEW = ["--steps", "4", "--batch", "2", "--rank", "2", "--rate", "1e-3", "--size", "64", "--save-every", "2"]
SAMPLED = ["--sample", "a red circle", "--sample", "a blue ring", "--sample-every", "2"]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "training-cache"))
    yield


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures of mine"
    folder.mkdir()
    for i, color in enumerate(("red", "green", "blue")):
        Image.new("RGB", (64 + 16 * i, 64), color).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text(f"a {color} sks")
    return folder


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_a_lora_that_is_loaded_while_another_learns(
    backend: str, data: Path, tmp_path: Path, tiny: dict[str, Path]
) -> None:
    """A training adapter: in the losses, not in the pictures and not in the file; a resumed run has the same one."""
    adapter = write_lora(tiny["z-image"], "z-image", tmp_path / "adapter.safetensors")

    def run(name: str, *more: str) -> tuple[Any, list[float], dict[str, np.ndarray]]:
        out = tmp_path / f"{name}.safetensors"
        given = ["--data", str(data), "-o", str(out), "-m", str(tiny["z-image"]), "--backend", backend, *FEW]
        ran = cli("train", "lora", *given, *SAMPLED, "--precision", "fp32", "--dtype", "fp32", *more)
        rows = [json.loads(line) for line in (tmp_path / f"{name}.run" / "judged.jsonl").read_text().splitlines()]
        return ran, [row["learnt"] for row in rows], load_file(out) if out.exists() else {}

    def picture(name: str) -> bytes:
        return np.asarray(Image.open(tmp_path / f"{name}.run" / "samples" / "0000000-0.png")).tobytes()

    ran, losses, factors = run("beside", "--lora", str(adapter))
    assert ran.code == 0, ran.err
    _, without, plain = run("plain")
    print(f"{backend}: losses {losses} beside, {without} without")
    assert abs(losses[0] / without[0] - 1) > 1e-3, "the adapter is in what is learnt from"
    assert picture("beside") == picture("plain"), "it is not in the pictures"
    assert factors.keys() == plain.keys() and any(not np.array_equal(factors[key], plain[key]) for key in plain)
    with safe_open(tmp_path / "beside.safetensors", "np") as opened:
        assert json.loads(opened.metadata()["qwenimg.run"])["lora"] == "adapter.safetensors:1"
    parts, _, _ = run("parts", "--lora", str(adapter), "--steps", "2")
    assert parts.code == 0
    other, _, _ = run("parts", "--resume")
    assert other.code == 5 and "lora" in other.err, other.err
    again, _, resumed = run("parts", "--lora", str(adapter), "--resume")
    assert again.code == 0, again.err
    unbroken = load_file(tmp_path / "beside.safetensors")
    assert resumed.keys() == unbroken.keys()
