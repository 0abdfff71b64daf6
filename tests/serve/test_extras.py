"""Pictures made larger for clients: A1111's extra-single-image and extra-batch-images, with upscalers of the server's
folders by their names alone."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
import webuiapi
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.torch import save_file
from support import embedding_files, upscalers
from support.servers import RunningServer, serving, until_end
from support.upscalers import as_safetensors, as_torch

TENSORS = upscalers.rrdbnet(blocks=1, features=8, growth=4)
PICTURE = np.random.default_rng(0).integers(0, 256, (12, 10, 3), np.uint8)


@pytest.fixture(scope="module")
def extras(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    (folder / "upscale_models").mkdir()
    as_torch(folder / "upscale_models" / "RealESRGAN_x4plus.pth", TENSORS)
    (folder / "upscale_models" / "broken.pth").write_bytes(b"PK\3\4 nothing")
    huge = {name: values * np.float32(1e30) for name, values in upscalers.srvgg(convs=1, features=8, scale=2).items()}
    as_safetensors(folder / "upscale_models" / "huge.safetensors", huge)
    (folder / "embeddings").mkdir()
    embedding_files.a1111_pt(folder / "embeddings" / "bad-hands.pt", embedding_files.vectors(2, 768, 1))
    save_file(
        {"clip_l": torch.ones(3, 768), "clip_g": torch.ones(3, 1280)}, folder / "embeddings" / "style-xl.safetensors"
    )
    (folder / "embeddings" / "broken.bin").write_bytes(b"PK\3\4 nothing")
    with serving(tmp_path_factory.mktemp("gallery") / "g", "--models-dir", str(folder)) as running:
        yield running


@pytest.fixture
def http(extras: RunningServer) -> Iterator[httpx2.Client]:
    with extras.http as http:
        yield http


def sent(pixels: np.ndarray = PICTURE, **texts: str) -> str:
    file, info = io.BytesIO(), PngInfo()
    for name, text in texts.items():
        info.add_text(name, text)
    Image.fromarray(pixels).save(file, "PNG", pnginfo=info)
    return base64.b64encode(file.getvalue()).decode()


def seen(picture: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(picture)))


def test_a_picture_is_made_larger(http: httpx2.Client) -> None:
    wanted = (upscalers.formula(TENSORS, PICTURE)[0].clip(0, 1) * 255).round().transpose(1, 2, 0)
    body = {"image": sent(parameters="a cat\nSteps: 1"), "upscaling_resize": 4, "upscaler_1": "R-ESRGAN 4x+"}
    answer = http.post("/sdapi/v1/extra-single-image", json=body)
    assert answer.status_code == 200, answer.text
    made = seen(answer.json()["image"])
    apart = np.abs(np.asarray(made).astype(int) - wanted).max()
    print(f"{apart:.0f} of 255 from the formula")
    assert apart <= 1 and made.text["parameters"] == "a cat\nSteps: 1"
    assert made.text["postprocessing"] == 'Postprocess upscale by: 4, Postprocess upscaler: "RealESRGAN_x4plus"'
    for name, filter_ in (("Lanczos", Image.Resampling.LANCZOS), ("Nearest", Image.Resampling.NEAREST)):
        answer = http.post("/sdapi/v1/extra-single-image", json=body | {"upscaler_1": name, "upscaling_resize": 1.5})
        expected = Image.fromarray(PICTURE).resize((15, 18), filter_)
        assert np.array_equal(np.asarray(seen(answer.json()["image"])), np.asarray(expected))
    plain = http.post("/sdapi/v1/extra-single-image", json={"image": body["image"]})
    assert plain.json()["image"] == body["image"], "without an upscaler it is as it was, as there"


def test_to_a_size_and_several_with_the_client(extras: RunningServer, http: httpx2.Client) -> None:
    about = {"upscaler_1": "RealESRGAN_x4plus", "resize_mode": 1, "upscaling_resize_w": 30, "upscaling_resize_h": 30}
    for crops, size in ((True, (30, 30)), (False, (30, 36))):
        body = {"image": sent(), "upscaling_crop": crops, **about}
        assert seen(http.post("/sdapi/v1/extra-single-image", json=body).json()["image"]).size == size
    api = webuiapi.WebUIApi(baseurl=f"{extras.address}/sdapi/v1")
    assert "RealESRGAN_x4plus" in [one["name"] for one in api.get_upscalers()]
    pictures = [Image.fromarray(PICTURE), Image.fromarray(PICTURE[:8])]
    made = api.extra_batch_images(pictures, upscaler_1="RealESRGAN_x4plus", upscaling_resize=2)
    assert [one.size for one in made.images] == [(20, 24), (20, 16)]


def test_a_second_pass_with_an_upscaler_by_its_name(http: httpx2.Client) -> None:
    few: dict[str, Any] = {"prompt": "a red circle", "steps": 2, "width": 64, "height": 48, "seed": 1}
    answer = http.post(
        "/sdapi/v1/txt2img", json=few | {"enable_hr": True, "hr_upscaler": "RealESRGAN_x4plus", "hr_scale": 1.5}
    )
    assert answer.status_code == 200, answer.text
    assert "Hires upscaler: RealESRGAN_x4plus" in json.loads(answer.json()["info"])["infotexts"][0]
    assert seen(answer.json()["images"][0]).size == (96, 72)
    job = http.post("/api/jobs", json=few | {"hires": 1.5, "hires_with": "RealESRGAN_x4plus"}).json()
    shown = http.get(f"/api/jobs/{job['id']}").json()
    assert shown["request"]["hires_with"] == "RealESRGAN_x4plus", "no path is shown"
    assert http.get("/api/models").json()["upscalers"] == ["broken", "huge", "RealESRGAN_x4plus"]


REFUSED: list[dict[str, Any]] = [
    {"image": "http://127.0.0.1/x.png"}, {"image": 3}, {"image": base64.b64encode(b"no picture").decode()},
    {"upscaler_1": "SwinIR_4x"}, {"upscaler_1": "/etc/passwd"}, {"upscaler_1": "../RealESRGAN_x4plus"},
    {"upscaler_1": "Latent"}, {"upscaler_1": 3}, {"upscaler_1": "broken"}, {"upscaling_resize": 0},
    {"upscaling_resize": 9}, {"upscaling_resize": "two"}, {"resize_mode": 2}, {"resize_mode": True},
    {"resize_mode": 1, "upscaling_resize_w": 0}, {"resize_mode": 1, "upscaling_resize_h": 10**9},
    {"resize_mode": 1, "upscaling_resize_w": 16384, "upscaling_resize_h": 16384}, {"upscaling_crop": "yes"},
    {"gfpgan_visibility": 0.5}, {"codeformer_visibility": 1}, {"extras_upscaler_2_visibility": 0.5},
]  # fmt: skip


@pytest.mark.parametrize("given", REFUSED, ids=lambda given: "-".join(map(str, given.items()))[:50])
@pytest.mark.sample(10)
def test_what_is_refused_is_one_line(http: httpx2.Client, given: dict[str, Any]) -> None:
    body = {"image": sent(), "upscaler_1": "RealESRGAN_x4plus"} | given
    answer = http.post("/sdapi/v1/extra-single-image", json=body)
    assert 400 <= answer.status_code < 500, answer.text
    told = answer.json()["detail"]
    assert len(told) <= 300 and told.isprintable() and "upscale_models" not in told, told


def test_lists_are_bounded(http: httpx2.Client, tmp_path: Path) -> None:
    for listed in ([], "x", [1], [{"data": 1}], [{"data": sent()}] * 17):
        answer = http.post("/sdapi/v1/extra-batch-images", json={"imageList": listed, "upscaler_1": "Lanczos"})
        assert answer.status_code == 400 and "imageList" in answer.json()["detail"], answer.text


def test_embeddings_are_listed_by_their_names(http: httpx2.Client) -> None:
    """As the web UI does; a client names them, and never a file."""
    listed = http.get("/sdapi/v1/embeddings").json()
    assert {name: (one["shape"], one["vectors"]) for name, one in listed["loaded"].items()} == {
        "bad-hands": (768, 2), "style-xl": (2048, 3),
    }  # fmt: skip
    assert [*listed["skipped"]] == ["broken"]
    assert sorted(http.get("/api/models").json()["embeddings"]) == ["bad-hands", "broken", "style-xl"]
    for value in ("/etc/passwd", "x=/etc/passwd", "nothing"):
        answer = http.post("/api/jobs", json={"prompt": "a circle", "embedding": value})
        assert answer.status_code == 400 and "no embedding" in answer.text and "style-xl" in answer.text
    answer = http.post("/sdapi/v1/txt2img", json={"prompt": "a embedding:bad-hands", "steps": 1})
    assert answer.status_code == 400 and "are for Stable Diffusion" in answer.text, answer.text


# Pictures that are drawn and made larger

DRAWN = {"prompt": "a red circle", "size": "64x32", "steps": 1, "seed": 1}


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)


def drawn(http: httpx2.Client, **more: Any) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """A job of the server's own API that is done; the recipe of its picture, and the file."""
    answer = http.post("/api/jobs", json=DRAWN | more)
    assert answer.status_code == 202, answer.text
    job = until_end(http, answer.json()["id"])
    assert job["state"] == "done", job
    [name] = job["pictures"]
    return job, http.get(f"/api/pictures/{name}/recipe").json(), http.get(f"/api/pictures/{name}").content


def test_a_drawn_picture_is_made_larger(http: httpx2.Client) -> None:
    small = pixels(drawn(http)[2])
    wanted = (upscalers.formula(TENSORS, small)[0].clip(0, 1) * 255).round().transpose(1, 2, 0)
    job, recipe, data = drawn(http, upscale=4, upscale_with="RealESRGAN_x4plus")
    apart = np.abs(pixels(data) - wanted).max()
    print(f"{small.shape} to {pixels(data).shape}, {apart:.0f} of 255 from the formula")
    assert apart <= 1 and pixels(data).shape == (128, 256, 3)
    assert job["request"]["upscale_with"] == "RealESRGAN_x4plus", "no path is shown"
    assert (recipe["upscale"], recipe["upscale_with"], recipe["width"]) == (4, "RealESRGAN_x4plus", 64)
    texts = Image.open(io.BytesIO(data)).text
    assert json.loads(texts["qwenimg"])["width"] == 64 and json.loads(texts["qwenimg-upscaling"])["by"] == 4
    half = pixels(drawn(http, upscale="2", upscale_with="RealESRGAN_x4plus")[2])
    assert half.shape == (64, 128, 3), "a number may be a text"
    assert pixels(drawn(http, upscale_with="RealESRGAN_x4plus")[2]).shape == (128, 256, 3), "the file's own scale"
    body = DRAWN | {"upscale": 2, "upscale_with": "RealESRGAN_x4plus", "n": 1}
    answer = http.post("/v1/images/generations", json=body).json()
    assert np.array_equal(pixels(base64.b64decode(answer["data"][0]["b64_json"])), half)
    assert answer["size"] == "128x64"


def test_a_drawn_picture_that_cannot_be_made_larger_is_kept(http: httpx2.Client) -> None:
    small = pixels(drawn(http)[2])
    _, recipe, data = drawn(http, upscale=2, upscale_with="huge")
    assert np.array_equal(pixels(data), small) and "upscale" not in recipe
    assert [line for line in recipe["warnings"] if "not made larger" in line and "non-finite" in line], recipe
    assert json.loads(Image.open(io.BytesIO(data)).text["qwenimg"])["warnings"] == recipe["warnings"]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"upscale": 2}, "upscale_with"),  # three are here
        *(({"upscale": value, "upscale_with": "huge"}, "upscale") for value in (
            0, -2, 17, 2.5, 1e300, "x", "nan", "", True, [2], {"by": 2}, "2e0", "9" * 30,
        )),
        *(({"upscale": 2, "upscale_with": value}, "upscale_with") for value in (
            "", "none", "huge.safetensors", "../upscale_models/huge", "/etc/passwd", "~/x", "\0", "a" * 3_000, 2,
            ["huge"], {"file": "huge"}, False, "lanczos", "HUGE",
        )),
    ],
)  # fmt: skip
@pytest.mark.sample(10)
def test_a_wrong_upscaling_names_its_field(http: httpx2.Client, more: dict[str, Any], param: str) -> None:
    for address in ("/api/jobs", "/v1/images/generations"):
        answer = http.post(address, json=DRAWN | more)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == param, answer.text
        assert len(error["message"]) <= 300 and error["message"].isprintable()


def test_values_that_are_no_json_are_refused(http: httpx2.Client) -> None:
    for value in ("NaN", "Infinity", "1e999", '"\\ud800"'):
        content = json.dumps(DRAWN)[:-1] + f', "upscale_with": "huge", "upscale": {value}}}'
        answer = http.post("/api/jobs", content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text


def test_what_only_the_worker_knows_is_refused(extras: RunningServer, http: httpx2.Client) -> None:
    for more, words in (
        ({"upscale_with": "broken"}, "broken"),
        ({"upscale": 16, "upscale_with": "huge", "size": "2048x64"}, "at most 16384 pixels a side"),
    ):
        answer = http.post("/v1/images/generations", json=DRAWN | more)
        error = answer.json()["error"]
        assert answer.status_code == 400 and words in error["message"] and "/" not in error["message"], answer.text
