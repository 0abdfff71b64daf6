"""The built-in model around its weights: when it is used, what it says, what it refuses, and that nothing else changes.

Its place is a toy here, and in the last tests a folder of random weights; what ships is checked where it is there.
"""

from __future__ import annotations

import hashlib
import json
import socket
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from huggingface_hub import constants
from random_model import write_random_model
from support.cli_runner import Library, cli
from support.recipe_cases import recipe_from_png
from support.refusals import refused
from training.config import parse_sizes

import qwenimg
from qwenimg.common.families import catalog
from qwenimg.common.families.qwen_image.checkpoint import open_folder
from qwenimg.common.hub import resolve
from qwenimg.common.numbers.sizes import parse_aspect
from qwenimg.common.pictures.png import read_text
from qwenimg.common.request.request import Defaults
from qwenimg.common.shapes import builtin
from qwenimg.common.shapes.words import parse

REAL = "the smallest: qwenimg pull sd15 (4.3 GB); all that fit: qwenimg plan"
SMALL = replace(catalog.BUILT_IN, width=32, height=48, steps=2)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(socket, "socket", None)
    return tmp_path / "hub"


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy") / "shapes-v1"
    write_random_model(folder)
    return folder


@pytest.fixture
def placed(toy: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The toy in the place of the built-in model, at toy sizes."""
    monkeypatch.setattr(builtin, "folder", lambda: toy)
    monkeypatch.setattr(catalog, "BUILT_IN", SMALL)
    monkeypatch.setitem(catalog.KNOWN, SMALL.name, SMALL)
    monkeypatch.setattr(builtin, "TRAINED_SIZES", ((48, 32), (48, 48)))
    return toy


@pytest.fixture
def missing(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(builtin, "folder", lambda: tmp_path / "nowhere")
    return tmp_path / "nowhere"


@pytest.fixture
def library(placed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Library:
    """A stand-in for the models; which one is meant is decided before it is asked."""
    found = Library()
    monkeypatch.setattr(qwenimg, "open_pipeline", found.open_pipeline)
    monkeypatch.chdir(tmp_path)
    return found


# Which model


@pytest.mark.parametrize("given", [None, "shapes", "shapes-v1", "Shapes"])
def test_what_means_the_built_in_model(placed: Path, given: str | None):
    found = resolve.resolve(given)
    assert (found.folder, found.name, found.known, found.revision) == (placed, "shapes-v1", SMALL, None)
    assert resolve.is_built_in(given)


@pytest.mark.parametrize("given", ["qwen-image", "Qwen/Qwen-Image", "someone/else", "shape", "nowhere/at/all"])
def test_it_never_stands_in_for_another(placed: Path, given: str):
    assert "shapes" not in refused(resolve.resolve, given) or given == "shape"
    assert not resolve.is_built_in(given)


def test_the_default_model_comes_first_where_it_is_there(placed: Path, cache: Path):
    snapshot = cache / "models--Qwen--Qwen-Image" / "snapshots" / ("0" * 40)
    write_random_model(snapshot)
    assert resolve.resolve(None).name == "qwen-image" and not resolve.is_built_in(None)
    (snapshot / "vae" / "config.json").unlink()  # a pull that was cut off is a model that was asked for
    text = refused(resolve.resolve, None)
    assert "incomplete" in text and text.endswith("-m shapes-v1") and not resolve.is_built_in(None)
    assert not refused(resolve.resolve, "qwen-image").endswith("-m shapes-v1")


def test_the_model_to_pull_first_is_drawn_with_where_it_alone_is_there(placed: Path, cache: Path):
    """Also if a pull of it was cut off, which is then said."""
    snapshot = cache / "models--Tongyi-MAI--Z-Image-Turbo" / "snapshots" / ("0" * 40)
    (snapshot / "transformer").mkdir(parents=True)
    assert resolve.is_built_in(None)
    (snapshot / "transformer" / "diffusion_pytorch_model.safetensors").write_bytes(b"")
    assert refused(resolve.resolve, None).startswith("z-image-turbo: ") and not resolve.is_built_in(None)
    assert refused(resolve.resolve, None, without=frozenset({"vae"})).startswith("qwen-image")
    write_random_model(cache / "models--Qwen--Qwen-Image" / "snapshots" / ("0" * 40))
    assert resolve.resolve(None).name == "qwen-image"


def test_a_folder_of_that_name_comes_first(placed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shapes").mkdir()
    assert resolve.resolve("shapes").folder == Path("shapes") and not resolve.is_built_in("shapes")


def test_an_installation_without_it(missing: Path):
    assert refused(resolve.resolve, None).endswith("qwenimg pull qwen-image")
    assert str(missing) in refused(resolve.resolve, "shapes") and "tools/train.py" in refused(resolve.resolve, "shapes")
    assert not resolve.is_built_in(None) and not resolve.is_built_in("shapes")
    cli("a red circle").refused(5, "qwenimg pull qwen-image")
    cli("a red circle", "-m", "shapes").refused(5, "not in this installation")


def test_it_cannot_be_pulled(placed: Path):
    cli("pull", "shapes").refused(5, "built in", "-m shapes")


# What it says


def test_the_notice_counts(toy: Path):
    model = open_folder(toy)
    count = sum(part.plan.parameters for part in model.components.values())
    model.close()
    text = builtin.notice(model.parameters)
    print(text)
    about = f"{count / 1e6:.1f} M parameters, draws coloured shapes only"
    assert text == f'built-in demo model "shapes" ({about}); real models: qwenimg plan'
    assert 0.1e6 < count < 10e6


def test_load_tells_only_whoever_named_no_model(placed: Path):
    told: list[tuple[str, str]] = []
    for model in (None, "shapes"):
        pipe = qwenimg.load(model, "cpu", "fp32", notify=lambda *event: told.append(event))
        assert pipe.model_name == "shapes-v1"
        d = pipe.defaults
        assert (d.width, d.height, d.steps, d.guidance, d.negative_prompt) == (32, 48, 2, 3.0, " ")
        assert d.size(Fraction(2, 3)) == (32, 48)
        pipe.close()
    assert [kind for kind, _ in told] == ["notice"] and told[0][1].startswith("built-in demo model")


@pytest.mark.parametrize("prompt", ["a cat in a hat", "red", "画一只猫", "?!", "a" * 5000])
def test_a_prompt_without_a_shape_is_refused(library: Library, prompt: str):
    assert not parse(prompt).has_noun
    cli(prompt).refused(5, "draws coloured shapes only", REAL, "-m shapes")
    assert not library.calls
    assert cli(prompt, "-m", "shapes").code == 0
    assert library.calls[-1]["model"] == "shapes"


def test_one_bad_line_of_a_prompt_file_refuses_all(library: Library):
    cli("--prompt-file", "-", stdin=b"a red circle\na lighthouse\n").refused(5, "'a lighthouse'")
    assert not library.calls
    assert cli("--prompt-file", "-", stdin="a red circle\n两个蓝色的星星\n".encode()).code == 0


def test_unknown_words_are_named_once(library: Library):
    ran = cli("a fluffy red circle, fluffy", "-n", "ugly frogs, red")
    assert ran.code == 0
    warned = [line for line in ran.err.splitlines() if "does not know" in line]
    assert warned == [
        "qwenimg: warning: words it does not know: fluffy",
        "qwenimg: warning: words of the negative prompt it does not know: ugly, frogs",
    ]
    assert "does not know" not in cli("一个红色的圆在左边", "--seed", "1").err
    many = cli("a circle " + " ".join(f"x{i}y" for i in range(40)), "--quiet").err
    assert "and 32 more" in many and all(len(line) <= 300 for line in many.splitlines())
    assert "\x1b" not in cli("a circle \x1b[2J白纸").err


def test_words_are_no_matter_where_another_model_is_named(library: Library, monkeypatch: pytest.MonkeyPatch):
    for args in (("a cat", "-m", "some/where"), ("a cat", "-m", "qwen-image")):
        ran = cli(*args)
        assert ran.code == 0 and "does not know" not in ran.err
    monkeypatch.setenv("QWENIMG_MODEL", "some/where")
    assert cli("a cat").code == 0


def test_a_size_that_it_was_not_trained_at_is_named(library: Library):
    def warned(*args: str) -> list[str]:
        ran = cli("a red circle", *args)
        assert ran.code == 0
        return [line for line in ran.err.splitlines() if "trained at" in line]

    for size in ("64x32", "49x50", "32x40"):  # longer, larger and smaller
        told = f"it was trained at 48x32, 48x48; at {size} shapes may be missing or drawn twice"
        assert warned("--size", size) == [f"qwenimg: warning: {told}"]
    for size in ("48x48", "32x48", "49x48", "45x36"):
        assert not warned("--size", size)
    assert not warned("--size", "64x48", "-m", "some/where")


# A picture


@pytest.mark.sample(0)
def test_pictures_without_a_network_and_again(placed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QWENIMG_BACKEND", "cpu")
    ran = cli("a red circle", "-s", "1", "-o", "a.png")
    lines = ran.err.splitlines()
    assert ran.code == 0 and ran.paths == [tmp_path / "a.png"]
    assert lines[1].startswith('built-in demo model "shapes" (') and lines[1].endswith("real models: qwenimg plan")
    assert lines[-1].startswith("real model: qwenimg pull ") and lines[-1].endswith(REAL)
    recipe = recipe_from_png(tmp_path / "a.png")
    assert (recipe["model"], recipe["width"], recipe["height"], recipe["steps"]) == ("shapes-v1", 32, 48, 2)
    assert "Model: shapes-v1" in read_text(tmp_path / "a.png")["parameters"]
    again = cli("--from", "a.png", "-o", "b.png")
    assert again.code == 0 and "built-in demo" not in again.err
    assert (recipe_from_png(tmp_path / "b.png")["noise_sha256"]) == recipe["noise_sha256"]
    quiet = cli("a red circle", "--quiet", "-o", "c.png")
    assert quiet.err.splitlines() == [lines[1]]  # nobody is left to think that it was another model
    assert cli("a red circle", "-m", "shapes", "--quiet", "-o", "d.png").err == ""


def test_info_knows_it_by_name(placed: Path):
    shown = cli("info", "shapes").out.decode()
    assert "pipeline: Qwen-Image" in shown and "transformer: " in shown
    cli("info", "qwen-image").refused(5, "qwenimg pull qwen-image")
    cli("info", "nothing.png").refused(5, "nothing.png: does not exist")


def test_import_is_light():
    code = "import sys, qwenimg.common.shapes.builtin as b; b.present()\n"
    code += "print([m for m in ('numpy', 'torch', 'mlx', 'huggingface_hub', 'PIL') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


# What ships


def test_the_sizes_are_those_of_its_training():
    """As its own record tells: what is drawn without a warning."""
    runs = json.loads((builtin.folder() / "training.json").read_text(encoding="utf-8"))
    sizes = {size for run in runs if run["stage"] == "dit" for size in parse_sizes(run["sizes"])}
    print(sorted(sizes))
    assert sizes == set(builtin.TRAINED_SIZES)


@pytest.mark.parametrize("aspect", ["1:1", "16:9", "9:16", "4:3", "3:4", "3:2", "2:3", "5:4"])
def test_the_usual_aspects_are_drawn_without_a_warning(aspect: str):
    r = catalog.BUILT_IN
    size = Defaults(width=r.width, height=r.height).size(parse_aspect(aspect))
    print(f"{aspect}: {size[0]}x{size[1]}")
    assert builtin.other_sizes([size]) is None


def test_the_files_are_those_that_are_pinned():
    folder = builtin.folder()
    files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file() and p.name != "SHA256SUMS"}
    lines = {f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}" for name, path in files.items()}
    assert lines == {*(folder / "SHA256SUMS").read_text(encoding="ascii").splitlines()}
    assert {"MODEL_CARD.md", "model_index.json", "tokenizer/vocab.json"} <= files.keys()
    assert sum(path.stat().st_size for path in files.values()) < 20e6
