"""What a process loads before it draws."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from processes import ENVIRONMENT

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


def test_a_picture_on_torch_needs_no_compiler_and_writes_no_file(tmp_path: Path) -> None:
    """torch's own Embedding, made without memory, imports its compiler, and that wants a folder for its files."""
    environment = {**ENVIRONMENT, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", DRAW], capture_output=True, timeout=300, cwd=tmp_path, env=environment)
    assert done.returncode == 0 and done.stdout.startswith(b"\x89PNG"), done.stderr.decode()[-2000:]
    modules = done.stderr.decode().splitlines()[-1].split()
    unused = [name for name in modules if name in UNUSED or name.startswith(tuple(f"{u}." for u in UNUSED))]
    print(len(modules), "modules")
    assert "torch" in modules and unused == [] and len(modules) < 1700
