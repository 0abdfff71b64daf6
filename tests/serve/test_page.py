"""The page in a real browser: every flow, the keyboard, small windows, and what hostile texts and pages get."""

from __future__ import annotations

import base64
import http.server
import io
import itertools
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from PIL import Image
from support import tiny_autoencoder
from support.browsers import axe, chromium
from support.foreign_cases import PAGE
from support.processes import qwenimg
from support.servers import LONG, RunningServer, events, serving, until_end
from support.tiny_control import write_controlnet
from support.tiny_controlnet import write_controlnet as write_unet_controlnet
from support.tiny_ip_adapter import write_adapter
from support.tiny_sd import _SMALL, UNETS, write_tiny_sd
from support.upscalers import as_safetensors, srvgg

from qwenimg.cli.serve import page as served
from qwenimg.cli.serve.page import file, policy

slow = pytest.mark.slow  # one flow, one hostile prompt, one window and the other origin are in the quick suite
WIDE, NARROW = {"width": 1200, "height": 900}, {"width": 360, "height": 740}
SMALL = {"steps": 2, "size": "64x64"}
MARKUP = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
TURNED = "\u202e\u2066 evil \u202d abc مرحبا بالعالم \u2067 עולם"
LONG_PROMPT = ("x" * 400 + " \U0001f600 ") * 78  # 32,000 characters, some words of 400


# The file itself


def test_the_policy_lets_run_what_is_in_the_page_and_nothing_else() -> None:
    html = file().read_text(encoding="utf-8")
    assert html.count("<script>") == html.count("<style>") == 1 and len(re.findall(r"<script|<style", html)) == 2
    assert not re.search(r"\son\w+=|\sstyle=|javascript:", html.partition("<script>")[0])
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|Function\(", html)
    addresses = set(re.findall(r"https?://[^\s'\")]+", html))
    assert addresses == {"http://www.w3.org/2000/svg"}, "nothing of other hosts"
    rules = dict(rule.strip().partition(" ")[::2] for rule in policy(html).split(";"))
    assert rules["default-src"] == "'none'" and rules["connect-src"] == "'self'"
    assert rules["script-src"].startswith("'sha256-") and "unsafe" not in policy(html)
    assert policy(html.replace("use strict", "use strict ")) != policy(html)


def test_its_headers(server: RunningServer) -> None:
    with server.http as http:
        answer = http.get("/")
    assert answer.content == file().read_bytes() and answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"] == served.policy(file().read_text(encoding="utf-8"))
    assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["cache-control"] == "no-store"


# In the browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(autouse=True)
def idle(server: RunningServer) -> Iterator[None]:
    """No job is left to the next test."""
    yield
    with server.http as http:
        for job in http.get("/api/jobs").json()["jobs"]:
            if job["ended"] is None:
                http.delete(f"/api/jobs/{job['id']}")


class Watched:
    """A page whose every message, error and request is noted."""

    def __init__(self, browser: Any, server: RunningServer, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": WIDE, **options})
        self.page = self.context.new_page()
        self.page.set_default_timeout(30_000)
        self.said: list[str] = []
        self.hosts: set[str] = set()
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda one: self.hosts.add(httpx2.URL(one.url).host))
        self.page.goto(server.address)
        self.page.locator("#lamp:not(.off)").wait_for()

    def check(self, *expected: str) -> None:
        unexpected = [text for text in self.said if not any(one in text for one in expected)]
        assert unexpected == [] and self.hosts <= {"127.0.0.1", ""}, self.said
        self.check_width()
        assert self.page.title() != "owned"
        self.context.close()

    def check_width(self) -> None:
        overflow = self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert overflow <= 0, f"{overflow} pixels wider than the window"


@pytest.fixture
def watched(browser: Any, server: RunningServer) -> Iterator[Watched]:
    one = Watched(browser, server)
    yield one
    one.context.close()


def expect(locator: Any) -> Any:
    from playwright.sync_api import expect as expected

    expected.set_options(timeout=30_000)
    return expected(locator)


def drawn(server: RunningServer, **given: Any) -> dict[str, Any]:
    """A job that is done."""
    with server.http as http:
        return until_end(http, http.post("/api/jobs", json={"prompt": "a red circle", **SMALL, **given}).json()["id"])


def picture_of(server: RunningServer, name: str) -> np.ndarray:
    with server.http as http:
        return np.asarray(Image.open(io.BytesIO(http.get(f"/api/pictures/{name}").content)).convert("RGB")).astype(int)


def newest(server: RunningServer) -> dict[str, Any]:
    with server.http as http:
        found: dict[str, Any] = http.get("/api/pictures?limit=1").json()["pictures"][0]
    return found


def small(page: Any) -> None:
    """Set a form that draws at once."""
    page.locator("#shapes label", has_text="exact").click()
    for name, value in (("width", "64"), ("height", "64"), ("steps", "2")):
        page.fill(f"#{name}", value)


def png(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(array.astype(np.uint8)).save(out, "PNG")
    return out.getvalue()


def choose(page: Any, field: str, name: str, array: np.ndarray) -> None:
    """Choose a picture as a file."""
    page.set_input_files(field, {"name": name, "mimeType": "image/png", "buffer": png(array)})


def dropped(page: Any, target: str, data: bytes, name: str, kind: str = "image/png") -> None:
    """Drop a file, as a person does."""
    page.evaluate(
        """([target, data, name, type]) => {
            const bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0)), transfer = new DataTransfer();
            transfer.items.add(new File([bytes], name, {type}));
            for (const kind of ["dragover", "drop"])
                document.querySelector(target).dispatchEvent(
                    new DragEvent(kind, {bubbles: true, cancelable: true, dataTransfer: transfer}));
        }""",
        [target, base64.b64encode(data).decode(), name, kind],
    )


def test_from_a_prompt_to_a_picture_that_survives_a_reload(watched: Watched, server: RunningServer) -> None:
    page = watched.page
    small(page)
    page.fill("#prompt", "a red circle")
    page.locator("#random").uncheck()
    page.fill("#seed", "7-8")
    before = page.locator("#gallery li").count()
    page.locator("#prompt").press("Control+Enter")
    expect(page.locator("#gallery li")).to_have_count(before + 2)
    assert {newest(server)["recipe"][name] for name in ("width", "height")} == {64}
    assert newest(server)["recipe"]["seed"] == 8 and newest(server)["recipe"]["steps"] == 2
    expect(page.locator("#easel button.open img")).to_have_attribute("alt", "a red circle")
    page.reload()
    expect(page.locator("#gallery li")).to_have_count(min(60, before + 2))
    assert page.input_value("#prompt") == "a red circle" and page.input_value("#seed") == "7-8"
    assert page.input_value("#width") == "64" and not page.locator("#random").is_checked()
    watched.check()


@slow
def test_progress_preview_queue_and_stop(watched: Watched, server: RunningServer) -> None:
    page = watched.page
    page.fill("#prompt", "a red circle")
    page.fill("#steps", str(LONG))
    page.click("#draw")
    page.fill("#prompt", "waits")
    page.click("#draw")
    expect(page.locator("#easel img.rough")).to_have_attribute("src", re.compile("^data:image/jpeg;base64,"))
    expect(page.locator("#told")).to_have_text(re.compile(rf"step \d+ of {LONG} · .* left"))
    expect(page.locator("#waiting li")).to_have_text(re.compile("1.*waits.*Cancel"))
    assert 0 < page.locator("#progress").evaluate("one => one.value") < 1 and "%" in page.title()
    page.reload()
    expect(page.locator("#easel img.rough")).to_be_visible()
    expect(page.locator("#waiting li")).to_have_count(1)
    page.get_by_role("button", name="Cancel: waits").click()
    expect(page.locator("#queue")).to_be_hidden()
    page.keyboard.press("Escape")
    expect(page.locator("#bar")).to_be_hidden()
    expect(page.locator("#state")).to_have_text("ready")
    watched.check()


@slow
def test_an_error_is_at_its_field(watched: Watched) -> None:
    page = watched.page
    page.click("#draw")
    expect(page.locator("[data-field=prompt] .fault")).to_have_text("Write what you want to see.")
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.fill("#prompt", "x")
    page.fill("#steps", "5000")
    page.click("#draw")
    expect(page.locator("[data-field=steps] .fault")).to_have_text(re.compile("^Steps is 5000"))
    assert page.get_attribute("#steps", "aria-invalid") == "true"
    page.fill("#steps", "")
    page.locator("#others summary").click()
    page.fill("#f-cfg_end", "7")
    page.locator("#others summary").click()
    page.click("#draw")
    expect(page.locator("[data-field=cfg_end] .fault")).to_contain_text("Cfg end is 7")
    expect(page.locator("#f-cfg_end")).to_be_focused()
    page.fill("#f-cfg_end", "")
    refused = {"a <lora:x:1> cat": "this server has no LoRAs", "a __nothing__ cat": "The wildcard __nothing__"}
    for prompt, told in refused.items():
        page.fill("#prompt", prompt)
        page.click("#draw")
        expect(page.locator("[data-field=prompt] .fault")).to_contain_text(told)  # the second by the job that fails
        assert "--lora x" not in page.locator("#form").text_content()
    page.fill("#prompt", "")
    page.locator("#begin summary").click()
    choose(page, "#pick", "grey.png", np.full((64, 64, 3), 90))
    expect(page.locator("#inputs img")).to_have_count(1)
    page.click("#draw")  # this model describes no picture
    expect(page.locator("[data-field=prompt] .fault")).to_have_text("Write what you want to see.")
    watched.check("400")


@slow
def test_earlier_prompts(watched: Watched) -> None:
    page = watched.page
    small(page)
    expect(page.locator("#earlier")).to_be_hidden()
    for prompt in ("a red circle", MARKUP + TURNED, "a red circle"):
        page.fill("#prompt", prompt)
        page.click("#draw")
        expect(page.locator("#prompts button").first).to_contain_text(prompt[:10])
    page.reload()
    page.locator("#earlier summary").click()
    expect(page.locator("#prompts button")).to_have_count(2)
    assert axe(page) == []
    page.locator("#prompts button").nth(1).click()
    expect(page.locator("#prompt")).to_have_value(MARKUP + TURNED)
    expect(page.locator("#prompt")).to_be_focused()
    page.evaluate("localStorage.setItem('qwenimg.prompts', '{\"a\": 1}'); earlierShown()")
    expect(page.locator("#earlier")).to_be_hidden()
    page.fill("#prompt", "a ring")
    page.click("#draw")
    page.locator("#earlier summary").click()
    page.click("#forget")
    expect(page.locator("#earlier")).to_be_hidden()
    watched.check()


@slow
def test_while_the_model_loads(browser: Any, server: RunningServer) -> None:
    """A line, a bar without an end, and no button that only fails."""
    context = browser.new_context(viewport=WIDE)
    page = context.new_page()
    refusal = {"status": 503, "json": {"error": {"message": "the model is loading"}}}
    page.route("**/api/schema", lambda route: route.fulfill(**refusal))
    page.goto(server.address)
    expect(page.locator("#easel")).to_contain_text("Loading shapes")
    assert page.locator("#easel progress").evaluate("one => one.position") == -1
    expect(page.locator("#draw")).to_be_disabled()
    assert axe(page) == []
    page.unroute("**/api/schema")
    expect(page.locator("#draw")).to_be_enabled()
    expect(page.locator("#state")).to_have_text("ready")
    context.close()


@slow
def test_the_button_of_a_small_window_lies_over_nothing(browser: Any, server: RunningServer) -> None:
    one = Watched(browser, server, viewport=NARROW)
    boxes = [one.page.locator(name).bounding_box() for name in ("#stage", "#prompt", "#draw", "#negative_prompt")]
    tops = [box["y"] for box in boxes]
    print(f"from above: picture, prompt, button, the rest at {tops}")
    assert tops == sorted(tops) and all(a["y"] + a["height"] <= b["y"] for a, b in itertools.pairwise(boxes))
    assert one.page.locator(".go").evaluate("one => getComputedStyle(one).position") == "static"
    one.check()


@pytest.mark.sample(0)
def test_every_option_of_the_schema_has_a_control(watched: Watched, server: RunningServer) -> None:
    page = watched.page
    with server.http as http:
        schema = http.get("/api/schema").json()["properties"]
        [model] = http.get("/api/models").json()["models"]
    names = set(page.evaluate("[...document.querySelectorAll('#form [name]')].map((one) => one.name)"))
    there = {name for name, about in schema.items() if "x-families" not in about or name in model["options"]}
    unserved = {"lora", "lora_mode", "embedding", "control", "upscale", "upscale_with"}
    unserved |= {"ip_adapter", "ip_image", "ip_mask"}  # they are among the networks of `control`
    assert there - names == {"size"} | unserved, "size is width and height; no LoRA, network or upscaler is served"
    form = page.locator("#form").text_content()
    assert "Guidance" in page.locator("#h-true_cfg").text_content()
    assert not re.findall(r"--[a-z]+|(?<![\w-])-[a-zA-Z]\b|qwenimg [a-z]+|\bFILE\b", form), "words of the command line"
    axes = page.locator("#xname option").evaluate_all("all => all.map((one) => one.value)")
    assert not {"ip_adapter", "ip_image", "ip_mask", "control_mode"} & {*axes, *names}
    assert page.locator("#keepto").is_hidden()
    assert page.get_attribute("#steps", "placeholder") == str(model["defaults"]["steps"])
    sampler = page.locator("#f-sampler option").all_text_contents()
    assert len(sampler) == 1 + len(schema["sampler"]["enum"])


@slow
def test_the_large_view(watched: Watched, server: RunningServer) -> None:
    """Arrows, settings, variations, a start, removal."""
    first, second = drawn(server, seed=3), drawn(server, prompt="a blue star", seed=4)
    page = watched.page
    page.reload()
    page.locator("#gallery button").first.click()
    expect(page.locator("#asked")).to_have_text("a blue star")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#asked")).to_have_text("a red circle")
    page.click("#replay")
    expect(page.locator("#prompt")).to_have_value("a red circle")
    expect(page.locator("#viewer")).to_be_hidden()
    got = {name: page.input_value(f"#{name}") for name in ("prompt", "seed", "steps", "width", "height")}
    assert got == {"prompt": "a red circle", "seed": "3", "steps": "2", "width": "64", "height": "64"}
    count = page.locator("#gallery li").count()
    page.click("#draw")
    expect(page.locator("#gallery li")).to_have_count(count + 1)
    again = picture_of(server, newest(server)["id"])
    assert (again == picture_of(server, first["pictures"][0])).all(), "the same pixels"
    page.locator(f"#gallery [data-id='{second['pictures'][0]}'] button").click()
    page.click("#vary")
    expect(page.locator("#gallery li")).to_have_count(count + 2)
    assert newest(server)["recipe"]["prompt"] == "a blue star" and newest(server)["recipe"]["seed"] != 4
    page.locator("#gallery button").first.click()
    page.click("#from")
    expect(page.locator("#inputs img")).to_have_count(1)
    page.locator("#gallery button").first.click()
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("#remove")
    expect(page.locator("#gallery li")).to_have_count(count + 1)
    page.keyboard.press("Escape")
    expect(page.locator("#viewer")).to_be_hidden()
    watched.check()


@slow
def test_a_picture_that_is_dropped_brings_its_settings(watched: Watched, server: RunningServer) -> None:
    done = drawn(server, prompt="a ring", seed=9)
    with server.http as http:
        ours = http.get(f"/api/pictures/{done['pictures'][0]}").content
    page = watched.page
    dropped(page, "#stage", ours, MARKUP + TURNED + ".png")
    expect(page.locator("#toasted")).to_contain_text("Settings of <img src=x")
    assert page.input_value("#prompt") == "a ring" and page.input_value("#seed") == "9"
    page.click("#toastact")
    expect(page.locator("#inputs img")).to_have_count(1)
    dropped(page, "#stage", png(np.full((64, 64, 3), 128)), "n" * 300 + ".png")
    expect(page.locator("#toasted")).to_contain_text("has no recipe")
    expect(page.locator("#inputs img")).to_have_count(1)
    dropped(page, "#stage", b"hello", "a.txt", "text/plain")
    expect(page.locator("#toasted")).to_contain_text("a.txt is no picture")
    watched.check("400")


LOOK = """() => [
    getComputedStyle(document.documentElement).backgroundColor.match(/[0-9]+/g).map(Number),
    getComputedStyle(document.querySelector("#gallery img")).transitionDuration,
]"""


@slow
def test_what_else_a_person_does(watched: Watched, server: RunningServer) -> None:
    """A guidance without a second prediction, a shape, a download, a copied recipe, a pasted file, the theme."""
    page = watched.page
    page.fill("#guidance", "1")
    expect(page.locator("#unguided")).to_be_visible()
    assert page.locator("#negative_prompt").is_disabled()
    page.fill("#guidance", "2")
    expect(page.locator("#unguided")).to_be_hidden()
    page.fill("#negative_prompt", "blue")
    page.locator("#shapes label", has_text="16:9").click()
    page.fill("#steps", "2")
    page.fill("#prompt", "a wide red circle")
    page.click("#draw")
    expect(page.locator("#easel button.open img")).to_have_attribute("alt", "a wide red circle")
    done = newest(server)
    assert done["recipe"]["negative_prompt"] == "blue" and done["recipe"]["guidance"] == 2
    assert 1.6 < done["recipe"]["width"] / done["recipe"]["height"] < 1.95
    page.locator(f"#gallery [data-id='{done['id']}'] button").click()
    with page.expect_download() as download:
        page.click("#download")
    file = Path(download.value.path()).read_bytes()
    assert file == server.http.get(f"/api/pictures/{done['id']}").content
    watched.context.grant_permissions(["clipboard-read", "clipboard-write"])
    with watched.context.expect_page() as opened:
        page.click("#recipelink")
    assert json.loads(opened.value.locator("body").inner_text()) == done["recipe"]
    opened.value.close()
    page.click("#copy")
    expect(page.locator("#toasted")).to_have_text("The recipe is in the clipboard.")
    assert json.loads(page.evaluate("navigator.clipboard.readText()")) == done["recipe"]
    page.click("#shut")
    page.click("#clear")
    page.fill("#prompt", "")
    page.evaluate(
        """(data) => {
            const bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0)), clipboardData = new DataTransfer();
            clipboardData.items.add(new File([bytes], "pasted.png", {type: "image/png"}));
            document.body.dispatchEvent(new ClipboardEvent("paste", {bubbles: true, cancelable: true, clipboardData}));
        }""",
        base64.b64encode(file).decode(),
    )
    expect(page.locator("#prompt")).to_have_value("a wide red circle")
    assert page.input_value("#seed") == str(done["recipe"]["seed"]) and page.input_value("#negative_prompt") == "blue"
    looks = []
    for theme, motion in (("light", "no-preference"), ("dark", "reduce")):
        page.emulate_media(color_scheme=theme, reduced_motion=motion)
        looks.append(page.evaluate(LOOK))
    assert min(looks[0][0]) > 200 and max(looks[1][0]) < 40, "the colours of the page's ground"
    assert looks[0][1] != looks[1][1] == "0s"
    watched.check()


@slow
def test_a_mask_is_painted(watched: Watched, server: RunningServer) -> None:
    """What is not painted stays; undo, invert and erase do what they say."""
    page = watched.page
    page.fill("#prompt", "a red circle")
    page.fill("#steps", "2")
    page.locator("#begin summary").click()
    dropped(page, "#drop", png(np.full((64, 64, 3), 128)), "grey.png")
    page.fill("#strength", "1")
    page.click("#paint")
    box = page.locator("#over").bounding_box()

    def covered() -> float:
        share: float = page.evaluate("""() => {
            const v = over.getContext("2d").getImageData(0, 0, over.width, over.height).data;
            return v.filter((one, i) => i % 4 === 3 && one > 127).length / (v.length / 4);
        }""")
        return share

    def stroke(column: float) -> None:
        x = box["x"] + box["width"] / 2 + (column - 0.5) * min(box["width"], box["height"])  # the picture is a square
        page.mouse.move(x, box["y"] + 1)
        page.mouse.down()
        page.mouse.move(x, box["y"] + box["height"] - 1, steps=4)
        page.mouse.up()

    page.fill("#brush", "75")
    stroke(0.85)
    one = covered()
    stroke(0.6)
    two = covered()
    page.click("#undo")
    assert 0.15 < one < two < 0.7 and abs(covered() - one) < 0.01
    page.click("#invert")
    assert abs(covered() - (1 - one)) < 0.02
    page.click("#undo")
    page.locator("#erase").check()
    stroke(0.85)
    assert covered() < 0.01
    page.click("#undo")
    assert axe(page) == []
    assert page.evaluate("painted.click(), !painter.open"), "the dialog is closed before the mask is made"
    expect(page.locator("#inputs img")).to_have_count(2)
    count = page.locator("#gallery li").count()
    page.click("#draw")
    expect(page.locator("#gallery li")).to_have_count(count + 1)
    there = picture_of(server, newest(server)["id"])
    kept, changed = (np.abs(there[:, part] - 128).mean() for part in (slice(0, 32), slice(50, 64)))
    print(f"mean difference from grey: kept {kept:.1f}, painted {changed:.1f}")
    assert kept < 12 < 30 < changed
    page.locator("#onlymasked").check()
    assert page.input_value("#f-only_masked") == "32" and axe(page) == []
    page.click("#draw")
    expect(page.locator("#gallery li")).to_have_count(count + 2)
    there, recipe = picture_of(server, newest(server)["id"]), newest(server)["recipe"]
    assert recipe["only_masked"] == 32 and (there[:, :32] == 128).all() and there.shape[:2] == (64, 64)
    page.locator("#onlymasked").uncheck()
    assert page.input_value("#f-only_masked") == ""
    page.fill("#f-only_masked", "8")
    expect(page.locator("#onlymasked")).to_be_checked()
    page.click("#unmask")
    expect(page.locator("#masked")).to_be_hidden()
    assert "only_masked" not in page.evaluate("values()")
    watched.check()


@slow
def test_a_mask_from_a_file(watched: Watched, server: RunningServer) -> None:
    page = watched.page
    page.locator("#begin summary").click()
    choose(page, "#pick", "a.png", np.full((32, 48, 3), 9))
    page.click("#paint")
    mask = np.zeros((32, 48, 3))
    mask[:, :24] = 255
    photo = np.random.default_rng(1).integers(0, 256, (32, 48, 3))
    forms = (
        mask,
        np.dstack([mask, mask[..., :1]]),  # white paint on a transparent ground
        np.dstack([mask, mask[..., :1] * 0 + 255]),
        np.dstack([photo, 255 - mask[..., :1]]),  # a hole in a picture
        np.dstack([mask * 0, 255 - mask[..., :1]]),  # a hole in black
        np.dstack([mask * [1, 0, 0], mask[..., :1]]),  # red paint
    )
    for number, form in enumerate(forms):
        if number:
            page.click("#paint")
        choose(page, "#maskfile", "m.png", form)
        page.wait_for_timeout(300)
        page.click("#painted")
        expect(page.locator("#inputs img")).to_have_count(2)
        page.wait_for_timeout(200)
        sent = page.evaluate("mask.data")
        got = np.asarray(Image.open(io.BytesIO(base64.b64decode(sent))).convert("L"))
        assert (got == mask[..., 0]).all(), number
    page.click("#unmask")
    expect(page.locator("#inputs img")).to_have_count(1)
    watched.check()


@slow
def test_a_grid_of_settings(watched: Watched, server: RunningServer) -> None:
    page = watched.page
    small(page)
    page.fill("#prompt", "a red circle")
    page.locator("#plot summary").click()
    page.select_option("#xname", "steps")
    page.fill("#xvalues", "1, 2, 3")
    page.select_option("#yname", "guidance")
    page.fill("#yvalues", "1; 3.5")
    page.click("#compare")
    expect(page.locator("#table img")).to_have_count(6)
    with server.http as http:
        recipes = [one["recipe"] for one in http.get("/api/pictures?limit=6").json()["pictures"]]
    assert {(one["steps"], one["guidance"]) for one in recipes} == {(s, g) for s in (1, 2, 3) for g in (1, 3.5)}
    assert len({one["seed"] for one in recipes}) == 1
    page.reload()
    expect(page.locator("#table img")).to_have_count(6)
    assert page.locator("#table thead th").all_text_contents() == ["Steps 1", "Steps 2", "Steps 3"]
    assert axe(page) == []
    page.locator("#table tbody button").first.click()
    expect(page.locator("#recipe")).to_contain_text("64 × 64")
    page.click("#shut")
    page.click("#unplot")
    expect(page.locator("#matrix")).to_be_hidden()
    watched.check()


@slow
def test_a_grid_that_starts_from_a_picture(watched: Watched, server: RunningServer) -> None:
    """Its cells have the picture and the mask, also those that are handed in after a reload; at most four are in line,
    and one that is cancelled says so."""
    page = watched.page
    small(page)
    page.fill("#prompt", "a red circle")
    page.locator("#begin summary").click()
    choose(page, "#pick", "grey.png", np.full((64, 64, 3), 90))
    expect(page.locator("#inputs img")).to_have_count(1)
    page.click("#paint")
    page.click("#invert")
    page.click("#painted")
    expect(page.locator("#inputs img")).to_have_count(2)
    page.locator("#plot summary").click()
    page.select_option("#xname", "strength")
    page.fill("#xvalues", "0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 1")
    with server.http as http:  # no cell ends before the page is opened anew
        held = http.post("/api/jobs", json={"prompt": "x", "steps": LONG}).json()["id"]
        page.click("#compare")
        expect(page.locator("#table td", has_text="waiting")).to_have_count(4)
        page.reload()
        page.locator("#lamp:not(.off)").wait_for()
        [fourth] = [job["id"] for job in http.get("/api/jobs").json()["jobs"] if job.get("position") == 4]
        http.delete(f"/api/jobs/{fourth}")
        expect(page.locator("#table td", has_text="cancelled")).to_have_count(1)
        http.delete(f"/api/jobs/{held}")
        expect(page.locator("#table img")).to_have_count(6)
        recipes = [one["recipe"] for one in http.get("/api/pictures?limit=6").json()["pictures"]]
    assert sorted(one["strength"] for one in recipes) == [0.1, 0.2, 0.3, 0.7, 0.8, 1]
    assert len({(one["image_sha256"], one["mask_sha256"], one["seed"]) for one in recipes}) == 1
    page.click("#unplot")
    expect(page.locator("#matrix")).to_be_hidden()
    watched.check()


@slow
def test_a_picture_whose_shapes_are_kept(browser: Any, tmp_path: Path, tiny_folder: Path) -> None:
    net = write_controlnet(tmp_path / "union")
    options = ("--control", net, "-m", tiny_folder)
    with serving(tmp_path / "g", *options) as server:
        name = server.http.get("/v1/models").json()["data"][1]["id"]
        watched = Watched(browser, server, viewport=NARROW)
        page = watched.page
        page.select_option("#model", name)
        [other] = [one for one in server.http.get("/api/models").json()["models"] if one["id"] == name]
        assert "family" not in other, "it is not open"
        for option in ("steps", "guidance"):
            usual = other["defaults"][option]
            assert page.get_attribute(f"#{option}", "placeholder") == f"{usual:g}"
            assert float(page.input_value(f"[data-of={option}]")) == usual
        small(page)
        page.fill("#prompt", "x")
        page.locator("#keepto summary").click()
        for value in (60, 200):
            array = np.full((64, 64, 3), value)
            array[16:48, 16:48] = 255 - value
            choose(page, "#keeppick", f"{value}.png", array)
        expect(page.locator(".keep")).to_have_count(2)
        page.get_by_label("Picture of picture 2").select_option("canny")
        page.get_by_label("Strength of picture 2").fill("0.5")
        page.get_by_label("Until of picture 1").fill("0.8")
        page.get_by_label("Until of picture 1").blur()
        assert axe(page) == []
        page.click("#draw")
        expect(page.locator("#gallery li")).to_have_count(1)
        recipe = newest(server)["recipe"]
        assert recipe["control"] == "union=1:1:0-0.8; union=canny@2:0.5" and len(set(recipe["control_sha256"])) == 2
        page.get_by_label("Strength of picture 1").fill("99")
        page.get_by_label("Strength of picture 1").blur()
        page.click("#draw")
        expect(page.locator("[data-field=control] .fault")).to_contain_text("a scale is a number from 0 to 10")
        page.get_by_label("Remove 60.png").click()
        expect(page.locator(".keep")).to_have_count(1)
        page.click("#draw")
        expect(page.locator("#gallery li")).to_have_count(2)
        assert newest(server)["recipe"]["control"] == "union=canny@1:0.5"
        page.click("#clear")
        expect(page.locator(".keep")).to_have_count(0)
        watched.check("400")


@slow
def test_pictures_as_prompts_beside_one_whose_shapes_are_kept(browser: Any, tmp_path: Path) -> None:
    """An IP-Adapter with two pictures and their masks, its style alone, and a ControlNet: the pixels of the command."""
    write_tiny_sd(tmp_path / "sd15", "sd15")
    net = write_unet_controlnet(tmp_path / "canny", UNETS["sd15"] | _SMALL)
    adapter = write_adapter(tmp_path / "adapters", "sd15").rename(tmp_path / "adapters" / "taste.safetensors")
    shown = {f"{name}.png": np.full((64, 64, 3), value) for value, name in ((60, "a"), (90, "b"), (120, "c"))}
    for side, name in enumerate(("left", "right")):
        shown[f"{name}.png"] = np.zeros((64, 64, 3))
        shown[f"{name}.png"][:, 32 * side : 32 * side + 32] = 255
    for array in list(shown.values())[:3]:
        array[16:40, 8:30] = 255
    with serving(tmp_path / "g", "--control", net, "--control", adapter, "-m", tmp_path / "sd15") as server:
        with server.http as http:
            about = http.get("/api/models").json()
        assert (about["controls"], about["adapters"]) == (["canny", "taste"], ["taste"])
        watched = Watched(browser, server, viewport=NARROW)
        page = watched.page
        page.select_option("#model", about["models"][1]["id"])
        small(page)
        page.fill("#prompt", "x")
        page.fill("#seed", "5")
        page.locator("#keepto summary").click()
        expect(page.locator("#keepto summary")).to_have_text("Keep to a picture's shapes or style")
        choose(page, "#keeppick", "a.png", shown["a.png"])
        page.get_by_label("Picture of picture 1").select_option("scribble")
        choose(page, "#keeppick", "b.png", shown["b.png"])
        page.get_by_label("Network of picture 2").select_option("taste")
        assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Network of picture 2"
        page.get_by_label("Strength of picture 2").fill("0.7")
        page.get_by_label("Takes over of picture 2").select_option("style")
        for i, (name, role) in enumerate((("c", "also"), ("left", "mask"), ("right", "mask")), 3):
            choose(page, "#keeppick", f"{name}.png", shown[f"{name}.png"])
            assert page.get_by_label(f"Network of picture {i}").input_value() == "taste", "as the one before"
            page.get_by_label(f"Picture of picture {i}").select_option(role)
            expect(page.get_by_label(f"Strength of picture {i}")).to_have_count(0)
        assert axe(page) == []
        watched.check_width()
        page.click("#draw")
        expect(page.locator("#gallery li")).to_have_count(1)
        kept = newest(server)
        named = "; ".join(f"taste.safetensors={one}" for one in ("2:style=0.7", "also@3:1", "mask@4:1", "mask@5:1"))
        assert kept["recipe"]["control"] == f"canny=scribble@1:1; {named}"
        assert len(set(kept["recipe"]["control_sha256"])) == 5
        for name, array in shown.items():
            (tmp_path / name).write_bytes(png(array))
        ran = qwenimg(
            "x", "-m", "sd15", "--backend", "cpu", "-s", 5, "--size", "64x64", "--steps", 2, "-o", "cli.png",
            "--control", "canny=scribble@a.png", "--ip-adapter", "adapters/taste.safetensors:style=0.7",
            *(f"--ip-image={name}.png" for name in "bc"), *(f"--ip-mask={name}.png" for name in ("left", "right")),
            cwd=tmp_path,
        )  # fmt: skip
        assert ran[0] == 0, ran
        with server.http as http:
            sent = Image.open(io.BytesIO(http.get(f"/api/pictures/{kept['id']}").content))
        assert (np.asarray(sent) == np.asarray(Image.open(tmp_path / "cli.png"))).all()
        page.get_by_label("Network of picture 2").select_option("canny")
        page.click("#draw")
        expect(page.locator("[data-field=control] .fault")).to_contain_text("comes after a picture of the same adapter")
        watched.check("400")


@slow
def test_previews_by_a_tiny_vae(browser: Any, tmp_path: Path) -> None:
    """On the page and in A1111's progress: as large as the picture, in place of a pixel for each latent."""
    write_tiny_sd(tmp_path / "sd15", "sd15")
    own = json.loads((tmp_path / "sd15" / "vae" / "config.json").read_text())
    made = tiny_autoencoder.config(own["latent_channels"], len(own["block_out_channels"]))
    tiny_autoencoder.write_authors(tmp_path / "models/vae_approx", "taesd", tiny_autoencoder.weights(made))
    with serving(tmp_path / "g", "--models-dir", tmp_path / "models", "-m", tmp_path / "sd15") as server:
        watched = Watched(browser, server)
        page = watched.page
        with server.http as http:
            name = http.get("/api/models").json()["models"][1]["id"]
            page.select_option("#model", name)
            small(page)
            page.fill("#steps", "500")
            page.fill("#prompt", "x")
            page.click("#draw")
            expect(page.locator("#easel img.rough")).to_be_visible()
            shown = page.locator("#easel img.rough").evaluate("one => [one.naturalWidth, one.naturalHeight]")
            page.keyboard.press("Escape")
            expect(page.locator("#state")).to_have_text("ready")
            asked: dict[str, Any] = {"prompt": "x", "width": 64, "height": 64, "steps": 500}
            asked["override_settings"] = {"sd_model_checkpoint": name}
            client = threading.Thread(target=lambda: http.post("/sdapi/v1/txt2img", json=asked, timeout=60))
            client.start()
            found = (http.get("/sdapi/v1/progress").json()["current_image"] for _ in range(10_000) if client.is_alive())
            seen = next(filter(None, found))
            http.post("/sdapi/v1/interrupt")
            client.join()
        assert shown == [64, 64] and Image.open(io.BytesIO(base64.b64decode(seen))).size == (64, 64)
        watched.check()


@slow
def test_a_workflow_that_is_dropped_brings_its_settings(watched: Watched) -> None:
    page = watched.page
    dropped(page, "#stage", json.dumps(PAGE).encode(), "workflow.json", "application/json")
    expect(page.locator("#toasted")).to_contain_text("Settings of workflow.json. It was drawn with a LoRA (ink:0.6)")
    expect(page.locator("#toasted")).to_contain_text("a control (ip-adapter-plus_sd15=PICTURE:0.8")
    assert page.input_value("#prompt") == "a girl with a necklace" and page.input_value("#seed") == "27"
    dropped(page, "#stage", b'{"a": 1}', "other.json", "application/json")
    expect(page.locator("#toasted")).to_contain_text("no workflow of ComfyUI")
    watched.check("400")


@slow
def test_a_picture_is_drawn_larger(browser: Any, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "upscale_models"
    folder.mkdir(parents=True)
    as_safetensors(folder / "two.safetensors", srvgg(convs=1, features=8, scale=2))
    as_safetensors(folder / "other.safetensors", srvgg(convs=1, features=8, scale=2))
    with serving(tmp_path / "gallery", "--models-dir", str(tmp_path / "models")) as server:
        watched = Watched(browser, server)
        page = watched.page
        small(page)
        page.fill("#prompt", "a red circle")
        page.locator("#others summary").click()
        assert page.locator("#f-upscale option").all_text_contents() == ["none", "2x", "4x"]
        assert page.locator("#f-upscale_with option").all_text_contents() == ["choose one", "other", "two"]
        assert "--" not in page.locator("#form").text_content()
        page.select_option("#f-upscale", "2")
        page.click("#draw")
        expect(page.locator("[data-field=upscale_with] .fault")).to_contain_text("other, two")
        assert axe(page) == []
        page.select_option("#f-upscale_with", "two")
        page.click("#draw")
        page.locator("#gallery button").first.click()
        expect(page.locator("#recipe")).to_contain_text("128 × 128, drawn at 64 × 64")
        assert page.evaluate("document.querySelector('#large').naturalWidth") == 128
        assert axe(page) == []
        watched.check("400")


@pytest.mark.parametrize(
    "prompt",
    [MARKUP, pytest.param(TURNED, marks=slow), pytest.param(LONG_PROMPT, marks=slow)],
    ids=["markup", "turned", "long"],
)
@pytest.mark.sample(0)
def test_hostile_prompts_are_texts(browser: Any, server: RunningServer, prompt: str) -> None:
    done = drawn(server, prompt=prompt)
    assert done["state"] == "done"
    watched = Watched(browser, server, viewport=NARROW)
    page = watched.page
    with server.http as http:
        ids = [http.post("/api/jobs", json={"prompt": prompt, "steps": LONG}).json()["id"] for _ in range(2)]
        expect(page.locator("#waiting li")).to_have_count(1)
        watched.check_width()
        page.locator(f"#gallery [data-id='{done['pictures'][0]}'] button").click()
        assert page.locator("#asked").evaluate("one => one.textContent") == prompt
        assert page.locator("#asked *").count() == 0
        page.click("#replay")
        expect(page.locator("#prompt")).to_have_value(prompt)
        for name in ids:
            http.delete(f"/api/jobs/{name}")
    watched.check()


@pytest.mark.parametrize(
    ("size", "theme"),
    [
        (NARROW, "light"),
        *(pytest.param(*pair, marks=slow) for pair in ((NARROW, "dark"), (WIDE, "light"), (WIDE, "dark"))),
    ],
    ids=["narrow-light", "narrow-dark", "wide-light", "wide-dark"],
)
@pytest.mark.sample(0)
def test_axe_finds_nothing(browser: Any, server: RunningServer, theme: str, size: dict[str, int]) -> None:
    drawn(server)
    watched = Watched(browser, server, viewport=size, color_scheme=theme, reduced_motion="reduce")
    page = watched.page
    page.locator("#gallery li").first.wait_for()
    for summary in page.locator("summary:visible").all():
        summary.click()
    assert axe(page) == []
    with server.http as http:
        ids = [http.post("/api/jobs", json={"prompt": "x", "steps": LONG}).json()["id"] for _ in range(2)]
        expect(page.locator("#easel img.rough")).to_be_visible()
        expect(page.locator("#waiting li")).to_have_count(1)
        page.fill("#steps", "9999")
        page.fill("#prompt", "x")
        page.click("#draw")
        expect(page.locator("[data-field=steps] .fault")).to_be_visible()
        assert axe(page) == []
        for name in ids:
            http.delete(f"/api/jobs/{name}")
    page.locator("#gallery button").first.click()
    expect(page.locator("#viewer")).to_be_visible()
    assert axe(page) == []
    watched.check("400")


FOCUS = """() => {
    const one = document.activeElement;
    const name = one.name === "aspect" ? "aspect" : one.id;
    return [name, getComputedStyle(one).outlineStyle, one.closest("#gallery") !== null];
}"""


@slow
def test_the_keyboard_alone(watched: Watched, server: RunningServer) -> None:
    """Every control is reached by Tab, in an order that follows the page, and shows that it has the focus."""
    drawn(server)
    page = watched.page
    page.reload()
    page.locator("#gallery li").first.wait_for()
    page.evaluate("document.activeElement.blur()")
    reached = []
    for _ in range(60):
        page.keyboard.press("Tab")
        name, outline, is_tile = page.evaluate(FOCUS)
        reached.append(name)
        assert outline != "none" or name == "aspect"  # whose label shows it
        if is_tile:
            break
    wanted = ["model", "prompt", "negative_prompt", "aspect", "seed", "steps", "draw"]
    assert [name for name in reached if name in wanted] == wanted, reached
    page.keyboard.press("Enter")
    expect(page.locator("#viewer")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#viewer")).to_be_hidden()
    assert page.evaluate("document.activeElement.closest('#gallery') !== null"), "the focus comes back"
    watched.check()


# A page on another origin


class Hostile(http.server.BaseHTTPRequestHandler):
    """Serves a page that tries to use the server of whoever opens it."""

    address = ""

    def do_GET(self) -> None:
        html = f"""<!doctype html><title>evil</title><body><iframe id=frame src="{self.address}/"></iframe>
            <img id=img src="{self.address}/api/pictures/PICTURE"><script src="{self.address}/api/models"></script>
            <form id=form method=post enctype=text/plain action="{self.address}/api/jobs">
            <input name='{{"prompt":"' value='owned"}}'></form>"""
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(html.encode())

    def log_message(self, *given: Any) -> None:
        pass


ATTEMPTS = """async (address) => {
    const out = {};
    const tries = {
        get: () => fetch(address + "/api/pictures"),
        blind: () => fetch(address + "/api/jobs", {method: "POST", mode: "no-cors", body: '{"prompt": "owned"}'}),
        text: () => fetch(address + "/v1/images/generations",
            {method: "POST", headers: {"content-type": "text/plain"}, body: '{"prompt": "owned"}'}),
        json: () => fetch(address + "/api/jobs",
            {method: "POST", headers: {"content-type": "application/json"}, body: '{"prompt": "owned"}'}),
        remove: () => fetch(address + "/api/jobs/x", {method: "DELETE"}),
    };
    for (const [name, run] of Object.entries(tries))
        out[name] = await run().then((r) => r.type + " " + r.status, (e) => "refused");
    out.events = await new Promise((done) => {
        const s = new EventSource(address + "/api/events");
        s.onopen = () => done("open"); s.onerror = () => done("refused");
    });
    out.image = await new Promise((done) => {
        const image = new Image();
        image.onload = () => done("read"); image.onerror = () => done("refused");
        image.src = address + "/api/pictures/" + "PICTURE";
    });
    return out;
}"""


@pytest.mark.sample(0)
def test_a_page_on_another_origin_gets_nothing(browser: Any, server: RunningServer) -> None:
    name = drawn(server)["pictures"][0]
    handler = type("Handler", (Hostile,), {"address": server.address})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as evil, server.http as client:
        threading.Thread(target=evil.serve_forever, daemon=True).start()
        jobs = client.get("/api/jobs").json()
        for host in ("127.0.0.1", "localhost"):
            context = browser.new_context()
            page = context.new_page()
            page.goto(f"http://{host}:{evil.server_address[1]}/")
            got = page.evaluate(ATTEMPTS.replace("PICTURE", name), server.address)
            print(host, json.dumps(got))
            assert set(got.values()) <= {"refused", "opaque 0"} and got["blind"] in ("refused", "opaque 0")
            assert got["image"] == got["get"] == got["events"] == "refused"
            frame = page.locator("#frame").element_handle().content_frame()
            assert "qwenimg" not in frame.content(), "no page frames it"
            page.evaluate("document.getElementById('form').submit()")
            expect(page.locator("body")).to_contain_text("not served")
            context.close()
        assert client.get("/api/jobs").json() == jobs, "and nothing was drawn"
        evil.shutdown()


# A LoRA


@slow
def test_a_lora_from_its_order_to_the_form(browser: Any, tmp_path: Path) -> None:
    """Chart and samples grow with the steps, also after a reload; a drawing waits; Stop keeps the checkpoint."""
    folder = tmp_path / "t" / "pets"
    folder.mkdir(parents=True)
    for value, color in enumerate(("red", "green", "blue")):
        (folder / f"{color}.png").write_bytes(png(np.full((64, 64, 3), 60 * value)))
        (folder / f"{color}.txt").write_text(f"a {color} sks")
    with serving(tmp_path / "g", "--training", tmp_path / "t") as server:
        one = Watched(browser, server)
        page = one.page
        page.locator("#train summary").click()
        expect(page.locator("#tfolders option")).to_have_attribute("value", "pets")
        page.fill("#tdata", "../g")
        page.fill("#toutput", "my")
        page.click("#begintraining")
        expect(page.locator("#tfault")).to_contain_text("is not in the folder")
        for field, value in {"tdata": "pets", "toutput": MARKUP, "tsteps": "100000", "tword": "sks"}.items():
            page.fill(f"#{field}", value)
        page.click("#begintraining")
        expect(page.locator("#tfault")).to_contain_text("Output is")
        page.fill("#toutput", "my")
        page.fill("#tsample", MARKUP)
        assert axe(page) == []
        page.click("#begintraining")
        expect(page.locator("#lessonhead")).to_have_text("Training my")
        with server.http as http:  # not by the browser's clock
            job = http.get("/api/jobs").json()["jobs"][0]["id"]
            with http.stream("GET", f"/api/jobs/{job}/events") as response:
                next(data for name, data in events(response) if name == "step" and data["step"] > 1)
        expect(page.locator("#samples img")).to_have_count(1)
        expect(page.locator("#lessontold")).to_have_text(re.compile(r"step \d+ of 100000 · loss .* · rate .* left"))
        expect(page.locator("#curve polyline").first).to_have_attribute("points", re.compile(r"\d+\.\d,\d"))
        small(page)
        page.fill("#prompt", "waits")
        page.click("#draw")
        expect(page.locator("#waiting li")).to_have_text(re.compile("1.*waits.*after a training, about .*Cancel"))
        expect(page.locator("#state")).to_have_text("training, 1 waiting")
        page.keyboard.press("Escape")  # stops drawings only
        assert axe(page) == []
        page.reload()
        expect(page.locator("#curve polyline").first).to_be_visible()
        expect(page.locator("#samples img")).to_have_count(1)
        assert page.locator("#samples img").evaluate("one => one.decode().then(() => one.naturalWidth)") == 64
        page.click("#halt")
        with server.http as http:
            assert until_end(http, job)["state"] == "cancelled"
            assert until_end(http, http.get("/api/jobs").json()["jobs"][0]["id"])["state"] == "done"
        expect(page.locator("#lessonhead")).to_have_text("my was stopped; its checkpoint is kept")
        expect(page.locator("#gallery li")).to_have_count(1)
        assert (tmp_path / "t/my.run/lora.safetensors").exists()
        with server.http as http:
            body = {"kind": "training", "data": "pets", "output": "two", "steps": 2, "size": 64}
            done = until_end(http, http.post("/api/jobs", json=body).json()["id"])
            assert done["state"] == "done", done
        expect(page.locator("#toasted")).to_have_text("two is trained.")
        page.locator("#train").evaluate("one => { one.open = true; }")
        page.get_by_role("button", name="Use two").click()
        expect(page.locator("#f-lora")).to_have_value("two")
        expect(page.locator("#f-lora")).to_be_focused()
        with page.expect_download() as download:
            page.get_by_role("link", name="Download two").click()
        assert Path(download.value.path()).read_bytes() == (tmp_path / "t/two.safetensors").read_bytes()
        page.set_viewport_size(NARROW)
        one.check("400")
