"""Full width: what loading in codes takes beside the codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import measure_codes
import pytest
from random_model import write
from support.family_cases import BACKENDS

from qwenimg.common.networks.denoisers import qwen_dit
from qwenimg.common.networks.denoisers.qwen_dit import QwenDiTConfig

LAYERS = 1.5  # of the largest kind in bfloat16: its codes twice on MLX, which copies them, and a few rows


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the largest resident size is read from /proc")
def test_no_more_than_the_codes_and_a_few_layers(tmp_path: Path) -> None:
    manifest = qwen_dit.manifest(QwenDiTConfig(num_layers=measure_codes.LAYERS))
    path = write(tmp_path / "wide.safetensors", manifest)
    for backend in BACKENDS:
        asked = [sys.executable, measure_codes.__file__, "--load", str(path), backend]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(asked, check=True, capture_output=True, text=True, env=env)
        found = json.loads(done.stdout.splitlines()[-1])
        over = (found["most"] - found["before"] - found["plan"]) / measure_codes.LARGEST
        print(f"{backend}: {over:.1f} layers over {found['plan'] / 1e9:.2f} GB of codes")
        assert over <= LAYERS
