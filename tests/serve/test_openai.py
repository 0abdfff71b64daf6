"""OpenAI's API of images, with the official client."""

from __future__ import annotations

import base64
import io
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import psutil
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from support.processes import pixels, qwenimg
from support.servers import LONG, RunningServer, serving, until_end, until_step

FEW = {"steps": 2}
PARTIAL_ERROR = (
    60.0  # of 255, of a preview in the middle of the steps, by a map that has seen few pictures; grey has 90
)


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as client:
        yield client


def picture(data: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")).astype(int)


def png(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(array.astype(np.uint8)).save(out, "PNG")
    return out.getvalue()


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["shapes", "dall-e-2"]
    assert client.models.retrieve("shapes").owned_by == "qwenimg"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nope")


@pytest.mark.sample(0)
def test_pictures_are_those_of_the_command_line(client: openai.OpenAI, tmp_path: Path) -> None:
    answer = client.images.generate(prompt="a red circle", n=2, extra_body={"seed": 7, **FEW})
    code, _, err = qwenimg(
        "a red circle", "-s", "7-8", "--steps", "2", "--backend", "cpu", "-o", "{seed}.png", cwd=tmp_path
    )
    assert code == 0, err
    assert answer.data is not None
    assert [one.model_extra["seed"] for one in answer.data] == [7, 8]
    assert [one.model_extra["steps"] for one in answer.data] == [2, 2]
    for one in answer.data:
        assert (picture(one.b64_json) == pixels(tmp_path / f"{one.model_extra['seed']}.png")).all()


def test_fields_that_are_none_or_have_no_meaning_here(client: openai.OpenAI) -> None:
    answer = client.images.generate(
        prompt="a red circle", n=None, size=None, model="dall-e-2", quality="high", style="vivid", user="me",
        background="auto", moderation="low", response_format="b64_json", extra_body=FEW,
    )  # fmt: skip
    assert answer.created > 0 and len(answer.data) == 1
    answer = client.images.generate(prompt="a red circle", size="auto", extra_body=FEW)
    assert picture(answer.data[0].b64_json).shape == (256, 256, 3)


@pytest.mark.parametrize(("name", "kind"), [("png", "PNG"), ("jpeg", "JPEG"), ("webp", "WEBP")])
def test_formats_and_sizes(client: openai.OpenAI, name: Any, kind: str) -> None:
    answer = client.images.generate(prompt="a red circle", size="128x64", output_format=name, extra_body=FEW)
    image = Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json)))
    assert (image.format, image.size, answer.output_format, answer.size) == (kind, (128, 64), name, "128x64")


def test_a_stream_has_steps_as_comments_and_one_event_for_each_picture(client: openai.OpenAI) -> None:
    body = {"seed": 7, **FEW}
    stream = client.images.generate(prompt="a red circle", n=2, stream=True, extra_body=body)
    news = list(stream)
    assert [one.type for one in news] == ["image_generation.completed"] * 2
    whole = client.images.generate(prompt="a red circle", n=2, extra_body=body)
    assert all((picture(a.b64_json) == picture(b.b64_json)).all() for a, b in zip(news, whole.data, strict=True))
    address = client.base_url.copy_with(path="/v1/images/generations")
    json = {"prompt": "a red circle", "stream": True, **body}
    with httpx2.stream("POST", address, json=json, timeout=None) as response:
        assert ": step 1/2" in list(response.iter_lines())


def test_partial_pictures(client: openai.OpenAI) -> None:
    """Pictures of the size and in the format that were asked for, of each picture before it is completed; one side is
    no multiple of a latent's."""
    for count, name in ((1, "png"), (2, "webp")):
        asked: Any = {"n": 2, "partial_images": count, "output_format": name, "size": "56x61"}
        body = {"seed": 7, "steps": 24}
        news = list(client.images.generate(prompt="a red circle", stream=True, extra_body=body, **asked))
        expected = [*["image_generation.partial_image"] * count, "image_generation.completed"] * 2
        assert [one.type for one in news] == expected
        partial = [one for one in news if one.type == "image_generation.partial_image"]
        assert [one.partial_image_index for one in partial] == [*range(count)] * 2
        seen = [Image.open(io.BytesIO(base64.b64decode(one.b64_json))) for one in partial]
        assert {(image.format, image.size) for image in seen} == {(name.upper(), (56, 61))}
        assert {one.size for one in news} == {"56x61"}
        done = picture(news[-1].b64_json)
        assert done.shape == (61, 56, 3)
        error = float(np.sqrt(np.mean((np.asarray(seen[-1].convert("RGB")) - done) ** 2)))
        print(f"the last of {count} partial pictures: {error:.0f} of 255 from the whole (RMS)")
        assert error < PARTIAL_ERROR
    nothing = client.images.generate(prompt="x", stream=True, partial_images=0, extra_body=FEW)
    assert [one.type for one in nothing] == ["image_generation.completed"]


def test_a_stream_is_true_or_false(server: RunningServer) -> None:
    for stream in ("x", 3, [], {}):
        answer = server.http.post("/v1/images/generations", json={"prompt": "a red circle", "stream": stream})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "stream", answer.text


def test_an_error_after_the_stream_began(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIError) as caught:
        list(client.images.generate(prompt="x", stream=True, extra_body={"deadline": 1e-9, "steps": LONG}))
    assert caught.value.code == "deadline" and caught.value.type == "server_error"


GREY = np.full((64, 64, 3), 128)
HOLE = np.dstack([np.zeros((64, 64, 3)), np.full((64, 64, 1), 255)])
HOLE[:, 32:, 3] = 0  # the right half is drawn anew


def test_edits_start_from_a_picture(client: openai.OpenAI) -> None:
    body = {"seed": 3, "strength": 1.0, **FEW}
    alone = client.images.edit(image=png(GREY), prompt="a red circle", extra_body=body)
    listed = client.images.edit(image=[png(GREY)], prompt="a red circle", extra_body=body)
    assert (picture(alone.data[0].b64_json) == picture(listed.data[0].b64_json)).all()
    assert picture(alone.data[0].b64_json).shape == (64, 64, 3)
    masked = client.images.edit(image=png(GREY), mask=png(HOLE), prompt="a red circle", extra_body=body)
    there = picture(masked.data[0].b64_json)
    kept, drawn = (np.abs(there[:, part] - 128).mean() for part in (slice(0, 24), slice(40, 64)))
    print(f"mean difference from grey: kept {kept:.1f}, drawn anew {drawn:.1f}")
    assert kept < 12 < 30 < drawn, "alpha 0 is drawn anew, and alpha 255 is kept"
    part = {"only_masked": 4, **body}
    there = picture(client.images.edit(image=png(GREY), mask=png(HOLE), prompt="x", extra_body=part).data[0].b64_json)
    outside = HOLE[..., 3] == 255
    assert (there[outside] == 128).all() and (there[~outside] != 128).any()
    with pytest.raises(openai.BadRequestError, match="only_masked draws what a mask covers") as caught:
        client.images.edit(image=png(GREY), prompt="x", extra_body=part)
    assert caught.value.param == "only_masked"


def test_several_images_go_to_models_that_see_several(server: RunningServer, client: openai.OpenAI) -> None:
    """The built-in model starts from one, and says so by every API; the order of images is kept."""
    two = [png(GREY), png(GREY // 2)]
    with pytest.raises(openai.BadRequestError, match="2 pictures are given, shapes-v1 takes one"):
        client.images.edit(image=two, prompt="x", extra_body=FEW)
    with pytest.raises(openai.BadRequestError, match="17 images") as caught:
        client.images.edit(image=[png(GREY)] * 17, prompt="x", extra_body=FEW)
    assert caught.value.param == "image"
    with server.http as http:
        images = [base64.b64encode(one).decode() for one in two]
        answer = http.post("/sdapi/v1/img2img", json={"prompt": "x", "init_images": images, "steps": 2})
        assert answer.status_code == 400 and "takes one" in answer.json()["detail"]
        done = until_end(http, http.post("/api/jobs", json={"prompt": "x", "image": images, **FEW}).json()["id"])
        assert done["state"] == "failed" and "takes one" in done["error"]
        answer = http.post("/api/jobs", json={"prompt": "x", "image": images * 9, **FEW})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "image"
        answer = http.post("/api/jobs", json={"prompt": "x", "mask": images[0], **FEW})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "mask"


def test_requests_of_open_webui(server: RunningServer) -> None:
    """Its engine for OpenAI's API, as its source sends them: JSON with all fields, and a form with a file."""
    headers = {"Authorization": "Bearer none", "X-OpenWebUI-User-Name": "me"}
    asked = {"model": "dall-e-2", "prompt": "a red circle", "n": 1, "size": "64x64", "response_format": "b64_json"}
    with server.http as http:
        answer = http.post("/v1/images/generations", json=asked, headers=headers)
        assert answer.status_code == 200 and picture(answer.json()["data"][0]["b64_json"]).shape == (64, 64, 3)
        for name in ("image", "image[]"):
            files = [(name, ("image.png", png(GREY), "image/png"))]
            texts = {key: str(value) for key, value in asked.items()}
            answer = http.post("/v1/images/edits", data=texts, files=files, headers=headers)
            assert answer.status_code == 200 and picture(answer.json()["data"][0]["b64_json"]).shape == (64, 64, 3)


@pytest.mark.parametrize(
    ("asked", "param", "code"),
    [
        ({"extra_body": {"stepz": 3}}, "stepz", "unknown_parameter"),
        ({"extra_body": {"steps": 3, "num_inference_steps": 4}}, "num_inference_steps", None),
        ({"background": "transparent"}, "background", None), ({"output_format": "gif"}, "output_format", None),
        ({"response_format": "url"}, "response_format", None), ({"n": 11}, "n", None),
        ({"n": 0}, "n", None), ({"n": "x"}, "n", None),
        ({"size": "100000x1"}, "size", None), ({"extra_body": {"deadline": "soon"}}, "deadline", None),
        ({"extra_body": {"lora": "/etc/passwd"}}, "lora", None),
        ({"extra_body": {"output_format": []}}, "output_format", None),
        ({"extra_body": {"deadline": "nan"}}, "deadline", None),
        ({"extra_body": {"deadline": "inf"}}, "deadline", None),
        ({"extra_body": {"cached_calls": "1-9999," * 20_000}}, "cached_calls", None),
    ],
)  # fmt: skip
def test_a_bad_request_names_its_field(client: openai.OpenAI, asked: Any, param: str, code: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.generate(prompt="x", **asked)
    assert (caught.value.param, caught.value.code) == (param, code)


@pytest.mark.parametrize(("field", "name"), [
    ("stepz", "steps"), ("promt", "prompt"), ("negative_promp", "negative_prompt"), ("denoise", "strength"),
    ("guidence_scale", "guidance_scale"), ("output_fromat", "output_format"), ("Seed", "seed"), ("nonsense", ""),
])  # fmt: skip
def test_a_misspelled_field_is_told_the_right_one(server: RunningServer, field: str, name: str) -> None:
    """In this API and in that of jobs, each in its form of an error."""
    with server.http as http:
        fault = http.post("/v1/images/generations", json={"prompt": "x", field: 4}).json()["error"]
        job = http.post("/api/jobs", json={"prompt": "x", field: 4}).json()["error"]
    told = f"unknown field {field!r}" + (f"; did you mean {name}?" if name else "")
    assert (fault["message"], fault["param"], fault["code"]) == (told, field, "unknown_parameter")
    assert job["message"].startswith(f"unknown field {field!r}") and (told == job["message"]) == (name[:6] != "output")


def test_faults_that_only_the_model_knows(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.edit(image=b"no picture", prompt="x")
    assert "image: is no PNG" in caught.value.message and "/" not in caught.value.message.replace("None", "")
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.edit(image=png(GREY), mask=png(GREY), prompt="x")
    assert "transparency" in caught.value.message
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.generate(prompt="x", size="16384x16384")
    assert "choose another size" in caught.value.message
    with pytest.raises(openai.NotFoundError) as missing:
        client.images.generate(prompt="x", model="gpt-image-1")
    assert missing.value.code == "model_not_found" and missing.value.param == "model"


@pytest.mark.parametrize(
    ("files", "param"),
    [
        ([], "image"), ([("image[]", b"")] * 17, "image"), ([("image", b""), ("image", b"")], None),
        ([("image", b""), ("mask", b""), ("mask", b"")], "mask"), ([("image", b""), ("other", b"")], "other"),
    ],
)  # fmt: skip
def test_forms_with_other_files(server: RunningServer, files: Any, param: str | None) -> None:
    """Without a prompt pictures are opened first, since some models describe them; these are none."""
    parts = [(name, (name, data)) for name, data in files] or [("prompt", (None, b"x"))]
    answer = server.http.post("/v1/images/edits", files=parts)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        ("application/json", b"{", 400), ("application/json", b"[]", 400), ("application/json", b"\xff", 400),
        ("application/json", b'{"prompt":"x","prompt":"y"}', 400), ("application/json", b'{"steps":NaN}', 400),
        ("application/json", b"[" * 10_000, 400), ("application/json", b'{"a":' * 900 + b"1" + b"}" * 900, 400),
        ("application/json", b'{"prompt":"\\ud800"}', 400), ("application/json", b'{"zzz":["\\udfff"]}', 400),
        ("application/json", b'{"prompt":' + b"9" * 9000 + b"}", 400), ("application/json", b"", 400),
        ("text/plain", b'{"prompt":"x"}', 415), ("application/x-www-form-urlencoded", b"prompt=x", 415),
        ("multipart/form-data; boundary=x", b"--x\r\n", 415),
    ],
)  # fmt: skip
@pytest.mark.sample(3)
def test_hostile_json(server: RunningServer, kind: str, body: bytes, status: int) -> None:
    for path in ("/v1/images/generations", "/sdapi/v1/txt2img", "/api/jobs"):
        answer = server.http.post(path, content=body, headers={"content-type": kind})
        assert answer.status_code == status, answer.text
        assert "Traceback" not in answer.text and "/work" not in answer.text and len(answer.text) < 800


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("multipart/form-data", b"x"), ("multipart/form-data; boundary=", b"x"),
        ("multipart/form-data; boundary=x", b"garbage"),
        ("multipart/form-data; boundary=x; charset=unicode_escape",
         b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\n\\ud800\r\n--x\r\n'
         b'Content-Disposition: form-data; name="image"; filename="x"\r\n\r\nP\r\n--x--\r\n'),
        ("multipart/form-data; boundary=x", b"--x\r\nContent-Disposition: form-data\r\n\r\n1\r\n--x--\r\n"),
        ("multipart/form-data; boundary=x",
         b"".join(b'--x\r\nContent-Disposition: form-data; name="f%d"\r\n\r\n1\r\n' % i for i in range(500))
         + b"--x--\r\n"),
        ("multipart/form-data; boundary=x",
         b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\n' + b"x" * (2 << 20) + b"\r\n--x--\r\n"),
        ("multipart/form-data; boundary=x",
         b"".join(b'--x\r\nContent-Disposition: form-data; name="image"; filename="../../x%d"\r\n\r\n1\r\n' % i
                  for i in range(21)) + b"--x--\r\n"),
    ],
)  # fmt: skip
def test_hostile_forms(server: RunningServer, kind: str, body: bytes) -> None:
    answer = server.http.post("/v1/images/edits", content=body, headers={"content-type": kind})
    assert answer.status_code == 400, answer.text
    assert "Traceback" not in answer.text and len(answer.text) < 500


def test_a_body_that_is_too_large_is_answered(client: openai.OpenAI) -> None:
    """Also for a client that listens only once it has sent all."""
    with pytest.raises(openai.APIStatusError) as caught:
        client.images.generate(prompt="x" * (33 << 20))
    assert (caught.value.status_code, caught.value.code) == (413, "too_large")


def test_numbers_may_be_texts(server: RunningServer) -> None:
    """In every API, as a seed may be."""
    few = {"prompt": "x", "steps": "1", "seed": "7", "width": "64", "height": "64", "cfg_scale": "1"}
    asked = {
        "/v1/images/generations": {**few, "n": "2", "deadline": "60"},
        "/sdapi/v1/txt2img": {**few, "batch_size": "2", "n_iter": "1",
                              "override_settings": {"CLIP_stop_at_last_layers": "1"}},
    }  # fmt: skip
    with server.http as http:
        for path, data in asked.items():
            answer = http.post(path, json=data)
            assert answer.status_code == 200, answer.text
            assert len(answer.json().get("data") or answer.json()["images"]) == 2
        job = http.post("/api/jobs", json=few | {"num_images": "2"}).json()
        assert (job["request"]["steps"], job["request"]["seeds"]) == (1, [7, 8])
        http.delete(f"/api/jobs/{job['id']}")


def test_a_recipe_with_half_of_a_surrogate_pair_is_sent(server: RunningServer) -> None:
    """A recipe may have one, in the name of a file; the answer has it too, and is ASCII."""
    file = io.BytesIO()
    about = PngInfo()
    about.add_text("parameters", "x\nSteps: 3, Seed: 5")
    about.add_text("prompt", '{"1": {"class_type": "CLIPTextEncode", "inputs": {"text": "\\ud800"}}}')
    Image.new("RGB", (8, 8)).save(file, "PNG", pnginfo=about)
    with server.http as http:
        data = {"image": base64.b64encode(file.getvalue()).decode()}
        for path in ("/api/recipe", "/sdapi/v1/png-info"):
            answer = http.post(path, json=data)
            assert answer.status_code in (200, 400) and answer.text.isascii(), answer.text


def test_a_large_request_stops_nobody(server: RunningServer) -> None:
    """Of 31 MB: it is parsed apart, and no text of it is read that is too long. Others are answered meanwhile."""
    with server.http as http, ThreadPoolExecutor(1) as pool:
        body = b'{"prompt": "x", "cached_calls": "' + b"1-9999," * (31 << 17) + b'1"}'
        kind = {"content-type": "application/json"}
        large = pool.submit(server.http.post, "/v1/images/generations", content=body, headers=kind)
        answered = 0
        while not large.done():
            assert http.get("/health").status_code == 200
            answered += 1
        print(f"{len(body):,} bytes; {answered} answers to others meanwhile")
        assert large.result().status_code == 400 and large.result().json()["error"]["param"] == "cached_calls"
        assert answered > 1


def test_a_client_that_goes_frees_the_worker(server: RunningServer, client: openai.OpenAI) -> None:
    """Its own time-out of half a second with two retries: no order is left, whether it was drawn or waited."""
    impatient, before = client.with_options(timeout=0.5, max_retries=2), outcomes(server)
    with pytest.raises(openai.APITimeoutError):
        impatient.images.generate(prompt="a red circle", extra_body={"steps": LONG})
    job = server.http.post("/api/jobs", json={"prompt": "a red circle", **FEW}).json()
    assert until_end(server.http, job["id"])["state"] == "done"
    assert "qwenimg_waiting 0.0" in server.http.get("/metrics").text
    ended = outcomes(server) - before
    print(f"{ended['cancelled']} of three tries had arrived, and were cancelled")
    assert ended.keys() == {"cancelled", "done"} and ended["cancelled"] <= 3 and ended["done"] == 1


def outcomes(server: RunningServer) -> Counter[str]:
    """Return how many requests have ended so far, by their outcome."""
    figures = re.findall(r'qwenimg_requests_total{outcome="(\w+)"} (\d+)', server.http.get("/metrics").text)
    return Counter({name: int(count) for name, count in figures})


def test_many_clients_are_served_or_told_when_to_come_again(server: RunningServer, client: openai.OpenAI) -> None:
    """Twenty at once at a queue of four: each gets its own picture, or 429."""

    def ask(seed: int) -> int | str:
        try:
            answer = client.images.generate(prompt="a red circle", extra_body={"seed": seed, **FEW})
        except openai.RateLimitError as error:
            assert error.code == "queue_full" and 1 <= int(error.response.headers["retry-after"]) <= 120
            return "full"
        seeds = [one.model_extra["seed"] for one in answer.data]
        assert seeds == [seed]
        return base64.b64decode(answer.data[0].b64_json)[:4] == b"\x89PNG"

    with ThreadPoolExecutor(20) as pool:
        results = list(pool.map(ask, range(20)))
    print(f"{results.count(True)} served, {results.count('full')} told to come again")
    assert results.count(True) >= 5 and set(results) <= {True, "full"}


@pytest.mark.sample(0)
def test_the_front_stays_small_and_imports_no_framework(tmp_path: Path) -> None:
    """A server of its own: others have read bodies of 32 MB, whose memory the allocator keeps."""
    with serving(tmp_path / "g") as server:
        used(server)


def used(server: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
    client.images.generate(prompt="a red circle", extra_body=FEW)
    with server.http as http:  # and all that the page asks for
        done = until_end(http, http.post("/api/jobs", json={"prompt": "a red circle", **FEW}).json()["id"])
        kept = f"/api/pictures/{done['pictures'][0]}"
        file = base64.b64encode(http.get(kept).content).decode()
        assert http.post("/api/recipe", json={"image": file}).json() == http.get(f"{kept}/options").json()
        assert Image.open(io.BytesIO(http.get(f"{kept}/thumbnail").content)).format == "JPEG"
        for path in ("/", "/api/schema", "/api/models", "/api/pictures", "/api/jobs", "/sdapi/v1/samplers"):
            assert http.get(path).status_code == 200
    maps = Path(f"/proc/{server.process.pid}/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    loaded = {line.rpartition("/")[2].strip() for line in maps.read_text().splitlines() if ".so" in line}
    assert not [name for name in loaded if name.startswith(("libtorch", "libmlx", "core.cpython", "_multiarray"))]
    megabytes = psutil.Process(server.process.pid).memory_info().rss / 1e6
    print(f"the front has {megabytes:.1f} MB")
    assert megabytes < 60


def test_a_job_that_is_drawn_does_not_stop_the_lists(server: RunningServer, client: openai.OpenAI) -> None:
    job = server.http.post("/api/jobs", json={"prompt": "a red circle", "steps": LONG}).json()["id"]
    until_step(server.http, job)
    assert len(list(client.models.list())) == 2 and server.http.get("/health").status_code == 200
    assert server.http.delete(f"/api/jobs/{job}").json()["state"] == "cancelled"
