"""ControlNets of Stable Diffusion as files, as components of a model, and on the command line."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from math import erf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from support.cli_runner import cli
from support.controlled_runs import drawn, planned, with_nets
from support.file_mutants import assert_line, damaged
from support.refusals import refused
from support.relative import relative
from support.tiny_control import write_controlnet as write_qwen_controlnet
from support.tiny_controlnet import authors_names, tiny_controlnet, write_authors_file, write_controlnet
from support.tiny_sd import _SMALL, UNETS, write_tiny_sd

import qwenimg
from qwenimg import Pipeline
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.families import registry
from qwenimg.common.families.stable_diffusion.control import open_control
from qwenimg.common.pictures import pixels, preprocessors
from qwenimg.common.pipeline import fit_options
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.runtime import Change, limit_for

BACKENDS = ("cpu", "mlx")
UNET = UNETS["sd15"] | _SMALL
PICTURE = np.random.default_rng(2).integers(0, 256, (40, 60, 3), np.uint8)
ASKED: dict[str, Any] = {"width": 64, "height": 48, "steps": 3, "guidance": 4.0, "seed": 3, "sampler": "euler"}


def _written(folder: Path) -> Path:
    write_tiny_sd(folder / "sd15", "sd15")
    return folder / "sd15"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _written(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_controlnet(tmp_path_factory.mktemp("nets") / "canny", UNET)


@pytest.fixture
def model(folder: Path) -> Iterator[Checkpoint]:
    with closing(registry.open_model(folder).checkpoint) as checkpoint:
        yield checkpoint


# Files


def broken_files() -> dict[str, tuple[Callable[[], dict[str, torch.Tensor]], str]]:
    model = tiny_controlnet(UNET)
    tensors, authors = model.state_dict(), authors_names(model)
    other = tiny_controlnet(UNETS["sd21"] | _SMALL).state_dict()
    return {
        "a tensor is missing": (
            lambda: {k: v for k, v in tensors.items() if k != "controlnet_mid_block.bias"}, "lacks tensor"),
        "a tensor too many": (lambda: tensors | {"conv_norm_out.weight": torch.ones(20)}, "conv_norm_out.weight"),
        "another shape": (lambda: tensors | {"conv_in.bias": torch.ones(21)}, "conv_in.bias"),
        "no picture": (
            lambda: authors | {"control_model.input_hint_block.0.weight": torch.ones(4)}, "has not 4 dimensions"),
        "other text states": (lambda: other, "is a ControlNet for a model with 72 channels in a text; the model is"),
        "of Qwen-Image": (
            lambda: {"controlnet_x_embedder.weight": torch.ones(3)}, "is a ControlNet of Qwen-Image or FLUX.1"),
        "patches": (lambda: {"controlnet_blocks.0.y_rms.weight": torch.ones(3)}, "control patches for Qwen-Image"),
        "of Z-Image": (lambda: {"control_all_x_embedder.2-1.weight": torch.ones(3)}, "is a ControlNet of Z-Image"),
        "a part of a Control-LoRA": (
            lambda: {"lora_controlnet": torch.ones(1), "input_hint_block.0.weight": torch.ones(4, 3, 3, 3)},
            "lacks tensor"),
        "a union": (lambda: tensors | {"task_embedding": torch.ones(6, 20)}, "holds unknown tensor 'task_embedding'"),
        "a part of a T2I-Adapter": (lambda: {"adapter.conv_in.weight": torch.ones(3)}, "holds no ControlNet of Stable"),
        "no control network": (lambda: {"a": torch.ones(3)}, "holds no ControlNet of Stable Diffusion"),
        "empty": (dict, "holds no ControlNet of Stable Diffusion"),
        "infinite": (lambda: tensors | {"conv_in.bias": torch.full((20,), torch.inf)}, ""),
    }  # fmt: skip


@pytest.mark.parametrize("fault", broken_files())
@pytest.mark.sample(5)
def test_broken_files_are_refused(tmp_path: Path, model: Checkpoint, fault: str) -> None:
    make, said = broken_files()[fault]
    path = tmp_path / "net.safetensors"
    save_file(make(), path)
    if not said:  # values are read later, and then refused
        with closing(qwenimg.load(model.source, backend="cpu", precision="fp32")) as pipe, pytest.raises(ModelError):
            pipe("x", control=(path, PICTURE), **ASKED)
        return
    text = refused(open_control, path, model)
    print(text)
    assert said in text and path.name in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"_class_name": "QwenImageControlNetModel"}, "is a ControlNet of Qwen-Image, and the model is Stable Diff"),
        ({"_class_name": "FluxControlNetModel"}, "is a ControlNet of FLUX.1"),
        ({"_class_name": "ControlNetUnionModel"}, "is of class 'ControlNetUnionModel'"),
        ({"_class_name": "T2IAdapter"}, "of class 'T2IAdapter'"), ({"_class_name": "UNet2DConditionModel"}, "expected"),
        ({"conditioning_channels": 1}, "conditioning_channels is 1; pictures have 3"),
        ({"controlnet_conditioning_channel_order": "gbr"}, "expected rgb or bgr"),
        ({"conditioning_embedding_out_channels": []}, "has 0 entries"),
        ({"conditioning_embedding_out_channels": [4, 6, 8]}, "unknown tensor"),
        ({"global_pool_conditions": 3}, "global_pool_conditions"), ({"in_channels": 9}, "shape"),
        ({"down_block_types": "DownBlock2D"}, "down_block_types"), ({"down_block_types": [3, 4, 5]}, "down_block_ty"),
        ({"mid_block_type": "UNetMidBlock2D"}, "mid_block_type"), ({"something_new": 1}, "something_new"),
        ({"cross_attention_dim": 72}, "shape"), ({"layers_per_block": 10**7}, "layers_per_block"),
        ({"norm_eps": float("nan")}, "config.json"), ({"block_out_channels": [20, 40]}, "block_out_channels"),
    ],
)  # fmt: skip
@pytest.mark.sample(5)
def test_broken_configurations_are_refused(
    tmp_path: Path, net: Path, model: Checkpoint, changes: dict[str, Any], said: str
) -> None:
    broken = tmp_path / "net"
    shutil.copytree(net, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | changes))
    assert said in refused(open_control, broken, model)


@pytest.mark.parametrize("names", ["diffusers", "authors"])
@pytest.mark.sample(1)
def test_mutants_are_refused_in_one_line_or_read(tmp_path: Path, net: Path, model: Checkpoint, names: str) -> None:
    source = net / "diffusion_pytorch_model.safetensors"
    if names == "authors":
        source = write_authors_file(tmp_path / "authors.safetensors", UNET)
    whole, path, verdicts = source.read_bytes(), tmp_path / "net.safetensors", set[str]()
    header = 8 + int.from_bytes(whole[:8], "little")
    chance = random.Random(11)
    for _ in range(120):
        path.write_bytes(damaged(whole, header, chance))
        try:
            open_control(path, model).close()
            verdicts.add("read")
        except ModelError as error:
            assert_line(str(error), path.name)
            verdicts.add("refused")
    assert "refused" in verdicts


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_a_pytorch_file_with_diffusers_names(tmp_path: Path, folder: Path, net: Path, backend: str) -> None:
    """It draws what the folder draws, bit for bit; a folder with such a file alone is refused, and names it."""
    weights = load_file(net / "diffusion_pytorch_model.safetensors")
    (tmp_path / "old").mkdir()
    file = tmp_path / "old" / "diffusion_pytorch_model.bin"
    torch.save(weights, file)
    with closing(qwenimg.load(folder, backend, "fp32")) as pipe:
        drawn = [pipe("x", control=(str(one), PICTURE, 0.8), **ASKED).latents for one in (net, file)]
        assert np.array_equal(*drawn)
        with pytest.raises(ModelError, match="PyTorch file alone: give that file"):
            pipe.check("x", control=(str(tmp_path / "old"), PICTURE))


@pytest.mark.sample(0)
def test_controlnet_xs_is_refused(tmp_path: Path, model: Checkpoint) -> None:
    """By its configuration in a folder, and by its tensors in a file."""
    names = ("control_to_base_for_conv_in", "controlnet_cond_embedding.conv_in", "conv_in")
    save_file({f"{name}.weight": torch.ones(4, 4, 1, 1) for name in names}, tmp_path / "xs.safetensors")
    for kind in ("ControlNetXSAdapter", "UNetControlNetXSModel"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_text(json.dumps({"_class_name": kind}))
        (tmp_path / kind / "diffusion_pytorch_model.safetensors").symlink_to(tmp_path / "xs.safetensors")
    for path in ("xs.safetensors", "ControlNetXSAdapter", "UNetControlNetXSModel"):
        with pytest.raises(ModelError, match="is a ControlNet-XS, which is not built: give a ControlNet"):
            open_control(tmp_path / path, model)
    assert "a ControlNet-XS of Stable Diffusion" in cli("info", str(tmp_path / "xs.safetensors")).out.decode()


def test_links_and_folders(tmp_path: Path, net: Path, model: Checkpoint) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    (tmp_path / "good").symlink_to(net)
    for name in ("loop", "nowhere", "empty", "gone"):
        refused(open_control, tmp_path / name, model)
    open_control(tmp_path / "good", model).close()


def test_another_familys_network_is_named(tmp_path: Path, folder: Path) -> None:
    other = write_qwen_controlnet(tmp_path / "union")
    with closing(qwenimg.load(folder, backend="cpu", precision="fp32")) as pipe, pytest.raises(ModelError) as error:
        pipe.check("x", control=(other, PICTURE))
    assert "is a ControlNet of Qwen-Image, and the model is Stable Diffusion" in str(error.value)


# A component of the model


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_a_run_does_what_its_plan_says(tmp_path: Path, folder: Path, net: Path, backend: str) -> None:
    """At limits from the least on: ControlNets, UNet and what is streamed of each are as planned."""
    second = write_controlnet(tmp_path / "depth", UNET, 12)
    controls = [(net, PICTURE), (second, PICTURE, 0.5), (net, PICTURE, 0.3)]
    asked = ASKED | {"control": controls}

    def load(limit: int) -> Pipeline:
        return qwenimg.load(folder, backend=backend, precision="fp32", max_memory=limit)

    with closing(load(10**12)) as pipe:
        with_nets(pipe, asked)
        tight = pipe.model.variant(Change(max_memory=1))
        least = limit_for(fit_options.plan_memory(tight, pipe.check("a circle", **asked)).largest.peak)
        usual = pipe("a circle", **asked).latents
    seen = set[tuple[str, int]]()
    for share in (1.0, 1.3, 3.0):
        with closing(load(int(share * least))) as pipe:
            for _ in range(2):
                plan = planned(pipe, asked)
                rows, latents = drawn(pipe, asked)
                assert rows == plan, share
                assert {name for name, _, _, _ in rows} >= {"control", "denoise"}
                assert relative(latents, usual) <= 1e-5
                seen |= {(resident, held) for _, resident, _, held in rows}
    print(f"{backend}: from {least:,} bytes on, {sorted(seen)}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(1)
def test_both_passes_see_the_picture_at_their_size(folder: Path, net: Path, backend: str) -> None:
    """As a ControlNet for tiles adds details to what is enlarged: the same bits as two runs under the same picture."""
    control = [(net, PICTURE, 0.8)]
    with qwenimg.load(folder, backend, "fp32") as pipe:
        first = pipe("a", **ASKED, control=control)
        larger = pixels.fit(first.pixels, 96, 72)
        expected = pipe("a", **ASKED | {"width": 96, "height": 72}, image=larger, strength=0.7, control=control)
        made = pipe("a", **ASKED, hires=1.5, hires_strength=0.7, control=control)
        without = pipe("a", **ASKED | {"width": 96, "height": 72}, image=larger, strength=0.7)
    print(f"without control in the second pass {relative(without.latents, expected.latents):.1e}")
    assert np.array_equal(made.latents, expected.latents) and np.array_equal(made.pixels, expected.pixels)
    assert relative(without.latents, expected.latents) > 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_step_cache_beside_control(folder: Path, net: Path, backend: str) -> None:
    asked = ASKED | {"control": (net, PICTURE, 0.5), "steps": 12}
    with closing(qwenimg.load(folder, backend=backend, precision="fp32")) as pipe:
        plain = pipe("a circle", **asked).latents
        assert np.array_equal(pipe("a circle", **asked, step_cache=1e-9).latents, plain)
        cached = pipe("a circle", **asked, cached_calls="12")
    assert cached.recipe["cached_calls"] == "12" and 0 < relative(cached.latents, plain) < 0.3


@pytest.mark.sample(0)
def test_modes_are_recorded_and_lead(folder: Path, net: Path) -> None:
    asked = ASKED | {"control": (net, PICTURE)}
    with closing(qwenimg.load(folder, backend="cpu", precision="fp32")) as pipe:
        made = {mode: pipe("a circle", **asked, control_mode=mode) for mode in ("balanced", "prompt", "control")}
        pictures = [one.latents for one in made.values()]
        assert not any(np.array_equal(a, b) for i, a in enumerate(pictures) for b in pictures[:i])
        assert "control_mode" not in made["balanced"].recipe and made["prompt"].recipe["control_mode"] == "prompt"
        with pytest.raises(UsageError, match="choose one of balanced, prompt, control"):
            pipe.check("x", control_mode="both")
        alone = pipe("a circle", **ASKED, control_mode="prompt")
    assert "control-mode has no effect without a control" in alone.warnings


@pytest.mark.sample(0)
def test_one_branch_at_a_time_draws_the_same(folder: Path, net: Path) -> None:
    """Where memory is short, the branches of guidance follow each other, each with its changes."""
    for mode in ("balanced", "control"):
        asked = ASKED | {"control": (net, PICTURE), "control_mode": mode}
        with closing(qwenimg.load(folder, backend="cpu", precision="fp32")) as pipe:
            usual = pipe("a circle", **asked).latents
            steps = pipe.model.base.steps
            with pytest.MonkeyPatch.context() as patch:

                def single(*given: Any, steps: Any = steps, **more: Any) -> Any:
                    stage = steps(*given, **more)
                    return replace(stage, splits=stage.splits[-1:])

                patch.setattr(pipe.model.base, "steps", single)
                one_by_one = pipe("a circle", **asked).latents
        error = relative(one_by_one, usual)
        print(f"{mode}: {error:.1e}")
        assert error <= 1e-5


# Preprocessors


def test_preprocessors_against_their_definitions() -> None:
    assert (preprocessors.invert(PICTURE) == 255 - PICTURE).all()
    luminance = (PICTURE.astype(float) @ [0.299, 0.587, 0.114]).round()
    assert np.abs(preprocessors.grey(PICTURE)[..., 1] - luminance).max() <= 1
    assert (preprocessors.scribble(PICTURE)[..., 0] == np.where((PICTURE < 127).any(2), 255, 0)).all()
    wide = np.zeros((201, 201, 3), np.uint8)
    wide[60:141, 60:141] = 255
    blurred = preprocessors.blur(wide).astype(float)[100, :, 0] / 255
    at = np.arange(201)
    exact = [(erf((141 - 0.5 - x) / 9 / 2**0.5) + erf((x - 59.5) / 9 / 2**0.5)) / 2 for x in at]
    print(f"blur, from the Gaussian: {np.abs(blurred - exact).max():.3f}")
    assert np.abs(blurred - exact).max() <= 0.01


# On the command line


@pytest.mark.sample(0)
def test_on_the_command_line(tmp_path: Path, folder: Path, net: Path) -> None:
    Image.fromarray(PICTURE).save(tmp_path / "photo.png")
    words = ["-m", str(folder), "--backend", "cpu", "a circle", "--size", "64x48", "--steps", "2", "-s", "3"]
    control = ["--control", f"{net}=invert@{tmp_path / 'photo.png'}:0.8", "--control-mode", "prompt"]
    first, second = tmp_path / "a.png", tmp_path / "b.png"
    assert cli(*words, *control, "-o", str(first), "--keep-control").code == 0
    assert (tmp_path / "a.invert.png").exists()
    recipe = json.loads(Image.open(first).text["qwenimg"])
    assert recipe["control"].startswith("canny=invert@photo.png:0.8") and recipe["control_mode"] == "prompt"
    again = cli("--from", str(first), *control[:2], "--backend", "cpu", "-m", str(folder), "-o", str(second))
    assert again.code == 0 and (np.asarray(Image.open(first)) == np.asarray(Image.open(second))).all()
