"""Each option of opening a model is known in one place, and everything else is made from it."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import write_call_types
from support.rules import ROOT, sources

import qwenimg
from qwenimg.cli import config
from qwenimg.cli.commands.generate import generate
from qwenimg.cli.help import SECTIONS
from qwenimg.common.base.errors import UsageError
from qwenimg.common.families.load_options import LOAD_OPTIONS, LoadOptions, from_call, load_options_of
from qwenimg.common.request.option import Option
from qwenimg.common.request.parts import PARTS

# A new option, and a new part

FIELD = """\
    halo: str | None = option(None, Option(
        help="how the weights shine", call="the weights' shine", section="Model", metavar="HOW", flags=("--shine",),
        checks=_check_quantize, config=True,
    ))
"""
PART = """\
    "text_encoder_3": replace(_FILE, again="text_encoder"),
"""
SCRIPT = """
import os
from pathlib import Path
import qwenimg
from support.fake_pipeline import FakePipeline
from qwenimg.cli import config
from qwenimg.cli.main import run
from qwenimg.common.hub import open_model
from qwenimg.common.request.recipe import check_recipe
from support.recipe_cases import RECIPE

told, codes = [], []

def opened(opening, *more):
    told.append((opening.halo, *map(str, opening.parts.values())))
    return FakePipeline()

def draw(*args):
    codes.append(run([*args, "-o", "{index}.png", "--overwrite", "--quiet"]))

qwenimg.open_pipeline = opened
config.path = lambda: Path("config.toml")
draw("a ring", "--halo", "8")
draw("a ring", "--shine=6")
draw("a ring", "--halo", "5")
os.environ["QWENIMG_HALO"] = "4"
draw("a ring")
os.environ["QWENIMG_HALO"] = "3"
draw("a ring")
del os.environ["QWENIMG_HALO"]
Path("config.toml").write_text("halo = '8'\\ntext_encoder_3 = 'x'\\n")
draw("a ring")
Path("config.toml").write_text("halo = 8\\n")
draw("a ring")
Path("config.toml").write_text("")
three = [word for name in "abc" for word in ("--text-encoder", name)]
draw("a ring", *three)
draw("a ring", *three, "--text-encoder", "d")
qwenimg.load("shapes", halo="8", text_encoder_3="x")
try:
    qwenimg.load("shapes", halo="much")
except qwenimg.UsageError as error:
    print(error)
print(codes)
print(told)
print(check_recipe(RECIPE | {"text_encoder_3": "x"}, Path("x"))["text_encoder_3"])
print("halo: the weights' shine." in qwenimg.load.__doc__, "text_encoder_3: a folder" in qwenimg.load.__doc__)
run(["--help-all"])
run(["plan", "shapes", "--halo", "5"])
"""


def copy_of_the_source(folder: Path) -> Path:
    """The package in `folder`, and the tool that writes its keywords."""
    for name in ("common", "backends", "cli"):
        ignored = shutil.ignore_patterns("__pycache__", "shapes-v1")
        shutil.copytree(ROOT / name, folder / "src" / "qwenimg" / name, ignore=ignored)
    shutil.copy(ROOT / "src" / "qwenimg" / "__init__.py", folder / "src" / "qwenimg")
    shutil.copytree(ROOT / "src" / "qwenimg" / "diffusers", folder / "src" / "qwenimg" / "diffusers")
    (folder / "tools").mkdir()
    (folder / "common").symlink_to(folder / "src" / "qwenimg" / "common")
    shutil.copy(ROOT / "tools" / "write_call_types.py", folder / "tools")
    return folder / "src" / "qwenimg"


def insert(path: Path, before: str, text: str) -> None:
    source = path.read_text(encoding="utf-8")
    assert source.count(before) == 1, path
    path.write_text(source.replace(before, text + before), encoding="utf-8")


def python(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join((str(folder / "src"), str(ROOT / "tests")))
    ran = subprocess.run(
        [sys.executable, *command], cwd=folder, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran


@pytest.mark.sample(0)
def test_a_new_option_is_one_field_and_a_new_part_one_row(tmp_path: Path) -> None:
    """A field is added to `LoadOptions` and a row to the parts in a copy of the source, and nothing else: the command
    line, the environment, config.toml, `qwenimg.load`, plan, recipes, their help and a message know both."""
    package = copy_of_the_source(tmp_path)
    insert(package / "common" / "families" / "load_options.py", "    max_memory: str | int | None = option(", FIELD)
    insert(package / "common" / "request" / "parts.py", '    "vae": replace(', PART)
    python(tmp_path, "tools/write_call_types.py")
    ran = python(tmp_path, "-c", SCRIPT)
    print(ran.stdout[:600], ran.stderr)
    lines = [line for line in ran.stdout.splitlines() if not line.endswith(".png")]
    assert lines[0] == "--quantize 'much': cannot read 'much'; give 8, 6 or 4, or by part: text=8,transformer=4"
    assert lines[1] == "[0, 0, 2, 0, 2, 0, 2, 0, 2]"
    assert lines[2] == str([("8",), ("6",), ("4",), ("8", "x"), (None, "a", "b", "c"), ("8", "x")])
    assert lines[3:5] == ["x", "True True"]
    assert "QWENIMG_HALO in the environment: --quantize '3': cannot" in ran.stderr
    assert "config.toml: halo is '8'; expected str" in ran.stderr
    assert "--text-encoder: 4 files; a model has three text encoders at most" in ran.stderr
    assert ran.stderr.count("--quantize '5': cannot read '5'") == 2, "generate and plan"
    shown = "\n".join(lines)
    assert re.search(r"--halo, --shine HOW +How the weights shine\.", shown) and "--text-encoder-3" not in shown


LORAS = ("common/weights/loras/peft_config.py", "common/parts/texts/text_lora_names.py")
# SDXL's second text encoder in an embedding, and a vision tower beside a language model
SECOND_TEXTS = ("common/parts/texts/embedding_file.py", "common/parts/texts/towers.py")
# Families with several text encoders, or with a vision tower in a file of its own
SEVERAL = ("stable_diffusion", "sd3", "flux", "chroma", "longcat", "pixart", "hunyuan", "qwen_image", "qwen_image_21")
TWO_TEXTS = tuple(f"common/families/{name}/" for name in SEVERAL)


@pytest.mark.parametrize(
    ("name", "uses"),
    [
        (
            "cache_prompts",
            {
                "common/hub/open_model.py",
                "common/runtime/text_store.py",
                "common/hub/opened_writer.py",
                "cli/commands/describe.py",
                "cli/commands/mcp.py",
                "cli/commands/plan.py",
                "cli/commands/rewrite.py",
                "cli/commands/serve.py",
            },
        ),
        ("text_encoder_2", {*LORAS, *SECOND_TEXTS}),
    ],
)
def test_an_option_stands_where_it_is_known_and_where_it_is_used(name: str, uses: set[str]) -> None:
    """`cache_prompts` stands in few files, and `text_encoder_2` in 12 beside those of its family."""
    files = [*sources("common", "cli", "backends"), ROOT / "src" / "qwenimg" / "__init__.py"]
    word = re.compile(rf"\b{name}\b|--{name.replace('_', '-')}\b")
    found = {path.relative_to(ROOT).as_posix() for path in files if word.search(path.read_text(encoding="utf-8"))}
    outside = {path for path in found if not path.startswith(TWO_TEXTS)}
    print(name, len(outside), *sorted(outside))
    known = {"common/request/parts.py"} if name in PARTS else {"common/families/load_options.py"}
    assert outside == known | uses | {"src/qwenimg/__init__.py"}  # the last is written by tools/write_call_types.py


# One rule for each thing


def test_the_keywords_of_load_are_those_of_an_opening() -> None:
    text = write_call_types.LOAD.read_text(encoding="utf-8")
    assert text == write_call_types.load_text(text), "run: python tools/write_call_types.py"
    parameters = inspect.signature(qwenimg.load).parameters
    assert parameters.keys() == {*LOAD_OPTIONS, "notify", "unknown"}
    assert list(parameters)[:3] == ["model", "backend", "precision"]
    for name, one in LOAD_OPTIONS.items():
        assert parameters[name].default == one.default, name
        assert re.search(rf"^ +{name}: \S.{{5}}", qwenimg.load.__doc__ or "", re.MULTILINE), name


@pytest.mark.parametrize("one", LOAD_OPTIONS.values(), ids=lambda one: one.name)
def test_an_option_is_whole(one: Option) -> None:
    [param] = [param for param in generate.params if param.name == one.name]
    assert {f"--{one.dashed}", *one.flags} == set(param.opts)
    assert one.again or (one.help and not one.help.endswith("."))
    assert (one.name in SECTIONS["Model"]) is not bool(one.again)
    assert (one.name in config.KEYS) is one.config


def test_each_option_reaches_the_opening(tmp_path: Path) -> None:
    """By the values of a command line and by those of a call."""
    said: dict[str, Any] = {
        "model": "x", "backend": "cpu", "compile": "on", "check": True, "preset": "fast",
        "precision": "fp32", "fallback": True,
        "quantize": "8", "max_memory": "6GB", "cache_prompts": True, "offline": True, "models_dir": (tmp_path,),
        "wildcards": (tmp_path,), "refiner": "y", "tokenizer": Path("t"), "prediction": "v", "variant": "edit",
        "ip_encoder": Path("e"), "preview_with": Path("p"), "rewrite_with": "w",
        **{name: Path(name) for name in PARTS},
    }  # fmt: skip
    assert said.keys() == LOAD_OPTIONS.keys()
    found = load_options_of(said)
    assert {name: found.value(name) for name in LOAD_OPTIONS} == said
    assert found.parts == {name: Path(name) for name in PARTS} and found.limit == 6 * 10**9
    in_python = {"quantize": 8, "models_dir": str(tmp_path), "wildcards": [tmp_path], "tokenizer": "t"}
    in_python |= {name: name for name in PARTS}
    assert from_call(said | in_python) == found
    assert load_options_of(dict.fromkeys(LOAD_OPTIONS)) == LoadOptions() == from_call({})


@pytest.mark.parametrize(
    ("name", "value"),
    [("preset", "x"), ("precision", "fp9"), ("quantize", "5"), ("max_memory", "much"), ("prediction", "y"),
     ("compile", "perhaps")],
)  # fmt: skip
def test_a_wrong_form_is_refused_on_construction(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"{name.replace('_', '[-_]')}.* '?{value}"):
        LoadOptions(**{name: value})
