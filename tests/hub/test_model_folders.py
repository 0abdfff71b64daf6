"""Models found by name in the folders of other programs, and the file in which ComfyUI lists more of them."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file
from support.cli_runner import cli
from support.recipe_cases import recipe_from_png
from support.tiny_controlnet import write_authors_file, write_controlnet
from support.tiny_sd import _SMALL, UNETS
from support.upscalers import as_safetensors, as_torch, rrdbnet, srvgg

import qwenimg
from qwenimg.cli import config
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.hub import comfy_paths, folder_listing, model_folders, origin
from qwenimg.common.hub.comfy_paths import read_paths
from qwenimg.common.hub.model_folders import KINDS, read_folders
from qwenimg.common.jobs.replay import Replay
from qwenimg.common.request import lora_text
from qwenimg.common.request.lora_text import Lora
from qwenimg.common.request.parts import PARTS, kind_of

# As ComfyUI's example has it, with the comments taken away; and as other people write it.
EXAMPLE = """\
#Rename this to extra_model_paths.yaml and ComfyUI will load it

a111:
    base_path: path/to/stable-diffusion-webui/

    checkpoints: models/Stable-diffusion
    configs: models/Stable-diffusion
    vae: models/VAE
    loras: |
         models/Lora
         models/LyCORIS
    hypernetworks: models/hypernetworks

comfyui:
  base_path: "/opt/Comfy UI/"   # where it is
  # You can use is_default to mark that these folders should be listed first
  is_default: true
  text_encoders: |-
       models/text_encoders/
       models/clip/  # legacy location still supported
  'unet': ~/unets
  clip_vision:
"""


def write(path: Path, text: str | bytes = b"x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_comfyuis_own_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    webui = tmp_path / "path/to/stable-diffusion-webui"
    assert read_paths(write(tmp_path / comfy_paths.NAME, EXAMPLE)) == {
        "checkpoints": [webui / "models/Stable-diffusion"],
        "configs": [webui / "models/Stable-diffusion"],
        "vae": [webui / "models/VAE"],
        "loras": [webui / "models/Lora", webui / "models/LyCORIS"],
        "hypernetworks": [webui / "models/hypernetworks"],
        "text_encoders": [Path("/opt/Comfy UI/models/text_encoders"), Path("/opt/Comfy UI/models/clip")],
        "unet": [Path("/home/someone/unets")],
        "clip_vision": [],
    }


def test_the_same_as_a_yaml_parser_reads(tmp_path: Path) -> None:
    """PyYAML's own values, of texts without comments in blocks, which to it are part of a path."""
    text = EXAMPLE.replace("  # legacy location still supported", "")
    expected: dict[str, list[Path]] = {}
    for group in yaml.safe_load(text).values():
        base = Path(group.pop("base_path"))
        group.pop("is_default", None)
        for key, value in group.items():
            lines = [line for line in (value or "").split("\n") if line]
            expected.setdefault(key, []).extend(tmp_path / base / os.path.expanduser(line) for line in lines)  # noqa: PTH111
    assert read_paths(write(tmp_path / "a.yaml", text)) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("checkpoints: /x", "line 1"),
        ("a:\n  - /x", "line 2 is in no group"),
        ("a:\n  vae: [/x]", "is not a path"),
        ("a:\n  <<: *a", "line 2"),
        ("a: &a\n  vae: *a", "line 1 is not a path"),
        ("a: &a {vae: x}\nb:\n  <<: *a", "line 3"),
        ("a: &a\n  vae: |\n" + "    x\n" * 400 + "".join(f"k{i}: *a\n" for i in range(5000)), "more than 500"),
        ("a0: &a0 {x: y}\n" + "".join(f"a{i}: &a{i} [{f'*a{i - 1},' * 9}]\n" for i in range(1, 200)), "line 2 is in"),
        ("a: &a [*a]", "line 1 is in no group"),
        ("? [b, c]\n: x", "not the name of"),
        ("!!set {a, b}", "line 1"),
        ("a: !!python/object/apply:os.system [true]", "line 1"),
        ("? " * 30_000, "too deep"),
        ("- " * 30_000, "too deep"),
        ("{a: " * 10_000, "too deep"),
        ("a:\n  vae: x\n---\nb:\n  vae: y", "line 3"),
        ("a:\n  vae: 'x\\0", "line 2"),
        ('a:\n  vae: "x\\0y"', "is not a path"),
        ("a: " + "9" * 60_000, "line 1"),
        ("".join(f"k{i}:\n" for i in range(501)), "more than 500"),
        ("a:\n  vae: !!python/object:os.system x", "is not a path"),
        ("a:\n\tvae: x", "line 2 is not YAML"),
        ("a:\n  vae: x\n   loras: y", "line 3"),
        ("a:\n  vae: x\n  vae: y", "twice"),
        ("  a:\n vae: x", "line 2"),
        ("a:\n  vae: x\0y", "no YAML has"),
        ("a:\n  \x1b[2J: x", "no YAML has"),
        (b"a:\n  vae: \xff", "not UTF-8 (byte 10)"),
        ("a:\n" + "".join(f"  k{i}: x\n" for i in range(501)), "more than 500"),
        ("a:\n" + "  " * 40_000, "bytes; at most"),
        ("[" * 60_000, "too deep"),
        ("a:\n  k: |\n" + "   x\n" * 10_000, "more than 500"),
    ],
)
@pytest.mark.sample(10)
def test_other_texts_are_one_line(tmp_path: Path, text: str | bytes, words: str) -> None:
    path = write(tmp_path / comfy_paths.NAME, text)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(ModelError) as caught:
        read_paths(path)
    assert time.process_time() - start < 10  # it takes up to 1.5 s on a busy machine; a text must not stop the program
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024
    shown = str(caught.value)
    print(shown)
    assert words in shown and comfy_paths.NAME in shown and shown.isprintable() and len(shown) <= 300


def test_a_value_stays_the_text_that_it_is(tmp_path: Path) -> None:
    """YAML's numbers, dates and truth values are names of folders here."""
    names = ["0x10", "1e400", "2026-11-25", "no", "9" * 5000, "1:30"]
    text = "a:\n" + "".join(f"  k{i}: {name}\n" for i, name in enumerate(names))
    found = read_paths(write(tmp_path / comfy_paths.NAME, text))
    assert found == {f"k{i}": [tmp_path / name] for i, name in enumerate(names)}


@pytest.mark.parametrize("what", ["fifo", "folder", "loop"])
def test_a_list_that_is_no_file(tmp_path: Path, what: str) -> None:
    path = tmp_path / comfy_paths.NAME
    {"fifo": os.mkfifo, "folder": os.mkdir, "loop": lambda p: p.symlink_to(p)}[what](path)
    with pytest.raises(ModelError, match="extra_model_paths"):
        read_folders([tmp_path])


@pytest.fixture
def comfy(tmp_path: Path, cache: Path) -> Path:
    """A ComfyUI with a file of each kind, and a list of more folders."""
    root = tmp_path / "ComfyUI"
    for name in (
        "checkpoints/a.safetensors",
        "diffusion_models/qwen/a.safetensors",
        "unet/b.gguf",
        "text_encoders/t.safetensors",
        "clip/t.safetensors",
        "vae/deep/er/v.safetensors",
        "loras/style.safetensors",
    ):
        write(root / "models" / name)
    write(root / "models/diffusers/tiny/model_index.json", "{}")
    write(tmp_path / "elsewhere/extra.safetensors")
    write(root / comfy_paths.NAME, f"more:\n  base_path: {tmp_path}\n  loras: elsewhere\n  clip: |\n    elsewhere\n")
    return root


@pytest.mark.parametrize("given", ["ComfyUI", "ComfyUI/models"])
def test_each_kind_is_looked_for_where_comfyui_has_it(comfy: Path, given: str, tmp_path: Path) -> None:
    folders, models = read_folders([comfy.parent / given]), comfy / "models"
    found = {
        ("a.safetensors", "model"): models / "checkpoints/a.safetensors",
        ("a", "model"): models / "checkpoints/a.safetensors",
        ("tiny", "model"): models / "diffusers/tiny",
        ("a.safetensors", "transformer"): models / "diffusion_models/qwen/a.safetensors",
        ("qwen/a", "transformer"): models / "diffusion_models/qwen/a.safetensors",
        ("b", "transformer"): models / "unet/b.gguf",
        ("t.safetensors", "text_encoder"): models / "text_encoders/t.safetensors",
        ("v", "vae"): models / "vae/deep/er/v.safetensors",
        ("extra", "text_encoder"): tmp_path / "elsewhere/extra.safetensors",
    }
    for (name, kind), path in found.items():
        assert folders.locate(name, kind) == str(path), (name, kind)
    for name, kind in (("qwen-image", "model"), ("a/b", "vae")):
        assert folders.locate(name, kind) == name
    for name, kind in (("v", "model"), ("tiny", "vae"), ("nothing", "lora"), ("v.safetensors", "lora")):
        with pytest.raises(ModelError) as caught:
            folders.locate(name, kind)
        said = str(caught.value)
        assert f"{name}: no such file, and no {model_folders.NOUNS[kind]} of that name is in --models-dir " in said
        searched = {"model": ("checkpoints", "diffusers"), "vae": ("vae",), "lora": ("loras", "elsewhere")}[kind]
        assert all(folder in said.split("looked in ")[1] for folder in searched) and len(said) <= 300
    style, extra = models / "loras/style.safetensors", tmp_path / "elsewhere/extra.safetensors"
    assert folders.loras(lora_text.parse("style:0.25; extra ; none")) == (Lora(str(style), 0.25), Lora(str(extra)))
    assert folders.loras((Lora("someone/lora", 0.5),)) == (Lora("someone/lora", 0.5),)


WEBUI_FILES = {
    ("a.safetensors", "model"): "Stable-diffusion/sdxl/a.safetensors",
    ("q", "transformer"): "Stable-diffusion/q.gguf",
    ("t", "text_encoder"): "text_encoder/t.safetensors",
    ("v", "vae"): "VAE/v.safetensors",
    ("style", "lora"): "Lora/characters/style.safetensors",
    ("old", "lora"): "LyCORIS/old.safetensors",
}
INVOKE_FILES = {
    ("a.safetensors", "model"): "sd-1/main/a.safetensors",
    ("x", "model"): "sdxl/main/x",
    ("q", "transformer"): "qwen-image/main/q.gguf",
    ("clip-l", "text_encoder"): "any/clip_embed/clip-l",
    ("v", "vae"): "sdxl/vae/v",
    ("w", "vae"): "any/vae/w.safetensors",
    ("style", "lora"): "sdxl/lora/style.safetensors",
    ("new", "lora"): "0b3e8f52-6f0b-4a51-9b63-0d1f9f3c7a11/new.safetensors",
    ("n", "vae"): "1b3e8f52-6f0b-4a51-9b63-0d1f9f3c7a11/n",
    ("whole", "model"): "2b3e8f52-6f0b-4a51-9b63-0d1f9f3c7a11/whole",
}


@pytest.mark.parametrize("files", [WEBUI_FILES, INVOKE_FILES], ids=["A1111", "InvokeAI"])
@pytest.mark.parametrize("given", ["root", "root/models"])
def test_each_kind_is_looked_for_where_other_programs_have_it(
    files: dict[tuple[str, str], str], given: str, tmp_path: Path, cache: Path
) -> None:
    models = tmp_path / "root/models"
    for (_, kind), name in files.items():
        inside = {"model": "model_index.json"}.get(kind, "config.json")
        write(models / name if Path(name).suffix else models / name / inside, "{}")
    write(models / "embeddings/e.safetensors")
    folders = read_folders([tmp_path / given])
    for (name, kind), path in files.items():
        assert folders.locate(name, kind) == str(models / path), (name, kind)
        assert folders.of_any_kind(name) == str(models / path)
    for name, kind in (("style", "vae"), ("t", "lora"), ("e", "lora"), ("v.safetensors", "model")):
        with pytest.raises(ModelError, match=r"no such file, and no .*; looked in (models/)?[A-Za-z]"):
            folders.locate(name, kind)
    with pytest.raises(ModelError, match=r"nothing: no such file, and no file of that name is in .*looked in"):
        folders.of_any_kind("nothing")


def test_a_message_is_short_whatever_the_names(tmp_path: Path, cache: Path) -> None:
    root = tmp_path / ("d" * 200)
    for base in model_folders.INVOKE_BASES:
        write(root / "models" / base / "main" / "a.txt")
    write(root / comfy_paths.NAME, "".join(f"g{i}:\n  checkpoints: {'c' * 200}{i}\n" for i in range(30)))
    for i in range(30):
        (root / f"{'c' * 200}{i}").mkdir()
    with pytest.raises(ModelError) as caught:
        read_folders([root]).locate("n" * 500, "model")
    assert len(str(caught.value)) <= 300 and "looked in" in str(caught.value)


def test_a_program_that_has_no_folder_for_it(tmp_path: Path, cache: Path) -> None:
    write(tmp_path / "models/VAE/v.safetensors")
    with pytest.raises(ModelError, match=r"no LoRA of that name is in .*; it has no folder loras"):
        read_folders([tmp_path]).locate("a", "lora")
    with pytest.raises(ModelError, match=r"did you mean sdxl\?"):
        read_folders([tmp_path]).locate("sdlx", "model")


def test_what_is_there_by_that_name_comes_first(comfy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = read_folders([comfy])
    monkeypatch.chdir(comfy.parent)
    write(Path("a.safetensors"))
    assert folders.locate("a.safetensors", "transformer") == "a.safetensors"
    write(comfy.parent / "hf" / "models--qwen--a" / "snapshots" / ("0" * 40) / "config.json")
    assert folders.locate("qwen/a", "transformer") == "qwen/a"


def test_folders_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--models-dir .*nothing: no such folder"):
        read_folders([tmp_path / "nothing"])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="is no folder"):
        read_folders([tmp_path / "pipe"])
    assert read_folders([]).locate("a.safetensors", "vae") == "a.safetensors"


def test_a_search_ends(comfy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links that lead back, and more files than are looked through."""
    (comfy / "models/vae/back").symlink_to(comfy)
    monkeypatch.setattr(model_folders, "MAX_ENTRIES", 50)
    start = time.process_time()
    for i in range(100):
        write(comfy / f"models/vae/z{i}.txt")
    with pytest.raises(ModelError, match="not there: no such file"):
        read_folders([comfy]).locate("not there", "vae")
    assert time.process_time() - start < 1


def test_a_list_of_everything_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is that of all folders together, the deepest too, which a search for a name does not read."""
    for i in range(4):
        (tmp_path / f"{i}").mkdir()
        for j in range(5):
            (tmp_path / f"{i}" / f"{j}.safetensors").write_bytes(b"")
    assert len(list(model_folders.entries_below(tmp_path))) == 24
    monkeypatch.setattr(model_folders, "MAX_ENTRIES", 11)
    names = [path.relative_to(tmp_path).as_posix() for path in model_folders.entries_below(tmp_path)]
    assert len(names) == 11 and names[:4] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("link", ["itself", ".", "..", "nothing", "/proc/1/root", "/dev"])
def test_a_link_hides_no_file_beside_it(link: str, tmp_path: Path) -> None:
    """One to itself, which nothing can be asked of, and those that lead back, nowhere, and out."""
    wanted = write(tmp_path / "loras/style/a.safetensors")
    for folder in (wanted.parent, wanted.parent.parent):
        (folder / "itself").symlink_to(link)
    assert read_folders([tmp_path]).locate("a", "lora") == str(wanted)


def test_links_that_lead_back_are_followed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four deep, 30 of them make a million folders out of one."""
    wanted = write(tmp_path / "loras/z/a/a.safetensors")
    for i in range(30):
        (tmp_path / f"loras/{i}").symlink_to(".")
    monkeypatch.setattr(model_folders, "MAX_ENTRIES", 100)
    assert read_folders([tmp_path]).locate("a", "lora") == str(wanted)


def test_a_file_is_found_among_more_than_are_looked_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder below: each folder is asked for the name, and not searched for it."""
    wanted = write(tmp_path / "loras/style/wanted.safetensors")
    for i in range(100):
        write(tmp_path / f"loras/style/{i}.safetensors")
    monkeypatch.setattr(model_folders, "MAX_ENTRIES", 50)
    assert read_folders([tmp_path]).locate("wanted", "lora") == str(wanted)


@pytest.mark.parametrize("place", ["loras", "loras/style"])
def test_a_pipe_or_device_of_that_name_is_not_opened(place: str, tmp_path: Path) -> None:
    folder = tmp_path / place
    folder.mkdir(parents=True)
    os.mkfifo(folder / "pipe.safetensors")
    (folder / "zero.safetensors").symlink_to("/dev/zero")
    for name in ("pipe", "zero", "zero.safetensors"):
        with pytest.raises(ModelError, match="no such file, and no LoRA of that name"):
            read_folders([tmp_path]).locate(name, "lora")


def test_a_picture_of_what_was_found_by_name(
    tiny_folder: Path, comfy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the command line and by config.toml; the recipe has names and no paths."""
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(comfy / "models/diffusers/tiny")
    shutil.copytree(tiny_folder, comfy / "models/diffusers/tiny")
    shards = [load_file(path) for path in (tiny_folder / "vae").glob("*.safetensors")]
    vae = {name: value for shard in shards for name, value in shard.items()}
    save_file(vae, comfy / "models/vae/deep/er/v.safetensors")
    small = ("--size", "48x32", "--steps", "1", "--backend", "cpu", "--quiet", "-s", "1")
    ran = cli("a red circle", "--models-dir", str(comfy), "-m", "tiny", "--vae", "v", *small, "-o", "a.png")
    assert ran.code == 0, ran.err
    recipe = recipe_from_png(Path("a.png"))
    assert (recipe["model"], recipe["vae"]) == ("tiny", "v.safetensors")
    assert str(tmp_path).encode() not in Path("a.png").read_bytes()
    file = write(tmp_path / "config.toml", f'models_dir = "{tmp_path}{os.pathsep}{comfy}"\nmodel = "tiny"\n')
    monkeypatch.setattr(config, "path", lambda: file)
    ran = cli("a red circle", *small, "-o", "b.png")
    assert ran.code == 0, ran.err
    cli("a red circle", "--vae", "w.safetensors", *small, "-o", "c.png").refused(
        5, "w.safetensors: no such file, and no VAE of that name is in"
    )
    cli("a red circle", "--models-dir", "nowhere", *small, "-o", "c.png").refused(2, "nowhere: no such folder")


@pytest.mark.sample(0)
def test_every_command_that_opens_a_model_finds_it_by_name(
    comfy: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`info` finds what is of any kind; folders of config.toml count as well; and so does Python."""
    shutil.rmtree(comfy / "models/diffusers/tiny")
    shutil.copytree(tiny_folder, comfy / "models/diffusers/tiny")
    here = ("--models-dir", str(comfy))
    for name, layout in (("tiny", b"diffusers folder"), ("qwen/a.safetensors", None)):
        said = cli("info", name, *here)
        assert (said.code == 0 and layout in said.out) if layout else "diffusion_models/qwen/a.safetensors" in said.err
    cli("convert", "tiny", str(tmp_path / "o"), *here, "--vae", "w.safetensors").refused(5, "w.safetensors: no such")
    cli("convert", "tiny", str(tmp_path / "o"), *here, "--lora", "w.safetensors").refused(5, "w.safetensors: no such")
    assert cli("convert", "tiny", str(tmp_path / "o"), *here, "--quiet").code == 0
    record = ("parity", "record", "-o", str(tmp_path / "p.safetensors"))
    for command in (("precision",), ("bench",), ("doctor",), ("parity", "run", "--backends", "cpu,mlx"), record):
        found = cli(*command, "a", *here)  # which is one byte
        assert found.code == 5 and "checkpoints/a.safetensors" in found.err, found
        cli(*command, "a", "--models-dir", "nowhere").refused(2, "nowhere: no such folder")
    monkeypatch.setattr(config, "path", lambda: write(tmp_path / "config.toml", f'models_dir = "{comfy}"\n'))
    assert cli("info", "tiny").code == 0
    pipe = qwenimg.load("tiny", "cpu", models_dir=comfy)
    assert pipe.model_name == "tiny"
    assert pipe.resolve({"lora": "style:0.5"})["lora"] == (Lora(f"{comfy}/models/loras/style.safetensors", 0.5),)
    with pytest.raises(
        ModelError, match=r"models/loras/style.safetensors: has only 1 bytes"
    ):  # grids and batches prepare
        pipe.prepare(["a circle"], lora="style:0.5")
    with pytest.raises(UsageError, match="models_dir is 5; expected a text or a path"):
        qwenimg.load("tiny", "cpu", models_dir=[5])


def test_a_plan_of_what_is_found_by_name(comfy: Path, tiny_folder: Path) -> None:
    shutil.rmtree(comfy / "models/diffusers/tiny")
    shutil.copytree(tiny_folder, comfy / "models/diffusers/tiny")
    for model in (("tiny",), ("-m", "tiny")):
        ran = cli("plan", *model, "--models-dir", str(comfy), "--backend", "cpu", "--size", "48x32")
        assert ran.code == 0 and b"tiny" in ran.out, ran.err
    cli("plan", "tiny", "--models-dir", str(comfy), "--vae", "w.safetensors").refused(5, "w.safetensors: no such file")


def test_upscalers_and_controlnets_are_listed_with_the_option_that_takes_them(tmp_path: Path) -> None:
    """They were `unknown here`, a ControlNet's folder a UNet, and a .pth had no row."""
    comfy = tmp_path / "ComfyUI"
    for name in ("upscale_models", "controlnet", "checkpoints"):
        (comfy / "models" / name).mkdir(parents=True)
    as_torch(comfy / "models" / "upscale_models" / "4x-UltraSharp.pth", rrdbnet())
    as_safetensors(comfy / "models" / "upscale_models" / "4x-AnimeSharp.safetensors", srvgg())
    (comfy / "models" / "upscale_models" / "broken.pth").write_bytes(b"no archive")
    write_authors_file(comfy / "models" / "controlnet" / "control_v11p_sd15_canny.safetensors", UNETS["sd15"] | _SMALL)
    write_controlnet(comfy / "models" / "controlnet" / "depth", UNETS["sd15"] | _SMALL)
    found, more = folder_listing.rows(read_folders([comfy]))
    print(*found, sep="\n")
    uses = {row.name: row.use for row in found}
    assert not more and uses == {
        "4x-AnimeSharp.safetensors": "--upscale-with",
        "4x-UltraSharp.pth": "--upscale-with",
        "broken.pth": "",
        "control_v11p_sd15_canny.safetensors": "--control",
        "depth/diffusion_pytorch_model.safetensors": "--control",
    }
    assert next(row.fault for row in found if row.name == "broken.pth")


def test_a_pickle_is_found_by_name_and_refused_for_what_it_is(tmp_path: Path) -> None:
    """They were `no such file`, and had no row."""
    comfy = tmp_path / "ComfyUI"
    places = {"checkpoints": "old.ckpt", "loras": "style.pt", "vae": "v.pth", "controlnet": "canny.pth"}
    for folder, name in places.items():
        (comfy / "models" / folder).mkdir(parents=True)
        torch.save({"a.weight": torch.zeros(3)}, comfy / "models" / folder / name)
    as_torch(comfy / "models" / "vae" / "4x.pth", rrdbnet())  # in the wrong folder
    folders = read_folders([comfy])
    for (folder, file), kind in zip(places.items(), ("model", "lora", "vae", "control"), strict=True):
        for name in (file, file.partition(".")[0]):
            path = comfy / "models" / folder / file
            assert folders.locate(name, kind) == folders.of_any_kind(name) == str(path)
    here = ("--models-dir", str(comfy), "-o", "x.png")
    for options in (
        ("-m", "old"),
        ("-m", "old.ckpt"),
        ("-m", "shapes", "--lora", "style"),
        ("-m", "shapes", "--lora", "style.pt:0.5"),
    ):
        cli("a red circle", *options, *here).refused(5, "pickle, which is not read", "use safetensors, or convert it")
    ran = cli("info", "style", "--models-dir", str(comfy))
    assert b"as a PyTorch file" in ran.out and b"convert this one" in ran.out, ran
    rows = {row.name: row for row in folder_listing.rows(folders)[0]}
    assert rows.keys() == {*places.values(), "4x.pth"} and rows["4x.pth"].use == "--upscale-with"
    assert all("pickle, which is not read" in rows[name].fault for name in places.values())
    shutil.copy(comfy / "models/vae/4x.pth", comfy / "models/vae/same.pth")
    save_file({"a": torch.zeros(1)}, comfy / "models/vae/same.safetensors")  # what is read comes first
    assert folders.locate("same", "vae").endswith("same.safetensors")


@pytest.mark.sample(0)
def test_the_conversion_in_the_documentation_writes_what_is_read(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "trouble.md").read_text()
    code = text.partition('python -c "')[2].partition('" old.ckpt')[0]
    torch.save({"state_dict": {"a.weight": torch.ones(3, 2).T}, "epoch": 3}, tmp_path / "old.ckpt")
    command = [sys.executable, "-c", code, str(tmp_path / "old.ckpt"), str(tmp_path / "new.safetensors")]
    subprocess.run(command, check=True)
    assert load_file(tmp_path / "new.safetensors")["a.weight"].equal(torch.ones(2, 3))


@pytest.mark.sample(0)
def test_a_recipe_finds_its_model_and_parts_by_name(
    comfy: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--from asked for -m, though --models-dir had the model under its recorded name."""
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(comfy / "models/diffusers/tiny")
    shutil.copytree(tiny_folder, comfy / "models/diffusers/tiny")
    shards = [load_file(path) for path in (tiny_folder / "vae").glob("*.safetensors")]
    save_file({name: value for shard in shards for name, value in shard.items()}, comfy / "models/vae/v.safetensors")
    here, quick = ("--models-dir", str(comfy)), ("--backend", "cpu", "--quiet")
    small = ("--size", "48x32", "--steps", "1", "-s", "1", *quick)
    for name, options in (("a", ()), ("b", ("--vae", "v"))):
        assert cli("a red circle", *here, "-m", "tiny", *options, *small, "-o", f"{name}.png").code == 0
        ran = cli("--from", f"{name}.png", *here, *quick, "-o", f"{name}2.png")
        assert ran.code == 0 and "warning" not in ran.err, ran.err
        first, again = (Image.open(file).tobytes() for file in (f"{name}.png", f"{name}2.png"))
        assert first == again
        cli("--from", f"{name}.png", *quick, "-o", "c.png").refused(
            2 if options else 5, "v.safetensors" if options else "-m"
        )
    assert recipe_from_png(Path("b2.png"))["vae"] == "v.safetensors"


@pytest.mark.parametrize("name", ["../diffusers/tiny", "diffusers/tiny", "..", ".", "", "tiny/../tiny", "C:\\tiny"])
def test_a_name_in_a_recipe_is_no_path_in_the_folders(name: str, comfy: Path) -> None:
    folders = read_folders([comfy])
    assert origin._in_folders(name, "model", folders) is None
    assert origin._in_folders("tiny", "model", folders) == comfy / "models/diffusers/tiny"
    foreign = Replay(options={}, model=None, precision="auto", used={}, foreign_model=f"sub\\{'tiny'}")
    assert origin.with_recorded_model(LoadOptions(), foreign, folders).model == str(comfy / "models/diffusers/tiny")
    assert origin.with_recorded_model(LoadOptions(model="x"), foreign, folders).model == "x"
    assert origin.with_recorded_model(LoadOptions(), foreign, None).model is None


@pytest.mark.parametrize("part", PARTS)
def test_a_recorded_part_is_found_among_files_of_its_kind(tmp_path: Path, part: str) -> None:
    """The network by which Stable Cascade sees a picture was looked for in folders of a kind that there is not."""
    kind = kind_of(part)
    place = tmp_path / KINDS[kind][0] / "own.safetensors"
    place.parent.mkdir()
    place.write_bytes(bytes(9))
    replay = SimpleNamespace(used={part: "own"})
    found = origin.with_recorded_parts(LoadOptions(), replay, read_folders((tmp_path,)))  # type: ignore[arg-type]
    assert found.parts == {part: place}
