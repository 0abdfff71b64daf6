"""`--devices` as processes: the picture of one process, and the end of all when one ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image
from support.processes import COMMAND, ENVIRONMENT, IMPATIENT, listing, pixels, qwenimg, start
from support.tiny_control import write_controlnet
from support.tiny_controlnet import write_controlnet as write_unet_controlnet
from support.tiny_ip_adapter import write_adapter
from support.tiny_sd import _SMALL, UNETS, write_tiny_sd

from qwenimg.common.jobs.replay import read_replay

DRAWN = ("a red circle", "-m", "shapes", "--seed", "3", "--size", "64x64", "--backend")
ROUNDED = 12  # of 12,288 values: with fewer tokens at once a library multiplies in another order; there was 1
LONG = (*DRAWN, "cpu", "--steps", "1000", "-o", "x.png", "--devices", "2")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Pictures of one process, by backend: with guidance and a step cache, with guidance, and on torch without."""
    folder = tmp_path_factory.mktemp("one")

    def drawn(backend: str) -> Path:
        if not (folder / backend).exists():
            check_drawn(folder, [*COMMAND], backend, out=backend)
        return folder / backend

    return drawn


def check_drawn(folder: Path, command: list[str], backend: str, *more: str, out: str = "out") -> None:
    base = {"prompt": "a red circle", "seed": 5, "steps": 2}
    lines = [
        base | {"guidance": 3.0, "steps": 8, "step_cache": 0.2},
        base | {"guidance": 3.0},
        base | {"guidance": 1.0},
    ]
    (folder / "p.jsonl").write_text("\n".join(map(json.dumps, lines if backend != "mlx" else lines[:2])) + "\n")
    options = ["--prompt-file", "p.jsonl", "-m", "shapes", "--size", "64x64", "--backend", backend]
    options += ["-o", f"{out}/{{index}}.png"]
    process = subprocess.run(
        [*command, *options, *more],
        cwd=folder,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    print(process.stderr)
    assert process.returncode == 0 and len(process.stdout.splitlines()) == len(listing(folder / out)) > 0


def check_same(made: Path, expected: Path, apart: int = 0) -> None:
    """Compare pictures and the calls that a step cache spared. apart: values that may differ by 1 of 255."""
    assert listing(made) == listing(expected)
    for name in listing(made):
        difference = np.abs(pixels(made / name) - pixels(expected / name))
        assert difference.max() <= 1 and np.count_nonzero(difference) <= apart
    calls = [read_replay(folder / listing(folder)[0]).options["cached_calls"] for folder in (made, expected)]
    print(f"cached calls: {calls[0]}")
    assert calls[0] == calls[1] != "none"


@pytest.mark.sample(0)
def test_two_devices_draw_what_one_does(tmp_path: Path, expected: Callable[[str], Path]) -> None:
    """Two pictures share their branches, the third its tokens."""
    check_drawn(tmp_path, [*COMMAND], "cpu", "--devices", "2")
    check_same(tmp_path / "out", expected("cpu"))


@pytest.mark.slow
def test_four_devices_draw_what_one_does(tmp_path: Path, expected: Callable[[str], Path]) -> None:
    """Both are shared by two of the pictures."""
    check_drawn(tmp_path, [*COMMAND], "cpu", "--devices", "4")
    check_same(tmp_path / "out", expected("cpu"), ROUNDED)


@pytest.mark.slow
def test_compiled_blocks(tmp_path: Path, expected: Callable[[str], Path]) -> None:
    """Of runs that share branches; the last picture shares tokens, and is not compiled. The compiler takes minutes."""
    check_drawn(tmp_path, [*COMMAND], "cpu", "--devices", "2", "--compile", "on")
    check_same(tmp_path / "out", expected("cpu"), ROUNDED)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The program as launchers start it."""
    path = tmp_path / "program"
    path.write_text(f"#!{sys.executable}\nimport sys\nfrom qwenimg.cli.main import run\nsys.exit(run())\n")
    path.chmod(0o755)
    return path


def ring(script: Path) -> list[str]:
    """The start of a command of two ranks on MLX's ring."""
    launcher = shutil.which("mlx.launch", path=str(Path(sys.executable).parent))
    assert launcher is not None
    paths = ["--env", f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}"]
    return [launcher, "-n", "2", "--backend", "ring", *paths, "--", str(script)]


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path, script: Path, expected: Callable[[str], Path]) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    check_drawn(tmp_path, [*launcher, str(script)], "cpu", "--devices", "2")
    check_same(tmp_path / "out", expected("cpu"))


@pytest.mark.slow
def test_under_mlx_launch(tmp_path: Path, script: Path, expected: Callable[[str], Path]) -> None:
    check_drawn(tmp_path, ring(script), "mlx", "--devices", "2")
    check_same(tmp_path / "out", expected("mlx"))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_control(tmp_path: Path, backend: str, script: Path, tiny_folder: Path) -> None:
    write_controlnet(tmp_path / "net")
    array = np.random.default_rng(2).integers(0, 256, (40, 60, 3)).astype(np.uint8)
    Image.fromarray(array).save(tmp_path / "edges.png")
    options = ["x", "-m", str(tiny_folder), "--backend", backend, "--precision", "fp32", "--size", "80x48"]
    options += ["--steps", "2", "--guidance", "3", "--seed", "3", "--control", "net=canny@edges.png:0.8"]
    two = ring(script) if backend == "mlx" else COMMAND
    for command, *more in ((COMMAND, "-o", "one.png"), (two, "-o", "two.png", "--devices", "2")):
        subprocess.run([*command, *options, *more], cwd=tmp_path, env=ENVIRONMENT, stdin=subprocess.DEVNULL, check=True)
    assert (pixels(tmp_path / "one.png") == pixels(tmp_path / "two.png")).all()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_a_controlnet_beside_an_ip_adapter(tmp_path: Path, backend: str, script: Path) -> None:
    write_tiny_sd(tmp_path / "sd15", "sd15")
    write_unet_controlnet(tmp_path / "net", UNETS["sd15"] | _SMALL)
    adapter = write_adapter(tmp_path / "adapters", "sd15")
    array = np.random.default_rng(2).integers(0, 256, (40, 60, 3)).astype(np.uint8)
    Image.fromarray(array).save(tmp_path / "edges.png")
    options = ["x", "-m", "sd15", "--backend", backend, "--precision", "fp32", "--size", "64x48", "--steps", "2"]
    options += ["--guidance", "3", "--seed", "3", "--control", "net=canny@edges.png:0.8"]
    options += ["--ip-adapter", f"{adapter}:0.6", "--ip-image", "edges.png"]
    two = ring(script) if backend == "mlx" else COMMAND
    for command, *more in ((COMMAND, "-o", "one.png"), (two, "-o", "two.png", "--devices", "2")):
        subprocess.run([*command, *options, *more], cwd=tmp_path, env=ENVIRONMENT, stdin=subprocess.DEVNULL, check=True)
    apart = np.abs(pixels(tmp_path / "one.png") - pixels(tmp_path / "two.png"))
    print(f"{backend}: {(apart > 0).sum()} of {apart.size} values differ, by {apart.max()} at most")
    assert apart.max() <= 1, "both branches in one batch round otherwise than one on each"


def broken_off(
    folder: Path, end: Callable[[subprocess.Popen[str], psutil.Process], None], program: tuple[str, ...] = COMMAND
) -> tuple[int, list[str]]:
    """Let `end` end the run in a step; return its exit code and the lines that follow. Nothing is left of it."""
    process = start(*LONG, cwd=folder, program=program)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step 1/"):
            break
    [other] = psutil.Process(process.pid).children()
    end(process, other)
    lines = process.stderr.read().splitlines()
    process.communicate()
    assert psutil.wait_procs([other], timeout=60)[1] == [] and listing(folder) == []
    return process.returncode, [line for line in lines if not line.startswith(("step ", "as this step went"))]


@pytest.mark.sample(0)
def test_a_rank_that_is_killed_ends_all(tmp_path: Path) -> None:
    code, lines = broken_off(tmp_path, lambda process, other: other.kill())
    assert code == 1 and lines == [
        "qwenimg: error: rank 1 of 2 has ended, killed or with its machine, so the picture is not drawn"
    ]


@pytest.mark.sample(0)
def test_a_rank_that_is_stopped_ends_all(tmp_path: Path) -> None:
    """With shorter pauses than a program has, which are known to rank 0 alone."""
    code, lines = broken_off(tmp_path, lambda process, other: other.send_signal(signal.SIGSTOP), IMPATIENT)
    assert code == 1 and lines == [
        "qwenimg: error: rank 1 of 2 has not answered for 4 s: its process is stopped (kill -STOP, a debugger) or its "
        "machine; all ranks end, and the picture is not drawn"
    ]


@pytest.mark.slow
def test_rank_0_that_is_killed_ends_all(tmp_path: Path) -> None:
    code, lines = broken_off(tmp_path, lambda process, other: process.kill())
    assert code == -9 and lines == ["qwenimg: error: rank 0 of 2 has ended, so all others end too"]


@pytest.mark.sample(0)
def test_ctrl_c_ends_all(tmp_path: Path) -> None:
    def interrupted(process: subprocess.Popen[str], other: psutil.Process) -> None:
        process.send_signal(signal.SIGINT)
        other.send_signal(signal.SIGINT)

    code, lines = broken_off(tmp_path, interrupted)
    assert code == 130 and [line.partition(";")[0] for line in lines] == [
        "qwenimg: stopping after this step",
        "qwenimg: error: stopped by a signal",
    ]


@pytest.mark.slow
def test_a_rank_that_never_starts(tmp_path: Path) -> None:
    """Rank 1's interpreter ends before it has met rank 0."""
    (tmp_path / "sitecustomize.py").write_text("import os\nif os.environ.get('RANK') == '1': os.kill(os.getpid(), 9)\n")
    process = subprocess.run(
        [*COMMAND, *LONG], cwd=tmp_path, capture_output=True, text=True,
        env=ENVIRONMENT | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
    )  # fmt: skip
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1] == (
        "qwenimg: error: rank 1 of 2 has ended at its start (killed by SIGKILL, most likely out of memory)"
    )


def launched(folder: Path, rank: int, port: int, *more: str) -> subprocess.Popen[str]:
    """A rank as a launcher on this machine starts it."""
    about = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return subprocess.Popen(
        [*COMMAND, *LONG, *more], cwd=folder, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env=ENVIRONMENT | {name: str(value) for name, value in about.items()},
    )  # fmt: skip


@pytest.mark.slow
def test_ranks_with_different_options(tmp_path: Path) -> None:
    port = 29517
    ranks = [launched(tmp_path, rank, port, "--guidance", f"{3 + rank}") for rank in range(2)]
    errors = [process.communicate()[1].splitlines() for process in ranks]
    assert ranks[0].returncode == 2
    assert "rank 1 was started with other options than rank 0" in errors[0][-1]
    assert errors[1] in ([], ["qwenimg: error: rank 0 of 2 has ended, so all others end too"])


@pytest.mark.slow
def test_ranks_with_different_files(tmp_path: Path, tiny_folder: Path) -> None:
    """Each rank has a model of its own at the same path."""
    from safetensors.numpy import load_file, save_file

    for rank in range(2):
        shutil.copytree(tiny_folder, tmp_path / f"{rank}" / "model")
    [file, *_] = sorted((tmp_path / "1" / "model" / "vae").glob("*.safetensors"))
    weights = load_file(file)
    save_file({name: value + 1 if value.ndim == 1 else value for name, value in weights.items()}, file)
    ranks = [launched(tmp_path / f"{rank}", rank, 29519, "-m", "model") for rank in range(2)]
    errors = [process.communicate()[1].splitlines() for process in ranks]
    assert ranks[0].returncode == 5 and ranks[1].returncode == 0
    assert "rank 1: the files of the vae differs" in errors[0][-1] and errors[1] == []


@pytest.mark.sample(0)
def test_an_error_before_the_ranks_start_is_one_line(tmp_path: Path) -> None:
    code, out, err = qwenimg("x", "-m", "missing.safetensors", "--devices", "2", "--backend", "cpu", cwd=tmp_path)
    assert code == 5 and out == "" and len(err.splitlines()) == 1
