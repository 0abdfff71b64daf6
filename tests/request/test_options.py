"""Each option of a picture is known in one place, and everything else is made from it."""

from __future__ import annotations

import ast
import json
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

import qwenimg.diffusers
from qwenimg.cli import config
from qwenimg.cli.commands.generate import generate
from qwenimg.cli.main import run
from qwenimg.common.base.errors import ModelError, QwenimgError, UsageError
from qwenimg.common.families.registry import FAMILIES
from qwenimg.common.jobs.image_options import ALL, TEXT_OPTIONS, check, parse, seeds, typed
from qwenimg.common.jobs.prompt_file import _options_of
from qwenimg.common.jobs.schema import request_schema
from qwenimg.common.request import names
from qwenimg.common.request.family_options import FAMILY_OPTIONS
from qwenimg.common.request.option import Option, no_effect, recorded
from qwenimg.common.request.request import OPTIONS, Request, request_of
from qwenimg.diffusers import keywords
from qwenimg.diffusers.call_types import CallKeywords

# A new option

FIELD = """\
    glow: float = option(0.5, Option(
        help="{bounds}, how much it glows", section="Picture", metavar="X", flags=("--shine",), least=0, most=2,
        open="least", config=True, recorded="changed", needs="guidance",{more}
    ))
"""
OF_A_FAMILY = """
        unsupported="this model is dark", after="schedule","""
SCRIPT = """
import json, sys
from pathlib import Path
import qwenimg
from support.fake_pipeline import FakePipeline
from qwenimg.cli import config
from qwenimg.cli.main import run
from qwenimg.common.request.call_options import check_names
from qwenimg.common.pipeline.pipeline import Pipeline
from qwenimg.common.request.request import OPTIONS, request_of
from qwenimg.common.request.option import recorded, no_effect
from qwenimg.common.request.recipe import check_recipe
from support.recipe_cases import RECIPE, saved
from qwenimg.common.request.recipe import png_text

asked = []

class Pipe(FakePipeline):
    def stream(self, prompt, **given):
        asked.append(given.pop("glow", None))
        yield from super().stream(prompt, **given)

qwenimg.open_pipeline = lambda opening, notify: Pipe()
config.path = lambda: Path("config.toml")
codes = []

def draw(*args):
    codes.append(run([*args, "-o", "{index}.png", "--overwrite"]))

draw("a ring", "--glow", "1.5")
draw("a ring", "--shine=0.25", "--quiet")
draw("a ring", "--glow", "0")
draw("a ring", "--glow", "much")
Path("lines").write_text('{"prompt": "a ring", "glow": 2}\\n')
draw("--prompt-file", "lines")
Path("lines").write_text('{"prompt": "a ring", "glow": 3}\\n')
draw("--prompt-file", "lines")
saved(Path("old.png"), png_text(RECIPE | {"model": "shapes", "glow": 0.75}))
draw("--from", "old.png")
Path("config.toml").write_text("glow = 1\\n")
draw("a ring")
check_names(["glow"])
request = request_of({"prompt": "a ring", "glow": 2})
print(codes, asked, "glow: above 0 to 2" in Pipeline.__call__.__doc__)
recipe = check_recipe(RECIPE | {"glow": 1}, Path("x"))
print(recorded(OPTIONS.values(), request.value, frozenset())["glow"], recipe["glow"])
print(no_effect(OPTIONS["glow"], 2.0, ("glow",), frozenset(), "at guidance 1"))
print(no_effect(OPTIONS["glow"], 2.0, (), frozenset(["guidance"]), "at guidance 1"))
run(["--help-all"])
run(["--help", "--json"])
"""


@pytest.mark.sample(0)
@pytest.mark.parametrize(
    ("file", "before", "more"),
    [("request.py", "    sampler: str = option(", ""), ("family_options.py", "    layers: int = option(", OF_A_FAMILY)],
)
def test_a_new_option_is_one_field(tmp_path: Path, file: str, before: str, more: str) -> None:
    """A field is added to `Request`, or for an option of one family to `FamilyOptions`, in a copy of the source, and
    nothing else: the command line, config.toml, prompt files, recipes, --from, calls from Python, their help, the
    schema, the bounds and a warning know it."""
    for folder in ("common", "backends", "cli"):
        ignored = shutil.ignore_patterns("__pycache__", "data")
        shutil.copytree(ROOT / folder, tmp_path / "src" / "qwenimg" / folder, ignore=ignored)
    shutil.copy(ROOT / "src" / "qwenimg" / "__init__.py", tmp_path / "src" / "qwenimg")
    path = tmp_path / "src" / "qwenimg" / "common" / "request" / file
    text = path.read_text()
    assert text.count(before) == 1
    path.write_text(text.replace(before, FIELD.replace("{more}", more) + before))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path / "src"), str(ROOT / "tests")))}
    command = [sys.executable, "-c", SCRIPT]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    lines = [line for line in ran.stdout.splitlines() if not line.endswith(".png")]
    print(*lines[:3], sep="\n")
    assert lines[0] == "[0, 0, 2, 2, 0, 5, 0, 0] [1.5, 0.25, 2, 0.75, 1] True"
    assert lines[1:3] == ["2.0 1.0", "glow has no effect at guidance 1"]
    assert lines[3] == ("glow has no effect: this model is dark" if more else "None")
    assert ran.stderr.count("glow is 0.0; choose above 0 to 2") == 1 and "glow is 3; choose above 0 to 2" in ran.stderr
    shown = "\n".join(lines)
    assert re.search(r"--glow, --shine X +Above 0 to 2, how much it glows\.", shown)
    schema = json.loads(shown[shown.index("\n{\n") :])["properties"]["glow"]
    assert schema.pop("x-families", []) == []
    assert schema == {
        "type": "number",
        "exclusiveMinimum": 0,
        "maximum": 2,
        "default": 0.5,
        "description": "above 0 to 2, how much it glows",
    }


def test_an_option_stands_where_it_is_known_and_where_it_is_used() -> None:
    """`guidance_rescale` stood on 25 lines of 10 files."""
    files = [*sources("common", "cli", "backends"), ROOT / "src" / "qwenimg" / "__init__.py"]
    lines = {
        (path.relative_to(ROOT).as_posix(), line.strip())
        for path in files
        for line in path.read_text(encoding="utf-8").splitlines()
        if ("guidance_rescale" in line or "guidance-rescale" in line) and not line.strip().startswith("after=")
    }
    print(len(lines), "lines of", len({name for name, _ in lines}), "files")
    assert dict(lines) == {
        "common/request/family_options.py": "guidance_rescale: float = option(0.0, Option(",
        "common/request/call_types.py": "guidance_rescale: float | None",  # written by tools/write_call_types.py
        "common/pipeline/steps/guidance.py": "share = request.family_options.guidance_rescale",
        "common/jobs/foreign_json.py": '"cfg_rescale_multiplier": "guidance_rescale",',  # InvokeAI's name for it
        "cli/assistants/tools.py": '"cfg_end", "guidance_rescale", "clip_skip", "skip_layers", "layers", "caption",',
        # The families that take it
        "common/families/sd3/model.py": 'options = frozenset({"step_cache", "cached_calls", "guidance_rescale", '
        '"skip_layers", "skip_layer_scale"})',
        "common/families/stable_diffusion/model.py": '"guidance_rescale",',
        "common/families/hunyuan/model.py": 'options = frozenset({"step_cache", "cached_calls", "guidance_rescale"})',
    }
    assert len(lines) == 8


def test_texts_are_parsed_where_they_enter() -> None:
    """LoRAs and controls were parsed by 19 calls, and joined again between them."""
    files = [*sources("common", "cli", "backends"), ROOT / "src" / "qwenimg" / "__init__.py"]
    found = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}
    calls = {name: len(re.findall(r"(?:lora|control)_text\.parse\b", text)) for name, text in found.items()}
    assert {name: count for name, count in calls.items() if count} == {
        "common/request/request.py": 2,  # the options: the command line, TOML, JSON, calls from Python
        "common/request/coerce.py": 1,  # a control's text in a call from Python, whose picture is read
        "common/request/recipe.py": 1,  # recipes and passports
        # Commands whose LoRAs are no option of a picture
        "cli/commands/convert.py": 1,
        "cli/commands/lora.py": 1,
        "cli/lora_training.py": 2,
        "cli/commands/parity.py": 1,
        "cli/commands/plan.py": 1,
        "cli/serve/apis/training_api.py": 1,
    }


def test_the_keywords_for_type_checkers_are_those_of_the_request() -> None:
    written = {
        write_call_types.FILE: write_call_types.text(),
        write_call_types.DIFFUSERS: write_call_types.diffusers_text(),
    }
    assert all(file.read_text(encoding="utf-8") == text for file, text in written.items()), (
        "run: python tools/write_call_types.py"
    )


def test_the_types_of_the_names_of_diffusers_are_those_that_there_are() -> None:
    tree = ast.parse(Path(qwenimg.diffusers.__file__).read_text(encoding="utf-8"))
    declared = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert sorted(declared) == dir(qwenimg.diffusers)
    mapped = {*keywords.SAME, *keywords._OWN, *keywords._SCALES, *keywords.PROMPTS, *OPTIONS}
    others = {"max_sequence_length", "skip_guidance_layers", "use_en_prompt"}
    assert CallKeywords.__annotations__.keys() == (mapped | others) - {"output_type", "return_dict"}


# One rule for each thing


@pytest.mark.parametrize("one", ALL.values(), ids=lambda one: one.name)
def test_an_option_is_whole(one: Option) -> None:
    assert one.help and one.section and one.metavar and not one.help.endswith(".")
    assert (one.least is None) == (one.most is None) == (one.kind not in (int, float))
    assert (one.name in FAMILY_OPTIONS) == bool(one.after) == any(one.name in family.options for family in FAMILIES)
    assert not one.unsupported or one.after
    [param] = [param for param in generate.params if param.name == one.name]
    assert {f"--{one.dashed}", *one.flags} == set(param.opts)
    if one.config and one.kind is not None:
        assert config.KEYS[one.name] == one.types
    if one.kind in (int, float):
        one.check(one.default)


@pytest.mark.parametrize(
    ("name", "asked", "family", "has", "told"),
    [
        ("negative_prompt", "x", "", "", "the negative prompt has no effect at guidance 1"),
        ("negative_prompt", "x", "", "guidance", None),
        ("negative_prompt", None, "", "", None),
        ("strength", 0.8, "", "", "strength has no effect without a picture to start from"),
        ("strength", 0.8, "", "image", None),
        ("refine_at", 0.8, "stable-diffusion", "", "refine-at has no effect without a refiner"),
        ("refine_at", 0.8, "qwen-image", "", "refine-at has no effect without a refiner"),
        ("refine_at", 0.8, "stable-diffusion", "refiner", None),
        ("clip_skip", 1, "qwen-image", "", "clip-skip has no effect: this model's text encoder is not CLIP"),
        ("clip_skip", 0, "qwen-image", "", None),
        ("clip_skip", 1, "stable-diffusion", "", None),
        ("guidance_rescale", 0.5, "stable-diffusion", "guidance", None),
        ("guidance_rescale", 0.5, "stable-diffusion", "", "guidance-rescale has no effect at guidance 1"),
        ("guidance_rescale", 0.0, "stable-diffusion", "", None),
        ("guidance_rescale", 0.5, "qwen-image", "guidance", "this model's guidance always keeps the prediction's norm"),
        ("steps", 3, "qwen-image", "", None),
    ],
)
def test_what_has_no_effect_is_told(name: str, asked: Any, family: str, has: str, told: str | None) -> None:
    special = next((one.options for one in FAMILIES if one.name == family), frozenset[str]())
    found = no_effect(OPTIONS[name], asked, special, frozenset(filter(None, [has])), "at guidance 1")
    assert (found is None) if told is None else (found or "").endswith(told)


def test_a_recipe_has_what_was_changed_or_used() -> None:
    plain = recorded(OPTIONS.values(), Request(prompt="x").value, frozenset())
    assert {"prompt", "seed", "steps", "guidance", "sampler"} <= plain.keys()
    assert not plain.keys() & {"strength", "refine_at", "clip_skip", "guidance_rescale", "image", "latents"}
    more = request_of({"prompt": "x", "clip_skip": 1, "guidance_rescale": 0.5, "strength": 0.3})
    found = recorded(OPTIONS.values(), more.value, frozenset({"refiner"}))
    assert {name: found[name] for name in found.keys() - plain.keys()} == {
        "clip_skip": 1,
        "guidance_rescale": 0.5,
        "refine_at": 0.8,
    }


# The schema


def valid(schema: Any, value: Any) -> bool:
    """Of JSON Schema what ours uses."""
    kinds = {"integer": int, "number": (int, float), "string": str, "object": dict, "array": list}
    rules: dict[str, Any] = {
        "type": lambda kind: isinstance(value, kinds[kind]) and not isinstance(value, bool),
        "minimum": lambda least: value >= least,
        "maximum": lambda most: value <= most,
        "exclusiveMinimum": lambda least: value > least,
        "exclusiveMaximum": lambda most: value < most,
        "maxLength": lambda most: len(value) <= most,
        "pattern": lambda pattern: re.search(pattern, value) is not None,
        "enum": lambda names: value in names,
        "items": lambda each: all(valid(each, one) for one in value),
        "anyOf": lambda several: any(valid(one, value) for one in several),
        "not": lambda one: not valid(one, value),
        "required": lambda names: all(name in value for name in names),
        "properties": lambda known: all(valid(known[name], value[name]) for name in known if name in value),
        "additionalProperties": lambda _: value.keys() <= schema["properties"].keys(),
    }
    about = {"$schema", "title", "description", "default", "x-families"}
    assert schema.keys() <= rules.keys() | about, schema.keys()
    ordered = sorted(schema.keys() & rules.keys(), key=lambda key: key != "type")
    return all(rules[key](schema[key]) for key in ordered)


def taken(line: dict[str, Any]) -> bool:
    """Whether a line of a prompt file may say it."""
    try:
        said = _options_of(json.dumps(line).encode(), "x:1")
        if "prompt" not in said:
            return False
        check(said)
        return len(seeds(said, 7)) > 0
    except QwenimgError as error:
        assert isinstance(error, (UsageError, ModelError))
        return False


VALUES: list[Any] = [-2, -1, 0, 1, 2, 11, 12, 100, 101, 1000, 1001, 16384, 16385, 10_000, 10_001, 2**64 - 1, 2**64]
VALUES += [
    ["a", "b"],
    ["a", 1],
    0.5,
    1.5,
    -0.1,
    100.5,
    True,
    None,
    [],
    "",
    "1",
    "euler",
    "karras",
    "no such",
    "x" * 2001,
    "512x512",
    "1:1",
]
# Numbers whose defaults depend on the model, or are given by chance.
MODELS_OWN = {"width", "height", "steps", "guidance", "strength", "seed"}
# What a schema cannot say: a text that is none of a form.
FREE = ("seed", "size", "aspect", "few_steps", "cached_calls", "skip_layers", "hires_with", "variation")


def test_the_schema_takes_what_a_line_of_a_prompt_file_takes() -> None:
    schema = json.loads(json.dumps(request_schema()))
    assert schema["properties"].keys() == TEXT_OPTIONS.keys()
    tried = 0
    for name in TEXT_OPTIONS:
        for value in VALUES:
            line = {"prompt": "a ring"} | {name: value}
            if isinstance(value, str) and name in FREE:
                continue
            if name in ("control", "outpaint", "ip_adapter", "ip_image", "ip_mask") and isinstance(value, (str, list)):
                continue
            tried += 1
            assert valid(schema, line) == taken(line), line
    print(tried, "lines")
    for line in ({}, {"prompt": "x", "sise": 3}, {"prompt": "x", "size": "8x8", "width": 8}):
        assert not valid(schema, line) and not taken(line)
    defaults = {name: value["default"] for name, value in schema["properties"].items() if "default" in value}
    numbers = {name for name, one in TEXT_OPTIONS.items() if one.kind in (int, float) and one.default is not None}
    assert defaults == {name: TEXT_OPTIONS[name].default for name in numbers - MODELS_OWN}
    assert parse({"prompt": "x", "size": "8x16"}) == {"prompt": "x", "width": 8, "height": 16}


def test_help_as_json_is_the_schema(capfd: pytest.CaptureFixture[str]) -> None:
    for args in (["--help", "--json"], ["generate", "--json", "-h"]):
        assert run(args) == 0
        assert json.loads(capfd.readouterr().out) == json.loads(json.dumps(request_schema()))
    assert run(["--json"]) == 2
    told = capfd.readouterr()
    assert json.loads(told.out)["event"] == "error" and told.err.startswith("qwenimg: error: no prompt")
    assert run(["-p", "--json", "--help"]) == 0
    assert capfd.readouterr().out.startswith("Usage:")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("Latent", "latent"), ("Latent (nearest-exact)", "latent-nearest-exact"),
        ("latent (BICUBIC)", "latent-bicubic"),
        ("Lanczos", "lanczos"), (" None ", "lanczos"), ("R-ESRGAN 4x+", "RealESRGAN_x4plus"),
        ("4x-UltraSharp.pth", "4x-UltraSharp.pth"),
    ],
)  # fmt: skip
def test_other_programs_names_of_what_enlarges(theirs: str, ours: str) -> None:
    """On the command line, in a prompt file, in JSON and in Python."""
    assert parse({"hires_with": theirs})["hires_with"] == ours
    assert typed({"hires_with": theirs}, files=False)["hires_with"] == ours
    assert Request(prompt="x", hires=2, hires_with=theirs).hires_with == ours
    assert ALL["hires_with"].converted(theirs) == ours


@pytest.mark.parametrize("name", ["Latent (bicubic antialiased)", "latent-sharp", "LATENT", " "])
def test_no_file_is_called_latent(name: str) -> None:
    if name.lower() in names.ENLARGERS:
        assert Request(prompt="x", hires=2, hires_with=name).hires_with == "latent"
        return
    with pytest.raises(UsageError, match="choose one of lanczos, nearest, latent"):
        Request(prompt="x", hires=2, hires_with=name)
