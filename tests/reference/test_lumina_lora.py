"""LoRAs of Lumina-Image 2.0 in the names of several trainers: the change of each weight is that of diffusers, where it
reads them, and a fused module is its three parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import lora_cases as cases
from support.cli_runner import cli
from support.tiny_lumina import authors_name, tiny_dit

import qwenimg
from qwenimg.common.families import registry
from qwenimg.common.hub.describe import describe
from qwenimg.common.networks.denoisers import lumina_dit
from qwenimg.common.parts import lora_layers
from qwenimg.common.weights.loras import lora as loras
from qwenimg.common.weights.loras.lora_names import Names, find

BACKENDS = ("cpu", "mlx")
TOLERANCE = 1e-6  # of the largest weight: float32 sums in another order
SIDE = 1e-4  # relative L2 of latents: products beside the weights sum in another order
ASKED: dict[str, Any] = {"width": 48, "height": 32, "steps": 2, "seed": 4, "guidance": 2.0}
DIALECTS = {
    "diffusers": cases.Dialect("transformer.", cases.PEFT_HALVES),
    "ai-toolkit": cases.Dialect("diffusion_model.", cases.PEFT_HALVES, alpha=True, scale=cases.Q),
    "ComfyUI": cases.Dialect("diffusion_model.", cases.KOHYA_HALVES, alpha=True, scale=cases.Q),
    "kohya": cases.Dialect("lora_unet_", cases.KOHYA_HALVES, flat=True, alpha=True, scale=cases.Q),
    "bare": cases.Dialect("", cases.NAMED_HALVES),
}


@pytest.fixture(scope="module")
def names(tiny_lumina: Path) -> Names:
    opened = registry.open_model(tiny_lumina)
    opened.checkpoint.close()
    return lora_layers.names(opened.checkpoint)


def linears(model: torch.nn.Module) -> list[str]:
    return [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]


def ours(path: str) -> str:
    return lumina_dit.rename(f"{path}.weight")


def in_its_authors_names(path: str) -> str:
    """The authors' name of a layer that is a tensor of its own there."""
    name = authors_name(path)
    return name.replace(".attn.to_out.0", ".attention.out").replace(".attn.to_", ".attention.to_")


def test_every_layer_has_all_of_its_names(names: Names) -> None:
    paths = linears(tiny_dit())
    assert len(paths) == 60
    for path in paths:
        own, theirs = ours(path).removesuffix(".weight"), in_its_authors_names(path)
        called = [path, own, theirs, f"transformer.{path}", f"diffusion_model.{theirs}"]
        called += [f"lora_unet_{one.replace('.', '_')}" for one in (theirs, path)]
        for name in called:
            [target] = find(names, name)
            assert (target.component, target.name) == ("transformer", f"{own}.weight"), name
    for name in ("layers.0.attn.norm_q", "layers.9.attn.to_q", "layers.0.adaLN_modulation.2"):
        assert not find(names, name)
    for name in ("text_encoder.layers.1.mlp.up_proj", "lora_te_model_layers_1_mlp_up_proj"):
        [target] = find(names, name)
        assert (target.component, target.name) == ("text_encoder", "layers.1.mlp.up_proj.weight")


def test_a_fused_layer_is_three_of_different_width(names: Names) -> None:
    for name in ("diffusion_model.layers.0.attention.qkv", "lora_unet_layers_0_attention_qkv"):
        targets = sorted(find(names, name), key=lambda target: target.rows)
        assert [target.name for target in targets] == [f"layers.0.attention.to_{x}.weight" for x in "qkv"]
        assert [(rows.begin, rows.end, rows.of) for rows in (one.rows for one in targets)] == [
            (0, 4, 8), (4, 6, 8), (6, 8, 8),
        ]  # fmt: skip
        assert {target.layer for target in targets} == {(176, 88)}


def test_changes_are_those_of_diffusers(tmp_path: Path, names: Names) -> None:
    pytest.importorskip("peft")
    from diffusers import Lumina2Pipeline

    model = tiny_dit()
    before = {lumina_dit.rename(name): value.detach().numpy().copy() for name, value in model.named_parameters()}
    blocks = [path for path in linears(model) if path.split(".")[0] in ("layers", "noise_refiner", "context_refiner")]
    made = {path: cases.lora(before[ours(path)].shape, i) for i, path in enumerate(blocks)}
    file = cases.written(tmp_path / "a.safetensors", made, DIALECTS["diffusers"])
    pipe = Lumina2Pipeline(transformer=model, vae=None, text_encoder=None, tokenizer=None, scheduler=None)
    pipe.load_lora_weights(file)
    model.fuse_lora()
    model.unload_lora()
    after = {lumina_dit.rename(name): value.detach().numpy() for name, value in model.named_parameters()}
    deltas, worst, changed = loras.fit(loras.read_lora(file), names)["transformer"], 0.0, 0
    for name, weight in before.items():
        mine = weight + deltas[name][0].added(weight) if name in deltas else weight
        changed += not np.array_equal(weight, after[name])
        worst = max(worst, float(np.abs(mine - after[name]).max() / np.abs(after[name]).max()))
    print(f"{changed} weights, error {worst:.1e} (limit {TOLERANCE})")
    assert changed == len(deltas) == len(blocks) and worst < TOLERANCE


def qkv(path: Path, dialect: str, *, fused: bool) -> Path:
    """One change of q, k and v of two blocks, as one module of each or as three."""
    modules: dict[str, dict[str, np.ndarray]] = {}
    for block in ("layers.1", "context_refiner.0"):
        whole = cases.lora((176, 88), len(block))
        ends = {"to_q": (0, 88), "to_k": (88, 132), "to_v": (132, 176)}
        parts = {f"{block}.attn.{x}": whole | {"up": whole["up"][slice(*rows)].copy()} for x, rows in ends.items()}
        parts = {name: {half: value.copy() for half, value in one.items()} for name, one in parts.items()}
        modules |= {f"{block}.attention.qkv": whole} if fused else parts
    return cases.written(path, modules, DIALECTS[dialect])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_a_fused_module_draws_what_its_parts_draw(tiny_lumina: Path, tmp_path: Path, backend: str) -> None:
    """In each dialect, and what the folder draws that `convert` writes with it."""
    pipe, three = qwenimg.load(tiny_lumina, backend, "fp32"), qkv(tmp_path / "3.safetensors", "diffusers", fused=False)
    plain = pipe("a ring", **ASKED).latents
    parts = pipe("a ring", lora=str(three), lora_mode="fuse", **ASKED).latents
    assert not np.allclose(parts, plain, rtol=0.01)
    for dialect in ("ai-toolkit", "ComfyUI", "kohya", "bare"):
        file = qkv(tmp_path / f"{dialect}.safetensors", dialect, fused=True)
        one = f"{file}:{1 / DIALECTS[dialect].scale:g}"
        fused, side = (pipe("a ring", lora=one, lora_mode=mode, **ASKED).latents for mode in ("fuse", "side"))
        errors = [float(np.linalg.norm(made - parts) / np.linalg.norm(parts)) for made in (fused, side)]
        print(f"{backend} {dialect}: {errors[0]:.1e}, beside the weights {errors[1]:.1e} (limit {SIDE})")
        assert max(errors) < SIDE
    assert cli("convert", str(tiny_lumina), str(tmp_path / "o"), "--lora", str(three), "--quiet").code == 0
    assert np.array_equal(qwenimg.load(tmp_path / "o", backend, "fp32")("a ring", **ASKED).latents, parts)


def test_info_says_which_model_it_is_for(tmp_path: Path) -> None:
    """By the published sizes, and not Z-Image, which has layers of these names."""
    sizes = {"layers.25.attention.qkv": (3840, 2304), "layers.0.feed_forward.w2": (2304, 9216)}
    made = {name: cases.lora(shape, 1) for name, shape in sizes.items()}
    lines = describe(cases.written(tmp_path / "a.safetensors", made, DIALECTS["ai-toolkit"])).lines
    print(*lines, sep="\n")
    assert "fits: Lumina-Image 2.0" in lines
