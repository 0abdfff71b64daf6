"""Flux.1 under control, from a prompt and pictures to pixels, on both backends, against diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import oracle_flux, oracle_flux_control, peer
from support.tiny_flux_control import LAYERS, write_controlnet

import qwenimg
from qwenimg import Pipeline
from qwenimg.common.networks.denoisers.flux_controlnet import KINDS
from qwenimg.common.pictures.preprocessors import grey
from qwenimg.common.request.control_text import Control

BACKENDS = ("cpu", "mlx")
LATENTS = 1e-5  # relative L2 of the final latents; measured at most 8e-7
PIXELS = 2  # of 255: a value on a rounding edge may go either way
MOVES = 8  # levels of 255 by which each input must move some pixel: a fault in it would show

RNG = np.random.default_rng(5)
WIDE, HIGH, START = (RNG.integers(0, 256, (h, w, 3), np.uint8) for h, w in ((30, 50), (70, 40), (48, 80)))
GREY = grey(HIGH)
HOLE = np.zeros((48, 80), np.uint8)
HOLE[:, 32:] = 255
ALWAYS = (0.0, 1.0)
Used = tuple[str, str, np.ndarray, float, tuple[float, float]]
CASES: dict[str, tuple[str, list[Used], dict[str, Any]]] = {
    "pro-2": ("dev", [("pro-2", "", WIDE, 0.8, ALWAYS)], {}),
    "pro-2-guided": (
        "dev", [("pro-2", "", HIGH, 0.7, ALWAYS)],
        {"true_cfg": 2.5, "negative_prompt": "blurry things, everywhere", "guidance": 5.0},
    ),
    "canny-in-the-middle": ("dev", [("canny", "", WIDE, 1.3, (0.3, 0.7))], {"steps": 5}),
    "union-depth": ("dev", [("union", "depth", WIDE, 0.7, ALWAYS)], {"width": 48, "height": 112}),
    "union-twice": (
        "dev", [("union", "low-quality", WIDE, 0.7, (0.0, 0.5)), ("union", "grey", GREY, 0.5, (0.3, 1.0))], {},
    ),
    "two": ("dev", [("canny", "", WIDE, 0.6, ALWAYS), ("canny-2", "", HIGH, 0.5, (0.3, 1.0))], {}),
    "image": ("dev", [("union", "tile", WIDE, 0.7, ALWAYS)], {"image": START, "strength": 0.8, "steps": 5}),
    "mask": ("dev", [("canny", "", WIDE, 0.7, ALWAYS)], {"image": START, "mask": HOLE, "strength": 0.8, "steps": 5}),
    "lora": ("dev", [("pro-2", "", WIDE, 0.7, ALWAYS)], {"lora": True}),
    "schnell": ("schnell", [("schnell", "", WIDE, 0.8, ALWAYS)], {"guidance": 0.0}),
    "schnell-guided-net": ("schnell", [("pro-2", "", WIDE, 0.8, ALWAYS)], {"guidance": 2.0}),
    "undistilled": ("undistilled", [("schnell", "", WIDE, 0.8, ALWAYS)], {"true_cfg": 3.0, "negative_prompt": "a dog"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("nets")
    made = {name: write_controlnet(folder / name, name) for name in LAYERS}
    return made | {"canny-2": write_controlnet(folder / "canny-2", "canny", 12)}


def kind_of(name: str) -> int | None:
    return KINDS[name] if name else None


def write_lora(folder: Path, path: Path) -> Path:
    """A LoRA of all linear layers of the blocks of a folder's transformer, by diffusers' names."""
    random, tensors = torch.Generator().manual_seed(3), {}
    for name, layer in oracle_flux.pipeline(folder, "text").transformer.named_modules():
        if isinstance(layer, torch.nn.Linear) and "transformer_blocks" in name:
            out, into = layer.weight.shape
            tensors[f"transformer.{name}.lora_A.weight"] = torch.randn((4, into), generator=random) / into**0.5
            tensors[f"transformer.{name}.lora_B.weight"] = torch.randn((out, 4), generator=random) / 2
    save_file(tensors, path)
    return path


def compare(folder: Path, variant: str, nets: dict[str, Path], used: list[Used], asked: dict[str, Any]) -> None:
    given = {"prompt": "a red circle", "width": 80, "height": 48, "steps": 3} | asked
    given |= {"guidance": 3.5} if variant == "dev" and "guidance" not in given else {}
    lora = write_lora(folder, nets["pro-2"].parent / "lora.safetensors") if given.pop("lora", False) else None
    renamed = {"steps": "num_inference_steps", "guidance": "guidance_scale", "true_cfg": "true_cfg_scale"}
    latents, pixels = oracle_flux_control.generate(
        folder,
        [(nets[net], kind_of(kind), *rest) for net, kind, *rest in used],
        seed=7,
        length=256 if variant == "schnell" else 512,
        lora=lora,
        **{renamed.get(name, name): value for name, value in given.items()},
    )
    assert pixels.std() > 10, "a constant picture would prove nothing"
    controls = [Control(str(nets[net]), "a", kind, s, *w, picture=picture) for net, kind, picture, s, w in used]
    more = {"lora": str(lora)} if lora else {}
    for backend in BACKENDS:
        pipe: Pipeline = qwenimg.load(folder, backend=backend, precision="fp32")
        ours = pipe(**given, **more, control=controls, seed=7)
        plain = pipe(**given, **more, seed=7)
        moved = np.abs(ours.pixels.astype(int) - plain.pixels).max()
        peer.check_picture(f"{backend} moved by {moved}", ours, (latents, pixels), LATENTS, PIXELS)
        assert moved >= MOVES


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(1)
def test_equals_diffusers(tiny_flux: dict[str, Path], nets: dict[str, Path], name: str) -> None:
    variant, used, asked = CASES[name]
    compare(tiny_flux[variant], variant, nets, used, asked)
