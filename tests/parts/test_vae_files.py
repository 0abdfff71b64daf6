"""The VAE of 16 channels that Flux.1, Z-Image and Stable Diffusion 3 have, in a file of its own: `ae.safetensors`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import tiny_ldm
from support.policies import FP32
from support.refusals import refused
from support.tiny_zimage import VAE, tiny_vae

from qwenimg import backends
from qwenimg.common.base.config import parse
from qwenimg.common.families.stable_diffusion.family import FAMILY as STABLE_DIFFUSION
from qwenimg.common.formats.headers import peek
from qwenimg.common.hub.describe import describe
from qwenimg.common.networks.vaes import kl_vae
from qwenimg.common.networks.vaes.kl_vae import KLVAEConfig
from qwenimg.common.networks.vaes.kl_vae_names import LAYOUTS
from qwenimg.common.parts import vae_files
from qwenimg.common.parts.open_file import open_part
from qwenimg.common.weights import part_names
from qwenimg.common.weights.values import read

LIKE = parse(KLVAEConfig, kl_vae.vae_fields(VAE), source="the test")
PREFIXES = ("", *part_names.VAES)
BACKENDS = ("cpu", "mlx")
FLOAT32 = 1e-5  # relative L2 of an image; measured at most 2e-6

Tensors = dict[str, torch.Tensor]


def in_ldm_names() -> Tensors:
    return {name: value.contiguous() for name, value in tiny_ldm.vae_file(tiny_vae()).items()}


@pytest.mark.sample(0)
def test_the_reference_reads_the_file() -> None:
    """diffusers' converter makes of the test's file the tensors of the test's model."""
    from diffusers.loaders import single_file_utils as theirs

    model = tiny_vae()
    converted = theirs.convert_ldm_vae_checkpoint(in_ldm_names(), model.config)
    expected = model.state_dict()
    assert converted.keys() == expected.keys()
    assert all(torch.equal(value.reshape(expected[key].shape), expected[key]) for key, value in converted.items())


@pytest.mark.parametrize("prefix", PREFIXES)
def test_every_tensor_is_that_of_the_model(tmp_path: Path, prefix: str) -> None:
    file = tmp_path / "ae.safetensors"
    beside = {} if not prefix else {"model.diffusion_model.x": torch.ones(2)}
    save_file(tiny_ldm.behind(prefix, in_ldm_names()) | beside, file)
    opened = open_part(LAYOUTS, file, LIKE, "vae")
    expected = tiny_vae().state_dict()
    assert opened.plan.entries.keys() == expected.keys() == kl_vae.manifest(LIKE).keys()
    assert all(np.array_equal(read(entry), expected[name].numpy()) for name, entry in opened.plan.entries.items())
    assert opened.config == LIKE  # shapes show the widths, and the model's own configuration the rest
    opened.plan.close()


def test_diffusers_names_and_folders(tmp_path: Path) -> None:
    model = tiny_vae()
    model.save_pretrained(tmp_path / "vae")
    save_file(model.state_dict(), tmp_path / "plain.safetensors")
    for place in ("vae", "plain.safetensors"):
        opened = vae_files.open_vae(LAYOUTS, tmp_path / place, LIKE)
        assert opened.config.scaling_factor == VAE["scaling_factor"]
        assert opened.plan.entries.keys() == model.state_dict().keys()
        opened.plan.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_decodes_as_the_reference_does(tmp_path: Path, backend: str) -> None:
    file = tmp_path / "ae.safetensors"
    save_file(in_ldm_names(), file)
    part = open_part(LAYOUTS, file, LIKE, "vae")
    network = backends.load(backend).open(part.network, part.config, part.stored(FP32), FP32)
    latents = np.random.default_rng(0).standard_normal((1, 16, 6, 10)).astype(np.float32)
    with torch.inference_mode():
        theirs = tiny_vae().decode(torch.from_numpy(latents)).sample.numpy()
    ours = network.decode(latents)
    error = float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
    print(f"{backend}: {error:.1e} (limit {FLOAT32})")
    assert error <= FLOAT32
    part.plan.close()


@pytest.mark.parametrize("named", [in_ldm_names, lambda: tiny_vae().state_dict()])
def test_it_is_no_vae_of_stable_diffusion(tmp_path: Path, named: Callable[[], Tensors]) -> None:
    file = tmp_path / "ae.safetensors"
    save_file(named(), file)
    header = peek(file)
    assert vae_files.latent_channels(header.tensors) == 16
    assert STABLE_DIFFUSION.option(header) is None
    assert "Stable Diffusion" not in "\n".join(describe(file).lines).replace("Stable Diffusion 3", "")


# Bad files


def lacking(tensors: Tensors) -> Tensors:
    return {name: value for name, value in tensors.items() if name != "decoder.up.1.block.0.conv1.weight"}


def with_more(tensors: Tensors) -> Tensors:
    return tensors | {"decoder.up.7.block.0.conv1.weight": torch.ones(3)}


def of_another_shape(tensors: Tensors) -> Tensors:
    return tensors | {"decoder.mid.block_1.conv1.weight": torch.ones(18, 18, 3, 1)}


def of_integers(tensors: Tensors) -> Tensors:
    return tensors | {"decoder.conv_out.bias": torch.ones(3, dtype=torch.int64)}


def flat(tensors: Tensors) -> Tensors:
    return tensors | {"decoder.conv_in.weight": torch.ones(18)}


def without_a_level(tensors: Tensors) -> Tensors:
    return {name: value for name, value in tensors.items() if "down.0" not in name}


def of_widths_without_groups(tensors: Tensors) -> Tensors:
    return tensors | {"encoder.down.0.block.0.conv2.weight": torch.ones(7, 7, 3, 3)}


MUTANTS = {
    lacking: "lacks tensor 'decoder.up.1.block.0.conv1.weight'",
    with_more: "holds unknown tensor 'decoder.up.7.block.0.conv1.weight'",
    of_another_shape: "has shape [18, 18, 3, 1], expected [18, 18, 3, 3]",
    of_integers: "is I64, which is not read",
    flat: "has not 4 dimensions in tensor 'decoder.conv_in.weight'",
    without_a_level: "lacks tensor 'encoder.down.0.block.0.conv2.weight'",
    of_widths_without_groups: "norm_num_groups 3 does not divide 7 channels",
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_bad_files_are_refused(tmp_path: Path, mutant: Callable[[Tensors], Tensors]) -> None:
    file = tmp_path / "ae.safetensors"
    save_file(mutant(in_ldm_names()), file)
    text = refused(open_part, LAYOUTS, file, LIKE, "vae")
    assert MUTANTS[mutant] in text and "ae.safetensors" in text


def test_a_file_without_a_vae(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "a.safetensors")
    assert "holds no VAE" in refused(open_part, LAYOUTS, tmp_path / "a.safetensors", LIKE, "vae")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:-3])
    assert "cut.safetensors" in refused(open_part, LAYOUTS, tmp_path / "cut.safetensors", LIKE, "vae")
