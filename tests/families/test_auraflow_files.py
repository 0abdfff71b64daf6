"""AuraFlow's parts from other files: those of its authors, which ComfyUI and Pony v7 have, in 8 bits and in GGUF too,
and a whole model in one file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_auraflow, tiny_ldm
from support.cli_runner import cli
from support.drawn_files import check_eight_bits, check_gguf, check_quantized, saved
from support.gguf_files import write
from support.tiny_auraflow import tiny_dit, tiny_text_encoder, tiny_vae, transformer_file, write_tiny_auraflow

import qwenimg
from qwenimg.common.families import catalog, registry
from qwenimg.common.hub.describe import describe
from qwenimg.common.networks.denoisers import aura_dit
from qwenimg.common.parts.components import read_config

BACKENDS = ("cpu", "mlx")
ASKED: dict[str, Any] = {"width": 48, "height": 32, "steps": 2, "seed": 4, "guidance": 2.0}
DIT, TEXT, VAE = tiny_auraflow.WIDE, tiny_auraflow.WIDE_TEXT, tiny_auraflow.WIDE_VAE
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose parts have these sizes."""
    folder = tmp_path_factory.mktemp("auraflow") / "model"
    write_tiny_auraflow(folder, "5GB", DIT, TEXT, VAE)
    return folder


@pytest.fixture(scope="module")
def bare(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder without weights."""
    folder = tmp_path_factory.mktemp("bare") / "model"
    return shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))


@pytest.fixture(scope="module")
def drawn(model: Path) -> dict[str, Any]:
    return {backend: qwenimg.load(model, backend, "fp32")("a red circle", **ASKED) for backend in BACKENDS}


def parts(vae: Any = MappingProxyType(VAE)) -> dict[str, Tensors]:
    return {
        "transformer": transformer_file(tiny_dit(**DIT)),
        "text_encoder": dict(tiny_text_encoder(**TEXT).state_dict()),
        "vae": tiny_ldm.vae_file(tiny_vae(**vae)),
    }


def all_in_one() -> Tensors:
    """As the authors publish a whole model, for ComfyUI."""
    starts = ("model.", "text_encoders.pile_t5xl.transformer.", "vae.")
    own = zip(starts, parts().values(), strict=True)
    return {start + name: value for start, one in own for name, value in one.items()} | {
        "text_encoders.pile_t5xl.logit_scale": torch.ones(()),
    }


@pytest.mark.parametrize("prefix", ["", "model.", "model.diffusion_model."])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_files_of_comfyui_draw_what_the_folder_draws(
    bare: Path, drawn: dict[str, Any], tmp_path: Path, prefix: str, backend: str
) -> None:
    own = parts()
    own["transformer"] = {prefix + name: value for name, value in own["transformer"].items()}
    given = {part: saved(tmp_path / f"{part}.safetensors", tensors) for part, tensors in own.items()}
    made = qwenimg.load(bare, backend, "fp32", **given)("a red circle", **ASKED)  # type: ignore[arg-type]
    assert np.array_equal(made.latents, drawn[backend].latents) and np.array_equal(made.pixels, drawn[backend].pixels)
    assert made.pixels.std() > 10 and made.recipe["transformer"] == "transformer.safetensors"


def test_parts_without_a_folder(model: Path, drawn: dict[str, Any], tmp_path: Path) -> None:
    """Pony v7's three files, each alone, are a model: its name is the transformer's."""
    names = {"transformer": "pony-v7-base", "text_encoder": "model.fp16", "vae": "sdxl_vae"}
    own = parts() | {"vae": dict(tiny_vae(**VAE).state_dict())}
    given = {part: saved(tmp_path / f"{names[part]}.safetensors", one) for part, one in own.items()}
    shutil.copytree(model / "tokenizer", tmp_path / "tokenizer")
    pipe = qwenimg.load(None, "cpu", "fp32", tokenizer=tmp_path / "tokenizer", **given)  # type: ignore[arg-type]
    assert pipe.defaults.steps == 30
    assert np.array_equal(pipe("a red circle", **ASKED).latents, drawn["cpu"].latents)


@pytest.mark.sample(0)
def test_one_file(model: Path, drawn: dict[str, Any], tmp_path: Path) -> None:
    """The file alone draws what the folder draws, and so does a folder that is converted from it."""
    tokenizer = shutil.copytree(model / "tokenizer", tmp_path / "tokenizer")
    file = saved(tmp_path / "aura_flow_0.3.safetensors", all_in_one())
    lines = describe(file).lines
    print(*lines, sep="\n")
    assert any("AuraFlow" in line for line in lines) and not any("lacks" in line for line in lines)
    for backend in BACKENDS:
        made = qwenimg.load(file, backend, "fp32", tokenizer=tokenizer)("a red circle", **ASKED)
        assert np.array_equal(made.latents, drawn[backend].latents) and made.pixels.std() > 10
        assert np.array_equal(made.pixels, drawn[backend].pixels)
    given = ("convert", str(file), str(tmp_path / "o"), "--tokenizer", str(tokenizer), "--quiet")
    assert cli(*given).code == 0
    again = qwenimg.load(tmp_path / "o", "mlx", "fp32")("a red circle", **ASKED)
    assert np.array_equal(again.latents, made.latents)


@pytest.mark.parametrize("layout", ["older", "newer", "int8_convrot"])
@pytest.mark.parametrize("part", ["transformer", "text_encoder"])
@pytest.mark.sample(2)
def test_eight_bits_draw_what_their_values_draw(model: Path, tmp_path: Path, part: str, layout: str) -> None:
    """As ComfyUI writes them."""
    coded = (".attn.", ".mlp", ".DenseReluDense.", ".SelfAttention.q.", ".SelfAttention.o.")

    def draw(file: Path) -> Any:
        return qwenimg.load(model, "cpu", "fp32", **{part: file})("a ring", **ASKED)  # type: ignore[arg-type]

    check_eight_bits(tmp_path, parts()[part], layout, lambda name: any(one in name for one in coded), draw)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("type", ["F32", "Q8_0"])
@pytest.mark.sample(0)
def test_gguf(model: Path, drawn: dict[str, Any], tmp_path: Path, type: str, backend: str) -> None:
    """The transformer in its authors' names."""

    def draw(file: Path) -> Any:
        return qwenimg.load(model, backend, "fp32", transformer=file)("a red circle", **ASKED)

    tensors = parts()["transformer"]
    check_gguf(tmp_path / "a.gguf", tensors, "aura", type, draw, drawn[backend], "auraflow")


UMT5 = {
    "shared": "token_embd", "encoder.final_layer_norm": "enc.output_norm", "layer.0.layer_norm": "attn_norm",
    "layer.0.SelfAttention.q": "attn_q", "layer.0.SelfAttention.k": "attn_k", "layer.0.SelfAttention.v": "attn_v",
    "layer.0.SelfAttention.o": "attn_o", "layer.0.SelfAttention.relative_attention_bias": "attn_rel_b",
    "layer.1.layer_norm": "ffn_norm", "layer.1.DenseReluDense.wi_0": "ffn_gate",
    "layer.1.DenseReluDense.wi_1": "ffn_up", "layer.1.DenseReluDense.wo": "ffn_down",
}  # fmt: skip
"""llama.cpp's names of layers."""


def in_llama_cpp(name: str) -> str:
    parts = name.removesuffix(".weight").split(".")
    if parts[:2] == ["encoder", "block"]:
        return f"enc.blk.{parts[2]}.{UMT5['.'.join(parts[3:])]}.weight"
    return f"{UMT5['.'.join(parts)]}.weight"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_a_text_encoder_of_llama_cpp(model: Path, drawn: dict[str, Any], tmp_path: Path, backend: str) -> None:
    state = {name: value for name, value in parts()["text_encoder"].items() if name != "encoder.embed_tokens.weight"}
    write(tmp_path / "t.gguf", {in_llama_cpp(name): (one.numpy(), "F32") for name, one in state.items()}, "t5encoder")
    made = qwenimg.load(model, backend, "fp32", text_encoder=tmp_path / "t.gguf")("a red circle", **ASKED)
    assert np.array_equal(made.latents, drawn[backend].latents)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_in_8_bits(model: Path, drawn: dict[str, Any], tmp_path: Path, backend: str) -> None:
    def draw(folder: Path, **options: Any) -> Any:
        return qwenimg.load(folder, backend, "fp32", **options)("a red circle", **ASKED)

    check_quantized(model, tmp_path / "q", draw, drawn[backend])


def test_a_converted_model_draws_the_same(bare: Path, drawn: dict[str, Any], tmp_path: Path) -> None:
    """In diffusers' folders, which diffusers and transformers read."""
    from diffusers import AuraFlowTransformer2DModel
    from transformers import UMT5EncoderModel

    own = {part: saved(tmp_path / f"{part}.safetensors", one) for part, one in parts().items()}
    given = [word for part, file in own.items() for word in (f"--{part.replace('_', '-')}", str(file))]
    assert cli("convert", str(bare), str(tmp_path / "o"), *given, "--quiet").code == 0
    made = qwenimg.load(tmp_path / "o", "cpu", "fp32")("a red circle", **ASKED)
    assert np.array_equal(made.latents, drawn["cpu"].latents)
    transformer = AuraFlowTransformer2DModel.from_pretrained(tmp_path / "o" / "transformer").state_dict()
    text = UMT5EncoderModel.from_pretrained(tmp_path / "o" / "text_encoder").state_dict()
    for again, one in ((transformer, tiny_dit(**DIT)), (text, tiny_text_encoder(**TEXT))):
        state = one.state_dict()
        assert again.keys() == state.keys() and all(torch.equal(value, state[key]) for key, value in again.items())


def test_t5_and_umt5_are_told_apart(tmp_path: Path, model: Path) -> None:
    """By their tensors, as files and as folders."""
    from support.tiny_t5 import tiny_t5

    for name, made in (("t5", tiny_t5()), ("umt5", tiny_text_encoder(**TEXT))):
        kind = registry.identify_file(saved(tmp_path / f"{name}.safetensors", dict(made.state_dict())))
        assert kind is not None
        assert ({family.name for family in kind.families} == {"auraflow"}) is (name == "umt5")
    with pytest.raises(qwenimg.ModelError, match="holds no text_encoder of UMT5"):
        qwenimg.load(model, "cpu", text_encoder=tmp_path / "t5.safetensors")


def test_configurations_are_written_as_they_are_read(tmp_path: Path) -> None:
    """Those of the published model, for a file without one."""
    opened = registry.published(catalog.KNOWN["pony-v7"])
    assert opened is not None
    networks = opened.family.parts
    for part in ("transformer", "text_encoder", "vae"):
        config, network = opened.checkpoint[part].config, networks[part]
        data = json.loads(json.dumps(network.written(config)))
        (tmp_path / part).mkdir()
        (tmp_path / part / "config.json").write_text(json.dumps(data))
        assert read_config(network, tmp_path / part) == config
    from diffusers import AuraFlowTransformer2DModel
    from transformers import AutoConfig

    theirs = AuraFlowTransformer2DModel.load_config(tmp_path / "transformer")
    assert (theirs["pos_embed_max_size"], theirs["num_single_dit_layers"], theirs["joint_attention_dim"]) == (
        9216, 32, 2048,
    )  # fmt: skip
    text = AutoConfig.from_pretrained(tmp_path / "text_encoder")
    assert (text.model_type, text.d_ff, text.num_heads) == ("umt5", 5120, 32)


def test_parameters_of_the_published_model() -> None:
    """Of Pony v7's file in float16 of 13,717,249,520 bytes, all but 64 KiB of its header."""
    model = registry.published(catalog.KNOWN["auraflow"])
    assert model is not None
    from diffusers import AuraFlowTransformer2DModel

    with torch.device("meta"):
        theirs = AuraFlowTransformer2DModel(pos_embed_max_size=9216)
    shapes = {aura_dit.rename(key): tuple(value.shape) for key, value in theirs.state_dict().items()}
    plan = model.checkpoint["transformer"].plan
    network = model.family.parts["transformer"]
    assert shapes == network.manifest(model.checkpoint["transformer"].config)
    assert plan.parameters == sum(int(np.prod(shape)) for shape in shapes.values())
    assert 0 < 13_717_249_520 - 2 * plan.parameters < 2**16
