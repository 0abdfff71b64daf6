"""Words that people give as the network of --control: the message names a known network for the model and the kind of
picture, and how to get it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cli_runner import cli
from support.rules import ROOT

from qwenimg import Pipeline
from qwenimg.backends.paper import on_paper
from qwenimg.common.base.errors import ModelError, QwenimgError
from qwenimg.common.families import catalog
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.hub import network_search
from qwenimg.common.hub.model_folders import read_folders
from qwenimg.common.hub.open_model import plan_pipeline
from qwenimg.common.precision.machines import machine

PICTURE = str(ROOT / "docs" / "pictures" / "edges.png")
POSE = [
    "openpose",
    "pose",
    "dwpose",
    "control_v11p_sd15_openpose",
    "OpenPose",
    "controlnet-openpose",
    "t2i-adapter-openpose",
]
MODELS = ("sd15", "sdxl", "qwen-image", "z-image-turbo")


@pytest.fixture(scope="module")
def pipes() -> Iterator[dict[str, Pipeline]]:
    engine = on_paper("cuda", 80 * 10**9, machine("h100"))
    found = {name: plan_pipeline(LoadOptions(model=name), engine, published=True)[0] for name in MODELS}
    yield found
    for pipe in found.values():
        pipe.close()


def _message(pipe: Pipeline, name: str) -> str:
    with pytest.raises(ModelError) as caught:
        pipe.check("x", control=f"{name}={PICTURE}")
    line = str(caught.value)
    assert len(line) < 300 and line.startswith(f"--control {name}: no such file or folder; "), line
    return line


@pytest.mark.parametrize(("model", "use", "size"), [
    ("sd15", "sd15-controlnet-openpose=PICTURE", "1.4 GB"),
    ("sdxl", "sdxl-controlnet-union=openpose@PICTURE", "2.5 GB"),
    ("qwen-image", "qwen-image-controlnet-union=PICTURE", "3.5 GB"),
    ("z-image-turbo", "z-image-controlnet-union=PICTURE", "6.7 GB"),
])  # fmt: skip
def test_a_kind_of_picture_is_answered_with_its_network(
    pipes: dict[str, Pipeline], model: str, use: str, size: str
) -> None:
    network = use.partition("=")[0]
    for name in POSE:
        assert _message(pipes[model], name).endswith(f"give --control {use}, after: qwenimg pull {network} ({size})")


@pytest.mark.parametrize(("model", "name", "use"), [
    ("sd15", "canny", "sd15-controlnet-canny=canny@PICTURE"),
    ("sd15", "tile", "sd15-controlnet-tile=PICTURE"),
    ("sd15", "sketch", "sd15-controlnet-scribble=scribble@PICTURE"),
    ("sd15", "control_v11p_sd15_inpaint_fp16", "sd15-controlnet-inpaint=PICTURE"),
    ("sdxl", "depth_anything", "sdxl-controlnet-depth=PICTURE"),
    ("sdxl", "segmentation", "sdxl-controlnet-union=segment@PICTURE"),
    ("sdxl", "tile", "sdxl-controlnet-union-promax=tile@PICTURE"),
    ("sdxl", "edges", "sdxl-controlnet-canny=canny@PICTURE"),
    ("qwen-image", "hed", "qwen-image-controlnet-union=PICTURE"),
    ("qwen-image", "normal", "qwen-image-in-context-control-union=PICTURE"),
])  # fmt: skip
def test_each_kind(pipes: dict[str, Pipeline], model: str, name: str, use: str) -> None:
    assert f"give --control {use}, after: qwenimg pull {use.partition('=')[0]} " in _message(pipes[model], name)


def test_other_words_name_the_networks_of_the_model_alone(pipes: dict[str, Pipeline]) -> None:
    line = _message(pipes["z-image-turbo"], "controlnet")
    assert "known by name are z-image-controlnet-union, z-image-controlnet-union-1: qwenimg models" in line
    assert "known by name are sd15-controlnet-canny" in _message(pipes["sd15"], "🦊")
    assert "did you mean sd15-controlnet-openpose?" in _message(pipes["sd15"], "sd15-controlnet-opnpose")
    assert "no network for such pictures is known for this model" in _message(pipes["qwen-image"], "face")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.sample(1)
def test_what_is_suggested_is_taken(pipes: dict[str, Pipeline], model: str) -> None:
    """Each suggestion names a network that the model takes, in a form that is parsed; some need a mask beside it."""
    taken = 0
    for name in sorted({*network_search._KINDS}):
        match = re.search(r"give --(control|ip-adapter) ([^\s=]+)(?:=(\S*)PICTURE)?", _message(pipes[model], name))
        if match is None:
            continue
        control = f"{match[2]}={match[3] or ''}{PICTURE}"
        try:
            pipes[model].check("x", control=control)
            taken += 1
        except QwenimgError as error:
            assert "give it with --mask" in str(error), (name, str(error))
    assert taken > 8


def test_on_the_command_line() -> None:
    cli("plan", "sdxl", "--ip-adapter", "face", "--ip-image", PICTURE).refused(
        5, "give --ip-adapter ip-adapter-plus-face_sdxl_vit-h --ip-image PICTURE, after: qwenimg pull ip-adapter-plus-"
    )


def test_one_that_is_here_needs_no_download(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = next(one for one in catalog.CONTROLS if one.name == "sd15-controlnet-depth")
    monkeypatch.setattr(network_search, "find_cached", lambda name: tmp_path if name == here.place else None)
    with pytest.raises(ModelError, match=r"give --control sd15-controlnet-depth=PICTURE$"):
        network_search.find_control("depth", read_folders(()))
