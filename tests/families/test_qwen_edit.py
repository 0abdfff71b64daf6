"""Qwen-Image-Edit in every way in that Qwen-Image has: files of the transformer alone, conversion, LoRAs, 16 bits,
streaming and the step cache; and the command line with several pictures."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file
from support.cli_runner import cli
from support.encoded import huge_png
from support.relative import relative
from support.silent_conversion import Silent

import qwenimg
from qwenimg import Pipeline
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.conversion.convert import convert
from qwenimg.common.families.load_options import VARIANTS, LoadOptions
from qwenimg.common.families.qwen_image import variants
from qwenimg.common.networks.encoders.vision_tower import PREFIX
from qwenimg.common.numbers import sizes
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.pipeline import fit_options
from qwenimg.common.runtime.residents import Residents

BACKENDS = ("cpu", "mlx")
RNG = np.random.default_rng(7)
FIRST, SECOND = (RNG.integers(0, 256, (h, w, 3), np.uint8) for h, w in ((60, 96), (90, 70)))
ASKED: dict[str, Any] = {"image": [FIRST, SECOND], "width": 64, "height": 48, "steps": 2, "guidance": 3.0, "seed": 5}
SMALLER = 36  # by which areas are divided here: a megapixel takes a tiny model seconds


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sizes.of_area
    monkeypatch.setattr(sizes, "of_area", lambda area, *size: whole(area // SMALLER, *size))


def opened(folder: Path, backend: str = "cpu", **more: Any) -> Pipeline:
    return qwenimg.load(folder, backend=backend, **({"precision": "fp32"} | more))


@pytest.fixture(scope="module")
def folder(tiny_edit: dict[str, Path]) -> Path:
    return tiny_edit["qwen-2511"]


# Which model a file is


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen_image_edit_fp8_e4m3fn.safetensors", variants.EDIT),
        ("Qwen_Image_Edit-Q4_K_M.gguf", variants.EDIT),
        ("qwen_image_edit_2509_fp8_e4m3fn.safetensors", variants.EDIT_2509),
        ("Qwen-Image-Edit-2511-Q4_0.gguf", variants.EDIT_2511),
        ("my-edit-2511.safetensors", variants.EDIT_2511),
        ("qwen_image_fp8_e4m3fn.safetensors", None),
        ("qwen_image_2512_bf16.safetensors", None),
        ("credits.safetensors", None),
    ],
)
def test_names(name: str, expected: variants.QwenVariant | None) -> None:
    assert variants.of_name(name) is expected


@pytest.mark.parametrize("name", ["edit.safetensors", "qwen-image-edit-plus.gguf", "edit-2509-2511.safetensors"])
def test_names_that_may_be_several_are_asked_about(name: str) -> None:
    with pytest.raises(UsageError, match="does not say which Qwen-Image-Edit it is: give --variant edit, 2509 or 2511"):
        variants.of_name(name)


def test_variants_are_those_of_the_option() -> None:
    assert set(variants.VARIANTS) < set(VARIANTS)
    assert all(name == variant.name for name, variant in variants.VARIANTS.items())


@pytest.fixture
def weights(folder: Path, tmp_path: Path) -> Callable[[str], Path]:
    """The transformer of 2511 in one file of any name."""

    def named(name: str) -> Path:
        tensors = {k: v for part in (folder / "transformer").glob("*.safetensors") for k, v in load_file(part).items()}
        save_file(tensors, tmp_path / name)
        return tmp_path / name

    return named


@pytest.mark.sample(0)
def test_a_file_is_what_its_name_or_the_user_says(
    tiny_edit: dict[str, Path], folder: Path, weights: Callable[[str], Path]
) -> None:
    """In whatever folder: all have the same tensors. One that does not know that pictures are seen at timestep 0
    differs."""
    right = opened(folder)("make it red", **ASKED).latents
    by_name = opened(tiny_edit["qwen-2509"], transformer=weights("qwen-image-edit-2511.safetensors"))
    said = opened(tiny_edit["qwen-2509"], transformer=weights("any.safetensors"), variant="2511")
    of_folder = opened(tiny_edit["qwen-2509"], transformer=weights("any.safetensors"))
    in_text = opened(tiny_edit["qwen-2509"], variant="text")
    assert np.array_equal(by_name("make it red", **ASKED).latents, right)
    result = said("make it red", **ASKED)
    assert np.array_equal(result.latents, right) and result.recipe["variant"] == "2511"
    assert relative(of_folder("make it red", **ASKED).latents, right) > 0.05
    assert (in_text.model.inputs.fewest, in_text.model.inputs.most) == (0, 1)
    with pytest.raises(UsageError, match="give --variant edit, 2509 or 2511"):
        opened(folder, transformer=weights("my-edit.safetensors"))


def test_a_variant_is_for_these_models(folders: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match="--variant is for Qwen-Image"):
        opened(folders["sd15"], variant="2511")
    with pytest.raises(UsageError, match="variant is '2512'; choose one of text, edit, 2509, 2511, layered, kontext"):
        opened(folders["sd15"], variant="2512")


def test_a_folder_whose_parts_do_not_go_together(folder: Path, tmp_path: Path) -> None:
    mixed = shutil.copytree(folder, tmp_path / "mixed")
    index = json.loads((mixed / "model_index.json").read_text())
    (mixed / "model_index.json").write_text(json.dumps(index | {"_class_name": "QwenImagePipeline"}))
    with pytest.raises(ModelError, match=r"has zero_cond_t, but its pipeline is QwenImagePipeline: .* --variant 2511"):
        opened(mixed)


def test_a_text_encoder_without_its_vision_tower_is_refused(folder: Path, tmp_path: Path) -> None:
    blind = tmp_path / "text_encoder"
    blind.mkdir()
    shutil.copy(folder / "text_encoder" / "config.json", blind)
    parts = (folder / "text_encoder").glob("*.safetensors")
    tensors = {k: v for part in parts for k, v in load_file(part).items() if PREFIX not in k}
    save_file(tensors, blind / "model.safetensors")
    with pytest.raises(ModelError, match="without its vision tower, by which Qwen-Image-Edit sees pictures"):
        opened(folder, text_encoder=blind)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window_size": 100}, "window_size 100 is not a multiple of patches"),
        ({"hidden_size": 30}, "vision hidden_size 30 is not a multiple of 4 x 2"),
        ({"depth": 0}, "'vision_depth' is 0"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"out_hidden_size": 64}, "the tower makes 64 channels, the language model takes 60"),
        ({"patch_size": float("nan")}, "NaN"),
        ({"fullatt_block_indexes": "all"}, "'full_layers' is all"),
    ],
)
def test_wrong_configurations(folder: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    wrong = shutil.copytree(folder, tmp_path / "wrong")
    config = json.loads((wrong / "text_encoder" / "config.json").read_text())
    config["vision_config"] |= change
    (wrong / "text_encoder" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        opened(wrong)


# Few steps


def test_lightning_files(tiny_edit: dict[str, Path]) -> None:
    """By the names of the files on the hub; 2511 has one for 4 steps only."""
    files = {name: opened(folder).model.few_steps["lightning"] for name, folder in tiny_edit.items()}
    assert files["qwen-2511"].steps == (4,) and files["qwen-edit"].steps == (8, 4)
    start = "lightx2v/Qwen-Image-"
    assert (
        files["qwen-2511"].loras[4][0].startswith(f"{start}Edit-2511-Lightning/Qwen-Image-Edit-2511-Lightning-4steps")
    )
    assert "/Qwen-Image-Edit-2509/" in files["qwen-2509"].loras[8][0]
    assert files["qwen-edit"].loras[8][0].startswith(f"{start}Lightning/Qwen-Image-Edit-Lightning-8steps")


# Each way to draw


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_streamed_is_the_same(folder: Path, backend: str) -> None:
    whole = opened(folder, backend)
    limit = max(needs.peak for needs in fit_options.plan_memory(whole.model, whole.check("a ring", **ASKED)).stages)
    streamed = opened(folder, backend, max_memory=int(limit * 0.9))
    error = relative(streamed("a ring", **ASKED).latents, whole("a ring", **ASKED).latents)
    print(f"{backend}: {error:.1e}")
    assert error < 1e-5  # the VAE encodes in bands


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("precision", ["bf16", "bf16-plain", "fp16"])
@pytest.mark.sample(0)
def test_16_bits(folder: Path, backend: str, precision: str) -> None:
    exact = opened(folder, backend)("a ring", **ASKED).latents
    error = relative(opened(folder, backend, precision=precision)("a ring", **ASKED).latents, exact)
    print(f"{backend} {precision}: {error:.1e}")
    assert error < 0.15


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_step_cache(folder: Path, backend: str) -> None:
    """A cache that skips nothing changes nothing; one that skips a call changes something."""
    pipe, asked = opened(folder, backend), ASKED | {"steps": 4}
    plain = pipe("a ring", **asked).latents
    none = pipe("a ring", step_cache=1e-9, **asked)
    some = pipe("a ring", cached_calls="4", **asked)
    assert relative(none.latents, plain) < 1e-6 < relative(some.latents, plain)


def test_lora(folder: Path, tmp_path: Path) -> None:
    """Of the transformer and of the language model: both move the picture, at strength 0 nothing does."""
    import torch

    torch.manual_seed(1)
    block, layer = "transformer.transformer_blocks.1.attn.to_q", "text_encoder.layers.1.self_attn.q_proj"
    for name, path, width in (("a", block, 66), ("b", layer, 60)):
        pair = {f"{path}.lora_A.weight": torch.randn(4, width), f"{path}.lora_B.weight": torch.randn(width, 4)}
        save_file(pair, tmp_path / f"{name}.safetensors")
    pipe = opened(folder)
    plain = pipe("a ring", **ASKED).latents
    for name in "ab":
        moved = pipe("a ring", lora=f"{tmp_path / name}.safetensors:1", **ASKED).latents
        still = pipe("a ring", lora=f"{tmp_path / name}.safetensors:0", **ASKED).latents
        assert relative(moved, plain) > 1e-3 and np.array_equal(still, plain)


@pytest.mark.sample(0)
def test_converted_is_the_same(folder: Path, tiny_edit: dict[str, Path], tmp_path: Path) -> None:
    """Also where the user said which model the file is: the folder then says it."""
    right = opened(folder)("make it red", **ASKED).latents
    convert(folder, tmp_path / "same", LoadOptions(), Silent())
    parts = {"transformer": folder / "transformer"}
    convert(tiny_edit["qwen-2509"], tmp_path / "said", LoadOptions(variant="2511", parts=parts), Silent())
    for name in ("same", "said"):
        assert np.array_equal(opened(tmp_path / name)("make it red", **ASKED).latents, right)
        index = json.loads((tmp_path / name / "model_index.json").read_text())
        assert index["_class_name"] == "QwenImageEditPlusPipeline"
        assert json.loads((tmp_path / name / "transformer" / "config.json").read_text())["zero_cond_t"] is True


def test_plan_is_run(folder: Path) -> None:
    """Every stage is entered in the planned order, the vision tower within the text encoder's."""
    pipe, entered = opened(folder), list[str]()
    request = pipe.check("a ring", **ASKED)
    planned = [stage.name for stage in pipe.model.stages(request, pipe.model.plan(request), LatentShape(1, 6, 8))]
    enter = Residents.acquire
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Residents, "acquire", lambda self, stage: (entered.append(stage.name), enter(self, stage))[1])
        pipe("a ring", **ASKED)
    assert planned == entered == ["encode", "encode", "text", "modulation", "denoise", "decode"]


def test_pictures_cost_tokens(folder: Path) -> None:
    """Each of them adds memory and operations to a step."""
    pipe = opened(folder)
    plans = [
        next(s for s in fit_options.plan_memory(pipe.model, pipe.check("a ring", **(ASKED | {"image": images}))).stages
             if s.name == "denoise")
        for images in ([FIRST], [FIRST, SECOND], [FIRST, SECOND, SECOND])
    ]  # fmt: skip
    assert plans[0].peak < plans[1].peak < plans[2].peak


# The command line


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    for name, picture in (("first", FIRST), ("second", SECOND)):
        Image.fromarray(picture).save(tmp_path / f"{name}.png")
    return [str(tmp_path / "first.png"), str(tmp_path / "second.png")]


SHORT = ("--size", "48x48", "--steps", "1", "--seed", "3", "--backend", "cpu")


@pytest.mark.sample(0)
def test_several_pictures(folder: Path, files: list[str], tmp_path: Path) -> None:
    first, second = files
    out = tmp_path / "out.png"
    ran = cli("a ring", "-m", str(folder), "-i", first, "-i", second, *SHORT, "-o", str(out))
    assert ran.code == 0 and "Picture 2 of the prompt is seen at " in ran.err
    one = tmp_path / "one.png"
    assert cli("a ring", "-m", str(folder), "-i", first, *SHORT, "-o", str(one)).code == 0
    assert np.abs(np.asarray(Image.open(out), int) - np.asarray(Image.open(one))).max() > 8
    again = tmp_path / "again.png"
    replay = ("--from", str(out), "-m", str(folder), "--backend", "cpu", "-o", str(again))
    cli(*replay, "-i", first).refused(2, "was made with several -i")
    ran = cli(*replay, "-i", first, "-i", second)
    assert ran.code == 0 and np.array_equal(Image.open(out), Image.open(again)), ran.err
    ran = cli(*replay, "--overwrite", "-i", first, "-i", first)
    assert "the picture given to the next -i is not that of the picture given to --from" in ran.err


def test_no_picture_and_too_many(folder: Path, tiny_edit: dict[str, Path], tiny_folder: Path, files: list[str]) -> None:
    cli("a ring", "-m", str(folder), *SHORT).refused(2, "needs a picture: give it, as in qwenimg PROMPT -i PICTURE -m")
    one = str(tiny_edit["qwen-edit"])
    cli("a ring", "-m", one, "-i", files[0], "-i", files[1], *SHORT).refused(2, "takes one", "qwen-image-edit-2511")
    cli("a ring", "-m", str(tiny_folder), "-i", files[0], "-i", files[1], *SHORT).refused(2, "takes one")


def test_pictures_that_do_not_do(folder: Path, tmp_path: Path) -> None:
    """One that is too narrow or too large, which is refused before it is decoded; transparent parts are told."""
    narrow, large, layer = (tmp_path / f"{name}.png" for name in ("narrow", "large", "layer"))
    Image.new("RGB", (1, 4000)).save(narrow)
    large.write_bytes(huge_png(14_200))
    Image.new("RGBA", (40, 48), (200, 0, 0, 128)).save(layer)
    cli("a ring", "-m", str(folder), "-i", str(narrow), *SHORT).refused(2, "1x4000 is too narrow")
    cli("a ring", "-m", str(folder), "-i", str(large), *SHORT).refused(5, "large.png", "at most 36 megapixels")
    ran = cli("a ring", "-m", str(folder), "-i", str(layer), *SHORT, "-o", str(tmp_path / "out.png"))
    assert ran.code == 0 and "image is transparent in parts; they are taken as white" in ran.err


def test_a_plan_needs_no_picture(folder: Path, files: list[str]) -> None:
    assert cli("plan", str(folder), "--backend", "cpu").code == 0
    assert cli("plan", str(folder), "--backend", "cpu", "-i", files[0], "-i", files[1]).code == 0


def test_info(folder: Path) -> None:
    ran = cli("info", str(folder))
    assert ran.code == 0 and b"Qwen-Image-Edit-2511, edits one or several pictures" in ran.out
    assert b"text_encoder: 80 tensors" in ran.out


@pytest.mark.sample(0)
def test_the_text_encoder_is_opened_once_for_several_prompts(folder: Path, files: list[str], tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a ring\na star\n")
    ran = cli("--prompt-file", str(tmp_path / "prompts.txt"), "-m", str(folder), "-i", files[0], *SHORT,
              "-o", f"{tmp_path}/{{index}}.png")  # fmt: skip
    assert ran.code == 0 and ran.err.count("loading text encoder") == 1, ran.err


def test_a_search_for_other_options_keeps_all_pictures(folder: Path) -> None:
    request = opened(folder).check("a ring", **ASKED)
    smaller = replace(request, width=32, height=32)
    assert [one is other for one, other in zip(smaller.images, (FIRST, SECOND), strict=True)] == [True, True]
