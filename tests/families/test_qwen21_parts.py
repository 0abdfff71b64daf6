"""Qwen-Image-2.1's parts in files of other programs: the VAE in Wan's names, the text encoder in 8 bits and as the two
GGUF files of llama.cpp, and all parts without the model's folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH, get_tensor_name_map
from safetensors.torch import save_file
from support.cli_runner import cli
from support.comfy_files import comfy
from support.family_cases import BACKENDS, PICTURE
from support.folder_tensors import tensors
from support.gguf_files import fitting, write
from support.refusals import refused
from support.relative import relative
from support.tiny_qwen21 import VISION, small_pictures

import qwenimg
from qwenimg.common.base.errors import ModelError
from qwenimg.common.families import registry
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.hub.describe import describe
from qwenimg.common.networks.encoders import qwen3_vl_vision
from qwenimg.common.networks.encoders.qwen3_vl_vision import Qwen3VLVisionConfig
from qwenimg.common.networks.vaes import qwen21_vae, wan_names
from qwenimg.common.networks.vaes.qwen21_vae import Qwen21VAEConfig

ASKED: dict[str, Any] = {"image": PICTURE, "width": 64, "height": 64, "steps": 2, "seed": 7}
TOWER = {"clip__projector_type": "qwen3vl_merger"}
Tensors = dict[str, torch.Tensor]
Arrays = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def small() -> Any:
    with small_pictures():
        yield


@pytest.fixture(scope="module")
def folder(tiny_qwen21: dict[str, Path]) -> Path:
    return tiny_qwen21["qwen21"]


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[str, np.ndarray]:
    with small_pictures():
        return {backend: drawn(folder, backend) for backend in BACKENDS}


def drawn(folder: Path | str | None, backend: str = "cpu", **parts: Path) -> np.ndarray:
    with qwenimg.load(folder, backend, "fp32", **parts) as pipe:  # type: ignore[arg-type]
        return pipe("a ring", **ASKED).latents


# The VAE in Wan's names


def wan(name: str, blocks: int) -> str:
    """Wan's name of a tensor of a VAE with `blocks` residual blocks in each level of the encoder, written by hand."""
    side, _, rest = name.partition(".")
    if side in ("quant_conv", "post_quant_conv"):
        return f"{'conv1' if side == 'quant_conv' else 'conv2'}.{rest}"
    for ours, theirs in (("conv_in", "conv1"), ("norm_out", "head.0"), ("conv_out", "head.2"),
                         ("mid_block.resnets.0", "middle.0"), ("mid_block.attentions.0", "middle.1"),
                         ("mid_block.resnets.1", "middle.2")):  # fmt: skip
        rest = rest.replace(ours, theirs) if rest.startswith(ours) else rest
    words = rest.split(".")
    if words[0] in ("down_blocks", "up_blocks"):
        way = words[0].removesuffix("_blocks")
        at = words[3] if words[2] == "resnets" else str(blocks + (way == "up"))
        rest = ".".join([f"{way}samples", words[1], f"{way}samples", at, *words[4 if words[2] == "resnets" else 3 :]])
    if ".resample." not in rest and ".time_conv" not in rest:
        for ours, theirs in (("norm1", "residual.0"), ("conv1.", "residual.2."), ("norm2", "residual.3"),
                             ("conv2.", "residual.6."), ("conv_shortcut", "shortcut")):  # fmt: skip
            rest = rest.replace(f".{ours}", f".{theirs}") if rest.count(".") > 1 else rest
    return f"{side}.{rest}"


def test_every_tensor_of_the_published_vae_has_one_name_of_wans() -> None:
    names = list(qwen21_vae.manifest(Qwen21VAEConfig()))
    theirs = [wan(name, 2) for name in names]
    assert len(set(theirs)) == len(names) and [wan_names.rename(name) for name in theirs] == names
    said = {
        "decoder.up_blocks.0.upsampler.resample.1.weight": "decoder.upsamples.0.upsamples.3.resample.1.weight",
        "decoder.up_blocks.1.resnets.2.norm2.gamma": "decoder.upsamples.1.upsamples.2.residual.3.gamma",
        "decoder.up_blocks.2.resnets.0.conv_shortcut.weight": "decoder.upsamples.2.upsamples.0.shortcut.weight",
        "encoder.down_blocks.0.downsampler.resample.1.bias": "encoder.downsamples.0.downsamples.2.resample.1.bias",
        "decoder.mid_block.resnets.1.conv2.bias": "decoder.middle.2.residual.6.bias",
        "decoder.mid_block.attentions.0.to_qkv.weight": "decoder.middle.1.to_qkv.weight",
        "encoder.conv_in.weight": "encoder.conv1.weight", "decoder.conv_out.weight": "decoder.head.2.weight",
        "quant_conv.weight": "conv1.weight", "post_quant_conv.bias": "conv2.bias",
    }  # fmt: skip
    assert {name: wan(name, 2) for name in said} == said
    assert [wan_names.rename(name) for name in names] == names, "diffusers' names stay"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_a_vae_in_wans_names(folder: Path, whole: dict[str, np.ndarray], tmp_path: Path, backend: str) -> None:
    given = {f"vae.{wan(name, 1)}": value for name, value in tensors(folder / "vae").items()}
    save_file(given, tmp_path / "vae.safetensors")
    assert np.array_equal(drawn(folder, backend, vae=tmp_path / "vae.safetensors"), whole[backend])
    kind = registry.identify_file(tmp_path / "vae.safetensors")
    assert kind is not None and kind.title == "Qwen-Image-2.1's VAE"
    assert "in Wan's names" in describe(tmp_path / "vae.safetensors").lines[0]
    save_file({name: value for name, value in given.items() if "upsamples.1.upsamples.0.residual.2" not in name},
              tmp_path / "less.safetensors")  # fmt: skip
    assert "lacks tensor" in refused(
        registry.open_model, folder, LoadOptions(parts={"vae": tmp_path / "less.safetensors"})
    )


# The text encoder


@pytest.mark.parametrize("layout", ["older", "int8"])
@pytest.mark.sample(1)
def test_comfyuis_text_encoder_in_8_bits(folder: Path, tmp_path: Path, layout: str) -> None:
    """fp8 with scales, and int8, in bare names, in both halves."""
    bare = {name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): value
            for name, value in tensors(folder / "text_encoder").items() if "lm_head" not in name}  # fmt: skip
    made = comfy(bare, layout, lambda name: "norm" not in name and "embed" not in name)
    codes = {value.dtype for name, value in made.tensors.items() if name.startswith("visual.blocks")}
    assert codes & {torch.int8, torch.float8_e4m3fn}
    save_file(made.tensors, tmp_path / "coded.safetensors", metadata=made.notes)
    save_file({name: value.contiguous() for name, value in made.values.items()}, tmp_path / "values.safetensors")
    ours, expected = (drawn(folder, text_encoder=tmp_path / f"{name}.safetensors") for name in ("coded", "values"))
    assert np.array_equal(ours, expected)


DEEP = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}


def llama_cpp(name: str, layers: tuple[int, ...]) -> str:
    """llama.cpp's name of a tensor: those of the tower by gguf's own table, but for the mergers of deep layers, which
    have the numbers of these in its converter."""
    plain = name.removeprefix("model.").removeprefix("language_model.")
    if plain.startswith("visual.deepstack_merger_list."):
        _, _, number, layer, leaf = plain.split(".")
        return f"v.deepstack.{layers[int(number)]}.{DEEP[layer]}.{leaf}"
    merger = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}
    if plain.startswith("visual.merger."):
        _, _, layer, leaf = plain.split(".")
        return f"{merger[layer]}.{leaf}"
    is_tower = plain.startswith("visual.")
    table = get_tensor_name_map(MODEL_ARCH.MMPROJ if is_tower else MODEL_ARCH.QWEN3VL, 40)
    found = table.get_name(plain if is_tower else f"model.{plain}", try_suffixes=(".weight", ".bias"))
    if found is None and is_tower:
        found = table.get_name(f"model.{plain}", try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def halves(values: Tensors) -> tuple[Arrays, Arrays]:
    """The language model's tensors and the tower's, the two taps of the patch kernel apart."""
    language, tower = Arrays(), Arrays()
    deep = tuple(VISION["deepstack_visual_indexes"])
    for name, value in values.items():
        array = value.float().numpy()
        if array.ndim == 5:
            tower |= {f"v.patch_embd.weight{end}": array[:, :, i] for i, end in enumerate(("", ".1"))}
        elif name != "lm_head.weight":
            (tower if ".visual." in name else language)[llama_cpp(name, deep)] = array
    return language, tower


def saved(place: Path, given: tuple[Arrays, Arrays], type: str = "F32") -> dict[str, Path]:
    language, tower = ({name: (value, fitting(value, type)) for name, value in half.items()} for half in given)
    write(place / "language.gguf", language, "qwen3vl")
    write(place / "mmproj.gguf", tower, "clip", **TOWER)
    return {"text_encoder": place / "language.gguf", "text_encoder_2": place / "mmproj.gguf"}


@pytest.fixture(scope="module")
def arrays(folder: Path) -> tuple[Arrays, Arrays]:
    return halves(tensors(folder / "text_encoder"))


@pytest.mark.sample(0)
def test_names_are_llama_cpps() -> None:
    config = Qwen3VLVisionConfig()
    named, manifest = qwen3_vl_vision.names(config), qwen3_vl_vision.manifest(config)
    tower = [name for name in manifest if name.startswith("visual.") and name != "visual.patch_embed.proj.weight"]
    assert len(tower) == 350
    assert [named(llama_cpp(name, (8, 16, 24))) for name in tower] == tower
    assert named("v.patch_embd.weight.1") == "visual.patch_embed.tap.weight.1"
    for other in ("v.deepstack.9.fc1.weight", "v.blk.0.attn_q.weight", "mm.1.weight"):
        assert named(other) == other, "unknown, and refused by the planner"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_two_gguf_files_draw_what_the_folder_draws(
    folder: Path, whole: dict[str, np.ndarray], arrays: tuple[Arrays, Arrays], tmp_path: Path, backend: str
) -> None:
    parts = saved(tmp_path, arrays)
    assert np.array_equal(drawn(folder, backend, **parts), whole[backend])
    first, second = parts.values()
    assert np.array_equal(drawn(folder, backend, text_encoder=second, text_encoder_2=first), whole[backend])
    error = relative(drawn(folder, backend, **saved(tmp_path, arrays, "Q8_0")), whole[backend])
    print(f"{backend}, Q8_0: {error:.1e}")
    assert 0 < error < 0.1


@pytest.mark.sample(0)
def test_wrong_towers(folder: Path, arrays: tuple[Arrays, Arrays], tmp_path: Path) -> None:
    parts = saved(tmp_path, arrays)
    language, tower = parts.values()
    kind = registry.identify_file(tower)
    assert kind is not None and kind.title == "Qwen-Image-2.1's text encoder"
    assert "the vision tower of Qwen3-VL" in describe(tower).lines[0]

    def said(**given: Path) -> str:
        return refused(registry.open_model, folder, LoadOptions(parts=given))

    assert "neither is a vision tower" in said(text_encoder=language, text_encoder_2=language)
    assert "both are vision towers" in said(text_encoder=tower, text_encoder_2=tower)
    assert "is a vision tower alone: give its language model too" in said(text_encoder=tower)
    for name in ("v.deepstack.2.fc1.bias", "v.patch_embd.weight.1", "v.patch_embd.bias", "v.position_embd.weight"):
        rest = {key: value for key, value in arrays[1].items() if key != name}
        assert len(rest) < len(arrays[1]) and "lacks tensor" in said(**saved(tmp_path, (arrays[0], rest))), name
    moved = {key.replace("v.deepstack.2.", "v.deepstack.3."): value for key, value in arrays[1].items()}
    assert "v.deepstack.3" in said(**saved(tmp_path, (arrays[0], moved)))


@pytest.mark.sample(0)
def test_deep_layers_exchanged_are_seen(
    folder: Path, whole: dict[str, np.ndarray], arrays: tuple[Arrays, Arrays], tmp_path: Path
) -> None:
    swap = {"v.deepstack.0.": "v.deepstack.2.", "v.deepstack.2.": "v.deepstack.0."}
    exchanged = {swap.get(key[:14], key[:14]) + key[14:]: value for key, value in arrays[1].items()}
    assert relative(drawn(folder, **saved(tmp_path, (arrays[0], exchanged))), whole["cpu"]) > 1e-3


# Without the model's folder


def snapshot(cache: Path) -> Path:
    return cache / "models--Qwen--Qwen-Image-2.1" / "snapshots" / ("0" * 40)


def in_files(folder: Path, place: Path) -> dict[str, Path]:
    for part in ("transformer", "text_encoder", "vae"):
        save_file(tensors(folder / part), place / f"{part}.safetensors")
    return {part: place / f"{part}.safetensors" for part in ("transformer", "text_encoder", "vae")}


@pytest.mark.sample(0)
def test_parts_take_the_small_files_of_the_cache(
    cache: Path, folder: Path, whole: dict[str, np.ndarray], tmp_path: Path
) -> None:
    parts = in_files(folder, tmp_path)
    with pytest.raises(ModelError, match=r"get its tokenizer \(15\.9 MB\) .*by: qwenimg pull qwen-image-2\.1-files"):
        qwenimg.load("qwen-image-2.1", "cpu", **parts)  # type: ignore[arg-type]
    turbo = parts | {"transformer": parts["transformer"].with_stem("Turbo")}
    shutil.copy(parts["transformer"], turbo["transformer"])
    for named, name in ((parts, "qwen-image-2.1"), (turbo, "qwen-image-2.1-turbo")):  # by the transformer's file
        with pytest.raises(ModelError, match=f"{name}: get its tokenizer"):
            qwenimg.load(None, "cpu", **named)  # type: ignore[arg-type]
    shutil.copytree(folder, snapshot(cache), ignore=shutil.ignore_patterns("*.safetensors*"))
    for name in ("qwen-image-2.1", None):
        assert np.array_equal(drawn(name, **parts), whole["cpu"])
    del parts["vae"]
    with pytest.raises(ModelError, match=r"beside --transformer and --text-encoder, give --vae FILE$"):
        qwenimg.load("qwen-image-2.1", "cpu", **parts)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "steps"), [("qwen-image-2.1", 40), ("qwen-image-2.1-turbo", 8)])
def test_a_model_is_what_its_name_says(cache: Path, folder: Path, tmp_path: Path, name: str, steps: int) -> None:
    """By the shipped configurations, and the tokenizer of the cache or a folder's; tiny parts have their own sizes."""
    for part in ("transformer", "text_encoder", "vae"):
        shutil.copytree(folder / part, tmp_path / part)
    parts = {part: tmp_path / part for part in ("transformer", "text_encoder", "vae")}
    with qwenimg.load(name, "cpu", "fp32", tokenizer=folder / "processor", **parts) as pipe:  # type: ignore[arg-type]
        assert (pipe.model_name, pipe.defaults.steps, pipe.family) == (name, steps, "qwen-image-2.1")
        sigmas = pipe.model.plan(pipe.check("x", width=64, height=64)).sigmas
        assert (sigmas[1] == pytest.approx(0.978453)) == (steps == 8)
    cli("x", "-m", "qwen-image-2.1-files").refused(5, "qwenimg pull qwen-image-2.1-files")
