"""`qwenimg edit` and `qwenimg inpaint`: an ordinary run by other words."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants
from PIL import Image
from support.cli_runner import Library, cli

from qwenimg.backends.paper import on_paper
from qwenimg.cli import config, editing
from qwenimg.common.families import catalog
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.hub import forecast, listing
from qwenimg.common.hub.forecast import NO_MODELS
from qwenimg.common.hub.open_model import plan_pipeline
from qwenimg.common.pipeline.models.flow_model import FlowModel
from qwenimg.common.precision.machines import machine


@pytest.fixture
def pictures(library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    """Two pictures and a mask in the working folder, and an empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("a.png", "b b.jpg", "mask.png"):
        Image.new("RGB", (32, 32), "white").save(name)
    return library


def here(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(listing, "is_here", lambda name: name in names)


@pytest.mark.parametrize(
    ("args", "plain"),
    [
        (["edit", "a.png", "make it night"], ["-i", "a.png", "make it night"]),
        (["edit", "make it night", "a.png"], ["-i", "a.png", "make it night"]),
        (["edit", "a.png", "b b.jpg", "-s", "7", "x y"], ["-i", "a.png", "-i", "b b.jpg", "-s", "7", "x y"]),
        (["-s", "7", "edit", "a.png", "info"], ["-i", "a.png", "-s", "7", "-p", "info"]),
        (["edit", "a.png", "-p", "-4 degrees"], ["-i", "a.png", "-p", "-4 degrees"]),
        (["edit", "-i", "a.png", "night"], ["-i", "a.png", "night"]),
        (["edit", "a.png", "--", "--night"], ["-i", "a.png", "--", "--night"]),
        (["inpaint", "a.png", "mask.png", "a door"], ["-i", "a.png", "--mask", "mask.png", "a door"]),
        (["inpaint", "a.png", "a door", "--mask", "mask.png"], ["-i", "a.png", "--mask", "mask.png", "a door"]),
        (["inpaint", "-i", "a.png", "mask.png", "a door"], ["-i", "a.png", "--mask", "mask.png", "a door"]),
    ],
)
def test_it_is_the_ordinary_run(pictures: Library, args: list[str], plain: list[str]) -> None:
    for number, command in enumerate((args, plain)):
        end = command.index("--") if "--" in command else len(command)
        ran = cli(*command[:end], "-m", "some/where", "-s", "7", "-o", f"{number}.png", *command[end:])
        assert ran.code == 0, ran
    edited, drawn = (pipe.asked for pipe in pictures.pipes)
    shown = [[{k: str(v) for k, v in one.items()} for one in asked] for asked in (edited, drawn)]
    assert shown[0] == shown[1] and pictures.calls[0] == pictures.calls[1]


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["edit"], 2, "edit takes a picture"),
        (["edit", "make it night"], 2, "edit takes a picture"),
        (["edit", "a.png"], 2, "no text"),
        (["edit", "photo", "make it night"], 2, "'photo' is no picture"),
        (["edit", "a.png", "make", "it", "night"], 2, "one text is expected"),
        (["edit", "a.png", "x", "-p", "y"], 2, "two prompts"),
        (["edit", "gone.png", "x"], 5, "gone.png"),
        (["inpaint", "a.png", "x"], 2, "a picture and its mask"),
        (["inpaint", "a.png", "gone.png", "x"], 5, "gone.png"),
        (["edit", *["a.png"] * 30, "x"], 2, "more than 19 words"),
        (["edit", "a\0.png", "x"], 2, "is no picture"),
        (["edit", "a.png", " "], 2, "no text"),
        (["edit", "a.png", "x", "--quux"], 2, "--help-all"),
        (["edit", "a.png", "x", "--steps"], 2, "--steps"),
        (["edit", "\udcff.png", "x"], 5, ".png"),
        (["edit", "a.png", "x", "--backend", "metal"], 2, "mlx"),
    ],
)
def test_what_cannot_be(
    pictures: Library, monkeypatch: pytest.MonkeyPatch, args: list[str], code: int, said: str
) -> None:
    here(monkeypatch, "flux2-klein-4b")
    cli(*args).refused(code, said)
    assert not pictures.calls


def test_help_is_that_of_a_run(library: Library) -> None:
    for word in editing.USAGE:
        shown = cli(word, "--help").out
        assert shown.startswith(f"Usage: qwenimg {word} PICTURE".encode()) and shown.endswith(cli("--help").out)


@pytest.mark.parametrize("model", ["flux2-klein-4b", "qwen-image-edit-2511"])
def test_the_model_that_is_here_is_taken(pictures: Library, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    here(monkeypatch, model, "sdxl")
    assert cli("edit", "a.png", "night").code == 0
    assert cli("inpaint", "a.png", "mask.png", "night", "-m", "sd15").code == 0
    assert cli("inpaint", "a.png", "mask.png", "night").code == 0
    inpainter = model if model in catalog.INPAINTERS else "sdxl"
    named = [call["model"] for call in pictures.calls]
    assert named[:2] == [model, "sd15"] and named[2] in (inpainter, "sdxl")


def test_the_model_that_the_environment_or_the_file_names_is_taken(
    pictures: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    here(monkeypatch, "flux2-klein-4b")
    monkeypatch.setattr(config, "defaults", lambda: {"model": "flux-kontext"})
    assert cli("edit", "a.png", "night").code == 0
    monkeypatch.setenv("QWENIMG_MODEL", "qwen-image-edit")
    assert cli("edit", "a.png", "night").code == 0
    assert [call["model"] for call in pictures.calls] == ["flux-kontext", "qwen-image-edit"]


def test_without_a_model_it_says_which_to_pull(pictures: Library) -> None:
    for args in (["edit", "a.png", "night"], ["inpaint", "a.png", "mask.png", "night"]):
        ran = cli(*args)
        ran.refused(5, "is here; get one: qwenimg pull ")
        names = catalog.EDITORS if args[0] == "edit" else catalog.INPAINTERS
        assert ran.err.partition("qwenimg pull ")[2].split()[0] in names
    assert not pictures.calls


def test_of_several_that_are_here_one_that_fits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch, "qwen-image-edit-2511", "flux2-klein-4b")
    chosen = {
        (name, options.get("quantize")): forecast.editor(
            False, lambda name=name: on_paper("auto", None, machine(name)), options
        )
        for name in ("3060", "4090", "h100")
        for options in ({}, {"quantize": "4"})
    }
    print(chosen)
    assert chosen["h100", None] == chosen["4090", "4"] == "qwen-image-edit-2511"
    assert chosen["3060", None] == "flux2-klein-4b"


@pytest.mark.sample(1)
def test_the_editors_are_the_models_that_see_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the inputs of their networks; Layered, which takes one apart, is none of them. Messages name the models that
    see several, and the one that describes a picture."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    engine, seeing, several = on_paper("cuda", 80 * 10**9, machine("h100")), set[str](), set[str]()
    for known in catalog.KNOWN.values():
        if known.name in (*NO_MODELS, "shapes-v1"):
            continue
        with closing(plan_pipeline(LoadOptions(model=known.name), engine)[0]) as pipe:
            assert (pipe.model.inputs.describe is not None) == (known.name == catalog.DESCRIBING)
            several |= {known.name} if pipe.model.inputs.most > 1 else set()
            if known.name in (catalog.DESCRIBING, "flux-fill") or not pipe.model.inputs.most:
                continue
            needed = pipe.model.inputs.placeholder() | ({"steps": 4} if known.name == "sdxl-turbo" else {})
            request = pipe.check("x", **needed | {"image": np.zeros((64, 64, 3), np.uint8)})
            if isinstance(pipe.model, FlowModel) and pipe.model.reference_shapes(request):
                seeing.add(known.name)
    see_one = {"qwen-image-edit", "flux-kontext", "longcat-image-edit"}
    assert seeing == {*catalog.EDITORS} and several == seeing - see_one
    assert all(name in catalog.SEVERAL for name in ("-edit-2511", "-2509", "qwen-image-2.1", "FLUX.2 and FLUX.3 klein"))
    assert {*catalog.INPAINTERS} <= catalog.KNOWN.keys()
