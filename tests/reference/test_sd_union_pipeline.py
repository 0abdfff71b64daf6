"""SDXL under a ControlNet Union, from a prompt and pictures of several kinds to pixels, on both backends, against
diffusers."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import oracle_sd
from support.tiny_controlnet import tiny_union, write_controlnet, write_union
from support.tiny_sd import _SMALL, UNETS

import qwenimg
from qwenimg.common.base.config import parse
from qwenimg.common.base.errors import UsageError
from qwenimg.common.networks.denoisers import unet, unet_controlnet_union
from qwenimg.common.networks.denoisers.unet_controlnet_union import UNetControlNetUnionConfig
from qwenimg.common.request import control_text
from qwenimg.common.request.control_text import Control

from .test_sd_control_pipeline import HIGH, MASK, NEGATIVE, PROMPT, SEED, SIZE, START, WIDE, compare, strongly

BACKENDS = ("cpu", "mlx")
UNET = UNETS["sdxl"] | _SMALL
# kinds by name, their numbers in diffusers, pictures, scales, windows, whether the mode is "control"
CASES: dict[str, dict[str, Any]] = {
    "depth": {"kinds": ["depth"], "modes": [1], "scales": [0.8]},
    "tile, led by control": {"kinds": ["tile"], "modes": [6], "scales": [1.0], "mode": "control"},
    "two kinds": {"kinds": ["openpose", "lineart"], "modes": [0, 3], "scales": [0.5, 1.2]},
    "two, led by control": {"kinds": ["normal", "segment"], "modes": [4, 5], "scales": [0.6, 0.9], "mode": "control"},
    "two in turn": {
        "kinds": ["softedge", "depth"], "modes": [2, 1], "scales": [1.0, 0.7], "windows": [(0, 0.5), (0.25, 1)],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def union(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_union(tmp_path_factory.mktemp("nets") / "union", UNET)


def controls(net: Path, case: dict[str, Any]) -> list[Control]:
    count = len(case["kinds"])
    windows = case.get("windows", [(0.0, 1.0)] * count)
    each = zip(case["kinds"], case["scales"], windows, (WIDE, HIGH), strict=False)
    return [Control(str(net), "a", kind, scale, *window, picture=picture) for kind, scale, window, picture in each]


def theirs(folder: Path, net: Path, case: dict[str, Any], ending: str = "", **more: Any) -> Any:
    count = len(case["kinds"])
    windows = case.get("windows", [(0.0, 1.0)] * count)
    pictures = {"control_image": more.pop("seen", [WIDE, HIGH][:count])}
    return oracle_sd.controlled(
        folder, f"StableDiffusionXLControlNetUnion{ending}Pipeline", [net], seed=SEED, prompt=PROMPT,
        negative_prompt=NEGATIVE, num_inference_steps=4, guidance_scale=5.0, control_mode=case["modes"],
        guess_mode=case.get("mode") == "control", controlnet_conditioning_scale=case["scales"],
        control_guidance_start=[float(start) for start, _ in windows],
        control_guidance_end=[float(end) for _, end in windows], **SIZE, **pictures, **more,
    )  # fmt: skip


ASKED: dict[str, Any] = {"steps": 4, "guidance": 5.0}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(1)
def test_equals_diffusers(folders, union: Path, name: str) -> None:
    case = CASES[name]
    expected = theirs(folders["sdxl"], union, case)
    for backend in BACKENDS:
        with qwenimg.load(folders["sdxl"], backend=backend, precision="fp32") as pipe:
            asked = ASKED | {"control": controls(union, case), "control_mode": case.get("mode", "balanced")}
            made = pipe(PROMPT, seed=SEED, negative_prompt=NEGATIVE, **SIZE, **asked)
            compare(f"{name}, {backend}", made, expected)
            strongly(pipe, made, **ASKED)


@pytest.mark.sample(0)
def test_inpaint_takes_a_mask(folders, union: Path) -> None:
    """The pixels within the mask are black."""
    case = {"kinds": ["inpaint"], "modes": [7], "scales": [1.0]}
    black = np.where(MASK[..., None] > 127, np.uint8(0), START)
    expected = theirs(
        folders["sdxl"], union, case, "Inpaint", image=START, mask_image=MASK, strength=0.8, seen=[black]
    )  # fmt: skip
    for backend in BACKENDS:
        with qwenimg.load(folders["sdxl"], backend=backend, precision="fp32") as pipe:
            control = Control(str(union), "a", "inpaint", picture=START)
            asked = ASKED | {"control": control, "image": START, "strength": 0.8}
            made = pipe(PROMPT, seed=SEED, negative_prompt=NEGATIVE, mask=MASK, **SIZE, **asked)
            compare(backend, made, expected)
            with pytest.raises(UsageError, match="paints within a mask: give it with --mask"):
                pipe.check(PROMPT, **SIZE, **asked)


@pytest.mark.sample(0)
def test_beside_another_network_and_in_16_bits(folders, union: Path, tmp_path: Path) -> None:
    net = write_controlnet(tmp_path / "canny", UNET)
    asked = ASKED | {"control": [Control(str(union), "a", "depth", picture=WIDE), (net, HIGH)]}
    for backend in BACKENDS:
        for precision in ("fp32", "bf16"):
            with qwenimg.load(folders["sdxl"], backend=backend, precision=precision) as pipe:
                both = pipe(PROMPT, seed=SEED, negative_prompt=NEGATIVE, **SIZE, **asked).pixels.astype(int)
                alone = pipe(PROMPT, seed=SEED, negative_prompt=NEGATIVE, **SIZE, **asked | {"control": (net, HIGH)})
                assert np.abs(both - alone.pixels).max() >= 8


@pytest.mark.parametrize("kinds", [6, 8])
@pytest.mark.sample(0)
def test_published_manifest(kinds: int) -> None:
    from diffusers import ControlNetUnionModel
    from support.sd_models import PUBLISHED

    sdxl = {key: value for key, value in PUBLISHED["SDXL base"].items() if key not in ("up_block_types", "in_channels")}
    sizes = {"conditioning_embedding_out_channels": (16, 32, 96, 256), "num_control_type": kinds}
    known = set(ControlNetUnionModel.__init__.__annotations__)
    with torch.device("meta"):
        model = ControlNetUnionModel(**{key: value for key, value in sdxl.items() if key in known} | sizes)
    data = unet_controlnet_union.NETWORK.fields(dict(model.config))
    config = parse(UNetControlNetUnionConfig, data, source="config.json", ignored=unet.IGNORED_CONFIG)
    made = unet_controlnet_union.manifest(config)
    theirs = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    assert {unet_controlnet_union.published(key): shape for key, shape in made.items()} == theirs
    assert {unet_controlnet_union.rename(key) for key in theirs} == set(made)
    parameters = sum(map(prod, made.values()))
    print(f"{kinds} kinds: {len(made)} tensors, {parameters:,} parameters")
    assert len(made) == 863 and round(parameters / 1e6, 2) == {6: 1255.96, 8: 1256.61}[kinds]
    assert config.kinds == control_text.KINDS[:kinds]


def test_the_whole_of_a_tiny_union_moves_its_results() -> None:
    """None of its tensors is zero: a fault in one would show above."""
    assert all(tensor.abs().max() > 0 for tensor in tiny_union(UNET).state_dict().values())
