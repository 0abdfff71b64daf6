"""LoRAs of Hunyuan-DiT in the names of several trainers: the change of each weight is that of diffusers' layers with
PEFT, and a fused module is its parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import lora_cases as cases
from support.cli_runner import cli
from support.tiny_hunyuan import KINDS, tiny_dit

import qwenimg
from qwenimg.common.families import registry
from qwenimg.common.hub.describe import describe
from qwenimg.common.networks.denoisers import hunyuan_dit, hunyuan_names
from qwenimg.common.parts import lora_layers
from qwenimg.common.weights.loras import lora as loras
from qwenimg.common.weights.loras.lora_names import Names, find

BACKENDS = ("cpu", "mlx")
TOLERANCE = 1e-6  # of the largest weight: float32 sums in another order
SIDE = 1e-4  # relative L2 of latents: products beside the weights sum in another order
ASKED: dict[str, Any] = {"width": 48, "height": 32, "steps": 2, "seed": 4, "guidance": 2.0}
DIALECTS = {
    "diffusers": cases.Dialect("transformer.", cases.PEFT_HALVES),
    "its authors' trainer": cases.Dialect("base_model.model.", cases.PEFT_HALVES),
    "ai-toolkit": cases.Dialect("diffusion_model.", cases.PEFT_HALVES, alpha=True, scale=cases.Q),
    "ComfyUI": cases.Dialect("diffusion_model.", cases.KOHYA_HALVES, alpha=True, scale=cases.Q),
    "kohya": cases.Dialect("lora_unet_", cases.KOHYA_HALVES, flat=True, alpha=True, scale=cases.Q),
    "OneTrainer": cases.Dialect("lora_transformer_", cases.KOHYA_HALVES, flat=True, alpha=True, scale=cases.Q),
    "bare": cases.Dialect("", cases.NAMED_HALVES),
}
FUSED = ("its authors' trainer", "ai-toolkit", "ComfyUI", "kohya", "bare")


@pytest.fixture(scope="module")
def names(tiny_hunyuan: dict[str, Path]) -> Names:
    opened = registry.open_model(tiny_hunyuan["hunyuan-1.1"])
    opened.checkpoint.close()
    return lora_layers.names(opened.checkpoint)


def linears(model: torch.nn.Module) -> list[str]:
    return [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]


def authors(path: str) -> str | None:
    """The authors' name of a layer that is a tensor of its own there."""
    place = hunyuan_names.place(f"{path}.weight")
    return place.key.removesuffix(".weight") if place.rows.of == 1 else None


def test_every_layer_has_all_of_its_names(names: Names) -> None:
    paths = linears(tiny_dit(**KINDS["hunyuan-1.1"]))
    assert len(paths) == 80
    for path in paths:
        called = [path, f"transformer.{path}", f"base_model.model.{path}"]
        called += [f"lora_{start}_{path.replace('.', '_')}" for start in ("unet", "transformer")]
        if (theirs := authors(path)) is not None:
            called += [
                theirs,
                f"base_model.model.{theirs}",
                f"diffusion_model.{theirs}",
                f"lora_unet_{theirs.replace('.', '_')}",
            ]
        for name in called:
            [target] = find(names, name)
            assert (target.component, target.name) == ("transformer", f"{path}.weight"), name
    for name in ("blocks.0.attn1.q_norm", "blocks.9.attn1.to_q", "text_embedding_padding"):
        assert not find(names, name)


def test_a_fused_layer_is_its_parts(names: Names) -> None:
    for end, attention, letters in (("attn1.Wqkv", "attn1", "qkv"), ("attn2.kv_proj", "attn2", "kv")):
        for start, dot in (("diffusion_model.", "."), ("lora_unet_", "_")):
            name = start + f"blocks.0.{end}".replace(".", dot)
            targets = sorted(find(names, name), key=lambda target: target.rows)
            assert [one.name for one in targets] == [f"blocks.0.{attention}.to_{x}.weight" for x in letters]
            assert {one.rows.of for one in targets} == {len(letters)}


def test_changes_are_those_of_peft(tmp_path: Path, names: Names) -> None:
    """diffusers has no loader of LoRAs for its pipelines; its authors' trainer has PEFT make the layers."""
    pytest.importorskip("peft")
    from peft import LoraConfig, inject_adapter_in_model

    model = tiny_dit(**KINDS["hunyuan-1.1"])
    before = {hunyuan_dit.rename(name): value.detach().numpy().copy() for name, value in model.named_parameters()}
    blocks = [path for path in linears(model) if path.startswith("blocks")]
    made = {path: cases.lora(before[f"{path}.weight"].shape, i) for i, path in enumerate(blocks)}
    file = cases.written(tmp_path / "a.safetensors", made, DIALECTS["its authors' trainer"])
    config = LoraConfig(r=cases.RANK, lora_alpha=cases.RANK, target_modules=blocks)
    model, after = inject_adapter_in_model(config, model), before.copy()
    for path, arrays in made.items():
        layer = model.get_submodule(path)
        layer.lora_A["default"].weight.data = torch.from_numpy(arrays["down"])
        layer.lora_B["default"].weight.data = torch.from_numpy(arrays["up"])
        layer.merge()
        after[f"{path}.weight"] = layer.base_layer.weight.detach().numpy()
    deltas, worst, changed = loras.fit(loras.read_lora(file), names)["transformer"], 0.0, 0
    for name, weight in before.items():
        mine = weight + deltas[name][0].added(weight) if name in deltas else weight
        changed += not np.array_equal(weight, after[name])
        worst = max(worst, float(np.abs(mine - after[name]).max() / np.abs(after[name]).max()))
    print(f"{changed} weights, error {worst:.1e} (limit {TOLERANCE})")
    assert changed == len(deltas) == len(blocks) == 68 and worst < TOLERANCE


def qkv(path: Path, dialect: str, *, fused: bool) -> Path:
    """One change of q, k and v of a block, and of k and v of the text, as one module of each or as parts."""
    modules: dict[str, dict[str, np.ndarray]] = {}
    for end, attention, letters in (("attn1.Wqkv", "attn1", "qkv"), ("attn2.kv_proj", "attn2", "kv")):
        whole = cases.lora((60 * len(letters), 60 if attention == "attn1" else 44), len(letters))
        rows = {x: slice(60 * i, 60 * (i + 1)) for i, x in enumerate(letters)}
        parts = {
            f"blocks.1.{attention}.to_{x}": {"down": whole["down"].copy(), "up": whole["up"][one].copy()}
            for x, one in rows.items()
        }
        modules |= {f"blocks.1.{end}": whole} if fused else parts
    return cases.written(path, modules, DIALECTS[dialect])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_a_fused_module_draws_what_its_parts_draw(tiny_hunyuan: dict[str, Path], tmp_path: Path, backend: str) -> None:
    """In each dialect, and what the folder draws that `convert` writes with it."""
    folder, three = tiny_hunyuan["hunyuan"], qkv(tmp_path / "3.safetensors", "diffusers", fused=False)
    pipe = qwenimg.load(folder, backend, "fp32")
    plain = pipe("a ring", **ASKED).latents
    parts = pipe("a ring", lora=str(three), lora_mode="fuse", **ASKED).latents
    assert not np.allclose(parts, plain, rtol=0.01)
    for dialect in DIALECTS:
        file = qkv(tmp_path / f"{dialect}.safetensors", dialect, fused=dialect in FUSED)
        one = f"{file}:{1 / DIALECTS[dialect].scale:g}"
        fused, side = (pipe("a ring", lora=one, lora_mode=mode, **ASKED).latents for mode in ("fuse", "side"))
        errors = [float(np.linalg.norm(made - parts) / np.linalg.norm(parts)) for made in (fused, side)]
        print(f"{backend} {dialect}: {errors[0]:.1e}, beside the weights {errors[1]:.1e} (limit {SIDE})")
        assert max(errors) < SIDE
    assert cli("convert", str(folder), str(tmp_path / "o"), "--lora", str(three), "--quiet").code == 0
    assert np.array_equal(qwenimg.load(tmp_path / "o", backend, "fp32")("a ring", **ASKED).latents, parts)


def test_info_says_which_model_it_is_for(tmp_path: Path) -> None:
    sizes = {"blocks.25.attn1.to_q": (1408, 1408), "blocks.0.ff.net.2": (1408, 6144)}
    made = {name: cases.lora(shape, 1) for name, shape in sizes.items()}
    lines = describe(cases.written(tmp_path / "a.safetensors", made, DIALECTS["its authors' trainer"])).lines
    print(*lines, sep="\n")
    assert "fits: Hunyuan-DiT" in lines
