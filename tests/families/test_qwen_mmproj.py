"""Qwen-Image-Edit's text encoder in files of other programs: in two GGUF files, as llama.cpp has the language model and
its vision tower, and in one with both, as ComfyUI has it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import MODEL_ARCH, TensorNameMap, get_tensor_name_map
from PIL import Image
from safetensors.torch import save_file
from support.cli_runner import cli
from support.comfy_files import LAYOUTS, ROTATED, comfy
from support.family_cases import SEEN, see_few_pixels
from support.folder_tensors import tensors
from support.gguf_files import fitting, write
from support.relative import relative
from support.silent_conversion import Silent

import qwenimg
from qwenimg.common.base.errors import ModelError, QwenimgError, UsageError
from qwenimg.common.conversion.convert import convert
from qwenimg.common.families import registry
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.families.qwen_image import captions
from qwenimg.common.hub.describe import describe
from qwenimg.common.networks.encoders import qwen_vl_vision
from qwenimg.common.networks.encoders.qwen_vl_vision import QwenVLVisionConfig

ASKED: dict[str, Any] = {"image": SEEN, "width": 48, "height": 32, "steps": 2, "guidance": 3.0, "seed": 5}
MERGER = {"clip__projector_type": "qwen2.5vl_merger"}
Arrays = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    see_few_pixels(monkeypatch)


@cache
def names(architecture: MODEL_ARCH, layers: int) -> TensorNameMap:
    return get_tensor_name_map(architecture, layers)


def llama_cpp(architecture: MODEL_ARCH, name: str) -> str:
    found = names(architecture, 32).get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def halves(tensors: Arrays) -> tuple[Arrays, Arrays]:
    """The language model's tensors and the tower's, as llama.cpp's converter writes them: q, k and v apart, and the
    two taps of the kernel."""
    language, tower = Arrays(), Arrays()
    for name, value in tensors.items():
        plain = name.removeprefix("model.").removeprefix("language_model.")
        if not plain.startswith("visual."):
            if plain != "lm_head.weight":
                language[llama_cpp(MODEL_ARCH.QWEN2VL, f"model.{plain}")] = value
        elif ".qkv." in plain:
            parts = np.split(value, 3)
            called = (plain.replace("qkv", part) for part in "qkv")
            tower |= {llama_cpp(MODEL_ARCH.MMPROJ, one): part for one, part in zip(called, parts, strict=True)}
        elif value.ndim == 5:
            tower |= {f"v.patch_embd.weight{end}": value[:, :, i] for i, end in enumerate(("", ".1"))}
        else:
            tower[llama_cpp(MODEL_ARCH.MMPROJ, plain)] = value
    return language, tower


@pytest.fixture(scope="module")
def arrays(tiny_edit: dict[str, Path]) -> tuple[Arrays, Arrays]:
    stored = tensors(tiny_edit["qwen-2511"] / "text_encoder")
    return halves({name: value.float().numpy() for name, value in stored.items()})


def saved(place: Path, arrays: tuple[Arrays, Arrays], type: str = "F32") -> dict[str, Path]:
    """Both files, as they are given: the tower second."""
    language, tower = ({name: (value, fitting(value, type)) for name, value in half.items()} for half in arrays)
    write(place / "language.gguf", language, "qwen2vl")
    write(place / "mmproj.gguf", tower, "clip", **MERGER)
    return {"text_encoder": place / "language.gguf", "text_encoder_2": place / "mmproj.gguf"}


def drawn(folder: Path, backend: str = "cpu", **parts: Path) -> np.ndarray:
    with qwenimg.load(folder, backend, "fp32", **parts) as pipe:
        return pipe("make it winter", **ASKED).latents


def test_layered_describes_by_both(tiny_layered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And by neither alone: the head is in the language model's file, as llama.cpp calls it."""
    monkeypatch.setattr(captions, "LIMIT", 8)
    stored = {name: value.float().numpy() for name, value in tensors(tiny_layered / "text_encoder").items()}
    language, tower = halves(stored)
    asked = ASKED | {"steps": 1, "layers": 1}
    with qwenimg.load(tiny_layered, "cpu", "fp32") as pipe:
        prompt = pipe("", **asked).recipe["prompt"]
    parts = saved(tmp_path, (language | {"output.weight": stored["lm_head.weight"]}, tower))
    with qwenimg.load(tiny_layered, "cpu", "fp32", **parts) as pipe:
        assert pipe("", **asked).recipe["prompt"] == prompt
    parts.pop("text_encoder_2")
    with qwenimg.load(tiny_layered, "cpu", "fp32", **parts) as pipe, pytest.raises(ModelError, match="no vision tower"):
        pipe("", **asked)


@pytest.mark.sample(0)
def test_describe_takes_both(tiny_layered: Path, tiny_folder: Path, tmp_path: Path) -> None:
    """With a model that sees pictures; one that draws from texts alone refuses the tower, as for drawing."""
    stored = {name: value.float().numpy() for name, value in tensors(tiny_layered / "text_encoder").items()}
    language, tower = halves(stored)
    parts = saved(tmp_path, (language | {"output.weight": stored["lm_head.weight"]}, tower))
    file = tmp_path / "a.png"
    Image.fromarray(SEEN).save(file)
    asked = ("describe", str(file), "--backend", "cpu", "--precision", "fp32", "--limit", "8", "--quiet")
    whole = cli(*asked, "-m", str(tiny_layered))
    first, second = (("--text-encoder", str(path)) for path in parts.values())
    pair = cli(*asked, "-m", str(tiny_layered), *first, *second)
    print(whole.out.decode())
    assert whole.code == pair.code == 0 and pair.out == whole.out and len(whole.out) > 8, pair
    for folder in (tiny_layered, tiny_folder):
        cli(*asked, "-m", str(folder), *first).refused(5, "language.gguf", "mmproj")
    cli(*asked, "-m", str(tiny_folder), *first, *second).refused(2, "mmproj.gguf", "sees no picture")
    drawn = ("generate", "a ring", "-m", str(tiny_folder), "--backend", "cpu", "-o", str(tmp_path / "b.png"))
    cli(*drawn, *first, *second).refused(2, "mmproj.gguf", "sees no picture: leave it out")


def test_names_are_llama_cpps() -> None:
    """Every tensor of the published text encoder is found under the names that gguf's own table gives its parts."""
    manifest = qwen_vl_vision.manifest(QwenVLVisionConfig())
    joins = qwen_vl_vision.joins(manifest)
    tower = {name for name in manifest if name.startswith("visual.")}
    for name in tower - joins.keys():
        assert qwen_vl_vision.rename(llama_cpp(MODEL_ARCH.MMPROJ, name)) == name
    for name in joins.keys() - {"visual.patch_embed.proj.weight"}:
        theirs = (llama_cpp(MODEL_ARCH.MMPROJ, name.replace("qkv", part)) for part in "qkv")
        assert tuple(map(qwen_vl_vision.rename, theirs)) == joins[name].parts
    taps = ("v.patch_embd.weight", "v.patch_embd.weight.1")
    assert tuple(map(qwen_vl_vision.rename, taps)) == joins["visual.patch_embed.proj.weight"].parts
    for other in ("v.blk.0.attn_qkv.weight", "v.position_embd.weight", "mm.1.weight", "v.blk.0.ln1.scale"):
        assert qwen_vl_vision.rename(other) == other, "unknown, and refused by the planner"


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(0)
def test_both_files_draw_what_the_folder_draws(
    tiny_edit: dict[str, Path], arrays: tuple[Arrays, Arrays], backend: str, tmp_path: Path
) -> None:
    folder, parts = tiny_edit["qwen-2511"], saved(tmp_path, arrays)
    whole = drawn(folder, backend)
    assert np.array_equal(drawn(folder, backend, **parts), whole)
    first, second = parts.values()
    assert np.array_equal(drawn(folder, backend, text_encoder=second, text_encoder_2=first), whole), "in any order"


def test_codes(tiny_edit: dict[str, Path], arrays: tuple[Arrays, Arrays], tmp_path: Path) -> None:
    folder = tiny_edit["qwen-2511"]
    error = relative(drawn(folder, **saved(tmp_path, arrays, "Q8_0")), drawn(folder))
    print(f"{error:.1e}")
    assert 0 < error < 0.05


@pytest.mark.sample(0)
def test_convert_writes_one_whole_text_encoder(
    tiny_edit: dict[str, Path], arrays: tuple[Arrays, Arrays], tmp_path: Path
) -> None:
    folder = tiny_edit["qwen-2511"]
    convert(folder, tmp_path / "out", LoadOptions(parts=saved(tmp_path, arrays)), Silent())
    assert not describe(tmp_path / "out").faults
    assert np.array_equal(drawn(tmp_path / "out"), drawn(folder))


@pytest.mark.sample(0)
def test_keys_for_queries_are_seen(tiny_edit: dict[str, Path], arrays: tuple[Arrays, Arrays], tmp_path: Path) -> None:
    """The fault of another order of q, k and v, and that of one tap for both."""
    folder = tiny_edit["qwen-2511"]
    whole, (language, tower) = drawn(folder), arrays
    swapped = {name.replace("attn_q.", "x").replace("attn_k.", "attn_q.").replace("x", "attn_k."): value
               for name, value in tower.items() if not name.startswith("v.patch")}  # fmt: skip
    patches = {name: value for name, value in tower.items() if name.startswith("v.patch")}
    assert relative(drawn(folder, **saved(tmp_path, (language, swapped | patches))), whole) > 1e-3
    taps = {
        "v.patch_embd.weight": patches["v.patch_embd.weight"],
        "v.patch_embd.weight.1": patches["v.patch_embd.weight"],
    }
    assert relative(drawn(folder, **saved(tmp_path, (language, tower | taps))), whole) > 1e-3


def test_info_and_wrong_files(
    tiny_edit: dict[str, Path], tiny_folder: Path, arrays: tuple[Arrays, Arrays], tmp_path: Path
) -> None:
    folder, parts = tiny_edit["qwen-2511"], saved(tmp_path, arrays)
    language, tower = parts.values()
    kind = registry.identify_file(tower)
    assert kind is not None and kind.title == "a text encoder of Qwen-Image and LongCat-Image"
    assert "a text encoder of Qwen-Image and LongCat-Image" in cli("info", str(tower)).out.decode()

    def refused(error: type[QwenimgError], match: str, place: Path = folder, **given: Path) -> None:
        with pytest.raises(error, match=match) as caught:
            registry.open_model(place, LoadOptions(parts=given))
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 400

    refused(ModelError, "without its vision tower.*--text-encoder mmproj.gguf", text_encoder=language)
    refused(ModelError, "is a vision tower alone: give its language model too", text_encoder=tower)
    refused(ModelError, "neither is a vision tower", text_encoder=language, text_encoder_2=language)
    refused(ModelError, "both are vision towers", text_encoder=tower, text_encoder_2=tower)
    refused(UsageError, "sees no picture", tiny_folder, text_encoder=language, text_encoder_2=tower)
    for name in ("v.blk.1.attn_k.weight", "v.patch_embd.weight.1", "mm.0.bias", "v.post_ln.weight"):
        rest = {key: value for key, value in arrays[1].items() if key != name}
        refused(ModelError, "lacks tensor", **saved(tmp_path, (arrays[0], rest)))
    for name, value in (("v.blk.0.attn_q.weight", np.ones((3, 3), np.float32)), ("v.x.weight", np.ones(3, np.float32))):
        words = "has shape|unknown tensor"
        refused(ModelError, words, **saved(tmp_path, (arrays[0], arrays[1] | {name: value})))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.sample(0)
def test_comfyuis_file_has_the_tower_too(tiny_edit: dict[str, Path], layout: str, tmp_path: Path) -> None:
    """In transformers' older names, with 8 bits in both halves."""
    folder = tiny_edit["qwen-2511"]
    whole = tensors(folder / "text_encoder")
    older = {name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): value
             for name, value in whole.items()}  # fmt: skip
    made = comfy(older, layout, lambda name: "norm" not in name and "embed" not in name)
    assert any(
        ".visual" in f".{name}" and value.dtype != older.get(name, value).dtype for name, value in made.tensors.items()
    )
    save_file(made.tensors, tmp_path / "coded.safetensors", metadata=made.notes)
    save_file({name: value.contiguous() for name, value in made.values.items()}, tmp_path / "values.safetensors")
    ours, expected = (drawn(folder, text_encoder=tmp_path / f"{name}.safetensors") for name in ("coded", "values"))
    error = np.linalg.norm(ours - expected) / np.linalg.norm(expected)
    print(f"{layout}: {error:.1e}")
    assert error <= (1e-5 if layout in ROTATED else 0), "a rotated input is summed in another order"
