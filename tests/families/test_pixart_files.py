"""PixArt's parts from other files: those of its authors, which ComfyUI has, in 8 bits and in GGUF too, a whole model in
one file, and VAEs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_ldm, tiny_pixart
from support.cli_runner import cli
from support.drawn_files import check_eight_bits, check_gguf, check_quantized, saved
from support.tiny_pixart import authors_file, tiny_dit, tiny_vae, write_tiny_pixart
from support.tiny_t5 import tiny_t5

import qwenimg
from qwenimg.common.base.config import data_folder
from qwenimg.common.base.errors import ModelError
from qwenimg.common.families.pixart.checkpoint import model_of, variant_of
from qwenimg.common.hub.describe import describe

BACKENDS = ("cpu", "mlx")
ASKED: dict[str, Any] = {"width": 48, "height": 32, "steps": 2, "seed": 4, "guidance": 2.0}
KINDS = ("pixart", "pixart-alpha")
TEXT = tiny_pixart.WIDE_TEXT
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders whose parts have widths of whole blocks of codes."""
    folder = tmp_path_factory.mktemp("pixart")
    for kind in KINDS:
        write_tiny_pixart(folder / kind, kind, "5GB", tiny_pixart.WIDE, **TEXT)
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
    return tiny_dit(**(tiny_pixart.KINDS[kind] | tiny_pixart.WIDE))


def parts(kind: str) -> dict[str, Tensors]:
    text = tiny_t5(**TEXT).state_dict()
    return {
        "transformer": authors_file(dit(kind)),
        "text_encoder": {name: value for name, value in text.items() if name != "encoder.embed_tokens.weight"},
        "vae": tiny_ldm.vae_file(tiny_vae()),
    }


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(1)
def test_files_of_its_authors_draw_what_the_folder_draws(
    bare: dict[str, Path], drawn: dict[Any, Any], tmp_path: Path, kind: str, prefix: str, backend: str
) -> None:
    own = parts(kind)
    own["transformer"] = {prefix + name: value for name, value in own["transformer"].items()}
    given = {part: saved(tmp_path / f"{part}.safetensors", tensors) for part, tensors in own.items()}
    made = qwenimg.load(bare[kind], backend, "fp32", **given)("a red circle", **ASKED)  # type: ignore[arg-type]
    expected = drawn[kind, backend]
    assert np.array_equal(made.latents, expected.latents) and np.array_equal(made.pixels, expected.pixels)
    assert made.pixels.std() > 10 and made.recipe["transformer"] == "transformer.safetensors"


# As wide as the published heads, which no tensor shows
ONE = {"num_attention_heads": 2, "attention_head_dim": 72, "cross_attention_dim": 144, "sample_size": 128}
ONE_VAE: dict[str, Any] = {"block_out_channels": (32, 32, 64, 32), "norm_num_groups": 32}


def test_a_file_shows_its_variant(tmp_path: Path) -> None:
    for kind, name in (("pixart", "pixart-sigma"), ("pixart-alpha", "pixart-alpha")):
        sees = {"use_additional_conditions": kind == "pixart-alpha"}
        file = saved(tmp_path / f"{kind}-a.safetensors", authors_file(tiny_dit(**(ONE | sees))))
        assert variant_of(file) == model_of(file) == name
        lines = describe(file).lines
        print(*lines, sep="\n")
        assert any(("alpha" if "alpha" in name else "Sigma") in line for line in lines[:2])
    plain = {"adaln_single.linear.weight": torch.ones(2, 2)}  # of a model that does not see sizes
    named = {"PixArt-XL-2-512x512": "pixart-alpha", "PixArt-Sigma-XL-2-512-MS": "pixart-sigma", "other": "pixart-sigma"}
    for name, variant in named.items():
        assert variant_of(saved(tmp_path / f"{name}.safetensors", plain)) == variant
    assert model_of(saved(tmp_path / "PixArt-LCM-XL-2.safetensors", plain)) == "pixart-lcm"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(0)
def test_one_file(tmp_path: Path, kind: str) -> None:
    """The file alone draws what the folder draws, and so does a folder that is converted from it."""
    folder, more = tmp_path / "model", ONE | {"use_additional_conditions": kind == "pixart-alpha"}
    write_tiny_pixart(folder, kind, "5GB", more, d_model=52)
    shutil.rmtree(folder / "vae")
    scale = tiny_pixart.SCALES.get(kind, 0.18215)
    tiny_vae(**ONE_VAE, scaling_factor=scale).save_pretrained(folder / "vae")
    if kind == "pixart-alpha":  # whose noise levels are quieter here than the published ones, which a file has
        shutil.copytree(data_folder(kind) / "scheduler", folder / "scheduler", dirs_exist_ok=True)
    tokenizer = shutil.copytree(folder / "tokenizer", tmp_path / "tokenizer")
    text = tiny_t5(vocab_size=1000).state_dict()
    starts = {
        "model.diffusion_model.": authors_file(tiny_dit(**(tiny_pixart.DIT | more))),
        "text_encoders.t5xxl.transformer.": {key: one for key, one in text.items() if "embed_tokens" not in key},
        "vae.": tiny_ldm.vae_file(tiny_vae(**ONE_VAE)),
    }
    file = saved(tmp_path / "a.safetensors", {s + name: v for s, own in starts.items() for name, v in own.items()})
    lines = describe(file).lines
    print(*lines, sep="\n")
    assert any("PixArt" in line for line in lines) and not any("lacks" in line for line in lines)
    for backend in BACKENDS:
        expected = qwenimg.load(folder, backend, "fp32")("a red circle", **ASKED)
        made = qwenimg.load(file, backend, "fp32", tokenizer=tokenizer)("a red circle", **ASKED)
        assert np.array_equal(made.latents, expected.latents) and made.pixels.std() > 10
        assert np.array_equal(made.pixels, expected.pixels)
    given = ("convert", str(file), str(tmp_path / "o"), "--tokenizer", str(tokenizer), "--quiet")
    assert cli(*given).code == 0
    again = qwenimg.load(tmp_path / "o", "mlx", "fp32")("a red circle", **ASKED)
    assert np.array_equal(again.latents, made.latents)


@pytest.mark.parametrize("layout", ["older", "newer", "int8_convrot"])
@pytest.mark.sample(1)
def test_eight_bits_draw_what_their_values_draw(models: dict[str, Path], tmp_path: Path, layout: str) -> None:
    """As ComfyUI writes them; q, k and v are parts of one tensor, k and v of the text of another."""
    coded = (".attn.", ".cross_attn.", ".mlp.")
    check_eight_bits(
        tmp_path,
        authors_file(dit("pixart")),
        layout,
        lambda name: any(one in name for one in coded),
        lambda file: qwenimg.load(models["pixart"], "cpu", "fp32", transformer=file)("a ring", **ASKED),
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("type", ["F32", "Q8_0"])
@pytest.mark.sample(0)
def test_gguf(models: dict[str, Path], drawn: dict[Any, Any], tmp_path: Path, type: str, backend: str) -> None:
    def draw(file: Path) -> Any:
        return qwenimg.load(models["pixart"], backend, "fp32", transformer=file)("a red circle", **ASKED)

    tensors, expected = authors_file(dit("pixart")), drawn["pixart", backend]
    check_gguf(tmp_path / "a.gguf", tensors, "pixart", type, draw, expected, "pixart")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_in_8_bits(models: dict[str, Path], drawn: dict[Any, Any], tmp_path: Path, backend: str) -> None:
    def draw(folder: Path, **options: Any) -> Any:
        return qwenimg.load(folder, backend, "fp32", **options)("a red circle", **ASKED)

    check_quantized(models["pixart"], tmp_path / "q", draw, drawn["pixart", backend])


@pytest.mark.parametrize("kind", KINDS)
def test_a_converted_model_draws_the_same(
    bare: dict[str, Path], drawn: dict[Any, Any], tmp_path: Path, kind: str
) -> None:
    """In diffusers' folders, which diffusers reads."""
    from diffusers import PixArtTransformer2DModel

    own = {part: saved(tmp_path / f"{part}.safetensors", one) for part, one in parts(kind).items()}
    given = [word for part, file in own.items() for word in (f"--{part.replace('_', '-')}", str(file))]
    assert cli("convert", str(bare[kind]), str(tmp_path / "o"), *given, "--quiet").code == 0
    made = qwenimg.load(tmp_path / "o", "cpu", "fp32")("a red circle", **ASKED)
    assert np.array_equal(made.latents, drawn[kind, "cpu"].latents)
    again, state = PixArtTransformer2DModel.from_pretrained(tmp_path / "o" / "transformer"), dit(kind).state_dict()
    assert again.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in again.state_dict().items())


def test_a_model_that_joins_keys_and_values_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    tensors = authors_file(dit("pixart")) | {"blocks.0.attn.sr.weight": torch.ones(96, 1, 2, 2)}
    file = saved(tmp_path / "a.safetensors", tensors)
    with pytest.raises(ModelError, match="joins keys and values"):
        qwenimg.load(models["pixart"], "cpu", "fp32", transformer=file)


@pytest.mark.parametrize("kind", ["pixart", "chroma"])
def test_a_text_encoder_that_is_no_t5_is_refused(tiny: dict[str, Path], tmp_path: Path, kind: str) -> None:
    """It was left out without a word, and the run ended as a bug."""
    file = saved(tmp_path / "a.safetensors", {"x": torch.ones(2)})
    with pytest.raises(ModelError, match="holds no text_encoder of T5"):
        qwenimg.load(tiny[kind], "cpu", "fp32", text_encoder=file)
