"""Z-Image's transformer in files, in its authors' names or diffusers': tensors are those of the folder, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.comfy_files import LAYOUTS, comfy
from support.gguf_files import fitting, write
from support.refusals import refused
from support.relative import largest
from support.tiny_zimage import WIDE, mlx_z_image_file, tiny_dit, transformer_file

from qwenimg.common.networks.denoisers import zimage_dit
from qwenimg.common.networks.denoisers import zimage_names as product
from qwenimg.common.networks.denoisers.zimage_dit import ZImageConfig
from qwenimg.common.parts.open_file import open_part
from qwenimg.common.quant.bits import widened
from qwenimg.common.weights import part_names
from qwenimg.common.weights.keys import Place, Rows
from qwenimg.common.weights.values import read

LIKE = ZImageConfig(dim=96, n_heads=3, axes_dims=(8, 12, 12), axes_lens=(640, 48, 48))
Q8_0 = 0.02  # relative L2 of values in 8 bits with a scale for 32

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_dit(**WIDE)


def values(path: Path, like: ZImageConfig = LIKE) -> tuple[ZImageConfig, dict[str, np.ndarray]]:
    part = open_part(product.LAYOUTS, path, like, "transformer")
    arrays = {name: widened(read(entry)) for name, entry in part.plan.entries.items()}
    part.plan.close()
    return part.config, arrays


def expected(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return {zimage_dit.rename(key): value.numpy() for key, value in model.state_dict().items()}


def same(arrays: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert arrays.keys() == wanted.keys()
    assert not [name for name, value in wanted.items() if not np.array_equal(arrays[name], value)]


def converted(tensors: Tensors) -> dict[str, np.ndarray]:
    """A file's tensors by our names, through diffusers' converter."""
    from diffusers.loaders.single_file_utils import convert_z_image_transformer_checkpoint_to_diffusers as convert

    return {zimage_dit.rename(key): value.float().numpy() for key, value in convert(dict(tensors)).items()}


def test_the_reference_reads_the_file(model: torch.nn.Module) -> None:
    same(converted(transformer_file(model)), expected(model))


@pytest.mark.parametrize("prefix", part_names.DENOISERS)
def test_every_tensor_is_that_of_the_model(tmp_path: Path, model: torch.nn.Module, prefix: str) -> None:
    path = tmp_path / "z.safetensors"
    beside = {"vae.decoder.x": torch.ones(2)} if prefix else {}
    save_file({prefix + key: value for key, value in transformer_file(model).items()} | beside, path)
    config, arrays = values(path)
    same(arrays, expected(model))
    fields = {name: model.config[name] for name in ZImageConfig.__dataclass_fields__ if name in model.config}
    assert config == ZImageConfig(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})


@pytest.mark.parametrize("prefix", part_names.DENOISERS)
def test_diffusers_names(tmp_path: Path, model: torch.nn.Module, prefix: str) -> None:
    path = tmp_path / "z.safetensors"
    save_file({prefix + key: value for key, value in model.state_dict().items()}, path)
    config, arrays = values(path)
    same(arrays, expected(model))
    assert config.n_refiner_layers == 2 and config.cap_feat_dim == 64


@pytest.mark.parametrize("prefix", part_names.DENOISERS)
def test_mlx_z_images_names(tmp_path: Path, model: torch.nn.Module, prefix: str) -> None:
    path = tmp_path / "z.safetensors"
    save_file({prefix + key: value for key, value in mlx_z_image_file(model).items()}, path)
    config, arrays = values(path)
    same(arrays, expected(model))
    assert config.n_refiner_layers == 2 and config.cap_feat_dim == 64 and config.in_channels == 16


@pytest.mark.parametrize("pads", [(1, 96), (96,)])
@pytest.mark.parametrize("type", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_gguf(tmp_path: Path, model: torch.nn.Module, type: str, pads: tuple[int, ...]) -> None:
    """As converters write it: a name of another architecture, and pad tokens with one dimension or two."""
    path = tmp_path / "z.gguf"
    tensors = {key: value.numpy() for key, value in transformer_file(model).items()}
    tensors |= {key: value.reshape(pads) for key, value in tensors.items() if "pad_token" in key}
    write(path, {key: (value, fitting(value, type)) for key, value in tensors.items()}, "lumina2")
    _, arrays = values(path)
    worst = largest(arrays, expected(model))
    limit = 10 * Q8_0 if type == "Q4_0" else Q8_0
    print(f"{type}: at most {worst:.1e} (limit {limit})")
    assert worst <= limit


@pytest.mark.parametrize("layout", LAYOUTS)
def test_comfyui_in_8_bits(tmp_path: Path, model: torch.nn.Module, layout: str) -> None:
    """The parts of a fused tensor have its scale, and of scales for rows their own."""
    path, prefix = tmp_path / "z.safetensors", "model.diffusion_model."
    tensors = {prefix + key: value for key, value in transformer_file(model).items()}
    written = comfy(tensors, layout, lambda name: ".attention." in name or ".feed_forward." in name)
    save_file(written.tensors, path, metadata=written.notes)
    _, arrays = values(path)
    decoded = {name: value for name, value in written.values.items() if name.startswith(prefix)}
    same(arrays, converted(decoded))


# Faults


def rows_in_another_order(name: str) -> Place:
    there = PLACE(name)
    begin = there.rows.begin
    return there._replace(rows=Rows(2 - begin, 3 - begin, 3)) if there.key.endswith(".qkv.weight") else there


def the_same_norm_twice(name: str) -> Place:
    return PLACE(name.replace("norm_k", "norm_q"))


def refiners_exchanged(name: str) -> Place:
    return PLACE(name.replace("noise_refiner.0", "noise_refiner.9").replace("noise_refiner.1", "noise_refiner.0"))


PLACE = product.place
FAULTS: dict[Callable[[str], Place], str] = {
    rows_in_another_order: "seen",
    the_same_norm_twice: "refused",
    refiners_exchanged: "refused",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_faults_are_seen(
    tmp_path: Path, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, fault: Callable[[str], Place]
) -> None:
    path = tmp_path / "z.safetensors"
    save_file(transformer_file(model), path)
    monkeypatch.setattr(product, "place", fault)
    if FAULTS[fault] == "refused":
        refused(values, path)
        return
    _, arrays = values(path)
    with pytest.raises(AssertionError):
        same(arrays, expected(model))


# Bad files


def changed(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: torch.ones(shape, dtype=dtype)})


def renamed(old: str, new: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


QKV = "layers.1.attention.qkv.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(QKV, 289, 96), QKV),
        (changed(QKV, 96, 96), QKV),
        (changed(QKV, 0, 96), QKV),
        (lambda tensors: tensors.pop(QKV), f"lacks tensor '{QKV}'"),
        (changed("layers.1.attention.to_q.weight", 96, 96), "unknown tensor 'layers.1.attention.to_q.weight'"),
        (changed("layers.9.ffn_norm1.weight", 96), "layers.3"),  # a gap: layer 3 is asked for
        (changed("layers.0.attention.q_norm.weight", 31), "q_norm.weight' has shape [31]"),
        (changed("layers.0.attention.q_norm.weight", 0), "axes_dims [8, 12, 12] must be three numbers"),
        (changed("x_embedder.weight", 96, 64, 1, 1), "x_embedder.weight"),
        (changed("x_embedder.weight", 0, 64), "x_embedder.weight' has shape [0, 64]"),
        (changed("layers.0.attention_norm1.weight", 0), "'dim' is 0"),
        (lambda tensors: tensors.pop("cap_embedder.1.weight"), "cap_embedder.1.weight"),
        (changed("final_layer.linear.weight", 64, 96, dtype=torch.int64), "final_layer.linear.weight"),
        (changed("siglip_embedder.1.weight", 96, 64), "Z-Image-Omni or -Edit"),
        (renamed("layers.0.adaLN_modulation.0.weight", "layers.0.adaLN_modulation.1.weight"), "Lumina-Image 2.0"),
        (lambda tensors: tensors.pop("layers.0.adaLN_modulation.0.weight"), "no transformer of Z-Image"),
    ],
)
def test_bad_files_are_refused_in_one_line(
    tmp_path: Path, model: torch.nn.Module, change: Callable[[Tensors], Any], message: str
) -> None:
    path, tensors = tmp_path / "z.safetensors", transformer_file(model)
    change(tensors)
    save_file(tensors, path)
    assert message in refused(values, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("x_pad_token"), "lacks tensor 'x_pad_token'"),
        (lambda tensors: tensors.pop("final_layer.linear.bias"), "lacks tensor 'final_layer.linear.bias'"),
        (changed("layers.1.attention.to_q.weight", 96, 95), "layers.1.attention.to_q.weight' has shape [96, 95]"),
        (changed("layers.1.attention.to_out.0.weight", 96, 96), "unknown tensor 'layers.1.attention.to_out.0.weight'"),
        (changed("layers.1.attention.to_q.weight", 96, 12, dtype=torch.uint32), "holds codes (U32) without scales"),
        (changed("layers.0.attention_norm1.weight", 96, 1), "layers.0.attention_norm1.weight"),
        (changed("layers.0.adaLN_modulation.0.weight", 384, 96), "lacks tensor 'cap_embedder.0.weight'"),
        (renamed("t_embedder.linear1.weight", "t_embedder.mlp.layers.0.weight"), "or MLX_z-image's"),
    ],
)
def test_bad_files_of_mlx_z_image_are_refused_in_one_line(
    tmp_path: Path, model: torch.nn.Module, change: Callable[[Tensors], Any], message: str
) -> None:
    path, tensors = tmp_path / "z.safetensors", mlx_z_image_file(model)
    change(tensors)
    save_file(tensors, path)
    assert message in refused(values, path)


def test_a_gguf_file_of_another_architecture(tmp_path: Path, model: torch.nn.Module) -> None:
    path = tmp_path / "z.gguf"
    write(path, {key: (value.numpy(), "F32") for key, value in transformer_file(model).items()}, "flux")
    assert "'flux'" in refused(values, path)


def test_the_positions_are_those_of_the_model(tmp_path: Path, model: torch.nn.Module) -> None:
    path = tmp_path / "z.safetensors"
    save_file(transformer_file(model), path)
    assert values(path, replace(LIKE, axes_lens=(1536, 64, 64)))[0].axes_lens == (1536, 64, 64)
    assert "axes_dims [32, 48, 48] must be three numbers" in refused(values, path, ZImageConfig())
