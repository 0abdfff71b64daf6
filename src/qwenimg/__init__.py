"""Text to image with Qwen-Image on Apple Silicon (MLX) and NVIDIA (PyTorch).

    pipe = qwenimg.load("path/to/Qwen-Image")
    pipe("a red circle", seed=1).image.save("circle.png")

Importing this imports neither framework; `load` does.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwenimg.common.version import __version__

if TYPE_CHECKING:
    from qwenimg.common.pipeline import Pipeline
    from qwenimg.common.result import Result, Step

__all__ = ["Pipeline", "Result", "Step", "__version__", "load"]

MAX_FP32_ERROR = 1e-5
_LAZY = {"Pipeline": "pipeline", "Result": "result", "Step": "result"}


def load(
    model: str | Path | None = None,
    backend: str = "auto",
    precision: str = "auto",
    *,
    offline: bool = False,
    notify: Callable[[str, str], None] | None = None,
) -> Pipeline:
    """Opens a model on a backend; weights are read when they are first needed.

    model: a folder in diffusers layout, a recipe name, or a hub id that is in the local cache. backend: auto, mlx,
    cuda or cpu. precision: see `qwenimg.common.precision.SYNTAX`. notify(kind, text) is told of stages and warnings.
    Everything about the files is checked before a framework is imported. Raises QwenimgError.
    """
    from qwenimg import backends
    from qwenimg.common import hub
    from qwenimg.common import precision as policies
    from qwenimg.common.model import open_model

    policies.parse(precision, on_gpu=False)
    resolved = hub.resolve(None if model is None else str(model), offline=offline)
    opened = open_model(resolved.folder)
    engine = backends.load(backend)
    policy = policies.parse(precision, on_gpu=engine.on_gpu)
    error = engine.check_fp32()
    _check_fp32(error, policy.name, engine.device)

    from qwenimg.common.pipeline import Pipeline
    from qwenimg.common.request import Defaults

    recipe = resolved.recipe
    defaults = Defaults()
    if recipe is not None:
        defaults = Defaults(
            width=recipe.width,
            height=recipe.height,
            steps=recipe.steps,
            guidance=recipe.guidance,
            negative_prompt=recipe.negative_prompt,
        )
    return Pipeline(
        engine, opened, policy, name=resolved.name, defaults=defaults, tf32=error > MAX_FP32_ERROR, notify=notify
    )


def _check_fp32(error: float, precision: str, device: str) -> None:
    from qwenimg.common.errors import NumericsError

    if precision.startswith("fp32") and not error <= MAX_FP32_ERROR:
        raise NumericsError(
            f"float32 matrix products on {device} are off by {error:.1e} (at most {MAX_FP32_ERROR:.0e}): "
            f"a reduced-precision mode such as TF32 is on; unset MLX_ENABLE_TF32 or use --precision bf16"
        )


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"qwenimg.common.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'qwenimg' has no attribute {name!r}")
