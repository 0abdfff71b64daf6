"""Measure the memory of upscaling on a backend, and compare it with the planned bytes.

python tools/measure_upscaling.py cpu            # in processes of their own: a CPU's bytes are those of the process
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support import upscalers  # noqa: E402

from qwenimg import backends  # noqa: E402
from qwenimg.common.runtime.runtime import Runtime  # noqa: E402
from qwenimg.common.upscaling.network_file import open_upscaler  # noqa: E402
from qwenimg.common.upscaling.upscaling import Upscaling, policy  # noqa: E402

NETWORKS = {
    "esrgan": lambda: upscalers.rrdbnet(1, 64, 32),
    "patches": lambda: upscalers.rrdbnet(1, 64, 32, patch=2),
    "compact": lambda: upscalers.srvgg(3, 64, 4),
}
"""At the published widths; a block more takes no more memory."""
CASES = (
    ("esrgan", 256, 256, None), ("esrgan", 256, 384, 32), ("esrgan", 256, 384, 64), ("esrgan", 256, 384, 128),
    ("patches", 512, 512, 64), ("compact", 768, 1024, None), ("compact", 768, 1024, 64),
)  # fmt: skip


def measured(backend: str, kind: str, width: int, height: int, rows: int | None, folder: Path) -> tuple[int, int]:
    """Return the planned and the measured bytes beside the weights for a picture in bands of `rows` rows."""
    engine = backends.load(backend)
    path = upscalers.as_safetensors(folder / f"{kind}.safetensors", NETWORKS[kind]())
    upscaling = Upscaling(Runtime(engine, policy("fp32"), lambda kind, text: None), open_upscaler(path))
    stage = upscaling.stage(height, width)
    split = next(split for split in stage.splits if split.size == rows)
    upscaling.stage = lambda height, width: replace(stage, splits=(split,))  # type: ignore[method-assign]
    network, _ = upscaling.residents.acquire(stage)
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    network.upscale(np.zeros((1, 3, 16, 16), np.float32), 16)  # what a first call sets up
    engine.expect(split.activations)
    before = _now(backend)
    engine.peak_memory()
    upscaling._network(pixels)
    peak = engine.peak_memory()
    upscaling.close()
    assert peak is not None
    return split.activations, peak - before


def _now(backend: str) -> int:
    """Return the bytes of MLX's arrays, or of this process."""
    if backend == "mlx":
        import mlx.core as mx

        return int(mx.get_active_memory())
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) * 1024


def main() -> None:
    backend, *case = sys.argv[1:]
    if not case:
        for case in CASES:
            subprocess.run([sys.executable, __file__, backend, *map(str, case)], check=True)
        return
    kind, width, height, rows = case
    with tempfile.TemporaryDirectory() as folder:
        size = None if rows == "None" else int(rows)
        planned, peak = measured(backend, kind, int(width), int(height), size, Path(folder))
    ratio = f"{planned / peak:.2f} of that"
    print(
        f"{backend}, {kind}, {width}x{height}, rows {rows}: {peak / 1e6:.0f} MB, planned {planned / 1e6:.0f}, {ratio}"
    )


if __name__ == "__main__":
    main()
