"""Stable Diffusion under T2I-Adapters, from a prompt and pictures to pixels, on both backends, against diffusers."""

from __future__ import annotations

import shutil
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import oracle_sd
from support.tiny_adapter import adapter_names, tiny_adapter, write_adapter
from support.tiny_model import randomise
from support.tiny_sd import _SMALL, UNETS

import qwenimg
from qwenimg.common.base.config import parse
from qwenimg.common.networks.denoisers import t2i_adapter
from qwenimg.common.networks.denoisers.t2i_adapter import T2IAdapterConfig

from .test_sd_control_pipeline import HIGH, NEGATIVE, PROMPT, SEED, WIDE, compare

BACKENDS = ("cpu", "mlx")
SIZES = {"sd15": {"width": 88, "height": 72}, "sdxl": {"width": 96, "height": 80}}
GREY = np.repeat(WIDE[..., :1], 3, axis=2)
ADAPTERS: dict[str, dict[str, Any]] = {
    "full": {"channels": (20, 40, 60)},
    "full, of one channel": {"channels": (20, 40, 60), "in_channels": 1, "num_res_blocks": 1},
    "light": {"channels": (20, 40), "adapter_type": "light_adapter", "num_res_blocks": 3},
    "xl": {"channels": (16, 32, 48, 48), "downscale_factor": 16, "adapter_type": "full_adapter_xl"},
    "xl, of one channel": {
        "channels": (16, 32, 48, 48), "downscale_factor": 16, "adapter_type": "full_adapter_xl", "in_channels": 1,
    },
}  # fmt: skip
ASKED: dict[str, Any] = {"steps": 4, "guidance": 5.0}


@pytest.fixture(scope="module")
def models(folders, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model for each kind of adapter: a light one's last two features have the same width."""
    from diffusers import UNet2DConditionModel

    light = shutil.copytree(folders["sd15"], tmp_path_factory.mktemp("light") / "sd15")
    unet = UNet2DConditionModel(**UNETS["sd15"] | _SMALL | {"block_out_channels": (20, 40, 40)})
    randomise(unet, 3)
    unet.save_pretrained(light / "unet")
    return {"full": folders["sd15"], "light": light, "xl": folders["sdxl"]}


def kind_of(name: str) -> str:
    return "sdxl" if name.startswith("xl") else "sd15"


def ours(pipe: qwenimg.Pipeline, name: str, **asked: Any) -> qwenimg.Result:
    return pipe(PROMPT, seed=SEED, negative_prompt=NEGATIVE, **SIZES[kind_of(name)], **ASKED | asked)


def theirs(folder: Path, name: str, nets: list[Path], pictures: list[np.ndarray], scale: Any, **more: Any) -> Any:
    ending = "XL" if kind_of(name) == "sdxl" else ""
    return oracle_sd.controlled(
        folder, f"StableDiffusion{ending}AdapterPipeline", nets, seed=SEED, prompt=PROMPT, negative_prompt=NEGATIVE,
        num_inference_steps=4, guidance_scale=5.0, adapter_conditioning_scale=scale, **SIZES[kind_of(name)],
        image=pictures if len(pictures) > 1 else pictures[0], **more,
    )  # fmt: skip


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.sample(1)
def test_equals_diffusers(models, tmp_path: Path, name: str) -> None:
    net, one = write_adapter(tmp_path / "net", **ADAPTERS[name]), "one channel" in name
    folder, picture = models[name.partition(",")[0]], GREY if one else WIDE
    expected = theirs(folder, name, [net], [picture[..., 0] if one else picture], 0.8)
    for backend in BACKENDS:
        with qwenimg.load(folder, backend=backend, precision="fp32") as pipe:
            made = ours(pipe, name, control=(net, picture, 0.8))
            compare(f"{name}, {backend}", made, expected)
            assert np.abs(made.pixels.astype(int) - ours(pipe, name).pixels).max() >= 8


@pytest.mark.sample(0)
def test_two_at_once(folders, tmp_path: Path) -> None:
    nets = [write_adapter(tmp_path / f"net{seed}", seed, **ADAPTERS["full"]) for seed in (11, 12)]
    expected = theirs(folders["sd15"], "full", nets, [WIDE, HIGH], [0.5, 0.9])
    for backend in BACKENDS:
        with qwenimg.load(folders["sd15"], backend=backend, precision="fp32") as pipe:
            made = ours(pipe, "full", control=[(nets[0], WIDE, 0.5), (nets[1], HIGH, 0.9)])
            compare(f"two, {backend}", made, expected)


@pytest.mark.sample(0)
def test_a_part_of_the_steps(folders, tmp_path: Path) -> None:
    net = write_adapter(tmp_path / "net", **ADAPTERS["xl"])
    expected = theirs(folders["sdxl"], "xl", [net], [WIDE], 1.0, adapter_conditioning_factor=0.5)
    for backend in BACKENDS:
        with qwenimg.load(folders["sdxl"], backend=backend, precision="fp32") as pipe:
            compare(f"half, {backend}", ours(pipe, "xl", control=(net, WIDE, 1.0, (0, 0.5))), expected)


@pytest.mark.parametrize("name", ["full", "light", "xl"])
@pytest.mark.sample(0)
def test_files_of_its_authors_draw_what_the_folder_draws(models, tmp_path: Path, name: str) -> None:
    """Also one that `torch.save` wrote."""
    net, tensors = write_adapter(tmp_path / "net", **ADAPTERS[name]), adapter_names(tiny_adapter(**ADAPTERS[name]))
    safe, pth = tmp_path / "a.safetensors", tmp_path / "a.pth"
    save_file(tensors, safe)
    torch.save(tensors, pth)
    with qwenimg.load(models[name], backend="cpu", precision="fp32") as pipe:
        expected, *made = (ours(pipe, name, control=(one, WIDE)).latents for one in (net, safe, pth))
    assert all((one == expected).all() for one in made)


PUBLISHED = {
    "full": ({"in_channels": 3}, 77.37),
    "xl": ({"in_channels": 3, "downscale_factor": 16, "adapter_type": "full_adapter_xl"}, 79.03),
    "light": (
        {"in_channels": 3, "adapter_type": "light_adapter", "num_res_blocks": 4, "channels": [320, 640, 1280]},
        18.69,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_manifest(name: str) -> None:
    from diffusers import T2IAdapter

    config, millions = PUBLISHED[name]
    with torch.device("meta"):
        model = T2IAdapter(**config)
    made = t2i_adapter.manifest(parse(T2IAdapterConfig, config, source="config.json"))
    assert made == {key: tuple(value.shape) for key, value in model.state_dict().items()}
    parameters = sum(map(prod, made.values()))
    print(f"{name}: {len(made)} tensors, {parameters:,} parameters")
    assert round(parameters / 1e6, 2) == millions
