"""`qwenimg batch` as a process: kills of the driver and of workers, going on, and what it prints."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from support import poison
from support.cli_runner import cli
from support.processes import COMMAND, ENVIRONMENT, IMPATIENT, pixels, qwenimg, start

SMALL = {"steps": 12, "size": "64x64"}
OPENED = ("-m", "shapes", "--backend", "cpu")
ENGINES = [
    "local",
    pytest.param("ray", marks=pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: .[ray]")),
]


def requests(folder: Path, count: int) -> Path:
    lines = [json.dumps({"prompt": f"a red circle {i % 3}", **SMALL}) for i in range(count)]
    (folder / "requests.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "requests.jsonl"


def rows(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for path in folder.glob("journal*.jsonl") for line in path.read_text().splitlines()]


def pictures(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in folder.glob("*.png")}


def workers_of(driver: psutil.Process, engine: str) -> list[psutil.Process]:
    below = driver.children(recursive=True)
    return below if engine == "local" else [one for one in below if "ray::Drawer" in "".join(one.cmdline()[:1])]


def broken_off(file: Path, out: Path, published: int, engine: str, *, worker: bool, chance: random.Random) -> None:
    """Run until so many more pictures are printed, then kill the driver at a random moment within the next ones; with
    `worker` one of the workers first, and the driver when another picture is printed."""
    process = subprocess.Popen(
        [*COMMAND, "batch", file, "-o", out, *OPENED, "--workers", "2", "--engine", engine],
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    below: list[psutil.Process] = []
    try:
        for i, _ in enumerate(process.stdout, 1):
            if i == published:
                driver = psutil.Process(process.pid)
                below = driver.children(recursive=True)
                if worker:
                    chance.choice(workers_of(driver, engine)).kill()
            if i >= published + worker:
                time.sleep(chance.random() / 5)  # no wait: any moment will do
                process.kill()
        process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert psutil.wait_procs(below, timeout=60)[1] == [], "nothing outlives a killed driver"


def check_kills(tmp_path: Path, count: int, kills: int, engine: str = "local") -> None:
    """Break a batch off at random, until it is done: no picture is lost, none is there twice, all have the pixels of an
    unbroken run."""
    file, out, whole = requests(tmp_path, count), tmp_path / "out", tmp_path / "whole"
    chance = random.Random(7)
    for i in range(kills):
        broken_off(file, out, chance.randint(1, 2), engine, worker=i % 2 == 1, chance=chance)
        names = pictures(out)
        print(f"after kill {i + 1}: {len(names)} pictures")
    code, _, err = qwenimg("batch", file, "-o", out, *OPENED, "--engine", engine, cwd=tmp_path)
    assert code == 0, err
    assert qwenimg("batch", file, "-o", whole, *OPENED, cwd=tmp_path)[0] == 0
    assert pictures(out).keys() == pictures(whole).keys() and len(pictures(out)) == count
    for name, path in pictures(out).items():
        assert (pixels(path) == pixels(whole / name)).all()
    times = Counter(row["key"] for row in rows(out) if row["state"] == "done")
    assert len(times) == count and set(times.values()) == {1}


@pytest.mark.sample(0)
def test_nothing_is_lost_and_nothing_is_twice_after_kills(tmp_path: Path) -> None:
    check_kills(tmp_path, 8, 2)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_twenty_kills(tmp_path: Path, engine: str) -> None:
    check_kills(tmp_path, 50, 20, engine)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_request_that_ends_its_workers_is_given_up_after_three_tries(tmp_path: Path, engine: str) -> None:
    """The others are drawn, each once, with the pixels of a run without it."""
    file = requests(tmp_path, 6)
    lines = file.read_text().splitlines()
    lines.insert(2, json.dumps({"prompt": "poison", **SMALL}))
    (tmp_path / "poisoned.jsonl").write_text("\n".join(lines) + "\n")
    process = subprocess.run(
        [*COMMAND, "batch", "poisoned.jsonl", "-o", "out", *OPENED, "--workers", "2", "--engine", engine],
        cwd=tmp_path,
        env=ENVIRONMENT | poison.environment(tmp_path / "poison"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 7, process.stderr
    assert "poisoned.jsonl:3: its worker" in process.stderr and "try 3 of 3" in process.stderr
    assert qwenimg("batch", file, "-o", "whole", *OPENED, cwd=tmp_path)[0] == 0
    assert pictures(tmp_path / "out").keys() == pictures(tmp_path / "whole").keys()
    for name, path in pictures(tmp_path / "out").items():
        assert (pixels(path) == pixels(tmp_path / "whole" / name)).all()
    states = Counter((row["state"], row.get("tries")) for row in rows(tmp_path / "out"))
    assert states == {("done", None): 6, ("failed", 3): 1}


@pytest.mark.sample(0)
def test_a_stopped_worker_is_replaced(tmp_path: Path) -> None:
    """By kill -STOP, with shorter pauses than a program has; its picture is drawn by the next worker."""
    file = requests(tmp_path, 4)
    process = start("batch", file, "-o", tmp_path / "out", *OPENED, cwd=tmp_path, program=IMPATIENT)
    assert process.stdout is not None
    process.stdout.readline()
    [worker] = psutil.Process(process.pid).children()
    worker.suspend()
    _, err = process.communicate()
    print(err)
    assert process.returncode == 0 and len(pictures(tmp_path / "out")) == 4
    assert "did not answer, as if stopped" in err and "memory" not in err and not worker.is_running()


@pytest.mark.sample(0)
def test_a_second_run_draws_nothing_and_faults_are_reported(tmp_path: Path) -> None:
    file = requests(tmp_path, 2)
    file.write_text(file.read_text() + '{"prompt": "x", "steps": 0}\n{"prompt": "x", "size": "16384x16384"}\n')
    code, out, err = qwenimg("batch", file, "-o", "out", *OPENED, cwd=tmp_path)
    assert code == 7 and len(out.splitlines()) == 2, err
    assert "requests.jsonl:3: steps is 0" in err and "requests.jsonl:4: " in err and "3 to draw" in err
    for line in out.splitlines():
        assert Path(line).parent == tmp_path / "out" and pixels(Path(line)).shape == (64, 64, 3)
    before = {name: path.stat().st_mtime_ns for name, path in pictures(tmp_path / "out").items()}
    code, out, err = qwenimg("batch", file, "-o", "out", *OPENED, cwd=tmp_path)
    assert (code, out) == (7, "") and "0 to draw, 2 there already" in err and "--retry-failed" in err
    code, out, err = qwenimg("batch", file, "-o", "out", *OPENED, "--retry-failed", cwd=tmp_path)
    assert (code, out) == (7, "") and "1 to draw, 2 there already" in err
    first = sorted(before)[0]
    (tmp_path / "out" / first).write_bytes(b"damaged")
    code, out, err = qwenimg("batch", file, "-o", "out", *OPENED, cwd=tmp_path)
    assert out.strip() == str(tmp_path / "out" / first), "a file that is not what the journal says is drawn again"
    after = {name: path.stat().st_mtime_ns for name, path in pictures(tmp_path / "out").items()}
    assert {name for name in before if before[name] != after[name]} == {first}


@pytest.mark.sample(0)
def test_shards_are_the_whole(tmp_path: Path) -> None:
    file = requests(tmp_path, 4)
    for i in range(2):
        code, _, err = qwenimg("batch", file, "-o", "out", *OPENED, "--shard", f"{i}/2", cwd=tmp_path)
        assert code == 0, err
    assert len(pictures(tmp_path / "out")) == 4
    assert {path.name for path in (tmp_path / "out").glob("*.jsonl")} == {
        "journal-0-of-2.jsonl",
        "journal-1-of-2.jsonl",
    }
    code, out, err = qwenimg("batch", file, "-o", "out", *OPENED, cwd=tmp_path)
    assert (code, out) == (0, "") and "0 to draw, 4 there already" in err


@pytest.mark.sample(0)
def test_a_signal_finishes_the_picture_that_is_drawn(tmp_path: Path) -> None:
    file = requests(tmp_path, 30)
    process = subprocess.Popen(
        [*COMMAND, "batch", file, "-o", tmp_path / "out", *OPENED],
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    rest, err = process.communicate()
    done = 1 + len(rest.splitlines())
    assert process.returncode == 143 and 1 <= done < 30 and len(pictures(tmp_path / "out")) == done
    assert "run the same command again" in err and "stopping" in err


def test_wrong_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    requests(tmp_path, 1)
    cli("batch", "missing.jsonl", "-o", "out", *OPENED).refused(5, "missing.jsonl")
    cli("batch", "requests.jsonl", *OPENED).refused(2, "-o")
    cli("batch", "requests.jsonl", "-o", "out", *OPENED, "--shard", "3/3").refused(2, "--shard 3/3", "0/3 to 2/3")
    cli("batch", "requests.jsonl", "-o", "out", "-m", "missing.safetensors").refused(5, "missing.safetensors")
    cli("batch", "requests.jsonl", "-o", "requests.jsonl", *OPENED).refused(2, "requests.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["requests.jsonl"]
