"""LoRAs of Z-Image in the names of several trainers: the change of each weight is that of diffusers, where it reads
them, and a fused module is its three parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import lora_cases as cases
from support.cli_runner import cli
from support.refusals import refused
from support.tiny_zimage import mlx_z_image_name, tiny_dit

import qwenimg
from qwenimg.common.families import registry
from qwenimg.common.hub.describe import describe
from qwenimg.common.networks.denoisers import zimage_dit, zimage_names
from qwenimg.common.parts import lora_layers
from qwenimg.common.weights.keys import Place, Rows
from qwenimg.common.weights.loras import lora as loras
from qwenimg.common.weights.loras.lora import Deltas
from qwenimg.common.weights.loras.lora_names import Names, find

BACKENDS = ("cpu", "mlx")
TOLERANCE = 1e-6  # of the largest weight: float32 sums in another order
SIDE = 1e-4  # relative L2 of latents: products beside the weights sum in another order
ASKED: dict[str, Any] = {"width": 48, "height": 32, "steps": 2, "seed": 4, "guidance": 2.0}
Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def names(tiny_zimage: Path) -> Names:
    opened = registry.open_model(tiny_zimage)
    opened.checkpoint.close()
    return lora_layers.names(opened.checkpoint)


def linears(model: torch.nn.Module) -> list[str]:
    return [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]


def ours(path: str) -> str:
    return zimage_dit.rename(f"{path}.weight")


def deltas_of(path: Path, names: Names) -> Deltas:
    lora = loras.read_lora(path)
    return loras.fit(lora, names)


# Names


def test_every_layer_has_all_of_its_names(names: Names) -> None:
    paths = linears(tiny_dit())
    assert len(paths) == 60
    for path in paths:
        own = ours(path).removesuffix(".weight")
        called = [path, own, f"transformer.{path}", f"diffusion_model.{own}", f"lora_unet_{own.replace('.', '_')}"]
        called += [f"lora_unet_{path.replace('.', '_')}", f"model.diffusion_model.{own}", f"lycoris_{own}"]
        called += [f"diffusion_model.{mlx_z_image_name(path)}", mlx_z_image_name(path)]
        if own.endswith(".to_out.0"):
            out = own.replace(".to_out.0", ".out")
            called += [f"diffusion_model.{out}", f"lora_unet_{out.replace('.', '_')}"]
        for name in called:
            [target] = find(names, name)
            assert (target.component, target.name) == ("transformer", f"{own}.weight"), name
    for name in ("x_pad_token", "cap_pad_token", "layers.0.attention.norm_q", "layers.9.attention.to_q"):
        assert not find(names, name)
    for name in ("text_encoder.layers.1.mlp.up_proj", "lora_te_model_layers_1_mlp_up_proj"):
        [target] = find(names, name)
        assert (target.component, target.name) == ("text_encoder", "layers.1.mlp.up_proj.weight")


def test_a_fused_layer_is_three(names: Names) -> None:
    for name in ("diffusion_model.layers.0.attention.qkv", "lora_unet_layers_0_attention_qkv"):
        targets = sorted(find(names, name), key=lambda target: target.rows)
        assert [target.name for target in targets] == [f"layers.0.attention.to_{x}.weight" for x in "qkv"]
        assert [target.rows for target in targets] == [Rows(i, i + 1, 3) for i in range(3)]
        assert {target.layer for target in targets} == {(198, 66)}


# Against diffusers


DIALECTS = {
    "diffusers": cases.Dialect("transformer.", cases.PEFT_HALVES),
    "ai-toolkit": cases.Dialect("diffusion_model.", cases.PEFT_HALVES),
    "ai-toolkit, alpha": cases.Dialect("diffusion_model.", cases.PEFT_HALVES, alpha=True, scale=cases.Q),
    "ComfyUI": cases.Dialect("diffusion_model.", cases.KOHYA_HALVES, alpha=True, scale=cases.Q),
    "kohya": cases.Dialect("lora_unet_", cases.KOHYA_HALVES, flat=True, alpha=True, scale=cases.Q),
    "DiffSynth": cases.Dialect("", cases.NAMED_HALVES),
}


def fused_by_diffusers(model: torch.nn.Module, file: Path) -> Arrays:
    """Every weight after diffusers gave the model its LoRA, by our names."""
    from diffusers import ZImagePipeline

    pipe = ZImagePipeline(transformer=model, vae=None, text_encoder=None, tokenizer=None, scheduler=None)
    pipe.load_lora_weights(file)
    model.fuse_lora()
    model.unload_lora()
    return {zimage_dit.rename(name): value.detach().numpy() for name, value in model.named_parameters()}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.sample(1)
def test_changes_are_those_of_diffusers(dialect: str, tmp_path: Path, names: Names) -> None:
    pytest.importorskip("peft")
    model = tiny_dit()
    before = {zimage_dit.rename(name): value.detach().numpy().copy() for name, value in model.named_parameters()}
    blocks = [path for path in linears(model) if path.split(".")[0] in ("layers", "noise_refiner", "context_refiner")]
    made = {path: cases.lora(before[ours(path)].shape, i) for i, path in enumerate(blocks)}
    file = cases.written(tmp_path / "a.safetensors", made, DIALECTS[dialect])
    deltas = deltas_of(file, names)["transformer"]
    after, worst, changed = fused_by_diffusers(model, file), 0.0, 0
    for name, weight in before.items():
        mine = weight + deltas[name][0].added(weight) if name in deltas else weight
        changed += not np.array_equal(weight, after[name])
        worst = max(worst, float(np.abs(mine - after[name]).max() / np.abs(after[name]).max()))
    print(f"{dialect}: {changed} weights, error {worst:.1e} (limit {TOLERANCE})")
    assert changed == len(deltas) == len(blocks) and worst < TOLERANCE


def test_the_split_of_a_fused_module_is_that_of_diffusers(tmp_path: Path, names: Names) -> None:
    """Of kohya's files over its authors' layers, which diffusers takes with dots in the ends of their keys."""
    from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_z_image_lora_to_diffusers as convert

    dialect = cases.Dialect("lora_unet_", cases.OLD_HALVES, flat=True, alpha=True, scale=cases.Q)
    made = {"layers.1.attention.qkv": cases.lora((198, 66), 3), "layers.1.attention.out": cases.lora((66, 66), 4)}
    file = cases.written(tmp_path / "a.safetensors", made, dialect)
    from safetensors.torch import load_file

    theirs = {key: value.double().numpy() for key, value in convert(load_file(file)).items()}
    deltas = deltas_of(file, names)["transformer"]
    assert len(deltas) == 4 and len(theirs) == 8
    for name, [delta] in deltas.items():
        down, up = delta.factors()
        layer = f"transformer.{name.removesuffix('.weight')}"
        expected = theirs[f"{layer}.lora_B.weight"] @ theirs[f"{layer}.lora_A.weight"]
        error = np.abs(up.astype(np.float64) @ down - expected).max() / np.abs(expected).max()
        assert error < TOLERANCE, name


# Pictures


def qkv(path: Path, *, fused: bool) -> Path:
    """One change of q, k and v of two blocks, as one module of each or as three."""
    modules: dict[str, Arrays] = {}
    for block in ("layers.1", "context_refiner.0"):
        whole = cases.lora((198, 66), len(block))
        if fused:
            modules[f"{block}.attention.qkv"] = whole
            continue
        for i, x in enumerate("qkv"):
            modules[f"{block}.attention.to_{x}"] = {
                "down": whole["down"].copy(),
                "up": whole["up"][66 * i : 66 * (i + 1)],
            }
    return cases.written(path, modules, cases.Dialect("diffusion_model.", cases.PEFT_HALVES, alpha=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(1)
def test_a_fused_module_draws_what_its_parts_draw(tiny_zimage: Path, tmp_path: Path, backend: str) -> None:
    """Bit for bit, and what the folder draws that `convert` writes with it; beside the weights up to rounding."""
    one, three = qkv(tmp_path / "one.safetensors", fused=True), qkv(tmp_path / "three.safetensors", fused=False)
    pipe = qwenimg.load(tiny_zimage, backend, "fp32")
    plain = pipe("a ring", **ASKED).latents
    for mode in ("fuse", "side"):
        first, second = (pipe("a ring", lora=f"{file}:0.7", lora_mode=mode, **ASKED).latents for file in (one, three))
        assert np.array_equal(first, second) and not np.allclose(first, plain, rtol=0.01), mode
    side, fuse = (pipe("a ring", lora=f"{one}:0.7", lora_mode=mode, **ASKED).latents for mode in ("side", "fuse"))
    error = float(np.linalg.norm(side - fuse) / np.linalg.norm(fuse))
    print(f"{backend}: beside the weights {error:.1e} (limit {SIDE})")
    assert error < SIDE
    assert cli("convert", str(tiny_zimage), str(tmp_path / "o"), "--lora", f"{one}:0.7", "--quiet").code == 0
    assert np.array_equal(qwenimg.load(tmp_path / "o", backend, "fp32")("a ring", **ASKED).latents, fuse)
    assert np.array_equal(pipe("a ring", **ASKED).latents, plain), "a LoRA leaves no trace"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(1)
def test_layers_in_the_names_of_mlx_z_image(tiny_zimage: Path, tmp_path: Path, backend: str) -> None:
    paths = ("layers.1.attention.to_out.0", "layers.0.adaLN_modulation.0", "layers.2.feed_forward.w1")
    shapes = {path: tiny_dit().get_submodule(path).weight.shape for path in paths}
    pipe, latents = qwenimg.load(tiny_zimage, backend, "fp32"), []
    for name in (str, mlx_z_image_name):
        made = {name(path): cases.lora(shape, 5) for path, shape in shapes.items()}
        file = cases.written(tmp_path / f"{name.__name__}.safetensors", made, DIALECTS["ai-toolkit"])
        latents.append(pipe("a ring", lora=str(file), **ASKED).latents)
    assert np.array_equal(*latents) and not np.allclose(latents[0], pipe("a ring", **ASKED).latents, rtol=0.01)


def test_rows_in_another_order_are_seen(tiny_zimage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = zimage_names.place

    def place(name: str) -> Place:
        there = right(name)
        begin = there.rows.begin
        return there._replace(rows=Rows(2 - begin, 3 - begin, 3)) if there.rows.of == 3 else there

    monkeypatch.setattr(zimage_names, "place", place)
    one, three = qkv(tmp_path / "one.safetensors", fused=True), qkv(tmp_path / "three.safetensors", fused=False)
    pipe = qwenimg.load(tiny_zimage, "cpu", "fp32")
    assert not np.array_equal(*(pipe("a ring", lora=str(file), **ASKED).latents for file in (one, three)))


# Files


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"layers.0.attention.qkv": (197, 66)}, "layers.0.attention.qkv"),
        ({"layers.0.attention.to_q": (66, 65)}, "layers.0.attention.to_q"),
        ({"layers.0.attention.to_x": (66, 66)}, "layers.0.attention.to_x"),
        ({"transformer_blocks.0.attn.to_q": (66, 66)}, "transformer_blocks.0.attn.to_q"),
    ],
)
def test_wrong_modules_are_refused_in_one_line(
    tmp_path: Path, names: Names, tensors: dict[str, tuple[int, int]], message: str
) -> None:
    made = {path: cases.lora(shape, 1) for path, shape in tensors.items()}
    file = cases.written(tmp_path / "a.safetensors", made, DIALECTS["ai-toolkit"])
    assert message in refused(deltas_of, file, names)


def test_info_says_which_model_it_is_for(tmp_path: Path) -> None:
    """By the published sizes."""
    layers = {"layers.29.attention.qkv": (11520, 3840), "layers.0.feed_forward.w2": (3840, 10240)}
    tensors = {}
    for path, (outputs, inputs) in layers.items():
        tensors[f"diffusion_model.{path}.lora_A.weight"] = torch.ones(1, inputs)
        tensors[f"diffusion_model.{path}.lora_B.weight"] = torch.ones(outputs, 1)
    save_file(tensors, tmp_path / "a.safetensors")
    lines = describe(tmp_path / "a.safetensors").lines
    print(*lines, sep="\n")
    assert "fits: Z-Image" in lines
    assert "used: 2 of 2 modules by z-image-turbo or z-image" in lines
