"""LoRAs of SANA in the names of several trainers: the change of each weight is that of diffusers, kernels of the
feed-forward included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import lora_cases as cases
from support.cli_runner import cli
from support.tiny_sana import tiny_dit, transformer_file

import qwenimg
from qwenimg.common.families import registry
from qwenimg.common.hub.describe import describe
from qwenimg.common.networks.denoisers import sana_dit
from qwenimg.common.networks.denoisers.sana_names import place
from qwenimg.common.parts import lora_layers
from qwenimg.common.weights.loras import lora as loras
from qwenimg.common.weights.loras.lora_names import Names, find

BACKENDS = ("cpu", "mlx")
TOLERANCE = 1e-6  # of the largest weight: float32 sums in another order
SIDE = 1e-4  # relative L2 of latents: products beside the weights sum in another order
ASKED: dict[str, Any] = {"width": 96, "height": 64, "steps": 2, "seed": 4, "guidance": 2.0}
DIALECTS = {
    "diffusers": cases.Dialect("transformer.", cases.PEFT_HALVES),
    "PEFT": cases.Dialect("base_model.model.", cases.PEFT_HALVES),
    "ai-toolkit": cases.Dialect("diffusion_model.", cases.PEFT_HALVES, alpha=True, scale=cases.Q),
    "kohya": cases.Dialect("lora_unet_", cases.KOHYA_HALVES, flat=True, alpha=True, scale=cases.Q),
    "OneTrainer": cases.Dialect("lora_transformer_", cases.KOHYA_HALVES, flat=True, alpha=True, scale=cases.Q),
    "bare": cases.Dialect("", cases.NAMED_HALVES),
}


@pytest.fixture(scope="module")
def names(tiny_sana: dict[str, Path]) -> Names:
    opened = registry.open_model(tiny_sana["sana"])
    opened.checkpoint.close()
    return lora_layers.names(opened.checkpoint)


def layers(model: torch.nn.Module) -> list[str]:
    """Linear layers and 1x1 kernels of the blocks."""
    kinds = (torch.nn.Linear, torch.nn.Conv2d)
    found = [name for name, layer in model.named_modules() if isinstance(layer, kinds)]
    return [name for name in found if name.startswith("transformer_blocks.")]


def test_every_layer_has_all_of_its_names(names: Names) -> None:
    model = tiny_dit()
    theirs = {value.data_ptr(): name for name, value in transformer_file(model).items()}
    paths = layers(model)
    assert len(paths) == 33 and len(theirs) > 33
    config = sana_dit.SanaConfig()
    for path in paths:
        there = place(f"{path}.weight", config)
        called = [path, f"transformer.{path}", f"lora_unet_{path.replace('.', '_')}", f"base_model.model.{path}"]
        if there.rows.of == 1:
            called += [there.key.removesuffix(".weight"), f"diffusion_model.{there.key.removesuffix('.weight')}"]
        for name in called:
            [target] = find(names, name)
            assert (target.component, target.name) == ("transformer", f"{path}.weight"), name
    for name in ("blocks.0.attn.qkv", "diffusion_model.blocks.0.attn.qkv"):
        targets = sorted(find(names, name), key=lambda target: target.rows)
        assert [one.name for one in targets] == [f"transformer_blocks.0.attn1.to_{x}.weight" for x in "qkv"]
    assert not find(names, "transformer_blocks.9.attn1.to_q")


def test_changes_are_those_of_diffusers(tmp_path: Path, names: Names) -> None:
    pytest.importorskip("peft")
    from diffusers import SanaPipeline

    model = tiny_dit()
    before = {sana_dit.rename(name): value.detach().numpy().copy() for name, value in model.named_parameters()}
    paths = [path for path in layers(model) if not path.endswith("conv_depth")]
    made = {path: cases.lora(before[f"{path}.weight"].shape, i) for i, path in enumerate(paths)}
    file = cases.written(tmp_path / "a.safetensors", made, DIALECTS["diffusers"])
    pipe = SanaPipeline(transformer=model, vae=None, text_encoder=None, tokenizer=None, scheduler=None)
    pipe.load_lora_weights(file)
    model.fuse_lora()
    model.unload_lora()
    after = {sana_dit.rename(name): value.detach().numpy() for name, value in model.named_parameters()}
    deltas, worst, changed = loras.fit(loras.read_lora(file), names)["transformer"], 0.0, 0
    for name, weight in before.items():
        flat = weight.reshape(weight.shape[:2]) if weight.shape[2:] == (1, 1) else weight
        mine = flat + deltas[name][0].added(flat) if name in deltas else flat
        changed += not np.array_equal(weight, after[name])
        worst = max(worst, float(np.abs(mine - after[name].reshape(mine.shape)).max() / np.abs(after[name]).max()))
    print(f"{changed} weights, error {worst:.1e} (limit {TOLERANCE})")
    assert changed == len(deltas) == len(paths) and worst < TOLERANCE


def file_of(path: Path, dialect: str) -> Path:
    shapes = {
        "transformer_blocks.1.attn1.to_q": (60, 60),
        "transformer_blocks.0.attn2.to_out.0": (60, 60),
        "transformer_blocks.2.ff.conv_inverted": (276, 60, 1, 1),
        "transformer_blocks.2.ff.conv_point": (60, 138, 1, 1),
    }
    made = {name: cases.lora(shape, i) for i, (name, shape) in enumerate(shapes.items())}
    return cases.written(path, made, DIALECTS[dialect])


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_dialect_draws_the_same(tiny_sana: dict[str, Path], tmp_path: Path, backend: str) -> None:
    """Fused and beside the weights, and what the folder draws that `convert` writes with it."""
    pipe, first = qwenimg.load(tiny_sana["sana"], backend, "fp32"), file_of(tmp_path / "1.safetensors", "diffusers")
    plain = pipe("a ring", **ASKED).latents
    expected = pipe("a ring", lora=str(first), lora_mode="fuse", **ASKED).latents
    assert not np.allclose(expected, plain, rtol=0.01)
    for dialect, one in DIALECTS.items():
        file = f"{file_of(tmp_path / f'{dialect}.safetensors', dialect)}:{1 / one.scale:g}"
        made = [pipe("a ring", lora=file, lora_mode=mode, **ASKED).latents for mode in ("fuse", "side")]
        errors = [float(np.linalg.norm(one - expected) / np.linalg.norm(expected)) for one in made]
        print(f"{backend} {dialect}: {errors[0]:.1e}, beside the weights {errors[1]:.1e} (limit {SIDE})")
        assert max(errors) < SIDE
    assert cli("convert", str(tiny_sana["sana"]), str(tmp_path / "o"), "--lora", str(first), "--quiet").code == 0
    assert np.array_equal(qwenimg.load(tmp_path / "o", backend, "fp32")("a ring", **ASKED).latents, expected)


def test_info_says_which_model_it_is_for(tmp_path: Path) -> None:
    sizes = {"transformer_blocks.19.attn1.to_q": (2240, 2240), "transformer_blocks.0.attn2.to_k": (2240, 2240)}
    made = {name: cases.lora(shape, 1) for name, shape in sizes.items()}
    lines = describe(cases.written(tmp_path / "a.safetensors", made, DIALECTS["diffusers"])).lines
    print(*lines, sep="\n")
    assert "fits: SANA" in lines
