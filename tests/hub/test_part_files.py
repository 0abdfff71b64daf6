"""Parts of models as files: what is missing beside them, which option takes them, and what a folder of them holds."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support import gguf_files
from support.cli_runner import cli
from support.published import write_published

import qwenimg
from qwenimg import DoesNotFit, ModelError
from qwenimg.common.base.config import data_folder
from qwenimg.common.conversion.parts import as_json
from qwenimg.common.families import registry
from qwenimg.common.families.catalog import BUILT_IN, KNOWN
from qwenimg.common.families.family import Family
from qwenimg.common.hub import folder_listing, resolve
from qwenimg.common.hub.model_folders import read_folders
from qwenimg.common.networks.denoisers import flux_dit, qwen_dit
from qwenimg.common.networks.encoders import clip, qwen, qwen3_vl_vision, qwen_vl_vision
from qwenimg.common.networks.vaes import flux2_vae, kl_vae, qwen_vae
from qwenimg.common.parts import known_configs

KINDS = {"transformer": "diffusion_models", "text_encoder": "text_encoders", "vae": "vae"}
LORA = "transformer_blocks.0.img_mlp.net.2.lora_"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen-Image of its published size, whose data are holes."""
    return write_published(tmp_path_factory.mktemp("published") / "model")


@pytest.fixture
def comfy(published: Path, cache: Path, tmp_path: Path) -> Path:
    """A folder of ComfyUI with the three parts, a GGUF transformer and a LoRA; nothing is in the hub's cache."""
    root = tmp_path / "comfy"
    for part, kind in KINDS.items():
        place = root / "models" / kind
        place.mkdir(parents=True)
        (place / f"qwen_{part}.safetensors").symlink_to(next((published / part).glob("*.safetensors")))
    img_mod = {"transformer_blocks.0.img_mod.1.weight": (np.zeros((4, 32), np.float32), "Q4_0")}
    gguf_files.write(root / "models" / "diffusion_models" / "qwen-Q4.gguf", img_mod, "qwen_image")
    (root / "models" / "loras").mkdir()
    halves = {f"{LORA}A.weight": np.zeros((4, 8), np.float32), f"{LORA}B.weight": np.zeros((8, 4), np.float32)}
    save_file(halves, root / "models" / "loras" / "style.safetensors")
    (root / "models" / "checkpoints").mkdir()
    return root


def part(comfy: Path, name: str) -> Path:
    return comfy / "models" / KINDS[name] / f"qwen_{name}.safetensors"


def printed(*words: str) -> str:
    told = cli(*words)
    assert told.code == 0, told.err
    return told.out.decode()


# What is missing


@pytest.mark.parametrize(
    ("given", "needed", "not_said"),
    [
        (
            ("transformer",),
            "beside --transformer, give --text-encoder FILE and --vae FILE, and get its tokenizer",
            "--u",
        ),
        (("transformer", "vae"), "beside --transformer and --vae, give --text-encoder FILE, and", "--vae FILE"),
        (("vae",), "give --transformer FILE and --text-encoder FILE, and get its tokenizer (4.7 MB)", "--vae FILE"),
        (("transformer", "tokenizer"), "beside --transformer, give --text-encoder FILE and --vae FILE", "okenizer"),
        ((*KINDS,), "qwen-image: get its tokenizer (4.7 MB) with the network on by: qwenimg pull", "beside"),
    ],
    ids=str,
)
@pytest.mark.parametrize("model", [None, "qwen-image"])
@pytest.mark.sample(5)
def test_exactly_what_is_missing_is_named(
    comfy: Path, published: Path, model: str | None, given: tuple[str, ...], needed: str, not_said: str
) -> None:
    paths = {name: published / "tokenizer" if name == "tokenizer" else part(comfy, name) for name in given}
    with pytest.raises(ModelError, match=re.escape(needed)) as caught:
        qwenimg.load(model, "cpu", **paths)  # type: ignore[arg-type]
    assert "57" not in str(caught.value) and not_said not in str(caught.value)
    assert str(caught.value).count("qwenimg pull") == ("tokenizer" not in given)


def test_three_files_and_a_tokenizer_are_a_model_without_a_pull(comfy: Path, published: Path) -> None:
    """Its configurations ship."""
    paths = {name: part(comfy, name) for name in KINDS}
    pipe = qwenimg.load(None, "cpu", "fp32", **paths, tokenizer=published / "tokenizer", max_memory="1GB")  # type: ignore[arg-type]
    assert (pipe.model_name, pipe.defaults.width, pipe.family) == ("qwen-image", 1328, "qwen-image")
    with pytest.raises(DoesNotFit):
        pipe("a ring", width=4096, height=4096, steps=2)
    pipe.close()


@pytest.mark.parametrize("name", [name for name in KNOWN if data_folder(name).is_dir() and name != BUILT_IN.name])
def test_the_shipped_configurations_are_whole_models(name: str) -> None:
    """Every file is one of a part or one of the small files, in the form in which `convert` writes it; the index has
    every part with the class of its configuration."""
    folder, opened = data_folder(name), registry.published(KNOWN[name])
    assert opened is not None
    tables = known_configs.small_files(name)
    index = next(table for path, table in tables.items() if path.endswith("model_index.json"))
    for part_name, network in opened.family.parts.items():
        if part_name in opened.checkpoint.components:
            config = opened.checkpoint[part_name].config
            place = opened.family.folders.get(part_name, part_name)
            tables[f"{place}/config.json"] = network.written(config)
            if place not in index:
                assert place in ("prior", "effnet"), "which have an index of their own, or none"
                continue
            library, kind = index[place][:2]  # type: ignore[index]
            known = ("Bert", "CLIP", "T5", "UMT5", "Qwen", "Mistral", "Gemma")
            assert library in ("diffusers", "wuerstchen") or kind.startswith(known), part_name
            assert library == "transformers" or network.kind == kind
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.*")}
    assert files == {path: as_json(table) for path, table in tables.items()}


@pytest.mark.parametrize("family", registry.FAMILIES, ids=lambda family: family.name)
def test_a_family_whose_parts_need_no_folder_ships_every_known_model(family: Family) -> None:
    names = [name for name, known in KNOWN.items() if known.family == family.name and known is not BUILT_IN]
    assert family.model_of is None or all(resolve.configurations(KNOWN[name]) for name in names)
    assert family.model_of is not None or not any(resolve.configurations(KNOWN[name]) for name in names)


def test_configurations_of_a_network_alone_are_the_published_ones() -> None:
    """The defaults of a network's configuration are those of one published model."""
    for model, part, network in (
        ("qwen-image", "transformer", qwen_dit.NETWORK),
        ("qwen-image", "text_encoder", qwen.QWEN2_5_VL),
        ("qwen-image", "text_encoder", qwen_vl_vision.NETWORK),
        ("qwen-image", "vae", qwen_vae.NETWORK),
        ("flux-schnell", "transformer", flux_dit.NETWORK),
        ("qwen-image-2.1", "text_encoder", qwen3_vl_vision.NETWORK),
        ("z-image", "text_encoder", qwen.QWEN3),
        ("flux2-klein-4b", "vae", flux2_vae.NETWORK),
    ):
        assert known_configs.read(model, part, network) == network.config(), part
    vaes = {"flux-dev": kl_vae.FLUX_1, "z-image": kl_vae.FLUX_1, "sd3-medium": kl_vae.STABLE_DIFFUSION_3}
    for model, config in vaes.items():
        assert known_configs.read(model, "vae", kl_vae.NETWORK) == config
    for part, text in (("text_encoder", clip.VIT_L), ("text_encoder_2", clip.OPEN_CLIP_BIG_G)):
        assert known_configs.read("sdxl", part, clip.NETWORK) == text


def test_models_of_a_family_share_configurations() -> None:
    assert resolve.configurations(KNOWN["qwen-image-2512"]) == resolve.configurations(KNOWN["qwen-image"])


# A part in the place of a model


def test_a_part_that_is_given_as_a_model_is_told_with_its_option(comfy: Path) -> None:
    gguf = comfy / "models" / "diffusion_models" / "qwen-Q4.gguf"
    told = "is Qwen-Image's transformer and no whole model: give it with --transformer, beside --text-encoder FILE and"
    cli("x", "-m", str(gguf), "--quiet").refused(5, told)
    cli("x", "-m", str(part(comfy, "vae"))).refused(
        5, "is a VAE of Qwen-Image, Krea 2 and Anima and no whole model: give it with --vae"
    )
    cli("x", "-m", str(comfy)).refused(5, "is a folder of models: give it with --models-dir")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("qwen-Q4", "give it with --transformer qwen-Q4, beside --text-encoder FILE and --vae FILE; its tokenizer"),
        ("qwen-Q4.gguf", "give it with --transformer qwen-Q4.gguf, beside"),
        (
            "qwen_vae",
            "is a VAE of Qwen-Image, Krea 2 and Anima and no whole model: give it with --vae qwen_vae, beside",
        ),
        ("style", "is a LoRA and no whole model: give it with --lora style, beside the model"),
    ],
)
def test_a_name_that_is_a_part_in_the_models_folder(comfy: Path, name: str, told: str) -> None:
    cli("x", "--models-dir", str(comfy), "-m", name).refused(5, told)
    cli("plan", name, "--models-dir", str(comfy)).refused(5, told)
    with pytest.raises(ModelError, match=re.escape(told)):
        qwenimg.load(name, "cpu", models_dir=comfy)


@pytest.mark.sample(0)
def test_the_sentence_that_is_told_works(comfy: Path, published: Path) -> None:
    names = [word for name in KINDS for word in (f"--{name.replace('_', '-')}", f"qwen_{name}")]
    tokenizer = str(published / "tokenizer")
    options = ("--models-dir", str(comfy), *names, "--tokenizer", tokenizer)
    assert "1328x1328, 50 steps" in printed("plan", *options, "--on", "4090", "--memory", "24GB")


@pytest.mark.sample(0)
def test_a_unet_alone_asks_for_its_model(folders: dict[str, Path], cache: Path) -> None:
    unet = next((folders["sd15"] / "unet").glob("*.safetensors"))
    with pytest.raises(ModelError, match="is Stable Diffusion's UNet: say with -m which model it belongs to"):
        qwenimg.load(None, "cpu", transformer=unet)
    with pytest.raises(ModelError, match="UNet and no whole model: give it with --transformer, beside"):
        qwenimg.load(unet, "cpu")


# What a folder holds


def listed(comfy: Path) -> dict[str, dict[str, object]]:
    rows = json.loads(printed("models", "--models-dir", str(comfy), "--json"))["files"]
    return {str(row["name"]): row for row in rows}


@pytest.mark.sample(0)
def test_every_file_is_listed_with_what_takes_it(comfy: Path, folders: dict[str, Path]) -> None:
    shutil.copytree(folders["sd15"], comfy / "models" / "checkpoints" / "tiny sd")
    save_file({"a": np.zeros(3, np.float32)}, comfy / "models" / "checkpoints" / "odd.safetensors")
    rows = listed(comfy)
    assert {name: (row["family"], row["kind"], row["use"], row["stored"]) for name, row in rows.items()} == {
        "qwen-Q4.gguf": ("Qwen-Image", "transformer", "--transformer", "Q4_0"),
        "qwen_transformer.safetensors": ("Qwen-Image", "transformer", "--transformer", "BF16"),
        "qwen_text_encoder.safetensors": ("Qwen-Image and LongCat-Image", "text encoder", "--text-encoder", "BF16"),
        "qwen_vae.safetensors": ("Qwen-Image, Krea 2 and Anima", "vae", "--vae", "BF16"),
        "style.safetensors": ("Qwen-Image", "LoRA", "--lora", "F32"),
        "tiny sd": ("Stable Diffusion", "model", "-m", ""),
        "odd.safetensors": ("", "", "", "F32"),
    }
    assert 40e9 < float(str(rows["qwen_transformer.safetensors"]["bytes"])) < 42e9
    assert rows["qwen_transformer.safetensors"]["needs"] == "text encoder, VAE"
    assert re.search(r"--vae qwen_vae\.safetensors +253\.8 MB", printed("models", "--models-dir", str(comfy)))
    empty = comfy / "empty"
    empty.mkdir()
    assert "no model, part or LoRA" in printed("models", "--models-dir", str(empty))


@pytest.mark.sample(0)
def test_a_file_that_cannot_be_read_is_a_row(comfy: Path) -> None:
    place = comfy / "models" / "checkpoints"
    (place / "broken.safetensors").write_bytes(b"\xff" * 20)
    (place / "empty.gguf").write_bytes(b"")
    (place / "evil\x1b[31m.safetensors").write_bytes((2**40).to_bytes(8, "little") + b"{")
    (place / "nowhere.safetensors").symlink_to(place / "gone")
    (place / "folder.safetensors").mkdir()
    (place / "model").mkdir()
    (place / "model" / "model_index.json").write_text("{")
    rows = listed(comfy)
    for name in ("broken.safetensors", "empty.gguf", "evil\x1b[31m.safetensors", "model"):
        assert rows[name]["fault"] and not rows[name]["use"], name
    told = printed("models", "--models-dir", str(comfy))
    assert all(line.isprintable() for line in told.splitlines())
    assert told.count("not read") == sum(bool(row["fault"]) for row in rows.values())


def test_no_more_headers_are_read_than_said(comfy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_listing, "MAX_FILES", 3)
    rows, more = folder_listing.rows(read_folders([comfy]))
    assert len(rows) == 3 and more
    assert "more than 3 files" in printed("models", "--models-dir", str(comfy))


@pytest.mark.parametrize("model", [(), ("-m", "sd15"), ("-m", "qwen-image")])
@pytest.mark.parametrize("option", ["--vae", "--transformer", "--text-encoder"])
def test_a_file_that_cannot_be_read_is_named_before_a_model_that_is_not_here(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, model: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("v.safetensors").write_bytes(bytes(range(64)))
    Path("none.safetensors").write_bytes(b"")
    Path("pipe.safetensors").symlink_to("/dev/zero")
    name = "--unet" if model[1:] == ("sd15",) and option == "--transformer" else option
    for file, fault in (
        ("v.safetensors", "is not a safetensors file"),
        ("none.safetensors", "is"),
        ("pipe.safetensors", "is"),
        ("absent.safetensors", "does not exist: check the path"),
    ):
        ran = cli("a cat", *model, name, file)
        assert ran.code == 5 and f"{file}: {fault}" in ran.err and "pull" not in ran.err, ran.err
