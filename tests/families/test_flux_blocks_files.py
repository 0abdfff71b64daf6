"""LongCat-Image's, Ovis-Image's and Chroma's transformers in files of their own, by Flux.1's names: they draw what the
folder draws, bit for bit, also behind a prefix and after `convert`; and what is no file of theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import tiny_chroma, tiny_longcat, tiny_ovis
from support.cli_runner import cli
from support.family_cases import BACKENDS

import qwenimg
from qwenimg.common.base.errors import ModelError
from qwenimg.common.families import registry

ASKED: dict[str, Any] = {"width": 48, "height": 32, "steps": 2, "seed": 3, "guidance": 3.0}
CASES = {
    "longcat": ("LongCatImageTransformer2DModel", tiny_longcat),
    "ovis": ("OvisImageTransformer2DModel", tiny_ovis),
    "chroma": ("ChromaTransformer2DModel", tiny_chroma),
}


def tensors(kind: str, folder: Path) -> dict[str, torch.Tensor]:
    import diffusers

    name, module = CASES[kind]
    return module.transformer_file(getattr(diffusers, name).from_pretrained(folder / "transformer"))


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(2)
def test_a_file_draws_what_the_folder_draws(tmp_path: Path, tiny: dict[str, Path], kind: str, backend: str) -> None:
    found = {f"model.diffusion_model.{name}": value for name, value in tensors(kind, tiny[kind]).items()}
    save_file(found, tmp_path / "it.safetensors")
    part = registry.identify_file(tmp_path / "it.safetensors")
    assert part is not None and part.option == "transformer" and [one.name for one in part.families] == [kind]
    drawn = [
        qwenimg.load(tiny[kind], backend=backend, precision="fp32", **more)("a red circle", **ASKED).latents
        for more in ({}, {"transformer": tmp_path / "it.safetensors"})
    ]
    assert np.array_equal(*drawn) and drawn[0].std() > 0.1


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.sample(1)
def test_converted(tmp_path: Path, tiny: dict[str, Path], kind: str) -> None:
    """From such a file to a folder that diffusers' class opens, and that draws the same."""
    import diffusers

    save_file(tensors(kind, tiny[kind]), tmp_path / "it.safetensors")
    made = cli("convert", str(tiny[kind]), str(tmp_path / "out"), "--transformer", str(tmp_path / "it.safetensors"))
    assert made.code == 0, made.err
    drawn = [
        qwenimg.load(folder, backend="cpu", precision="fp32")("a red circle", **ASKED).latents
        for folder in (tiny[kind], tmp_path / "out")
    ]
    assert np.array_equal(*drawn)
    one, other = (
        getattr(diffusers, CASES[kind][0]).from_pretrained(folder / "transformer").state_dict()
        for folder in (tiny[kind], tmp_path / "out")
    )
    assert one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.sample(0)
def test_radiance_is_refused_by_name(tmp_path: Path, tiny: dict[str, Path]) -> None:
    found = tensors("chroma", tiny["chroma"]) | {"nerf_image_embedder.embedder.0.weight": torch.zeros(4, 4)}
    save_file(found, tmp_path / "radiance.safetensors")
    told = cli("info", str(tmp_path / "radiance.safetensors"))
    assert "Chroma1-Radiance" in told.out.decode()
    with pytest.raises(ModelError, match="Chroma1-Radiance"):
        qwenimg.load(tiny["chroma"], backend="cpu", transformer=tmp_path / "radiance.safetensors")
