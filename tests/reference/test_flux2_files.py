"""Parts of Flux.2 in files of their own: tensors are those of the folder, bit for bit, and pictures too."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.comfy_files import LAYOUTS, comfy
from support.gguf_files import fitting, write
from support.refusals import refused
from support.relative import largest
from support.tiny_flux2 import DIT, VAE, tiny_dit, tiny_vae, transformer_file

import qwenimg
from qwenimg.common.families import registry
from qwenimg.common.hub.describe import describe
from qwenimg.common.networks.denoisers import flux2_names as product
from qwenimg.common.networks.denoisers.flux2_dit import Flux2Config
from qwenimg.common.networks.vaes import flux2_vae_names, kl_vae_names
from qwenimg.common.networks.vaes.flux2_vae import Flux2VAEConfig
from qwenimg.common.parts.open_file import open_part
from qwenimg.common.weights import part_names
from qwenimg.common.weights.keys import Place, Rows
from qwenimg.common.weights.values import read

WIDE = {"attention_head_dim": 32, "axes_dims_rope": (8, 8, 8, 8), "joint_attention_dim": 192}
LIKE = Flux2Config(attention_head_dim=32, axes_dims_rope=(8, 8, 8, 8))
Q8_0 = 0.02  # relative L2 of values in 8 bits with a scale for 32

Tensors = dict[str, torch.Tensor]


def made(**changes: Any) -> Any:
    return tiny_dit(**(WIDE | changes))


def values(path: Path, like: Flux2Config = LIKE) -> tuple[Flux2Config, dict[str, np.ndarray]]:
    part = open_part(product.LAYOUTS, path, like, "transformer")
    arrays = {name: read(entry) for name, entry in part.plan.entries.items()}
    part.plan.close()
    return part.config, arrays


def same(arrays: dict[str, np.ndarray], expected: Tensors) -> None:
    assert arrays.keys() == expected.keys()
    assert not [name for name, value in expected.items() if not np.array_equal(arrays[name], value.numpy())]


def converted(tensors: Tensors) -> Tensors:
    """A file's tensors by diffusers' names, by its converter."""
    from diffusers.loaders.single_file_utils import convert_flux2_transformer_checkpoint_to_diffusers

    result: Tensors = convert_flux2_transformer_checkpoint_to_diffusers(dict(tensors))
    return result


# The transformer


def test_the_reference_reads_the_file() -> None:
    model = made()
    same({key: value.numpy() for key, value in converted(transformer_file(model)).items()}, model.state_dict())


@pytest.mark.parametrize("prefix", part_names.DENOISERS)
def test_every_tensor_is_that_of_the_model(tmp_path: Path, prefix: str) -> None:
    model, path = made(), tmp_path / "flux2.safetensors"
    beside = {"vae.decoder.x": torch.ones(2)} if prefix else {}
    save_file({prefix + key: value for key, value in transformer_file(model).items()} | beside, path)
    config, arrays = values(path)
    same(arrays, model.state_dict())
    assert config == Flux2Config(**{**DIT, **WIDE})


def test_diffusers_names_and_folders(tmp_path: Path) -> None:
    model = made()
    model.save_pretrained(tmp_path / "transformer")
    save_file(model.state_dict(), tmp_path / "plain.safetensors")
    for place in ("transformer", "plain.safetensors"):
        config, arrays = values(tmp_path / place)
        same(arrays, model.state_dict())
        assert config == Flux2Config(**{**DIT, **WIDE})


@pytest.mark.parametrize("architecture", ["flux", "flux2"])
@pytest.mark.parametrize("type", ["F16", "Q8_0"])
def test_gguf(tmp_path: Path, type: str, architecture: str) -> None:
    model, path = made(), tmp_path / "flux2.gguf"
    tensors = {key: value.numpy() for key, value in transformer_file(model).items()}
    write(path, {key: (value, fitting(value, type)) for key, value in tensors.items()}, architecture)
    _, arrays = values(path)
    worst = largest(arrays, model.state_dict())
    print(f"{type}: at most {worst:.1e} (limit {Q8_0})")
    assert worst <= Q8_0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_comfyui_in_8_bits(tmp_path: Path, layout: str) -> None:
    """The parts of a fused tensor have its scale, and of scales for rows their own."""
    path, prefix = tmp_path / "flux2.safetensors", "model.diffusion_model."
    tensors = {prefix + key: value for key, value in transformer_file(made()).items()}
    written = comfy(tensors, layout, lambda name: "blocks." in name)
    save_file(written.tensors, path, metadata=written.notes)
    _, arrays = values(path)
    same(arrays, converted({name.removeprefix(prefix): value for name, value in written.values.items()}))


def halves_not_swapped(name: str) -> Place:
    return PLACE(name)._replace(decode=None)


def keys_for_queries(name: str) -> Place:
    return PLACE(name.replace("to_q.", "to_x.").replace("to_k.", "to_q.").replace("to_x.", "to_k."))


def streams_exchanged(name: str) -> Place:
    place = PLACE(name)
    other = {"img_attn.qkv": "txt_attn.qkv", "txt_attn.qkv": "img_attn.qkv"}
    return place._replace(key=re.sub("(img|txt)_attn.qkv", lambda match: other[match[0]], place.key))


def fused_in_single_blocks_too(name: str) -> Place:
    place = PLACE(name)
    return place._replace(rows=Rows(0, 1, 3)) if "linear1" in place.key else place


PLACE = product.place


@pytest.mark.parametrize("fault", [halves_not_swapped, keys_for_queries, streams_exchanged, fused_in_single_blocks_too])
def test_faults_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[str], Place]) -> None:
    model, path = made(), tmp_path / "flux2.safetensors"
    save_file(transformer_file(model), path)
    monkeypatch.setattr(product, "place", fault)
    if fault is fused_in_single_blocks_too:
        refused(values, path)
        return
    _, arrays = values(path)
    with pytest.raises(AssertionError):
        same(arrays, model.state_dict())


def changed(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: torch.ones(shape, dtype=dtype)})


LINEAR1 = "single_blocks.1.linear1.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(LINEAR1), f"lacks tensor '{LINEAR1}'"),
        (lambda t: t.pop("double_blocks.1.txt_mlp.2.weight"), "lacks tensor 'double_blocks.1.txt_mlp.2.weight'"),
        (lambda t: t.pop("img_in.weight"), "lacks tensor 'img_in.weight'"),
        (changed("guidance_in.in_layer.weight", 96, 64), "lacks tensor"),
        (changed("img_in.bias", 96), "holds unknown tensor 'img_in.bias'"),
        (changed("double_blocks.7.img_mlp.0.weight", 3, 3), "lacks tensor"),
        (changed(LINEAR1, 863, 96), f"tensor '{LINEAR1}'"),
        (changed(LINEAR1, 0, 96), f"tensor '{LINEAR1}'"),
        (changed("img_in.weight", 96), "has not 2 dimensions in tensor 'img_in.weight'"),
        (changed("img_in.weight", 0, 32), "'num_attention_heads' is 0"),
        (changed("double_blocks.0.img_attn.norm.query_norm.scale", 0), "'attention_head_dim' is 0"),
        (changed("final_layer.adaLN_modulation.1.weight", 191, 96), "tensor 'final_layer.adaLN_modulation.1.weight'"),
        (changed("txt_in.weight", 96, 192, dtype=torch.int64), "is I64, which is not read"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, change: Callable[[Tensors], Any], message: str) -> None:
    tensors, path = transformer_file(made()), tmp_path / "flux2.safetensors"
    change(tensors)
    save_file(tensors, path)
    text = refused(values, path)
    assert message in text and "flux2.safetensors" in text


def test_other_files(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    save_file({"x": torch.ones(2)}, path)
    assert "holds no transformer of FLUX.2" in refused(values, path)
    assert "holds no VAE of FLUX.2" in refused(open_part, flux2_vae_names.LAYOUTS, path, Flux2VAEConfig(), "vae")
    gguf = tmp_path / "other.gguf"
    write(gguf, {"x": (np.ones((2, 2), np.float32), "F32")}, "sd3")
    assert "is a GGUF file of 'sd3'" in refused(values, gguf)


# The VAE


LIKE_VAE = Flux2VAEConfig(**{name: value for name, value in VAE.items() if not name.endswith("block_types")})


def vae_file(model: Any, inside: bool) -> Tensors:
    """In ldm names; `inside`: with the quant convolutions as Black Forest Labs' files have them."""
    stored = model.state_dict()
    names = {key: kl_vae_names.place(key, LIKE_VAE).key for key in stored}
    if inside:
        names = {
            key: {"quant_conv": "encoder.", "post_quant_conv": "decoder."}.get(name.split(".")[0], "") + name
            for key, name in names.items()
        }
    return {names[key]: value.contiguous() for key, value in stored.items()}


@pytest.mark.parametrize("inside", [False, True])
def test_vae_in_ldm_names(tmp_path: Path, inside: bool) -> None:
    model, path = tiny_vae(), tmp_path / "flux2-vae.safetensors"
    save_file(vae_file(model, inside), path)
    part = open_part(flux2_vae_names.LAYOUTS, path, LIKE_VAE, "vae")
    arrays = {name: read(entry) for name, entry in part.plan.entries.items()}
    expected = model.state_dict()
    del expected["bn.num_batches_tracked"]
    same({name: array.reshape(expected[name].shape) for name, array in arrays.items()}, expected)
    assert part.config == LIKE_VAE
    part.plan.close()


@pytest.mark.parametrize("key", ["bn.running_var", "decoder.mid.block_1.norm1.bias"])
def test_vaes_that_are_not_whole_are_refused(tmp_path: Path, key: str) -> None:
    tensors, path = vae_file(tiny_vae(), True), tmp_path / "flux2-vae.safetensors"
    del tensors[key]
    save_file(tensors, path)
    assert f"lacks tensor '{key}'" in refused(open_part, flux2_vae_names.LAYOUTS, path, LIKE_VAE, "vae")


# A model with parts from files


@pytest.fixture
def parts(tiny_flux2: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    """The parts of the tiny model in files as ComfyUI has them."""
    text: Tensors = {}
    for file in (tiny_flux2["flux2-klein"] / "text_encoder").glob("*.safetensors"):
        text |= load_file(file)
    tensors = {"transformer": transformer_file(tiny_dit()), "text_encoder": text, "vae": vae_file(tiny_vae(), True)}
    for name, file in tensors.items():
        save_file(file, tmp_path / f"{name}.safetensors")
    return {name: tmp_path / f"{name}.safetensors" for name in tensors}


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(0)
def test_a_picture_of_parts_is_that_of_the_folder(
    tiny_flux2: dict[str, Path], parts: dict[str, Path], backend: str
) -> None:
    asked: dict[str, Any] = {"width": 48, "height": 32, "steps": 2, "seed": 5}
    folder, options = tiny_flux2["flux2-klein"], {"backend": backend, "precision": "fp32"}
    whole = qwenimg.load(folder, **options)("a ring", **asked)
    made_of_parts = qwenimg.load(folder, **parts, **options)("a ring", **asked)
    assert np.array_equal(whole.latents, made_of_parts.latents) and np.array_equal(whole.pixels, made_of_parts.pixels)


def test_files_are_described_and_have_their_option(parts: dict[str, Path]) -> None:
    for name, path in parts.items():
        kind = registry.identify_file(path)
        assert kind is not None and kind.option == name
        description = describe(path)
        print("\n".join([*description.lines, *description.faults]))
        faults = {"transformer": "axes_dims_rope", "vae": "norm_num_groups"}  # of tiny heads and few channels
        if name in faults:
            assert faults[name] in description.faults[0]
        else:
            assert not description.faults and f"--{name.replace('_', '-')} FILE" in description.lines[-1]


def test_files_of_both_generations_are_told_apart(tmp_path: Path) -> None:
    """In GGUF too, where programs write the same architecture for both."""
    from support import tiny_flux

    for name, tensors in (
        ("flux2", transformer_file(made())),
        ("flux", tiny_flux.transformer_file(tiny_flux.tiny_dit())),
    ):
        save_file(tensors, tmp_path / f"{name}.safetensors")
        write(tmp_path / f"{name}.gguf", {key: (value.numpy(), "F32") for key, value in tensors.items()}, "flux")
        for path in (tmp_path / f"{name}.safetensors", tmp_path / f"{name}.gguf"):
            kind = registry.identify_file(path)
            assert kind is not None
            assert (kind.option, [family.name for family in kind.families]) == ("transformer", [name]), path
