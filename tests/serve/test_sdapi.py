"""AUTOMATIC1111's API: with the client `webuiapi`, and with requests as other clients send them."""

from __future__ import annotations

import base64
import inspect
import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import webuiapi
import write_sd_fields
from PIL import Image
from support.servers import LONG, RunningServer

from qwenimg.cli.serve.apis import sd_fields
from qwenimg.cli.serve.apis.sd_fields import BOTH, PICTURE, TEXT

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "sdapi_requests.json").read_text(encoding="utf-8"))
FEW: Any = {"steps": 2, "width": 64, "height": 64, "sampler_name": "Euler a", "cfg_scale": 2}


PIXEL = base64.b64encode(b"PNG").decode()


def image(picture: Image.Image) -> str:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


@pytest.fixture
def api(server: RunningServer) -> webuiapi.WebUIApi:
    return webuiapi.WebUIApi(baseurl=f"{server.address}/sdapi/v1")


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx2.Client]:
    with server.http as http:
        yield http


def wait_for_step(http: httpx2.Client) -> dict[str, Any]:
    """Ask for the progress until a step is done, as clients do."""
    while not (progress := http.get("/sdapi/v1/progress").json())["state"]["sampling_step"]:
        pass
    assert isinstance(progress, dict)
    return progress


def test_a_picture_of_webuiapi(api: webuiapi.WebUIApi) -> None:
    answer = api.txt2img(prompt="a red circle", seed=7, batch_size=2, scheduler="automatic", **FEW)
    assert [image.size for image in answer.images] == [(64, 64)] * 2
    assert answer.info["all_seeds"] == [7, 8] and answer.info["sampler_name"] == "euler_ancestral"
    assert answer.info["infotexts"][0].startswith("a red circle\nSteps: 2, Sampler: Euler ancestral")
    assert answer.parameters["prompt"] == "a red circle"
    info = api.png_info(answer.image)
    assert info.info.startswith("a red circle\nSteps: 2")


def test_a_picture_to_start_from_and_its_mask(api: webuiapi.WebUIApi) -> None:
    grey = Image.new("RGB", (64, 64), (128, 128, 128))
    mask = Image.fromarray(np.where(np.arange(64) < 32, 0, 255).astype(np.uint8)[None].repeat(64, 0))
    given = {"prompt": "a red circle", "seed": 7, "denoising_strength": 1.0, **FEW}
    answer = api.img2img(images=[grey], mask_image=mask, inpaint_full_res=False, **given)
    there = np.asarray(answer.image.convert("RGB")).astype(int)
    kept, drawn = (np.abs(there[:, part] - 128).mean() for part in (slice(0, 24), slice(40, 64)))
    print(f"mean difference from grey: kept {kept:.1f}, drawn anew {drawn:.1f}")
    assert kept < 12 < 30 < drawn, "white is drawn anew"
    with pytest.raises(RuntimeError, match="takes one"):
        api.img2img(images=[grey, grey], **given)
    with pytest.raises(RuntimeError, match="init_images"):
        api.img2img(images=[grey] * 17, **given)


PICTURED = np.random.default_rng(1).integers(60, 200, (80, 96, 3), np.uint8)
START = Image.fromarray(PICTURED)
SPOT = np.zeros((80, 96), np.uint8)
SPOT[30:50, 40:60] = 255


def test_a_mask_as_a1111_takes_it(api: webuiapi.WebUIApi) -> None:
    """Only the masked part is drawn, with a blurred edge: what `webuiapi` asks for if its caller says nothing else."""
    asked: Any = {"prompt": "a red circle", "seed": 7, "denoising_strength": 0.6, **FEW} | {"steps": 5}
    mask = Image.fromarray(SPOT)
    made = api.img2img(images=[START], mask_image=mask, include_init_images=True, **asked)
    there = np.asarray(made.image.convert("RGB"))
    assert there.shape == (80, 96, 3), "the size of the picture, of which a part is drawn"
    changed = (there != PICTURED).any(axis=2)
    rows, columns = (np.flatnonzero(changed.any(axis=axis)) for axis in (1, 0))
    assert changed[35:45, 45:55].mean() > 0.9
    assert rows[0] >= 30 - 10 and rows[-1] < 50 + 10 and columns[0] >= 40 - 10 and columns[-1] < 60 + 10
    assert "init_images" in made.parameters and "mask" in made.parameters
    text = made.info["infotexts"][0]
    for field in ("Denoising strength: 0.6", "Mask blur: 4", "Inpaint area: Only masked", "Masked area padding: 0"):
        assert field in text
    assert "Masked content: fill" in text
    ways: list[dict[str, Any]] = [
        {}, {"mask_blur": 0}, {"inpainting_fill": 1}, {"inpainting_fill": 2}, {"inpainting_fill": 3},
        {"inpaint_full_res": False}, {"inpaint_full_res_padding": 12},
    ]  # fmt: skip
    drawn = [api.img2img(images=[START], mask_image=mask, **(asked | way)) for way in ways]
    assert drawn[0].parameters.keys() & {"init_images", "mask"} == set()
    assert len({one.image.convert("RGB").tobytes() for one in drawn}) == len(ways), "each field changes the picture"
    inverted = Image.fromarray(255 - SPOT)
    outside = api.img2img(images=[START], mask_image=inverted, inpainting_mask_invert=1, **asked)
    assert outside.image.convert("RGB").tobytes() == drawn[0].image.convert("RGB").tobytes()
    sharp = np.asarray(drawn[1].image.convert("RGB"))
    assert (sharp[SPOT == 0] == PICTURED[SPOT == 0]).all()
    with pytest.raises(RuntimeError, match="nothing to draw anew"):
        api.img2img(images=[START], mask_image=Image.fromarray(SPOT * 0), **asked)


def test_a_request_of_a_mask_is_the_options_of_the_command_line(server: RunningServer, http: httpx2.Client) -> None:
    """The same pixels by our own API; what a request leaves out is A1111's."""
    files = {"init_images": [image(START)], "mask": image(Image.fromarray(SPOT))}
    asked = {"prompt": "a red circle", "seed": 7, "steps": 2, "width": 64, "height": 64}
    for given, options in (
        ({}, {"only_masked": 0, "mask_blur": 4, "mask_fill": "fill"}),
        ({"mask_blur_x": 2, "mask_blur_y": 2, "inpainting_fill": 2, "inpaint_full_res_padding": 9, "mask_blur": None},
         {"only_masked": 9, "mask_blur": 2, "mask_fill": "noise"}),
        ({"mask_blur": 0, "inpainting_fill": 1, "inpaint_full_res": 0, "inpainting_mask_invert": True},
         {"mask_mode": "outside"}),
    ):  # fmt: skip
        answer = http.post("/sdapi/v1/img2img", json=files | asked | {"denoising_strength": 0.7} | given)
        assert answer.status_code == 200, answer.text
        order = asked | options | {"strength": 0.7, "image": files["init_images"][0], "mask": files["mask"]}
        ours = http.post("/v1/images/generations", json={**asked, "prompt": "x", "only_masked": 3})
        assert ours.status_code == 400 and ours.json()["error"]["param"] == "only_masked"
        job = http.post("/api/jobs", json=order).json()
        while (about := http.get(f"/api/jobs/{job['id']}").json())["state"] in ("waiting", "drawing"):
            pass
        assert about["state"] == "done", about
        [name] = about["pictures"]
        theirs = Image.open(io.BytesIO(base64.b64decode(answer.json()["images"][0])))
        made = Image.open(io.BytesIO(http.get(f"/api/pictures/{name}").content))
        assert np.array_equal(np.asarray(theirs), np.asarray(made)), options
    del order["mask"]
    refused = http.post("/api/jobs", json=order | {"only_masked": 3})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "only_masked"


# A1111's fields of img2img in version 1.10, with a value that asks for something, and without a place here.
REFUSED: list[dict[str, Any]] = [
    {"resize_mode": 1}, {"resize_mode": 3}, {"initial_noise_multiplier": 1.1}, {"image_cfg_scale": 2.0},
    {"latent_mask": "x"}, {"mask_round": False}, {"subseed_strength": 1.1}, {"seed_resize_from_h": 64},
    {"seed_resize_from_w": 64}, {"s_churn": 0.5}, {"s_tmin": 1}, {"s_tmax": 1}, {"s_noise": 1.01},
    {"s_min_uncond": 0.2}, {"eta": 0.5}, {"sampler_name": "Euler a", "eta": 0}, {"refiner_checkpoint": "x"},
    {"send_images": False}, {"infotext": "x\nSteps: 2"}, {"script_args": [1]}, {"styles": ["x"]},
    {"tiling": True}, {"restore_faces": True}, {"enable_hr": True}, {"script_name": "Loopback"},
    {"override_settings": {"CLIP_stop_at_last_layers": "two"}}, {"override_settings": {"sd_vae": "x.safetensors"}},
    {"override_settings": {"eta_noise_seed_delta": 31337}}, {"override_settings": {"upscaler_for_img2img": "x"}},
    {"override_settings": {"CLIP_stop_at_last_layers": 2}, "override_settings_restore_afterwards": False},
    {"mask_blur": -1}, {"mask_blur": "four"}, {"mask_blur": 10**15}, {"mask_blur_x": 3}, {"inpainting_fill": 4},
    {"inpainting_fill": "fill"}, {"inpaint_full_res": "yes"}, {"inpaint_full_res_padding": -1},
    {"inpaint_full_res_padding": 10**9}, {"inpaint_full_res_padding": 1.5}, {"inpainting_mask_invert": 2},
    {"include_init_images": "yes"}, {"mask": "http://127.0.0.1/x.png"}, {"mask": [1]}, {"mask": []}, {"mask": {}},
]  # fmt: skip


@pytest.mark.parametrize("given", REFUSED, ids=lambda given: "-".join(given))
@pytest.mark.sample(11)
def test_no_field_that_asks_for_something_is_ignored(http: httpx2.Client, given: dict[str, Any]) -> None:
    body = {"prompt": "x", "init_images": [PIXEL], "mask": PIXEL, **FEW, **given}
    answer = http.post("/sdapi/v1/img2img", json=body)
    assert answer.status_code == 400, answer.text
    name = list(given)[-1]
    told = answer.json()["detail"]
    assert name in told and len(told) <= 300 and told.isprintable(), told


def test_fields_that_ask_for_nothing_are_taken(http: httpx2.Client) -> None:
    """The defaults of A1111's own description of its route, with those that older versions had."""
    nothing = {
        "styles": [], "subseed": 3, "subseed_strength": 0, "seed_resize_from_h": -1, "seed_resize_from_w": 0,
        "restore_faces": None, "tiling": False, "do_not_save_samples": True, "eta": 0, "s_min_uncond": 0,
        "s_churn": 0, "s_tmax": 0, "s_tmin": 0, "s_noise": 1, "override_settings": {}, "refiner_switch_at": 0,
        "override_settings_restore_afterwards": True, "disable_extra_networks": False, "comments": {},
        "resize_mode": 0, "image_cfg_scale": 1.5, "mask_blur": 4, "inpainting_fill": 0, "inpaint_full_res": True,
        "inpaint_full_res_padding": 0, "inpainting_mask_invert": 0, "initial_noise_multiplier": 1, "mask_round": True,
        "include_init_images": False, "script_name": "", "script_args": [], "send_images": True, "save_images": False,
        "alwayson_scripts": {}, "force_task_id": "x", "infotext": "", "refiner_checkpoint": "", "hr_scale": 2,
    }  # fmt: skip
    for path, more in (("txt2img", {}), ("img2img", {"init_images": [image(START)]})):
        body = {"prompt": "a red circle", **FEW, "sampler_name": "Euler", **nothing, **more}
        answer = http.post(f"/sdapi/v1/{path}", json=body)
        assert answer.status_code == 200, answer.text


def test_the_second_pass_of_a1111(api: webuiapi.WebUIApi, http: httpx2.Client) -> None:
    """The same picture as by our own options; its client sends the other fields too."""
    made = api.txt2img(
        prompt="a red circle", seed=7, **FEW, enable_hr=True, hr_scale=1.5, hr_second_pass_steps=3,
        denoising_strength=0.6, hr_upscaler="Lanczos",
    )  # fmt: skip
    assert made.image.size == (96, 96)
    fields = made.info["infotexts"][0]
    assert "Denoising strength: 0.6, Hires upscale: 1.5, Hires steps: 3, Hires upscaler: Lanczos" in fields
    own = {
        "hires": 1.5,
        "hires_steps": 5,
        "hires_strength": 0.6,
        "hires_with": "lanczos",
        "guidance": 2,
        "negative_prompt": "",
    }
    order = {"prompt": "a red circle", "seed": 7, "size": "64x64", "steps": 2, "sampler": "euler_a", **own}
    answer = http.post("/v1/images/generations", json=order)
    assert answer.status_code == 200, answer.text
    drawn = Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"])))
    assert np.array_equal(np.asarray(made.image), np.asarray(drawn))
    names = [row["name"] for row in http.get("/sdapi/v1/upscalers").json()]
    assert names == ["None", "Lanczos", "Nearest"]
    assert {"name": "Latent (nearest)"} in http.get("/sdapi/v1/latent-upscale-modes").json()


SECOND: list[dict[str, Any]] = [
    {"hr_scale": 9}, {"hr_scale": "two"}, {"hr_scale": float("nan")}, {"denoising_strength": 0},
    {"denoising_strength": 2}, {"hr_upscaler": "SwinIR_4x"}, {"hr_upscaler": "/etc/passwd"}, {"hr_upscaler": 3},
    {"hr_upscaler": "Latent (bicubic antialiased)"}, {"hr_second_pass_steps": 10**9}, {"hr_second_pass_steps": 1.5},
    {"hr_resize_x": 64, "hr_resize_y": 512}, {"hr_resize_x": -64}, {"hr_prompt": "y"}, {"hr_sampler_name": "Euler"},
    {"hr_checkpoint_name": "other.safetensors"}, {"enable_hr": "yes"},
]  # fmt: skip


@pytest.mark.parametrize("given", SECOND, ids=lambda given: "-".join(given))
@pytest.mark.sample(8)
def test_no_second_pass_that_is_not_done(http: httpx2.Client, given: dict[str, Any]) -> None:
    body = json.dumps({"prompt": "x", **FEW, "enable_hr": True, **given})
    answer = http.post("/sdapi/v1/txt2img", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    told = answer.json()["detail"]
    assert len(told) <= 300 and told.isprintable(), told
    for path, more in (
        ("/api/jobs", {"hires_with": "/etc/passwd"}),
        ("/v1/images/generations", {"hires_with": "x.pth"}),
    ):
        refused = http.post(path, json={"prompt": "x", "hires": 2, **more})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "hires_with", refused.text


def test_a_variation_is_that_of_the_command(http: httpx2.Client) -> None:
    """As A1111 does it: several pictures have one seed, and the second seed counts up."""
    body = {"prompt": "a red circle", **FEW, "seed": 3, "subseed": 7, "subseed_strength": 0.5}
    answer = http.post("/sdapi/v1/txt2img", json=body | {"n_iter": 2}).json()
    info = json.loads(answer["info"])
    assert (info["all_seeds"], info["all_subseeds"]) == ([3, 3], [7, 8])
    assert "Variation seed: 7, Variation seed strength: 0.5" in info["infotexts"][0]
    kind = {"Content-Type": "application/json"}
    chance = json.loads(http.post("/sdapi/v1/txt2img", json=body | {"subseed": -1}).json()["info"])
    assert chance["all_subseeds"][0] > 0
    for wrong in ({"subseed": -2}, {"subseed": 2**64}, {"subseed": 1.5}, {"subseed_strength": float("1e400")}):
        data = json.dumps(body | wrong).replace("Infinity", "1e400")
        assert http.post("/sdapi/v1/txt2img", content=data, headers=kind).status_code == 400, wrong


def test_every_field_of_webuiapi_is_in_the_table() -> None:
    """What that client sends is known by name: done, or checked."""
    known = {name for row in (*BOTH, *TEXT, *PICTURE) for name in row.names} | {"denoising_strength"}
    sent = set(inspect.signature(webuiapi.WebUIApi.img2img).parameters)
    sent |= set(inspect.signature(webuiapi.WebUIApi.txt2img).parameters)
    own = {"self", "images", "mask_image", "use_async", "use_deprecated_controlnet", "controlnet_units"}
    own |= {"adetailer", "animatediff", "roop", "reactor", "sag"}  # become alwayson_scripts
    unknown = {name for name in sent - own - known if not name.startswith(("hr_", "firstphase_"))}
    assert not unknown


def test_the_table_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
    assert f"<!-- begin sd-fields -->\n{write_sd_fields.text()}\n<!-- end" in page, (
        "run: python tools/write_sd_fields.py"
    )


def test_a_model_is_kept_if_settings_are(http: httpx2.Client) -> None:
    for restored in (True, False):
        settings = {
            "override_settings": {"sd_model_checkpoint": "shapes"},
            "override_settings_restore_afterwards": restored,
        }
        assert http.post("/sdapi/v1/txt2img", json={"prompt": "x", **FEW, **settings}).status_code == 200
    assert http.get("/sdapi/v1/options").json()["sd_model_checkpoint"] == "shapes"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"restore_faces": True}, "restore_faces"), ({"tiling": True}, "tiling"),
        ({"subseed_strength": "half"}, "subseed_strength"), ({"script_name": "X/Y/Z"}, "script_name"),
        ({"alwayson_scripts": {"ADetailer": {"args": []}}}, "ADetailer"), ({"styles": ["x"]}, "styles"),
        ({"alwayson_scripts": []}, "alwayson_scripts"), ({"alwayson_scripts": {"controlnet": {"args": [1]}}}, "units"),
        ({"batch_size": 0}, "batch_size"), ({"batch_size": 4, "n_iter": 5}, "at most 16"), ({"steps": 0}, "steps"),
        ({"override_settings": {"sd_model_checkpoint": "nope"}}, "nope"), ({"override_settings": [1]}, "override"),
    ],
)  # fmt: skip
def test_what_is_not_done_names_its_field(http: httpx2.Client, given: dict[str, Any], name: str) -> None:
    answer = http.post("/sdapi/v1/txt2img", json={"prompt": "x", **given})
    assert answer.status_code in (400, 404) and set(answer.json()) == {"error", "detail", "body", "errors"}
    assert name in json.dumps(answer.json()), answer.text
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("unit", "words"),
    [
        ({}, "no image"), ({"image": "http://127.0.0.1/x.png"}, "addresses are not fetched"), ({"image": 3}, "base64"),
        ({"image": PIXEL, "model": "union"}, "no control network 'union' here; served are none"),
        ({"image": PIXEL, "model": "None"}, "is for a model that sees one itself; here write NETWORK=PICTURE"),
        ({"image": PIXEL, "model": "x", "module": "depth_midas"}, "is not here, but none, canny"),
        ({"image": PIXEL, "model": "x", "module": "canny", "threshold_a": 50, "threshold_b": 90}, "threshold"),
        ({"image": PIXEL, "model": "x", "mask": PIXEL}, "mask"),
        ({"image": {"image": PIXEL, "mask": PIXEL}, "model": "x"}, "mask"),
        ({"image": PIXEL, "model": "x", "control_mode": "Harder"}, "control_mode"),
        ({"image": PIXEL, "model": "x", "weight": "one"}, "weight"),
    ],
)  # fmt: skip
def test_what_a_unit_of_controlnet_cannot_ask_for(http: httpx2.Client, unit: dict[str, Any], words: str) -> None:
    scripts = {"ControlNet": {"args": [unit, {"enabled": False}]}}
    answer = http.post("/sdapi/v1/txt2img", json={"prompt": "x", "alwayson_scripts": scripts})
    assert answer.status_code == 400 and words in answer.json()["detail"], answer.text


def test_no_unit_of_controlnet_asks_for_nothing(http: httpx2.Client) -> None:
    for scripts in (
        {},
        {"ControlNet": {"args": []}},
        {"controlnet": {"args": [{"enabled": False}]}},
        {"ControlNet": {}},
    ):
        answer = http.post("/sdapi/v1/txt2img", json={"prompt": "x", **FEW, "alwayson_scripts": scripts})
        assert answer.status_code == 200, answer.text


def test_names_of_samplers_and_schedulers(http: httpx2.Client) -> None:
    def drawn(**given: Any) -> dict[str, Any]:
        answer = http.post("/sdapi/v1/txt2img", json={"prompt": "x", **FEW, **given})
        assert answer.status_code == 200, answer.text
        info: dict[str, Any] = json.loads(answer.json()["info"])
        return info

    assert drawn(sampler_name="DPM++ 2M", scheduler="automatic")["sampler_name"] == "dpmpp_2m"
    assert drawn(sampler_name="k_euler_a", scheduler="Normal")["sampler_name"] == "euler_ancestral"
    for given in ({"sampler_name": "DPM++ 2M Karras"}, {"sampler_name": "DPM++ 2M", "scheduler": "karras"}):
        assert "Schedule type: Karras" in drawn(**given)["infotexts"][0]
    for given in ({"sampler_name": "DPM++ 2M SGM Uniform"}, {"sampler_name": "DPM++ 2M", "scheduler": "SGM Uniform"}):
        answer = http.post("/sdapi/v1/txt2img", json={"prompt": "x", **FEW, **given})
        assert answer.status_code == 400 and "--schedule sgm_uniform has no form" in answer.json()["detail"]
    assert drawn(sampler_name="", sampler_index="Euler")["sampler_name"] == "euler"
    for field in ("sampler_name", "scheduler"):
        answer = http.post("/sdapi/v1/txt2img", json={"prompt": "x", **FEW, field: "nope"})
        assert answer.status_code == 404 and "not found: nope" in answer.json()["detail"]


@pytest.mark.parametrize("image", ["http://127.0.0.1:1/x.png", "https://example.org/x.png", "file:///etc/passwd"])
def test_no_address_is_fetched(http: httpx2.Client, image: str) -> None:
    given = {"prompt": "x", **FEW}
    for body, path in (({"init_images": [image]}, "img2img"), ({"image": image}, "png-info")):
        answer = http.post(f"/sdapi/v1/{path}", json=given | body)
        assert answer.status_code == 400 and "addresses are not fetched" in answer.json()["detail"]


def test_interrupt_gives_what_is_finished(server: RunningServer, http: httpx2.Client) -> None:
    """`skip` leaves out one picture and goes on; both answers are 200."""
    with ThreadPoolExecutor(1) as pool:
        slow = {"prompt": "a red circle", **FEW, "steps": LONG, "batch_size": 3}
        answer = pool.submit(server.http.post, "/sdapi/v1/txt2img", json=slow)
        progress = wait_for_step(http)
        assert 0 < progress["progress"] < 1 and progress["state"]["job_count"] == 1
        assert progress["state"]["sampling_steps"] == LONG and progress["eta_relative"] > 0
        while not (seen := http.get("/sdapi/v1/progress").json()["current_image"]):
            pass
        assert Image.open(io.BytesIO(base64.b64decode(seen))).size == (8, 8)
        assert http.get("/sdapi/v1/progress?skip_current_image=true").json()["current_image"] is None
        assert http.post("/sdapi/v1/skip").json() == {}
        while http.get("/sdapi/v1/progress").json()["progress"] < 1 / 3:
            pass
        assert http.post("/sdapi/v1/interrupt").json() == {}
        assert answer.result().status_code == 200 and answer.result().json()["images"] == []
    idle = http.get("/sdapi/v1/progress").json()
    assert idle["progress"] == 0 and idle["current_image"] is None and idle["state"]["job_count"] == 0


def test_interrupt_stops_no_job_of_another_api(http: httpx2.Client) -> None:
    job = http.post("/api/jobs", json={"prompt": "x", "steps": LONG}).json()
    assert http.post("/sdapi/v1/interrupt").status_code == 200
    assert http.get(f"/api/jobs/{job['id']}").json()["state"] == "drawing"
    http.delete(f"/api/jobs/{job['id']}")


def test_the_lists_of_webuiapi(api: webuiapi.WebUIApi) -> None:
    names = [row["name"] for row in api.get_samplers()]
    assert "Euler" in names and "DPM++ 2M" in names
    assert api.util_get_model_names() == ["shapes"] and api.util_get_current_model() == "shapes"
    assert api.get_schedulers()[0]["name"] == "automatic"
    assert api.get_loras() == [] and api.get_upscalers()[0]["name"] == "None" and api.get_sd_vae() == []
    assert api.get_embeddings() == {"loaded": {}, "skipped": {}} and api.get_hypernetworks() == []
    assert api.get_face_restorers() == [] and api.get_prompt_styles() == [] and api.get_cmd_flags() == {}
    assert set(api.get_memory()) == {"ram", "cuda"}
    api.refresh_checkpoints()
    api.util_wait_for_ready()


def test_the_model_is_set_by_options(http: httpx2.Client) -> None:
    options = http.get("/sdapi/v1/options").json()
    assert http.post("/sdapi/v1/options", json=options | {"samples_format": "jpg", "unknown": 1}).status_code == 200
    answer = http.post("/sdapi/v1/options", json={"sd_model_checkpoint": "/etc/passwd"})
    assert answer.status_code == 400 and "served are" in answer.json()["detail"]


@pytest.mark.parametrize("client", sorted(RECORDED))
def test_requests_of_other_clients(http: httpx2.Client, client: str) -> None:
    """As their source sends them, in their order; each answer has what the client reads from it."""
    pictures = 0
    for step in RECORDED[client]:
        answer = http.request(step["method"], step["path"], json=step.get("json"), headers=step.get("headers"))
        assert answer.status_code == 200, (step["path"], answer.text)
        body = answer.json()
        for name in step["reads"]:
            row: Any = body
            for key in name.split("."):
                row = row[int(key)] if key.isdecimal() else row[key]
        if "images" in step["reads"]:
            for image in body["images"]:
                assert Image.open(io.BytesIO(base64.b64decode(image))).format == "PNG"
                pictures += 1
    assert pictures


@pytest.mark.parametrize("field", ["cfg_scal", "Steps ", "widht", "negativ_prompt", "denoising_strenght"])
def test_a_misspelled_field_is_refused(http: httpx2.Client, field: str) -> None:
    answer = http.post("/sdapi/v1/txt2img", json={"prompt": "x", "steps": 1, field: 4})
    assert answer.status_code == 400 and f"unknown field {field!r}; did you mean " in str(answer.json()), answer.text


@pytest.mark.parametrize("field", sorted(sd_fields.OF_FORKS))
def test_fields_of_other_programs_are_left_alone(field: str) -> None:
    sd_fields.check({"prompt": "x", field: 4, "vae_type": "Full", "sd_vae": "x"}, with_image=False)
