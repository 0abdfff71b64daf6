"""`qwenimg train lora` killed at any moment, and with values that are not finite in what it reads or computes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch
from support import overflow_models, processes
from support.cli_runner import Ran, cli

from qwenimg.common.training.lora_step import LoraStep

FEW = ["--steps", "6", "--batch", "2", "--rank", "2", "--rate", "1e-3", "--size", "64", "--save-every", "2"]
KILLS = 20


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for color in ("red", "green", "blue"):
        Image.new("RGB", (64, 64), color).save(folder / f"{color}.png")
        (folder / f"{color}.txt").write_text(f"a {color} sks")
    return folder


def options(data: Path, out: Path, model: Path | str, *more: str, backend: str = "cpu") -> list[str]:
    args = ["--data", str(data), "-o", str(out), "-m", str(model), "--backend", backend, "--dtype", "fp32"]
    return ["train", "lora", *args, *FEW, *more]


def failed(ran: Ran, code: int, *words: str) -> None:
    """Assert that a run ended with this code, an error of one line that has these words, and no file."""
    last = ran.err.splitlines()[-1]
    print(ran.code, last)
    assert ran.code == code and ran.out == b"", ran.err
    assert last.startswith("qwenimg: error: ") and last.isprintable() and len(last) <= 300, ran.err
    assert "Traceback" not in ran.err and all(word in last for word in words), ran.err


def same(a: Path, b: Path) -> bool:
    left, right = load_torch(a), load_torch(b)
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


# Kills


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_killed_at_20_moments_it_ends_as_unbroken(backend: str, data: Path, tiny_folder: Path, tmp_path: Path) -> None:
    """While it starts and encodes, and while it computes and writes, in turns: so long after a line of it. All runs are
    processes of a user's kind: this one has another library for MLX's products."""
    whole, parts = tmp_path / "whole.safetensors", tmp_path / "parts.safetensors"
    many = ["--steps", "120", "--batch", "1", "--save-every", "1", "--keep", str(data)]
    code, _, err = processes.qwenimg(*options(data, whole, tiny_folder, *many, backend=backend), cwd=tmp_path)
    assert code == 0, err
    checkpoint = tmp_path / "parts.run" / "lora.safetensors"
    generator, begun = np.random.default_rng(46), list[str]()
    for number in range(KILLS):
        more = ["--resume"] if checkpoint.exists() else []
        begun.append("resumed" if more else "started")
        run = processes.start(*options(data, parts, tiny_folder, *many, *more, backend=backend), cwd=tmp_path)
        assert run.stderr is not None
        if number % 2:  # among its steps
            assert any(line.startswith("step ") and " of " in line for line in run.stderr)
        else:
            for _ in range(generator.integers(0, 20)):
                run.stderr.readline()
        time.sleep(generator.uniform(0, 0.1))
        run.kill()
        rest = run.stderr.read()
        assert run.wait() == -9, rest
        assert not parts.exists()
    code, _, err = processes.qwenimg(
        *options(data, parts, tiny_folder, *many, "--resume", backend=backend), cwd=tmp_path
    )
    assert code == 0, err
    first = next(line for line in err.splitlines() if line.startswith("step "))
    every = sorted(path.name for path in checkpoint.parent.iterdir())
    files = [name for name in every if not name.endswith(".qwenimg.part")]  # of kills: swept a day later
    print(f"{backend}: {KILLS} kills, {begun.count('resumed')} of them of resumed runs; at last: {first}; {files}")
    assert same(whole, parts) and begun.count("resumed") > KILLS // 2
    assert files == sorted(path.name for path in (tmp_path / "whole.run").iterdir())


# Values that are not finite


@pytest.mark.sample(0)
def test_a_loss_that_is_not_finite(
    data: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In step 5: the checkpoint after step 4 stays, and with it the run goes on to what it would have been."""
    whole, broken = tmp_path / "whole.safetensors", tmp_path / "broken.safetensors"
    assert cli(*options(data, whole, tiny_folder)).code == 0
    gradients, calls = LoraStep.gradients, list[float]()

    def spoilt(self: LoraStep, draws: Any, scale: float = 1.0) -> Any:
        loss, found = gradients(self, draws, scale)
        calls.append(loss)
        return (loss, found) if len(calls) < 5 else (float("nan"), found)

    with monkeypatch.context() as patch:
        patch.setattr(LoraStep, "gradients", spoilt)
        ran = cli(*options(data, broken, tiny_folder))
    failed(ran, 6, "step 4: the loss is nan in float32", "broken.run/lora.safetensors, is whole", "--resume")
    assert not broken.exists() and "step 4 of 6" in ran.err
    assert cli(*options(data, broken, tiny_folder, "--resume")).code == 0
    assert same(whole, broken)


@pytest.mark.rest
def test_a_model_whose_loss_is_never_finite(data: Path, tiny_folder: Path, tmp_path: Path) -> None:
    def huge(weights: dict[str, torch.Tensor]) -> None:
        weights["proj_out.weight"] *= 1e38

    model = overflow_models.changed(tiny_folder, tmp_path / "model", "transformer", huge)
    ran = cli(*options(data, tmp_path / "my.safetensors", model))
    failed(ran, 6, "step 0: the loss on fixed noise is", "nothing was saved yet")
    assert not (tmp_path / "my.safetensors").exists() and not (tmp_path / "my.run" / "lora.safetensors").exists()


@pytest.mark.rest
@pytest.mark.parametrize(
    ("factor", "words"), [(1e38, "the loss on fixed noise is inf"), (3e38, "vae encoder: non-finite value")]
)
def test_latents_that_are_not_finite(factor: float, words: str, data: Path, tiny_folder: Path, tmp_path: Path) -> None:
    """Or so large that their squares are not, or values that no float32 holds."""

    def huge(weights: dict[str, torch.Tensor]) -> None:
        weights["quant_conv.weight"] *= factor
        weights["quant_conv.bias"] *= factor

    model = overflow_models.changed(tiny_folder, tmp_path / "model", "vae", huge)
    failed(cli(*options(data, tmp_path / "my.safetensors", model)), 6, words)


@pytest.mark.rest
@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_latents_on_the_disk_that_are_not_finite(
    backend: str, data: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those are made again, with a warning, also where their hash is right."""
    import hashlib

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    assert cli(*options(data, first, tiny_folder, backend=backend)).code == 0
    path = next((tmp_path / "cache" / "qwenimg" / "latents").iterdir())
    values = load_file(path)
    values["0"].ravel()[0] = np.nan
    save_file(values, path, {"sha256": hashlib.sha256(values["0"].tobytes()).hexdigest()})
    ran = cli(*options(data, second, tiny_folder, backend=backend))
    assert ran.code == 0 and ran.err.count("values that are not finite; it is ignored") == 1, ran.err
    assert ran.err.count("it is ignored") == 1, ran.err
    assert same(first, second)


@pytest.mark.rest
def test_a_state_that_is_not_finite(data: Path, tiny_folder: Path, tmp_path: Path) -> None:
    """Of either factor or moment: it stays as it is, and a copy from before goes on."""
    out = tmp_path / "my.safetensors"
    assert cli(*options(data, out, tiny_folder)).code == 0
    args = options(data, out, tiny_folder, "--resume", "--steps", "8")
    checkpoint = tmp_path / "my.run" / "lora.safetensors"
    raw = checkpoint.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    names = [
        next(key for key in header if key.startswith(prefix) and key.endswith(factor))
        for prefix in ("model.", "exp_avg.", "exp_avg_sq.")
        for factor in ("lora_A.weight", "lora_B.weight")
    ]
    for name in names:
        at = 8 + length + header[name]["data_offsets"][0]
        spoilt = raw[:at] + np.float32(np.nan).tobytes() + raw[at + 4 :]
        checkpoint.write_bytes(spoilt)
        out.unlink(missing_ok=True)
        failed(cli(*args), 5, "lora.safetensors", name[:20], "1 non-finite values", "move it away")
        assert checkpoint.read_bytes() == spoilt and not out.exists()
    checkpoint.write_bytes(raw)
    assert cli(*args).code == 0
