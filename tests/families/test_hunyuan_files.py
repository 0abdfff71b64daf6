"""Hunyuan-DiT's parts from other files: those of its authors, which ComfyUI has, in 8 bits and in GGUF too, a whole
model in one file, and ControlNets, which are refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_hunyuan, tiny_ldm
from support.cli_runner import cli
from support.drawn_files import check_eight_bits, check_gguf, check_quantized, saved
from support.tiny_bert import tiny_bert
from support.tiny_hunyuan import tiny_dit, tiny_vae, transformer_file, write_tiny_hunyuan
from support.tiny_t5 import tiny_t5

import qwenimg
from qwenimg.common.base.errors import ModelError
from qwenimg.common.families.hunyuan.checkpoint import variant_of
from qwenimg.common.families.hunyuan.family import FAMILY
from qwenimg.common.hub.describe import describe

BACKENDS = ("cpu", "mlx")
ASKED: dict[str, Any] = {"width": 48, "height": 32, "steps": 2, "seed": 4, "guidance": 2.0}
KINDS = ("hunyuan", "hunyuan-1.1")
TEXT, BERT = tiny_hunyuan.WIDE_TEXT, tiny_hunyuan.WIDE_BERT
VAE: dict[str, Any] = {"block_out_channels": (32, 32, 64, 32), "norm_num_groups": 32}
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders whose parts have widths of whole blocks of codes."""
    folder = tmp_path_factory.mktemp("hunyuan")
    for kind in KINDS:
        write_tiny_hunyuan(folder / kind, kind, "5GB", tiny_hunyuan.WIDE, BERT, **TEXT)
        shutil.rmtree(folder / kind / "vae")
        tiny_vae(**VAE).save_pretrained(folder / kind / "vae")
    return {kind: folder / kind for kind in KINDS}


@pytest.fixture(scope="module")
def bare(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders without weights."""
    root, ignored = tmp_path_factory.mktemp("bare"), shutil.ignore_patterns("*.safetensors", "*.index.json")
    return {kind: shutil.copytree(folder, root / kind, ignore=ignored) for kind, folder in models.items()}


@pytest.fixture(scope="module")
def drawn(models: dict[str, Path]) -> dict[tuple[str, str], Any]:
    return {
        (kind, backend): qwenimg.load(folder, backend, "fp32")("a red circle", **ASKED)
        for kind, folder in models.items()
        for backend in BACKENDS
    }


def dit(kind: str) -> Any:
    return tiny_dit(**(tiny_hunyuan.KINDS[kind] | tiny_hunyuan.WIDE))


def parts(kind: str) -> dict[str, Tensors]:
    text = tiny_t5(**TEXT).state_dict()
    return {
        "transformer": transformer_file(dit(kind)),
        "text_encoder": {f"bert.{name}": value for name, value in tiny_bert(**BERT).state_dict().items()},
        "text_encoder_2": {name: value for name, value in text.items() if name != "encoder.embed_tokens.weight"},
        "vae": tiny_ldm.vae_file(tiny_vae(**VAE)),
    }


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(1)
def test_files_of_its_authors_draw_what_the_folder_draws(
    bare: dict[str, Path], drawn: dict[Any, Any], tmp_path: Path, kind: str, prefix: str, backend: str
) -> None:
    own = parts(kind)
    own["transformer"] = {prefix + name: value for name, value in own["transformer"].items()}
    given = {part: saved(tmp_path / f"{part}.safetensors", tensors) for part, tensors in own.items()}
    given["text_encoder"], given["text_encoder_2"] = given["text_encoder_2"], given["text_encoder"]  # in any order
    made = qwenimg.load(bare[kind], backend, "fp32", **given)("a red circle", **ASKED)  # type: ignore[arg-type]
    expected = drawn[kind, backend]
    assert np.array_equal(made.latents, expected.latents) and np.array_equal(made.pixels, expected.pixels)
    assert made.pixels.std() > 10 and made.recipe["transformer"] == "transformer.safetensors"


def test_a_file_shows_its_variant(tmp_path: Path, models: dict[str, Path]) -> None:
    for kind, name in zip(KINDS, ("hunyuan-dit", "hunyuan-dit-1.1"), strict=True):
        file = saved(tmp_path / f"{kind}-a.safetensors", transformer_file(dit(kind)))
        assert variant_of(file) == variant_of(models[kind]) == name
        assert FAMILY.model_of is not None and FAMILY.model_of(file, None) == name  # type: ignore[arg-type]
        lines = describe(file).lines
        print(*lines, sep="\n")
        assert any("Hunyuan-DiT 1.2" if kind == "hunyuan" else "1.0 or 1.1" in line for line in lines[:2])
        distilled = file.rename(tmp_path / f"{kind}_distill.safetensors")
        assert FAMILY.model_of(distilled, None).endswith("distilled")  # type: ignore[arg-type]
    lines = describe(saved(tmp_path / "bert.safetensors", parts("hunyuan")["text_encoder"])).lines
    print(*lines, sep="\n")
    assert "BERT" in lines[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(0)
def test_one_file(models: dict[str, Path], drawn: dict[Any, Any], tmp_path: Path, kind: str) -> None:
    """ComfyUI's checkpoint alone, with what it has besides weights, draws what the folder draws, and so does a folder
    that is converted from it."""
    words = tmp_path / "words"
    for name in ("tokenizer", "tokenizer_2"):
        shutil.copytree(models[kind] / name, words / name)
    own = parts(kind)
    starts = {
        "model.": own["transformer"],
        "text_encoders.hydit_clip.transformer.": own["text_encoder"],
        "text_encoders.mt5xl.transformer.": own["text_encoder_2"],
        "vae.": own["vae"],
    }
    more = {
        "text_encoders.mt5xl.spiece_model": torch.zeros(40, dtype=torch.uint8),
        "text_encoders.hydit_clip.logit_scale": torch.ones(()),
        "text_encoders.hydit_clip.transformer.bert.embeddings.position_ids": torch.arange(90)[None],
    }
    tensors = {start + name: value for start, part in starts.items() for name, value in part.items()}
    file = saved(tmp_path / "a.safetensors", tensors | more)
    lines = describe(file).lines
    print(*lines, sep="\n")
    assert any("Hunyuan-DiT" in line for line in lines) and not any("lacks" in line for line in lines)
    for backend in BACKENDS:
        made = qwenimg.load(file, backend, "fp32", tokenizer=words)("a red circle", **ASKED)
        assert made.pixels.std() > 10 and np.array_equal(made.latents, drawn[kind, backend].latents)
        assert np.array_equal(made.pixels, drawn[kind, backend].pixels)
    given = ("convert", str(file), str(tmp_path / "o"), "--tokenizer", str(words), "--quiet")
    assert cli(*given).code == 0
    again = qwenimg.load(tmp_path / "o", "mlx", "fp32")("a red circle", **ASKED)
    assert np.array_equal(again.latents, made.latents)
    with pytest.raises(ModelError, match="qwenimg pull hunyuan-dit-tokenizers"):
        qwenimg.load(file, "cpu", "fp32")


@pytest.mark.parametrize("layout", ["older", "newer", "int8_convrot"])
@pytest.mark.sample(1)
def test_eight_bits_draw_what_their_values_draw(models: dict[str, Path], tmp_path: Path, layout: str) -> None:
    """As ComfyUI writes them; q, k and v are parts of one tensor, k and v of the text of another."""
    coded = ("Wqkv", "kv_proj", "out_proj", ".mlp.", "skip_linear")
    check_eight_bits(
        tmp_path,
        transformer_file(dit("hunyuan")),
        layout,
        lambda name: any(one in name for one in coded),
        lambda file: qwenimg.load(models["hunyuan"], "cpu", "fp32", transformer=file)("a ring", **ASKED),
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("type", ["F32", "Q8_0"])
@pytest.mark.sample(0)
def test_gguf(models: dict[str, Path], drawn: dict[Any, Any], tmp_path: Path, type: str, backend: str) -> None:
    def draw(file: Path) -> Any:
        return qwenimg.load(models["hunyuan"], backend, "fp32", transformer=file)("a red circle", **ASKED)

    tensors, expected = transformer_file(dit("hunyuan")), drawn["hunyuan", backend]
    check_gguf(tmp_path / "a.gguf", tensors, "hydit", type, draw, expected, "hunyuan")


@pytest.mark.parametrize("kind", KINDS)
def test_a_converted_model_draws_the_same(
    bare: dict[str, Path], drawn: dict[Any, Any], tmp_path: Path, kind: str
) -> None:
    """In diffusers' folders, which diffusers reads."""
    from diffusers import HunyuanDiT2DModel
    from transformers import BertModel

    own = {part: saved(tmp_path / f"{part}.safetensors", one) for part, one in parts(kind).items()}
    given = [
        word for part, file in own.items() for word in (f"--{part.removesuffix('_2').replace('_', '-')}", str(file))
    ]
    assert cli("convert", str(bare[kind]), str(tmp_path / "o"), *given, "--quiet").code == 0
    made = qwenimg.load(tmp_path / "o", "cpu", "fp32")("a red circle", **ASKED)
    assert np.array_equal(made.latents, drawn[kind, "cpu"].latents)
    again, state = HunyuanDiT2DModel.from_pretrained(tmp_path / "o" / "transformer"), dit(kind).state_dict()
    assert again.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in again.state_dict().items())
    text = BertModel.from_pretrained(tmp_path / "o" / "text_encoder", add_pooling_layer=False).state_dict()
    assert all(torch.equal(value, tiny_bert(**BERT).state_dict()[key]) for key, value in text.items())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_in_8_bits(models: dict[str, Path], drawn: dict[Any, Any], tmp_path: Path, backend: str) -> None:
    def draw(folder: Path, **options: Any) -> Any:
        return qwenimg.load(folder, backend, "fp32", **options)("a red circle", **ASKED)

    check_quantized(models["hunyuan"], tmp_path / "q", draw, drawn["hunyuan", backend])


@pytest.mark.parametrize("name", ["after_proj_list.0.weight", "controlnet_blocks.0.weight"])
def test_controlnets_are_refused(models: dict[str, Path], tmp_path: Path, name: str) -> None:
    model = dit("hunyuan")
    tensors = transformer_file(model) if name.startswith("after") else dict(model.state_dict())
    file = saved(tmp_path / "a.safetensors", tensors | {name: torch.ones(96, 96)})
    with pytest.raises(ModelError, match=r"ControlNet of Hunyuan-DiT"):
        qwenimg.load(models["hunyuan"], "cpu", "fp32", transformer=file)
    assert any("ControlNet" in line for line in describe(file).lines)
