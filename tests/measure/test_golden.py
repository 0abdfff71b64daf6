"""The recording of what tests draw and refuse, and the comparison of two."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEST = """
import numpy as np, pytest
from support.cli_runner import cli
from qwenimg import Result, UsageError

def test_of_all(tmp_path):
    Result(pixels=np.full((2, 2, 3), 7, np.uint8), latents=np.full((1, 1, 2, 2), {value}, np.float32), recipe={{}})
    with pytest.raises(UsageError):
        raise UsageError(f"{{tmp_path}}/a.png: {text}")
    cli("--steps", "{steps}", "a ring").refused(2, "steps")
"""


def golden(*args: object) -> tuple[int, str]:
    ran = subprocess.run([sys.executable, ROOT / "tools/golden.py", *map(str, args)], capture_output=True, text=True)
    return ran.returncode, ran.stdout + ran.stderr


def recorded(folder: Path, name: str, value: float = 0.5, text: str = "is no picture", steps: str = "x") -> Path:
    (folder / "test_drawn.py").write_text(TEST.format(value=value, text=text, steps=steps))
    code, out = golden("record", folder / name, "-n", "0", "-c", ROOT / "pyproject.toml", folder / "test_drawn.py")
    assert code == 0, out
    return folder / name


@pytest.mark.sample(0)
def test_one_value_one_word_and_one_option(tmp_path: Path) -> None:
    before = recorded(tmp_path, "before")
    code, out = golden("compare", before, recorded(tmp_path, "again"))
    assert code == 0 and "1 tests with 1 pictures, 1 commands, 1 refusals: 0 differ" in out, out
    changed = (
        ("picture 0", recorded(tmp_path, "value", value=0.5000001)),
        ("is no picture', now", recorded(tmp_path, "text", text="cannot be read")),
        ("command 2", recorded(tmp_path, "steps", steps="y")),
    )
    for words, after in changed:
        code, out = golden("compare", before, after)
        print(out)
        assert code == 6 and words in out and "1 differ" in out
        assert golden("compare", before, after, "--again", after)[0] == 6, "nothing is left to compare"
    (tmp_path / "empty").write_text("")
    assert golden("compare", before, tmp_path / "empty")[0] == 6
