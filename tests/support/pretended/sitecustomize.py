"""What every Python of the tests starts with where a machine is pretended: probes that answer for that machine.

`pretend_machine.py` puts this folder on PYTHONPATH, so the commands that tests start import it too. The libraries are
told by variables of theirs; here are the probes that read the real machine whatever those say.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

BF16 = os.environ.get("PRETEND_BF16")
MEMORY = os.environ.get("PRETEND_MEMORY")
DISK = os.environ.get("PRETEND_DISK")


def bf16_of_torch(module: Any) -> None:
    if BF16 is not None:
        module._is_avx512_bf16_supported = lambda: BF16 == "1"
        module._is_amx_tile_supported = lambda: False


def bf16_on_paper(module: Any) -> None:
    if BF16 is not None:
        module._multiplies_bf16 = lambda: BF16 == "1"


def memory(module: Any) -> None:
    if MEMORY is not None:
        module._meminfo = lambda name: int(float(MEMORY))


def disk(module: Any) -> None:
    if DISK is not None:
        usage = module.disk_usage
        module.disk_usage = lambda path: usage(path)._replace(free=int(float(DISK)))


PROBES: dict[str, Callable[[Any], None]] = {
    "torch.cpu": bf16_of_torch,
    "qwenimg.backends.paper": bf16_on_paper,
    "qwenimg.common.memory.memory": memory,
    "shutil": disk,
}


class Probes(MetaPathFinder):
    """Changes a module that has probes right after it is first imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in PROBES else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            PROBES[name](module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Change the modules that are already here, and the others when they come."""
    for name in PROBES.keys() & sys.modules.keys():
        PROBES[name](sys.modules[name])
    sys.meta_path.insert(0, Probes())


install()
