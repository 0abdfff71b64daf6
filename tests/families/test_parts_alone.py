"""Files of all parts are a model without its folder: which known model they are of, and what they draw."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support import tiny_flux, tiny_flux2, tiny_flux2_dev, tiny_sd3, tiny_zimage
from support.cli_runner import cli
from support.folder_tensors import tensors
from support.published import write_published
from support.spiece_files import trained, write_spiece
from support.tiny_clip import BOS, EOS, write_tiny_clip_tokenizer
from tiny_tokenizer import write_tiny_tokenizer

import qwenimg
from qwenimg import ModelError, UsageError
from qwenimg.common.families import registry
from qwenimg.common.families.catalog import KNOWN
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.hub.describe import describe

NAMES = [name for name, known in KNOWN.items() if known.family in ("z-image", "flux", "flux2", "flux2-dev", "sd3")]
ASKED: dict[str, Any] = {"width": 48, "height": 32, "steps": 2, "seed": 4, "guidance": 3.0}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tokenizers of CLIP, its last ids those of the published one, and of T5, as --tokenizer takes it."""
    folder = tmp_path_factory.mktemp("words")
    write_tiny_clip_tokenizer(folder)
    vocabulary = json.loads((folder / "vocab.json").read_text())
    (folder / "vocab.json").write_text(json.dumps(vocabulary | {BOS: 49406, EOS: 49407}))
    write_spiece(folder / "tokenizer_3", trained())
    return folder


def split(folder: Path, out: Path, transformer: str) -> dict[str, Path]:
    """The weights of a model's folder as single files, the transformer's with that name, by the options that take
    them."""
    out.mkdir()
    parts: dict[str, Path] = {}
    for part in sorted(path for path in folder.iterdir() if path.is_dir()):
        files = sorted(part.glob("*.safetensors"))
        if files:
            name = f"{transformer}.safetensors" if part.name == "transformer" else f"{part.name}.safetensors"
            parts[part.name] = out / name
            files[0].rename(out / name)
    return parts


# Which model they are of


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sample(1)
def test_published_files_are_their_model(cache: Path, words: Path, tmp_path: Path, name: str) -> None:
    """Headers alone, in names of diffusers: by the sizes of the transformer and the name of its file; with the shipped
    configurations, nothing in the cache."""
    known = KNOWN[name]
    parts = split(write_published(tmp_path / "folder", name), tmp_path / "files", known.files[0])
    assert registry.model_of(parts["transformer"], LoadOptions()) == name
    told = describe(parts["transformer"])
    print("\n".join(told.lines))
    assert told.faults == describe(parts["vae"]).faults == [] and (
        known.family != "flux2" or told.lines[1].startswith(f"type: {name}, ")
    )
    if known.family in ("z-image", "flux2"):
        write_tiny_tokenizer(tmp_path / "qwen")
        parts["tokenizer"] = tmp_path / "qwen"
    elif known.family == "flux2-dev":
        tiny_flux2_dev.tiny_tokenizer().save_pretrained(tmp_path / "mistral")
        parts["tokenizer"] = tmp_path / "mistral"
    else:
        parts["tokenizer"] = words
    with qwenimg.load(None, "cpu", "bf16", **parts) as pipe:
        assert (pipe.model_name, pipe.family) == (name, known.family)
        checkpoint, published = pipe.model.checkpoint, registry.published(known)
        assert published is not None
        for part, one in checkpoint.components.items():
            wanted = published.checkpoint[part]
            assert one.plan.parameters == wanted.plan.parameters
            assert part == "transformer" or one.config == wanted.config
        assert (checkpoint.scheduler, checkpoint.variant) == (
            published.checkpoint.scheduler,
            published.checkpoint.variant,
        )
        assert checkpoint.distilled == published.checkpoint.distilled
        usual = pipe.defaults
        assert (usual.steps, usual.guidance, usual.width) == (known.steps, known.guidance, known.width)


def test_the_user_says_what_no_file_says(tmp_path: Path) -> None:
    """Kontext by --variant; a folder by the model that it is in."""
    folder = write_published(tmp_path / "folder", "flux-kontext")
    [file] = (folder / "transformer").glob("*.safetensors")
    assert registry.model_of(file, LoadOptions()) == "flux-dev"
    assert registry.model_of(file, LoadOptions(variant="kontext", parts={"transformer": file})) == "flux-kontext"
    assert registry.model_of(folder / "transformer", LoadOptions()) == "flux-dev"
    for name in ("z-image", "flux2-klein-base-9b", "flux2-dev", "sd3.5-large-turbo"):
        made = write_published(tmp_path / name, name)
        assert registry.model_of(made / "transformer", LoadOptions()) == name
    with pytest.raises(UsageError, match="variant 2511 is no"):
        registry.model_of(file, LoadOptions(variant="2511"))


# What they draw


def given(folder: Path, place: Path) -> dict[str, Path]:
    """The parts of a tiny model as files, those of CLIP in the names that their files have."""
    from safetensors.torch import save_file

    place.mkdir()
    made: dict[str, Path] = {}
    for part in sorted(path for path in folder.iterdir() if any(path.glob("*.safetensors"))):
        weights = tensors(part)
        is_clip = json.loads((part / "config.json").read_text()).get("model_type", "").startswith("clip")
        names = {key: f"text_model.{key}" if is_clip and key.split(".")[0] not in _TOP else key for key in weights}
        made[part.name] = place / f"{part.name}.safetensors"
        save_file({names[key]: value for key, value in weights.items()}, made[part.name])
    return made


_TOP = ("text_model", "text_projection")
WIDE: dict[str, Callable[[Path], Any]] = {  # models of which files show all that matters
    "z-image-turbo": tiny_zimage.write_tiny_zimage,
    "flux-schnell": lambda folder: tiny_flux.write_tiny_flux(folder, "schnell", wide=True),
    "flux2-klein-4b": lambda folder: tiny_flux2.write_tiny_flux2(folder, distilled=True),
    "sd3.5-medium": lambda folder: tiny_sd3.write_tiny_sd3(folder, wide=True),
}


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.sample(0)
def test_they_draw_what_the_folder_draws(cache: Path, tmp_path: Path, name: str) -> None:
    """With the small files of the model in the cache, and no model named; the picture of the command is made again."""
    WIDE[name](tmp_path / "model")
    parts, repo = given(tmp_path / "model", tmp_path / "parts"), KNOWN[name].repo or ""
    snapshot = cache / f"models--{repo.replace('/', '--')}" / "snapshots" / ("0" * 40)
    shutil.copytree(tmp_path / "model", snapshot, ignore=shutil.ignore_patterns("*.safetensors*"))
    with qwenimg.load(tmp_path / "model", "cpu", "fp32") as pipe:
        whole = pipe("a red circle", **ASKED)
    with qwenimg.load(None, "cpu", "fp32", **parts) as pipe:
        made = pipe("a red circle", **ASKED)
    assert pipe.model_name == name and np.array_equal(made.latents, whole.latents)
    assert made.recipe["model"] == name and made.recipe["fingerprints"].keys() == parts.keys()
    assert made.recipe["transformer"] == "transformer.safetensors" and made.pixels.std() > 10
    flags = {part: f"--{'text-encoder' if 'text' in part else part}" for part in parts}
    words = [word for part, file in parts.items() for word in (flags[part], str(file))]
    few, names = ("--size", "48x32", "--steps", "1", "--backend", "cpu"), [tmp_path / f"{x}.png" for x in "ab"]
    assert cli("plan", *words, *few[:2]).code == 0
    ran = cli("a red circle", *words, *few, "-o", str(names[0]))
    assert ran.code == 0 and name in ran.err, ran.err
    again = cli("--from", str(names[0]), *words, "--backend", "cpu", "-o", str(names[1]))
    assert again.code == 0 and "warning" not in again.err, again.err
    assert np.array_equal(*(np.asarray(Image.open(file)) for file in names))


def test_what_is_missing_is_named(cache: Path, words: Path, tmp_path: Path) -> None:
    """With the command that gets it."""
    WIDE["flux2-klein-4b"](tmp_path / "model")
    parts = given(tmp_path / "model", tmp_path / "parts")
    with pytest.raises(ModelError, match=r"flux2-klein-4b: get its tokenizer .* by: qwenimg pull flux2-files"):
        qwenimg.load(None, "cpu", **parts)
    only = {"transformer": parts["transformer"]}
    with pytest.raises(ModelError, match="beside --transformer, give --text-encoder FILE and --vae FILE, and get its"):
        qwenimg.load(None, "cpu", **only)
    with pytest.raises(
        ModelError, match=r"FLUX.3 Image Klein and ERNIE-Image: say with -m which .* or give its --transformer FILE"
    ):
        qwenimg.load(None, "cpu", vae=parts["vae"])
    cli("x", "-m", str(parts["transformer"])).refused(5, "give it with --transformer, beside --text-encoder FILE and")


@pytest.mark.parametrize(
    ("name", "lacks"),
    [
        ("flux-dev", "lacks text_encoder_2: add --text-encoder FILE"),
        ("sd3-medium", "lacks text_encoder_3: add --text-encoder FILE (or --text-encoder none, to draw without T5)"),
    ],
)
@pytest.mark.sample(1)
def test_one_of_several_text_encoders(cache: Path, words: Path, tmp_path: Path, name: str, lacks: str) -> None:
    parts = split(write_published(tmp_path / "folder", name), tmp_path / "files", name)
    del parts["text_encoder_2" if name == "flux-dev" else "text_encoder_3"]
    with pytest.raises(ModelError, match=re.escape(lacks)):
        qwenimg.load(None, "cpu", **parts, tokenizer=words)
    if name == "flux-dev":
        parts = split(write_published(tmp_path / "again", name), tmp_path / "all", name)
        vocabularies = r"needs the vocabularies of CLIP and of T5.*qwenimg pull clip-tok.* and qwenimg pull t5-tok"
        with pytest.raises(ModelError, match=vocabularies):
            qwenimg.load(None, "cpu", **parts)
    else:
        with qwenimg.load(None, "cpu", **parts, text_encoder_3="none", tokenizer=words) as pipe:
            assert pipe.model_name == name


@pytest.mark.sample(0)
def test_a_folder_without_tokenizers_is_converted_with_those_of_another(tmp_path: Path) -> None:
    """OpenCLIP pads with another token than CLIP: a vocabulary that is found elsewhere does not say it, the folder
    that is made of it does."""
    folder, words = tmp_path / "sd3", tmp_path / "words"
    tiny_sd3.write_tiny_sd3(folder, wide=True)
    with qwenimg.load(folder, "cpu", "fp32") as pipe:
        expected = pipe("a red circle", **ASKED).latents
    (folder / "tokenizer").rename(words)
    (folder / "tokenizer_3").rename(words / "tokenizer_3")
    shutil.rmtree(folder / "tokenizer_2")
    ran = cli("convert", str(folder), str(tmp_path / "out"), "--tokenizer", str(words), "--quiet")
    assert ran.code == 0, ran.err
    for place, options in ((folder, {"tokenizer": words}), (tmp_path / "out", {})):
        with qwenimg.load(place, "cpu", "fp32", **options) as pipe:
            assert np.array_equal(pipe("a red circle", **ASKED).latents, expected), place
