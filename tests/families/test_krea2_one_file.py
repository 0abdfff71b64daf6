"""Krea 2 in one file, as ComfyUI saves a whole model: by headers of the published sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.sparse_files import sparse
from tiny_tokenizer import write_tiny_tokenizer

from qwenimg.common.families import catalog, registry
from qwenimg.common.hub.describe import describe
from qwenimg.common.networks.denoisers import krea2_dit
from qwenimg.common.networks.denoisers.krea2_dit import Krea2Config
from qwenimg.common.networks.encoders import qwen
from qwenimg.common.networks.vaes import qwen_vae


@pytest.mark.parametrize(("name", "steps"), [("Krea2", 8), ("krea2_Raw_aio", 52)])
def test_a_whole_model(tmp_path: Path, name: str, steps: int) -> None:
    """Its parts are found behind their prefixes, and its variant by its name."""
    model = registry.published(catalog.KNOWN["krea-2-turbo"])
    assert model is not None
    configs = {part: one.config for part, one in model.checkpoint.components.items()}
    shapes = {}
    for key, shape in krea2_dit.manifest(configs["transformer"]).items():
        stored = krea2_dit.authors_name(key)
        shapes[f"model.diffusion_model.{stored}"] = (6 * 6144,) if stored.endswith(".mod.lin") else shape
    for key, shape in qwen.QWEN3_VL.manifest(configs["text_encoder"]).items():
        shapes[f"text_encoders.qwen3vl_4b.transformer.model.language_model.{key}"] = shape
    for key, shape in qwen_vae.manifest(configs["vae"]).items():
        shapes[f"vae.{key}"] = shape
    file = tmp_path / f"{name}.safetensors"
    sparse(file, {key: ("BF16", shape, 2) for key, shape in shapes.items()}, {})
    write_tiny_tokenizer(tmp_path / "tokenizer")
    description = describe(file)
    print(*description.lines, sep="\n")
    assert description.lines[0] == "layout: Krea 2, single file" and not description.faults
    opened = registry.open_model(file)
    opened.checkpoint.close()
    assert opened.family.name == "krea2" and opened.checkpoint["transformer"].config == Krea2Config()
    assert opened.defaults().steps == steps and opened.checkpoint.distilled == (steps == 8)
