"""Qwen-Image-Layered by every way in that Qwen-Image has: files of single parts, GGUF, conversion, LoRAs, 16 bits,
streaming, the step cache and passports; and the command line and the server, whose pictures are several files."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file
from support.cli_runner import cli
from support.drawing_here import drawing
from support.folder_tensors import tensors
from support.gguf_files import fitting, write
from support.relative import relative
from support.silent_conversion import Silent

import qwenimg
from qwenimg import Pipeline
from qwenimg.cli.workers import messages
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.conversion.convert import convert
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.families.qwen_image import variants
from qwenimg.common.jobs.job import InputFiles, Job
from qwenimg.common.networks.denoisers.qwen_dit import ADDITION
from qwenimg.common.networks.vaes import qwen_vae_names
from qwenimg.common.numbers import sizes
from qwenimg.common.pictures.pixels import composed
from qwenimg.common.pipeline import fit_options, start
from qwenimg.common.runtime.residents import Residents

BACKENDS = ("cpu", "mlx")
SMALLER = 100  # by which areas are divided here: a plan without a picture is of 640 pixels a side
PICTURE = np.random.default_rng(7).integers(0, 256, (60, 96, 4), np.uint8)
ASKED: dict[str, Any] = {
    "image": PICTURE, "width": 64, "height": 48, "layers": 2, "steps": 2, "guidance": 3.0, "seed": 5,
}  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sizes.of_area
    monkeypatch.setattr(sizes, "of_area", lambda area, *size: whole(area // SMALLER, *size))


def opened(folder: Path, backend: str = "cpu", **more: Any) -> Pipeline:
    return qwenimg.load(folder, backend=backend, **({"precision": "fp32"} | more))


# Which model a file is


@pytest.mark.parametrize("name", ["qwen_image_layered_fp8mixed.safetensors", "Qwen-Image-Layered-Q4_K_M.gguf"])
def test_names(name: str) -> None:
    assert variants.of_name(name) is variants.LAYERED
    assert variants.of_name("multilayered.safetensors") is None


@pytest.fixture(scope="module")
def files(tiny_layered: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The transformer in ComfyUI's names, the VAE in Wan's, and the transformer as GGUF, in names that say nothing."""
    place = tmp_path_factory.mktemp("files")
    transformer, vae = (tensors(tiny_layered / part) for part in ("transformer", "vae"))
    save_file({f"model.diffusion_model.{k}": v for k, v in transformer.items()}, place / "a.safetensors")
    wan = {qwen_vae_names._wan(name, 2): value for name, value in vae.items()}
    save_file(wan, place / "b.safetensors")
    values = {name: (value.numpy(), fitting(value.numpy(), "F32")) for name, value in transformer.items()}
    write(place / "c.gguf", values, "qwen_image")
    return {"transformer": place / "a.safetensors", "vae": place / "b.safetensors", "gguf": place / "c.gguf"}


@pytest.mark.sample(0)
def test_a_file_shows_what_it_is(tiny_layered: Path, tiny_folder: Path, files: dict[str, Path]) -> None:
    """Beside a folder of Qwen-Image, whose text encoder is the same but for its weights here."""
    right = opened(tiny_layered)("make it red", **ASKED)
    text = {"text_encoder": tiny_layered / "text_encoder"}
    for transformer in ("transformer", "gguf"):
        pipe = opened(tiny_folder, transformer=files[transformer], vae=files["vae"], **text)
        assert pipe.model.options >= {"layers"}
        assert np.array_equal(pipe("make it red", **ASKED).latents, right.latents), transformer


def test_parts_that_do_not_go_together(
    tiny_layered: Path, tiny_folder: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=r"VAE is of pictures of 3 channels, Qwen-Image-Layered needs .* --vae"):
        opened(tiny_folder, transformer=files["transformer"])
    with pytest.raises(ModelError, match=r"VAE is of pictures of 4 channels, Qwen-Image needs one of 3"):
        opened(tiny_folder, vae=tiny_layered / "vae")
    with pytest.raises(ModelError, match=r"its transformer has use_layer3d_rope, .* say --variant layered"):
        opened(tiny_folder, transformer=tiny_layered / "transformer")
    with pytest.raises(ModelError, match="has no use_layer3d_rope, but its pipeline is QwenImageLayeredPipeline"):
        opened(tiny_layered, transformer=tiny_folder / "transformer")
    lacking = {name: value for name, value in tensors(tiny_layered / "transformer").items() if name != ADDITION}
    save_file(lacking, tmp_path / "t.safetensors")
    with pytest.raises(ModelError, match="addition_t_embedding"):
        opened(tiny_layered, transformer=tmp_path / "t.safetensors", variant="layered")


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("vae", {"input_channels": 0}, "input_channels"),
        ("vae", {"input_channels": 5}, "of pictures of 5 channels"),
        ("transformer", {"use_additional_t_cond": "yes"}, "use_additional_t_cond"),
        ("transformer", {"use_layer3d_rope": False}, "has no use_layer3d_rope"),
    ],
)
def test_wrong_configurations(
    tiny_layered: Path, tmp_path: Path, part: str, change: dict[str, Any], message: str
) -> None:
    wrong = shutil.copytree(tiny_layered, tmp_path / "wrong")
    config = json.loads((wrong / part / "config.json").read_text())
    (wrong / part / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=message):
        opened(wrong)


# Each way to draw


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(1)
def test_streamed_is_the_same(tiny_layered: Path, backend: str) -> None:
    whole = opened(tiny_layered, backend)
    limit = max(needs.peak for needs in fit_options.plan_memory(whole.model, whole.check("a ring", **ASKED)).stages)
    streamed = opened(tiny_layered, backend, max_memory=int(limit * 0.9))
    error = relative(streamed("a ring", **ASKED).latents, whole("a ring", **ASKED).latents)
    print(f"{backend}: {error:.1e}")
    assert error < 1e-5  # the VAE encodes in bands


@pytest.mark.parametrize(("backend", "precision"), [("cpu", "bf16"), ("mlx", "fp16")])
@pytest.mark.sample(0)
def test_16_bits(tiny_layered: Path, backend: str, precision: str) -> None:
    exact = opened(tiny_layered, backend)("a ring", **ASKED).latents
    error = relative(opened(tiny_layered, backend, precision=precision)("a ring", **ASKED).latents, exact)
    print(f"{backend} {precision}: {error:.1e}")
    assert error < 0.15


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_step_cache_and_both_branches_at_once(tiny_layered: Path, backend: str) -> None:
    """A cache that skips nothing changes nothing, one that skips a call changes something; a batch is its branches."""
    pipe, asked = opened(tiny_layered, backend), ASKED | {"steps": 4}
    plain = pipe("a ring", **asked).latents
    assert relative(pipe("a ring", step_cache=1e-9, **asked).latents, plain) < 1e-6
    assert relative(pipe("a ring", cached_calls="4", **asked).latents, plain) > 1e-6
    pipe.model.batch_guidance = True
    assert relative(pipe("a ring", **asked).latents, plain) < 1e-5


@pytest.mark.sample(0)
def test_lora(tiny_layered: Path, tmp_path: Path) -> None:
    import torch

    torch.manual_seed(1)
    path = "transformer.transformer_blocks.1.attn.to_q"
    save_file(
        {f"{path}.lora_A.weight": torch.randn(4, 66), f"{path}.lora_B.weight": torch.randn(66, 4)},
        tmp_path / "a.safetensors",
    )
    pipe = opened(tiny_layered)
    plain = pipe("a ring", **ASKED).latents
    assert relative(pipe("a ring", lora=f"{tmp_path / 'a.safetensors'}:1", **ASKED).latents, plain) > 1e-3
    assert np.array_equal(pipe("a ring", lora=f"{tmp_path / 'a.safetensors'}:0", **ASKED).latents, plain)


@pytest.mark.sample(0)
def test_converted_is_the_same(tiny_layered: Path, tiny_folder: Path, files: dict[str, Path], tmp_path: Path) -> None:
    """Also from single files beside a folder of Qwen-Image: the new folder says what it is."""
    right = opened(tiny_layered)("make it red", **ASKED).latents
    convert(tiny_layered, tmp_path / "same", LoadOptions(), Silent())
    parts = {"transformer": files["transformer"], "vae": files["vae"], "text_encoder": tiny_layered / "text_encoder"}
    convert(tiny_folder, tmp_path / "said", LoadOptions(parts=parts), Silent())
    for name in ("same", "said"):
        assert np.array_equal(opened(tmp_path / name)("make it red", **ASKED).latents, right)
        index = json.loads((tmp_path / name / "model_index.json").read_text())
        assert index["_class_name"] == "QwenImageLayeredPipeline"
        assert json.loads((tmp_path / name / "vae" / "config.json").read_text())["input_channels"] == 4


def test_plan_is_run_and_counts_frames(tiny_layered: Path) -> None:
    pipe, entered = opened(tiny_layered), list[str]()
    request = pipe.check("a ring", **ASKED)
    planned = pipe.model.stages(request, pipe.model.plan(request), start.latent_shape(pipe.model, request))
    enter = Residents.acquire
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Residents, "acquire", lambda self, stage: (entered.append(stage.name), enter(self, stage))[1])
        pipe("a ring", **ASKED)
    assert [stage.name for stage in planned] == ["encode", "text", "modulation", "denoise", "decode"]
    assert entered == ["encode", "text", "modulation", "denoise", "decode", "decode"], "each layer is decoded by itself"
    more = fit_options.plan_memory(pipe.model, pipe.check("a ring", **(ASKED | {"layers": 5})))
    peaks = [next(s.peak for s in plan.stages if s.name == "denoise")
             for plan in (fit_options.plan_memory(pipe.model, request), more)]  # fmt: skip
    assert peaks[1] > peaks[0]


# From Python


def test_a_result_has_its_layers(tiny_layered: Path, tmp_path: Path) -> None:
    result = opened(tiny_layered)("a ring", **ASKED)
    assert [image.mode for image in result.images] == ["RGBA", "RGBA"] and result.image.size == (64, 48)
    assert np.array_equal(result.pixels, composed(result.layers)) and result.latents.shape == (3, 16, 6, 8)
    assert result.recipe["layers"] == 2 and result.recipe["strength"] == 1.0
    width, height = result.sheet().size
    assert width > 64 and height > 48
    paths = result.save_layers(tmp_path / "{layer}.png")
    assert [path.name for path in paths] == ["0.png", "1.png"]
    assert np.array_equal(Image.open(paths[1]), result.layers[1])
    assert [path.name for path in result.save_layers(tmp_path / "a.webp")] == ["a-0.webp", "a-1.webp"]
    for name, message in (("a.jpg", "a JPEG is not"), ("a.webp", "exists already")):
        with pytest.raises(UsageError, match=message):
            result.save_layers(tmp_path / name)
    assert np.array_equal(Image.open(result.save(tmp_path / "whole.png")), result.pixels)


@pytest.mark.sample(0)
def test_an_opaque_picture_is_one_with_full_alpha(tiny_layered: Path) -> None:
    full = np.dstack([PICTURE[..., :3], np.full((60, 96), 255, np.uint8)])
    first, second = (opened(tiny_layered)("a ring", **(ASKED | {"image": one})) for one in (PICTURE[..., :3], full))
    assert np.array_equal(first.latents, second.latents)


def test_previews_are_of_the_composite(tiny_layered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pipe = opened(tiny_layered)
    pipe.fit_preview()
    seen = [event.preview() for event in pipe.stream("a ring", **ASKED) if isinstance(event, qwenimg.Step)]
    assert [one.shape for one in seen] == [(6, 8, 3)] * 2


# The command line


@pytest.fixture
def picture(tmp_path: Path) -> str:
    Image.fromarray(PICTURE).save(tmp_path / "in.png")
    return str(tmp_path / "in.png")


def drawn(folder: Path, picture: str, *options: str) -> Any:
    short = ("--size", "64x48", "--steps", "1", "--layers", "2", "--seed", "3", "--backend", "cpu")
    return cli("a ring", "-m", str(folder), "-i", picture, *short, *options)


@pytest.mark.sample(0)
def test_layers_are_files(tiny_layered: Path, picture: str, tmp_path: Path) -> None:
    ran = drawn(tiny_layered, picture, "-o", f"{tmp_path}/out/{{layer}}.png", "--stack", "--sheet")
    names = ["0.png", "1.png", "stack.png", "sheet.png"]
    assert ran.code == 0 and ran.paths == [tmp_path / "out" / name for name in names], ran.err
    layers = [np.asarray(Image.open(tmp_path / "out" / name)) for name in names[:2]]
    assert layers[0].shape == (48, 64, 4) and not np.array_equal(*layers)
    assert np.array_equal(Image.open(tmp_path / "out" / "stack.png"), composed(layers))
    assert Image.open(tmp_path / "out" / "sheet.png").mode == "RGB"
    assert "for this picture the model was trained with" in ran.err
    ran = drawn(tiny_layered, picture, "-o", f"{tmp_path}/a.webp", "-s", "3-4", "--json")
    events = [event for event in ran.events if event["event"] == "image"]
    assert [Path(path).name for event in events for path in event["layers"]] == [
        "a-1-0.webp", "a-1-1.webp", "a-2-0.webp", "a-2-1.webp",
    ]  # fmt: skip
    assert np.array_equal(Image.open(tmp_path / "a-1-1.webp"), layers[1])


@pytest.mark.sample(0)
def test_any_layer_draws_all_again(tiny_layered: Path, picture: str, tmp_path: Path) -> None:
    assert drawn(tiny_layered, picture, "-o", f"{tmp_path}/a.png").code == 0
    replay = ("--from", f"{tmp_path}/a-1.png", "-m", str(tiny_layered), "--backend", "cpu", "-o", f"{tmp_path}/b.png")
    cli(*replay).refused(2, "was made with -i")
    ran = cli(*replay, "-i", picture)
    assert ran.code == 0 and "warning: the picture given" not in ran.err, ran.err
    for i in range(2):
        assert np.array_equal(Image.open(tmp_path / f"a-{i}.png"), Image.open(tmp_path / f"b-{i}.png"))
    Image.fromarray(PICTURE[::-1]).save(tmp_path / "other.png")
    ran = cli(*replay, "--overwrite", "-i", str(tmp_path / "other.png"))
    assert "the picture given to -i is not that of the picture given to --from" in ran.err
    assert b"layers: 2" in cli("info", f"{tmp_path}/a-0.png").out


@pytest.mark.sample(0)
def test_latents_of_all_frames_come_back(tiny_layered: Path, picture: str, tmp_path: Path) -> None:
    saved = str(tmp_path / "l.npy")
    assert drawn(tiny_layered, picture, "-o", f"{tmp_path}/{{index}}.png", "-N", "2", "--save-latents", saved).code == 0
    assert np.load(saved).shape == (6, 16, 6, 8)
    ran = drawn(tiny_layered, picture, "-o", f"{tmp_path}/n{{index}}.png", "-N", "2", "--latents", saved)
    assert ran.code == 0, ran.err
    for rows in (4, 7):
        np.save(tmp_path / "wrong.npy", np.zeros((rows, 16, 6, 8), np.float32))
        wrong = ("--latents", str(tmp_path / "wrong.npy"), "-N", "2", "-o", f"{tmp_path}/w{{index}}.png")
        ran = drawn(tiny_layered, picture, *wrong)
        assert ran.code == 2 and ("needs [3, 16, 6, 8]" in ran.err or "has 7 rows of latents" in ran.err), ran.err


REFUSED = {
    "no layers": (("--layers", "0"), "layers is 0; choose 1 to 20, as in --layers 4"),
    "a hundred": (("--layers", "100"), "layers is 100; choose 1 to 20, as in --layers 4"),
    "to a pipe": (("-o", "-"), "standard output takes one picture, this model makes 2 layers"),
    "jpeg": (("-o", "a.jpg"), "a JPEG is not; write .png or .webp"),
    "strength": (("--strength", "0.5"), "--strength is for models that draw from a picture"),
    "norm": (("--cfg-normalization", "2"), "this model takes 0, without, or 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tiny_layered: Path, picture: str, case: str) -> None:
    options, message = REFUSED[case]
    drawn(tiny_layered, picture, *options).refused(2, message)


def test_pictures_that_are_refused(tiny_layered: Path, picture: str, tmp_path: Path) -> None:
    cli("a ring", "-m", str(tiny_layered)).refused(2, "needs a picture: give it, as in qwenimg PROMPT -i PICTURE -m")
    drawn(tiny_layered, picture, "-i", picture).refused(2, "2 pictures are given,", "takes one")
    ran = drawn(tiny_layered, picture, "--mask", picture)
    assert ran.code == 2 and "--mask is for models that draw from a picture; this one takes all of it apart" in ran.err
    (tmp_path / "text.png").write_text("no picture")
    drawn(tiny_layered, str(tmp_path / "text.png")).refused(5, "is no PNG")
    Image.new("RGBA", (4000, 1)).save(tmp_path / "thin.png")
    thin = ("-i", str(tmp_path / "thin.png"), "--backend", "cpu")
    cli("a ring", "-m", str(tiny_layered), *thin).refused(2, "a picture of 4000x1 is too narrow")


def test_other_models_make_no_layers(tiny_folder: Path) -> None:
    asked = ("a ring", "-m", str(tiny_folder), "--size", "32x32", "--steps", "1", "--backend", "cpu")
    cli(*asked, "--stack").refused(2, "--stack is for a model that makes layers")
    cli(*asked, "-o", "{layer}.png").refused(2, "{layer} is for a model that makes layers; leave it out")


def test_info_and_plan(tiny_layered: Path, files: dict[str, Path], picture: str) -> None:
    ran = cli("info", str(tiny_layered))
    assert ran.code == 0 and b"Qwen-Image-Layered, takes a picture apart into layers" in ran.out
    assert b"Qwen-Image-Layered's transformer" in cli("info", str(files["transformer"])).out
    assert b"Qwen-Image-Layered's vae" in cli("info", str(files["vae"])).out
    assert cli("plan", str(tiny_layered), "--backend", "cpu", "-i", picture, "--layers", "3").code == 0


@pytest.mark.sample(0)
def test_a_passport_has_each_layer(tiny_layered: Path, tmp_path: Path) -> None:
    """Every decoding is a station of its own, from which the other backend goes on."""
    passport = ("parity", "record", str(tiny_layered), "--backend", "cpu", "--steps", "2", "--size", "64x48")
    assert cli(*passport, "-o", f"{tmp_path}/a.safetensors").code == 0
    ran = cli("parity", "check", f"{tmp_path}/a.safetensors", str(tiny_layered), "--backend", "mlx")
    assert ran.code == 0 and b"vae.decode         4 " in ran.out and b"pixels by 0" in ran.out, ran.out.decode()


# The server


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.sample(0)
def test_each_layer_is_a_picture_of_a_job(tiny_layered: Path, picture: str, first: int) -> None:
    """`first` pictures are kept by an earlier server: of two seeds with two layers, all of the first and one more."""
    worker, sent = drawing(tiny_layered)
    fields = {"prompt": "a ring", "width": 64, "height": 48, "steps": 1, "layers": 2}
    job = Job(options=fields, seeds=(3, 4), files=InputFiles(images=(Path(picture).read_bytes(),)))
    task = messages.Draw(id="a", model="tiny", job=job, first=first)
    worker.draw(task)
    drawn = [message for message in sent if isinstance(message, messages.PictureDrawn)]
    assert [one.index for one in drawn] == list(range(first, 4))
    pixels = [np.asarray(Image.open(io.BytesIO(one.data))) for one in drawn]
    asked = {"image": PICTURE, "width": 64, "height": 48, "steps": 1, "layers": 2}
    layers = opened(tiny_layered, precision="auto")("a ring", seed=4, **asked).layers
    assert np.array_equal(pixels[-1], layers[1]) and pixels[-1].shape == (48, 64, 4)
    worker.draw(replace(task, suffix=".jpg", first=0))
    assert sent[-1].error.startswith("layers are transparent in parts"), sent[-1]
