"""Lumina-Image 2.0's parts from other files: those of its authors, which ComfyUI has, in 8 bits and in GGUF too, and a
whole model in one file, as NetaYume Lumina is published."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_ldm, tiny_lumina, tiny_zimage
from support.cli_runner import cli
from support.drawn_files import check_eight_bits, check_gguf, saved
from support.gguf_files import write
from support.relative import relative
from support.tiny_lumina import tiny_dit, tiny_text_encoder, transformer_file, write_tiny_lumina
from support.tiny_zimage import tiny_vae

import qwenimg
from qwenimg.common.families import catalog, registry
from qwenimg.common.hub.describe import describe
from qwenimg.common.networks.denoisers import lumina_dit
from qwenimg.common.parts.components import read_config

BACKENDS = ("cpu", "mlx")
PARTS = ("transformer", "text_encoder", "vae")
ASKED: dict[str, Any] = {"width": 48, "height": 32, "steps": 2, "seed": 4, "guidance": 2.0}
DIT, TEXT = tiny_lumina.WIDE, tiny_lumina.WIDE_TEXT
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose parts have these sizes."""
    folder = tmp_path_factory.mktemp("lumina") / "model"
    write_tiny_lumina(folder, "5GB", DIT, TEXT)
    return folder


@pytest.fixture(scope="module")
def bare(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder without weights."""
    folder = tmp_path_factory.mktemp("bare") / "model"
    return shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))


@pytest.fixture(scope="module")
def drawn(model: Path) -> dict[str, Any]:
    return {backend: qwenimg.load(model, backend, "fp32")("a red circle", **ASKED) for backend in BACKENDS}


def parts(dit: Any = DIT, text: Any = TEXT, vae: Any = MappingProxyType({})) -> dict[str, Tensors]:
    return {
        "transformer": transformer_file(tiny_dit(**dit)),
        "text_encoder": {f"model.{name}": value for name, value in tiny_text_encoder(**text).state_dict().items()},
        "vae": tiny_ldm.vae_file(tiny_vae(**vae)),
    }


def all_in_one(*sizes: Any) -> Tensors:
    """As ComfyUI saves a whole model, with the vocabulary and a number that no part uses."""
    starts = ("model.diffusion_model.", "text_encoders.gemma2_2b.transformer.", "vae.")
    own = zip(starts, parts(*sizes).values(), strict=True)
    return {start + name: value for start, one in own for name, value in one.items()} | {
        "text_encoders.gemma2_2b.logit_scale": torch.ones(()),
        "text_encoders.spiece_model": torch.zeros(64, dtype=torch.uint8),
    }


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_files_of_comfyui_draw_what_the_folder_draws(
    bare: Path, drawn: dict[str, Any], tmp_path: Path, prefix: str, backend: str
) -> None:
    own = parts()
    own["transformer"] = {prefix + name: value for name, value in own["transformer"].items()}
    own["text_encoder"]["spiece_model"] = torch.zeros(64, dtype=torch.uint8)
    given = {part: saved(tmp_path / f"{part}.safetensors", tensors) for part, tensors in own.items()}
    made = qwenimg.load(bare, backend, "fp32", **given)("a red circle", **ASKED)  # type: ignore[arg-type]
    assert np.array_equal(made.latents, drawn[backend].latents) and np.array_equal(made.pixels, drawn[backend].pixels)
    assert made.pixels.std() > 10 and made.recipe["transformer"] == "transformer.safetensors"


# As wide as the published heads and groups, which no tensor shows
ONE_DIT = {
    "hidden_size": 192, "num_attention_heads": 2, "num_kv_heads": 1, "axes_dim_rope": [32, 32, 32],
    "axes_lens": [300, 512, 512], "cap_feat_dim": 64, "multiple_of": 256, "ffn_dim_multiplier": None,
}  # fmt: skip
ONE_TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    "sliding_window": 4096,
}  # fmt: skip
ONE_VAE: dict[str, Any] = {"block_out_channels": [32, 32, 64, 32], "norm_num_groups": 32}


@pytest.mark.sample(0)
def test_one_file(tmp_path: Path) -> None:
    """The file alone draws what the folder draws, and so does a folder that is converted from it."""
    folder = tmp_path / "model"
    write_tiny_lumina(folder, "5GB", ONE_DIT, ONE_TEXT)
    shutil.rmtree(folder / "vae")
    tiny_vae(**ONE_VAE).save_pretrained(folder / "vae")
    tokenizer = shutil.copytree(folder / "tokenizer", tmp_path / "tokenizer")
    file = saved(tmp_path / "NetaYume_all_in_one.safetensors", all_in_one(ONE_DIT, ONE_TEXT, ONE_VAE))
    lines = describe(file).lines
    print(*lines, sep="\n")
    assert any("Lumina-Image 2.0" in line for line in lines) and not any("lacks" in line for line in lines)
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
@pytest.mark.parametrize("part", ["transformer", "text_encoder"])
@pytest.mark.sample(2)
def test_eight_bits_draw_what_their_values_draw(
    model: Path, bare: Path, tmp_path: Path, part: str, layout: str
) -> None:
    """As ComfyUI writes them; q, k and v are parts of different width of one tensor."""
    coded = (".attention.qkv.", ".attention.out.", ".feed_forward.", "_proj.")

    def draw(file: Path) -> Any:
        return qwenimg.load(model, "cpu", "fp32", **{part: file})("a ring", **ASKED)  # type: ignore[arg-type]

    check_eight_bits(tmp_path, parts()[part], layout, lambda name: any(one in name for one in coded), draw)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("type", ["F32", "Q8_0"])
@pytest.mark.sample(0)
def test_gguf(model: Path, drawn: dict[str, Any], tmp_path: Path, type: str, backend: str) -> None:
    """The transformer under the architecture that Z-Image's files have too."""

    def draw(file: Path) -> Any:
        return qwenimg.load(model, backend, "fp32", transformer=file)("a red circle", **ASKED)

    tensors = parts()["transformer"]
    check_gguf(tmp_path / "a.gguf", tensors, "lumina2", type, draw, drawn[backend], "lumina")
    others = {key: value.numpy() for key, value in tiny_zimage.transformer_file(tiny_zimage.tiny_dit()).items()}
    write(tmp_path / "z.gguf", {key: (value, "F32") for key, value in others.items()}, "lumina2")
    kind = registry.identify_file(tmp_path / "z.gguf")
    assert kind is not None and {family.name for family in kind.families} == {"z-image"}


GEMMA = {
    "embed_tokens": "token_embd", "norm": "output_norm", "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
"""llama.cpp's names of layers, of the package that writes its files."""


def in_llama_cpp(name: str) -> str:
    parts = name.split(".")
    block = f"blk.{parts[1]}." if parts[0] == "layers" else ""
    return f"{block}{GEMMA['.'.join(parts[2:-1] if block else parts[:-1])]}.{parts[-1]}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_a_text_encoder_of_llama_cpp(model: Path, drawn: dict[str, Any], tmp_path: Path, backend: str) -> None:
    """Gains are whole there, and stored minus one in transformers' files."""
    state = tiny_text_encoder(**TEXT).state_dict()
    values = {
        in_llama_cpp(name): (value + 1 if name.endswith("norm.weight") else value) for name, value in state.items()
    }
    write(tmp_path / "g.gguf", {name: (value.numpy(), "F32") for name, value in values.items()}, "gemma2")
    made = qwenimg.load(model, backend, "fp32", text_encoder=tmp_path / "g.gguf")("a red circle", **ASKED)
    error = relative(made.latents, drawn[backend].latents)
    print(f"{backend}: {error:.1e}")
    assert error < 1e-5  # the sum with one is rounded


def test_a_converted_model_draws_the_same(bare: Path, drawn: dict[str, Any], tmp_path: Path) -> None:
    """In diffusers' folders, which diffusers and transformers read."""
    from diffusers import Lumina2Transformer2DModel
    from transformers import Gemma2Model

    own = {part: saved(tmp_path / f"{part}.safetensors", one) for part, one in parts().items()}
    given = [word for part, file in own.items() for word in (f"--{part.replace('_', '-')}", str(file))]
    assert cli("convert", str(bare), str(tmp_path / "o"), *given, "--quiet").code == 0
    made = qwenimg.load(tmp_path / "o", "cpu", "fp32")("a red circle", **ASKED)
    assert np.array_equal(made.latents, drawn["cpu"].latents)
    transformer = Lumina2Transformer2DModel.from_pretrained(tmp_path / "o" / "transformer").state_dict()
    text = Gemma2Model.from_pretrained(tmp_path / "o" / "text_encoder").state_dict()
    for again, one in ((transformer, tiny_dit(**DIT)), (text, tiny_text_encoder(**TEXT))):
        state = one.state_dict()
        assert again.keys() == state.keys() and all(torch.equal(value, state[key]) for key, value in again.items())


def test_configurations_are_written_as_they_are_read(tmp_path: Path) -> None:
    """Those of the published model, for a file without one."""
    model = registry.published(catalog.KNOWN["netayume-lumina"])
    assert model is not None
    networks = {network.name: network for network in model.family.networks}
    for part in ("transformer", "text_encoder"):
        component = model.checkpoint[part]
        network = networks[component.network]
        data = json.loads(json.dumps(network.written(component.config)))
        (tmp_path / part).mkdir()
        (tmp_path / part / "config.json").write_text(json.dumps(data))
        assert read_config(network, tmp_path / part) == component.config
    from diffusers import Lumina2Transformer2DModel
    from transformers import AutoConfig

    theirs = Lumina2Transformer2DModel.load_config(tmp_path / "transformer")
    assert (theirs["hidden_size"], theirs["num_kv_heads"], theirs["cap_feat_dim"]) == (2304, 8, 2304)
    text = AutoConfig.from_pretrained(tmp_path / "text_encoder")
    assert (text.query_pre_attn_scalar, text.attn_logit_softcapping, text.sliding_window) == (256, 50.0, 4096)


def test_parameters_of_the_published_model() -> None:
    model = registry.published(catalog.KNOWN["lumina-image-2"])
    assert model is not None
    from diffusers import Lumina2Transformer2DModel

    with torch.device("meta"):
        theirs = Lumina2Transformer2DModel(cap_feat_dim=2304)
    shapes = {key: tuple(value.shape) for key, value in theirs.state_dict().items()}
    plan = model.checkpoint["transformer"].plan
    assert plan.parameters == sum(int(np.prod(shape)) for shape in shapes.values())
    assert {lumina_dit.rename(key): shape for key, shape in shapes.items()} == dict(plan.shapes)
