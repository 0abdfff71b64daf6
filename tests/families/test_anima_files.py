"""Anima's parts from other files: those of its authors, which ComfyUI has, in 8 bits and in GGUF too, and a whole model
in one file. The text conditioner comes with the transformer's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.cli_runner import cli
from support.comfy_files import comfy
from support.gguf_files import fitting, write
from support.sparse_files import sparse
from support.spiece_files import trained, write_spiece
from support.tiny_anima import tiny_conditioner, tiny_dit, transformer_file, write_tiny_anima
from support.tiny_zimage import tiny_text_encoder
from tiny_tokenizer import write_tiny_tokenizer

import qwenimg
from qwenimg.common.base.errors import ModelError
from qwenimg.common.families import catalog, registry
from qwenimg.common.families.anima.checkpoint import CONDITIONER
from qwenimg.common.hub.describe import describe
from qwenimg.common.networks.denoisers import anima_dit
from qwenimg.common.networks.encoders import anima_conditioner, qwen
from qwenimg.common.networks.vaes import qwen_vae

BACKENDS = ("cpu", "mlx")
ASKED: dict[str, Any] = {"width": 48, "height": 32, "steps": 2, "seed": 4, "guidance": 2.0}
# Rows that blocks of codes divide
DIT = {"attention_head_dim": 32, "text_embed_dim": 32, "adaln_lora_dim": 32, "mlp_ratio": 2.0}
TEXT = {"source_dim": 64, "target_dim": 32, "model_dim": 32, "num_attention_heads": 2, "mlp_ratio": 2.0}
LANGUAGE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose parts have these sizes."""
    folder = tmp_path_factory.mktemp("anima") / "model"
    write_tiny_anima(folder, "5GB")
    parts = {"transformer": tiny_dit(**DIT), CONDITIONER: tiny_conditioner(**TEXT)}
    parts |= {"text_encoder": tiny_text_encoder(**LANGUAGE)}
    for name, part in parts.items():
        shutil.rmtree(folder / name)
        part.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def bare(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder without weights of the transformer and of what is in its file."""
    folder = tmp_path_factory.mktemp("bare") / "model"
    shutil.copytree(model, folder)
    for part in ("transformer", CONDITIONER):
        for path in (folder / part).glob("*.safetensors"):
            path.unlink()
    return folder


@pytest.fixture(scope="module")
def drawn(model: Path) -> dict[str, Any]:
    return {backend: qwenimg.load(model, backend, "fp32")("a red circle", **ASKED) for backend in BACKENDS}


def both() -> Tensors:
    return transformer_file(tiny_dit(**DIT), tiny_conditioner(**TEXT))


def saved(path: Path, tensors: Tensors, notes: Any = None) -> Path:
    save_file({name: value.contiguous() for name, value in tensors.items()}, path, notes)
    return path


@pytest.mark.parametrize("prefix", ["net.", "model.diffusion_model.", ""])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_its_authors_files_draw_what_the_folder_draws(
    bare: Path, drawn: dict[str, Any], tmp_path: Path, prefix: str, backend: str
) -> None:
    file = saved(tmp_path / "anima-base.safetensors", {prefix + name: value for name, value in both().items()})
    text = {f"model.{name}": value for name, value in tiny_text_encoder(**LANGUAGE).state_dict().items()}
    given = {"transformer": file, "text_encoder": saved(tmp_path / "qwen_3_06b.safetensors", text)}
    made = qwenimg.load(bare, backend, "fp32", **given)("a red circle", **ASKED)  # type: ignore[arg-type]
    assert np.array_equal(made.latents, drawn[backend].latents) and np.array_equal(made.pixels, drawn[backend].pixels)
    assert made.pixels.std() > 10 and made.recipe["transformer"] == "anima-base.safetensors"


def test_a_converted_model_draws_the_same(bare: Path, drawn: dict[str, Any], tmp_path: Path) -> None:
    """In diffusers' folders, each part with the name of file that its library looks for."""
    file = saved(tmp_path / "net.safetensors", {f"net.{name}": value for name, value in both().items()})
    assert cli("convert", str(bare), str(tmp_path / "o"), "--transformer", str(file), "--quiet").code == 0
    files = {path.parent.name: path.name for path in (tmp_path / "o").glob("*/*.safetensors")}
    theirs = "diffusion_pytorch_model.safetensors"
    assert files == {"transformer": theirs, CONDITIONER: theirs, "vae": theirs, "text_encoder": "model.safetensors"}
    made = qwenimg.load(tmp_path / "o", "cpu", "fp32")("a red circle", **ASKED)
    assert np.array_equal(made.latents, drawn["cpu"].latents)
    from diffusers import AnimaTextConditioner, CosmosTransformer3DModel

    for kind, name in ((AnimaTextConditioner, CONDITIONER), (CosmosTransformer3DModel, "transformer")):
        again = kind.from_pretrained(tmp_path / "o" / name).state_dict()
        own = (tiny_conditioner(**TEXT) if name == CONDITIONER else tiny_dit(**DIT)).state_dict()
        assert again.keys() == own.keys() and all(torch.equal(value, own[key]) for key, value in again.items())


@pytest.mark.parametrize("layout", ["older", "newer", "int8_convrot"])
def test_eight_bits_draw_what_their_values_draw(bare: Path, tmp_path: Path, layout: str) -> None:
    """As ComfyUI writes them, of the text conditioner too."""
    tensors = {f"net.{name}": value.contiguous() for name, value in both().items()}
    made = comfy(tensors, layout, lambda name: "blocks." in name and "norm" not in name and name.endswith("weight"))
    codes = saved(tmp_path / "codes.safetensors", made.tensors, made.notes)
    values = saved(tmp_path / "values.safetensors", made.values)
    found = [qwenimg.load(bare, "cpu", "fp32", transformer=file)("a ring", **ASKED).latents for file in (codes, values)]
    error = np.linalg.norm(found[0] - found[1]) / np.linalg.norm(found[1])
    print(f"{layout}: {error:.1e}")
    assert error < 1e-5 and np.isfinite(found[0]).all()  # rotated products sum in another order


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("type", ["F32", "Q8_0"])
@pytest.mark.sample(0)
def test_gguf(model: Path, bare: Path, drawn: dict[str, Any], tmp_path: Path, type: str, backend: str) -> None:
    tensors = {key: value.numpy() for key, value in both().items()}
    write(tmp_path / "a.gguf", {key: (value, fitting(value, type)) for key, value in tensors.items()}, "cosmos")
    made = qwenimg.load(bare, backend, "fp32", transformer=tmp_path / "a.gguf")("a red circle", **ASKED)
    error = np.linalg.norm(made.latents - drawn[backend].latents) / np.linalg.norm(made.latents)
    print(f"{backend} in {type}: latents differ by {error:.1e}")
    assert error == 0 if type == "F32" else 0 < error < 0.1  # of a tiny model in 8 bits


def test_a_transformer_without_the_conditioner(model: Path, bare: Path, drawn: dict[str, Any], tmp_path: Path) -> None:
    """Takes that of the folder; without one it is refused, and the message says what has one."""
    file = saved(tmp_path / "a.safetensors", transformer_file(tiny_dit(**DIT)))
    made = qwenimg.load(model, "cpu", "fp32", transformer=file)("a red circle", **ASKED)
    assert np.array_equal(made.latents, drawn["cpu"].latents)
    with pytest.raises(ModelError) as caught:
        qwenimg.load(bare, "cpu", "fp32", transformer=file)
    print(caught.value)
    assert CONDITIONER in str(caught.value) and len(str(caught.value)) <= 300


# Of the published sizes, by headers alone


def entries(prefix: str) -> dict[str, tuple[str, tuple[int, ...], int]]:
    model = registry.published(catalog.KNOWN["anima"])
    assert model is not None
    configs = {part: one.config for part, one in model.checkpoint.components.items()}
    shapes = {anima_dit.authors_name(key): one for key, one in anima_dit.manifest(configs["transformer"]).items()}
    shapes |= anima_conditioner.manifest(configs[CONDITIONER])
    made = {prefix + key: shape for key, shape in shapes.items()} | {f"{prefix}pos_embedder.seq": (240,)}
    return {key: ("BF16", shape, 2) for key, shape in made.items()}


def language(prefix: str) -> dict[str, tuple[str, tuple[int, ...], int]]:
    model = registry.published(catalog.KNOWN["anima"])
    assert model is not None
    manifest = qwen.QWEN3.manifest(model.checkpoint["text_encoder"].config)
    return {prefix + key: ("BF16", shape, 2) for key, shape in manifest.items()}


def vae(prefix: str) -> dict[str, tuple[str, tuple[int, ...], int]]:
    return {prefix + key: ("BF16", shape, 2) for key, shape in qwen_vae.manifest(qwen_vae.QwenVAEConfig()).items()}


@pytest.mark.parametrize("name", ["anima-base-v1.0", "anima-turbo-v1.0"])
def test_published_files_are_a_model(cache: Path, tmp_path: Path, name: str) -> None:
    """Without its folder; turbo by the name of its file, of which a notice says the steps. `info` says the license."""
    parts = {"transformer": tmp_path / f"{name}.safetensors", "text_encoder": tmp_path / "qwen_3_06b_base.safetensors"}
    parts |= {"vae": tmp_path / "qwen_image_vae.safetensors", "tokenizer": tmp_path / "words"}
    sparse(parts["transformer"], entries("net."))
    sparse(parts["text_encoder"], language("model."))
    sparse(parts["vae"], vae(""))
    write_tiny_tokenizer(tmp_path / "words" / "tokenizer")
    write_spiece(tmp_path / "words" / "t5_tokenizer", trained())
    with qwenimg.load(None, "cpu", "bf16", **parts) as pipe:  # type: ignore[arg-type]
        checkpoint = pipe.model.checkpoint
        assert checkpoint["transformer"].config == anima_dit.AnimaConfig() and pipe.model_name == "anima"
        assert checkpoint.distilled == ("turbo" in name)
    lines = [line for kind, line in checkpoint.reports if kind == "notice"]
    assert lines == (
        ["anima-turbo-v1.0.safetensors: Anima Turbo, by its name, is made for --steps 10 --guidance 1"]
        if "turbo" in name
        else []
    )
    description = describe(parts["transformer"])
    print(*description.lines, sep="\n")
    assert not description.faults and "license: CircleStone Labs Non-Commercial" in description.lines[1]
    assert ("Turbo" in description.lines[1]) == ("turbo" in name)


def test_a_whole_model_in_one_file(tmp_path: Path) -> None:
    """Its parts are found behind their prefixes."""
    file = tmp_path / "anima_aio.safetensors"
    parts = language("text_encoders.qwen3_06b.transformer.model.") | vae("vae.")
    sparse(file, entries("model.diffusion_model.") | parts)
    write_tiny_tokenizer(tmp_path / "tokenizer")
    write_spiece(tmp_path / "t5_tokenizer", trained())
    description = describe(file)
    print(*description.lines, sep="\n")
    assert description.lines[0] == "layout: Anima, single file" and not description.faults
    opened = registry.open_model(file)
    opened.checkpoint.close()
    assert opened.family.name == "anima" and opened.checkpoint.components.keys() == {
        *("transformer", "text_encoder", CONDITIONER, "vae")
    }
