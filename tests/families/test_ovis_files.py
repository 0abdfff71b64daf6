"""Ovis-Image's published files, by headers alone: its parts, and a whole model in one file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.sparse_files import sparse
from tiny_tokenizer import write_tiny_tokenizer

import qwenimg
from qwenimg.common.families import catalog, registry
from qwenimg.common.hub.describe import describe
from qwenimg.common.networks.denoisers import ovis_dit, ovis_names
from qwenimg.common.networks.encoders import qwen
from qwenimg.common.networks.vaes import kl_vae
from qwenimg.common.weights.keys import Place

Entries = dict[str, tuple[str, tuple[int, ...], int]]


def transformer(place: Callable[[str], Place], prefix: str = "") -> Entries:
    manifest = ovis_dit.manifest(ovis_dit.OvisConfig())
    shapes = dict[str, tuple[int, ...]]()
    for name, shape in manifest.items():
        join = ovis_dit.joins(manifest).get(name)
        for part in join.parts if join else (name,):
            begin, end, of = place(part).rows
            rows = shape[0] // (2 if join else 1) * of // (end - begin)
            shapes[prefix + place(part).key] = (rows, *shape[1:])
    return {key: ("BF16", shape, 2) for key, shape in shapes.items()}


def language(prefix: str) -> Entries:
    model = registry.published(catalog.KNOWN["ovis-image"])
    assert model is not None
    manifest = qwen.QWEN3.manifest(model.checkpoint["text_encoder"].config)
    return {prefix + key: ("BF16", shape, 2) for key, shape in manifest.items()}


def vae(prefix: str) -> Entries:
    return {prefix + key: ("BF16", shape, 2) for key, shape in kl_vae.NETWORK.manifest(kl_vae.FLUX_1).items()}


@pytest.mark.parametrize(("file", "place"), [
    ("ovis_image_bf16", ovis_names.place), ("ovis_image", ovis_names.authors_place),
])  # fmt: skip
def test_published_files_are_a_model(tmp_path: Path, file: str, place: Callable[[str], Place]) -> None:
    names = {"transformer": file, "text_encoder": "ovis_2.5", "vae": "ae"}
    parts = {name: tmp_path / f"{one}.safetensors" for name, one in names.items()} | {"tokenizer": tmp_path / "words"}
    assert len(transformer(place)) == 397, "the tensors of the published file"
    sparse(parts["transformer"], transformer(place))
    sparse(parts["text_encoder"], language("model."))
    sparse(parts["vae"], vae(""))
    write_tiny_tokenizer(tmp_path / "words" / "tokenizer")
    with qwenimg.load(None, "cpu", "bf16", **parts) as pipe:  # type: ignore[arg-type]
        assert pipe.model.checkpoint["transformer"].config == ovis_dit.OvisConfig()
        assert pipe.model_name == "ovis-image" and pipe.defaults.guidance == 5.0
    described = describe(parts["transformer"])
    print(*described.lines, sep="\n")
    assert described.lines[0].startswith("layout: Ovis-Image's transformer") and not described.faults


def test_a_whole_model_in_one_file(tmp_path: Path) -> None:
    file = tmp_path / "ovis_aio.safetensors"
    parts = language("text_encoders.qwen3_2b.transformer.model.") | vae("vae.")
    sparse(file, transformer(ovis_names.place, "model.diffusion_model.") | parts)
    write_tiny_tokenizer(tmp_path / "tokenizer")
    described = describe(file)
    print(*described.lines, sep="\n")
    assert described.lines[0] == "layout: Ovis-Image, single file" and not described.faults
    opened = registry.open_model(file)
    opened.checkpoint.close()
    assert opened.family.name == "ovis" and opened.checkpoint.components.keys() == {
        "transformer",
        "text_encoder",
        "vae",
    }
