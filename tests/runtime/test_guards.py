"""A value that is not finite is named with what cures it, which does; a damaged weight is found before any step."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from support import overflow_models as models
from support.crossed import crossed

import qwenimg
from qwenimg.common.base.errors import ModelError, NumericsError

BACKENDS = ("cpu", "mlx")
ASKED: dict[str, Any] = {"width": 52, "height": 36, "steps": 2, "guidance": 3.0, "seed": 7}


class Case(NamedTuple):
    precision: str
    words: tuple[str, ...]  # of the message
    cure: str  # the option that it ends with


CASES = {
    "streams": Case(
        "fp16-plain",
        ("transformer, step 1", "transformer_blocks.1, operation gated, float16"), "--precision fp16",
    ),
    "products": Case(
        "fp16",
        ("transformer, step 1", "transformer_blocks.2.", "operation linear, float32 of float16 products"),
        "--precision bf16",
    ),
    "edge": Case(
        "bf16",
        ("transformer_blocks.1.img_mlp.net.2, operation linear, bfloat16",), "--precision fp32",
    ),
    "qwen-text": Case(
        "fp16-plain",
        ("text encoder: non-finite", "layers.1", "float16"), "--precision fp16-plain,text=bf16",
    ),
    "qwen-vae": Case(
        "fp32,vae=fp16",
        ("vae: non-finite", "decoder.up_blocks.0", "float16"), "--precision fp32,vae=fp32 or fp32,vae=bf16",
    ),
    "unet-stream": Case(
        "fp16-plain",
        ("unet, step 1", "mid_block", "operation add, float16"), "--precision fp16",
    ),
    "unet-product": Case(
        "fp16,vae=bf16",
        ("unet, step 1", "attn2.to_q, operation linear, float16"), "--precision bf16,vae=bf16",
    ),
    "clip": Case(
        "fp16",
        ("text encoder: non-finite", "layers.0.mlp.fc2", "float16"), "--precision fp16,text=bf16",
    ),
    "kl-vae": Case(
        "fp16,vae=fp16",
        ("vae: non-finite", "up_blocks.1.upsamplers.0.conv, operation conv2d, float16"),
        "--precision fp16,vae=fp32 or fp16,vae=bf16",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "backend"), crossed(CASES, BACKENDS))
@pytest.mark.sample(1)
def test_what_overflows_is_named_with_the_option_that_cures_it(
    overflowing: models.Maker, name: str, backend: str
) -> None:
    case, folder = CASES[name], overflowing(name)
    with pytest.raises(NumericsError) as caught:
        qwenimg.load(folder, backend, case.precision)("a ring", **ASKED)
    text = str(caught.value)
    print(f"{backend}: {text}")
    assert all(word in text for word in case.words) and "the rest reaches" in text
    assert len(text) < 260 and text.isprintable()
    cure = text.partition("; use ")[2]
    assert cure == case.cure
    for precision in cure.removeprefix("--precision ").split(" or "):
        picture = qwenimg.load(folder, backend, precision)("a ring", **ASKED)
        assert np.isfinite(picture.latents).all(), precision


# Damaged weights

DAMAGED = {
    "qwen": "decoder.conv_out.bias",
    "sd15": "decoder.up_blocks.1.upsamplers.0.conv.weight",
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_vae_is_found_before_any_step(
    tiny_folder: Path, folders: dict[str, Path], tmp_path: Path, kind: str, backend: str
) -> None:
    source, key = ({"qwen": tiny_folder} | folders)[kind], DAMAGED[kind]
    folder = models.changed(source, tmp_path / "damaged", "vae", models.nan(key))
    steps = []
    with pytest.raises(ModelError) as caught:
        steps.extend(qwenimg.load(folder, backend, "fp32").stream("a ring", **ASKED))
    print(caught.value)
    assert steps == [] and f"tensor {key} has 1 non-finite values" in str(caught.value)
    stages: list[str] = []
    pipe = qwenimg.load(folder, backend, "fp32", notify=lambda kind, text: stages.append(text))
    with pytest.raises(ModelError, match="non-finite"):
        pipe.prepare(["a ring"])
    assert not any("loading" in stage for stage in stages)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_damaged_refiner_is_found_before_any_step(folders: dict[str, Path], tmp_path: Path, backend: str) -> None:
    key = "conv_out.weight"
    refiner = models.changed(folders["refiner"], tmp_path / "refiner", "unet", models.nan(key))
    pipe, steps = qwenimg.load(folders["sdxl"], backend, "fp32", refiner=refiner), []
    with pytest.raises(ModelError, match=f"tensor {key} has 1 non-finite"):
        steps.extend(pipe.stream("a ring", **ASKED))
    assert steps == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_vae_beyond_float16_is_found_before_any_step(tiny_folder: Path, tmp_path: Path, backend: str) -> None:
    def large(weights: models.Weights) -> None:
        weights["decoder.conv_out.bias"][0] = 7e4

    folder, steps = models.changed(tiny_folder, tmp_path / "large", "vae", large), []
    with pytest.raises(
        ModelError,
        match=r"decoder\.conv_out\.bias reaches 7e\+04, too large for float16; use --precision auto,",
    ):
        steps.extend(qwenimg.load(folder, backend, "fp32,vae=fp16").stream("a ring", **ASKED))
    assert steps == []


def test_weights_are_checked_once(tiny_folder: Path) -> None:
    stages: list[str] = []
    pipe = qwenimg.load(tiny_folder, "cpu", "fp32", notify=lambda kind, text: stages.append(text))
    for _ in range(2):
        pipe("a ring", **ASKED)
    assert len([stage for stage in stages if stage.startswith("checking")]) == 1
