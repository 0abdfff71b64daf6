"""Workers that end as soon as they draw a prompt with the word poison, as a kernel kills one whose memory runs out."""

from __future__ import annotations

import os
from pathlib import Path

# A worker is a process of its own: it finds this file by PYTHONPATH when its interpreter starts.
_CODE = """\
import importlib.util, os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "qwenimg.cli.workers.drawing_process":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            draw = module.DrawingProcess.draw

            def drawn(process, task):
                if "poison" in task.job.prompt:
                    os.kill(os.getpid(), 9)
                draw(process, task)

            module.DrawingProcess.draw = drawn

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


def environment(folder: Path) -> dict[str, str]:
    """The variables of such a run; the code is written into `folder`."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(_CODE)
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))}
