"""`qwenimg precision`: one image under each policy on this device, compared with float32 or float64, block by block.

All policies get the same prompt, size, seed and schedule. The largest activations are taken from the first and last
step, the texts and the decoding. The error of a block is measured on its last result in the first step, where
everything before it ran under the policy too. The steps between are timed without an observer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np

from qwenimg.common.base.errors import DoesNotFit, NumericsError, UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.families.registry import OpenModel
from qwenimg.common.measure import exactness
from qwenimg.common.measure.activations import ActivationObserver, BlockActivations
from qwenimg.common.pictures.pixels import decibels
from qwenimg.common.pipeline.models.diffusion_model import renew
from qwenimg.common.pipeline.pipeline import Pipeline
from qwenimg.common.pipeline.result import Result
from qwenimg.common.precision import presets
from qwenimg.common.precision.precision import INT8, DenoiserKind, Precision, bases, float64, parse
from qwenimg.common.precision.presets import Choice
from qwenimg.common.precision.residency import ALWAYS
from qwenimg.common.request.request import Defaults
from qwenimg.common.runtime.engine import Engine
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.weights.values import TooLarge

FLOAT16_MAX = 65504.0
NEAR = 40.0  # dB from which on an image counts as the reference's: an error of 1 % of the range
AS_FAST = 1.2  # a policy this many times slower than the fastest counts as equally fast: a few steps do not tell
MAX_FP32_ERROR = 1e-5  # relative error of a product
EXACT_BYTES = 1 << 30  # bytes of weights in float64, up to which float64 on a CPU is the reference


@dataclass(frozen=True, kw_only=True)
class PrecisionTask:
    """The image that is generated under every policy."""

    prompt: str
    width: int
    height: int
    steps: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class PolicyRun:
    """The measurements of one policy on one device."""

    policy: str
    where: str  # the device
    fault: str = ""  # why there is no image
    seconds: float | None = None  # median of a step
    weights: int = 0  # bytes of the denoiser's weights
    peak: int | None = None  # bytes of arrays
    latents_error: float | None = None  # relative L2, against the reference
    pixels_error: float | None = None  # mean square error, full scale 255 squared
    blocks: list[BlockActivations] = field(default_factory=list)

    @property
    def psnr(self) -> float | None:
        """The PSNR in dB, infinite for the same pixels, or None without an image."""
        return None if self.pixels_error is None else decibels(self.pixels_error)


@dataclass(frozen=True, kw_only=True)
class PrecisionReport:
    model: str
    backend: str
    device: str
    versions: Mapping[str, str]
    asked: PrecisionTask
    reference: str  # policy and device of the latents and image to compare with: `fp64 on CPU ...`
    shown: str  # the policy whose largest activations are shown
    compared: Mapping[str, str]  # the policies that blocks are compared with, most precise first, and their devices
    runs: list[PolicyRun]
    recommended: str
    why: str
    auto: Choice

    @property
    def blocks(self) -> list[BlockActivations]:
        """The blocks of the policy whose largest activations are shown."""
        return next((run.blocks for run in self.runs if run.policy == self.shown), [])

    def as_json(self) -> dict[str, Any]:
        report = asdict(self)
        for row, run in zip(report["runs"], self.runs, strict=True):
            row["lossy"] = run.policy == INT8
            row["psnr"] = None if run.psnr is None or math.isinf(run.psnr) else run.psnr
            for block in row["blocks"]:
                del block["values"]
                block["largest"] = None if not math.isfinite(block["largest"]) else block["largest"]
        return report


@dataclass(frozen=True, kw_only=True, eq=False)
class _Drawn:
    run: PolicyRun
    result: Result | None


class Measuring:
    """A model on an engine, ready to generate under one policy after the other."""

    def __init__(self, opened: OpenModel, engine: Engine, name: str, defaults: Defaults):
        self.opened, self.engine = opened, engine
        self.kind = opened.family.precision
        runtime = Runtime(engine, bases(self.kind)["fp32"], _quiet)
        model = opened.family.model(runtime, opened.checkpoint)
        self.pipe = Pipeline(model, name=name, family=opened.family.name, defaults=defaults)

    def size(self) -> tuple[int, int]:
        """Return width and height: the model's, and half of it a side on a CPU, which is slow."""
        usual, part = self.pipe.defaults, 1 if self.engine.on_gpu else 2
        return usual.width // part, usual.height // part

    def policies(self) -> list[str]:
        """Return the policies under which the model can draw here."""
        lossy = parse(INT8, on_gpu=self.engine.on_gpu, kind=self.kind)
        rounds = any(part.multiplies_int8(lossy) for part in self.opened.checkpoint.denoisers)
        return [*self.kind.bases, *([INT8] if rounds and self.engine.workspace.int8 else [])]

    def draw(self, policy: Precision, asked: PrecisionTask) -> _Drawn:
        """Generate the image under `policy`. The result has none if the policy failed, and says why."""
        runtime = self.pipe.runtime
        runtime.precision = policy
        runtime.choice = Choice(preset="", precision=policy.name)
        renew(self.pipe.model, "transformer")
        observer = ActivationObserver(self.engine, self.opened.checkpoint)
        self.engine.peak_memory()
        try:
            result, seconds, fault = *self._steps(asked, observer), ""
        except (DoesNotFit, NumericsError, TooLarge) as error:
            result, seconds, fault = None, None, str(error)
        return _Drawn(
            run=PolicyRun(
                policy=policy.name,
                where=self.engine.device,
                fault=fault,
                seconds=seconds,
                weights=self._weights(runtime.precision),
                peak=self.engine.peak_memory(),
                blocks=observer.found(),
            ),
            result=result,
        )

    def _steps(self, asked: PrecisionTask, observer: ActivationObserver) -> tuple[Result, float | None]:
        """Observe the first step, the last and the decoding. Return the image, and the median seconds of the others."""
        stream = self.pipe.stream(**asdict(asked), **self.pipe.model.inputs.placeholder())
        timed: list[float] = []
        index, total = 0, asked.steps
        while True:
            watched = index == 0 or index >= total - 1
            with self.engine.observe(observer) if watched else nullcontext():
                event = next(stream)
            if isinstance(event, Result):
                return event, median(timed) if timed else None
            timed += [] if watched else [event.seconds]
            index, total = event.index, event.total
            observer.end_of_first()

    def _weights(self, policy: Precision) -> int:
        component = self.opened.checkpoint[self.opened.family.denoiser]
        return component.stored(policy).when(ALWAYS).nbytes


def _quiet(kind: str, text: str) -> None:
    """Drop a message."""


def measure(
    device: Measuring,
    exact: Measuring | None,
    asked: PrecisionTask,
    policies: Sequence[str],
    tell: Callable[[str], None],
) -> PrecisionReport:
    """Generate under float32, under `policies`, and, if `exact` is given, in float64 there; return the report. `tell`
    gets the name of each run.

    If float32 does not fit, the first policy that does is the reference. Raises NumericsError on a device whose float32
    products are less precise."""
    error = exactness.float32_error(device.engine)
    if not error <= MAX_FP32_ERROR:
        raise NumericsError(f"float32 products on {device.engine.device} are off by {error:.1e}; see qwenimg doctor")
    results = list[_Drawn]()
    if exact is not None:
        tell(f"fp64 on {exact.engine.device}")
        results.append(exact.draw(float64(exact.kind), asked))
    for name in dict.fromkeys(["fp32", *policies]):
        tell(name)
        results.append(device.draw(parse(name, on_gpu=device.engine.on_gpu, kind=device.kind), asked))
    on_device = [one.run for one in results if one.run.policy != "fp64"]
    reference = next((one for one in results if one.result is not None), None)
    shown = next((run for run in on_device if not run.fault), on_device[0])
    compared = [one.run for one in results if one.run.policy == "fp64" and not one.run.fault] + [shown]
    runs = [_compared(one, reference, compared) for one in results if one.run.policy != "fp64"]
    auto = presets.choose(
        presets.AUTO,
        presets.AUTO,
        device.kind,
        device.engine.facts,
        device.opened.checkpoint.largest,
        device.engine.free_memory(),
    )
    recommended, why = recommend(runs)
    return PrecisionReport(
        model=device.pipe.model_name,
        backend=device.engine.name,
        device=device.engine.device,
        versions=device.engine.versions(),
        asked=asked,
        reference="" if reference is None else f"{reference.run.policy} on {reference.run.where}",
        shown=shown.policy,
        compared={run.policy: run.where for run in compared},
        runs=runs,
        recommended=recommended,
        why=why,
        auto=auto,
    )


def _compared(one: _Drawn, reference: _Drawn | None, compared: Sequence[PolicyRun]) -> PolicyRun:
    """Return the run of `one` with its errors against `reference` and against the blocks of `compared`."""
    against = [(run.policy, {block.key: block for block in run.blocks}) for run in compared]
    blocks = []
    for block in one.run.blocks:
        errors = {policy: block.distance(others.get(block.key)) for policy, others in against}
        blocks.append(replace(block, errors={policy: error for policy, error in errors.items() if error is not None}))
    if one.result is None or reference is None or reference.result is None:
        return replace(one.run, blocks=blocks)
    result, best = one.result, reference.result
    difference = result.pixels.astype(np.float64) - best.pixels
    return replace(
        one.run,
        blocks=blocks,
        latents_error=relative(result.latents, best.latents),
        pixels_error=float(np.mean(difference**2)),
    )


def relative(array: Any, best: Any) -> float:
    """Return the L2 norm of `array` - `best` divided by the L2 norm of `best`."""
    wide = best.astype(np.float64)
    return float(np.linalg.norm(array - wide)) / max(float(np.linalg.norm(wide)), 1e-300)


def chosen(text: str, kind: DenoiserKind) -> list[str]:
    """Return the policies in `text`, separated by commas. Raises UsageError."""
    names = [name.strip().lower() for name in text.split(",")]
    for name in names:
        if name not in (*kind.bases, INT8):
            raise UsageError(
                f"--policies {clean(text, 40)!r}: {clean(name, 40)!r} is not one of {', '.join(kind.names)}"
            )
    return names


def recommend(runs: Sequence[PolicyRun]) -> tuple[str, str]:
    """Return the recommended policy and the reason: among those near the reference and about as fast as the fastest,
    the most accurate. Plain float16 is never recommended, since one image does not show that it never overflows; nor is
    what is lossy."""
    complete = [run for run in runs if not run.fault and run.policy not in ("fp16-plain", INT8)]
    if not complete:
        return "", "no policy gave a picture here"
    near = [run for run in complete if (run.psnr or 0) >= NEAR]
    if not near:
        best = min(complete, key=_error)
        return best.policy, f"no picture is within {NEAR:.0f} dB of the reference, and this one is the nearest"
    fastest = min(_seconds(run) for run in near)
    fast = [run for run in near if _seconds(run) <= AS_FAST * fastest]
    best = min(fast, key=_error)
    others = [run.policy for run in fast if run is not best]
    of = f"of the {len(near)} whose picture is within {NEAR:.0f} dB of the reference it is the fastest"
    also = f", as {' and '.join(others)} within {AS_FAST - 1:.0%}, and the nearest of these" if others else ""
    return best.policy, of + also


def _error(run: PolicyRun) -> float:
    return math.inf if run.latents_error is None else run.latents_error


def _seconds(run: PolicyRun) -> float:
    return math.inf if run.seconds is None else run.seconds
