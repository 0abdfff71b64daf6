"""ControlNet Unions of SDXL as files, on the command line, and in a plan."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import closing
from math import prod
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.cli_runner import cli
from support.controlled_runs import drawn, planned
from support.file_mutants import assert_line, damaged
from support.refusals import refused
from support.tiny_controlnet import write_controlnet, write_union
from support.tiny_sd import _SMALL, UNETS, write_tiny_sd

import qwenimg
from qwenimg.cli.serve.apis import sd_control
from qwenimg.cli.serve.http_error import HttpError
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.families import registry
from qwenimg.common.families.stable_diffusion.control import open_control, published
from qwenimg.common.families.stable_diffusion.known import CONTROLS
from qwenimg.common.pipeline.start import latent_shape
from qwenimg.common.request.control_text import Control
from qwenimg.common.runtime.checkpoint import Checkpoint

UNET = UNETS["sdxl"] | _SMALL
PICTURE = np.random.default_rng(2).integers(0, 256, (40, 60, 3), np.uint8)
# Of diffusers' classes; for each of two more kinds ProMax has a row of 320, and 256 more inputs of an embedding
PARAMETERS = {
    "sdxl-controlnet-union": 1_257_287_280,
    "sdxl-controlnet-union-promax": 1_257_287_280 + 2 * (320 + 256 * 1280),
}
SDXL = 2_567_463_684  # parameters of its UNet
ASKED = {"width": 64, "height": 48, "steps": 4, "guidance": 4.0, "seed": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_sd(folder / "sdxl", "sdxl")
    return folder / "sdxl"


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_union(tmp_path_factory.mktemp("nets") / "union", UNET, num_control_type=6)


@pytest.fixture
def model(folder: Path) -> Iterator[Checkpoint]:
    with closing(registry.open_model(folder).checkpoint) as checkpoint:
        yield checkpoint


def test_a_file_alone_is_opened_as_its_folder(net: Path, model: Checkpoint) -> None:
    with (
        closing(open_control(net, model)) as a,
        closing(open_control(net / "diffusion_pytorch_model.safetensors", model)) as b,
    ):
        assert a.component.plan.shapes == b.component.plan.shapes and a.kinds == b.kinds
        assert a.kinds[-1] == "segment" and len(a.kinds) == 6


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_control_type": 8}, "shape"), ({"num_control_type": 10**6}, "num_control_type"),
        ({"num_trans_layer": 2}, "lacks tensor"), ({"num_trans_channel": 320}, "num_trans_channel is 320"),
        ({"addition_time_embed_dim": None}, "addition_time_embed_dim"), ({"num_control_type": "6"}, "num_control_type"),
        ({"_class_name": "ControlNetModel"}, "is of class 'ControlNetModel'"),
    ],
)  # fmt: skip
def test_broken_configurations_are_refused(
    tmp_path: Path, net: Path, model: Checkpoint, changes: dict[str, object], said: str
) -> None:
    broken = tmp_path / "net"
    broken.mkdir()
    (broken / "diffusion_pytorch_model.safetensors").symlink_to(net / "diffusion_pytorch_model.safetensors")
    config = json.loads((net / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | changes))
    assert said in refused(open_control, broken, model)


def test_mutants_are_refused_in_one_line_or_read(tmp_path: Path, net: Path, model: Checkpoint) -> None:
    whole, path = (net / "diffusion_pytorch_model.safetensors").read_bytes(), tmp_path / "net.safetensors"
    header, chance, verdicts = 8 + int.from_bytes(whole[:8], "little"), random.Random(12), set[str]()
    for _ in range(120):
        path.write_bytes(damaged(whole, header, chance))
        try:
            open_control(path, model).close()
            verdicts.add("read")
        except ModelError as error:
            assert_line(str(error), path.name)
            verdicts.add("refused")
    assert "refused" in verdicts


def test_another_model_is_refused(tmp_path: Path, net: Path) -> None:
    write_tiny_sd(tmp_path / "sd15", "sd15")
    with closing(registry.open_model(tmp_path / "sd15").checkpoint) as checkpoint:
        said = refused(open_control, net, checkpoint)
    assert "is a ControlNet for a model with 140 channels in a text; the model is" in said


def test_kinds_that_are_not_there(tmp_path: Path, folder: Path, net: Path) -> None:
    plain = write_controlnet(tmp_path / "canny", UNET)
    with closing(qwenimg.load(folder, backend="cpu", precision="fp32")) as pipe:
        for kind, words in {"": "its picture has none", "tile": "tile@ is none", "grey": "grey@ is none"}.items():
            with pytest.raises(
                UsageError, match=f"needs a kind of picture, and {words}: write KIND@PICTURE, of openpo"
            ):
                pipe.check("x", control=Control(str(net), "a", kind, picture=PICTURE))
        with pytest.raises(UsageError, match="make that of depth elsewhere, and leave out depth@"):
            pipe.check("x", control=Control(str(plain), "a", "depth", picture=PICTURE))
        pipe.check("x", control=Control(str(net), "a", "canny", picture=PICTURE))


@pytest.mark.sample(0)
def test_a_run_does_what_its_plan_says(folder: Path, net: Path) -> None:
    """The network is one stage, called in the steps in which one of its pictures holds."""
    controls = [
        Control(str(net), "a", "depth", end=0.5, picture=PICTURE),
        Control(str(net), "a", "canny", start=0.25, end=0.75, picture=PICTURE),
    ]
    for backend in ("cpu", "mlx"):
        with closing(qwenimg.load(folder, backend=backend, precision="fp32")) as pipe:
            asked = ASKED | {"control": controls}
            plan = planned(pipe, asked)
            rows, _ = drawn(pipe, asked)
            assert rows == plan
            request = pipe.check("x", **asked)
            stages = pipe.model.stages(request, pipe.model.plan(request), latent_shape(pipe.model, request))
            (stage,) = [one for one in stages if one.name == "control"]
            assert stage.splits[0].passes == 3


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.sample(0)
def test_a_published_one_is_planned_without_its_files(tmp_path: Path, name: str) -> None:
    """Beside SDXL's UNet, once for two pictures; its download has the bytes of its parameters in 16 bits."""
    Image.fromarray(PICTURE).save(tmp_path / "photo.png")
    words = ["plan", "sdxl", "--backend", "cpu", "--precision", "bf16", "--size", "1024x1024", "--json"]
    controls = [f"--control={name}={kind}@{tmp_path / 'photo.png'}" for kind in ("depth", "tile", "canny")]
    net, [known] = published(name), [one for one in CONTROLS if one.name == name]
    assert net is not None
    held = 2 * PARAMETERS[name]
    assert sum(prod(shape) for shape in net.component.plan.shapes.values()) == PARAMETERS[name]
    assert abs(known.bytes - held) <= 0.01 * held and known.license == "Apache-2.0"
    if "tile" not in net.kinds:
        ran = cli(*words, controls.pop(1))
        assert ran.code == 2 and "tile@ is none" in ran.err
    ran = cli(*words, *controls)
    assert ran.code == 0, ran.err
    bytes_of = {stage["name"]: stage["weights_bytes"] for stage in json.loads(ran.out)["stages"]}
    print(f"{name}: {bytes_of}")
    assert held <= bytes_of["control"] <= 1.1 * held and bytes_of["denoise"] - bytes_of["control"] > 2 * SDXL


@pytest.mark.sample(0)
def test_on_the_command_line(tmp_path: Path, folder: Path, net: Path) -> None:
    Image.fromarray(PICTURE).save(tmp_path / "photo.png")
    words = ["-m", str(folder), "--backend", "cpu", "a circle", "--size", "64x48", "--steps", "2", "-s", "3"]
    control = []
    for kind in ("canny", "depth"):
        control += ["--control", f"{net}={kind}@{tmp_path / 'photo.png'}:0.8"]
    first, second = tmp_path / "a.png", tmp_path / "b.png"
    assert cli(*words, *control, "-o", str(first), "--keep-control").code == 0
    assert (tmp_path / "a.canny.png").exists() and not (tmp_path / "a.depth.png").exists()
    recipe = json.loads(Image.open(first).text["qwenimg"])
    assert recipe["control"] == "union=canny@photo.png:0.8; union=depth@photo.png:0.8"
    again = cli("--from", str(first), *control, "--backend", "cpu", "-m", str(folder), "-o", str(second))
    assert again.code == 0 and (np.asarray(Image.open(first)) == np.asarray(Image.open(second))).all()
    cli(*words, "--control", f"{net}={tmp_path / 'photo.png'}").refused(2, "needs a kind of picture")
    told = cli("info", str(net / "diffusion_pytorch_model.safetensors"))
    assert told.code == 0 and b"a ControlNet Union for SDXL" in told.out and b"KIND@PICTURE" in told.out


def test_units_of_automatic1111_name_the_kind() -> None:
    def units(**unit: object) -> Control:
        image = "iVBORw0KGgo="
        listed = {"controlnet": {"args": [{"model": "union", "image": image} | unit]}}
        return sd_control.units(listed, []).controls[0]

    assert units(union_control_type="Normal Map").preprocessor == "normal"
    assert units(union_control_type="Hard Edge", module="canny").preprocessor == "canny"
    assert units(union_control_type="Unknown").preprocessor == ""
    with pytest.raises(HttpError, match="union_control_type"):
        units(union_control_type="Smell")
