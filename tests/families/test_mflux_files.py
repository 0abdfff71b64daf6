"""Transformer and text encoder as mflux saves them: its names, its shards, codes in every width; and stale indexes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cli_runner import cli
from family_cases import BACKENDS
from random_model import DIT, TEXT, write_random_model

import qwenimg
from qwenimg.common.base.errors import ModelError
from qwenimg.common.codes.affine import Affine
from qwenimg.common.families import registry
from qwenimg.common.families.choices import Choices
from qwenimg.common.weights.storage import Packed

# Of one block, as its loader lists them: the names of a folder in diffusers layout, and those that it saves.
BLOCK = """
attn.to_q attn.to_q, attn.to_k attn.to_k, attn.to_v attn.to_v, attn.add_q_proj attn.add_q_proj,
attn.add_k_proj attn.add_k_proj, attn.add_v_proj attn.add_v_proj, attn.norm_q attn.norm_q, attn.norm_k attn.norm_k,
attn.norm_added_q attn.norm_added_q, attn.norm_added_k attn.norm_added_k, attn.to_out.0 attn.attn_to_out.0,
attn.to_add_out attn.to_add_out, img_mod.1 img_mod_linear, txt_mod.1 txt_mod_linear,
img_mlp.net.0.proj img_ff.mlp_in, img_mlp.net.2 img_ff.mlp_out, txt_mlp.net.0.proj txt_ff.mlp_in,
txt_mlp.net.2 txt_ff.mlp_out
"""
LAYERS = dict(pair.split() for pair in BLOCK.replace("\n", " ").split(","))
ASK: dict[str, Any] = {"seed": 3, "width": 48, "height": 32, "steps": 2, "guidance": 2.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "m"
    dit = replace(
        DIT, attention_head_dim=64, num_attention_heads=2, joint_attention_dim=128, axes_dims_rope=(16, 24, 24)
    )
    text = replace(TEXT, hidden_size=128, num_attention_heads=8, intermediate_size=192)
    write_random_model(folder, dit=dit, text=text, dtype="bfloat16")
    return folder


def theirs(name: str, part: str) -> str:
    if part == "text_encoder":
        return f"encoder.{name.removeprefix('model.')}"
    if not name.startswith("transformer_blocks."):
        return name
    _, number, rest = name.split(".", 2)
    layer, _, leaf = rest.rpartition(".")
    return f"transformer_blocks.{number}.{LAYERS[layer]}.{leaf}"


def save(model: Path, out: Path, bits: int) -> None:
    """Both parts with every matrix quantised by MLX in groups of 64, in two shards and an index, as mflux does."""
    for part in ("transformer", "text_encoder"):
        (path,) = (model / part).glob("*.safetensors")
        made = {}
        for name, value in mx.load(str(path)).items():
            layer = theirs(name, part).removesuffix(".weight")
            if value.ndim == 2 and value.shape[1] % 64 == 0:
                made[f"{layer}.weight"], made[f"{layer}.scales"], made[f"{layer}.biases"] = mx.quantize(
                    value, group_size=64, bits=bits
                )
            else:
                made[theirs(name, part)] = value
        about, names = {"quantization_level": str(bits), "mflux_version": "0.11.1"}, list(made)
        (out / part).mkdir(parents=True)
        for i in range(2):
            mx.save_safetensors(str(out / part / f"{i}.safetensors"), {n: made[n] for n in names[i::2]}, about)
        index = {"metadata": about, "weight_map": {n: f"{i}.safetensors" for i in range(2) for n in names[i::2]}}
        (out / part / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_every_width_is_read_and_stays(model: Path, tmp_path: Path, bits: int) -> None:
    save(model, tmp_path, bits)
    parts = {name: tmp_path / name for name in ("transformer", "text_encoder")}
    opened = registry.open_model(model, Choices(**parts))  # type: ignore[arg-type]
    for part in parts:
        entries = opened.checkpoint[part].plan.entries
        codes = {entry.storage.code for entry in entries.values() if isinstance(entry.storage, Packed)}
        matrices = [name for name, e in entries.items() if len(e.shape) == 2 and "embed_tokens" not in name]
        assert codes == {Affine(bits, 64)} and all(isinstance(entries[n].storage, Packed) for n in matrices)
    opened.checkpoint.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_picture_is_that_of_the_same_codes_under_our_names(model: Path, tmp_path: Path, backend: str) -> None:
    """`convert` writes them under diffusers' names; the picture is the same, bit for bit."""
    save(model, tmp_path / "x", 4)
    given = {part: tmp_path / "x" / part for part in ("transformer", "text_encoder")}
    first = qwenimg.load(model, backend, "bf16", **given)("a red circle", **ASK).pixels  # type: ignore[arg-type]
    options = [str(x) for part, path in given.items() for x in (f"--{part.replace('_', '-')}", path)]
    assert cli("convert", str(model), str(tmp_path / "o"), *options).code == 0
    assert np.array_equal(qwenimg.load(tmp_path / "o", backend, "bf16")("a red circle", **ASK).pixels, first)


def test_a_stale_index(model: Path, tmp_path: Path) -> None:
    """One that names shards of before is passed over; one of which a shard is here is not."""
    shutil.copytree(model, tmp_path / "m")
    part = tmp_path / "m" / "text_encoder"
    index = part / "model.safetensors.index.json"
    gone = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    index.write_text(json.dumps(gone))
    registry.open_model(tmp_path / "m").checkpoint.close()
    tensors = mx.load(str(part / "model.safetensors"))
    (part / "model.safetensors").unlink()
    names = list(tensors)
    for i in range(3):
        mx.save_safetensors(str(part / f"model-{i + 1:05}-of-00003.safetensors"), {n: tensors[n] for n in names[i::3]})
    registry.open_model(tmp_path / "m").checkpoint.close()
    (part / "model-00002-of-00003.safetensors").rename(part / "x.safetensors")
    with pytest.raises(ModelError, match=r"model-00001-of-00002\.safetensors: does not exist"):
        registry.open_model(tmp_path / "m")
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-00003-of-00003.safetensors"}}))
    with pytest.raises(ModelError, match="which does not hold it"):
        registry.open_model(tmp_path / "m")


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("transformer", lambda t: t.pop("transformer_blocks.1.img_ff.mlp_out.scales")),
        ("transformer", lambda t: t.update({"transformer_blocks.9.img_mod_linear.bias": mx.zeros(2)})),
        ("transformer", lambda t: t.update({"transformer_blocks.0.img_mlp.net.2.bias": mx.zeros(128)})),
        ("text_encoder", lambda t: t.update({"norm.weight": mx.zeros(128)})),
        ("text_encoder", lambda t: t.pop("encoder.norm.weight")),
    ],
)
def test_every_tensor_counts(model: Path, tmp_path: Path, part: str, change: Any) -> None:
    """One line that names the tensor: codes without scales, a block too many, one layer under both names, none."""
    save(model, tmp_path, 8)
    tensors: dict[str, Any] = {}
    for i in range(2):
        tensors |= mx.load(str(tmp_path / part / f"{i}.safetensors"))
    shutil.rmtree(tmp_path / part)
    (tmp_path / part).mkdir()
    change(tensors)
    mx.save_safetensors(str(tmp_path / part / "model.safetensors"), tensors)
    option = f"--{part.replace('_', '-')}"
    asked = ("x", "-m", str(model), option, str(tmp_path / part), "--backend", "cpu", "-o", str(tmp_path / "x.png"))
    cli(*asked).refused(5, "model.safetensors")
