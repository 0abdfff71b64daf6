"""A Stable Diffusion checkpoint as GGUF draws what the safetensors file draws that it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.cli_runner import cli
from support.gguf_files import fitting, write

import qwenimg
from qwenimg.common.base.errors import ModelError
from qwenimg.common.families import registry
from qwenimg.common.weights.storage import Packed
from qwenimg.common.weights.values import read, read_quantized

ASKED: dict[str, Any] = {"width": 40, "height": 24, "steps": 1, "seed": 4, "guidance": 3.0, "sampler": "euler"}
BACKENDS = ("cpu", "mlx")


def as_gguf(tensors: dict[str, torch.Tensor], path: Path, type: str = "F32", architecture: str | None = None) -> Path:
    """As stable-diffusion.cpp writes a whole checkpoint: its own names, and as 1x1 convolutions what goes in and out of
    an attention."""
    made = {}
    for name, tensor in tensors.items():
        values = tensor.float().numpy()
        if name.startswith("model.diffusion_model.") and name.endswith(("proj_in.weight", "proj_out.weight")):
            values = values.reshape(*values.shape[:2], 1, 1)
        if values.ndim and values.dtype == np.float32:
            made[name] = (values, fitting(values, type))
    write(path, made, architecture)
    return path


def beside(file: Path, tmp_path: Path) -> Path:
    """Where a file has the tokenizer of `file` beside it."""
    (tmp_path / "tokenizer").symlink_to(file.with_name("tokenizer"))
    return tmp_path / "model.gguf"


@pytest.mark.parametrize(("kind", "backend"), [("sd1", "mlx"), ("sd2", "cpu"), ("sdxl", "mlx")])
@pytest.mark.sample(0)
def test_a_lossless_file_draws_the_same(both, kind: str, backend: str, tmp_path: Path) -> None:
    file = both[kind][1]
    path = as_gguf(load_file(file), beside(file, tmp_path))
    made = [qwenimg.load(one, backend, "fp32")("a red circle", **ASKED) for one in (file, path)]
    print(f"{kind} {backend}: deviation of the picture {made[0].pixels.std():.0f}")
    assert np.array_equal(made[0].latents, made[1].latents) and np.array_equal(made[0].pixels, made[1].pixels)


@pytest.mark.sample(0)
def test_codes_draw_alike_on_both_backends(both, tmp_path: Path) -> None:
    """Q8_0 where rows divide: the decoded values are the same bits, so that float32 differs by its sums only."""
    file = both["sdxl"][1]
    path = as_gguf(load_file(file), beside(file, tmp_path), "Q8_0")
    opened = registry.open_model(path)
    kept = [n for n, e in opened.checkpoint["unet"].plan.entries.items() if isinstance(e.storage, Packed)]
    dense = registry.open_model(file)
    for name in kept:
        a, b = (read(one.checkpoint["unet"].plan.entries[name]) for one in (opened, dense))
        assert np.abs(a - b).max() <= np.abs(b).max() / 127
    opened.checkpoint.close(), dense.checkpoint.close()
    plain = qwenimg.load(file, "cpu", "fp32")("a red circle", **ASKED).pixels.astype(float)
    made = [qwenimg.load(path, backend, "fp32")("a red circle", **ASKED).pixels.astype(float) for backend in BACKENDS]
    print(f"{len(kept)} layers as codes; from float32 {np.abs(made[0] - plain).mean():.2f} of 255")
    assert len(kept) > 50 and np.abs(made[0] - made[1]).max() <= 1
    assert 0 < np.abs(made[0] - plain).mean() < 3


def test_what_is_said_of_a_file(both, tmp_path: Path) -> None:
    file = both["sd1"][1]
    path = as_gguf(load_file(file), beside(file, tmp_path), "Q4_0").rename(tmp_path / "weights.bin")
    said = cli("info", str(path)).out.decode()
    print(said)
    assert "unet: 494 tensors" in said
    assert "layout: GGUF, Stable Diffusion, single file" in said
    assert "F32, " in said and " Q4_0)" in said and "in memory: " in said and " as codes" in said


@pytest.mark.parametrize("architecture", ["wan", "hidream"])
def test_another_architecture_is_named(both, architecture: str, tmp_path: Path) -> None:
    path = as_gguf(load_file(both["sd1"][1]), tmp_path / "a.gguf", architecture=architecture)
    with pytest.raises(ModelError, match=f"is a GGUF file of '{architecture}' and no whole model: a part goes beside"):
        registry.open_model(path)


def test_a_text_encoder_is_told(tmp_path: Path) -> None:
    write(
        tmp_path / "te.gguf",
        {
            "token_embd.weight": (np.ones((8, 32), np.float32), "Q8_0"),
            "blk.0.attn_q.weight": (np.ones((32, 32), np.float32), "Q8_0"),
            "blk.0.attn_k.bias": (np.ones(8, np.float32), "F32"),  # which tells it from other language models
        },
        "qwen2vl",
    )
    said = cli("info", str(tmp_path / "te.gguf")).out.decode()
    print(said)
    assert (
        "layout: GGUF, a text encoder of Qwen-Image and LongCat-Image (--text-encoder)" in said
        and "architecture: 'qwen2vl'" in said
    )
    assert "in memory: 1.2 kB as codes, 528 bytes decoded to 16 bit" in said


@pytest.mark.parametrize(("kind", "names"), [("sd1", "ldm"), ("sd1", "diffusers"), ("sdxl", "ldm")])
@pytest.mark.sample(0)
def test_a_unet_alone_as_comfyuis_converter_writes_it(both, kind: str, names: str, tmp_path: Path) -> None:
    """Convolutions as rows of 256 with their true shapes beside them, in codes too; names without a prefix."""
    folder, file = both[kind]
    start = "model.diffusion_model." if names == "ldm" else ""
    source = file if names == "ldm" else folder / "unet" / "diffusion_pytorch_model.safetensors"
    made, shapes = {}, {}
    for name, tensor in load_file(source).items():
        if name.startswith(start):
            values = tensor.float().numpy()
            if values.ndim == 4 and values.size % 256 == 0:
                shapes[name.removeprefix(start)] = values.shape
                values = values.reshape(-1, 256)
            made[name.removeprefix(start)] = (values, fitting(values, "Q8_0"))
    write(tmp_path / "unet.gguf", made, kind, shapes)
    assert len(shapes) > 30
    plain = qwenimg.load(folder, "cpu", "fp32")("a red circle", **ASKED).pixels.astype(float)
    given = {"transformer": tmp_path / "unet.gguf"}
    drawn = qwenimg.load(folder, "cpu", "fp32", **given)("a red circle", **ASKED).pixels.astype(float)
    print(f"{kind}: from float32 {np.abs(drawn - plain).mean():.2f} of 255")
    assert 0 < np.abs(drawn - plain).mean() < 3
    with pytest.raises(ModelError, match="lacks .*text_encoder" if names == "ldm" else "no whole model"):
        registry.open_model(tmp_path / "unet.gguf")


def converted(tensors: dict[str, torch.Tensor], fused: bool) -> dict[str, torch.Tensor]:
    """The names that stable-diffusion.cpp gives when it converts: OpenCLIP's as transformers has them, of SDXL the text
    encoders numbered; q, k and v apart as its older versions have them, or `fused`."""
    ends = {
        "ln_final": "final_layer_norm",
        "token_embedding": "embeddings.token_embedding",
        "positional_embedding": "embeddings.position_embedding.weight",
    }
    parts = {"ln_1": "layer_norm1", "ln_2": "layer_norm2", "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2",
             "attn.out_proj": "self_attn.out_proj"}  # fmt: skip
    made = {}
    for name, value in tensors.items():
        name = name.replace("conditioner.embedders.0.", "cond_stage_model.")
        name = name.replace("conditioner.embedders.1.", "cond_stage_model.1.")
        owner, found, rest = name.partition(".model.")
        if not name.startswith("cond_stage_model.") or not found or rest in ("logit_scale", "attn_mask"):
            made[name] = value
            continue
        start = f"{owner}.transformer.text_model."
        for old, new in ends.items():
            rest = rest.replace(old, new)
        if rest.startswith("transformer.resblocks."):
            _, _, layer, rest = rest.split(".", 3)
            start += f"encoder.layers.{layer}."
            for old, new in parts.items():
                rest = rest.replace(old, new)
        if "in_proj_" in rest and not fused:
            leaf = rest.rpartition("_")[2]
            made |= {f"{start}self_attn.{x}_proj.{leaf}": part for x, part in zip("qkv", value.chunk(3), strict=True)}
        else:
            made[start + rest.replace("attn.in_proj_", "self_attn.in_proj.")] = value
    return made


@pytest.mark.parametrize(("kind", "fused"), [("sd2", False), ("sdxl", True)])
@pytest.mark.sample(0)
def test_converted_names_draw_the_same(both, kind: str, fused: bool, tmp_path: Path) -> None:
    file = both[kind][1]
    tensors = converted(load_file(file), fused)
    assert any(name.endswith("in_proj.weight") for name in tensors) == fused
    assert not any(name.startswith("conditioner.") or "resblocks" in name for name in tensors)
    path = as_gguf(tensors, beside(file, tmp_path))
    made = [qwenimg.load(one, "cpu", "fp32")("a red circle", **ASKED) for one in (file, path)]
    assert np.array_equal(made[0].latents, made[1].latents)
    said = cli("info", str(path)).out.decode()
    print(said)
    assert ("Stable Diffusion XL" if kind == "sdxl" else "Stable Diffusion 2.x") in said


def test_a_converted_folder_has_the_same_codes(both, tmp_path: Path) -> None:
    """`convert` keeps what a GGUF file has in codes, in MLX's layout, bit for bit; the rest in 16 bit."""
    file = both["sd1"][1]
    path = as_gguf(load_file(file), beside(file, tmp_path), "Q5_1")
    done = cli("convert", str(path), str(tmp_path / "folder"))
    assert done.code == 0, done.err
    opened = [registry.open_model(one).checkpoint["unet"].plan for one in (path, tmp_path / "folder")]
    kept = [name for name, entry in opened[0].entries.items() if isinstance(entry.storage, Packed)]
    for name in kept:
        before, after = (read_quantized(plan.entries[name]) for plan in opened)
        assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True)), name
    for plan in opened:
        plan.close()
    assert len(kept) > 30
