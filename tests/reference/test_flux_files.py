"""Flux.1's transformer in files, in its authors' names or diffusers': tensors are those of the folder, bit for bit."""

from __future__ import annotations

import inspect
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
from support.tiny_flux import WIDE, tiny_dit, transformer_file

from qwenimg.common.networks.denoisers import flux_names as product
from qwenimg.common.networks.denoisers.flux_dit import FluxConfig
from qwenimg.common.parts.open_file import open_part
from qwenimg.common.weights import part_names
from qwenimg.common.weights.keys import Place, Rows
from qwenimg.common.weights.values import read

VARIANTS: dict[str, dict[str, Any]] = {
    "dev": {},
    "schnell": {"guidance_embeds": False},
    "fill": {"in_channels": 384, "out_channels": 64},
}
LIKE = FluxConfig(attention_head_dim=32, axes_dims_rope=(8, 12, 12))
Q8_0 = 0.02  # relative L2 of values in 8 bits with a scale for 32

Tensors = dict[str, torch.Tensor]


def made(**changes: Any) -> torch.nn.Module:
    return tiny_dit(**(WIDE | changes))


def values(path: Path, like: FluxConfig = LIKE) -> tuple[FluxConfig, dict[str, np.ndarray]]:
    part = open_part(product.LAYOUTS, path, like, "transformer")
    arrays = {name: read(entry) for name, entry in part.plan.entries.items()}
    part.plan.close()
    return part.config, arrays


def same(arrays: dict[str, np.ndarray], model: torch.nn.Module) -> None:
    expected = model.state_dict()
    assert arrays.keys() == expected.keys()
    differing = [name for name, value in expected.items() if not np.array_equal(arrays[name], value.numpy())]
    assert not differing


def converted(tensors: Tensors) -> Tensors:
    """A file's tensors by diffusers' names, by its converter, told the width of the tests' models."""
    from diffusers.loaders import single_file_utils as theirs

    name, scope = "convert_flux_transformer_checkpoint_to_diffusers", dict(vars(theirs))
    source = inspect.getsource(scope[name])
    assert "inner_dim = 3072" in source
    exec(source.replace("inner_dim = 3072", "inner_dim = 96"), scope)
    result: Tensors = scope[name](dict(tensors))
    return result


@pytest.mark.parametrize("variant", ["dev", "schnell"])
def test_the_reference_reads_the_file(variant: str) -> None:
    model = made(**VARIANTS[variant])
    same({key: value.numpy() for key, value in converted(transformer_file(model)).items()}, model)


@pytest.mark.parametrize("prefix", part_names.DENOISERS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_tensor_is_that_of_the_model(tmp_path: Path, variant: str, prefix: str) -> None:
    model, path = made(**VARIANTS[variant]), tmp_path / "flux.safetensors"
    beside = {"vae.decoder.x": torch.ones(2)} if prefix else {}
    save_file({prefix + key: value for key, value in transformer_file(model).items()} | beside, path)
    config, arrays = values(path)
    same(arrays, model)
    fields = {name: model.config[name] for name in FluxConfig.__dataclass_fields__}
    theirs = FluxConfig(**(fields | {"axes_dims_rope": tuple(fields["axes_dims_rope"])}))
    assert (config, config.out_features) == (replaced(theirs), theirs.out_features)


def replaced(config: FluxConfig) -> FluxConfig:

    return replace(config, out_channels=config.out_features)


def test_diffusers_names_and_folders(tmp_path: Path) -> None:
    model = made()
    model.save_pretrained(tmp_path / "transformer")
    save_file(model.state_dict(), tmp_path / "plain.safetensors")
    for place in ("transformer", "plain.safetensors"):
        config, arrays = values(tmp_path / place)
        same(arrays, model)
        assert config.guidance_embeds and config.out_features == 64


@pytest.mark.parametrize("type", ["F16", "Q8_0"])
def test_gguf(tmp_path: Path, type: str) -> None:
    model, path = made(), tmp_path / "flux.gguf"
    tensors = {key: value.numpy() for key, value in transformer_file(model).items()}
    write(path, {key: (value, fitting(value, type)) for key, value in tensors.items()}, "flux")
    _, arrays = values(path)
    worst = largest(arrays, model.state_dict())
    print(f"{type}: at most {worst:.1e} (limit {Q8_0})")
    assert worst <= Q8_0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_comfyui_in_8_bits(tmp_path: Path, layout: str) -> None:
    """The parts of a fused tensor have its scale, and of scales for rows their own."""
    model, path = made(), tmp_path / "flux.safetensors"
    prefix = "model.diffusion_model."
    written = comfy(
        {prefix + key: value for key, value in transformer_file(model).items()}, layout, lambda name: "blocks." in name
    )
    save_file(written.tensors, path, metadata=written.notes)
    _, arrays = values(path)
    decoded = {name.removeprefix(prefix): value for name, value in written.values.items()}
    reference = converted(decoded)
    assert arrays.keys() == reference.keys()
    differing = [name for name, array in arrays.items() if not np.array_equal(array, reference[name].numpy())]
    assert not differing


# Faults


def linear1_split_as_three_and_one(name: str) -> Place:
    place = PLACE(name)
    if "linear1" in place.key:
        begin = {"to_q": 0, "to_k": 1, "to_v": 2}.get(name.split(".")[-2], 3)
        return place._replace(rows=Rows(begin, begin + 1, 4))
    return place


def linear1_with_the_feed_forward_first(name: str) -> Place:
    place = PLACE(name)
    if "linear1" in place.key:
        begin = {"to_q": 4, "to_k": 5, "to_v": 6}.get(name.split(".")[-2], 0)
        return place._replace(rows=Rows(begin, begin + (4 if begin == 0 else 1), 7))
    return place


def halves_not_swapped(name: str) -> Place:
    return PLACE(name)._replace(decode=None)


def keys_for_queries(name: str) -> Place:
    return PLACE(name.replace("to_q", "to_x").replace("to_k", "to_q").replace("to_x", "to_k"))


PLACE = product.place
FAULTS: dict[Callable[[str], Place], str] = {
    linear1_split_as_three_and_one: "refused",
    linear1_with_the_feed_forward_first: "seen",
    halves_not_swapped: "seen",
    keys_for_queries: "seen",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_faults_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[str], Place]) -> None:
    model, path = made(), tmp_path / "flux.safetensors"
    save_file(transformer_file(model), path)
    monkeypatch.setattr(product, "place", fault)
    if FAULTS[fault] == "refused":
        refused(values, path)
        return
    _, arrays = values(path)
    with pytest.raises(AssertionError):
        same(arrays, model)


# Bad files


def test_the_axes_are_those_of_the_model(tmp_path: Path) -> None:
    path = tmp_path / "flux.safetensors"
    save_file(transformer_file(made()), path)
    assert "axes_dims_rope [16, 56, 56] must be three numbers" in refused(values, path, FluxConfig())


def changed(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: torch.ones(shape, dtype=dtype)})


LINEAR1 = "single_blocks.1.linear1.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(LINEAR1), f"lacks tensor '{LINEAR1}'"),
        (lambda t: t.pop("double_blocks.1.txt_mlp.2.bias"), "lacks tensor 'double_blocks.1.txt_mlp.2.bias'"),
        (lambda t: t.pop("img_in.weight"), "lacks tensor 'img_in.weight'"),
        (lambda t: t.pop("guidance_in.in_layer.weight"), "holds unknown tensor 'guidance_in.in_layer.bias'"),
        (changed("distilled_guidance_layer.x", 3), "holds unknown tensor 'distilled_guidance_layer.x'"),
        (changed("double_blocks.7.img_mlp.0.weight", 3), "lacks tensor"),
        (changed(LINEAR1, 671, 96), f"tensor '{LINEAR1}'"),
        (changed(LINEAR1, 0, 96), f"tensor '{LINEAR1}'"),
        (changed("img_in.weight", 96), "has not 2 dimensions in tensor 'img_in.weight'"),
        (changed("img_in.weight", 0, 64), "'num_attention_heads' is 0"),
        (changed("double_blocks.0.img_attn.norm.query_norm.scale", 0), "'attention_head_dim' is 0"),
        (changed("final_layer.adaLN_modulation.1.bias", 191), "tensor 'final_layer.adaLN_modulation.1.bias'"),
        (changed("txt_in.bias", 96, dtype=torch.int64), "is I64, which is not read"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, change: Callable[[Tensors], Any], message: str) -> None:
    tensors, path = transformer_file(made()), tmp_path / "flux.safetensors"
    change(tensors)
    save_file(tensors, path)
    text = refused(values, path)
    assert message in text and "flux.safetensors" in text


def test_other_files(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    save_file({"x": torch.ones(2)}, path)
    assert "holds no transformer of Flux.1" in refused(values, path)
    gguf = tmp_path / "other.gguf"
    write(gguf, {"x": (np.ones((2, 2), np.float32), "F32")}, "sd3")
    assert "is a GGUF file of 'sd3'" in refused(values, gguf)
