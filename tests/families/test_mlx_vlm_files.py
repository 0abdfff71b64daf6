"""Qwen2.5-VL as mlx-vlm saves it, in codes or not: behind `vision_tower.` and `language_model.`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import qwenimg
from qwenimg.common.base.errors import ModelError
from qwenimg.common.families import registry
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.hub.describe import describe
from qwenimg.common.networks.encoders import decoder, qwen
from qwenimg.common.networks.encoders.qwen import QwenVLConfig

MODEL = Path(qwenimg.__file__).parent / "common" / "data" / "shapes-v1"
CODES = {"group_size": 64, "bits": 4, "mode": "affine"}
ASKED = {"width": 128, "height": 128, "steps": 2, "seed": 4}


def mlx_vlm_name(published: str) -> str:
    """Turn a published name into mlx-vlm's."""
    for start, theirs in (("visual.", "vision_tower."), ("model.", "language_model.model."), ("lm_head.", "")):
        if published.startswith(start):
            return (theirs or "language_model.lm_head.") + published.removeprefix(start)
    raise AssertionError(published)


def text_weights() -> dict[str, mx.array]:
    """The built-in model's, whose `lm_head` is its table as a file of its own would have it."""
    weights = dict(mx.load(str(next((MODEL / "text_encoder").glob("*.safetensors")))))
    return weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}


def saved(folder: Path, *, coded: bool) -> tuple[Path, Path]:
    """Write a folder as mlx-vlm saves it, and a file in published names of what its weights mean."""
    folder.mkdir()
    tensors, values = {}, {}
    for name, weight in text_weights().items():
        theirs = mlx_vlm_name(name)
        values[name] = weight
        if coded and name.endswith(".weight") and weight.ndim == 2 and weight.shape[1] % 64 == 0:
            codes, scales, biases = mx.quantize(weight, group_size=64, bits=4)
            layer = theirs.removesuffix(".weight")
            tensors |= {theirs: codes, f"{layer}.scales": scales, f"{layer}.biases": biases}
            scale, bias = scales.astype(mx.float32), biases.astype(mx.float32)
            values[name] = mx.dequantize(codes, scale, bias, group_size=64, bits=4)
        else:
            tensors[theirs] = weight
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "mlx"})
    mx.save_safetensors(str(folder.with_suffix(".safetensors")), values)
    config = json.loads((MODEL / "text_encoder" / "config.json").read_text())
    both = {"quantization": CODES, "quantization_config": CODES} if coded else {}
    (folder / "config.json").write_text(json.dumps(config | both))
    return folder, folder.with_suffix(".safetensors")


def test_every_published_name_is_known() -> None:
    """Of the published size, with those that mlx-vlm has beside the language model."""
    manifest = decoder.manifest(QwenVLConfig())
    assert all(qwen.QWEN2_5_VL.rename(mlx_vlm_name(f"model.{name}")) == name for name in manifest)
    others = ("visual.blocks.31.attn.qkv.weight", "visual.patch_embed.proj.weight", "lm_head.weight")
    assert all(qwen.QWEN2_5_VL.rename(mlx_vlm_name(name)) is None for name in others)
    assert qwen.QWEN2_5_VL.rename("language_model.lm_head.scales") is None


@pytest.mark.parametrize("coded", [False, True], ids=["dense", "4 bits"])
@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(0)
def test_it_draws_what_its_values_draw(backend: str, coded: bool, tmp_path: Path) -> None:
    """As the folder of the part, as one file, and in the model's own folder."""
    folder, values = saved(tmp_path / "text", coded=coded)
    model = shutil.copytree(MODEL, tmp_path / "model")
    shutil.rmtree(model / "text_encoder")
    shutil.copytree(folder, model / "text_encoder")
    expected = qwenimg.load(MODEL, backend, "fp32", text_encoder=values)("a red circle", **ASKED)
    assert expected.pixels.std() > 10
    for given in ({"text_encoder": folder}, {"text_encoder": folder / "model.safetensors"}, {}):
        made = qwenimg.load(MODEL if given else model, backend, "fp32", **given)("a red circle", **ASKED)
        assert np.array_equal(made.latents, expected.latents), given
    said = describe(model)
    assert not said.faults and ("4 bits" in "".join(said.lines) or not coded)


def test_a_strange_tensor_is_refused(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path / "text", coded=False)
    weights = dict(mx.load(str(folder / "model.safetensors")))
    for name in ("vision.x.weight", "language_model.head.weight"):
        mx.save_safetensors(str(folder / "model.safetensors"), weights | {name: mx.ones((2, 2))})
        with pytest.raises(ModelError, match=re.escape(f"unknown tensor '{name}'")):
            registry.open_model(MODEL, LoadOptions(parts={"text_encoder": folder}))
