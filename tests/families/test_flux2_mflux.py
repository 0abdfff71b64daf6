"""FLUX.2 klein as mflux 0.24 saves it: its names, kernels with their channels last, no configurations."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cli_runner import cli
from support.mflux_folders import flux2_name, save_as_mflux
from support.relative import relative
from support.sparse_files import sparse

import qwenimg
from qwenimg.common.families import catalog, registry
from qwenimg.common.hub.describe import describe
from qwenimg.common.networks.denoisers import flux2_dit
from qwenimg.common.networks.encoders import qwen
from qwenimg.common.networks.vaes import flux2_vae

ASKED: dict[str, Any] = {"width": 48, "height": 32, "steps": 2, "seed": 5}
PARTS = ("transformer", "text_encoder", "vae")
LIMIT = 1e-5  # kernels that lie otherwise in memory are multiplied otherwise; measured 7e-7
NOTES = {"quantization_level": "None", "mflux_version": "0.24.0"}


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(1)
def test_it_draws_what_the_folder_of_diffusers_draws(tiny_flux2: dict[str, Path], tmp_path: Path, backend: str) -> None:
    """With a reference, which the VAE encodes, and with guidance, since the name says `base`; converted too."""
    model, picture = tiny_flux2["flux2-base"], np.random.default_rng(1).integers(0, 256, (32, 48, 3), np.uint8)
    saved = save_as_mflux(model, tmp_path / "klein-base-mflux", "flux2")
    assert cli("convert", str(saved), str(tmp_path / "again"), "--quiet").code == 0
    expected, *made = (
        qwenimg.load(folder, backend, "fp32")("a ring", image=picture, **ASKED)
        for folder in (model, saved, tmp_path / "again")
    )
    for one in made:
        error = relative(one.latents, expected.latents)
        print(f"{backend}: {error:.1e} (limit {LIMIT})")
        assert error <= LIMIT and np.abs(one.pixels - expected.pixels.astype(float)).max() <= 1
        assert one.pixels.std() > 10 and one.recipe["guidance"] == 4.0


@pytest.mark.parametrize(("name", "known"), [("klein", "flux2-klein-4b"), ("my-Base-9b", "flux2-klein-base-9b")])
def test_without_configurations_it_has_the_published_sizes(
    tiny_flux2: dict[str, Path], tmp_path: Path, name: str, known: str
) -> None:
    klein, folder = registry.published(catalog.KNOWN[known]), tmp_path / name
    assert klein is not None
    for part, network in zip(PARTS, (flux2_dit.NETWORK, qwen.QWEN3, flux2_vae.NETWORK), strict=True):
        shapes = {flux2_name(key): shape for key, shape in network.manifest(klein.checkpoint[part].config).items()}
        last = {key: (*shape[:1], *shape[2:], shape[1]) if len(shape) == 4 else shape for key, shape in shapes.items()}
        (folder / part).mkdir(parents=True)
        entries = {key: ("BF16", shape, 2) for key, shape in last.items() if not key.endswith("num_batches_tracked")}
        sparse(folder / part / "0.safetensors", entries, NOTES)
    shutil.copytree(tiny_flux2["flux2-klein"] / "tokenizer", folder / "tokenizer")
    opened = registry.open_model(folder)
    assert opened.defaults().steps == (50 if "base" in known else 4)
    assert opened.checkpoint["transformer"].config == klein.checkpoint["transformer"].config
    opened.checkpoint.close()


def test_info_names_the_layout_of_one_file(tiny_flux2: dict[str, Path], tmp_path: Path) -> None:
    """By its names, which are mflux's and not diffusers'."""
    saved = save_as_mflux(tiny_flux2["flux2-klein"], tmp_path / "saved", "flux2")
    about = describe(saved / "transformer" / "0.safetensors")
    print(*about.lines, sep="\n")
    assert about.lines[0] == "layout: FLUX.2's transformer, mflux's names"
