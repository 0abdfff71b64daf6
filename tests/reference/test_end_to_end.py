"""The program as a user runs it, on tiny models and both backends; in a process where that is what is tested."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import oracle
from support.cli_runner import Ran, cli
from support.processes import ENVIRONMENT, listing, pixels, qwenimg, start

from qwenimg.common.numbers import noise
from qwenimg.common.pictures.latents import read_latents, write_latents

BACKENDS = ("cpu", "mlx")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the command runs in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*args: object) -> Ran:
    """The command, in this process: what a process of its own imports takes ten times as long."""
    return cli(*map(str, args))


def one_line(err: str) -> str:
    """The one line of an error; what came before it may be progress, never a traceback."""
    *before, line = err.splitlines()
    assert line.startswith("qwenimg: error: ") and line.isprintable() and len(line) <= 300, err
    assert not any("Traceback" in text for text in before), err
    return line


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(1)
def test_draws_what_diffusers_draws(tiny_folder: Path, place: Path, tmp_path: Path, backend: str) -> None:
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
    args += ("-s", 7, "-o", "a.png", "--precision", "fp32", "--save-latents", "z.safetensors")
    if backend == "mlx":  # one of them in a process of its own
        code, out, err = qwenimg(*args, cwd=tmp_path)
    else:
        ran = command(*args)
        code, out, err = ran.code, ran.out.decode(), ran.err
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


@pytest.mark.sample(0)
def test_replay_gives_the_same_bytes_and_overrides(tiny_folder: Path, place: Path) -> None:
    args = ("-m", tiny_folder, "--backend", "mlx")
    first = command(*args, "a ring\nin two lines", "--steps", 3, "--size", "40x56", "-s", 9, "-o", "a.png")
    again = command(*args, "--from", "a.png", "-o", "b.png")
    other = command(*args, "--from", "a.png", "-s", 10, "-o", "c.png")
    assert first.code == again.code == other.code == 0, (first, again, other)
    assert np.array_equal(pixels(place / "a.png"), pixels(place / "b.png"))
    assert not np.array_equal(pixels(place / "a.png"), pixels(place / "c.png"))
    told = command("info", "a.png", "--json")
    assert told.code == 0 and told.events[0]["recipe"]["prompt"] == "a ring\nin two lines"


@pytest.mark.sample(0)
def test_latents_replace_the_seed(tiny_folder: Path, place: Path) -> None:
    write_latents(place / "n.npy", noise.normal((1, 16, 4, 6), 3), overwrite=False)
    args = ("-m", tiny_folder, "--backend", "mlx", "a star", "--steps", 2, "--size", "48x32")
    assert command(*args, "--latents", "n.npy", "-s", 1, "-o", "a.png").code == 0
    assert command(*args, "-s", 3, "-o", "b.png").code == 0
    assert np.array_equal(pixels(place / "a.png"), pixels(place / "b.png"))
    refused = command(*args[:-1], "64x64", "--latents", "n.npy", "-o", "c.png")
    assert refused.code == 2 and "[1, 16, 8, 8]" in one_line(refused.err) and "loading" not in refused.err
    saved = command(*args, "-s", "3-4", "-o", "d{index}.png", "--save-latents", "z.npy")
    assert saved.code == 0 and read_latents(place / "z.npy").shape == (2, 16, 4, 6), saved
    both = np.concatenate([noise.normal((1, 16, 4, 6), seed) for seed in (3, 4)])
    write_latents(place / "two.safetensors", both, overwrite=False)
    given = command(*args, "--latents", "two.safetensors", "-N", 2, "-s", 1, "-o", "e{index}.png")
    assert given.code == 0, given
    assert all(np.array_equal(pixels(place / f"d{i}.png"), pixels(place / f"e{i}.png")) for i in (1, 2))


def test_several_prompts_and_seeds_load_once(tiny_folder: Path, place: Path) -> None:
    (place / "p.txt").write_text('a ring\n{"prompt": "一个圆", "steps": 1}\n', encoding="utf-8")
    (place / "out").mkdir()
    drawn = command(
        "-m", tiny_folder, "--backend", "mlx", "--prompt-file", "p.txt", "-s", "1-2", "--steps", 2,
        "--size", "32x32", "-o", "out/",
    )  # fmt: skip
    assert drawn.code == 0 and len(drawn.paths) == 4 and all(path.exists() for path in drawn.paths), drawn
    assert drawn.err.count("loading text encoder") == 1 and drawn.err.count("loading transformer") == 1


# Bad input: one line, the documented code, nothing written, no framework imported where none is needed


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_non_finite_weight_is_named(tiny_folder: Path, place: Path, backend: str) -> None:
    from safetensors.numpy import load_file, save_file

    folder = shutil.copytree(tiny_folder, place / "model")
    file = sorted((folder / "transformer").glob("*00002-of*.safetensors"))[0]
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("weight") and "_mod" not in name)
    tensors[name].flat[3] = np.nan
    save_file(tensors, file)
    refused = command("--backend", backend, "-m", folder, "a ring", "--size", "32x32", "--steps", 1, "-o", "a.png")
    assert refused.code == 5 and refused.out == b"" and not (place / "a.png").exists(), refused
    assert name in one_line(refused.err) and file.name in one_line(refused.err)


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
def test_a_broken_folder_is_one_line(tiny_folder: Path, place: Path, damage, code: int, named: str) -> None:
    folder = shutil.copytree(tiny_folder, place / "model")
    damage(folder)
    refused = command("-m", folder, "--backend", "mlx", "a ring", "-o", "a.png")
    assert (refused.code, refused.out) == (code, b"")
    assert named in one_line(refused.err)
    assert listing(place) == ["model"]


@pytest.mark.sample(0)
def test_bad_files_are_refused_before_a_framework_is_imported(tiny_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    os.truncate(sorted((folder / "vae").glob("*.safetensors"))[0], 5000)
    code = (
        "import sys\nfrom qwenimg.cli.main import run\n"
        f"code = run(['-m', {str(folder)!r}, '--backend', 'cpu', 'a ring'])\n"
        "assert code == 5, code\nassert not {'torch', 'mlx', 'transformers'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=ENVIRONMENT).returncode == 0


@pytest.mark.parametrize(("backend", "number", "code"), [("cpu", signal.SIGINT, 130), ("mlx", signal.SIGTERM, 143)])
@pytest.mark.sample(0)
def test_a_signal_ends_within_a_step(tiny_folder: Path, tmp_path: Path, backend: str, number: int, code: int) -> None:
    process = start(
        "--backend", backend, "-m", tiny_folder, "a ring", "--size", "128x128", "--steps", 1000, "-o", "a.png",
        cwd=tmp_path,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step 1/"):
            break
    process.send_signal(number)
    _, err = process.communicate(timeout=300)  # a thousand steps take longer on no machine that is not stuck
    told, more = err.partition("stopping after this step")[::2]
    print(f"{backend}: {told.count('step ')} steps until the signal was told, {more.count('step ')} after")
    assert process.returncode == code and "Traceback" not in err and "step 1000/" not in err
    assert more.count("\nstep ") <= 1
    assert listing(tmp_path) == []


def test_cuda_is_not_replaced_by_another_backend(tiny_folder: Path, place: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    refused = command("-m", tiny_folder, "--backend", "cuda", "a ring", "-o", "a.png")
    assert refused.code == 3 and refused.out == b"" and "no NVIDIA GPU" in one_line(refused.err)
    assert listing(place) == []
