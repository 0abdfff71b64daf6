"""LoRAs of Anima in the names of several trainers: each draws what the weights draw that diffusers made with it. They
change the text conditioner too, as that of Anima Turbo does."""

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
from support.tiny_anima import tiny_conditioner, tiny_dit

import qwenimg
from qwenimg.common.families import registry
from qwenimg.common.families.anima.checkpoint import CONDITIONER
from qwenimg.common.networks.denoisers import anima_dit
from qwenimg.common.parts import lora_layers
from qwenimg.common.weights.loras.lora_names import find

SIDE = 1e-4  # relative L2 of latents: products beside the weights sum in another order
SEEN = 1e-2  # the least that the LoRA changes
ASKED: dict[str, Any] = {"width": 48, "height": 32, "steps": 2, "seed": 4, "guidance": 2.0}
Tensors = dict[str, torch.Tensor]


def layers(part: str) -> dict[str, torch.nn.Linear]:
    model = tiny_dit() if part == "transformer" else tiny_conditioner()
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}


def authors(part: str, path: str) -> str:
    if part == CONDITIONER:
        return f"llm_adapter.{path}"
    return anima_dit.authors_name(f"{path}.weight").removesuffix(".weight")


def flat(path: str) -> str:
    return "lora_unet_" + path.replace(".", "_")


SPELLINGS = {
    "diffusers": lambda part, path: f"{part}.{path}",
    "its authors' trainer, ComfyUI": lambda part, path: f"diffusion_model.{authors(part, path)}",
    "AI-Toolkit": lambda part, path: f"base_model.model.{authors(part, path)}",
    "kohya": lambda part, path: flat(authors(part, path)),
    "its authors' files": lambda part, path: f"net.{authors(part, path)}",
}
BY_DIFFUSERS = tuple(SPELLINGS)[:2]


def spelled(name: str) -> Tensors:
    """Factors of every layer of both networks."""
    generator, tensors = torch.Generator().manual_seed(11), Tensors()
    for part in ("transformer", CONDITIONER):
        for path, layer in layers(part).items():
            down = torch.randn(2, layer.in_features, generator=generator)
            up = 0.1 * torch.randn(layer.out_features, 2, generator=generator)
            called = SPELLINGS[name](part, path)
            is_flat = called.startswith("lora_unet_")
            tensors[f"{called}.{'lora_down' if is_flat else 'lora_A'}.weight"] = down
            tensors[f"{called}.{'lora_up' if is_flat else 'lora_B'}.weight"] = up
            tensors |= {f"{called}.alpha": torch.tensor(2.0)} if is_flat else {}
    return tensors


@pytest.fixture(scope="module")
def merged(tiny_anima: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """By spelling the folder with the weights that diffusers made."""
    root, made = tmp_path_factory.mktemp("merged"), {}
    for name in BY_DIFFUSERS:
        pipe = peer.quiet().modular_pipelines.anima.AnimaAutoBlocks().init_pipeline()
        pipe.update_components(transformer=tiny_dit(), text_conditioner=tiny_conditioner())
        pipe.load_lora_weights(spelled(name))
        ignored = shutil.ignore_patterns("transformer", CONDITIONER)
        made[name] = shutil.copytree(tiny_anima, root / name.partition(",")[0], ignore=ignored)
        for part in ("transformer", CONDITIONER):
            network = getattr(pipe, part)
            network.fuse_lora()
            network.unload_lora()
            network.save_pretrained(made[name] / part)
    yield made


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.sample(1)
def test_it_draws_what_diffusers_merged(
    tiny_anima: Path, merged: dict[str, Path], tmp_path: Path, name: str, backend: str
) -> None:
    file = tmp_path / "a.safetensors"
    save_file({key: value.contiguous() for key, value in spelled(name).items()}, file)
    plain, ours = (
        qwenimg.load(tiny_anima, backend, "fp32")("a ring", lora=lora, **ASKED).latents for lora in ([], [str(file)])
    )
    theirs = qwenimg.load(merged.get(name, merged["diffusers"]), backend, "fp32")("a ring", **ASKED).latents
    error, change = relative(ours, theirs), relative(plain, theirs)
    print(f"{name} on {backend}: {error:.1e} (limit {SIDE}), it changes {change:.1e}")
    assert error <= SIDE and change > SEEN


def test_every_layer_has_all_of_its_names(tiny_anima: Path) -> None:
    opened = registry.open_model(tiny_anima)
    opened.checkpoint.close()
    names, count = opened.family.lora_names(opened.checkpoint), 0
    for part, start in (("transformer", ""), (CONDITIONER, "llm_adapter.")):
        for path in layers(part):
            count += 1
            for spelling in SPELLINGS.values():
                [target] = find(names, spelling(part, path))
                assert (target.component, target.name) == (part, f"{start}{path}.weight")
    assert count == 75
    for name in ("llm_adapter.embed", "blocks.9.self_attn.q_proj", "llm_adapter.blocks.9.self_attn.q_proj"):
        assert not find(names, name)
    assert lora_layers.names(opened.checkpoint)[0].names.keys() == names[0].names.keys()
