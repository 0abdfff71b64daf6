"""LoRAs of Ovis-Image in the names of several trainers: the change of each weight is the product of the factors at its
places in a file of these names. In its authors' names the halves of a gated layer are modules of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.tiny_ovis import authors_file, tiny_dit, transformer_file

import qwenimg
from qwenimg.common.base.errors import ModelError
from qwenimg.common.families import registry
from qwenimg.common.networks.denoisers import ovis_dit
from qwenimg.common.weights.loras import lora
from qwenimg.common.weights.loras.lora import read_lora

RANK, ALPHA = 2, 3.0
FLOAT32 = 1e-6  # relative L2 of a change of a weight
SIDE = 1e-5  # of latents: products beside the weights sum in another order
SEEN = 1e-2  # the least that the LoRA changes
ASKED: dict[str, Any] = {"width": 48, "height": 32, "steps": 2, "seed": 4, "guidance": 2.0}
Tensors = dict[str, torch.Tensor]


def named(path: str) -> str:
    return f"transformer.{path}"


def flat(path: str) -> str:
    return "lora_unet_" + path.replace(".", "_")


SPELLINGS: dict[str, tuple[Callable[[Any], Tensors], Callable[[str], str]]] = {
    "diffusers": (lambda model: dict(model.state_dict()), named),
    "PEFT": (lambda model: dict(model.state_dict()), lambda path: f"base_model.model.{path}"),
    "kohya, of diffusers": (lambda model: dict(model.state_dict()), flat),
    "ComfyUI": (transformer_file, lambda path: f"diffusion_model.{path}"),
    "kohya": (transformer_file, flat),
    "its authors' names": (authors_file, lambda path: f"diffusion_model.{path}"),
}


def written(name: str) -> tuple[Tensors, dict[str, np.ndarray]]:
    """A LoRA of every layer, and the change of each of diffusers' weights, in float64: by a file whose values are their
    numbers in the model."""
    file, spell = SPELLINGS[name]
    model = tiny_dit()
    state, count = model.state_dict(), 0
    for key, value in state.items():
        state[key] = torch.arange(count, count + value.numel()).reshape(value.shape).float()  # exact below 2**24
        count += value.numel()
    model.load_state_dict(state)
    generator, tensors, flat_changes = torch.Generator().manual_seed(11), Tensors(), np.full(count, np.nan)
    for key, numbers in file(model).items():
        if numbers.ndim != 2:
            continue
        down = torch.randn(RANK, numbers.shape[1], generator=generator)
        up = 0.1 * torch.randn(numbers.shape[0], RANK, generator=generator)
        path = spell(key.removesuffix(".weight"))
        is_flat = path.startswith("lora_unet_")
        tensors[f"{path}.{'lora_down' if is_flat else 'lora_A'}.weight"] = down
        tensors[f"{path}.{'lora_up' if is_flat else 'lora_B'}.weight"] = up
        tensors[f"{path}.alpha"] = torch.tensor(ALPHA)
        flat_changes[numbers.long().numpy()] = (up.double() @ down.double()).numpy() * ALPHA / RANK
    changes = {
        ovis_dit.rename(key): flat_changes[value.long().numpy()] for key, value in state.items() if value.ndim == 2
    }
    return tensors, changes


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_change_is_its_product(tiny_ovis: Path, tmp_path: Path, name: str) -> None:
    tensors, expected = written(name)
    save_file(tensors, tmp_path / "a.safetensors")
    opened = registry.open_model(tiny_ovis)
    changes = lora.fit(read_lora(tmp_path / "a.safetensors"), opened.family.lora_names(opened.checkpoint))
    made, worst = changes["transformer"], 0.0
    assert made.keys() == expected.keys()
    for key, wanted in expected.items():
        products = [up.astype(np.float64) @ down for down, up in (one.factors() for one in made[key])]
        for total in (sum(products), sum(one.added(np.zeros(wanted.shape, np.float32)) for one in made[key])):
            worst = max(worst, float(np.linalg.norm(total - wanted) / np.linalg.norm(wanted)))
    opened.checkpoint.close()
    print(f"{name}, {len(made)} weights: at most {worst:.1e} (limit {FLOAT32})")
    assert worst <= FLOAT32


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(1)
def test_it_draws_what_the_changed_weights_draw(tiny_ovis: Path, tmp_path: Path, backend: str) -> None:
    tensors, changes = written("ComfyUI")
    save_file(tensors, tmp_path / "a.safetensors")
    model = tiny_dit()
    loud = qwenimg.load(tiny_ovis, backend, "fp32")
    plain, ours = (loud("a ring", lora=one, **ASKED).latents for one in ([], [f"{tmp_path / 'a.safetensors'}:0.3"]))
    state = dict(type(model).from_pretrained(tiny_ovis / "transformer").state_dict())
    for key, value in state.items():
        if (change := changes.get(ovis_dit.rename(key))) is not None:
            value += 0.3 * torch.from_numpy(change).float()
    save_file(state, tmp_path / "changed.safetensors")
    theirs = qwenimg.load(tiny_ovis, backend, "fp32", transformer=tmp_path / "changed.safetensors")("a ring", **ASKED)
    error, change = (float(np.linalg.norm(ours - other) / np.linalg.norm(ours)) for other in (theirs.latents, plain))
    print(f"{backend}: {error:.1e} (limit {SIDE}), it changes {change:.1e}")
    assert error <= SIDE and change > SEEN


def test_a_magnitude_of_half_a_layer_is_refused(tiny_ovis: Path, tmp_path: Path) -> None:
    tensors, _ = written("ComfyUI")
    path = "diffusion_model.double_blocks.0.img_mlp.gate_proj"
    save_file(tensors | {f"{path}.dora_scale": torch.ones(264, 1)}, tmp_path / "a.safetensors")
    with pytest.raises(ModelError, match=r"gate_proj.*magnitude is of a part of a layer") as caught:
        qwenimg.load(tiny_ovis, "cpu", "fp32")("a ring", lora=[str(tmp_path / "a.safetensors")], **ASKED)
    assert len(str(caught.value)) <= 300


def test_a_layer_and_its_half_are_refused(tiny_ovis: Path, tmp_path: Path) -> None:
    half, whole = "diffusion_model.double_blocks.0.img_mlp.up_proj", "transformer.transformer_blocks.0.ff.net.0.proj"
    tensors = {key: value for name in ("ComfyUI", "diffusers") for key, value in written(name)[0].items()}
    kept = {key: value for key, value in tensors.items() if key.startswith((half, whole))}
    save_file(kept, tmp_path / "a.safetensors")
    with pytest.raises(ModelError, match="are of one weight"):
        qwenimg.load(tiny_ovis, "cpu", "fp32")("a ring", lora=[str(tmp_path / "a.safetensors")], **ASKED)
