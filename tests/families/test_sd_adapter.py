"""T2I-Adapters of Stable Diffusion as files, in a plan, and on the command line; and ControlNets in files of
PyTorch."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from support.cli_runner import cli
from support.controlled_runs import drawn, planned
from support.file_mutants import assert_line, damaged
from support.refusals import refused
from support.relative import relative
from support.tiny_adapter import adapter_names, tiny_adapter, write_adapter
from support.tiny_controlnet import authors_names, tiny_controlnet, write_controlnet
from support.tiny_sd import _SMALL, UNETS, write_tiny_sd

import qwenimg
from qwenimg.common.base.errors import ModelError
from qwenimg.common.families import registry
from qwenimg.common.families.stable_diffusion.control import open_control
from qwenimg.common.pictures import preprocessors
from qwenimg.common.runtime.checkpoint import Checkpoint

BACKENDS = ("cpu", "mlx")
UNET = UNETS["sd15"] | _SMALL
FULL: dict[str, Any] = {"channels": (20, 40, 60)}
XL: dict[str, Any] = {"channels": (16, 32, 48, 48), "downscale_factor": 16, "adapter_type": "full_adapter_xl"}
PICTURE = np.random.default_rng(2).integers(0, 256, (40, 60, 3), np.uint8)
ASKED: dict[str, Any] = {"width": 64, "height": 48, "steps": 3, "guidance": 4.0, "seed": 3, "sampler": "euler"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_sd(folder / "sd15", "sd15")
    return folder / "sd15"


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("nets") / "depth", **FULL)


@pytest.fixture
def model(folder: Path) -> Iterator[Checkpoint]:
    with closing(registry.open_model(folder).checkpoint) as checkpoint:
        yield checkpoint


# Files


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"adapter_type": "heavy_adapter"}, "adapter_type 'heavy_adapter' is not one of full_adapter, full_adapter_xl"),
        ({"adapter_type": 3}, "adapter_type"), ({"in_channels": 4}, "in_channels is 4; pictures have 1 or 3"),
        ({"in_channels": 1}, "shape"), ({"downscale_factor": 7}, "downscale_factor is 7; expected 8 or 16"),
        ({"downscale_factor": 16}, "shape"), ({"channels": []}, "channels has 0 entries"),
        ({"channels": [20, 40]}, "holds unknown tensor"), ({"channels": [10**9] * 3}, ""),
        ({"adapter_type": "light_adapter"}, "lacks tensor"), ({"num_res_blocks": 10**6}, "num_res_blocks"),
        ({"num_res_blocks": 3}, "lacks tensor"), ({"_class_name": "ControlNetModel"}, "is of class 'ControlNetModel'"),
        ({"_class_name": "QwenImageControlNetModel"}, "is a ControlNet of Qwen-Image"), ({"new": 1}, "new"),
    ],
)  # fmt: skip
@pytest.mark.sample(4)
def test_broken_configurations_are_refused(
    tmp_path: Path, net: Path, model: Checkpoint, changes: dict[str, Any], said: str
) -> None:
    broken = tmp_path / "net"
    broken.mkdir()
    (broken / "diffusion_pytorch_model.safetensors").symlink_to(net / "diffusion_pytorch_model.safetensors")
    config = json.loads((net / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | changes))
    assert said in refused(open_control, broken, model)


def test_another_models_adapter_is_refused(tmp_path: Path, folder: Path, net: Path, model: Checkpoint) -> None:
    xl = write_adapter(tmp_path / "xl", **XL)
    said = refused(open_control, xl, model)
    assert (
        "is a T2I-Adapter for SDXL, with features of 16, 32, 48, 48 channels; the model's UNet has 20, 40, 60" in said
    )
    narrow = write_adapter(tmp_path / "narrow", channels=(20, 40))
    refused(open_control, narrow, model)
    write_tiny_sd(tmp_path / "sdxl", "sdxl")
    with closing(registry.open_model(tmp_path / "sdxl").checkpoint) as sdxl:
        assert "is a T2I-Adapter for Stable Diffusion 1.x" in refused(open_control, net, sdxl)
        open_control(xl, sdxl).close()


class Runs:
    """What a pickle must not do."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("it-ran",)


def files() -> dict[str, dict[str, torch.Tensor]]:
    return {"adapter": adapter_names(tiny_adapter(**FULL)), "controlnet": authors_names(tiny_controlnet(UNET))}


@pytest.mark.parametrize("kind", ["adapter", "controlnet"])
@pytest.mark.parametrize("form", ["safetensors", "pth", "old pth"])
@pytest.mark.sample(1)
def test_mutants_are_refused_in_one_line_or_read(
    tmp_path: Path, model: Checkpoint, monkeypatch: pytest.MonkeyPatch, kind: str, form: str
) -> None:
    """And nothing of a pickle runs."""
    monkeypatch.chdir(tmp_path)
    path, verdicts, chance = tmp_path / "net.pth", Counter[str](), random.Random(11)
    if form == "safetensors":
        save_file(files()[kind], path)
    else:
        torch.save(files()[kind], path, _use_new_zipfile_serialization=form == "pth")
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little") if form == "safetensors" else min(len(whole), 40_000)
    open_control(path, model).close()
    for _ in range(100):
        path.write_bytes(damaged(whole, header, chance))
        try:
            open_control(path, model).close()
            verdicts["read"] += 1
        except ModelError as error:
            assert_line(str(error), path.name)
            verdicts["refused"] += 1
    print(f"{kind}, {form}: {dict(verdicts)}")
    assert verdicts["refused"]
    torch.save(files()[kind] | {"more": Runs()}, path)
    assert "its pickle calls posix.mkdir" in refused(open_control, path, model) and not (tmp_path / "it-ran").exists()


@pytest.mark.sample(0)
def test_a_controlnet_of_pytorch_draws_what_its_folder_draws(tmp_path: Path, folder: Path) -> None:
    net = write_controlnet(tmp_path / "net", UNET)
    for old in (False, True):
        torch.save(files()["controlnet"], tmp_path / f"{old}.pth", _use_new_zipfile_serialization=not old)
    with closing(qwenimg.load(folder, backend="cpu", precision="fp32")) as pipe:
        expected, *made = (
            pipe("a circle", control=(path, PICTURE), **ASKED).latents
            for path in (net, tmp_path / "False.pth", tmp_path / "True.pth")
        )
    assert all((one == expected).all() for one in made)


# A component of the model


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_beside_a_controlnet_in_each_mode(tmp_path: Path, folder: Path, net: Path, backend: str) -> None:
    """Both change the picture, as the plan says, also with a step cache and in 16 bits; features are not scaled again
    in the next step."""
    second = write_controlnet(tmp_path / "canny", UNET)
    asked = ASKED | {"control": [(net, PICTURE), (second, PICTURE, 0.5), (net, PICTURE, 0.3)]}
    with closing(qwenimg.load(folder, backend=backend, precision="fp32")) as pipe:
        plan = planned(pipe, asked)
        rows, both = drawn(pipe, asked)
        assert rows == plan
        sum_of_one = pipe("a circle", **asked | {"control": [(net, PICTURE, 1.3), (second, PICTURE, 0.5)]}).latents
        assert relative(both, sum_of_one) <= 1e-5
        modes = [pipe("a circle", **asked, control_mode=mode).latents for mode in ("balanced", "prompt", "control")]
        assert not any(np.array_equal(a, b) for i, a in enumerate(modes) for b in modes[:i])
        assert np.array_equal(pipe("a circle", **asked, step_cache=1e-9).latents, both)
    with closing(qwenimg.load(folder, backend=backend, precision="bf16")) as pipe:
        narrow = pipe("a circle", **asked).latents
    error = relative(narrow, both)
    print(f"{backend}: bfloat16 {error:.3f}")
    assert error < 0.1


def test_colour_is_a_palette() -> None:
    picture = np.zeros((128, 192, 3), np.uint8)
    picture[:64, :64], picture[64:, 128:] = (255, 0, 0), (0, 0, 255)
    made = preprocessors.PREPROCESSORS["colour"](picture)
    squares = made.reshape(2, 64, 3, 64, 3)
    assert (squares == squares[:, :1, :, :1]).all() and made.shape == picture.shape
    assert made[0, 0, 0] > 150 and made[127, 191, 2] > 150 and made[0, 191].max() < 60
    assert preprocessors.PREPROCESSORS["colour"](picture[:20, :10]).shape == (20, 10, 3)


# On the command line


@pytest.mark.sample(0)
def test_on_the_command_line(tmp_path: Path, folder: Path) -> None:
    """A file of PyTorch in the folders of another program, by its name."""
    models = tmp_path / "models" / "t2i_adapter"
    models.mkdir(parents=True)
    torch.save(files()["adapter"], models / "t2iadapter_color.pth")
    Image.fromarray(PICTURE).save(tmp_path / "photo.png")
    words = ["-m", str(folder), "--backend", "cpu", "a circle", "--size", "64x48", "--steps", "2", "-s", "3"]
    control = ["--models-dir", str(tmp_path / "models"), "--control", f"t2iadapter_color=colour@{tmp_path}/photo.png"]
    first, second = tmp_path / "a.png", tmp_path / "b.png"
    ran = cli(*words, *control, "-o", str(first), "--keep-control")
    assert ran.code == 0, ran.err
    assert (tmp_path / "a.colour.png").exists()
    recipe = json.loads(Image.open(first).text["qwenimg"])
    assert recipe["control"] == "t2iadapter_color=colour@photo.png:1"
    again = cli("--from", str(first), *control, "--backend", "cpu", "-m", str(folder), "-o", str(second))
    assert again.code == 0 and (np.asarray(Image.open(first)) == np.asarray(Image.open(second))).all()
    told = cli("info", str(models / "t2iadapter_color.pth"))
    assert (
        told.code == 0 and b"a T2I-Adapter for Stable Diffusion" in told.out and b"--control FILE=PICTURE" in told.out
    )
