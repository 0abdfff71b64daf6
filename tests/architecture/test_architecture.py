"""What must never happen: each rule is a check of the source or of a fresh process, and each check must catch a fault.

The lists of exceptions carry a reason each, and an exception that nothing needs any more is a failure.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from support import rules
from support.rules import ROOT, name_of, sources

from qwenimg.common.families import registry

OPS = [name_of(path) for path in sources("backends/torch/ops", "backends/mlx/ops")]
LOADERS = ["backends/torch/load.py", "backends/mlx/load.py"]
ENGINES = ["backends/torch/engine.py", "backends/mlx/engine.py"]
# (file, start of the complaint): reason
ALLOWED_FRAMEWORKS = {
    (
        "common/pipeline/pipeline.py",
        "Pipeline._recipe: torch-cpu",
    ): "the name of a random number generator, in the recipe",
    ("common/request/recipe.py", "a1111_parameters: torch-cpu"): "the same name, read back",
    ("common/hub/open_model.py", "_check_fp32: ): a reduced"): "the variable that a user set",
    ("common/hub/network_search.py", "upscaling: : a mode"): "the same",
    ("common/request/foreign_names.py", ": to cuda"): "the names of methods that other libraries' pipelines have",
    ("common/formats/tensor_pickle.py", ": torch"): "the name of a module in pickles",
    ("common/conversion/convert.py", "_metadata: mlx"): "the name of a layout in a file's metadata",
    ("common/networks/denoisers/zimage_names.py", ": MLX_z-image's names"): "the name of a program that writes files",
    ("common/networks/encoders/language_names.py", ": mlx-vlm's names"): "the name of a program that writes files",
    ("common/networks/encoders/language_model.py", ": \nmodel_type"): "keys in configurations of models",
}
Checker = Callable[[str], list[str]]
Exceptions = dict[tuple[str, str], str]


def broken(checker: Checker, files: list[Path], exceptions: Exceptions | None = None) -> list[str]:
    """Every complaint about `files` that no exception covers, and every exception that covers none."""
    complaints = [(name_of(path), text) for path in files for text in checker(path.read_text(encoding="utf-8"))]
    covered = {key: [c for c in complaints if c[0] == key[0] and c[1].startswith(key[1])] for key in (exceptions or {})}
    print(f"{checker.__name__}: {len(files)} files, {len(complaints)} found, {len(covered)} exceptions")
    unexplained = [c for c in complaints if not any(c in those for those in covered.values())]
    stale = [f"exception without use: {key}" for key, those in covered.items() if not those]
    return [f"{file}: {text}" for file, text in unexplained] + stale


PACKAGE = sources("src", "common", "backends", "cli")
# Training has no twin, and converts the factors of LoRAs: exempt by name.
TRAINING = ("backends/torch/training", "backends/mlx/training")
BACKENDS = [path for path in sources("backends") if name_of(path.parent) not in TRAINING]
INNER = [path for path in BACKENDS if name_of(path).count("/") > 1]


def but(files: list[Path], *names: str) -> list[Path]:
    return [path for path in files if name_of(path) not in names]


# The checkers themselves


@pytest.mark.parametrize(
    ("checker", "good", "bad"),
    [
        (rules.casts, 'x.to(device)\nx.to("meta")\nx.to(self._device)\nx.to(torch.device("cpu"))', "x.to(dtype)"),
        (rules.casts, "x.to(device=d)\nmx.array([1])", "x.to(device=d, dtype=t)"),
        (rules.casts, "x.dtype == mx.float32", "x.to(torch.float32)"),
        (rules.casts, "mx.default_device().type", "x.type(t)"),
        (rules.casts, "float(x)", "x.float()"),
        (rules.casts, "half(x)", "x.half()"),
        (rules.casts, "double", "x[0].double()"),
        (rules.casts, "torch.bfloat16", "f(x).bfloat16()"),
        (rules.casts, "astype", "np.ones(3).astype(np.float32)"),
        (rules.casts, "mx.array(x)", "mx.array(x, mx.float16)"),
        (rules.casts, "torch.tensor(x, device=d)", "torch.tensor(x, dtype=t)"),
        (rules.products, "a * b", "a @ b"),
        (rules.products, "a *= b", "a @= b"),
        (rules.products, "nn.Linear(3, 4)\nself.linear_1(x)", "F.linear(x, w)"),
        (rules.products, "nn.attention(q, k, v)", "mx.fast.scaled_dot_product_attention(q, k, v)"),
        (rules.products, "", "mx.matmul(a, b)"),
        (rules.products, "", "torch.einsum('ij,jk', a, b)"),
        (rules.lenient, "zip(a, b, strict=False)\nload(a, strict=True)", "m.load_state_dict(a, strict=False)"),
        (rules.lenient, "m.load_weights(a)", "m.load_weights(a, strict=loose)"),
        (rules.to_numpy, "nn.at_least_float32(x).cpu().numpy()\nself.numpy(x)", "x.cpu().numpy()"),
        (rules.to_numpy, "np.array(nn.at_least_float32(x))", "np.array(x)"),
        (rules.work_at_import, '"""A."""\nimport os\nX = re.compile("a")', "os.makedirs('a')"),
        (rules.work_at_import, "def f(x=3):\n    run()", "def f(x=run()):\n    pass"),
        (
            rules.work_at_import,
            "@dataclass(frozen=True)\nclass A:\n    x: int = field(default=1)",
            "@register\nclass A: 1",
        ),
        (rules.work_at_import, "class A:\n    def f(self): run()", "class A:\n    x = run()"),
        (rules.work_at_import, "if TYPE_CHECKING:\n    import torch", "if available():\n    import torch"),
        (rules.work_at_import, "f = lambda: torch.zeros(1)", "x = torch.zeros(1)"),
        (rules.work_at_import, "f = partial(Download, x=1)\ny = f(z=2)", "f = partial(torch.zeros, 1)"),
        (rules.work_at_import, "X = 1\nX += 2", "os.environ['A'] = '1'"),
        (rules.work_at_import, "", "with open('a') as f: pass"),
        (rules.frameworks, '"""As in torch."""\nx = "pytorch_model"', "if name == 'torch': pass"),
        (rules.frameworks, "x.device", "if engine.has_cuda: pass"),
        (rules.weight_dtypes, "layer.dtype\nx.dtype", "layer.weight.dtype"),
        (rules.weight_dtypes, "weight.shape", "x.to(self.attn.to_q.weight.dtype)"),
        (rules.frameworks, "", "def to_mlx(x): pass"),
        (rules.scripts, "name = __file__", "if __name__ == '__main__':\n    run()"),
        (rules.scripts, "import os", "import pytest"),
        (rules.bare_imports, "from qwenimg.common import errors\nfrom . import common", "from common.errors import E"),
        (rules.bare_imports, "import qwenimg.backends", "import backends"),
        (rules.bare_imports, "import_module('qwenimg.cli')", "import_module('cli.main')"),
        (rules.riddles, 'def f():\n    """The sum."""', 'def f():\n    """What is summed."""'),
        (rules.riddles, '"""A list."""\nclass A: pass', '"""Of the values, the sum."""'),
        (rules.riddles, 'class A:\n    """[B L C] -> [B C L]."""', 'class A:\n    """Whether x is finite."""'),
    ],
)
def test_checker(checker: Checker, good: str, bad: str):
    assert checker(good) == []
    assert len(checker(bad)) == 1


def test_stale_and_missing_exceptions_are_noticed(tmp_path, monkeypatch):
    file = tmp_path / "a.py"
    file.write_text("def f(x):\n    return x.half()\n")
    monkeypatch.setattr(rules, "ROOT", tmp_path)
    assert broken(rules.casts, [file]) == ["a.py: f: x.half()"]
    assert broken(rules.casts, [file], {("a.py", "f:"): "a reason"}) == []
    assert broken(rules.casts, [file], {("a.py", "f:"): "", ("a.py", "g:"): ""}) == [
        "exception without use: ('a.py', 'g:')"
    ]


# Rules of the source


def test_casts_are_in_ops_and_load():
    assert broken(rules.casts, but(BACKENDS, *OPS, *LOADERS)) == []


def test_no_forward_asks_a_weight_for_its_dtype():
    assert broken(rules.weight_dtypes, sources("backends/torch/networks", "backends/mlx/networks")) == []


def test_products_are_in_ops():
    assert broken(rules.products, but(BACKENDS, *OPS)) == []


@pytest.mark.sample(0)
def test_common_and_cli_compute_no_product():
    exact = "the reference in float64 that a device is judged by"
    allowed = {("common/measure/exactness.py", f"{name}: "): exact for name in ("matmul", "attention", "conv2d")}
    allowed[("common/parity/shortcuts.py", "_Checked._product: ")] = exact
    once = "a LoRA's factors, multiplied once while a weight is read, so that both backends get the same bits"
    allowed[("common/weights/loras/delta.py", "")] = once
    allowed[("common/weights/loras/factors.py", "")] = "a LoRA's factors in float64, from which a file is written"
    allowed[("common/pipeline/preview.py", "")] = "least squares in float64, and colours that no picture depends on"
    allowed[("common/parity/sample.py", "projected: ")] = "sums of results in float64, by which they are compared"
    assert broken(rules.products, sources("common", "cli", "src"), allowed) == []


@pytest.mark.sample(0)
def test_loading_is_strict():
    assert broken(rules.lenient, PACKAGE) == []


def test_no_bfloat16_through_numpy():
    assert broken(rules.to_numpy, but(INNER, *OPS)) == []


def test_no_work_at_import():
    reason = "declares click options, as click's own decorators do"
    declares = {(f"cli/commands/{name}.py", "options.of_pictures("): reason for name in ("generate", "batch", "grid")}
    declares |= {(f"cli/commands/{name}.py", "text_limits("): reason for name in ("describe", "rewrite")}
    declares |= {
        ("cli/commands/parity.py", name): reason for name in ("_recording_options(", "_opening(", "parity.command(")
    }
    declares |= {("cli/commands/lora.py", name): reason for name in ("lora.command(", "_writing(")}
    declares |= {("cli/commands/train.py", name): reason for name in ("train.command(", "_learning(", "_running(")}
    declares[("cli/commands/plan.py", "_options_of_generate(")] = declares[("cli/places.py", "Backend(")] = reason
    opening = (
        "bench",
        "convert",
        "describe",
        "doctor",
        "generate",
        "upscale",
        "rewrite",
        "info",
        "lora",
        "train",
        "models",
        "parity",
        "precision",
        "selftest",
        "serve",
        "mcp",
        "batch",
        "grid",
    )
    declares |= {(f"cli/commands/{name}.py", "places."): reason for name in opening}
    declares[("cli/commands/parity.py", "options.Backend(")] = reason
    declares |= {(f"cli/commands/{name}.py", "Number("): reason for name in ("bench", "serve", "mcp", "rewrite")}
    hidden = "a definition that type checkers must not see, for which every name would be an attribute"
    declares |= {(f"common/pipeline/{name}.py", "if not TYPE_CHECKING:"): hidden for name in ("pipeline", "result")}
    declares[("src/qwenimg/diffusers/__init__.py", "if TYPE_CHECKING:")] = hidden
    declares[("src/qwenimg/__main__.py", "if __name__ == '__main__':")] = "python -m qwenimg runs it"
    assert broken(rules.work_at_import, PACKAGE, declares) == []


@pytest.mark.sample(0)
def test_common_names_no_framework():
    assert broken(rules.frameworks, sources("common"), ALLOWED_FRAMEWORKS) == []


def test_no_script_or_test_in_the_package():
    runs = {("src/qwenimg/__main__.py", ": if __name__"): "python -m qwenimg runs it"}
    assert broken(rules.scripts, PACKAGE, runs) == []
    assert [p for p in PACKAGE if re.fullmatch(r"test_.*|.*_test|conftest", p.stem)] == []


def test_no_bare_import():
    assert broken(rules.bare_imports, [*PACKAGE, *sources("tests", "tools")]) == []


def test_docstrings_name_their_subject():
    assert broken(rules.riddles, PACKAGE) == []


def test_no_global_statement():
    """A current backend, model or device would be one; both backends live in one process."""

    def global_names(source: str) -> list[str]:
        return rules.found(source, lambda node: type(node).__name__ == "Global")

    assert len(global_names("def f():\n    global x\n    x = 1")) == 1
    assert broken(global_names, PACKAGE) == []


def test_tests_of_the_command_line_import_no_framework():
    """Nor do the modules of tests/support that they import: the command line is tested without one."""

    def reached(path: Path, seen: set[Path]) -> set[Path]:
        seen.add(path)
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        names = set[str]()
        for node in nodes:
            package, _, module = (getattr(node, "module", None) or "").partition(".")
            if isinstance(node, ast.ImportFrom) and package == "support":
                names |= {module} if module else {alias.name for alias in node.names}
        for name in names:
            helper = ROOT / "tests" / "support" / f"{name}.py"
            if helper.exists() and helper not in seen:
                reached(helper, seen)
        return seen

    files = {file for path in sources("tests/cli") for file in reached(path, set())}
    heavy = {"torch", "mlx", "diffusers", "transformers"}

    def at_the_top(source: str) -> list[str]:
        tree = ast.parse(source)
        return [ast.unparse(node) for node in tree.body if rules.imported(node) & heavy]

    assert at_the_top("import torch") and not at_the_top("def f():\n    import torch")
    print(f"{len(files)} files")
    assert len(files) > 8
    assert {name_of(path): at_the_top(path.read_text(encoding="utf-8")) for path in files} == {
        name_of(path): [] for path in files
    }


# Layers of imports


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    environment = os.environ | {"PYTHONPATH": str(folder / "src"), "COLUMNS": "200"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_layers():
    result = lint_imports(ROOT)
    print(result.stdout[-600:])
    assert result.returncode == 0
    assert "0 broken" in result.stdout


def family_folders() -> list[str]:
    return [path.parent.name for path in (ROOT / "common" / "families").glob("*/family.py")]


def test_every_family_is_held_apart():
    """The contract names its modules; a family that is not among them could import another."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    [named] = [one["modules"] for one in contracts if one["type"] == "independence"]
    assert sorted(named) == sorted(f"qwenimg.common.families.{folder}" for folder in family_folders())


@pytest.mark.parametrize("family", family_folders())
def test_a_family_is_a_folder_and_lines_in_tables(family):
    """One shared file of the product imports it, of which few lines have what it imports, and a row names it."""
    package, lines = f"qwenimg.common.families.{family}.", dict[str, set[int]]()
    for path in sources("common", "backends", "cli"):
        source = path.read_text(encoding="utf-8")
        if name_of(path).startswith(f"common/families/{family}/") or "qwenimg.common.families" not in source:
            continue
        nodes = list(ast.walk(ast.parse(source)))
        imported = {
            alias.asname or alias.name: node.lineno
            for node in nodes
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if f"{node.module}.{alias.name}.".startswith(package)
        }
        if imported:
            used = {node.lineno for node in nodes if isinstance(node, ast.Name) and node.id in imported}
            lines[name_of(path)] = used | set(imported.values())
    print(family, lines)
    assert set(lines) == {"common/families/catalog.py"} and len(lines["common/families/catalog.py"]) <= 8
    assert family in {folder for folder, _ in registry._ROWS}


def test_each_contract_can_fail(tmp_path):
    """As many contracts as bad imports in a copy of the package: all are reported."""
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in ("common", "backends", "cli"):
        shutil.copytree(ROOT / folder, tmp_path / "src" / "qwenimg" / folder, ignore=ignored)
    shutil.copy(ROOT / "src" / "qwenimg" / "__init__.py", tmp_path / "src" / "qwenimg")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    faults = {
        "common/networks/params.py": "import torch",
        "common/base/text.py": "import qwenimg.common.memory.limits",
        "common/families/qwen_image/memory.py": "import qwenimg.common.families.stable_diffusion.expert",
        "backends/mlx/load.py": "import qwenimg.common.sampling.ode",
        "backends/mlx/ops/layers.py": "import torch",
        "backends/torch/ops/layers.py": "import mlx.core",
        "backends/torch/engine.py": "import starlette",
        "cli/batch/driver.py": "import qwenimg.cli.serve.settings",
        "cli/__init__.py": "import numpy",
    }
    for file, line in faults.items():
        path = tmp_path / "src" / "qwenimg" / file
        path.write_text(path.read_text() + f"\n{line}\n")
    result = lint_imports(tmp_path)
    contracts = (ROOT / "pyproject.toml").read_text().count("[[tool.importlinter.contracts]]")
    assert result.returncode == 1
    assert f"Contracts: 0 kept, {contracts} broken." in result.stdout, result.stdout
    assert contracts == len(faults)


# Fresh processes


def python(code: str, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", code, *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip().rpartition("\n")[2]


HEAVY = "torch mlx numpy PIL tokenizers huggingface_hub transformers diffusers safetensors"
LOADED = f"import sys; print([name for name in '{HEAVY}'.split() if name in sys.modules])"


def test_import_loads_nothing_heavy():
    assert python(f"import numpy, qwenimg; {LOADED}") == "['numpy']", "the check itself"
    assert python(f"import qwenimg; qwenimg.__version__; {LOADED}") == "[]"


@pytest.mark.skipif(not (ROOT / "cli" / "main.py").exists(), reason="there is no command line yet")
@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_loads_nothing_heavy(option):
    code = f"""
import sys
sys.argv = ["qwenimg", {option!r}]
from qwenimg.cli.main import run
try:
    run()
except SystemExit as stop:
    assert not stop.code, stop.code
{LOADED}
"""
    assert python(code) == "[]"


WATCHED = """
import sys
import click, mlx.core, mlx.nn, numpy, torch
import qwenimg
from importlib import import_module
from pathlib import Path

EVENTS = ("os.mkdir", "os.rename", "os.remove", "os.putenv", "os.system", "subprocess.Popen", "socket.connect",
          "socket.getaddrinfo", "shutil.", "tempfile.", "urllib.")
seen = []

def watch(event, args):
    if event.startswith(EVENTS) or event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        seen.append((event, str(args[:2])[:100]))

root = Path(qwenimg.__file__).parent
files = [path for folder in ("common", "backends", "cli", "diffusers") for path in (root / folder).rglob("*.py")]
names = [path.relative_to(root).with_suffix("") for path in files]
sys.addaudithook(watch)
for name in names:
    import_module(".".join(("qwenimg", *name.parts)).removesuffix(".__init__"))
before = len(seen)
eval(sys.argv[1])
print(len(names), seen[:before], len(seen) - before)
"""


@pytest.mark.sample(0)
def test_importing_every_module_touches_nothing(tmp_path):
    """No folder, file, process, connection or environment variable, seen through Python's audit events."""
    printed = python(WATCHED, f"Path({str(tmp_path / 'made')!r}).mkdir()")
    print(printed)
    count, rest = printed.split(" ", 1)
    assert int(count) >= 40
    assert rest == "[] 1", "what importing did, and the one folder that the check itself made"


# Circles


def test_no_files_import_each_other_in_a_circle():
    files = {name_of(path): path.read_text(encoding="utf-8") for path in PACKAGE}
    print(len(files), "files")
    assert rules.circles(files) == []


def test_the_check_of_circles():
    files = {
        "common/a.py": "from qwenimg.common.b import f",
        "common/b.py": "def f():\n    from qwenimg.common import c",
        "common/c.py": "import qwenimg.common.a",
        "common/d.py": "from . import a",
        "common/__init__.py": "",
    }
    assert rules.circles(files) == [["common/a.py", "common/b.py", "common/c.py"]]
    assert rules.circles(files | {"common/c.py": "from qwenimg import common"}) == []
