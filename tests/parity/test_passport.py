"""Passports: recorded with one backend and checked with the other, and files that are damaged, foreign or hostile."""

from __future__ import annotations

import html.parser
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
from support.cli_runner import Ran, cli
from support.lora_cases import write_lora
from support.policies import FP32
from support.refusals import refused, safetensors_bytes, tensor

import qwenimg
from qwenimg import backends
from qwenimg.common.families import registry
from qwenimg.common.parity import report
from qwenimg.common.parity.blocks import parts
from qwenimg.common.parity.check import blocks as check_blocks
from qwenimg.common.parity.passport import passport_file
from qwenimg.common.parity.passport.passport import Figure, Passport, RecordedResult
from qwenimg.common.parity.record import BlockRecorder, Trace
from qwenimg.common.parity.sample import PROJECTIONS, Drawn, drawn_like, projected
from qwenimg.common.runtime.traced import Values, leaves

LAYERS_OF_LORA = {"whole", "img_in", "norm_out", "proj_out", "transformer_blocks"}
QUICK = ("--steps", "1", "--size", "32x32")


def record(folder: Path, name: str, *options: str) -> Path:
    path = folder / f"{name}.safetensors"
    ran = cli("parity", "record", *QUICK, *options, "-o", str(path))
    assert ran.code == 0 and ran.paths == [path], ran
    print(ran.err)
    return path


def check(path: Path, *options: str) -> Ran:
    ran = cli("parity", "check", str(path), *options, "--json")
    print(ran.err)
    return ran


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model, on torch."""
    return record(tmp_path_factory.mktemp("shapes"), "shapes", "--backend", "cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A folder's, by MLX, with what is kept of a large one."""
    folder = tmp_path_factory.mktemp("tiny")
    return record(folder, "tiny", str(tiny_folder), "--backend", "mlx", "--sampled", "--steps", "2")


# Round trips


@pytest.mark.sample(0)
def test_what_torch_recorded_holds_on_mlx(shapes: Path) -> None:
    ran = check(shapes, "--backend", "mlx")
    (found,) = ran.events
    assert ran.code == 0 and found["ok"] and found["backend"] == "mlx" and found["changed"] == []
    names = [block["name"] for block in found["blocks"]]
    assert len(names) == len(set(names)) > 50
    parts = {name.partition(".")[0] for name in names}
    assert parts == {"text_encoder", "transformer", "vae"} and {"vae.encode", "vae.decode"} <= set(names)
    worst = max(r["error"] / r["allowed"] for block in found["blocks"] for r in block["results"])
    print(f"worst {worst:.2f} of what is allowed; picture {found['picture']}")
    assert 0.1 < worst < 1 and found["picture"]["latents"] < 1e-4 and found["picture"]["pixels"] <= 2


@pytest.mark.sample(0)
def test_what_mlx_recorded_holds_on_torch(tiny: Path, tiny_folder: Path) -> None:
    ran = check(tiny, str(tiny_folder), "--backend", "cpu")
    assert ran.code == 0 and ran.events[0]["ok"]
    assert tiny.stat().st_size < 300_000, "projections, and not what was computed"


@pytest.mark.sample(0)
def test_a_stable_diffusion_model_in_16_bit(folders: dict[str, Path], tmp_path: Path) -> None:
    model = str(folders["sd15"])
    path = record(tmp_path, "sd", model, "--backend", "cpu", "--precision", "bf16", "--sampled")
    ran = check(path, model, "--backend", "mlx", "--blocks")
    (found,) = ran.events
    assert ran.code == 0 and found["picture"] is None
    dtypes = {block["name"]: block["dtype"] for block in found["blocks"]}
    assert dtypes["unet.conv_out"] == "float32" and dtypes["unet.mid_block.attentions.0"] == "bfloat16"


@pytest.mark.sample(0)
def test_weights_in_codes(tmp_path: Path) -> None:
    path = record(tmp_path, "q4", "--backend", "cpu", "--precision", "bf16", "-q", "4", "--sampled")
    ran = check(path, "--backend", "mlx", "--blocks")
    assert ran.code == 0 and passport_file.read(path).model.quantize == "4"


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(0)
def test_a_prompt_that_makes_roundings_grow(tmp_path: Path, backend: str) -> None:
    """In a text layer they make 3.8 u on torch and 4.6 on MLX; with other prompts 2.6."""
    options = ("--backend", backend, "--precision", "bf16", "--steps", "1", "--prompt", "two (yellow:1.3) hearts")
    record(tmp_path, "grown", *options)


# Parts and LoRAs


class Given(NamedTuple):
    """A passport that was recorded with a LoRA and another VAE, and what it was recorded with."""

    passport: Path
    options: dict[str, str]

    def check(self, *more: str, **others: str) -> Ran:
        """With the same but for `others`; "" is left out."""
        said = [word for name, text in (self.options | others).items() if text for word in (f"--{name}", text)]
        return cli("parity", "check", str(self.passport), *said, *more)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Given:
    folder = tmp_path_factory.mktemp("given")
    scaled(tiny_folder / "vae", folder / "other", "decoder.conv_in.weight", 1.1)
    lora = write_lora(tiny_folder, "qwen", folder / "style.safetensors")
    write_lora(tiny_folder, "qwen", folder / "another.safetensors", seed=1)
    options = {"lora": f"{lora}:0.7", "vae": str(folder / "other")}
    said = [word for name, text in options.items() for word in (f"--{name}", text)]
    return Given(record(folder, "given", str(tiny_folder), *said, "--backend", "cpu", "--precision", "bf16"), options)


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(0)
def test_a_lora_and_another_vae(given: Given, tiny_folder: Path, backend: str) -> None:
    """Without the LoRA only the blocks that it is in fall short."""
    model = passport_file.read(given.passport).model
    assert model.lora == "style.safetensors:0.7" and model.parts == {"vae": "other"}
    assert bytes(tiny_folder) not in given.passport.read_bytes() and b"given0" not in given.passport.read_bytes()
    assert given.check(str(tiny_folder), "--backend", backend).code == 0
    pipe = qwenimg.load(tiny_folder, backend, "bf16", vae=given.options["vae"])
    judged = check_blocks(passport_file.read(given.passport), pipe)
    short = [one.name for one in judged if one.failures]
    print(short)
    assert short and {name.rpartition("transformer.")[2].partition(".")[0] for name in short} <= LAYERS_OF_LORA
    pipe.close()


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(0)
def test_a_lora_beside_weights_of_scaled_products(tiny_folder: Path, tmp_path: Path, backend: str) -> None:
    """Its factors stay in float32, in float64 and wide blocks too, which are called twice."""
    lora = ("--lora", str(write_lora(tiny_folder, "qwen", tmp_path / "style.safetensors")))
    options = ("--backend", "cpu", "--precision", "fp16", "--steps", "1", "--lora-mode", "side")
    path = record(tmp_path, "side", str(tiny_folder), *options, *lora)
    ran = check(path, str(tiny_folder), "--backend", backend, "--blocks", *lora)
    assert ran.code == 0, ran.events[0]["verdict"]


@pytest.mark.parametrize(
    ("more", "others", "code", "words"),
    [
        ((), {"lora": ""}, 2, "was recorded with --lora style.safetensors:0.7; give the same"),
        ((), {"vae": ""}, 2, "was recorded with --vae other; give the same"),
        (("--transformer", "x.safetensors"), {}, 2, "was recorded without --transformer; leave it out"),
        (("-q", "8"), {}, 2, "was recorded without -q; leave it out"),
        ((), {"lora": "{folder}/style.safetensors:0.5"}, 5, "another file or strength than was recorded"),
        ((), {"lora": "{folder}/another.safetensors:0.7"}, 5, "another file or strength than was recorded"),
        ((), {"vae": "{tiny}/vae"}, 5, "--vae: these weights are not those of other"),
    ],
)
@pytest.mark.sample(0)
def test_another_lora_or_part(
    given: Given, tiny_folder: Path, more: tuple[str, ...], others: dict[str, str], code: int, words: str
) -> None:
    places = {name: text.format(folder=given.passport.parent, tiny=tiny_folder) for name, text in others.items()}
    given.check(str(tiny_folder), *more, **places).refused(code, words)


@pytest.mark.sample(0)
def test_both_in_one_process_and_the_figures_of_both_are_kept(tiny_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "both.safetensors"
    ran = cli("parity", "run", str(tiny_folder), "-o", str(path), *QUICK)
    assert ran.code == 0 and b"the whole picture" in ran.out and "comparing mlx, cpu" in ran.err
    sides = passport_file.read(path).sides
    assert [side.backend for side in sides] == ["mlx", "cpu"]
    assert len(sides[0].figures) == len(sides[1].figures) > 20


@pytest.mark.sample(0)
def test_a_check_adds_its_figures_once(tiny: Path, tiny_folder: Path, tmp_path: Path) -> None:
    path = tiny
    for name in ("a.safetensors", "b.safetensors"):
        assert check(path, str(tiny_folder), "--backend", "cpu", "--blocks", "-o", str(tmp_path / name)).code == 0
        path = tmp_path / name
    assert [side.backend for side in passport_file.read(path).sides] == ["mlx", "cpu"]


# What falls short


def scaled(folder: Path, copy: Path, key: str, factor: float) -> Path:
    """A copy of the folder with one tensor off by `factor`."""
    shutil.copytree(folder, copy)
    for file in copy.rglob("*.safetensors"):
        tensors = safetensors.torch.load_file(file)
        if key in tensors:
            safetensors.torch.save_file(tensors | {key: factor * tensors[key]}, file, {"format": "pt"})
    return copy


@pytest.mark.sample(0)
def test_a_weight_off_by_one_per_cent(tiny: Path, tiny_folder: Path, tmp_path: Path) -> None:
    wrong = scaled(tiny_folder, tmp_path / "wrong", "transformer_blocks.1.attn.to_v.weight", 1.01)
    ran = check(tiny, str(wrong), "--backend", "cpu", "--blocks")
    assert ran.code == 6 and not ran.events[0]["ok"]
    *_, line = ran.err.splitlines()
    assert "transformer.transformer_blocks.1 is the first of 1 block" in line and "not those that were recorded" in line


@pytest.mark.sample(0)
def test_other_levels_of_noise(tiny: Path, tiny_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_folder, tmp_path / "wrong")
    config = tmp_path / "wrong" / "scheduler" / "scheduler_config.json"
    data = json.loads(config.read_text())
    config.write_text(json.dumps(data | {"shift_terminal": None}))
    ran = check(tiny, str(tmp_path / "wrong"), "--backend", "cpu")
    assert ran.code == 6 and "the noise levels are others" in ran.err


@pytest.mark.sample(0)
def test_another_model(tiny: Path, shapes: Path, folders: dict[str, Path], tiny_folder: Path) -> None:
    for path, other in ((tiny, "shapes"), (shapes, str(tiny_folder)), (tiny, str(folders["sd15"]))):
        cli("parity", "check", str(path), other, "--backend", "cpu").refused(5, "is another model")
    cli("parity", "check", str(tiny), "--backend", "cpu").refused(5, "recipe opens no path")


# Files


def test_a_passport_is_plain_safetensors(shapes: Path) -> None:
    tensors = safetensors.numpy.load_file(shapes)
    assert len(tensors) > 100 and tensors["t1"].dtype == np.uint8


@pytest.mark.sample(0)
def test_writing_what_was_read_gives_the_same_bytes(shapes: Path, tiny: Path) -> None:
    for path in (shapes, tiny):
        assert passport_file.encoded(passport_file.read(path)) == path.read_bytes()


def test_every_flipped_bit_is_refused(tiny: Path, tmp_path: Path) -> None:
    data = tiny.read_bytes()
    path = tmp_path / "flipped.safetensors"
    rng = np.random.default_rng(0)
    for place in [9, 20, *rng.integers(8, len(data), 40).tolist()]:
        spoiled = bytearray(data)
        spoiled[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(spoiled)
        refused(passport_file.read, path)


@pytest.mark.parametrize("length", [0, 7, 100, 5000, -1])
def test_truncated(tiny: Path, tmp_path: Path, length: int) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes(tiny.read_bytes()[:length])
    cli("parity", "check", str(path)).refused(5, "cut.safetensors")


RELEASED = sorted((Path(__file__).parent.parent / "data").glob("parity-*.safetensors"))


@pytest.mark.parametrize("path", RELEASED, ids=lambda path: path.stem)
def test_every_released_passport_is_read_for_ever(path: Path) -> None:
    found = passport_file.read(path)
    passport_file.needs_exact(path, found)
    assert found.model.name.startswith("shapes") and found.precision == "fp32" and len(found.blocks) > 50
    assert found.sides[0].backend == "cpu" and all(found.sides[0].figures)
    assert passport_file.encoded(found) == path.read_bytes()


@pytest.mark.sample(0)
def test_the_last_released_one_holds_here() -> None:
    for backend in ("cpu", "mlx"):
        assert check(RELEASED[-1], "--backend", backend, "--blocks").code == 0


class Page(html.parser.HTMLParser):
    """The text of a page, and what it would fetch or run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.foreign: list[str] = []
        self.feed(text)
        assert not self.open, "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open += [] if tag == "meta" else [tag]
        self.foreign += [tag] if tag in ("script", "link", "img", "iframe") else []
        self.foreign += [name for name, _ in attrs if name in ("src", "href") or name.startswith("on")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.mark.sample(0)
def test_a_report_of_two_precisions_on_two_backends(shapes: Path, tmp_path: Path) -> None:
    check(shapes, "--backend", "mlx", "--blocks", "-o", str(tmp_path / "fp32.safetensors"))
    found = passport_file.read(tmp_path / "fp32.safetensors")
    bad = Figure(error=9.0, allowed=2.0, failures=("error 9 u, at most 2 u",))
    evil = replace(found.sides[0], device="<script>x</script>\x1b", figures=((bad,), *found.sides[0].figures[1:]))
    other = replace(found, precision="bf16", sides=(evil, replace(found.sides[1], figures=())))
    passport_file.write(tmp_path / "bf16.safetensors", other, overwrite=False)
    page, names = tmp_path / "page.html", ("fp32", "bf16")
    ran = cli("parity", "report", *(str(tmp_path / f"{name}.safetensors") for name in names), "-o", str(page))
    assert ran.code == 0 and ran.paths == [page, tmp_path / "page.svg"]
    parsed = Page(page.read_text())
    assert parsed.foreign == [] and "\x1b" not in page.read_text()
    words = parsed.words
    assert words.count("all within limits") == 2 and words.count("1 block over the limit") == 1
    assert {"fp32", "bf16", "cpu", "mlx", "no float64", "vae.decode", *bad.failures} <= set(words)
    one, other = (side.figures[1][0] for side in found.sides)
    assert {f"{one.error:.2f} of {one.allowed:.1f}"} <= set(words)
    assert f"{other.error:.2f} of {other.allowed:.1f} ({other.error / one.error:.2f})" in words
    picture = ElementTree.parse(tmp_path / "page.svg").getroot()
    colours = [mark.get("fill", "") for mark in picture.iter()]
    for colour, cells in ((report.FAILED, 1), (report.UNKNOWN, len(found.blocks))):
        assert colours.count(f"rgb{colour}") == cells + 1, "and one in the key"
    assert {"fp32", "bf16", "vae.decode", "9.00 of 2.0"} <= {mark.text for mark in picture.iter()}
    cli("parity", "report", str(shapes), "-o", str(page)).refused(2, "exists already")
    assert cli("parity", "report", str(tmp_path / "bf16.safetensors")).paths == [
        tmp_path / f"bf16.{e}" for e in ("html", "svg")
    ]


def test_a_report_of_two_models(shapes: Path, tiny: Path, tmp_path: Path) -> None:
    page = str(tmp_path / "a.html")
    cli("parity", "report", str(shapes), str(tiny), "-o", page).refused(2, "two models")
    cli("parity", "report", str(shapes), "-o", str(tmp_path / "a.png")).refused(2, ".html")


def hostile(change: Callable[[dict[str, Any]], object], folder: Path) -> Path:
    """A passport with a right sum over what was changed in it."""
    document: dict[str, Any] = {
        "version": "0", "created": "", "precision": "fp32", "places": {}, "blocks": [block(results=[KEPT])],
        "sides": [{"backend": "cpu", "device": "", "versions": {}, "tf32": False, "figures": []}],
        "model": {"name": "shapes", "family": "qwen-image", "quantize": "", "fingerprints": {}, "shapes": {}},
        "picture": None,
    }  # fmt: skip
    change(document)
    table, text = {"t0": tensor([1], 0, 4)}, json.dumps(document)
    metadata = {"format": "qwenimg-parity", "schema": "1", "passport": text}
    metadata["sha256"] = passport_file._sum(text, table, bytes(4))
    path = folder / "hostile.safetensors"
    path.write_bytes(safetensors_bytes({"__metadata__": metadata, **table}, bytes(4)))
    return path


def block(**fields: Any) -> dict[str, Any]:
    known = {"component": "vae", "block": "end", "path": "quant_conv", "name": "vae.quant_conv"}
    return known | {"arguments": [], "results": [], "operations": {}} | fields


DRAWN = {"dtype": "float32", "shape": [4, 4], "seed": 1, "axis": -1, "rms": 1.0, "channels": []}
KEPT = {"dtype": "float32", "shape": [1], "seed": None, "gain": 1.0, "values": "t0", "lacks": "t0"}
HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "no blocks": lambda d: d.pop("blocks"),
    "blocks that are a number": lambda d: d.update(blocks=3),
    "a model that is a text": lambda d: d.update(model="shapes"),
    "a model of other fields": lambda d: d["model"].update(shell="rm"),
    "a tensor that is not there": lambda d: d.update(blocks=[block(results=[KEPT | {"values": "t9"}])]),
    "too much to draw": lambda d: d.update(blocks=[block(arguments=[{"drawn": DRAWN | {"shape": [10**6, 10**6]}}])]),
    "a seed that is a text": lambda d: d.update(blocks=[block(arguments=[{"drawn": DRAWN | {"seed": "1"}}])]),
    "a result of another shape": lambda d: d.update(blocks=[block(results=[KEPT | {"shape": [3]}])]),
    "deep": lambda d: d.update(places=json.loads("[" * 40 + "]" * 40)),
    "a place that is a number": lambda d: d.update(places={"vae": 3}),
}


@pytest.mark.parametrize("change", HOSTILE)
def test_hostile(tmp_path: Path, change: str) -> None:
    refused(passport_file.read, hostile(HOSTILE[change], tmp_path))


def test_the_hostile_ones_are_right_but_for_that(tmp_path: Path) -> None:
    found = passport_file.read(hostile(lambda d: None, tmp_path))
    assert isinstance(found, Passport) and found.blocks[0].name == "vae.quant_conv"


def test_other_files(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors_bytes({"a": tensor([1], 0, 4)}, b"1234"))
    assert "is no parity passport" in refused(passport_file.read, path)
    metadata = {"format": "qwenimg-parity", "schema": "2\x1b"}
    path.write_bytes(safetensors_bytes({"__metadata__": metadata}))
    assert "schema 2" in refused(passport_file.read, path)
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path, tmp_path / "pipe", tmp_path / "none", Path(__file__)):
        cli("parity", "check", str(other)).refused(5, other.name)


@pytest.mark.sample(0)
def test_a_block_that_is_not_there_and_arguments_that_do_not_fit(tiny: Path, tiny_folder: Path, tmp_path: Path) -> None:
    found = passport_file.read(tiny)
    one = next(recorded for recorded in found.blocks if recorded.name == "vae.quant_conv")
    path = tmp_path / "a.safetensors"
    found = replace(found, sides=tuple(replace(side, figures=()) for side in found.sides), run=())
    for wrong in (
        replace(one, path="quant_conv_2"),
        replace(one, block="resnet"),
        replace(one, component="unet"),
    ):
        passport_file.write(path, replace(found, blocks=(wrong,)), overwrite=True)
        for backend in ("cpu", "mlx"):
            cli("parity", "check", str(path), str(tiny_folder), "--backend", backend).refused(
                5, "is not in the model: record it again"
            )
    for wrong, why in (
        (replace(one, arguments=()), "is computed in other shapes than when it was recorded"),
        (replace(one, arguments=(Values("float32", np.ones((3, 5), np.float32)),)), "is computed in other shapes"),
        (replace(one, results=one.results * 2), "gives 1 result, recorded 2"),
    ):
        passport_file.write(path, replace(found, blocks=(wrong,)), overwrite=True)
        for backend in ("cpu", "mlx"):
            ran = check(
                path, str(tiny_folder), "--backend", backend, "-o", str(tmp_path / "b.safetensors"), "--overwrite"
            )
            assert ran.code == 6 and why in ran.err and "record it again" not in ran.err
            assert why in str(passport_file.read(tmp_path / "b.safetensors").sides[-1].figures)


@pytest.mark.parametrize("token", [10**4, 2**40, -1, -(2**62)])
@pytest.mark.sample(1)
def test_token_ids_that_are_in_no_table(shapes: Path, tmp_path: Path, token: int) -> None:
    """MLX looked them up wherever they pointed, and the process ended there."""
    found = passport_file.read(shapes)
    i, whole = next((i, one) for i, one in enumerate(found.blocks) if one.name == "text_encoder.whole")
    ids = whole.arguments[0]
    assert isinstance(ids, Values) and ids.dtype == "int64"
    wrong = replace(whole, arguments=(Values("int64", np.full_like(ids.array, token)), *whole.arguments[1:]))
    sides = tuple(replace(side, figures=(side.figures[i],)) for side in found.sides)
    path = tmp_path / "a.safetensors"
    passport_file.write(path, replace(found, blocks=(wrong,), sides=sides), overwrite=False)
    for backend in ("cpu", "mlx"):
        cli("parity", "check", str(path), "--backend", backend, "--blocks").refused(5, "do not fit it")


@pytest.mark.sample(0)
def test_without_float64(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without torch."""
    model = str(tiny_folder)
    monkeypatch.setattr(backends, "installed", lambda name: name.startswith("mlx"))
    cli("parity", "run").refused(2, "needs float64")
    path = tmp_path / "a.safetensors"
    ran = cli("parity", "record", model, "--backend", "mlx", "--sampled", "-o", str(path), *QUICK)
    assert ran.code == 0 and "float64 is not recorded" in ran.err
    cli("parity", "check", str(path), model, "--backend", "mlx").refused(5, "without float64")
    cli("parity", "run", model, "--backends", "mlx,mlx", *QUICK).refused(2, "needs float64")


def test_one_backend_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "available", lambda: {"mlx": f"{backends.MISSING}none", "cpu": "here"})
    cli("parity", "run").refused(2, "this machine has cpu")


def test_usage(tmp_path: Path) -> None:
    cli("parity", "run", "--backends", "mlx").refused(2, "two or more")
    cli("parity", "run", "--backends", "mlx,tpu").refused(2, "'tpu'")
    cli("parity", "record", "-o", "a.png").refused(2, ".safetensors")
    cli("parity", "run", "--backends", "mlx:gpu,cpu").refused(3, "no GPU here")
    there = tmp_path / "a.safetensors"
    there.touch()
    cli("parity", "record", "-o", str(there)).refused(2, "exists already")


# What stands for arrays


def test_projections_are_right_to_a_few_per_cent() -> None:
    """64 of them: a squared length has a relative deviation of sqrt(2/64)."""
    rng = np.random.default_rng(1)
    arrays = [rng.normal(size=3000) for _ in range(40)]
    ratios = [float(np.sum(projected(x, seed) ** 2) / np.sum(x**2)) for seed, x in enumerate(arrays)]
    print(f"mean {np.mean(ratios):.3f}, deviation {np.std(ratios):.3f}")
    assert abs(np.mean(ratios) - 1) < 4 * 0.177 / 40**0.5 and 0.1 < np.std(ratios) < 0.26
    one = np.zeros((30, 40))
    one[3, 4] = -5.0
    assert np.allclose(np.abs(projected(one, 3)), 5 / PROJECTIONS**0.5), "one wrong element shows as much as all"


def test_what_is_drawn_has_the_outliers_of_what_it_stands_for() -> None:
    rng = np.random.default_rng(2)
    hot = rng.normal(size=(2, 50, 64)).astype(np.float32)
    hot[..., 7] = 300 + 20 * hot[..., 7]
    found = drawn_like(Values("bfloat16", hot), 3)
    assert isinstance(found, Drawn) and [channel for channel, _, _ in found.channels] == [7]
    made = found.values()
    assert made.dtype == "bfloat16" and made.array.shape == hot.shape
    assert abs(made.array[..., 7].mean() - 300) < 10 and 10 < made.array[..., 7].std() < 30
    assert abs(np.delete(made.array, 7, axis=-1).std() - 1) < 0.05
    assert made.array.tobytes() == found.values().array.tobytes()
    image = drawn_like(Values("float32", np.moveaxis(hot[..., None], 2, 1)), 3, 1)
    assert image is not None and [channel for channel, _, _ in image.channels] == [7]
    assert drawn_like(Values("int64", np.ones((9, 9), np.int64)), 3) is None


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_a_trace_costs_nothing_where_nobody_looks(backend: str, tiny_folder: Path) -> None:
    """The forwards know nothing of it: only the modules of a component that is watched are others."""
    engine = backends.load(backend)
    checkpoint = registry.open_model(tiny_folder).checkpoint
    part = parts(checkpoint, FP32)["transformer"]
    plain, watched = (engine.open(part.component.network, part.component.config, part.plan, FP32) for _ in range(2))
    engine.watch(watched, part.network.traced, BlockRecorder(Trace(checkpoint, 1, {}), "transformer"))
    own = sys.modules[type(plain).__module__].TransformerBlock
    assert type(plain.model.transformer_blocks[0]) is own
    assert type(watched.model.transformer_blocks[0]) is not own and isinstance(watched.model.transformer_blocks[0], own)
    assert "traced" not in Path(sys.modules[own.__module__].__file__ or "").read_text()


def test_float64_is_kept_beside_the_result(shapes: Path) -> None:
    """What is kept of it loses nothing that could be seen beside an error of one roundoff of float32."""
    for recorded in passport_file.read(shapes).blocks:
        for kept in recorded.results:
            assert isinstance(kept, RecordedResult) and kept.exact is not None and kept.exact.dtype == np.float64
            assert 1 <= kept.gain < 100
        assert leaves(tuple(given for given in recorded.arguments if not isinstance(given, Drawn)))
