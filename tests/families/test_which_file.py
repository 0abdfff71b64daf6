"""One file given as a model: the family that reads it, and what is said of a file that none reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.cli_runner import cli

from qwenimg.common.base.errors import ModelError
from qwenimg.common.families import registry
from qwenimg.common.families.part_file import ModelFile
from qwenimg.common.families.stable_diffusion.family import FAMILY as STABLE_DIFFUSION

# the name of a tensor -> what is said of its file
OTHERS = {
    "model.diffusion_model.transformer_blocks.0.img_mod.1.weight": ("is Qwen-Image's transformer", "--transformer"),
    "transformer_blocks.0.img_mod.1.weight": ("is Qwen-Image's transformer", "--transformer"),
    "decoder.mid_block.resnets.0.norm1.gamma": ("is a VAE of Qwen-Image, Krea 2 and Anima", "--vae"),
    "time_embedding.linear_1.weight": ("is Stable Diffusion's UNet", "--transformer"),
    "transformer_blocks.0.attn.to_q.lora_A.weight": ("is a LoRA", "--lora"),
    "some.other.weight": (
        "no checkpoint of a whole model that is known",
        "some.other.weight",
    ),
}


def write(path: Path, *names: str) -> Path:
    save_file({name: np.zeros((2, 3), np.float32) for name in names}, path)
    return path


@pytest.mark.parametrize("name", OTHERS)
def test_what_no_family_reads_is_named(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / "x.safetensors", name)
    with pytest.raises(ModelError) as caught:
        registry.of_file(file)
    print(caught.value)
    assert all(word in str(caught.value) for word in ("x.safetensors", *OTHERS[name])) and len(str(caught.value)) < 281
    cli("a ring", "-m", str(file), "--backend", "cpu").refused(5, "x.safetensors", OTHERS[name][-1])


@pytest.mark.parametrize("name", ["HeliosModularPipeline", None, "x\n" * 9])
def test_a_modular_folder_of_diffusers_is_named(tmp_path: Path, name: object) -> None:
    """It has an index of another name, and a class that no model of this version has."""
    folder = tmp_path / "klein"
    (folder / "transformer").mkdir(parents=True)
    write(folder / "transformer" / "model.safetensors", "x")
    (folder / "modular_model_index.json").write_text(json.dumps({"_class_name": name}))
    words = (
        "klein",
        "is a modular pipeline of diffusers (modular_model_index.json: ",
        "which this version does not open",
    )
    cli("info", str(folder)).refused(5, *words)
    cli("a ring", "-m", str(folder), "--backend", "cpu").refused(5, *words)
    (folder / "modular_model_index.json").write_text("{")
    cli("info", str(folder)).refused(5, "modular_model_index.json")


def test_each_family_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order, and not the first with single files alone."""
    diffusion = STABLE_DIFFUSION
    file = write(tmp_path / "x.safetensors", "model.diffusion_model.input_blocks.0.0.weight")
    assert registry.of_file(file) is diffusion
    asked = list[str]()

    def model(answer: bool, name: str) -> ModelFile:
        is_in = lambda header: bool(asked.append(name)) or answer  # noqa: E731
        return ModelFile(title=name, parts=(), is_in=is_in, open=lambda path: {})

    first, second = (replace(diffusion, name=name, files=(model(name == "b", name),)) for name in ("a", "b"))
    monkeypatch.setattr(registry, "FAMILIES", (first, second, diffusion))
    assert registry.of_file(file) is second and asked == ["a", "b"]
