"""Choices in prompts and warnings, over every API of a server and on its page; what no client may read."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from PIL import Image
from support.browsers import chromium
from support.drawing_here import drawing
from support.recipe_cases import recipe_from_png
from support.servers import RunningServer, serving, until_end

from qwenimg.cli.workers.messages import Draw, Finished, PictureDrawn
from qwenimg.common.jobs.job import Job
from qwenimg.common.prompts.wildcards import Wildcards

FEW: dict[str, Any] = {"steps": 1, "size": "64x64"}
TEMPLATE = "a {red|blue|green} __form__"
SECRET = "circle of secrets"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wildcards") / "w"
    place.mkdir()
    (place / "form.txt").write_text("circle\nsquare\nstar\n", encoding="utf-8")
    (place.parent / "secret.txt").write_text(f"{SECRET}\n", encoding="utf-8")
    (place / "link.txt").symlink_to(place.parent / "secret.txt")
    (place / "loop.txt").symlink_to("loop.txt")
    (place / "zero.txt").symlink_to("/dev/zero")
    (place / "self.txt").write_text("__self__\n", encoding="utf-8")
    return place


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serving(tmp_path_factory.mktemp("gallery") / "g", "--wildcards", folder) as running:
        yield running


@pytest.fixture
def http(served: RunningServer) -> Iterator[httpx2.Client]:
    with served.http as http:
        yield http


def chosen(folder: Path, seed: int, prompt: str = TEMPLATE) -> str:
    return str(Wildcards([folder]).chosen({"prompt": prompt}, seed)["prompt"])


def recipe_of(data: str) -> dict[str, Any]:
    texts: Any = Image.open(io.BytesIO(base64.b64decode(data)))
    recipe = json.loads(texts.text["qwenimg"])
    assert isinstance(recipe, dict)
    return recipe


def test_every_api_draws_what_the_seeds_choose(http: httpx2.Client, folder: Path) -> None:
    texts = [chosen(folder, seed) for seed in (7, 8, 9)]
    assert len(set(texts)) == 3
    answer = http.post("/v1/images/generations", json={"prompt": TEMPLATE, "n": 3, "seed": 7, **FEW})
    rows = answer.json()["data"]
    assert [row["revised_prompt"] for row in rows] == texts == [recipe_of(row["b64_json"])["prompt"] for row in rows]
    assert {recipe_of(row["b64_json"])["template"] for row in rows} == {TEMPLATE}
    size = {"steps": 1, "width": 64, "height": 64}
    answer = http.post("/sdapi/v1/txt2img", json={"prompt": TEMPLATE, "batch_size": 3, "seed": 7, **size})
    info = json.loads(answer.json()["info"])
    assert info["all_prompts"] == texts and f"Template: {TEMPLATE}" in info["infotexts"][0]
    job = http.post("/api/jobs", json={"prompt": TEMPLATE, "seed": "7-9", "negative_prompt": "{a|b} dot", **FEW}).json()
    names = until_end(http, job["id"])["pictures"]
    recipes = [http.get(f"/api/pictures/{name}/recipe").json() for name in names]
    assert [one["prompt"] for one in recipes] == texts and job["request"]["prompt"] == TEMPLATE
    assert {one["negative_template"] for one in recipes} == {"{a|b} dot"}
    assert {one["negative_prompt"] for one in recipes} == {"a dot", "b dot"}
    options = http.get(f"/api/pictures/{names[0]}/options").json()["options"]
    assert options["prompt"] == texts[0], "settings of a picture draw its own text"


def test_a_text_that_looks_like_a_template_is_drawn_again_as_it_is(http: httpx2.Client) -> None:
    prompt = r"a circle \{a|b\} \__form__"
    [name] = until_end(http, http.post("/api/jobs", json={"prompt": prompt, "seed": 1, **FEW}).json()["id"])["pictures"]
    options = http.get(f"/api/pictures/{name}/options").json()["options"]
    answer = http.post("/api/jobs", json={"prompt": options["prompt"], "seed": 2, **FEW}).json()
    [again] = until_end(http, answer["id"])["pictures"]
    for one in (name, again):
        assert http.get(f"/api/pictures/{one}/recipe").json()["prompt"] == "a circle {a|b} __form__"


def test_warnings_reach_every_api(http: httpx2.Client) -> None:
    """Words that the model does not know, and a picture in grey that was converted."""
    asked = {"prompt": "a fluffy circle", "seed": 1, **FEW}
    words = "words it does not know: fluffy"
    [row] = http.post("/v1/images/generations", json=asked).json()["data"]
    assert words in row["warnings"] and row["warnings"] == recipe_of(row["b64_json"])["warnings"]
    assert any("trained at" in line for line in row["warnings"])
    grey = io.BytesIO()
    Image.new("L", (64, 64), 128).save(grey, "PNG")
    sent = {"init_images": [base64.b64encode(grey.getvalue()).decode()], "prompt": "a fluffy circle", "steps": 2}
    answer = http.post("/sdapi/v1/img2img", json={**sent, "width": 64, "height": 64}).json()
    warnings = json.loads(answer["info"])["warnings"]
    assert words in warnings and "image: is grey, taken as RGB" in warnings
    assert warnings == recipe_of(answer["images"][0])["warnings"]
    job = http.post("/api/jobs", json=asked).json()["id"]
    [name] = until_end(http, job)["pictures"]
    assert words in http.get(f"/api/pictures/{name}/recipe").json()["warnings"]
    [plain] = http.post("/v1/images/generations", json={"prompt": "a red circle", "size": "128x128"}).json()["data"]
    assert "warnings" not in plain and "revised_prompt" not in plain


HOSTILE = {
    "__link__": "link out of", "__loop__": "cannot be read", "__zero__": "link out of", "__self__": "leads back",
    "__a/../../secret__": "no ..", "__nope__": "no nope.txt", "{3-1$$a|b}": "smaller",
    "{a|" * 10_000 + "}" * 10_000: "deeper", "{a|b}" * 3000: "2,000 choices", "__form__" * 3000: "2,000 choices",
}  # fmt: skip


@pytest.mark.parametrize("prompt", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("field", ["prompt", "negative_prompt"])
@pytest.mark.sample(8)
def test_a_hostile_template_is_400_and_reads_nothing(http: httpx2.Client, prompt: str, field: str) -> None:
    asked = {"prompt": "a circle", field: f"a circle {prompt}"}
    for path, more in (("/v1/images/generations", FEW), ("/sdapi/v1/txt2img", {"steps": 1, "width": 64, "height": 64})):
        answer = http.post(path, json=asked | more)
        assert answer.status_code == 400, answer.text
        text = answer.json().get("detail") or answer.json()["error"]["message"]
        assert HOSTILE[prompt] in text and len(text) <= 300 and text.isprintable()
        assert SECRET not in answer.text and "/tmp" not in answer.text and str(Path.home()) not in answer.text
    answer = http.post("/api/jobs", json=asked | FEW)
    if answer.status_code == 202:  # what only the files tell
        ended = until_end(http, answer.json()["id"])
        assert ended["state"] == "failed" and HOSTILE[prompt] in ended["error"]
    else:
        assert answer.status_code == 400 and answer.json()["error"]["param"] == field


def test_without_a_folder_names_are_refused_and_off_takes_them_as_text(tmp_path: Path) -> None:
    for places, texts in (((), None), ((Path("off"),), "a circle __form__ {a|b}")):
        process, sent = drawing(Path("shapes"), wildcards=places)
        fields = {"prompt": "a circle __form__ {a|b}", "width": 64, "height": 64, "steps": 1}
        process.draw(Draw(id="x", model="tiny", job=Job(options=fields, seeds=(1,))))
        finished = sent[-1]
        assert isinstance(finished, Finished)
        if texts is None:
            assert finished.refused and "there is no folder of wildcards" in finished.error
        else:
            [picture] = [one for one in sent if isinstance(one, PictureDrawn)]
            (tmp_path / "a.png").write_bytes(picture.data)
            assert (
                not finished.error
                and recipe_from_png(tmp_path / "a.png")["prompt"] == texts == picture.recipe["prompt"]
            )
            assert "template" not in picture.recipe


@pytest.mark.sample(0)
def test_the_page_shows_warnings_and_the_template(served: RunningServer, folder: Path) -> None:
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.goto(served.address)
        page.fill("#prompt", "a furry {red|blue} __form__")
        page.uncheck("#random")
        page.fill("#seed", "7")
        page.fill("#steps", "1")
        page.keyboard.press("Control+Enter")
        warned = page.locator("#warned li", has_text="words it does not know: furry")
        warned.wait_for()
        page.click("#easel button.open")
        assert page.inner_text("#asked") == chosen(folder, 7, "a furry {red|blue} __form__")
        shown = page.inner_text("#recipe")
        assert "a furry {red|blue} __form__" in shown and "words it does not know: furry" in shown
