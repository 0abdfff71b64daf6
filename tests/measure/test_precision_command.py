"""`qwenimg precision`: what it finds on models with known faults, what it recommends, and what it writes."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from support import overflow_models as models
from support.cli_runner import Ran, cli
from support.parity_cases import MLX, TORCH, Twin

from qwenimg import backends
from qwenimg.common.families import registry
from qwenimg.common.measure import precision
from qwenimg.common.measure.activations import ActivationObserver, BlockActivations, block_of
from qwenimg.common.measure.precision import PolicyRun, recommend
from qwenimg.common.pictures import charts
from qwenimg.common.pictures.charts import Chart, Series

BACKENDS = ("cpu", "mlx")


def measured(folder: Path, backend: str, place: Path, *more: str) -> tuple[Ran, dict[str, Any]]:
    files = [str(place / name) for name in ("a.json", "a.svg", "a.html")]
    options = ("--json", files[0], "--plot", files[1], "--html", files[2])
    ran = cli("precision", str(folder), "--backend", backend, "--size", "48x48", "--steps", "3", *options, *more)
    assert ran.code == 0, ran.err
    print(ran.out.decode())
    return ran, json.loads((place / "a.json").read_text())


def runs_of(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {run["policy"]: run for run in report["runs"]}


# Models


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_a_model_with_streams_of_fifty_million(overflowing: models.Maker, tmp_path: Path, backend: str) -> None:
    """Plain float16 ends where the fixture says; `fp16` and the others draw, in the order of their roundings."""
    ran, report = measured(overflowing("streams"), backend, tmp_path)
    runs = runs_of(report)
    assert report["reference"].startswith("fp64 on CPU") and report["shown"] == "fp32"
    assert list(report["compared"]) == ["fp64", "fp32"] and report["compared"]["fp64"].startswith("CPU (torch")
    assert runs.keys() == {"fp32", "bf16", "bf16-plain", "fp16", "fp16-upcast", "fp16-plain"}
    assert "transformer_blocks.1, operation gated, float16" in runs["fp16-plain"]["fault"]
    assert runs["fp16-plain"]["psnr"] is None and "overflow" in ran.out.decode()
    errors = {name: run["latents_error"] for name, run in runs.items() if not run["fault"]}
    assert errors["fp32"] < 1e-5 < errors["fp16"] < errors["bf16"] < errors["bf16-plain"] < 0.5
    largest = {block["name"]: block["largest"] for block in runs["fp32"]["blocks"] if block["part"] == "denoiser"}
    assert 2e7 < largest["transformer_blocks.1"] < 2e8 and largest["transformer_blocks.0"] < 1e6
    blocks = {block["name"]: block["errors"] for block in runs["bf16"]["blocks"]}
    assert all(1e-3 < blocks["transformer_blocks.2"][against] < 0.2 for against in ("fp64", "fp32"))
    exact = {(block["part"], block["name"]): block["errors"]["fp64"] for block in runs["fp32"]["blocks"]}
    print(f"float32 against float64, block by block: {min(exact.values()):.1e} to {max(exact.values()):.1e}")
    assert len(exact) > 20 and 1e-9 < max(exact.values()) < 1e-4, "of every block, in one layout on both backends"
    text = ran.out.decode()
    assert "float16 does not hold the denoiser" in text and "--preset auto chooses" in text
    assert re.search(r"recommended here: --precision (?!fp16-plain)[\w-]+, since", text)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_a_stable_diffusion_model_and_chosen_policies(folders: dict[str, Path], tmp_path: Path, backend: str) -> None:
    _, report = measured(folders["sd15"], backend, tmp_path, "--policies", "fp16,bf16")
    runs = runs_of(report)
    assert list(runs) == ["fp32", "fp16", "bf16"]
    assert runs["fp32"]["latents_error"] < runs["fp16"]["latents_error"] < runs["bf16"]["latents_error"]
    assert runs["fp32"]["weights"] > 1.7 * runs["fp16"]["weights"] > 0
    assert all(run["seconds"] > 0 and (run["peak"] is None or run["peak"] > 10_000) for run in runs.values())
    parts = {block["part"] for block in runs["fp32"]["blocks"]}
    assert parts == {"text encoder", "denoiser", "VAE"}
    names = [block["name"] for block in runs["fp32"]["blocks"] if block["part"] == "denoiser"]
    assert names.index("down_blocks.0") < names.index("mid_block.resnets.0") < names.index("up_blocks.0")


@pytest.mark.parametrize("why", ["not installed", "for the weights alone"])
@pytest.mark.sample(1)
def test_without_float64(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    if why == "not installed":
        monkeypatch.setattr(backends, "installed", lambda name: name != "cpu")
    else:
        monkeypatch.setattr(precision, "EXACT_BYTES", 1000)
    ran, report = measured(tiny_folder, "mlx", tmp_path, "--policies", "fp32")
    (line,) = [line for line in ran.err.splitlines() if "float64" in line]
    assert line.startswith("compared with float32, not float64") and why in line
    assert report["reference"] == "fp32 on CPU (mlx)" and report["compared"] == {"fp32": "CPU (mlx)"}
    assert {*report["runs"][0]["blocks"][0]["errors"].values()} == {0.0}


# What it writes


class Sources(HTMLParser):
    """Everything that a page would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [tag] if tag in ("script", "link", "img", "iframe") else []
        self.found += [name for name, _ in attrs if name in ("src", "href") or name.startswith("on")]


@pytest.mark.sample(0)
def test_the_page_holds_all_that_it_shows(overflowing: models.Maker, tmp_path: Path) -> None:
    measured(
        overflowing("streams"), "cpu", tmp_path, "--policies", "bf16,fp16-plain", "-p", "<script>alert(1)</script>"
    )
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    sources = Sources()
    sources.feed(page)
    assert sources.found == [] and "&lt;script&gt;" in page and "url(" not in page and "@import" not in page
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert (
        len(drawings) == 2
        and page.count("<h2>Blocks against fp64 on CPU") == page.count("<h2>Blocks against fp32") == 1
    )
    for drawing in drawings:
        assert len(list(ElementTree.fromstring(drawing).iter())) > 30
    assert "does not hold the denoiser" in page and "class='marked'>overflow" in page
    picture = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert picture.get("viewBox") == f"0 0 {charts.WIDTH} {2 * charts.HEIGHT}" and len(list(picture.iter())) > 60


def test_a_chart_puts_a_power_of_ten_on_its_line() -> None:
    values = [1e-3, None, 1e2, 10.0]
    chart = Chart(title="t", places=["a", "b", "c", "d"], series=[Series(name="s", values=values)], limit=(1e2, "end"))
    marks = list(ElementTree.fromstring(charts.svg(chart)).iter())
    lines = [
        (mark.get("stroke"), [point.split(",") for point in mark.get("points", "").split()])
        for mark in marks
        if mark.tag.endswith("polyline")
    ]
    across = {float(points[0][1]) for colour, points in lines if colour == charts.FAINT}
    circles = [mark for mark in marks if mark.tag.endswith("circle")][: len(values) - 1]
    dots = [(float(mark.get("cx", "")), float(mark.get("cy", ""))) for mark in circles]
    assert chart.decades() == (-3, 2) and len(across) == 6 and {y for _, y in dots} < across
    assert dots[0][1] > dots[2][1] > dots[1][1] and dots[0][0] < dots[1][0] < dots[2][0]
    own = [[float(x) for x, _ in points] for colour, points in lines if colour == charts.COLOURS[0]]
    assert [line for line in own if len(line) > 1] == [[dots[1][0], dots[2][0]]], "a gap is no line"


def test_a_chart_of_nothing_is_drawn() -> None:
    ElementTree.fromstring(charts.svg(Chart(title="nothing", places=[], series=[])))


# Its arithmetic


@pytest.mark.parametrize("twin", [TORCH, MLX], ids=["torch", "mlx"])
def test_blocks_by_hand(twin, tiny_folder: Path) -> None:
    side: Twin = twin()
    checkpoint = registry.open_model(tiny_folder).checkpoint
    seen = ActivationObserver(side.engine, checkpoint)
    first, second = "transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.to_q"
    given = {first: [1.0, -7.0, 2.0], second: [3.0, 4.0, 5.0]}  # of the last of a batch
    seen("linear", "no.such.layer", side.array(np.full(3, 9.0), "float32"))  # of no part
    for path, values in given.items():
        seen("linear", path, side.array(np.array([[0.0, 0.0, 0.0], values]), "float32"))
    seen("gated", "", side.array(np.array([[0.0, -6.0, 8.0]]), "float32"))  # of the block before it
    seen.end_of_first()
    seen("linear", first, side.array(np.array([0.0, np.inf, 8.0]), "float32"))
    seen("linear", first, side.array(np.array([1e9, 1e9, 1e9]), "float32"))
    a, b = seen.found()
    assert [block.name for block in (a, b)] == ["transformer_blocks.0", "transformer_blocks.1"]
    assert a.part == b.part == "denoiser" and a.largest == math.inf and a.at == "attn.to_q, linear"
    assert b.largest == 8.0 and b.at == "gated"
    assert a.values is not None and a.values.tolist() == given[first], "what comes after the first step is no sample"
    other = BlockActivations(part="denoiser", name="transformer_blocks.0", values=np.array([1.0, -7.0, 5.0]))
    assert a.distance(other) == pytest.approx(3 / math.sqrt(1 + 49 + 25))
    assert a.distance(None) is None and b.distance(other) == pytest.approx(math.sqrt(1 + 1 + 9) / math.sqrt(75))
    checkpoint.close()


@pytest.mark.parametrize(
    ("path", "block"),
    [
        ("transformer_blocks.3.attn.to_out.0", "transformer_blocks.3"),
        ("down_blocks.1.attentions.0.norm", "down_blocks.1"),
        ("decoder.conv_out", "decoder.conv_out"),
        ("conv_in", "conv_in"),
    ],
)
def test_the_block_of_a_path(path: str, block: str) -> None:
    assert block_of(path) == block


def run(policy: str, seconds: float, error: float, pixels: float, fault: str = "") -> PolicyRun:
    return PolicyRun(policy=policy, where="x", seconds=seconds, latents_error=error, pixels_error=pixels, fault=fault)


def test_psnr() -> None:
    """A difference of 5 in every value: 10 log10(255^2 / 25)."""
    assert run("a", 1, 0, 25.0).psnr == pytest.approx(34.1514, abs=1e-4)
    assert run("a", 1, 0, 0.0).psnr == math.inf and PolicyRun(policy="a", where="x").psnr is None


def test_recommended() -> None:
    exact, half = run("fp32", 2.0, 1e-6, 0.0), run("bf16", 1.0, 1e-2, 1.0)
    assert recommend([exact, half])[0] == "bf16", "twice as fast, and no difference to be seen"
    assert recommend([exact, run("bf16", 1.9, 1e-2, 1.0)])[0] == "fp32", "no faster to speak of"
    assert recommend([exact, run("bf16", 1.0, 0.3, 100.0)])[0] == "fp32", "28 dB is another picture"
    assert recommend([exact, run("bf16", 1.0, 1e-2, 1.0, fault="does not fit")])[0] == "fp32"
    assert recommend([exact, run("fp16-plain", 0.5, 1e-3, 0.1)])[0] == "fp32", "one picture proves no range"
    assert recommend([run("bf16", 1.0, 0.3, 100.0), run("fp16", 2.0, 0.2, 90.0)])[0] == "fp16"
    assert recommend([run("fp32", 1.0, 0, 0, fault="x")]) == ("", "no policy gave a picture here")


# Refused


def test_refused_before_anything_is_drawn(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("mine")
    model = ("precision", str(tiny_folder), "--backend", "cpu")
    cli(*model, "--json", str(tmp_path / "a.json")).refused(2, "a.json")
    cli(*model, "--policies", "fp16,int3").refused(2, "'int3' is not one of", "fp16-upcast")
    cli(*model, "--size", "axb").refused(2, "axb")
    cli(*model, "--size", "4000000x4000000").refused(2, "4000000")
    cli("precision", str(tmp_path / "nowhere"), "--backend", "cpu").refused(5, "nowhere")
    assert (tmp_path / "a.json").read_text() == "mine"


def test_a_model_is_opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []
    original = registry.open_model
    monkeypatch.setattr(registry, "open_model", lambda *args: [opened.append(args), original(*args)][1])
    assert (
        cli("precision", "shapes", "--size", "64", "--steps", "3", "--policies", "bf16", "--backend", "cpu").code == 0
    )
    assert len(opened) == 1
