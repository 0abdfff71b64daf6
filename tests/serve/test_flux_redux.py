"""Requests to a server whose pictures are text of Flux.1, by Redux."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.processes import pixels, qwenimg
from support.servers import RunningServer, serving, until_end
from support.tiny_redux import write_redux

PICTURES = np.random.default_rng(2).integers(0, 256, (2, 40, 60, 3), np.uint8)
SIZE = {"size": "64x48", "steps": 2, "seed": 3}
NET = "FLUX.1-Redux-dev"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the pipeline, as the known name has it too, and two pictures."""
    folder = tmp_path_factory.mktemp("redux")
    write_redux(folder / NET)
    for i, picture in enumerate(PICTURES, 1):
        Image.fromarray(picture).save(folder / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, tiny_flux: dict[str, Path]) -> Iterator[RunningServer]:
    options = ("-m", tiny_flux["dev"], "--control", folder / NET)
    with serving(folder / "gallery", *options, cwd=folder) as server:
        yield server


@pytest.mark.sample(0)
def test_it_draws_the_command_lines_image(server: RunningServer, folder: Path, tiny_flux: dict[str, Path]) -> None:
    """With a prompt and without, one picture and two, as --control and as --ip-adapter; and by A1111's API."""
    files = [base64.b64encode((folder / f"{i}.png").read_bytes()).decode() for i in (1, 2)]
    base = ("-m", tiny_flux["dev"], "--backend", "cpu", *(f"--{name}={value}" for name, value in SIZE.items()))
    one, two = ("--ip-image", "1.png"), ("--ip-image", "2.png")
    cases: list[tuple[tuple[str, ...], dict[str, Any]]] = [
        (("--ip-adapter", f"{NET}:0.7", *one), {"control": f"{NET}=1:0.7", "control_image": files[:1]}),
        (
            ("a circle", "--ip-adapter", f"{NET}:tokens=0.5,pooled=0.5", *one, *two),
            {
                "prompt": "a circle", "control": f"{NET}=1:tokens=0.5,pooled=0.5; {NET}=also@2:1",
                "control_image": files,
            },
        ),
    ]  # fmt: skip
    with server.http as http:
        assert http.get("/api/models").json()["adapters"] == [NET]
        name = tiny_flux["dev"].name
        for i, (words, asked) in enumerate(cases):
            code, _, err = qwenimg(*words, *base, "-o", f"{i}-cli.png", cwd=folder)
            assert code == 0, err
            done = until_end(http, http.post("/api/jobs", json=asked | SIZE | {"model": name}).json()["id"])
            assert done["state"] == "done", done
            drawn = http.get(f"/api/pictures/{done['pictures'][0]}").content
            assert (np.asarray(Image.open(io.BytesIO(drawn))) == pixels(folder / f"{i}-cli.png")).all()
        unit = {"module": "ip-adapter-auto", "model": NET, "weight": 0.6, "image": files[0]}
        sent = {
            "prompt": "a circle", "override_settings": {"sd_model_checkpoint": name}, "steps": 1, "width": 64,
            "height": 48, "alwayson_scripts": {"controlnet": {"args": [unit]}},
        }  # fmt: skip
        answer = http.post("/sdapi/v1/txt2img", json=sent)
        assert answer.status_code == 200 and len(answer.json()["images"]) == 1, answer.text


@pytest.mark.sample(0)
def test_what_is_refused_is_named(server: RunningServer, folder: Path, tiny_flux: dict[str, Path]) -> None:
    files = [base64.b64encode((folder / f"{i}.png").read_bytes()).decode() for i in (1, 2)]
    refused: list[tuple[dict[str, Any], str]] = [
        ({}, "a prompt is missing"),
        ({"prompt": " "}, "a prompt is missing"),
        ({"control": f"{NET}=1", "control_image": []}, "control"),
        ({"control": "other=1", "control_image": files[:1]}, "no control network"),
        ({"control": f"{NET}=1:0.7:0-0.5", "control_image": files[:1]}, "leave out START-END and masks"),
        ({"control": f"{NET}=1; {NET}=mask@2", "control_image": files}, "leave out START-END and masks"),
        ({"control": f"{NET}=1:style=0.5", "control_image": files[:1]}, "its parts are tokens and pooled"),
        ({"prompt": "x", "ip_adapter": NET}, "give its picture"),
        ({"control": f"{NET}=1", "control_image": files[:1], "model": "shapes"}, "is an IP-Adapter for Flux.1"),
    ]
    with server.http as http:
        for changed, words in refused:
            answer = http.post("/api/jobs", json=SIZE | {"model": tiny_flux["dev"].name} | changed)
            if answer.status_code == 400:
                text = answer.json()["error"]["message"]
            else:
                failed = until_end(http, answer.json()["id"])
                assert failed["state"] == "failed", changed
                text = failed["error"]
            print(changed.get("control", ""), text)
            assert words in text and str(folder) not in text and len(text) <= 300 and text.isprintable()
