"""Parts of Flux.2 in files of their own: the VAE's tensors are those of the folder, bit for bit, and pictures too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.gguf_files import write
from support.refusals import refused
from support.tiny_flux2 import VAE, tiny_dit, tiny_vae, transformer_file

import qwenimg
from qwenimg.common.families import registry
from qwenimg.common.hub.describe import describe
from qwenimg.common.networks.vaes import flux2_vae_names, kl_vae_names
from qwenimg.common.networks.vaes.flux2_vae import Flux2VAEConfig
from qwenimg.common.parts.open_file import open_part
from qwenimg.common.weights.values import read

Tensors = dict[str, torch.Tensor]


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
    assert arrays.keys() == expected.keys()
    assert all(np.array_equal(array.reshape(expected[name].shape), expected[name]) for name, array in arrays.items())
    assert part.config == LIKE_VAE
    part.plan.close()


@pytest.mark.parametrize("key", ["bn.running_var", "decoder.mid.block_1.norm1.bias"])
def test_vaes_that_are_not_whole_are_refused(tmp_path: Path, key: str) -> None:
    tensors, path = vae_file(tiny_vae(), True), tmp_path / "flux2-vae.safetensors"
    del tensors[key]
    save_file(tensors, path)
    assert f"lacks tensor '{key}'" in refused(open_part, flux2_vae_names.LAYOUTS, path, LIKE_VAE, "vae")
    save_file({"x": torch.ones(2)}, path)
    assert "holds no VAE of FLUX.2" in refused(open_part, flux2_vae_names.LAYOUTS, path, Flux2VAEConfig(), "vae")


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
        ("flux2", transformer_file(tiny_dit())),
        ("flux", tiny_flux.transformer_file(tiny_flux.tiny_dit())),
    ):
        save_file(tensors, tmp_path / f"{name}.safetensors")
        write(tmp_path / f"{name}.gguf", {key: (value.numpy(), "F32") for key, value in tensors.items()}, "flux")
        for path in (tmp_path / f"{name}.safetensors", tmp_path / f"{name}.gguf"):
            kind = registry.identify_file(path)
            assert kind is not None
            assert (kind.option, [family.name for family in kind.families]) == ("transformer", [name]), path
