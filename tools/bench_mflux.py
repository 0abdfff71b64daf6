"""Times a step of Qwen-Image's transformer on MLX against mflux's, in one process, with the difference beside the time.

    python tools/bench_mflux.py                     # two layers of full width, 64 + 16 tokens, float32

mflux has a fixed width and asks for other versions than this project's tools do, so it gets an environment of its own:
`pip install mflux==0.24.0` and what `pyproject.toml` names as dependencies. On Linux without a GPU its `mlx-cuda-13`
must go (`pip uninstall mlx-cuda-13`), and MLX come back (`pip install --force-reinstall --no-deps mlx mlx-cpu`).

Both take the same file of random weights, noise, text states and timestep; mflux runs both branches at guidance 1 too,
as its pipeline does. The arms take turns, in an order that is reversed each time. A row whose result is not that of
mflux says INVALID instead of a ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import fast_blas  # noqa: F401
import mlx.core as mx
import numpy as np
from wide_checkpoint import write

import qwenimg.backends
from qwenimg.common.networks import qwen_conditioning, qwen_dit
from qwenimg.common.networks.qwen_dit import QwenDiTConfig
from qwenimg.common.precision.precision import FP32
from qwenimg.common.weights import keys

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results" / "mflux-cpu.json"
SIGMA = 0.75
LIMIT = 1e-4  # relative L2: two layers of float32 roundings, which guidance multiplies
Step = Callable[[float], mx.array]


def mflux_step(file: Path, layers: int, given: SimpleNamespace) -> Step:
    from mflux.models.common.config import ModelConfig
    from mflux.models.common.weights.mapping.weight_mapper import WeightMapper
    from mflux.models.qwen.model.qwen_transformer.qwen_transformer import QwenTransformer
    from mflux.models.qwen.variants.txt2img.qwen_image import QwenImage
    from mflux.models.qwen.weights.qwen_weight_mapping import QwenWeightMapping

    ModelConfig.precision = mx.float32  # of the last norm's modulation, else bfloat16
    model = QwenTransformer(num_layers=layers)
    stored: dict[str, Any] = {name: value.astype(mx.float32) for name, value in mx.load(str(file)).items()}
    model.update(WeightMapper.apply_mapping(stored, QwenWeightMapping.get_transformer_mapping(), num_blocks=layers))
    mx.eval(model.parameters())
    rows, columns = given.shape[1:]
    config = SimpleNamespace(height=16 * rows, width=16 * columns, scheduler=SimpleNamespace(sigmas=[SIGMA]))
    latents, *texts = (mx.array(x) for x in (given.latents, *given.texts))
    masks = [mx.ones(text.shape[:2]) for text in texts]

    def step(guidance: float) -> mx.array:
        both = [model(0, config, latents, text, mask) for text, mask in zip(texts, masks, strict=True)]
        return QwenImage.compute_guided_noise(*both, guidance)

    return step


def our_step(file: Path, layers: int, given: SimpleNamespace) -> Step:
    engine = qwenimg.backends.load("mlx")
    config = QwenDiTConfig(num_layers=layers)
    plan = keys.plan(file.parent, "transformer", qwen_dit.manifest(config), uses=qwen_dit.uses)
    model = engine.open("qwen_dit", config, plan.stored(FP32), FP32)
    modulation = model.modulate(qwen_conditioning.time_rows(config, [1000 * SIGMA], "float32"))
    latents, *texts = (engine.array(x) for x in (given.latents, *given.texts))
    conditions = [model.condition([text], [given.shape]) for text in texts]

    def step(guidance: float) -> mx.array:
        if guidance == 1:
            return model.predict(latents, conditions[0], modulation, 0)
        return engine.guide(*(model.predict(latents, one, modulation, 0) for one in conditions), guidance)

    return step


def measured(arms: dict[str, Step], guidance: float, runs: int) -> dict[str, Any]:
    """Seconds of all processors, medians, after one run of each that is not counted; ours against mflux's."""
    results = {}
    for name, step in arms.items():
        results[name] = np.array(step(guidance)).astype(np.float64)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for run in range(runs):
        for name in list(arms)[:: -1 if run % 2 else 1]:
            begun = time.process_time()
            mx.eval(arms[name](guidance))
            seconds[name].append(time.process_time() - begun)
    difference = float(np.linalg.norm(results["ours"] - results["mflux"]) / np.linalg.norm(results["mflux"]))
    ratios = [ours / theirs for ours, theirs in zip(seconds["ours"], seconds["mflux"], strict=True)]
    return {
        "guidance": guidance,
        "seconds": {name: median(each) for name, each in seconds.items()},
        "difference": difference,
        "limit": LIMIT,
        "ratio": median(ratios) if difference <= LIMIT else "INVALID",
        "ratios": [min(ratios), max(ratios)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", nargs="+", default=["64+16"], metavar="IMAGE+TEXT")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "diffusion_pytorch_model.safetensors"
        write(file, qwen_dit.manifest(QwenDiTConfig(num_layers=options.layers)))
        for tokens in options.tokens:
            image, text = map(int, tokens.split("+"))
            side = int(image**0.5)
            rng = np.random.default_rng(7)
            shapes = ((1, side**2, 64), (1, text, 3584), (1, text, 3584))
            latents, *texts = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
            given = SimpleNamespace(latents=latents, texts=texts, shape=(1, side, side))
            arms = {"mflux": mflux_step(file, options.layers, given), "ours": our_step(file, options.layers, given)}
            for guidance in (1.0, 4.0):
                rows.append({"tokens": tokens, **measured(arms, guidance, options.runs)})
                print(rows[-1], flush=True)
    versions = {"python": platform.python_version(), "mlx": mx.__version__, "mflux": version("mflux")}
    machine = {"cores": os.cpu_count(), "versions": versions, "runs": options.runs}
    options.out.write_text(json.dumps({"layers": options.layers, **machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
