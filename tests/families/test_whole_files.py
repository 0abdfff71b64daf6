"""LongCat-Image, Chroma and ERNIE-Image in one file, as ComfyUI saves a whole model: by headers of the published sizes,
the transformers in their authors' names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_chroma, tiny_ernie, tiny_ldm, tiny_longcat
from support.sparse_files import sparse
from support.spiece_files import hugging_face, trained
from tiny_tokenizer import write_tiny_tokenizer

from qwenimg.common.base.config import data_folder, read_json
from qwenimg.common.families import catalog, registry
from qwenimg.common.hub.describe import describe
from qwenimg.common.networks.encoders import language_names, qwen, t5
from qwenimg.common.networks.vaes import flux2_vae


@dataclass(frozen=True)
class Case:
    known: str  # the model whose configurations count
    transformer: str  # its class in diffusers
    stored: Callable[[Any], dict[str, torch.Tensor]]  # the transformer's tensors in its authors' names
    text: tuple[Any, str]  # the network of the text encoder, and what is before its names
    tokenizer: Callable[[Path], object]
    names: tuple[tuple[str, str], ...]  # of files, and the known model that each is


CASES = {
    "longcat": Case(
        "longcat-image", "LongCatImageTransformer2DModel", tiny_longcat.transformer_file,
        (qwen.QWEN2_5_VL, "text_encoders.qwen25_7b.transformer.model."),
        lambda folder: write_tiny_tokenizer(folder / "tokenizer"),
        (("longcat_aio", "longcat-image"),),
    ),
    "chroma": Case(
        "chroma1-hd", "ChromaTransformer2DModel", tiny_chroma.transformer_file,
        (t5.NETWORK, "text_encoders.t5xxl.transformer."),
        lambda folder: hugging_face(trained()).save_pretrained(folder / "tokenizer_2"),
        (("Chroma1-HD-aio", "chroma1-hd"),),
    ),
    "ernie": Case(
        "ernie-image", "ErnieImageTransformer2DModel", lambda model: model.state_dict(),
        (language_names.MINISTRAL_3.network, "text_encoders.ministral3_3b.transformer.model."),
        lambda folder: tiny_ernie.tiny_tokenizer(before=True).save_pretrained(folder / "tokenizer"),
        (("ernie_aio", "ernie-image"), ("ernie-turbo-aio", "ernie-image-turbo")),
    ),
}  # fmt: skip


def shapes_of(case: Case) -> dict[str, tuple[int, ...]]:
    import diffusers

    model = registry.published(catalog.KNOWN[case.known])
    assert model is not None
    configs = {part: one.config for part, one in model.checkpoint.components.items()}
    folder = data_folder(case.known)
    with torch.device("meta"):
        transformer = getattr(diffusers, case.transformer).from_config(read_json(folder / "transformer/config.json"))
        stored = {f"model.diffusion_model.{key}": value.shape for key, value in case.stored(transformer).items()}
        network, start = case.text
        stored |= {start + key: shape for key, shape in network.manifest(configs["text_encoder"]).items()}
        if case.known != "ernie-image":
            vae = diffusers.AutoencoderKL.from_config(read_json(folder / "vae/config.json"))
            stored |= {f"vae.{key}": value.shape for key, value in tiny_ldm.vae_file(vae).items()}
        else:
            stored |= {f"vae.{key}": shape for key, shape in flux2_vae.manifest(configs["vae"]).items()}
    return {key: tuple(shape) for key, shape in stored.items()}


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.sample(1)
def test_a_whole_model(kind: str, tmp_path: Path) -> None:
    """Its parts are found behind their prefixes, and its variant by its name."""
    case = CASES[kind]
    shapes = shapes_of(case)
    case.tokenizer(tmp_path)
    for name, known in case.names:
        file = tmp_path / f"{name}.safetensors"
        sparse(file, {key: ("BF16", shape, 2) for key, shape in shapes.items()}, {})
        description = describe(file)
        print(*description.lines, sep="\n")
        assert description.lines[0].endswith(", single file") and not description.faults, description.faults
        opened, model = registry.open_model(file), registry.published(catalog.KNOWN[known])
        opened.checkpoint.close()
        assert model is not None and opened.family.name == kind and opened.defaults() == model.defaults()
        for part, one in model.checkpoint.components.items():
            assert opened.checkpoint[part].plan.parameters == one.plan.parameters, part
