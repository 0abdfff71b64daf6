"""The peer's arm of `tools/bench_against.py mflux`, a process of its own: mflux's transformer and guidance on the same
files, text states, noise and noise levels, timed as ours is.

- It is run by its path, by a Python that has mflux and perhaps no qwenimg: it imports numpy, MLX and mflux alone.
- As in mflux's own pipeline both branches are run at guidance 1 too, and latents are float32 whatever the weights are.
- mflux's VAE has one width: where the folder's has another, decoding is not timed.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from slopes import steady_step

Given = dict[str, Any]  # the arrays that `Job.give` wrote


def run(job: dict[str, Any]) -> dict[str, Any]:
    """The job's arm as `measure.bench.Timings` has it; its final latents [1, C, h, w] are written to `latents`."""
    begun = time.perf_counter()
    _import()
    imported = time.perf_counter() - begun
    model, vae = _transformer(job), _vae(job)
    loaded = time.perf_counter() - begun - imported
    noise, given = np.load(job["noise"]), dict(np.load(job["given"]))
    first, _ = _steps(model, job, noise, given, job["few"])
    slope, processor, final = steady_step(lambda steps: _steps(model, job, noise, given, steps), job)
    np.save(job["latents"], np.array(final))
    stages = {"import": imported, "load": loaded, "first step": first[0], "steady step": slope}
    return {
        "arm": f"mflux {version('mflux')}",
        "device": str(mx.default_device()),
        "precision": job["dtype"],
        "stages": stages | ({} if vae is None else {"decode": _decoding(vae, final)}),
        "processor_step": processor,
        "peak": mx.get_peak_memory(),
        "versions": {"python": platform.python_version(), "mlx": mx.__version__, "mflux": version("mflux")},
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
    }


def _import() -> None:
    """What takes long of it, once."""
    import mflux.models.qwen.variants.txt2img.qwen_image  # noqa: F401


def _transformer(job: dict[str, Any]) -> Any:
    from mflux.models.common.config import ModelConfig
    from mflux.models.qwen.model.qwen_transformer.qwen_transformer import QwenTransformer
    from mflux.models.qwen.weights.qwen_weight_mapping import QwenWeightMapping

    folder = Path(job["folder"]) / "transformer"
    layers = json.loads((folder / "config.json").read_text(encoding="utf-8"))["num_layers"]
    dtype = ModelConfig.precision = getattr(mx, job["dtype"])  # of the last norm's modulation
    model = QwenTransformer(num_layers=layers)
    return filled(model, folder, QwenWeightMapping.get_transformer_mapping(), dtype, {"num_blocks": layers})


def _vae(job: dict[str, Any]) -> Any:
    """None where the folder's has not the shapes of mflux's."""
    from mflux.models.qwen.model.qwen_vae.qwen_vae import QwenVAE
    from mflux.models.qwen.weights.qwen_weight_mapping import QwenWeightMapping

    mapping, dtype = QwenWeightMapping.get_vae_mapping(), getattr(mx, job["vae_dtype"])
    try:
        return filled(QwenVAE(), Path(job["folder"]) / "vae", mapping, dtype, {})
    except ValueError:
        return None


def filled(model: Any, folder: Path, mapping: Any, dtype: Any, counts: Mapping[str, int]) -> Any:
    """`model` with the folder's weights, all that it has and no others. Raises ValueError. Shapes may differ by axes of
    length 1, which mflux leaves to broadcasting."""
    from mflux.models.common.weights.mapping.weight_mapper import WeightMapper

    stored: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        read: Any = mx.load(str(file))
        stored |= {name: value.astype(dtype) for name, value in read.items()}
    mapped = WeightMapper.apply_mapping(stored, mapping, **counts)
    found, expected = _sizes(mapped), _sizes(model.parameters())
    if found != expected:
        raise ValueError(f"{folder}: these are not the tensors of mflux's {type(model).__name__}")
    model.update(mapped)
    mx.eval(model.parameters())
    return model


def _sizes(tree: Any) -> dict[str, int]:
    pairs: Any = tree_flatten(tree)
    return {name: value.size for name, value in pairs}


def _steps(model: Any, job: dict[str, Any], noise: Any, given: Given, steps: int) -> tuple[list[float], Any]:
    """Seconds of each of Euler's steps, and the final latents [1, C, h, w]."""
    from mflux.models.qwen.latent_creator.qwen_latent_creator import QwenLatentCreator
    from mflux.models.qwen.variants.txt2img.qwen_image import QwenImage

    dtype, sigmas = getattr(mx, job["dtype"]), given[str(steps)].tolist()
    texts = [mx.array(given[name]).astype(dtype) for name in ("prompt", "negative")]
    height, width = (8 * side for side in noise.shape[2:])
    config = SimpleNamespace(height=height, width=width, scheduler=SimpleNamespace(sigmas=sigmas))
    x = QwenLatentCreator.pack_latents(mx.array(noise), height, width)
    mx.eval(x, texts)
    seconds = []
    for t, (sigma, sigma_next) in enumerate(pairwise(sigmas)):
        start = time.perf_counter()
        both = [model(t, config, x, states, mx.ones(states.shape[:2])) for states in texts]
        velocity = QwenImage.compute_guided_noise(*both, job["guidance"])
        x = x + (sigma_next - sigma) * velocity
        mx.eval(x)
        seconds.append(time.perf_counter() - start)
    return seconds, QwenLatentCreator.unpack_latents(x, height, width)


def _decoding(vae: Any, latents: Any) -> float:
    start = time.perf_counter()
    mx.eval(vae.decode(latents))
    return time.perf_counter() - start


if __name__ == "__main__":
    print(json.dumps(run(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
