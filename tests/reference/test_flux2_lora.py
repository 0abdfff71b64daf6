"""LoRAs of Flux.2 in the names of several trainers: the change of each weight is that of diffusers' converters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.flux_loras import Tensors, by_diffusers, check_changes, random
from support.tiny_flux2 import tiny_dit

import qwenimg
from qwenimg.common.families import catalog, registry
from qwenimg.common.parts import lora_layers
from qwenimg.common.weights.loras import lora
from qwenimg.common.weights.loras.lora import read_lora

RANK, ALPHA = 2, 3.0
D = 3072
# Modules of the authors' layers in klein 4B: {name: (outputs, inputs)}
LAYERS = {
    "double_blocks.0.img_attn.qkv": (3 * D, D),
    "double_blocks.4.txt_attn.qkv": (3 * D, D),
    "double_blocks.1.img_attn.proj": (D, D),
    "double_blocks.1.txt_attn.proj": (D, D),
    "double_blocks.2.img_mlp.0": (6 * D, D),
    "double_blocks.2.img_mlp.2": (D, 3 * D),
    "double_blocks.3.txt_mlp.0": (6 * D, D),
    "double_blocks.3.txt_mlp.2": (D, 3 * D),
    "single_blocks.0.linear1": (9 * D, D),
    "single_blocks.19.linear2": (D, 4 * D),
}


def kohya() -> Tensors:
    out: Tensors = {}
    for name, (outputs, inputs) in LAYERS.items():
        module = f"lora_unet_{name.replace('.', '_')}"
        out[f"{module}.lora_down.weight"] = random(RANK, inputs)
        out[f"{module}.lora_up.weight"] = random(outputs, RANK)
        out[f"{module}.alpha"] = torch.tensor(ALPHA)
    return out


def ai_toolkit() -> Tensors:
    return {
        f"diffusion_model.{name}.lora_{side}.weight": random(*shape)
        for name, (outputs, inputs) in LAYERS.items()
        for side, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK)))
    }


@pytest.mark.parametrize(
    ("converter", "written"),
    [
        ("_convert_kohya_flux2_lora_to_diffusers", kohya),
        ("_convert_non_diffusers_flux2_lora_to_diffusers", ai_toolkit),
    ],
    ids=["kohya", "ai-toolkit"],
)
def test_changes_are_those_of_diffusers(tmp_path: Path, converter: str, written: Callable[[], Tensors]) -> None:
    model = registry.published(catalog.KNOWN["flux2-klein-4b"])
    assert model is not None
    expected, path = by_diffusers(converter, written()), tmp_path / "a.safetensors"
    save_file({key: value.contiguous() for key, value in written().items()}, path)
    changes = lora.fit(read_lora(path), lora_layers.names(model.checkpoint))["transformer"]
    check_changes(changes, expected)
    assert len(changes) == 14


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(0)
def test_fused_and_beside_are_alike(tiny_flux2: dict[str, Path], tmp_path: Path, backend: str) -> None:
    """A LoRA of every layer of the transformer, in diffusers' names."""
    shapes = {name: value.shape for name, value in tiny_dit().state_dict().items() if value.ndim == 2}
    path = tmp_path / "every.safetensors"
    save_file(
        {
            f"transformer.{name.removesuffix('.weight')}.lora_{side}.weight": 0.1 * random(*shape)
            for name, (outputs, inputs) in shapes.items()
            for side, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK)))
        },
        path,
    )
    pipe = qwenimg.load(tiny_flux2["flux2-klein"], backend=backend, precision="fp32")
    plain, fused, beside = (
        pipe("a ring", width=48, height=32, steps=2, seed=5, **more).latents
        for more in ({}, {"lora": str(path), "lora_mode": "fuse"}, {"lora": str(path), "lora_mode": "side"})
    )
    error, change = (float(np.linalg.norm(one - fused) / np.linalg.norm(fused)) for one in (beside, plain))
    print(f"{backend}: {error:.1e} apart, {change:.1e} from no LoRA")
    assert error < 1e-4 < 1e-2 < change
