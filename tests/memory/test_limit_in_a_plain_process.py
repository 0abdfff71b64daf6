"""A streamed run in a process as a user starts it stays below its limit."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from measure_memory import Run, measured
from random_folders import LARGE_CLIP, SD15, SDXL, write_folder

from qwenimg.common.memory import allocator

linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's peak of resident memory")
# Half of the UNet is streamed, and what one stage leaves in holes is beside the next one's.
RUNS = (
    Run("sd15", "cpu", "--size 256x192 --precision fp32 --max-memory 180MB"),
    Run("sd15", "mlx", "--size 96x64 --precision fp32 --max-memory 120MB"),
    # Its many transformer blocks leave holes of 120 to 250 kB: 0.6 MB for each.
    Run("sdxl", "cpu", "--size 256x256 --precision fp32 --max-memory 310MB"),
)
TUNED = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "MKL_", "MLX_", "PYTORCH_")  # variables that change an allocator


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of the published proportions, narrower: of sd15 86 MB of text encoder and 130 MB of UNet in float32."""
    path = tmp_path_factory.mktemp("narrow")
    write_folder(path / "sd15", "sd15", unet=replace(SD15, block_out_channels=(96, 160, 256, 256)))
    narrow = replace(SDXL, block_out_channels=(64, 128, 256), attention_head_dim=(1, 2, 4))
    write_folder(path / "sdxl", "sdxl", unet=narrow, text_encoder_2=replace(LARGE_CLIP, num_hidden_layers=8))
    return path


@linux
@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.model}-{run.backend}")
@pytest.mark.sample(0)
def test_a_streamed_run_stays_below_its_limit(folders: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    """Where glibc and MLX keep what is freed, the runs of sd15 take 205 and 172 MB."""
    for name in [name for name in os.environ if name.startswith(TUNED)]:
        monkeypatch.delenv(name)
    stages = measured(folders / run.model, run)["stages"]
    print({name: f"{count / 1e6:.0f} MB" for name, count in stages.items()})
    assert {"text", "denoise", "decode"} <= stages.keys()
    assert run.limit is not None and max(stages.values()) <= run.limit


# Blocks that are smaller than those that are mapped alone, and one above them, which is not freed.
FREED = """
import ctypes, sys
from pathlib import Path
from qwenimg import backends

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)["VmRSS"].split()[0]) * 1024

engine, libc = backends.load(sys.argv[1]), ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
blocks = [libc.malloc(100_000) for _ in range(1001)]
for block in blocks:
    ctypes.memset(block, 1, 100_000)
for block in blocks[:-1]:
    libc.free(block)
held = resident()
engine.release()
print(held - resident())
"""


@linux
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library has no such heap")
@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(0)
def test_release_gives_back_small_blocks_that_were_freed(backend: str) -> None:
    """100 MB of them, which glibc keeps below a block that is in use."""
    run = subprocess.run([sys.executable, "-c", FREED, backend], capture_output=True, text=True, check=True)
    print(f"{int(run.stdout) / 1e6:.0f} MB given back")
    assert int(run.stdout) > 95 * 10**6


@pytest.mark.parametrize("function", [allocator.give_back_heap, lambda: allocator.give_back_blocks(2**30)])
def test_nothing_happens_where_the_c_library_has_no_such_settings(
    monkeypatch: pytest.MonkeyPatch, function: Callable[[], None]
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    function()
