"""`fallback` goes on under the next policy, says so, and the recipe makes the same picture alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support import overflow_models as models
from support.cli_runner import cli
from support.crossed import crossed
from support.policies import MMDIT, UNET, parse

import qwenimg
from qwenimg.cli import config
from qwenimg.common.base.errors import NumericsError
from qwenimg.common.pipeline.result import Result
from qwenimg.common.precision.ladder import higher, holding
from qwenimg.common.precision.residency import ALWAYS, ONCE

BACKENDS = ("cpu", "mlx")
ASKED: dict[str, Any] = {"width": 52, "height": 36, "steps": 2, "guidance": 3.0, "seed": 7}
PICTURE = np.random.default_rng(3).integers(0, 256, (36, 52, 3), np.uint8)

# Case of `overflow_models.CASES`: the policy that is begun with, those climbed to, and how many steps are done in all.
CLIMBS: dict[str, tuple[str, list[str], int]] = {
    "streams": ("fp16-plain", ["fp16"], 2),
    "products": ("fp16-plain", ["fp16", "bf16"], 2),
    "edge": ("bf16,vae=bf16", ["fp32,vae=bf16"], 2),
    "qwen-text": ("fp16-plain", ["fp16-plain,text=bf16"], 2),
    "qwen-vae": ("fp32,vae=fp16", ["fp32,vae=bf16"], 2),
    "modulation-weight": ("fp16-plain", ["fp16"], 2),
    "qwen-vae-weight": ("fp32,vae=fp16", ["fp32,vae=bf16"], 2),
    "clip-weight": ("fp16,attention=fp32", ["fp16,attention=fp32,text=bf16"], 2),
    "unet-stream": ("fp16-plain", ["fp16"], 2),
    "unet-product": ("fp16,vae=bf16", ["bf16,vae=bf16"], 2),
    "clip": ("fp16,attention=fp32", ["fp16,attention=fp32,text=bf16"], 2),
    "kl-vae": ("fp16,vae=fp16", ["fp16,vae=bf16"], 2),
    "vae-edge": ("fp16,vae=bf16", ["fp16,vae=fp32"], 2),
}


@pytest.mark.parametrize(("name", "backend"), crossed(CLIMBS, BACKENDS))
@pytest.mark.sample(1)
def test_it_climbs_and_the_recipe_makes_the_same(overflowing: models.Maker, name: str, backend: str) -> None:
    begun, policies, steps = CLIMBS[name]
    folder, said = overflowing(name), list[str]()
    pipe = qwenimg.load(
        folder,
        backend,
        begun,
        fallback=True,
        notify=lambda kind, text: said.append(text) if kind == "warning" else None,
    )
    *events, made = pipe.stream("a ring", **ASKED)
    print(f"{backend}:", *said, sep="\n  ")
    assert isinstance(made, Result) and np.isfinite(made.latents).all()
    assert len(events) == steps  # those of a step that fails are not reported; those before the VAE are done once
    assert [line.rpartition(" ")[2] for line in said] == policies == [line.rpartition(" ")[2] for line in made.warnings]
    assert str(folder) not in str(dict(made.recipe))
    recipe = made.recipe["precision"]
    assert recipe["name"] == policies[-1] == pipe.precision.name and recipe["fallback"] == "; ".join(said)
    alone = qwenimg.load(folder, backend, recipe["name"])("a ring", **ASKED)
    assert alone.latents.tobytes() == made.latents.tobytes() and alone.pixels.tobytes() == made.pixels.tobytes()
    again = pipe("a ring", **ASKED)  # which does not overflow a second time
    assert again.pixels.tobytes() == made.pixels.tobytes() and again.warnings == []
    assert again.recipe["precision"] == recipe


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_a_vae_that_encoded_begins_again(overflowing: models.Maker, backend: str) -> None:
    """Else the recipe's policy, with which the picture is encoded anew, would start from other latents."""
    folder = overflowing("kl-vae")
    asked = ASKED | {"steps": 4, "image": PICTURE, "strength": 0.5}
    *events, made = qwenimg.load(folder, backend, "fp16,vae=fp16", fallback=True).stream("a ring", **asked)
    alone = qwenimg.load(folder, backend, "fp16,vae=bf16")("a ring", **asked)
    assert isinstance(made, Result) and len(events) == 4
    assert alone.latents.tobytes() == made.latents.tobytes() and alone.pixels.tobytes() == made.pixels.tobytes()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(1)
def test_texts_are_announced_under_the_policy_that_holds_them(overflowing: models.Maker, backend: str) -> None:
    pipe = qwenimg.load(overflowing("clip"), backend, "fp16", fallback=True)
    pipe.prepare(["a ring", ""])
    made = pipe("a ring", **ASKED)
    assert (
        made.recipe["precision"]["name"] == "fp16,text=bf16" and "text encoder" in made.recipe["precision"]["fallback"]
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_last_rung_is_float32(overflowing: models.Maker, backend: str) -> None:
    pipe = qwenimg.load(overflowing("beyond"), backend, "bf16", fallback=True)
    with pytest.raises(NumericsError, match=r"float32, .*; float32 has the widest range") as caught:
        pipe("a ring", **ASKED)
    print(caught.value)
    assert pipe.precision.name == "fp32"


def test_a_device_without_float32_is_not_climbed_to(overflowing: models.Maker) -> None:
    pipe = qwenimg.load(overflowing("edge"), "cpu", "bf16", fallback=True)
    pipe.fallback.tf32 = True
    with pytest.raises(NumericsError, match="use --precision fp32"):
        pipe("a ring", **ASKED)
    assert pipe.precision.name == "bf16"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_on_the_command_line(overflowing: models.Maker, tmp_path: Path, backend: str) -> None:
    model = ("-m", str(overflowing("streams")), "--backend", backend)
    made = ("--precision", "fp16-plain", "--steps", "2", "--size", "52x36", "-s", "7")
    assert cli("a ring", *model, *made, "-o", str(tmp_path / "a.png")).code == 6
    ran = cli("a ring", *model, *made, "--fallback", "-o", str(tmp_path / "a.png"))
    assert ran.code == 0, ran.err
    (line,) = [line for line in ran.err.splitlines() if "warning" in line]
    assert "operation gated, float16" in line and line.endswith("--fallback goes on with --precision fp16")
    (tmp_path / "config.toml").write_text("fallback = true\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "path", lambda: tmp_path / "config.toml")
        assert cli("a ring", *model, *made, "-o", str(tmp_path / "c.png")).code == 0
    ran = cli(*model, "--from", str(tmp_path / "a.png"), "-o", str(tmp_path / "b.png"))
    assert ran.code == 0 and "warning" not in ran.err, ran.err
    first, second = (np.asarray(Image.open(tmp_path / name)) for name in ("a.png", "b.png"))
    assert np.array_equal(first, second)


@pytest.mark.parametrize(
    ("kind", "begun", "part", "operation", "above"),
    [
        (MMDIT, "fp16-plain", "transformer", "linear", "fp16"),
        (MMDIT, "fp16,vae=bf16", "transformer", "linear", "bf16,vae=bf16"),
        (MMDIT, "bf16-plain", "transformer", "gated", "fp32"),
        (MMDIT, "fp16-upcast,text=fp16", "transformer", "linear", "fp32,text=fp16"),
        (MMDIT, "bf16,transformer=fp16", "transformer", "linear", "bf16,transformer=bf16"),
        (MMDIT, "fp32", "transformer", "linear", None),
        (MMDIT, "fp16,text=fp16", "text", "linear", "fp16,text=bf16"),
        (MMDIT, "fp16,text=bf16", "text", "linear", "fp16,text=fp32"),
        (UNET, "fp16-plain", "transformer", "add", "fp16"),
        (UNET, "fp16-plain", "transformer", "conv2d", "bf16"),
        (UNET, "fp32,unet=fp16,vae=bf16", "transformer", "conv2d", "fp32,vae=bf16,unet=bf16"),
        (UNET, "fp32,vae=fp16", "vae", "conv2d", "fp32,vae=bf16"),
        (UNET, "fp32,vae=bf16", "vae", "conv2d", "fp32,vae=fp32"),
        (UNET, "fp32", "vae", "conv2d", None),
    ],
)
def test_the_next_policy(kind, begun: str, part: str, operation: str, above: str | None) -> None:
    assert higher(parse(begun, on_gpu=True, kind=kind), part, operation) == above
    if above is not None:
        assert parse(above, on_gpu=True, kind=kind).name == above


@pytest.mark.parametrize(
    ("kind", "begun", "part", "key", "above"),
    [
        (MMDIT, "fp16-plain", "transformer", "transformer_blocks.1.attn.to_q.weight", "bf16"),
        (MMDIT, "fp16-plain", "transformer", "proj_out.weight", "fp16"),
        (MMDIT, "fp16-upcast", "transformer", "transformer_blocks.1.attn.to_q.weight", "fp32"),
        (MMDIT, "bf16", "transformer", "proj_out.weight", None),
        (UNET, "fp16-plain", "transformer", "conv_in.weight", "bf16"),
        (UNET, "fp16,text=fp16", "text", "a.weight", "fp16,text=bf16"),
        (UNET, "fp16,vae=fp16", "vae", "decoder.conv_in.weight", "fp16,vae=bf16"),
        (UNET, "fp32", "vae", "decoder.conv_in.weight", None),
    ],
)
def test_the_policy_that_holds_a_weight(kind, begun: str, part: str, key: str, above: str | None) -> None:
    assert holding(parse(begun, on_gpu=True, kind=kind), part, key, ALWAYS) == above


def test_the_policy_that_holds_a_weight_of_the_modulation() -> None:
    assert (
        holding(parse("fp16-plain", on_gpu=True), "transformer", "transformer_blocks.1.img_mod.1.bias", ONCE) == "fp16"
    )
