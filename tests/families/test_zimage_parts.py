"""Z-Image's parts from other files and programs: ComfyUI's, GGUF, mflux's folders, without the model's own folder."""

from __future__ import annotations

import json
import shutil
from functools import cache as once
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH, TensorNameMap, get_tensor_name_map
from safetensors.torch import load_file, save_file
from support import tiny_ldm
from support.cli_runner import cli
from support.comfy_files import comfy
from support.gguf_files import fitting, write
from support.mflux_folders import save_as_mflux
from support.recipe_cases import recipe_from_png
from support.sparse_files import sparse
from support.tiny_zimage import (
    mlx_z_image_file,
    mlx_z_image_name,
    tiny_dit,
    tiny_text_encoder,
    tiny_vae,
    transformer_file,
    write_tiny_zimage,
)

import qwenimg
from qwenimg.common.base.errors import ModelError
from qwenimg.common.families import registry
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.networks.denoisers import zimage_dit
from qwenimg.common.networks.denoisers.zimage_dit import ZImageConfig
from qwenimg.common.networks.encoders import decoder, qwen
from qwenimg.common.networks.encoders.qwen import Qwen3Config
from qwenimg.common.quant.affine import Affine
from qwenimg.common.weights.storage import Packed

BACKENDS = ("cpu", "mlx")
PUBLISHED = ZImageConfig(axes_lens=(1536, 512, 512))
PARTS = ("transformer", "text_encoder", "vae")
ASKED: dict[str, Any] = {"width": 48, "height": 32, "steps": 2, "seed": 4, "guidance": 2.0}
# Rows that groups of 64 divide
DIT = {"dim": 192, "axes_dims": [16, 24, 24], "cap_feat_dim": 64}
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("z") / "model"
    write_tiny_zimage(folder, "5GB", DIT, TEXT)
    return folder


@pytest.fixture(scope="module")
def files(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The parts as ComfyUI has them, and `model`: the folder without any weights."""
    place = tmp_path_factory.mktemp("parts")
    prefix = "model.diffusion_model."
    save_file(
        {prefix + key: value for key, value in transformer_file(tiny_dit(**DIT)).items()}, place / "z.safetensors"
    )
    text = tiny_text_encoder(**TEXT).state_dict()
    save_file({f"model.{key}": value for key, value in text.items()}, place / "qwen_3.safetensors")
    vae = {name: value.contiguous() for name, value in tiny_ldm.vae_file(tiny_vae()).items()}
    save_file(vae, place / "ae.safetensors")
    shutil.copytree(model, place / "bare", ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    names = dict(zip(PARTS, ("z.safetensors", "qwen_3.safetensors", "ae.safetensors"), strict=True))
    return {"model": place / "bare"} | {part: place / name for part, name in names.items()}


@pytest.fixture(scope="module")
def drawn(model: Path) -> dict[str, Any]:
    return {backend: qwenimg.load(model, backend, "fp32")("a red circle", **ASKED) for backend in BACKENDS}


def of(files: dict[str, Path]) -> dict[str, Any]:
    return {part: files[part] for part in PARTS}


# ComfyUI's files


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_files_of_comfyui_draw_what_the_folder_draws(
    drawn: dict[str, Any], files: dict[str, Path], backend: str
) -> None:
    made = qwenimg.load(files["model"], backend, "fp32", **of(files))("a red circle", **ASKED)
    assert np.array_equal(made.latents, drawn[backend].latents) and np.array_equal(made.pixels, drawn[backend].pixels)
    assert made.pixels.std() > 10
    assert [made.recipe[part] for part in PARTS] == ["z.safetensors", "qwen_3.safetensors", "ae.safetensors"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(1)
def test_a_folder_with_its_authors_names_draws_what_the_folder_draws(
    drawn: dict[str, Any], model: Path, files: dict[str, Path], tmp_path: Path, backend: str
) -> None:
    """Its own configuration beside one file in another layout, as the folder of a model and as a part."""
    mixed = shutil.copytree(model, tmp_path / "mixed")
    for path in [*mixed.glob("transformer/*.safetensors*")]:
        path.unlink()
    shutil.copy(files["transformer"], mixed / "transformer" / "diffusion_pytorch_model.safetensors")
    for given in ({}, {"transformer": mixed / "transformer"}):
        made = qwenimg.load(model if given else mixed, backend, "fp32", **given)("a red circle", **ASKED)
        assert np.array_equal(made.latents, drawn[backend].latents)


@pytest.mark.parametrize("part", ["transformer", "text_encoder"])
@pytest.mark.sample(0)
def test_eight_bits_draw_what_their_values_draw(files: dict[str, Path], tmp_path: Path, part: str) -> None:
    """Scaled fp8, as ComfyUI writes it; the file of the values has diffusers' or transformers' names."""
    made = comfy(load_file(files[part]), "newer", lambda name: ".attention." in name or "_proj." in name)
    save_file(made.tensors, tmp_path / "codes.safetensors", made.notes)
    save_file(made.values, tmp_path / "values.safetensors")
    results = [
        qwenimg.load(files["model"], "cpu", "fp32", **(of(files) | {part: tmp_path / name}))("a red circle", **ASKED)
        for name in ("codes.safetensors", "values.safetensors")
    ]
    assert np.array_equal(results[0].latents, results[1].latents) and results[0].pixels.std() > 10


# GGUF


@once
def llama_cpp_names() -> TensorNameMap:
    return get_tensor_name_map(MODEL_ARCH.QWEN3, 36)


def llama_cpp(name: str) -> str:
    """What llama.cpp's own converter calls a tensor of Qwen3."""
    found = llama_cpp_names().get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def test_names_are_llama_cpps() -> None:
    """Every tensor of the published text encoder under the name that gguf's own table gives it."""
    for name in decoder.manifest(Qwen3Config()):
        assert qwen.QWEN3.rename(llama_cpp(f"model.{name}")) == name
    assert qwen.QWEN3.rename("output.weight") is None
    for name in ("rope_freqs.weight", "blk.x.attn_q.weight", "blk.0.attn_qkv.weight"):
        assert qwen.QWEN3.rename(name) == name, "unknown, and refused by the planner"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("type", ["F32", "Q8_0"])
@pytest.mark.sample(0)
def test_gguf(drawn: dict[str, Any], files: dict[str, Path], tmp_path: Path, type: str, backend: str) -> None:
    tensors = {
        "transformer": {key: value.numpy() for key, value in transformer_file(tiny_dit(**DIT)).items()},
        "text_encoder": {
            llama_cpp(f"model.{key}"): value.numpy() for key, value in tiny_text_encoder(**TEXT).state_dict().items()
        },
    }
    given: dict[str, Any] = {}
    for part, architecture in (("transformer", "lumina2"), ("text_encoder", "qwen3")):
        given[part] = tmp_path / f"{part}.gguf"
        values = {key: (value, fitting(value, type)) for key, value in tensors[part].items()}
        write(given[part], values, architecture)
    pipe = qwenimg.load(files["model"], backend, "fp32", vae=files["vae"], **given)
    made = pipe("a red circle", **ASKED)
    if type == "F32":
        assert np.array_equal(made.latents, drawn[backend].latents)
        return
    packed = [e.storage for part in given for e in pipe.model.checkpoint[part].plan.entries.values()]
    assert sum(isinstance(storage, Packed) for storage in packed) > 40, "codes stay codes, also rows of fused ones"
    error = np.linalg.norm(made.latents - drawn[backend].latents) / np.linalg.norm(made.latents)
    print(f"{backend}: latents differ by {error:.1e}")
    assert 0 < error < 0.1  # of a tiny model in 8 bits; measured 0.02


# Without the model's folder


def snapshot(cache: Path, repo: str) -> Path:
    return cache / f"models--{repo.replace('/', '--')}" / "snapshots" / ("0" * 40)


def test_parts_take_the_small_files_of_the_cache(cache: Path, drawn: dict[str, Any], files: dict[str, Path]) -> None:
    shutil.copytree(files["model"], snapshot(cache, "Tongyi-MAI/Z-Image-Turbo"))
    pipe = qwenimg.load("z-image-turbo", "cpu", "fp32", **of(files))
    assert np.array_equal(pipe("a red circle", **ASKED).latents, drawn["cpu"].latents)
    assert (pipe.model_name, pipe.defaults.steps) == ("z-image-turbo", 8)
    given = {"text_encoder": files["text_encoder"]}
    with pytest.raises(ModelError, match=r"beside --text-encoder, give --transformer FILE and --vae FILE$"):
        qwenimg.load("z-image-turbo", "cpu", "fp32", **given)  # type: ignore[arg-type]


def test_what_is_missing_is_said_with_what_gets_it(cache: Path, files: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match=r"get its tokenizer \(15\.9 MB\) .*by: qwenimg pull z-image-files"):
        qwenimg.load("z-image-turbo", "cpu", **of(files))
    with pytest.raises(
        ModelError, match=r"^z-image-turbo: beside --transformer, give --text-encoder FILE and --vae FILE,"
    ):
        qwenimg.load(None, "cpu", transformer=files["transformer"])
    cli("x", "-m", str(files["transformer"])).refused(5, "is Z-Image's transformer and no whole model", "--transformer")
    cli("x", "-m", "z-image-files").refused(5, "qwenimg pull z-image-files")


@pytest.mark.parametrize(("name", "shift"), [("z-image-turbo", 3.0), ("z-image", 6.0)])
def test_published_sizes_from_files_of_the_published_sizes(
    cache: Path, model: Path, tmp_path: Path, name: str, shift: float
) -> None:
    """Headers alone: the shipped configurations, the shift of the name, and the tokenizer of the cache."""
    entries: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for key, shape in zimage_dit.manifest(PUBLISHED).items():
        there = product_place(key)
        if there.endswith(".qkv.weight"):
            shape = (3 * shape[0], shape[1])
        entries[there] = ("BF16", shape, 2)
    sparse(tmp_path / "z.safetensors", entries)
    text = {f"model.{key}": ("BF16", shape, 2) for key, shape in decoder.manifest(Qwen3Config()).items()}
    sparse(tmp_path / "qwen_3_4b.safetensors", text)
    vae = {f"{key}": ("F32", shape, 4) for key, shape in vae_manifest().items()}
    sparse(tmp_path / "ae.safetensors", vae)
    shutil.copytree(model / "tokenizer", snapshot(cache, "Tongyi-MAI/Z-Image-Turbo") / "tokenizer")
    parts = {
        "transformer": tmp_path / "z.safetensors",
        "text_encoder": tmp_path / "qwen_3_4b.safetensors",
        "vae": tmp_path / "ae.safetensors",
    }
    pipe = qwenimg.load(name, "cpu", "bf16", **parts)  # type: ignore[arg-type]
    assert pipe.model.checkpoint.scheduler.shift == shift
    assert pipe.model.checkpoint["transformer"].config == PUBLISHED
    pipe.close()
    ran = cli("info", str(parts["transformer"]))
    assert ran.code == 0 and b"its authors' names" in ran.out and b"6,154.9 M parameters" in ran.out, ran


def product_place(key: str) -> str:
    from qwenimg.common.networks.denoisers.zimage_names import place

    return place(key).key


def vae_manifest() -> dict[str, tuple[int, ...]]:
    from qwenimg.common.networks.vaes import kl_vae

    return dict(kl_vae.manifest(kl_vae.FLUX_1))


# MLX_z-image


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_a_transformer_of_mlx_z_image(model: Path, drawn: dict[str, Any], tmp_path: Path, backend: str) -> None:
    """It draws what the folder draws, also after `convert`; one in 4 bits draws what the values of its codes draw."""
    values = mlx_z_image_file(tiny_dit(**DIT))
    save_file(values, tmp_path / "plain.safetensors")
    made = qwenimg.load(model, backend, "fp32", transformer=tmp_path / "plain.safetensors")("a red circle", **ASKED)
    assert np.array_equal(made.latents, drawn[backend].latents) and np.array_equal(made.pixels, drawn[backend].pixels)
    options = ("--transformer", str(tmp_path / "plain.safetensors"), "--quiet")
    assert cli("convert", str(model), str(tmp_path / "o"), *options).code == 0
    again = qwenimg.load(tmp_path / "o", backend, "fp32")("a red circle", **ASKED)
    assert np.array_equal(again.latents, made.latents)
    coded: dict[str, mx.array] = {}
    for name, value in values.items():
        array, layer = mx.array(value.numpy()), name.removesuffix(".weight")
        if value.ndim == 2 and "pad_token" not in name:
            parts = mx.quantize(array, group_size=32, bits=4)
            coded |= dict(zip((name, f"{layer}.scales", f"{layer}.biases"), parts, strict=True))
            array = mx.dequantize(*parts, group_size=32, bits=4)
        values[name] = torch.from_numpy(np.array(array))
        coded.setdefault(name, array)
    mx.save_safetensors(str(tmp_path / "coded.safetensors"), coded)
    save_file(values, tmp_path / "values.safetensors")
    latents = []
    for name in ("coded", "values"):
        pipe = qwenimg.load(model, backend, "fp32", transformer=tmp_path / f"{name}.safetensors")
        entries = pipe.model.checkpoint["transformer"].plan.entries.values()
        assert any(isinstance(entry.storage, Packed) for entry in entries) == (name == "coded")
        latents.append(pipe("a red circle", **ASKED).latents)
    error = np.linalg.norm(latents[0] - latents[1]) / np.linalg.norm(latents[1])
    print(f"{backend}: codes differ from their values by {error:.1e}")
    assert error < 1e-5  # float32 sums in another order


def test_info_names_the_layout_of_mlx_z_image(tmp_path: Path) -> None:
    """By a header of the published sizes."""
    entries = {}
    for key, shape in zimage_dit.manifest(PUBLISHED).items():
        entries[mlx_z_image_name(zimage_dit.published(key))] = ("BF16", shape, 2)
    sparse(tmp_path / "a.safetensors", entries)
    ran = cli("info", str(tmp_path / "a.safetensors"))
    assert ran.code == 0 and ran.out.startswith(b"layout: Z-Image's transformer, MLX_z-image's names\n"), ran
    assert b"6,154.9 M parameters" in ran.out and b"fault" not in ran.out, ran


# mflux


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_a_folder_of_mflux_draws_what_the_folder_of_diffusers_draws(
    model: Path, drawn: dict[str, Any], tmp_path: Path, backend: str
) -> None:
    """In codes: what the folder that `convert` makes of it under diffusers' names draws."""
    plain = save_as_mflux(model, tmp_path / "plain", "z-image", None)
    made = qwenimg.load(plain, backend, "fp32")("a red circle", **ASKED)
    assert np.array_equal(made.latents, drawn[backend].latents) and np.array_equal(made.pixels, drawn[backend].pixels)
    start = np.random.default_rng(1).integers(0, 256, (32, 48, 3), np.uint8)
    asked = ASKED | {"image": start, "strength": 0.6}
    both = [qwenimg.load(folder, backend, "fp32")("a red circle", **asked).latents for folder in (plain, model)]
    assert np.array_equal(*both), "the VAE's encoder too"
    coded = save_as_mflux(model, tmp_path / "coded", "z-image", 4)
    pipe = qwenimg.load(coded, backend, "fp32")
    entries = pipe.model.checkpoint["transformer"].plan.entries
    assert {e.storage.code for e in entries.values() if isinstance(e.storage, Packed)} == {Affine(4, 64)}
    assert cli("convert", str(coded), str(tmp_path / "o"), "--quiet").code == 0
    again = qwenimg.load(tmp_path / "o", backend, "fp32")("a red circle", **ASKED)
    assert np.array_equal(pipe("a red circle", **ASKED).latents, again.latents)


@pytest.mark.parametrize(
    ("name", "steps"),
    [("x", 8), ("Z-Image-Turbo-mflux-4bit", 8), ("z_image_8bit", 50), ("zimage", 50), ("turbo-of-z-image", 8)],
)
@pytest.mark.sample(3)
def test_the_name_of_a_folder_of_mflux_says_its_variant(model: Path, tmp_path: Path, name: str, steps: int) -> None:
    opened = registry.open_model(save_as_mflux(model, tmp_path / name, "z-image", None))
    assert opened.defaults().steps == steps
    opened.checkpoint.close()
    ran = cli("info", str(tmp_path / name))
    assert ran.code == 0 and ran.out.startswith(b"layout: folder of mflux (its names, as "), ran


# Conversion


@pytest.mark.parametrize("shift", [3.0, 6.0])
@pytest.mark.sample(0)
def test_convert_writes_a_folder_of_diffusers(
    model: Path, drawn: dict[str, Any], files: dict[str, Path], tmp_path: Path, shift: float
) -> None:
    """From parts: diffusers reads it; the scheduler stays the model's."""
    import diffusers

    bare = shutil.copytree(files["model"], tmp_path / "bare")
    scheduler = bare / "scheduler" / "scheduler_config.json"
    scheduler.write_text(json.dumps(json.loads(scheduler.read_text()) | {"shift": shift}))
    options = [word for part in PARTS for word in (f"--{part.replace('_', '-')}", str(files[part]))]
    ran = cli("convert", str(bare), str(tmp_path / "o"), *options, "--quiet")
    assert ran.code == 0, ran.err
    opened = registry.open_model(tmp_path / "o")
    assert opened.checkpoint.scheduler.shift == shift
    opened.checkpoint.close()
    if shift == 3.0:
        made = qwenimg.load(tmp_path / "o", "cpu", "fp32")("a red circle", **ASKED)
        assert np.array_equal(made.latents, drawn["cpu"].latents)
        pipe = diffusers.ZImagePipeline.from_pretrained(tmp_path / "o", torch_dtype=torch.float32)
        state = pipe.transformer.state_dict()
        assert all(torch.equal(value, state[key]) for key, value in tiny_dit(**DIT).state_dict().items())


@pytest.mark.sample(0)
def test_a_picture_of_parts_is_made_again(cache: Path, files: dict[str, Path], tmp_path: Path, monkeypatch) -> None:
    """By the hub's names of its files."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(files["model"], snapshot(cache, "Tongyi-MAI/Z-Image-Turbo"))
    names = []
    for part in PARTS:
        place = snapshot(cache, "someone/split_files") / part
        place.mkdir(parents=True)
        shutil.copy(files[part], place / "weights.safetensors")
        names.append(f"someone/split_files/{part}/weights.safetensors")
    options = [word for part, name in zip(PARTS, names, strict=True) for word in (f"--{part.replace('_', '-')}", name)]
    small = ("--size", "48x32", "--steps", "1", "--backend", "cpu", "--quiet")
    ran = cli("a lighthouse", "-m", "z-image-turbo", *options, *small, "-s", "3", "-o", "a.png")
    assert ran.code == 0, ran.err
    assert [recipe_from_png(Path("a.png"))[part] for part in PARTS] == names
    again = cli("--from", "a.png", *small, "-o", "b.png")
    assert again.code == 0 and "warning" not in again.err, again.err


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_another_model_is_refused(files: dict[str, Path], tmp_path: Path, part: str) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"some.other.weight": torch.ones(2, 3)}, path)
    with pytest.raises(ModelError, match=r"x\.safetensors"):
        registry.open_model(files["model"], LoadOptions(parts=of(files) | {part: path}))
    path.write_bytes(files[part].read_bytes()[:-5])
    with pytest.raises(ModelError, match=r"x\.safetensors"):
        registry.open_model(files["model"], LoadOptions(parts=of(files) | {part: path}))
