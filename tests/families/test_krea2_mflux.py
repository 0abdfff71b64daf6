"""Krea 2 as mflux saves it: its names, with the shards of the transformer in the folder of the model itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.folder_tensors import tensors
from support.relative import relative
from support.sparse_files import sparse
from support.tiny_krea2 import tiny_dit, transformer_file, write_tiny_krea2

import qwenimg
from qwenimg.common.families import catalog, registry
from qwenimg.common.hub.describe import describe
from qwenimg.common.networks.denoisers import krea2_dit
from qwenimg.common.networks.denoisers.krea2_dit import TABLE, Krea2Config
from qwenimg.common.networks.encoders import qwen
from qwenimg.common.networks.vaes import qwen_vae
from qwenimg.common.weights.storage import Packed

ASKED: dict[str, Any] = {"width": 48, "height": 32, "steps": 2, "seed": 5}
WIDE: dict[str, Any] = {"attention_head_dim": 32, "axes_dims_rope": (8, 12, 12), "intermediate_size": 128}
LIMIT = 1e-5
NAMES = {
    "tmlp.0.": "tmlp.linear_in.",
    "tmlp.2.": "tmlp.linear_out.",
    "tproj.1.": "tproj.linear.",
    "txtmlp.0.": "txtmlp.norm.",
    "txtmlp.1.": "txtmlp.linear_in.",
    "txtmlp.3.": "txtmlp.linear_out.",
}


def theirs(name: str) -> str:
    """mflux's name of a tensor that its authors call `name`."""
    return next((new + name.removeprefix(old) for old, new in NAMES.items() if name.startswith(old)), name)


def save(model: Path, out: Path, bits: int | None) -> Path:
    """In two shards and an index; of the text encoder the language model alone."""
    left_out = shutil.ignore_patterns("model_index.json", "transformer", "scheduler", "*.safetensors*")
    shutil.copytree(model, out, ignore=left_out)
    shutil.copy(model / "transformer" / "config.json", out / "config.json")  # mflux has the published sizes alone
    shutil.copytree(model / "vae", out / "vae", dirs_exist_ok=True)
    text = {n: mx.array(v.numpy()) for n, v in tensors(model / "text_encoder").items() if "visual" not in n}
    mx.save_safetensors(
        str(out / "text_encoder" / "0.safetensors"), {n.removeprefix("language_model."): v for n, v in text.items()}
    )
    made: dict[str, mx.array] = {}
    for name, value in transformer_file(tiny_dit(**WIDE)).items():
        called, array = theirs(name), mx.array(value.numpy())
        if bits and called.endswith(".weight") and array.shape[-1] % 64 == 0:
            layer = called.removesuffix(".weight")
            codes = mx.quantize(array, group_size=64, bits=bits)
            made |= dict(zip((called, f"{layer}.scales", f"{layer}.biases"), codes, strict=True))
        else:
            made[called] = array
    names, about = list(made), {"mflux_version": "0.24.0", "quantization_level": str(bits)}
    for i in range(2):
        mx.save_safetensors(str(out / f"{i}.safetensors"), {n: made[n] for n in names[i::2]}, about)
    places = {n: f"{i}.safetensors" for i in range(2) for n in names[i::2]}
    (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return out


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("krea2") / "m"
    write_tiny_krea2(folder, **WIDE)
    return folder


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(0)
def test_it_draws_what_the_folder_of_diffusers_draws(wide: Path, tmp_path: Path, backend: str) -> None:
    """With guidance, since its name has `raw`. In codes it is opened in codes."""
    saved = save(wide, tmp_path / "krea-raw", None)
    expected, made = (qwenimg.load(one, backend, "fp32")("a ring", **ASKED) for one in (wide, saved))
    error = relative(made.latents, expected.latents)
    print(f"{backend}: {error:.1e} (limit {LIMIT})")
    assert error <= LIMIT and made.recipe["guidance"] == 3.5
    with qwenimg.load(save(wide, tmp_path / "in-codes", 8), backend, "fp32") as pipe:
        entries = pipe.model.checkpoint["transformer"].plan.entries
        assert isinstance(entries["transformer_blocks.0.attn.to_q.weight"].storage, Packed)
        coded = pipe("a ring", guidance=0.0, **ASKED)
    assert coded.recipe["guidance"] == 0.0 and np.isfinite(coded.latents).all()


def test_without_configurations_it_has_the_published_sizes(wide: Path, tmp_path: Path) -> None:
    folder = tmp_path / "Krea-2-mflux"
    model = registry.published(catalog.KNOWN["krea-2-turbo"])
    assert model is not None
    parts = {"": krea2_dit.NETWORK, "text_encoder": qwen.QWEN3_VL, "vae": qwen_vae.NETWORK}
    for part, network in parts.items():
        shapes = network.manifest(model.checkpoint[part or "transformer"].config)
        if not part:
            shapes = {theirs(krea2_dit.authors_name(name)): shape for name, shape in shapes.items()}
            shapes = {name: (6 * 6144,) if name.endswith(".mod.lin") else shape for name, shape in shapes.items()}
        (folder / part).mkdir(parents=True, exist_ok=True)
        sparse(folder / part / "0.safetensors", {name: ("BF16", shape, 2) for name, shape in shapes.items()}, {})
        if not part:
            index = {"weight_map": dict.fromkeys(shapes, "0.safetensors")}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copytree(wide / "tokenizer", folder / "tokenizer")
    opened = registry.open_model(folder)
    opened.checkpoint.close()
    assert opened.family.name == "krea2" and opened.checkpoint.distilled
    assert opened.checkpoint["transformer"].config == Krea2Config()
    description = describe(folder)
    print(*description.lines, sep="\n")
    assert description.lines[0].startswith("layout: folder of mflux (its names, as ") and not description.faults
    assert any("Krea 2 Turbo, text to image; license: Krea 2 Community" in line for line in description.lines)
    assert TABLE in "".join(opened.checkpoint["transformer"].plan.entries)
