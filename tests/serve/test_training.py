"""LoRAs that a real server trains, on both backends: the file of the command line, its events, stop and resume, lost
workers and servers, and what a request may not name."""

from __future__ import annotations

import base64
import io
import itertools
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file
from support.processes import qwenimg
from support.servers import RunningServer, events, gone, serving, until_end

FEW: dict[str, Any] = {"steps": 6, "batch": 2, "rank": 2, "rate": 1e-3, "size": 64, "save_every": 2, "word": "sks"}
MORE: dict[str, Any] = {"sample": "a red sks", "sample_every": 3, "dtype": "fp32"}
SOME: dict[str, Any] = {"steps": 60, "batch": 1, "rank": 2, "rate": 1e-3, "size": 64, "save_every": 3, "dtype": "fp32"}
LONG: dict[str, Any] = SOME | {"steps": 100_000}
TINY: dict[str, Any] = {"prompt": "a red circle", "steps": 2, "size": "64x64", "seed": 7}


def write_pictures(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for color in ("red", "green", "blue"):
        Image.new("RGB", (64, 64), color).save(folder / f"{color}.png")
        (folder / f"{color}.txt").write_text(f"a {color} sks")
    return folder


@pytest.fixture(scope="module", params=["cpu", "mlx"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    place = tmp_path_factory.mktemp("training")
    write_pictures(place / "t" / "pets" / "cat")
    with serving(place / "g", "--training", place / "t", backend=request.param) as running:
        running.backend, running.folder = request.param, place / "t"  # type: ignore[attr-defined]
        yield running


@pytest.fixture
def folder(server: RunningServer) -> Path:
    found: Path = server.folder  # type: ignore[attr-defined]
    return found


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx2.Client]:
    with server.http as http:
        yield http


def ordered(http: httpx2.Client, output: str, given: dict[str, Any] = FEW, **more: Any) -> dict[str, Any]:
    answer = http.post("/api/jobs", json={"kind": "training", "data": "pets/cat", "output": output, **given, **more})
    assert answer.status_code == 202, answer.text
    job: dict[str, Any] = answer.json()
    return job


def until(http: httpx2.Client, job: str, name: str) -> dict[str, Any]:
    """Wait for an event of a job, and leave its stream then."""
    with http.stream("GET", f"/api/jobs/{job}/events") as response:
        return next(data for one, data in events(response) if one == name)


def commanded(backend: str, data: Path, out: Path, given: dict[str, Any]) -> None:
    """Train by the command line, in a process of its own as the server's workers: MLX has another BLAS in this one."""
    words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    asked = ("train", "lora", "--data", data, "-o", out, "-m", "shapes", "--backend", backend, "--quiet", *words)
    code, _, told = qwenimg(*asked, cwd=out.parent)
    assert code == 0, told


def same(a: Path, b: Path) -> bool:
    left, right = load_file(a), load_file(b)
    return left.keys() == right.keys() and all((left[name] == right[name]).all() for name in left)


def refused(answer: httpx2.Response, status: int, *words: str) -> None:
    """Check a refusal: one line, in which no path of this machine is."""
    error = answer.json()["error"]["message"]
    print(answer.status_code, error)
    assert answer.status_code == status and error.isprintable() and len(error) <= 300, answer.text
    assert all(word in error for word in words) and "/tmp" not in answer.text, answer.text


def unbroken(server: RunningServer, place: Path) -> Path:
    """Return the LoRA of SOME that the command line trains."""
    out = place / f"unbroken-{server.backend}.safetensors"  # type: ignore[attr-defined]
    if not out.exists():
        commanded(server.backend, server.folder / "pets/cat", out, SOME)  # type: ignore[attr-defined]
    return out


# From an order to its file


@pytest.mark.rest
def test_a_lora_is_that_of_the_command_line(server: RunningServer, http: httpx2.Client, tmp_path: Path) -> None:
    """Its events have every step's loss in order, and its samples; then it draws."""
    backend, folder = server.backend, server.folder  # type: ignore[attr-defined]
    job = ordered(http, "first.safetensors", FEW | MORE)
    assert (job["kind"], job["request"]["output"], job["pictures"]) == ("training", "first", [])
    with http.stream("GET", f"/api/jobs/{job['id']}/events") as response:
        news = list(events(response))
    assert news[-1] == ("end", {"state": "done"}) and http.get(f"/api/jobs/{job['id']}").json()["state"] == "done"
    commanded(backend, folder / "pets/cat", tmp_path / "first.safetensors", FEW | MORE)
    assert same(folder / "first.safetensors", tmp_path / "first.safetensors")

    steps, table = [data for name, data in news if name == "step"], (tmp_path / "first.run/lora.csv").read_text()
    losses = [float(line.split(",")[1]) for line in table.splitlines()[1:]]
    places = [0, *(data["step"] for data in steps)]
    means = [np.mean(losses[a:b]) for a, b in itertools.pairwise(places)]
    print(f"{backend}: losses {[data['loss'] for data in steps]} after steps {places[1:]}")
    assert np.allclose([data["loss"] for data in steps], means, rtol=1e-5) and places[-1] == 6
    assert steps[-1]["left"] == 0 and all(data["rate"] > 0 and data["steps"] == 6 for data in steps)

    looks = [data for name, data in news if name == "samples"]
    assert [data["step"] for data in looks] == [0, 3, 6]
    for data in looks:
        [name], [preview] = data["samples"], data["previews"]
        answer = http.get(f"/api/jobs/{job['id']}/samples/{name}")
        theirs = np.asarray(Image.open(tmp_path / "first.run/samples" / f"{name}.png"))
        assert answer.headers["content-type"] == "image/png"
        assert (np.asarray(Image.open(io.BytesIO(answer.content))) == theirs).all()
        small = Image.open(io.BytesIO(base64.b64decode(preview)))
        assert small.format == "JPEG" and np.abs(np.asarray(small).astype(int) - theirs).mean() < 8

    assert "first" in http.get("/api/training").json()["loras"] and "first" in http.get("/api/models").json()["loras"]
    assert http.get("/api/training/first").content == (folder / "first.safetensors").read_bytes()
    plain, trained = (drawn(http, **more) for more in ({}, {"lora": "first:100"}))
    assert (plain != trained).any()
    text = http.get("/metrics").text
    assert "qwenimg_loras_total 1.0" in text and "qwenimg_training_steps_total 6.0" in text


def drawn(http: httpx2.Client, **more: Any) -> np.ndarray:
    done = until_end(http, http.post("/api/jobs", json=TINY | more).json()["id"])
    assert done["state"] == "done", done
    return np.asarray(Image.open(io.BytesIO(http.get(f"/api/pictures/{done['pictures'][0]}").content)))


# The queue


@pytest.mark.rest
def test_drawings_wait_and_a_training_stops_at_a_step(
    server: RunningServer, http: httpx2.Client, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With its checkpoint, from which it goes on to what the unbroken run is. Its client is long gone."""
    folder, [worker] = server.folder, server.workers  # type: ignore[attr-defined]
    job = ordered(http, "stopped", SOME)
    until(http, job["id"], "samples")  # those of step 0
    os.kill(worker, signal.SIGSTOP)
    try:
        waits = http.post("/api/jobs", json=TINY).json()
        assert (waits["state"], waits["position"]) == ("waiting", 1)
        assert waits["behind"] == [{"id": job["id"], "kind": "training", "left": waits["behind"][0]["left"]}]
        refused(
            http.post("/api/jobs", json={"kind": "training", "data": "pets/cat", "output": "STOPPED"}), 409, "output"
        )
        assert http.delete(f"/api/jobs/{job['id']}").json()["state"] == "stopping"
        assert http.delete(f"/api/jobs/{job['id']}").json()["state"] == "stopping", "a second time changes nothing"
    finally:
        os.kill(worker, signal.SIGCONT)
    ended, done = until_end(http, job["id"]), until_end(http, waits["id"])
    assert ended["state"] == "cancelled" and done["state"] == "done", (ended, done)
    assert not (folder / "stopped.safetensors").exists()
    step = len((folder / "stopped.run/lora.csv").read_text().splitlines()) - 1
    print(f"stopped at step {step} of 60")
    assert 0 < step < 60 and (folder / "stopped.run/lora.safetensors").exists()
    again = until_end(http, ordered(http, "stopped", SOME)["id"])
    assert again["state"] == "failed" and "a run is there already; go on with --resume" in again["error"]
    assert until_end(http, ordered(http, "stopped", SOME, resume=True)["id"])["state"] == "done"
    assert same(folder / "stopped.safetensors", unbroken(server, tmp_path_factory.getbasetemp()))


@pytest.mark.rest
def test_a_request_that_cannot_wait_so_long_is_refused(server: RunningServer, http: httpx2.Client) -> None:
    job = ordered(http, "long", LONG)
    left = until(http, job["id"], "step")["left"]
    short = {"prompt": "x", "deadline": left / 1e3}
    answer = http.post("/v1/images/generations", json=short)
    refused(answer, 503, "a LoRA is trained here", "hand in a job")
    assert answer.json()["error"]["code"] == "training" and 1 <= int(answer.headers["retry-after"]) <= 120
    http.delete(f"/api/jobs/{job['id']}")
    assert until_end(http, job["id"])["state"] == "cancelled"


# Losses


@pytest.mark.rest
def test_a_worker_that_is_killed(
    server: RunningServer, http: httpx2.Client, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, [worker] = server.folder, server.workers  # type: ignore[attr-defined]
    job = ordered(http, "killed", SOME)
    with http.stream("GET", f"/api/jobs/{job['id']}/events") as response:
        next(data for name, data in events(response) if name == "step" and data["step"] >= 3)
        os.kill(worker, signal.SIGKILL)
    done = until_end(http, job["id"])
    print(done["error"])
    assert done["state"] == "failed" and "was killed" in done["error"] and "with resume" in done["error"]
    assert not (folder / "killed.safetensors").exists()
    server.says("ready:")
    assert until_end(http, ordered(http, "killed", SOME, resume=True)["id"])["state"] == "done"
    assert same(folder / "killed.safetensors", unbroken(server, tmp_path_factory.getbasetemp()))


@pytest.mark.rest
@pytest.mark.parametrize(
    ("backend", "number"), [("cpu", signal.SIGTERM), ("cpu", signal.SIGKILL), ("mlx", signal.SIGINT)]
)
def test_a_server_that_ends_leaves_a_training_to_the_next(backend: str, number: signal.Signals, tmp_path: Path) -> None:
    """At its step after a signal, with its checkpoint; at its last checkpoint after kill -9."""
    data, place = write_pictures(tmp_path / "t" / "pets" / "cat"), ("--training", tmp_path / "t")
    commanded(backend, data, tmp_path / "unbroken.safetensors", SOME)
    with serving(tmp_path / "g", *place, backend=backend) as server:
        [worker] = server.workers
        with server.http as http:
            job = ordered(http, "my", SOME)["id"]
            with http.stream("GET", f"/api/jobs/{job}/events") as response:
                next(data for name, data in events(response) if name == "step" and data["step"] >= 3)
                server.send(number)
        code = server.end()
        gone(worker)
    print(code, server.lines[-3:])
    assert code == {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}[number]
    assert (tmp_path / "t/my.run/lora.safetensors").exists() and not (tmp_path / "t/my.safetensors").exists()
    with serving(tmp_path / "g", *place, backend=backend) as server, server.http as http:
        assert until_end(http, job)["state"] == "done"
        server.send(signal.SIGTERM)  # it writes the end of the job before its own, which kill -9 would not let it
        assert server.end() == 143
    assert same(tmp_path / "t/my.safetensors", tmp_path / "unbroken.safetensors")
    if number == signal.SIGKILL:
        return
    with serving(tmp_path / "g", backend=backend) as server, server.http as http:  # which trains no more
        assert http.get(f"/api/jobs/{job}").json()["state"] == "done"
        refused(http.get("/api/training"), 403, "--training FOLDER")


@pytest.mark.rest
def test_a_disk_that_is_full(server: RunningServer, http: httpx2.Client, folder: Path) -> None:
    """The checkpoint before stays, and the run goes on from it when there is room."""
    [worker] = server.workers
    before = resource.prlimit(worker, resource.RLIMIT_FSIZE)
    job = ordered(http, "full", SOME)
    with http.stream("GET", f"/api/jobs/{job['id']}/events") as response:
        next(data for name, data in events(response) if name == "step" and data["step"] >= 3)
        resource.prlimit(worker, resource.RLIMIT_FSIZE, (2_000, before[1]))
    done = until_end(http, job["id"])
    resource.prlimit(worker, resource.RLIMIT_FSIZE, before)
    print(done["error"])
    assert done["state"] == "failed" and "full.run/" in done["error"] and "/tmp" not in done["error"], done
    assert not list(folder.rglob("*.part")) and not (folder / "full.safetensors").exists()
    assert until_end(http, ordered(http, "full", SOME, resume=True)["id"])["state"] == "done"


# What is refused


BAD: dict[str, tuple[object, ...]] = {
    "data": (
        "../t",
        "/etc",
        "pets/../../t",
        "\0",
        "x" * 2000,
        5,
        ["pets"],
        "",
        True,
        "out",
        "loop",
        "a file.png",
        "no",
    ),
    "output": ("../x", "a/b", ".x", "x;y", "a:b", "", "x" * 90, "x\n", 5, "x .", "~", "linked", "linked too", None),
    "keep": ("../t", "/etc", 5, "out", "nothing"),
    "steps": (0, -1, 1.5, "x", True, 10**9, [5], {}, "1e9"),
    "rank": (5_000, ""),
    "rate": ("fast", -1, 11, True, "nan"),
    "size": (63, 2049),
    "batch": (0,),
    "seed": (2**63, -1),
    "dropout": (2,),
    "optimizer": ("sgd", 5),
    "dtype": (32,),
    "flips": ("yes", 1),
    "resume": (1,),
    "sample": (["x"] * 9, 5, [5], "x" * 20_000),
    "word": ("x" * 20_000, ["x"]),
    "lora": ("style", "/etc/passwd:1", "a:b:c"),
    "kind": ("paint", 5, ["training"]),
    "model": ("else", 5),
}
UNKNOWN = ("stepz", "prompt", "deadline", "plan", "quiet", "backend", "models_dir", "opening", "products", "continues")


@pytest.mark.rest
def test_what_a_request_may_not_say(http: httpx2.Client, folder: Path) -> None:
    if not (folder / "out").is_symlink():
        (folder / "out").symlink_to("/etc")
        (folder / "loop").symlink_to("loop")
        (folder / "linked.safetensors").symlink_to("/tmp/elsewhere.safetensors")
        (folder / "linked too.run").symlink_to("/tmp")
        (folder / "a file.png").write_bytes(b"x")
    before = sorted(path.name for path in folder.iterdir())
    body = {"kind": "training", "data": "pets/cat", "output": "bad"}
    for field, values in BAD.items():
        for value in values:
            answer = http.post("/api/jobs", json=body | {field: value})
            refused(answer, 404 if field == "model" else 400, "LoRA" if field == "lora" and value != "a:b:c" else field)
            assert answer.json()["error"]["param"] == field, (field, value, answer.text)
    for field in UNKNOWN:
        refused(http.post("/api/jobs", json=body | {field: 1}), 400, f"unknown field '{field}'")
    assert sorted(path.name for path in folder.iterdir()) == before
    assert all(job["request"].get("output") != "bad" for job in http.get("/api/jobs").json()["jobs"])


@pytest.mark.rest
def test_what_only_the_worker_sees(http: httpx2.Client, folder: Path, tmp_path: Path) -> None:
    """Fails the job in one line that names the file and no path of this machine."""
    png = io.BytesIO()
    Image.new("RGB", (64, 64)).save(png, "PNG")
    small = io.BytesIO()
    Image.new("RGB", (8, 8)).save(small, "PNG")
    (tmp_path / "secret.png").write_bytes(png.getvalue())
    cases: dict[str, tuple[dict[str, bytes | Path], dict[str, Any], str]] = {
        "empty": ({}, {}, "holds no picture"),
        "broken": ({"a.png": png.getvalue()[:60]}, {}, "broken/a.png"),
        "text": ({"a.png": b"no picture"}, {}, "text/a.png"),
        "link": ({"a.png": tmp_path / "secret.png"}, {}, "link/a.png: is a link that leads out"),
        "caption": ({"a.png": png.getvalue(), "a.txt": b"\xff\xfe"}, {}, "caption/a.txt: is not UTF-8"),
        "captions": ({"a.png": png.getvalue(), "a.txt": tmp_path / "secret.png"}, {}, "is a link that leads out"),
        "rows": ({"a.png": png.getvalue(), "metadata.jsonl": b"[" * 9_000}, {}, "metadata.jsonl"),
        "small": ({"a.png": small.getvalue()}, {}, "small/a.png: is 8x8"),
        "phases": ({"a.png": png.getvalue()}, {"phases": "x=1"}, "--phases"),
        "number": ({"a.png": png.getvalue()}, {"precision": "fp5"}, "--precision"),
        "bits": ({"a.png": png.getvalue()}, {"quantize": 3}, "quantize"),
        "resumed": ({"a.png": png.getvalue()}, {"resume": True}, "has no checkpoint"),
        "held": ({"a.png": png.getvalue()}, {"hold_out": 1}, "--hold-out"),
    }
    for name, (files, given, word) in cases.items():
        (folder / name).mkdir(exist_ok=True)
        for file, content in files.items():
            path = folder / name / file
            path.unlink(missing_ok=True)
            path.write_bytes(content) if isinstance(content, bytes) else path.symlink_to(content)
        done = until_end(http, ordered(http, "worse", FEW | {"data": name} | given)["id"])
        print(name, "|", done["error"])
        assert done["state"] == "failed" and word in done["error"] and done["error"].isprintable(), (name, done)
        assert "/tmp" not in done["error"] and len(done["error"]) <= 300 and not (folder / "worse.safetensors").exists()
    assert drawn(http).shape == (64, 64, 3), "and then it draws"


@pytest.mark.rest
def test_a_hundred_orders(http: httpx2.Client) -> None:
    """Sixteen wait, the others are told to come again; one output is not trained twice."""
    first = ordered(http, "many 0", LONG)
    until(http, first["id"], "note")
    body = {"kind": "training", "data": "pets/cat"}
    answers = [http.post("/api/jobs", json=body | {"output": f"many {i}"}) for i in range(1, 101)]
    codes = [answer.status_code for answer in answers]
    assert codes == [202] * 16 + [429] * 84
    rows = {job["id"]: job for job in http.get("/api/jobs").json()["jobs"]}
    last = rows[answers[15].json()["id"]]
    assert last["position"] == 16 and len(last["behind"]) == 16 and last["behind"][0]["id"] == first["id"]
    for answer in answers[:16]:
        assert http.delete(f"/api/jobs/{answer.json()['id']}").json()["state"] == "cancelled"
    http.delete(f"/api/jobs/{first['id']}")
    assert until_end(http, first["id"])["state"] == "cancelled"


@pytest.mark.rest
def test_files_of_trainings_are_no_paths(http: httpx2.Client, folder: Path) -> None:
    (folder / "secret.txt").write_text("secret")
    job = ordered(http, "other.safetensors")["id"]
    until(http, job, "end")
    for name in (
        "..%2fg%2fgallery.sqlite3",
        "%2e%2e",
        "secret.txt",
        "%00",
        "x" * 5000,
        "pets",
        "..%2f..%2fetc%2fpasswd",
    ):
        for path in (f"/api/training/{name}", f"/api/jobs/{job}/samples/{name}", f"/api/jobs/{name}/samples/0000000-0"):
            answer = http.get(path)
            assert answer.status_code == 404 and "secret" not in answer.json()["error"]["message"], (path, answer.text)
