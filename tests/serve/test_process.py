"""Kills, signals and restarts of real processes, and options that are refused before a model is opened."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import shutil
import signal
import socket
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import openai
import psutil
import pytest
import torch
import webuiapi
from PIL import Image
from safetensors.numpy import save_file
from support.cli_runner import cli
from support.processes import IMPATIENT, pixels, qwenimg
from support.servers import LONG, RunningServer, gone, serving, until_end, until_step
from support.tiny_control import write_controlnet
from support.upscalers import as_safetensors, srvgg

from qwenimg.cli.serve.offered import Offer, search
from qwenimg.common.base.errors import UsageError
from qwenimg.common.numbers.noise import sha256
from qwenimg.common.shapes import builtin

FEW = {"steps": 2, "size": "64x64"}


@pytest.mark.sample(0)
def test_a_killed_worker_is_answered_and_replaced(tmp_path: Path) -> None:
    with serving(tmp_path / "g") as server, server.http as http, ThreadPoolExecutor(1) as pool:
        ask = {"prompt": "x", "steps": LONG}
        answer = pool.submit(server.http.post, "/v1/images/generations", json=ask)
        while "qwenimg_drawing 1.0" not in http.get("/metrics").text:
            pass
        job = http.post("/api/jobs", json={"prompt": "a red circle", "seed": 3, **FEW}).json()
        assert job["state"] == "waiting"
        [worker] = server.workers
        os.kill(worker, signal.SIGKILL)
        lost = answer.result()
        assert lost.status_code == 507 and lost.headers["x-should-retry"] == "false"
        assert "memory" in lost.json()["error"]["message"]
        assert until_end(http, job["id"])["state"] == "done", "the next one is served by a new worker"
        assert server.workers not in ([], [worker])


@pytest.mark.sample(0)
def test_a_stopped_worker_is_answered_and_replaced(tmp_path: Path) -> None:
    """By kill -STOP, with shorter pauses than a program has."""
    with serving(tmp_path / "g", program=IMPATIENT) as server, server.http as http, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.http.post, "/v1/images/generations", json={"prompt": "x", "steps": LONG})
        while "qwenimg_drawing 1.0" not in http.get("/metrics").text:
            pass
        job = http.post("/api/jobs", json={"prompt": "a red circle", "seed": 3, **FEW}).json()
        [worker] = server.workers
        os.kill(worker, signal.SIGSTOP)
        lost = answer.result()
        print(lost.json()["error"]["message"])
        assert lost.status_code == 500 and "did not answer" in lost.json()["error"]["message"]
        assert "memory" not in lost.json()["error"]["message"]
        assert until_end(http, job["id"])["state"] == "done", "the next one is served by a new worker"
        assert not psutil.pid_exists(worker)


@pytest.mark.sample(0)
def test_a_killed_server_leaves_no_worker_and_the_next_one_goes_on(tmp_path: Path) -> None:
    """kill -9 while a job of three pictures is drawn and another one waits: nothing is lost, nothing is there twice,
    and the pixels are those of an unbroken run."""
    with serving(tmp_path / "g") as server, server.http as http:
        first = http.post(
            "/api/jobs", json={"prompt": "a red circle", "seed": "7-9", "steps": 40, "size": "64x64"}
        ).json()
        second = http.post("/api/jobs", json={"prompt": "a blue star", "seed": 5, **FEW}).json()
        while not http.get(f"/api/jobs/{first['id']}").json()["pictures"]:
            pass
        workers = server.workers
        assert len(workers) == 1
        server.send(signal.SIGKILL)
        server.end()
        gone(workers[0])
    with contextlib.closing(sqlite3.connect(tmp_path / "g" / "gallery.sqlite3")) as base, base:
        # A third job, as if the server was killed between its last picture and its end.
        columns = "state, model, request, mask_alpha, deadline, created"
        base.execute(
            f"insert into jobs (id, {columns}) select 'drawn', {columns} from jobs where id = ?", (second["id"],)
        )
        base.execute(
            "insert into pictures (id, job, place, name, sha256, recipe, seconds, created, thumbnail)"
            " values ('0123456789abcdef-0', 'drawn', 0, '0123456789abcdef-0.png', '', '{\"seed\": 5}', 1, 1, x'')"
        )
        base.execute("update jobs set drawn = 1 where id = 'drawn'")
    with serving(tmp_path / "g") as server, server.http as http:
        assert (
            until_end(http, "drawn")["pictures"] == ["0123456789abcdef-0"]
            and http.get("/api/pictures/0123456789abcdef-0").status_code == 404
        )
        http.delete("/api/pictures/0123456789abcdef-0")
        done = [until_end(http, job["id"]) for job in (first, second)]
        assert [job["state"] for job in done] == ["done", "done"]
        assert [len(job["pictures"]) for job in done] == [3, 1]
        rows = http.get("/api/pictures").json()["pictures"]
        assert sorted(row["recipe"]["seed"] for row in rows) == [5, 7, 8, 9]
    files = sorted(path.name for path in (tmp_path / "g").iterdir() if path.suffix not in (".sqlite3", ""))
    assert [name for name in files if "sqlite3" not in name] == sorted(f"{row['id']}.png" for row in rows)
    asked = ("-s", "7-9", "--steps", "40", "--size", "64x64", "--backend", "cpu", "-o", "{seed}.png")
    assert qwenimg("a red circle", *asked, cwd=tmp_path)[0] == 0
    for i, seed in enumerate((7, 8, 9)):
        assert (pixels(tmp_path / f"{seed}.png") == pixels(tmp_path / "g" / f"{first['id']}-{i}.png")).all()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.sample(0)
def test_a_signal_ends_it_when_what_is_drawn_is_done(tmp_path: Path, number: signal.Signals) -> None:
    with serving(tmp_path / "g") as server, server.http as http, ThreadPoolExecutor(1) as pool:
        ask = {"prompt": "x", "steps": 300, "size": "64x64"}
        job = http.post("/api/jobs", json=ask).json()["id"]
        until_step(http, job)
        [worker] = server.workers
        os.kill(worker, signal.SIGSTOP)
        answer = pool.submit(server.http.post, "/v1/images/generations", json=ask)
        while "qwenimg_waiting 1.0" not in http.get("/metrics").text:
            pass
        waits = http.post("/api/jobs", json={"prompt": "y", **FEW}).json()["id"]
        assert http.get(f"/api/jobs/{waits}").json()["position"] == 2
        server.send(number)
        server.says("stopping when what is being drawn is done")
        refused = answer.result()
        assert refused.status_code == 503 and "retry-after" in refused.headers, "what waits is refused at once"
        os.kill(worker, signal.SIGCONT)
        assert server.end() == (143 if number is signal.SIGTERM else 130)
        assert not psutil.pid_exists(worker)
    assert not [path for path in (tmp_path / "g").iterdir() if path.name.endswith(".part")]
    with serving(tmp_path / "g") as server, server.http as http:
        assert http.get(f"/api/jobs/{job}").json()["state"] == "done", "the running job was finished"
        assert until_end(http, waits)["state"] == "done", "the waiting job goes on"


@pytest.mark.sample(0)
def test_an_answer_is_delivered_after_sigterm(tmp_path: Path) -> None:
    with serving(tmp_path / "g") as server, server.http as http, ThreadPoolExecutor(1) as pool:
        ask = {"prompt": "x", "steps": 300, "width": 64, "height": 64}
        answer = pool.submit(server.http.post, "/sdapi/v1/txt2img", json=ask)
        while not http.get("/sdapi/v1/progress").json()["state"]["sampling_step"]:
            pass
        [worker] = server.workers
        os.kill(worker, signal.SIGSTOP)
        server.send(signal.SIGTERM)
        server.says("stopping")
        os.kill(worker, signal.SIGCONT)
        assert answer.result().status_code == 200 and len(answer.result().json()["images"]) == 1
        assert server.end() == 143


@pytest.mark.sample(0)
def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with serving(tmp_path / "g") as server, server.http as http:
        until_step(http, http.post("/api/jobs", json={"prompt": "x", "steps": LONG}).json()["id"])
        [worker] = server.workers
        server.send(signal.SIGTERM)
        server.says("again to stop at once")
        while server.process.poll() is None:  # signals that follow at once count as the first
            server.send(signal.SIGTERM)
        assert server.end() == 143
        gone(worker)


@pytest.mark.sample(0)
def test_a_second_model_is_swapped_in(tmp_path: Path) -> None:
    other = shutil.copytree(builtin.folder(), tmp_path / "other")
    with serving(tmp_path / "g", "-m", other) as server, server.http as http:
        for name in ("shapes", "other", "shapes"):
            done = until_end(http, http.post("/api/jobs", json={"prompt": "x", "model": name, **FEW}).json()["id"])
            [picture] = done["pictures"]
            model = http.get(f"/api/pictures/{picture}/recipe").json()["model"]
            assert (done["state"], model.removesuffix("-v1")) == ("done", name)
            served = [row["id"] for row in http.get("/api/models").json()["models"] if "images" in row]
            assert served == [name], "one is open at a time"


@pytest.mark.sample(0)
def test_a_model_that_sees_several_images(tmp_path: Path, tiny_flux2: dict[str, Path]) -> None:
    """In their order, by every API, and what a page is told of the model."""
    images = [png(np.full((48, 64, 3), value)) for value in (40, 200)]
    texts = [base64.b64encode(one).decode() for one in images]
    with serving(tmp_path / "g", "-m", tiny_flux2["flux2-klein"]) as server, server.http as http:
        name = http.get("/v1/models").json()["data"][1]["id"]
        asked = {"prompt": "x", "model": name, "steps": 1, "width": 64, "height": 48, "seed": 1}
        done = until_end(http, http.post("/api/jobs", json={**asked, "image": texts}).json()["id"])
        assert done["state"] == "done", done
        recipe = http.get(f"/api/pictures/{done['pictures'][0]}/recipe").json()
        assert recipe["image_sha256"] == sha256(np.full((48, 64, 3), 40, np.uint8))
        assert recipe["more_images_sha256"] == [sha256(np.full((48, 64, 3), 200, np.uint8))]
        [model] = [row for row in http.get("/api/models").json()["models"] if "images" in row]
        assert model["id"] == name and model["images"][1] > 1
        client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
        body = {name: value for name, value in asked.items() if name not in ("prompt", "model")}
        edited = client.images.edit(image=images, prompt="x", model=name, extra_body=body)
        drawn = [base64.b64decode(edited.data[0].b64_json)]
        sd = {"prompt": "x", "init_images": texts, "steps": 1, "width": 64, "height": 48, "seed": 1}
        answer = http.post("/sdapi/v1/img2img", json=sd | {"override_settings": {"sd_model_checkpoint": name}})
        assert answer.status_code == 200, answer.text
        drawn += [
            base64.b64decode(answer.json()["images"][0]),
            http.get(f"/api/pictures/{done['pictures'][0]}").content,
        ]
        whole = [np.asarray(Image.open(io.BytesIO(one))) for one in drawn]
        assert (whole[0] == whole[1]).all() and (whole[0] == whole[2]).all()


SIZE = {"width": 80, "height": 48}
LONG_NAME = "a-network-whose-name-is-so-long-that-messages-cut-it" * 2
EDGES, HOLE = (np.random.default_rng(seed).integers(0, 256, (40, 60, 3)).astype(np.uint8) for seed in (2, 3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two control networks of the tiny model, and a broken one; a LoRA of no model; two pictures; and files that are
    named as requests name pictures."""
    folder = tmp_path_factory.mktemp("networks")
    write_controlnet(folder / "union")
    write_controlnet(folder / LONG_NAME)
    shutil.copy(folder / "union/diffusion_pytorch_model.safetensors", folder / "broken.safetensors")
    save_file({"x.lora_A.weight": np.zeros((1, 4), np.float32)}, folder / "strange.safetensors")
    for name, array in (("edges", EDGES), ("hole", HOLE)):
        (folder / f"{name}.png").write_bytes(png(array))
    for name in ("1:0.8:0-0.5", "1:0.8", "2:0.5", "canny@2:0.5"):
        (folder / name).touch()
    return folder


@pytest.fixture(scope="module")
def controlled(folder: Path, tiny_folder: Path, tiny_layered: Path) -> Iterator[RunningServer]:
    """A server of two tiny models with all of them, started in their folder."""
    options = [text for name in ("union", LONG_NAME, "broken.safetensors") for text in ("--control", folder / name)]
    models = ("-m", tiny_folder, "-m", tiny_layered)
    with serving(folder / "g", *models, *options, "--lora", "strange.safetensors", cwd=folder) as server:
        (folder / "broken.safetensors").write_bytes(b"x" * 100)  # one that was broken before is refused at the start
        yield server


@pytest.mark.sample(0)
def test_control_networks_that_were_given_at_the_start(
    controlled: RunningServer, folder: Path, tiny_folder: Path
) -> None:
    """By each API the pixels of the command line, whose pictures are files; a request names none, nor another
    network, and no answer names a path."""
    size = SIZE | {"steps": 2, "guidance": 3.0, "seed": 3}
    options = [f"--{key}={value}" for key, value in size.items()]
    net = folder / "union"
    controls = ("--control", f"{net}=canny@edges.png:0.5", "--control", f"{net}=hole.png:0.8:0-0.5")
    base = ("x", "-m", tiny_folder, "--backend", "cpu", *options)
    code, _, err = qwenimg(*base, *controls, "-o", "by-cli.png", cwd=folder)
    assert code == 0, err
    expected = pixels(folder / "by-cli.png")
    with controlled.http as http:
        name = http.get("/v1/models").json()["data"][1]["id"]
        assert http.get("/api/models").json()["controls"] == ["union", LONG_NAME, "broken"]
        files = [base64.b64encode(png(one)).decode() for one in (HOLE, EDGES)]
        asked = {"prompt": "x", "model": name, **size, "control": "union=canny@2:0.5; union=1:0.8:0-0.5"}
        sent = asked | {"control_image": files}
        done = until_end(http, http.post("/api/jobs", json=sent).json()["id"])
        assert done["state"] == "done", done
        [model] = [row for row in http.get("/api/models").json()["models"] if "controlled" in row]
        assert model["controlled"], "a page offers it"
        drawn = [http.get(f"/api/pictures/{done['pictures'][0]}").content]
        recipe = http.get(f"/api/pictures/{done['pictures'][0]}/recipe").json()
        assert recipe["control"].startswith("union=canny@2:0.5; ")
        read = http.get(f"/api/pictures/{done['pictures'][0]}/options").json()
        assert "control" not in read["options"] and "a control" in " ".join(read["notes"])
        answer = http.post("/v1/images/generations", json=sent)
        assert answer.status_code == 200, answer.text
        drawn.append(base64.b64decode(answer.json()["data"][0]["b64_json"]))
        drawn.append(by_webuiapi(controlled))
        for one in drawn:
            assert (np.asarray(Image.open(io.BytesIO(one))) == expected).all()
        parts = [("image", png(EDGES)), ("control_image[]", png(HOLE)), ("control_image[]", png(EDGES))]
        texts = {key: str(value) for key, value in asked.items()}
        edited = http.post("/v1/images/edits", data=texts, files=[(field, (field, data)) for field, data in parts])
        assert edited.status_code == 200, edited.text
        broken = base64.b64encode(b"no picture").decode()
        for changed, words in (
            ({"control": "union=edges.png", "control_image": files[:1]}, "NUMBER"),
            ({"control": "other=1", "control_image": files[:1]}, "no control network"),
            ({"control": "union=1:99", "control_image": files[:1]}, "scale"),
            ({"control_image": files[:1]}, "names 0"),
        ):
            wrong = http.post("/api/jobs", json={"prompt": "x", "model": name, **size, **changed})
            assert wrong.status_code == 400 and words in wrong.json()["error"]["message"], wrong.text
            assert str(folder) not in wrong.text
        for changed, words in (
            ({"control": "union=1", "control_image": broken}, "no PNG"),
            ({"control": "union=1", "control_image": files[0], "model": "shapes"},
             "union: is made for a transformer with 66 channels in its streams; the model's has 128"),
        ):  # fmt: skip
            failed = until_end(http, http.post("/api/jobs", json=asked | changed).json()["id"])
            assert failed["state"] == "failed" and words in failed["error"], failed
            assert str(folder) not in failed["error"] and failed["request"]["control"] == "union=1"


def by_webuiapi(server: RunningServer) -> bytes:
    """The picture of test_control_networks_that_were_given_at_the_start, as that client asks for it: a file."""
    api = webuiapi.WebUIApi(baseurl=f"{server.address}/sdapi/v1")
    assert api.has_controlnet and api.controlnet_version() >= 2
    assert api.controlnet_model_list()[0] == "union" and api.controlnet_module_list()[:2] == ["none", "canny"]
    first, second = Image.fromarray(EDGES), Image.fromarray(HOLE)
    unit = webuiapi.ControlNetUnit
    units = [unit(first, module="canny", model="union", weight=0.5)]
    units.append(unit(second, model="union [0123abcd]", weight=0.8, guidance_end=0.5))
    options = {"prompt": "x", "negative_prompt": " ", "seed": 3, "steps": 2, "cfg_scale": 3.0} | SIZE
    model = {"sd_model_checkpoint": "tiny-qwen-image"}
    answer = api.txt2img(sampler_name="Euler", controlnet_units=units, override_settings=model, **options)
    assert "alwayson_scripts" not in answer.parameters, "an answer does not repeat pictures"
    plain = api.txt2img(sampler_name="Euler", override_settings=model, **options)
    assert plain.info["all_seeds"] == [3] and plain.image.tobytes() != answer.image.tobytes(), "no unit is left over"
    out = io.BytesIO()
    answer.image.save(out, "PNG")
    return out.getvalue()


@pytest.mark.parametrize(("option", "name"), [("control", LONG_NAME), ("control", "broken"), ("lora", "strange")])
@pytest.mark.sample(1)
def test_what_does_not_fit_the_model_is_told(
    controlled: RunningServer, folder: Path, monkeypatch: pytest.MonkeyPatch, option: str, name: str
) -> None:
    """The line of the command line, with the name that requests have for the file, and 400."""
    monkeypatch.chdir(folder)
    [path] = folder.glob(f"{name}*")
    by_cli = f"{path}=edges.png" if option == "control" else str(path)
    ask = {"steps": "2", "size": "80x48", "backend": "cpu"}
    options = [text for key, value in ask.items() for text in (f"--{key}", value)]
    ran = cli("x", "-m", "shapes", *options, f"--{option}", by_cli)
    assert ran.code == 5, ran.err
    with controlled.http as http:
        given = {"prompt": "x", "steps": 2, "size": "80x48", option: name}
        if option == "control":
            given |= {"control": f"{name}=1", "control_image": base64.b64encode(png(np.zeros((48, 80, 3)))).decode()}
        answer = http.post("/v1/images/generations", json=given)
    assert answer.status_code == 400 and answer.headers["x-should-retry"] == "false"
    message = answer.json()["error"]["message"]
    print(ran.err, message)
    assert message.startswith(name) and ran.err.strip().endswith(message.removeprefix(name)) and "/" not in message


@pytest.mark.sample(0)
def test_layers_are_pictures_of_their_own(controlled: RunningServer, folder: Path, tiny_layered: Path) -> None:
    """By each API those of the command line, with their alpha."""
    base = ("x", "-m", tiny_layered, "-i", "edges.png", "--backend", "cpu", "--steps", "1", "--size", "48x48")
    code, _, err = qwenimg(*base, "--layers", "2", "-s", "1-2", "-o", "layers-{seed}-{layer}.png", cwd=folder)
    assert code == 0, err
    expected = [pixels(folder / f"layers-{seed}-{layer}.png") for seed in (1, 2) for layer in (0, 1)]
    name, picture = "tiny-qwen-layered", base64.b64encode(png(EDGES)).decode()
    asked = {"prompt": "x", "model": name, "steps": 1, "layers": 2, "size": "48x48", "seed": "1-2"}
    with controlled.http as http:
        done = until_end(http, http.post("/api/jobs", json=asked | {"image": picture}).json()["id"])
        assert done["state"] == "done", done
        drawn = [http.get(f"/api/pictures/{one}").content for one in done["pictures"]]
        [model] = [row for row in http.get("/api/models").json()["models"] if "options" in row]
        assert model["id"] == name and "layers" in model["options"], "a page offers them"
    client = openai.OpenAI(base_url=f"{controlled.address}/v1", api_key="none", max_retries=0)
    edited = client.images.edit(image=png(EDGES), **{key: asked[key] for key in ("prompt", "model", "size")},
                                extra_body={key: asked[key] for key in ("steps", "layers", "seed")})  # fmt: skip
    drawn += [base64.b64decode(one.b64_json) for one in edited.data]
    assert len(drawn) == 8 and expected[0].shape == (48, 48, 4)
    for one, theirs in zip(drawn, expected * 2, strict=True):
        assert (np.asarray(Image.open(io.BytesIO(one))) == theirs).all()


@pytest.mark.slow
def test_a_worker_for_each_device(tmp_path: Path) -> None:
    """Two on the CPU draw at once; the end of one is not the other's."""
    with serving(tmp_path / "g", "--backend", "cpu") as server, server.http as http:
        while len(server.workers) < 2 or http.get("/metrics").text.count("qwenimg_worker_up{") < 2:
            pass
        server.says("ready:")
        jobs = [http.post("/api/jobs", json={"prompt": "x", "steps": LONG, "seed": i}).json()["id"] for i in (1, 2)]
        for job in jobs:
            until_step(http, job)
        states = {row["id"]: row["state"] for row in http.get("/api/jobs").json()["jobs"]}
        assert [states[job] for job in jobs] == ["drawing", "drawing"]
        first, second = server.workers
        os.kill(first, signal.SIGKILL)
        server.says("has ended")
        assert psutil.pid_exists(second)
        server.says("ready:")
        assert second in server.workers and len(server.workers) == 2
        for job in jobs:
            http.delete(f"/api/jobs/{job}")
        done = [http.post("/api/jobs", json={"prompt": "x", "seed": 1, **FEW}).json()["id"] for _ in range(3)]
        shown = [http.get(f"/api/pictures/{until_end(http, job)['pictures'][0]}").content for job in done]
        assert len(set(map(_decoded, shown))) == 1, "each worker draws the same picture"


def _decoded(data: bytes) -> bytes:
    return Image.open(io.BytesIO(data)).tobytes()


def png(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(array.astype(np.uint8)).save(out, "PNG")
    return out.getvalue()


@pytest.mark.sample(0)
def test_a_model_that_does_not_open_ends_it_with_its_error(tmp_path: Path) -> None:
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"x" * 100)
    server = RunningServer(tmp_path / "g", "-m", broken)
    try:
        assert server.end() == 5 and "broken.safetensors" in "".join(server.lines)
    finally:
        server.close()


@pytest.mark.sample(0)
def test_the_token_and_the_name_of_the_machine(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    with serving(tmp_path / "g", "--host", "0.0.0.0", "--token-file", token, "--host-name", "box.local") as server:
        port = server.address.rpartition(":")[2]
        server.address = f"http://127.0.0.1:{port}"
        with server.http as http:
            knows = {"authorization": "Bearer 0123456789abcdef"}
            assert http.get("/v1/models").status_code == 401
            assert http.get("/v1/models", headers=knows).status_code == 200
            assert http.get("/sdapi/v1/options", auth=("me", "0123456789abcdef")).status_code == 200
            assert http.get("/sdapi/v1/options", auth=("0123456789abcdef", "x")).status_code == 401
            assert http.get("/v1/models", headers=knows | {"host": "box.local"}).status_code == 200
            assert http.get("/v1/models", headers=knows | {"host": f"0.0.0.0:{port}"}).status_code == 403
            assert http.get("/v1/models", headers=knows | {"host": "evil.example"}).status_code == 403
            assert http.get("/health").status_code == 200
            page = http.get("/")
            assert page.status_code == 401 and page.headers["www-authenticate"].startswith("Basic "), "browsers ask"
            assert http.get("/", auth=("me", "0123456789abcdef")).text.startswith("<!doctype html>")
            keys = ("x", "0123456789abcdef")
            wrong, right = (openai.OpenAI(base_url=f"{server.address}/v1", api_key=key) for key in keys)
            with pytest.raises(openai.AuthenticationError):
                wrong.models.list()
            assert [model.id for model in right.models.list()] == ["shapes"]
            assert "www-authenticate" not in http.get("/v1/models").headers


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--host", "0.0.0.0"], "--token-file"), (["--host", "::"], "--token-file"),
        (["--host", "192.168.0.3"], "--token-file"), (["--host", "no.such.host.invalid"], "--token-file"),
        (["--token-file", "short"], "16 printable"), (["--token-file", "missing"], "missing"),
        (["--token-file", "."], "folder"), (["--port", "70000"], "--port"), (["--queue", "0"], "--queue"),
        (["--deadline", "0"], "--deadline"), (["--deadline", "nan"], "--deadline"), (["--deadline", "inf"], "finite"),
        (["--lora", "missing.safetensors"], "does not exist"),
        (["--control", "missing"], "no such file"), (["--control", "a=b"], "no such file"),
        (["-m", "shapes", "-m", "shapes"], "served as shapes"),
        (["--served-name", "shapes"], "served model already"),
        (["-m", "shapes", "-m", "shapes", "--vae", "x"], "one --model"), (["--precision", "fp33"], "fp33"),
        (["--backend", "metal"], "mlx"), (["a prompt"], "unexpected extra argument"),
    ],
)  # fmt: skip
@pytest.mark.sample(1)
def test_wrong_options(args: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short").write_text("secret")
    model = [] if "-m" in args else ["-m", "shapes"]
    cli("serve", *model, *args).refused(2, words)


@pytest.mark.parametrize("kind", ["pipe", "device", "socket", "dangling", "loop"])
@pytest.mark.parametrize("option", ["loras", "controls", "inside a control network"])
def test_what_is_no_file_is_not_offered(
    option: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before the server says that it is ready, and nothing waits for a pipe."""
    monkeypatch.chdir(tmp_path)
    Path("net").mkdir()
    inside = option.startswith("inside")
    place = Path("net/diffusion_pytorch_model.safetensors" if inside else "x.safetensors")
    {
        "pipe": lambda: os.mkfifo(place),
        "device": lambda: place.symlink_to("/dev/zero"),
        "socket": lambda: socket.socket(socket.AF_UNIX).bind(str(place)),
        "dangling": lambda: place.symlink_to("nothing"),
        "loop": lambda: place.symlink_to(place.name),
    }[kind]()
    named = {"controls" if inside else option: ("net" if inside else str(place),)}
    with pytest.raises(UsageError) as caught:
        search(Offer(names=("shapes",), options={}, **named))  # type: ignore[arg-type]
    print(caught.value)
    assert str(caught.value).startswith(f"--{option[:-1] if not inside else 'control'} ")
    assert str(place) in str(caught.value) and "ModelError" not in str(caught.value)


@pytest.mark.parametrize("option", ["loras", "controls"])
@pytest.mark.parametrize("kind", ["pickle", "text", "upscaler", "vae"])
def test_a_file_of_another_kind_is_not_offered(
    option: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server was ready with it, and each request that used it failed."""
    monkeypatch.chdir(tmp_path)
    place = Path("x.safetensors")
    {
        "pickle": lambda: torch.save({"a": torch.zeros(3)}, place),
        "text": lambda: place.write_text("no weights, but a text"),
        "upscaler": lambda: as_safetensors(place, srvgg()),
        "vae": lambda: shutil.copy(builtin.folder() / "vae/diffusion_pytorch_model.safetensors", place),
    }[kind]()
    named = {option: (str(place),)}
    with pytest.raises(UsageError) as caught:
        search(Offer(names=("shapes",), options={}, **named))  # type: ignore[arg-type]
    print(caught.value)
    assert str(caught.value).startswith(f"--{option[:-1]} x.safetensors: ") and len(str(caught.value)) <= 300


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        cli("serve", "-m", "shapes", "--port", port, "-o", str(tmp_path / "g")).refused(2, port, "give another --port")


@pytest.mark.sample(0)
def test_a_gallery_that_is_taken(tmp_path: Path) -> None:
    with serving(tmp_path / "g"):
        other = RunningServer(tmp_path / "g")
        try:
            assert other.end() == 2 and "another server" in "".join(other.lines)
        finally:
            other.close()


@pytest.mark.sample(0)
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from qwenimg.cli.commands import serve

    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == "uvicorn" else object())
    cli("serve", "-m", "shapes").refused(3, "uvicorn", ".[serve]")
