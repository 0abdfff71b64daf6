"""The program as a user runs it: real processes, a real (tiny) model, both backends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import oracle
import pytest
from processes import ENVIRONMENT, listing, pixels, qwenimg, start

from qwenimg.common.numbers import noise
from qwenimg.common.pictures.latents import read_latents, write_latents

BACKENDS = ("cpu", "mlx")


def one_line(err: str) -> str:
    """The one line of an error; what came before it may be progress, never a traceback."""
    *before, line = err.splitlines()
    assert line.startswith("qwenimg: error: ") and line.isprintable() and len(line) <= 300, err
    assert not any("Traceback" in text for text in before), err
    return line


@pytest.mark.parametrize("backend", BACKENDS)
def test_draws_what_diffusers_draws(tiny_folder: Path, tmp_path: Path, backend: str) -> None:
    args = (
        "--backend",
        backend,
        "-m",
        tiny_folder,
        "一个红色的圆",
        "-n",
        "ugly square",
        "--steps",
        4,
        "--size",
        "80x48",
    )
    code, out, err = qwenimg(
        *args, "-s", 7, "-o", "a.png", "--precision", "fp32", "--save-latents", "z.safetensors", cwd=tmp_path
    )
    assert code == 0, err
    assert out == f"{tmp_path / 'a.png'}\n"
    assert err.splitlines()[0].startswith(f"{backend} on ") and "fp32" in err.splitlines()[0]
    initial = noise.normal((1, 16, 6, 10), 7)
    latents, expected = oracle.generate(tiny_folder, "一个红色的圆", initial, negative_prompt="ugly square", steps=4)
    worst = np.abs(pixels(tmp_path / "a.png") - expected).max()
    saved = read_latents(tmp_path / "z.safetensors")
    error = np.linalg.norm(saved - latents) / np.linalg.norm(latents)
    print(f"{backend}: pixels {worst:.0f} of 255, latents {error:.1e}")
    assert worst <= 2 and error <= 1e-4
    assert listing(tmp_path) == ["a.png", "z.safetensors"]


def test_replay_gives_the_same_bytes_and_overrides(tiny_folder: Path, tmp_path: Path) -> None:
    args = ("-m", tiny_folder, "--backend", "mlx")
    assert (
        qwenimg(*args, "a ring\nin two lines", "--steps", 3, "--size", "40x56", "-s", 9, "-o", "a.png", cwd=tmp_path)[0]
        == 0
    )
    assert qwenimg(*args, "--from", "a.png", "-o", "b.png", cwd=tmp_path)[0] == 0
    assert np.array_equal(pixels(tmp_path / "a.png"), pixels(tmp_path / "b.png"))
    assert qwenimg(*args, "--from", "a.png", "-s", 10, "-o", "c.png", cwd=tmp_path)[0] == 0
    assert not np.array_equal(pixels(tmp_path / "a.png"), pixels(tmp_path / "c.png"))
    code, out, _ = qwenimg("info", "a.png", "--json", cwd=tmp_path)
    assert code == 0 and json.loads(out)["recipe"]["prompt"] == "a ring\nin two lines"


def test_latents_replace_the_seed(tiny_folder: Path, tmp_path: Path) -> None:
    write_latents(tmp_path / "n.npy", noise.normal((1, 16, 4, 6), 3), overwrite=False)
    args = ("-m", tiny_folder, "--backend", "mlx", "a star", "--steps", 2, "--size", "48x32")
    assert qwenimg(*args, "--latents", "n.npy", "-s", 1, "-o", "a.png", cwd=tmp_path)[0] == 0
    assert qwenimg(*args, "-s", 3, "-o", "b.png", cwd=tmp_path)[0] == 0
    assert np.array_equal(pixels(tmp_path / "a.png"), pixels(tmp_path / "b.png"))
    code, _, err = qwenimg(*args[:-1], "64x64", "--latents", "n.npy", "-o", "c.png", cwd=tmp_path)
    assert code == 2 and "[1, 16, 8, 8]" in one_line(err) and "loading" not in err
    code, _, err = qwenimg(*args, "-s", "3-4", "-o", "d{index}.png", "--save-latents", "z.npy", cwd=tmp_path)
    assert code == 0 and read_latents(tmp_path / "z.npy").shape == (2, 16, 4, 6), err
    both = np.concatenate([noise.normal((1, 16, 4, 6), seed) for seed in (3, 4)])
    write_latents(tmp_path / "two.safetensors", both, overwrite=False)
    code, _, err = qwenimg(*args, "--latents", "two.safetensors", "-N", 2, "-s", 1, "-o", "e{index}.png", cwd=tmp_path)
    assert code == 0, err
    assert all(np.array_equal(pixels(tmp_path / f"d{i}.png"), pixels(tmp_path / f"e{i}.png")) for i in (1, 2))


def test_several_prompts_and_seeds_load_once(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text('a ring\n{"prompt": "一个圆", "steps": 1}\n', encoding="utf-8")
    args = (
        "-m",
        tiny_folder,
        "--backend",
        "mlx",
        "--prompt-file",
        "p.txt",
        "-s",
        "1-2",
        "--steps",
        2,
        "--size",
        "32x32",
    )
    (tmp_path / "out").mkdir()
    code, out, err = qwenimg(*args, "-o", "out/", cwd=tmp_path)
    assert code == 0, err
    assert len(out.splitlines()) == 4 and all(Path(line).exists() for line in out.splitlines())
    assert err.count("loading text encoder") == 1 and err.count("loading transformer") == 1


# Bad input: one line, the documented code, nothing written, no framework imported where none is needed


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_non_finite_weight_is_named(tiny_folder: Path, tmp_path: Path, backend: str) -> None:
    from safetensors.numpy import load_file, save_file

    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    file = sorted((folder / "transformer").glob("*00002-of*.safetensors"))[0]
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("weight") and "_mod" not in name)
    tensors[name].flat[3] = np.nan
    save_file(tensors, file)
    code, out, err = qwenimg(
        "--backend", backend, "-m", folder, "a ring", "--size", "32x32", "--steps", 1, "-o", "a.png", cwd=tmp_path
    )
    assert code == 5 and out == "" and not (tmp_path / "a.png").exists(), err
    assert name in one_line(err) and file.name in one_line(err)


@pytest.mark.parametrize(
    ("damage", "code", "named"),
    [
        (lambda folder: (folder / "model_index.json").unlink(), 5, "model_index.json"),
        (lambda folder: os.truncate(sorted((folder / "vae").glob("*.safetensors"))[0], 5000), 5, "vae"),
        (
            lambda folder: (folder / "transformer" / "config.json").write_text('{"num_layers": 1000000000}'),
            5,
            "num_layers",
        ),
        (lambda folder: shutil.rmtree(folder / "tokenizer"), 5, "tokenizer"),
    ],
    ids=["no-index", "truncated", "layers", "no-tokenizer"],
)
def test_a_broken_folder_is_one_line(tiny_folder: Path, tmp_path: Path, damage, code: int, named: str) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    damage(folder)
    found, out, err = qwenimg("-m", folder, "--backend", "mlx", "a ring", "-o", "a.png", cwd=tmp_path)
    assert (found, out) == (code, "")
    assert named in one_line(err)
    assert listing(tmp_path) == ["model"]


def test_bad_files_are_refused_before_a_framework_is_imported(tiny_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    os.truncate(sorted((folder / "vae").glob("*.safetensors"))[0], 5000)
    code = (
        "import sys\nfrom qwenimg.cli.main import run\n"
        f"code = run(['-m', {str(folder)!r}, '--backend', 'cpu', 'a ring'])\n"
        "assert code == 5, code\nassert not {'torch', 'mlx', 'transformers'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=ENVIRONMENT).returncode == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_within_a_step(tiny_folder: Path, tmp_path: Path, backend: str, number: int, code: int) -> None:
    process = start(
        "--backend", backend, "-m", tiny_folder, "a ring", "--size", "128x128", "--steps", 1000, "-o", "a.png",
        cwd=tmp_path,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step 2/"):
            break
    process.send_signal(number)
    _, err = process.communicate(timeout=300)  # a thousand steps take longer on no machine that is not stuck
    told, more = err.partition("stopping after this step")[::2]
    print(f"{backend}: {told.count('step ')} steps until the signal was told, {more.count('step ')} after")
    assert process.returncode == code and "Traceback" not in err and "step 1000/" not in err
    assert more.count("\nstep ") <= 1
    assert listing(tmp_path) == []


def test_cuda_is_not_replaced_by_another_backend(tiny_folder: Path, tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    code, out, err = qwenimg("-m", tiny_folder, "--backend", "cuda", "a ring", "-o", "a.png", cwd=tmp_path)
    assert code == 3 and out == "" and "no NVIDIA GPU" in one_line(err)
    assert listing(tmp_path) == []
