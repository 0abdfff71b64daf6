"""LoRAs of Krea 2 in the names of several trainers: each draws what the weights draw that diffusers made with it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import peer
from support.relative import relative
from support.tiny_krea2 import tiny_dit

import qwenimg
from qwenimg.common.families import registry
from qwenimg.common.networks.denoisers import krea2_dit
from qwenimg.common.parts import lora_layers
from qwenimg.common.weights.loras.lora_names import find

SIDE = 1e-4  # relative L2 of latents: products beside the weights sum in another order
SEEN = 1e-2  # the least that the LoRA changes
ASKED: dict[str, Any] = {"width": 48, "height": 32, "steps": 2, "seed": 4, "guidance": 1.0}
Tensors = dict[str, torch.Tensor]


def linears(model: torch.nn.Module) -> list[str]:
    return [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]


def authors(path: str) -> str:
    return krea2_dit.authors_name(f"{path}.weight").removesuffix(".weight")


def flat(path: str) -> str:
    return "lora_unet_" + path.replace(".", "_")


SPELLINGS = {
    "diffusers": lambda path: f"transformer.{path}",
    "ComfyUI, the authors' trainer": lambda path: f"diffusion_model.{authors(path)}",
    "AI-Toolkit": lambda path: f"base_model.model.{authors(path)}",
    "kohya": lambda path: flat(authors(path)),
    "flat names of diffusers": flat,
}
BY_DIFFUSERS = tuple(SPELLINGS)[:3]


def halves(model: torch.nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Of every layer in the blocks, the tower and outside."""
    generator = torch.Generator().manual_seed(11)
    return {
        path: (torch.randn(2, inputs, generator=generator), 0.2 * torch.randn(outputs, 2, generator=generator))
        for path in linears(model)
        for outputs, inputs in [model.get_submodule(path).weight.shape]
    }


def spelled(name: str, model: torch.nn.Module) -> Tensors:
    tensors: Tensors = {}
    for path, (down, up) in halves(model).items():
        called = SPELLINGS[name](path)
        is_flat = called.startswith("lora_unet_")
        tensors[f"{called}.{'lora_down' if is_flat else 'lora_A'}.weight"] = down
        tensors[f"{called}.{'lora_up' if is_flat else 'lora_B'}.weight"] = up
        if is_flat:
            tensors[f"{called}.alpha"] = torch.tensor(2.0)
    return tensors


@pytest.fixture(scope="module")
def merged(tiny_krea2: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """By spelling the folder with the weights that diffusers made."""
    root, made = tmp_path_factory.mktemp("merged"), {}
    for name in BY_DIFFUSERS:
        model = tiny_dit()
        pipe = peer.quiet().Krea2Pipeline(
            transformer=model, vae=None, text_encoder=None, tokenizer=None, scheduler=None
        )
        pipe.load_lora_weights(spelled(name, model))
        model.fuse_lora()
        model.unload_lora()
        made[name] = shutil.copytree(tiny_krea2["krea2"], root / name, ignore=shutil.ignore_patterns("transformer"))
        model.save_pretrained(made[name] / "transformer")
    yield made


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.sample(1)
def test_it_draws_what_diffusers_merged(
    tiny_krea2: dict[str, Path], merged: dict[str, Path], tmp_path: Path, name: str, backend: str
) -> None:
    file = tmp_path / "a.safetensors"
    save_file({key: value.contiguous() for key, value in spelled(name, tiny_dit()).items()}, file)
    plain, ours = (
        qwenimg.load(tiny_krea2["krea2"], backend, "fp32")("a ring", lora=lora, **ASKED).latents
        for lora in ([], [str(file)])
    )
    theirs = qwenimg.load(merged.get(name, merged["diffusers"]), backend, "fp32")("a ring", **ASKED).latents
    error, change = relative(ours, theirs), relative(plain, theirs)
    print(f"{name} on {backend}: {error:.1e} (limit {SIDE}), it changes {change:.1e}")
    assert error <= SIDE and change > SEEN


def test_every_layer_has_all_of_its_names(tiny_krea2: dict[str, Path]) -> None:
    opened = registry.open_model(tiny_krea2["krea2"])
    opened.checkpoint.close()
    names, paths = lora_layers.names(opened.checkpoint), linears(tiny_dit())
    assert len(paths) == 56
    for path in paths:
        for name in (path, authors(path), *(spelling(path) for spelling in SPELLINGS.values())):
            [target] = find(names, name)
            assert (target.component, target.name) == ("transformer", f"{path}.weight"), name
    for name in ("transformer_blocks.0.scale_shift_table", "blocks.0.mod.lin", "blocks.9.attn.wq"):
        assert not find(names, name)
