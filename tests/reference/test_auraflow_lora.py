"""LoRAs of AuraFlow in the names of several trainers: the change of each weight is that of diffusers, where it reads
them, and one change is one picture in every spelling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import lora_cases as cases
from support.cli_runner import cli
from support.tiny_auraflow import authors_name, tiny_dit

import qwenimg
from qwenimg.common.families import registry
from qwenimg.common.hub.describe import describe
from qwenimg.common.parts import lora_layers
from qwenimg.common.weights.loras import lora as loras
from qwenimg.common.weights.loras.lora_names import Names, find

BACKENDS = ("cpu", "mlx")
TOLERANCE = 1e-6  # of the largest weight: float32 sums in another order
SIDE = 1e-4  # relative L2 of latents: products beside the weights sum in another order
ASKED: dict[str, Any] = {"width": 48, "height": 32, "steps": 2, "seed": 4, "guidance": 2.0}
DIALECTS = {  # with the names of its authors, or of diffusers
    "diffusers": (cases.Dialect("transformer.", cases.PEFT_HALVES), False),
    "ai-toolkit": (cases.Dialect("diffusion_model.", cases.PEFT_HALVES), False),
    "ComfyUI": (cases.Dialect("diffusion_model.", cases.KOHYA_HALVES, alpha=True, scale=cases.Q), True),
    "kohya": (cases.Dialect("lora_unet_", cases.KOHYA_HALVES, flat=True, alpha=True, scale=cases.Q), True),
    "kohya, diffusers' names": (cases.Dialect("lora_unet_", cases.KOHYA_HALVES, flat=True), False),
    "bare": (cases.Dialect("", cases.NAMED_HALVES), True),
}


@pytest.fixture(scope="module")
def names(tiny_auraflow: Path) -> Names:
    opened = registry.open_model(tiny_auraflow)
    opened.checkpoint.close()
    return lora_layers.names(opened.checkpoint)


def linears(model: torch.nn.Module) -> list[str]:
    return [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]


def in_blocks(model: torch.nn.Module) -> list[str]:
    return [path for path in linears(model) if "_transformer_blocks." in path]


def test_every_layer_has_all_of_its_names(names: Names) -> None:
    paths = linears(tiny_dit())
    assert len(paths) == 62
    for path in paths:
        theirs = authors_name(path)
        called = [path, theirs, f"transformer.{path}", f"diffusion_model.{theirs}", f"base_model.model.{path}"]
        called += [f"lora_unet_{one.replace('.', '_')}" for one in (theirs, path)]
        for name in called:
            [target] = find(names, name)
            assert (target.component, target.name) == ("transformer", f"{path}.weight"), name
    for name in ("double_layers.0.attn.w3q", "single_transformer_blocks.9.attn.to_q", "double_layers.0.modCX.1"):
        assert not find(names, name)


def test_changes_are_those_of_diffusers(tmp_path: Path, names: Names) -> None:
    pytest.importorskip("peft")
    from diffusers import AuraFlowPipeline

    model = tiny_dit()
    before = {name: value.detach().numpy().copy() for name, value in model.named_parameters()}
    blocks = in_blocks(model)
    made = {path: cases.lora(before[f"{path}.weight"].shape, i) for i, path in enumerate(blocks)}
    file = cases.written(tmp_path / "a.safetensors", made, DIALECTS["diffusers"][0])
    pipe = AuraFlowPipeline(transformer=model, vae=None, text_encoder=None, tokenizer=None, scheduler=None)
    pipe.load_lora_weights(file)
    model.fuse_lora()
    model.unload_lora()
    after = {name: value.detach().numpy() for name, value in model.named_parameters()}
    deltas, worst, changed = loras.fit(loras.read_lora(file), names)["transformer"], 0.0, 0
    for name, weight in before.items():
        mine = weight + deltas[name][0].added(weight) if name in deltas else weight
        changed += not np.array_equal(weight, after[name])
        worst = max(worst, float(np.abs(mine - after[name]).max() / np.abs(after[name]).max()))
    print(f"{changed} weights, error {worst:.1e} (limit {TOLERANCE})")
    assert changed == len(deltas) == len(blocks) and worst < TOLERANCE


def written(path: Path, spelling: str) -> str:
    """One change of some layers, with the strength at which it is the same in every spelling."""
    dialect, by_authors = DIALECTS[spelling]
    shapes = {name: tuple(value.shape) for name, value in tiny_dit().state_dict().items()}
    chosen = [path for path in in_blocks(tiny_dit()) if ".1." in path]
    modules = {
        authors_name(one) if by_authors else one: cases.lora(shapes[f"{one}.weight"], i) for i, one in enumerate(chosen)
    }
    return f"{cases.written(path, modules, dialect)}:{1 / dialect.scale:g}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_every_spelling_draws_the_same(tiny_auraflow: Path, tmp_path: Path, backend: str) -> None:
    """And what the folder draws that `convert` writes with it."""
    pipe, first = qwenimg.load(tiny_auraflow, backend, "fp32"), written(tmp_path / "0.safetensors", "diffusers")
    plain = pipe("a ring", **ASKED).latents
    expected = pipe("a ring", lora=first, lora_mode="fuse", **ASKED).latents
    assert not np.allclose(expected, plain, rtol=0.01)
    for spelling in DIALECTS:
        one = written(tmp_path / f"{spelling}.safetensors", spelling)
        fused, side = (pipe("a ring", lora=one, lora_mode=mode, **ASKED).latents for mode in ("fuse", "side"))
        errors = [float(np.linalg.norm(made - expected) / np.linalg.norm(expected)) for made in (fused, side)]
        print(f"{backend} {spelling}: {errors[0]:.1e}, beside the weights {errors[1]:.1e} (limit {SIDE})")
        assert max(errors) < SIDE
    assert cli("convert", str(tiny_auraflow), str(tmp_path / "o"), "--lora", first, "--quiet").code == 0
    assert np.array_equal(qwenimg.load(tmp_path / "o", backend, "fp32")("a ring", **ASKED).latents, expected)


def test_info_says_which_model_it_is_for(tmp_path: Path) -> None:
    """By the published sizes."""
    sizes = {"double_layers.0.attn.w1q": (3072, 3072), "single_layers.31.mlp.c_fc1": (8192, 3072)}
    made = {name: cases.lora(shape, 1) for name, shape in sizes.items()}
    lines = describe(cases.written(tmp_path / "a.safetensors", made, DIALECTS["ComfyUI"][0])).lines
    print(*lines, sep="\n")
    assert "fits: AuraFlow" in lines
