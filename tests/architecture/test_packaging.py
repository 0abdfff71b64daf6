"""What is shipped: the wheel and the sdist against the tree, the version, and the dependencies against the imports."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from PIL import Image
from support import rules
from support.rules import ROOT, sources

from qwenimg.common.base.version import __version__

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FOLDERS = ("backends", "common", "cli")
# The most that a core install may bring; each must be imported somewhere.
AGREED = {"click", "huggingface_hub", "numpy", "pillow", "platformdirs", "pyyaml", "safetensors", "tokenizers", "tqdm"}
MODULES = {"pillow": "PIL", "pyyaml": "yaml"}  # where the module has another name
OPTIONAL = {
    "certifi": "certificates for a Python without any; huggingface_hub brings it along",
}
FRAMEWORKS = {"mlx", "torch"}
RAY = {"ray"}  # of the extra of that name
MCP = {"mcp"}  # of the extra of that name
SERVE = {"prometheus_client", "starlette", "uvicorn"}  # of the extra `serve`, and starlette imports python-multipart


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PIP_NO_INDEX": "1", **variables}
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def build(kind: str, tree: Path, out: Path) -> Path:
    """hatchling itself, without an isolated environment, so without network."""
    run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", out, cwd=tree)
    [made] = out.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def tree_names() -> set[str]:
    """What the tree says that the wheel must hold, apart from its metadata."""
    found = {"qwenimg/__init__.py", "qwenimg/__main__.py", "qwenimg/py.typed"}
    for folder in FOLDERS:
        files = (path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file())
        found |= {f"qwenimg/{path.as_posix()}" for path in files if "__pycache__" not in path.parts}
    return found | {f"qwenimg/diffusers/{path.name}" for path in (ROOT / "src/qwenimg/diffusers").glob("*.py")}


@pytest.mark.sample(0)
def test_the_wheel_is_the_tree(wheel):
    inside = names(wheel)
    info = {name for name in inside if name.startswith(f"qwenimg-{__version__}.dist-info/")}
    print(f"{wheel.name}: {len(inside)} files, {wheel.stat().st_size / 1e3:.0f} kB, {len(info)} of metadata")
    assert inside - info == tree_names()
    assert {name.rpartition("/")[2] for name in info} == {
        "METADATA",
        "WHEEL",
        "RECORD",
        "LICENSE",
        "entry_points.txt",
    }
    assert any(name.startswith("qwenimg/common/data/") for name in inside)
    assert len(inside) > 40
    assert wheel.stat().st_size < 100e6


@pytest.mark.sample(0)
def test_a_wheel_from_the_sdist_is_the_same(wheel, tmp_path):
    sdist = build("sdist", ROOT, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(tmp_path / "tree", filter="data")
    print(f"{sdist.name}: {len(inside)} files, {sdist.stat().st_size / 1e3:.0f} kB")
    [tree] = (tmp_path / "tree").iterdir()
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "tests/conftest.py", "Makefile"} <= inside
    outside = ("src/qwenimg/common", "src/qwenimg/backends", "src/qwenimg/cli", ".venv", "demo", ".git/", "build")
    assert [name for name in inside if name.startswith(outside)] == []
    again = build("wheel", tree, tmp_path / "again")
    assert names(again) == names(wheel)


def test_the_wheel_installs_and_runs(wheel, tmp_path):
    """From its files alone: not the tree, whose editable install is on the same path behind it."""
    target = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", target, wheel)
    installed = {path.name for path in target.iterdir()}
    assert installed - {"bin"} == {"qwenimg", f"qwenimg-{__version__}.dist-info"}
    code = "import qwenimg, qwenimg.backends, qwenimg.common.pipeline.pipeline, qwenimg.cli; print(qwenimg.__file__)"
    where = Path(run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(target)).strip())
    assert where.is_relative_to(target)
    shown = run(sys.executable, target / "bin" / "qwenimg", "--version", cwd=tmp_path, PYTHONPATH=str(target))
    print(shown.strip())
    assert __version__ in shown


@pytest.mark.sample(0)
def test_the_wheel_draws_in_a_fresh_environment(wheel, tmp_path):
    """Draw as a user does, by the command that the wheel brings, with packages from the folders where the tests find
    them. A folder that a .pth file names is not searched for .pth files, so the editable install is out of reach."""
    venv.create(tmp_path / "fresh", with_pip=False)
    python = tmp_path / "fresh" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", wheel)
    where = Path(run(python, "-c", "import qwenimg; print(qwenimg.__file__)", cwd=tmp_path, PYTHONPATH="").strip())
    assert where.is_relative_to(tmp_path / "fresh")
    packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (where.parent.parent / "packages.pth").write_text("\n".join(packages), encoding="utf-8")
    drawn = tmp_path / "circle.png"
    asked = ("a red circle", "-o", drawn, "--seed", "1", "--steps", "8", "--backend", "cpu")
    shown = run(python.with_name("qwenimg"), *asked, cwd=tmp_path, PYTHONPATH="")
    assert Path(shown.strip()) == drawn
    code = "import qwenimg; print(qwenimg.__file__)"
    assert run(python, "-c", code, cwd=tmp_path, PYTHONPATH="").strip() == str(where)
    red, green, blue = Image.open(drawn).convert("RGB").getpixel((128, 128))
    print("in the middle", red, green, blue)
    assert red > 150 and green < 80 and blue < 80


@pytest.mark.sample(0)
def test_the_built_in_model_is_shipped(tmp_path):
    """A stand-in of a few bytes in its place, through sdist, wheel and installation: found by the program as files."""
    tree, place = tmp_path / "tree", "common/data/shapes-v1"
    hidden = shutil.ignore_patterns("__pycache__", "shapes-v1")
    for name in ("src", *FOLDERS):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=hidden)
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, tree / name)
    parts = {"transformer", "text_encoder", "vae", "tokenizer", "scheduler"}
    files = {"model_index.json", "MODEL_CARD.md", "SHA256SUMS", *(f"{part}/config.json" for part in parts)}
    files |= {"vae/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors", "tokenizer/merges.txt"}
    for name in files:
        (tree / place / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / place / name).write_bytes(b"{}")
    with tarfile.open(build("sdist", tree, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "again", filter="data")
    [again] = (tmp_path / "again").iterdir()
    made = build("wheel", again, tmp_path / "wheel")
    inside = {name.removeprefix(f"qwenimg/{place}/") for name in names(made) if name.startswith(f"qwenimg/{place}/")}
    assert inside == files
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", tmp_path / "site", made)
    code = "from qwenimg.common.shapes import builtin; print(builtin.present(), builtin.folder())"
    shown = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site")).split(maxsplit=1)
    assert shown == ["True", f"{tmp_path / 'site' / 'qwenimg' / place}\n"]


def test_one_version():
    assert PROJECT["version"] == __version__
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## (\S+)", changes, re.MULTILINE)[1] == __version__


# Dependencies


def requirement(text: str) -> str:
    return re.match(r"[A-Za-z0-9_.-]+", text)[0]


def imports(*folders: str) -> set[str]:
    """The top-level packages that the files of these folders import, wherever in them."""
    texts = [path.read_text(encoding="utf-8") for path in sources(*folders)]
    found = {name for text in texts for name in _imported(text)}
    return found - sys.stdlib_module_names - {"qwenimg", "__future__", ""}


def _imported(text: str) -> set[str]:
    return {name for _, node in rules.within(text) for name in rules.imported(node)}


def test_every_core_dependency_is_used_and_every_import_declared():
    declared = {requirement(text) for text in PROJECT["dependencies"]}
    used = imports("src", "common", "cli") - SERVE - RAY - MCP
    print(f"declared {sorted(declared)}, imported {sorted(used)}")
    assert declared <= AGREED
    assert {MODULES.get(name, name) for name in declared} == used - OPTIONAL.keys()
    assert OPTIONAL.keys() <= used - declared


def test_frameworks_and_references_are_extras():
    extras = {name: {requirement(text) for text in texts} for name, texts in PROJECT["optional-dependencies"].items()}
    core = {requirement(text) for text in PROJECT["dependencies"]}
    assert (extras["mlx"], extras["torch"]) == ({"mlx"}, {"torch"})
    assert extras["ray"] == RAY and not RAY & extras["dev"]
    assert extras["mcp"] == MCP and imports("cli/assistants") == MCP
    assert extras["serve"] == {"prometheus-client", "python-multipart", "starlette", "uvicorn"}
    assert imports("cli/serve") >= SERVE
    assert not SERVE & imports("src", "common", "cli/commands")
    assert {"diffusers", "transformers"} <= extras["dev"]
    assert not extras["dev"] & FRAMEWORKS
    assert not core & (FRAMEWORKS | extras["dev"])
    assert imports("backends/torch") - core == {"torch"}
    assert imports("backends/mlx") - core == {"mlx"}
    assert not imports("src", "common", "cli", "backends") & {"transformers", "diffusers", "mflux"}


def test_the_arm_of_mflux_imports_nothing_of_ours():
    """Its Python may have mflux alone."""
    imported = {
        name
        for file in ("mflux_arm", "slopes")
        for name in _imported((ROOT / "tools" / "against" / f"{file}.py").read_text())
    }
    assert {"mflux", "slopes"} <= imported and imported.isdisjoint({"qwenimg", "torch"})


def test_the_tests_use_a_torch_that_is_pinned():
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    assert pinned == ["torch==2.13.0"]
