"""A model that lacks a part, and the part from a file of its own: the picture is that of the whole model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny_ldm
from support.cli_runner import cli
from support.tiny_clip import tiny_clip
from support.tiny_ldm import clip_file, models_of, one_file, open_clip_file, unet_file, vae_file

import qwenimg
from qwenimg.common.base.errors import ModelError
from qwenimg.common.families import registry
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.hub.describe import describe

ASKED: dict[str, Any] = {"width": 40, "height": 24, "steps": 1, "seed": 4, "guidance": 3.0, "sampler": "euler"}
# What the names of a part begin with in one file, by the part's folder.
STARTS = {
    "sd1": {"text_encoder": "cond_stage_model."},
    "sd2": {"text_encoder": "cond_stage_model."},
    "sdxl": {"text_encoder": "conditioner.embedders.0.", "text_encoder_2": "conditioner.embedders.1."},
}
COMMON = {"unet": "model.diffusion_model.", "vae": "first_stage_model."}


def written(place: Path, tensors: dict[str, torch.Tensor], name: str = "part.safetensors") -> Path:
    save_file({key: value.contiguous() for key, value in tensors.items()}, place / name)
    return place / name


def without(file: Path, kind: str, parts: tuple[str, ...], place: Path) -> Path:
    """Write the single file without some of its parts, and CLIP's tokenizer beside it."""
    starts = tuple((COMMON | STARTS[kind])[part] for part in parts)
    tensors = {name: value for name, value in load_file(file).items() if not name.startswith(starts)}
    if (file.parent / "tokenizer").exists():
        shutil.copytree(file.parent / "tokenizer", place / "tokenizer")
    return written(place, tensors, "model.safetensors")


def in_names(part: str, names: str, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a part alone: in a single file's names or in those of diffusers and transformers."""
    if part == "unet":
        return unet_file(model)
    if part == "vae":
        return vae_file(model)
    if names == "open":
        return open_clip_file(model)
    return clip_file(model) if part == "text_encoder" else dict(model.state_dict())


def option(part: str) -> str:
    return {"unet": "transformer"}.get(part, "text_encoder" if part.startswith("text") else part)


CASES = [
    ("sd1", "vae", "ldm", "cpu"), ("sd1", "unet", "ldm", "mlx"), ("sd1", "text_encoder", "transformers", "mlx"),
    ("sd1", "text_encoder", "open", "cpu"), ("sd2", "text_encoder", "open", "cpu"), ("sd2", "unet", "ldm", "cpu"),
    ("sdxl", "vae", "ldm", "mlx"), ("sdxl", "unet", "ldm", "cpu"), ("sdxl", "text_encoder", "transformers", "cpu"),
    ("sdxl", "text_encoder_2", "open", "mlx"), ("sdxl", "text_encoder_2", "transformers", "cpu"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "part", "names", "backend"), CASES)
@pytest.mark.sample(0)
def test_a_file_and_the_part_that_it_lacks(
    both, kind: str, part: str, names: str, backend: str, tmp_path: Path
) -> None:
    whole = both[kind][1]
    given = {option(part): written(tmp_path, in_names(part, names, models_of(kind)[part]))}
    file = without(whole, kind, (part,), tmp_path)
    expected = qwenimg.load(whole, backend, "fp32")("a red circle", **ASKED)
    made = qwenimg.load(file, backend, "fp32", **given)("a red circle", **ASKED)
    assert np.array_equal(made.latents, expected.latents) and np.array_equal(made.pixels, expected.pixels)
    assert expected.pixels.std() > 5
    with pytest.raises(ModelError, match=rf"lacks {part}: add --(unet|vae|text-encoder) FILE, or give"):
        registry.open_model(file)
    assert any(f"lacks: {part}" in line for line in describe(file).lines)


@pytest.mark.sample(0)
def test_a_unet_alone_with_all_the_rest(both, tmp_path: Path) -> None:
    """Of SDXL with both text encoders, the first of them as wide as published; one of them alone is not enough."""
    models = models_of("sdxl") | {"text_encoder": tiny_clip("ViT-L", hidden_size=768, num_attention_heads=12)}
    models["unet"] = tiny_ldm.empty_unet(tiny_ldm.UNETS["sdxl"] | {"cross_attention_dim": 768 + 128})
    tiny_ldm.randomise(models["unet"], 3)
    shutil.copytree(both["sdxl"][1].parent / "tokenizer", tmp_path / "tokenizer")
    whole = written(tmp_path, one_file("sdxl", models), "whole.safetensors")
    unet = written(tmp_path, unet_file(models["unet"]), "unet.safetensors")
    first = written(tmp_path, clip_file(models["text_encoder"]), "clip_l.safetensors")
    second = written(tmp_path, dict(models["text_encoder_2"].state_dict()), "clip_g.safetensors")
    vae = written(tmp_path, vae_file(models["vae"]), "vae.safetensors")
    expected = qwenimg.load(whole, "cpu", "fp32")("a red circle", **ASKED).pixels
    for texts in ((first, second), (second, first)):
        given = {"vae": vae, "text_encoder": texts[0], "text_encoder_2": texts[1]}
        assert np.array_equal(qwenimg.load(unet, "cpu", "fp32", **given)("a red circle", **ASKED).pixels, expected)
    with pytest.raises(ModelError, match="lacks text_encoder_2: add --text-encoder FILE"):
        registry.open_model(unet, LoadOptions(parts={"vae": vae, "text_encoder": first}))
    with pytest.raises(ModelError, match="lacks text_encoder, text_encoder_2: add --text-encoder FILE --text-enc"):
        registry.open_model(unet, LoadOptions(parts={"vae": vae}))


@pytest.mark.sample(0)
def test_a_text_encoder_of_another_width_is_refused(both, tmp_path: Path) -> None:
    file = without(both["sd1"][1], "sd1", ("text_encoder",), tmp_path)
    other = written(tmp_path, open_clip_file(models_of("sd2")["text_encoder"]))
    with pytest.raises(ModelError, match=r"part\.safetensors: is a text encoder of width 128; .* takes width 64"):
        registry.open_model(file, LoadOptions(parts={"text_encoder": other}))


@pytest.mark.parametrize("part", ["unet", "vae", "text_encoder", "text_encoder_2"])
@pytest.mark.parametrize("what", ["weights", "folder"])
@pytest.mark.sample(0)
def test_a_folder_and_the_part_that_it_lacks(both, part: str, what: str, tmp_path: Path) -> None:
    """Its weights alone, or configuration and all, which the given part or its type then has."""
    folder = shutil.copytree(both["sdxl"][0], tmp_path / "m")
    if what == "folder":
        shutil.rmtree(folder / part)
    else:
        next((folder / part).glob("*.safetensors")).unlink()
    expected = qwenimg.load(both["sdxl"][0], "cpu", "fp32")("a red circle", **ASKED).pixels
    file = written(tmp_path, in_names(part, "transformers", models_of("sdxl")[part]))
    for given in (file, both["sdxl"][0] / part):
        made = qwenimg.load(folder, "cpu", "fp32", **{option(part): given})("a red circle", **ASKED)
        assert np.array_equal(made.pixels, expected)
    with pytest.raises(ModelError, match=part):
        registry.open_model(folder)


@pytest.mark.sample(0)
def test_the_wrong_one_of_two_text_encoders_is_not_enough(both, tmp_path: Path) -> None:
    """What the folder lacks is named, by its own file."""
    folder = shutil.copytree(both["sdxl"][0], tmp_path / "m")
    next((folder / "text_encoder_2").glob("*.safetensors")).unlink()
    first = written(tmp_path, clip_file(models_of("sdxl")["text_encoder"]))
    with pytest.raises(ModelError, match="text_encoder_2"):
        registry.open_model(folder, LoadOptions(parts={"text_encoder": first}))


@pytest.mark.sample(0)
def test_a_qwen_image_folder_without_a_part_at_all(tiny_folder: Path, tmp_path: Path) -> None:
    """A part with its own configuration; a file alone is held against the published one."""
    folder = shutil.copytree(tiny_folder, tmp_path / "m")
    shutil.rmtree(folder / "vae")
    expected = qwenimg.load(tiny_folder, "cpu", "fp32")(
        "a red circle", **(small := {"width": 48, "height": 32, "seed": 0})
    ).pixels
    made = qwenimg.load(folder, "cpu", "fp32", vae=tiny_folder / "vae")("a red circle", **small)
    assert np.array_equal(made.pixels, expected)
    with pytest.raises(ModelError, match=r"diffusion_pytorch_model.*: lacks tensor|has shape"):
        registry.open_model(folder, LoadOptions(parts={"vae": next((tiny_folder / "vae").glob("*.safetensors"))}))


@pytest.mark.sample(0)
def test_every_command_takes_the_part(both, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = without(both["sdxl"][1], "sdxl", ("vae", "text_encoder"), tmp_path)
    models = models_of("sdxl")
    vae = written(tmp_path, vae_file(models["vae"]), "vae.safetensors")
    text = written(tmp_path, clip_file(models["text_encoder"]), "clip_l.safetensors")
    given = ("--vae", str(vae), "--text-encoder", str(text))
    small = ("--size", "72x40", "--steps", "1", "--backend", "cpu", "--quiet", "-s", "1")
    assert cli("a red circle", "-m", str(file), *given, *small, "-o", "a.png").code == 0
    assert cli("a red circle", "-m", str(both["sdxl"][1]), *small, "-o", "b.png").code == 0
    assert pixels("a.png") == pixels("b.png")
    ran = cli("plan", str(file), *given, "--backend", "cpu", "--size", "72x40")
    assert ran.code == 0 and b"vae" in ran.out
    assert cli("convert", str(file), "out", *given, "--quiet").code == 0
    assert cli("a red circle", "-m", "out", *small, "-o", "c.png").code == 0
    assert pixels("c.png") == pixels("b.png")
    folder = shutil.copytree(both["sdxl"][0], tmp_path / "m")
    shutil.rmtree(folder / "vae")
    assert cli("convert", str(folder), "whole", "--vae", str(vae), "--quiet").code == 0
    assert cli("a red circle", "-m", "whole", *small, "-o", "d.png").code == 0
    assert cli("a red circle", "-m", str(both["sdxl"][0]), *small, "-o", "e.png").code == 0
    assert pixels("d.png") == pixels("e.png")
    said = cli("info", str(file))
    assert said.code == 0 and b"lacks: text_encoder, vae; add them by" in said.out
    for command in (("a red circle", "-m", str(file)), ("plan", str(file)), ("convert", str(file), "other")):
        cli(*command).refused(5, "lacks vae, text_encoder: add --vae FILE --text-encoder FILE")
    assert not Path("other").exists()


def pixels(name: str) -> bytes:
    from PIL import Image

    return Image.open(name).tobytes()
