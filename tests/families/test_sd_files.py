"""A single file draws what the folder draws that it was made from; another VAE; files that lack something."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from support.cli_runner import cli
from support.comfy_files import comfy
from support.crossed import crossed
from support.tiny_ldm import behind, models_of, one_file, vae_file
from support.tiny_sd import tiny_kl_vae

import qwenimg
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.safe_files import OpenFile
from qwenimg.common.families import registry
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.formats import headers
from qwenimg.common.hub.describe import describe

BACKENDS = ("cpu", "mlx")
KINDS = ("sd1", "sd2", "sdxl")
# The same weights give the same bits in any picture: one step of a small one reads them all.
ASKED = {"width": 40, "height": 24, "steps": 1, "seed": 4, "guidance": 3.0}


@pytest.mark.parametrize(("kind", "backend"), crossed(KINDS, BACKENDS))
@pytest.mark.sample(0)
def test_file_and_folder_draw_the_same(both, kind: str, backend: str) -> None:
    prediction = {"prediction": "eps"} if kind == "sd2" else {}
    made = [
        qwenimg.load(path, backend, "fp32", **prediction)("a red circle", sampler="euler", **ASKED)
        for path in both[kind]
    ]
    error = np.abs(made[0].latents - made[1].latents).max()
    print(f"{kind} {backend}: {error:.1e}, deviation of the picture {made[0].pixels.std():.0f}")
    assert np.array_equal(made[0].latents, made[1].latents) and np.array_equal(made[0].pixels, made[1].pixels)
    assert made[1].recipe["model"] == "model.safetensors"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(1)
def test_a_file_of_its_parts_alone_is_a_model(both, kind: str, tmp_path: Path) -> None:
    """ComfyUI saves the three parts and nothing else: no noise schedule, no averaged weights."""
    parts = ("model.diffusion_model.", "first_stage_model.", "cond_stage_model.", "conditioner.")
    needless = (".position_ids", "logit_scale")
    whole = load_file(both[kind][1])
    tensors = {key: value for key, value in whole.items() if key.startswith(parts) and not key.endswith(needless)}
    assert 0 < len(tensors) < len(whole)
    save_file(tensors, tmp_path / "saved.safetensors")
    shutil.copytree(both[kind][0] / "tokenizer_2" if kind == "sdxl" else both[kind][0] / "tokenizer", tmp_path / "t")
    kinds = [registry.identify_file(path) for path in (both[kind][1], tmp_path / "saved.safetensors")]
    assert [one and (one.option, one.title) for one in kinds] == [("model", "a whole Stable Diffusion model")] * 2
    given = {"prediction": "eps"} if kind == "sd2" else {}
    pictures = [
        qwenimg.load(path, "cpu", "fp32", tokenizer=tmp_path / "t", **given)("a red circle", **ASKED).pixels
        for path in (both[kind][1], tmp_path / "saved.safetensors")
    ]
    assert np.array_equal(*pictures)
    assert "single file" in "\n".join(describe(tmp_path / "saved.safetensors").lines)


@pytest.mark.parametrize("prediction", ["x", "V", "", "v_prediction", 1, ["v"]])
def test_a_prediction_that_is_none(both, prediction: Any) -> None:
    for path in both["sd2"]:
        with pytest.raises(UsageError, match=r"prediction is .* choose one of eps, v, x0"):
            qwenimg.load(path, "cpu", "fp32", prediction=prediction)


@pytest.mark.sample(0)
def test_prediction_changes_the_picture(both) -> None:
    asked = ASKED | {"steps": 2}
    made = [
        qwenimg.load(both["sd2"][1], "cpu", "fp32", prediction=p)("a red circle", **asked).latents for p in ("eps", "v")
    ]
    assert np.abs(made[0] - made[1]).max() > 0.1
    plain = qwenimg.load(both["sd2"][1], "cpu", "fp32")("a red circle", **asked).latents
    assert np.array_equal(plain, made[1])  # what such a file is taken for


@pytest.mark.parametrize(("kind", "backend"), [("sd1", "cpu"), ("sdxl", "mlx")])
@pytest.mark.sample(0)
def test_a_file_converted_to_a_folder_draws_the_same(both, kind: str, backend: str, tmp_path: Path) -> None:
    """In its own dtype, and in codes: the linear layers that SD 1.x stores as convolutions too. diffusers opens it."""
    from diffusers import DiffusionPipeline

    for name, policy in (("dense", ()), ("coded", ("-q", "4"))):
        assert cli("convert", str(both[kind][1]), str(tmp_path / name), *policy).code == 0
    chosen = ((both[kind][1], {"quantize": "4"}), (tmp_path / "coded", {}))
    made = [
        qwenimg.load(path, backend, "fp32", **given)("a red circle!", sampler="euler", **ASKED).pixels
        for path, given in chosen
    ]
    assert np.array_equal(*made)
    theirs = DiffusionPipeline.from_pretrained(tmp_path / "dense")
    assert theirs.scheduler.config.prediction_type == "epsilon"
    ours = {name: part.state_dict() for name, part in theirs.components.items() if hasattr(part, "state_dict")}
    for name, model in models_of(kind).items():
        for key, value in model.state_dict().items():
            assert np.array_equal(ours[name][key].numpy(), value.numpy()), (name, key)


@pytest.mark.parametrize("backend", ["cpu", pytest.param("mlx", marks=pytest.mark.slow)])
@pytest.mark.sample(0)
def test_another_vae(both, backend: str, tmp_path: Path) -> None:
    """From a folder, from a file in either naming, and out of a whole model: the same picture, not the first one."""
    folder, file = both["sd1"]
    other = models_of("sd1")["vae"]
    for parameter in other.parameters():
        parameter.data.mul_(0.9)
    other.save_pretrained(tmp_path / "vae")
    save_file(vae_file(other), tmp_path / "bare.safetensors")
    save_file(behind("first_stage_model.", vae_file(other)), tmp_path / "prefixed.safetensors")
    shutil.copy(tmp_path / "vae" / "diffusion_pytorch_model.safetensors", tmp_path / "renamed.safetensors")
    plain = qwenimg.load(folder, backend, "fp32")("a red circle", **ASKED)
    made = [
        qwenimg.load(model, backend, "fp32", vae=tmp_path / name)("a red circle", sampler="pndm", **ASKED)
        for model, names in (
            (folder, ("vae", "bare.safetensors", "prefixed.safetensors", "renamed.safetensors")),
            (file, ("bare.safetensors",)),
        )
        for name in names
    ]
    assert all(np.array_equal(made[0].pixels, one.pixels) for one in made)
    assert not np.array_equal(plain.pixels, made[0].pixels)


@pytest.mark.parametrize("backend", ["mlx", pytest.param("cpu", marks=pytest.mark.slow)])
@pytest.mark.sample(0)
def test_another_unet(both, backend: str, tmp_path: Path) -> None:
    """From a folder, from a file in either naming, and out of a whole model: the same picture, not the first one."""
    folder, file = both["sd1"]
    models, prefix = models_of("sd1"), "model.diffusion_model."
    for parameter in models["unet"].parameters():
        parameter.data.mul_(0.97)
    models["unet"].save_pretrained(tmp_path / "unet")
    whole = one_file("sd1", models)
    alone = {name: value for name, value in whole.items() if name.startswith(prefix)}
    save_file(whole, tmp_path / "whole.safetensors")
    save_file(alone, tmp_path / "alone.safetensors")
    save_file({name.removeprefix(prefix): value for name, value in alone.items()}, tmp_path / "bare.safetensors")
    shutil.copy(tmp_path / "unet" / "diffusion_pytorch_model.safetensors", tmp_path / "diffusers.safetensors")
    plain = qwenimg.load(folder, backend, "fp32")("a red circle", **ASKED)
    made = [
        qwenimg.load(model, backend, "fp32", transformer=tmp_path / name)("a red circle", sampler="pndm", **ASKED)
        for model, names in (
            (folder, ("unet", "whole.safetensors", "alone.safetensors", "bare.safetensors", "diffusers.safetensors")),
            (file, ("whole.safetensors",)),
        )
        for name in names
    ]
    assert all(np.array_equal(made[0].pixels, one.pixels) for one in made)
    assert not np.array_equal(plain.pixels, made[0].pixels)


@pytest.mark.parametrize(
    ("case", "backend"), crossed((("sd1", "older"), ("sd2", "plain"), ("sdxl", "newer")), BACKENDS)
)
@pytest.mark.sample(0)
def test_eight_bits_draw_what_their_values_draw(both, case: tuple[str, str], backend: str, tmp_path: Path) -> None:
    """A checkpoint whose UNet, convolutions too, and CLIP are in 8 bits, against one of their values in float32."""
    kind, layout = case
    made = comfy(one_file(kind, models_of(kind)), layout, is_coded, marker="model.diffusion_model.scaled_fp8")
    place = both[kind][1].parent / f"{layout}-{tmp_path.name}"
    shutil.copytree(both[kind][1].parent / "tokenizer", place / "tokenizer")
    save_file(made.tensors, place / "codes.safetensors", made.notes)
    save_file({name: value.contiguous() for name, value in made.values.items()}, place / "values.safetensors")
    coded = [name for name, value in made.tensors.items() if value.element_size() == 1 and value.ndim > 1]
    assert any(made.tensors[name].ndim == 4 for name in coded)
    assert any(".layers." in name or ".resblocks." in name for name in coded)
    first, second = (
        qwenimg.load(place / name, backend, "fp32")("a red circle", **ASKED)
        for name in ("codes.safetensors", "values.safetensors")
    )
    print(f"{kind} {layout} {backend}: {len(coded)} weights, deviation {first.pixels.std():.0f}")
    assert np.array_equal(first.latents, second.latents) and first.pixels.std() > 10


def is_coded(name: str) -> bool:
    """Of a checkpoint's weights those that ComfyUI keeps in 8 bits: all but the VAE's and embeddings."""
    return not name.startswith("first_stage_model.") and "embedding" not in name


def test_options_that_fit_no_other_model(tiny_folder: Path, both) -> None:
    with pytest.raises(UsageError, match="for Stable Diffusion"):
        registry.open_model(tiny_folder, LoadOptions(prediction="v"))
    with pytest.raises(ModelError, match="expected 'AutoencoderKLQwenImage'"):
        registry.open_model(tiny_folder, LoadOptions(parts={"vae": both["sd1"][0] / "vae"}))
    opened = registry.open_model(tiny_folder)
    with pytest.raises(UsageError, match="SDXL base"):
        registry.open_refiner(opened, both["sdxl"][0])
    opened.checkpoint.close()


def test_a_file_without_a_tokenizer_says_where_it_was_looked_for(both, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("qwenimg.common.base.hf_cache.cache_folder", lambda: tmp_path / "cache")
    shutil.copy(both["sd1"][1], tmp_path / "model.safetensors")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ModelError, match=r"tokenizer/.*beside it.*cache.*pull clip-tokenizer") as caught:
        registry.open_model(tmp_path / "model.safetensors")
    print(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.sample(0)
def test_a_tokenizer_that_is_given(both, tmp_path: Path, monkeypatch) -> None:
    """The picture is that of the tokenizer beside the file, and the recipe has its name and no path."""
    monkeypatch.setattr("qwenimg.common.base.hf_cache.cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setenv("HOME", str(tmp_path))
    folder, file = both["sd1"]
    (tmp_path / "alone").mkdir()
    alone = tmp_path / "alone" / "model.safetensors"
    alone.symlink_to(file)
    beside = qwenimg.load(file, "cpu", "fp32")("a red circle", **ASKED)
    shutil.copytree(folder / "tokenizer", tmp_path / "my words")
    given = qwenimg.load(alone, "cpu", "fp32", tokenizer=str(tmp_path / "my words"))("a red circle", **ASKED)
    assert np.array_equal(given.latents, beside.latents)
    assert given.recipe["tokenizer"] == "my words" and "tokenizer" not in beside.recipe
    assert str(tmp_path).encode() not in given.png()
    with pytest.raises(UsageError, match="--tokenizer is for a Stable Diffusion model in one file"):
        registry.open_model(folder, LoadOptions(tokenizer=folder / "tokenizer"))
    with pytest.raises(ModelError, match="holds no tokenizer"):
        registry.open_model(alone, LoadOptions(tokenizer=folder / "vae"))


def test_a_part_alone_says_what_is_missing(tmp_path: Path) -> None:
    save_file(vae_file(models_of("sd1")["vae"]), tmp_path / "vae.safetensors")
    with pytest.raises(ModelError, match="lacks unet, text encoder"):
        registry.open_model(tmp_path / "vae.safetensors")


# What was opened when a later part fails


@pytest.fixture
def handles(monkeypatch: pytest.MonkeyPatch) -> list[OpenFile]:
    """The files of weights, as they are opened."""
    found: list[OpenFile] = []
    original = headers.open_regular

    def open_regular(path: Path) -> OpenFile:
        found.append(original(path))
        return found[-1]

    monkeypatch.setattr(headers, "open_regular", open_regular)
    return found


def fails(handles: list[OpenFile], least: int, message: str, path: Path, vae: Path | None = None) -> None:
    with pytest.raises(ModelError, match=message):
        registry.open_model(path, LoadOptions(parts={} if vae is None else {"vae": vae}))
    print([file.path.name for file in handles])
    assert len(handles) >= least and all(file.stream.closed for file in handles)


@pytest.mark.parametrize("part", ["vae", "text_encoder"])
@pytest.mark.parametrize("qwen", [False, True])
def test_a_folder_with_a_bad_part_is_closed(
    both, tiny_folder: Path, handles: list[OpenFile], qwen: bool, part: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_folder if qwen else both["sd1"][0], tmp_path / "model")
    for weights in (folder / part).glob("*.safetensors"):
        weights.write_bytes(weights.read_bytes()[:-8])
    fails(handles, 2, part, folder)


def test_a_folder_whose_parts_do_not_fit_is_closed(both, handles: list[OpenFile], tmp_path: Path) -> None:
    folder = shutil.copytree(both["sd1"][0], tmp_path / "model")
    index = folder / "model_index.json"
    index.write_text(index.read_text().replace("StableDiffusionPipeline", "StableDiffusionXLPipeline"))
    fails(handles, 3, "is of an SDXL pipeline", folder)


def test_a_file_without_a_tokenizer_is_closed(both, handles: list[OpenFile], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("qwenimg.common.base.hf_cache.cache_folder", lambda: tmp_path / "cache")
    fails(handles, 1, "tokenizer", Path(shutil.copy(both["sd1"][1], tmp_path / "model.safetensors")))


@pytest.mark.parametrize("from_file", [False, True])
@pytest.mark.parametrize("fault", ["cut", "no VAE", "missing", "other latents"])
@pytest.mark.sample(1)
def test_a_model_with_a_bad_vae_is_closed(
    both, handles: list[OpenFile], fault: str, from_file: bool, tmp_path: Path
) -> None:
    vae, bare = tmp_path / "vae.safetensors", vae_file(models_of("sd1")["vae"])
    if fault == "cut":
        save_file(bare, vae)
        vae.write_bytes(vae.read_bytes()[:-8])
    elif fault == "no VAE":
        tensors = one_file("sd1", models_of("sd1"))
        save_file({key: tensor for key, tensor in tensors.items() if key.startswith("model.diffusion_model.")}, vae)
    elif fault == "other latents":
        vae = tmp_path / "vae"
        tiny_kl_vae(latent_channels=8).save_pretrained(vae)
    messages = {"cut": "vae", "no VAE": "holds no VAE", "missing": "does not exist", "other latents": "latents have 8"}
    fails(handles, 1, messages[fault], both["sd1"][from_file], vae)
