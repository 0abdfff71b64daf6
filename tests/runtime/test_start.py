"""What a process loads before it draws."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import ENVIRONMENT

# torch's compiler and what it needs, once imported by a backend's start, and what no backend shall need
UNUSED = ("torch._dynamo", "torch._inductor", "torch.onnx", "sympy", "torch.distributed.fsdp", "transformers", "scipy")
DRAW = """
import resource, sys

resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
from qwenimg.cli.main import run

code = run(["a red circle", "-m", "shapes", "--backend", "cpu", "--steps", "1", "-o", "-"])
print(*sys.modules, file=sys.stderr)
raise SystemExit(code)
"""


@pytest.mark.sample(0)
def test_a_picture_on_torch_needs_no_compiler_and_writes_no_file(tmp_path: Path) -> None:
    """torch's own Embedding, made without memory, imports its compiler, and that wants a folder for its files."""
    environment = {**ENVIRONMENT, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", DRAW], capture_output=True, timeout=300, cwd=tmp_path, env=environment)
    assert done.returncode == 0 and done.stdout.startswith(b"\x89PNG"), done.stderr.decode()[-2000:]
    modules = done.stderr.decode().splitlines()[-1].split()
    unused = [name for name in modules if name in UNUSED or name.startswith(tuple(f"{u}." for u in UNUSED))]
    others = [name for name in modules if not name.startswith("qwenimg.")]
    print(len(modules), "modules,", len(others), "of packages")
    assert "torch" in modules and unused == [] and len(others) < 1300


END = """
import gc, sys

try:
    import MODULE
except ImportError:
    print("not here")
from qwenimg.cli import main

sys.argv = ["qwenimg", "--version"]
gc.freeze = lambda: print("frozen")
sys.exit(main.run())
"""


@pytest.mark.parametrize(("module", "frozen"), [("numpy", True), ("triton", False)])
def test_the_end_of_a_process_searches_for_no_garbage(tmp_path: Path, module: str, frozen: bool) -> None:
    """But where triton is loaded, which takes what is still there then for leaks, in thirty lines on standard error."""
    if module == "triton":  # which comes with torch for NVIDIA's cards only
        (tmp_path / "triton.py").touch()
    end = [sys.executable, "-c", END.replace("MODULE", module)]
    done = subprocess.run(end, capture_output=True, text=True, timeout=100, cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 0 and ("frozen" in done.stdout) is frozen and done.stderr == ""


COMPILE = """
import json, re, sys
from pathlib import Path
import torch
from qwenimg.backends.torch import compile

class Block(torch.nn.Linear):
    def forward(self, x):
        return torch.nn.functional.gelu(super().forward(x)).square()

torch.manual_seed(0)
block = Block(4, 4)
compile.compile(block, re.compile(""), Path(sys.argv[1]))
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import cache_dir
x = torch.arange(12.0).reshape(3, 4)
with torch.no_grad():
    error = float((block(x) - block.forward(x)).abs().max()) if len(sys.argv) > 2 else 0.0
print(json.dumps({"folder": cache_dir(), "error": error, "found": counters["inductor"]["fxgraph_cache_hit"]}))
"""


def compiled(folder: Path, *more: str) -> dict[str, str | float]:
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    command = [sys.executable, "-c", COMPILE, str(folder), *more]
    done = subprocess.run(command, capture_output=True, timeout=600, env=environment, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    said: dict[str, str | float] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.mark.sample(0)
def test_what_is_compiled_is_kept_where_a_later_run_looks(tmp_path: Path) -> None:
    """Not where torch puts it by itself, a folder that does not outlive the machine's next start."""
    assert compiled(tmp_path / "kept")["folder"] == str(tmp_path / "kept")


@pytest.mark.slow
def test_a_second_process_finds_what_was_compiled(tmp_path: Path) -> None:
    first, second = (compiled(tmp_path, "run") for _ in range(2))
    print(first, second)
    assert (first["found"], second["found"]) == (0, 1)
    assert max(first["error"], second["error"]) < 1e-5


@pytest.mark.slow
def test_half_a_library_is_compiled_again(tmp_path: Path) -> None:
    """As a process leaves it that is killed while its compiler writes; loaded, it would end the process by SIGBUS."""
    compiled(tmp_path, "run")
    for library in tmp_path.rglob("*.so"):
        library.chmod(0o755)
        os.truncate(library, library.stat().st_size // 2)
    again = compiled(tmp_path, "run")
    print(again)
    assert again["error"] < 1e-5
