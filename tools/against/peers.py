"""Our arm and a peer's, each in a process of its own, in turn; and whether both made the same latents."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base import leftovers
from qwenimg.common.base.config import read_json
from qwenimg.common.base.errors import BackendMissing, UsageError
from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.text import aligned, clean
from qwenimg.common.families.qwen_image.model import QwenImage
from qwenimg.common.measure.bench import Timings, Workload, lines
from qwenimg.common.networks.denoisers.qwen_dit import QwenDiTConfig
from qwenimg.common.numbers import noise
from qwenimg.common.pipeline.pipeline import Pipeline
from qwenimg.common.runtime.checkpoint import Checkpoint, Component

# Of the folders that a peer opens.
PIPELINES = {
    "diffusers": (
        "QwenImagePipeline",
        "StableDiffusionPipeline",
        "StableDiffusionXLPipeline",
        "ZImagePipeline",
        "FluxPipeline",
        "Flux2KleinPipeline",
        "StableDiffusion3Pipeline",
    ),
    "mflux": ("QwenImagePipeline",),
}
_LOOK = """
import sys
from importlib.util import find_spec
print(*[name for name in sys.argv[1:] if find_spec(name) is None], "looked")
"""
# Relative (L2) difference of the final latents up to which two arms made the same: of float32 roundings alone, and of
# 16-bit ones, which guidance multiplies at every step.
LIMITS = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What both arms run."""

    folder: str
    backend: str  # ours
    device: str  # the peer's
    policy: str  # ours: what --precision says
    compile: str
    dtype: str  # of the denoiser
    vae_dtype: str
    prompt: str
    negative_prompt: str
    guidance: float
    few: int
    many: int
    rounds: int
    scale: int = 8  # pixels on a side of a latent, in which noise is given
    given: str = ""  # a file that our arm writes for the peer's, see `give`; none for a peer that encodes by itself
    noise: str = ""  # a file
    latents: str = ""  # the file to write

    def workload(self) -> Workload:
        rows, columns = np.load(self.noise).shape[2:]
        return Workload(
            width=self.scale * columns,
            height=self.scale * rows,
            guidance=self.guidance,
            few=self.few,
            many=self.many,
            rounds=self.rounds,
            prompt=self.prompt,
            noise=self.noise,
        )

    def keep(self, latents: NDArray[np.float32]) -> None:
        np.save(self.latents, latents)

    def give(self, pipe: Pipeline) -> None:
        """Writes what the steps of ours take beside the noise: `prompt` and `negative`, text states [1 S C], and by the
        number of steps the noise levels, from the first down to 0."""
        model, work = pipe.model, self.workload()
        assert isinstance(model, QwenImage)
        few, many = (
            pipe.check(work.prompt, width=work.width, height=work.height, guidance=work.guidance, steps=steps)
            for steps in (work.few, work.many)
        )
        prompt, negative = map(pipe.engine.numpy, model.texts.states([few.prompt, few.negative_prompt]))
        given: dict[str, Any] = {"prompt": prompt, "negative": negative}
        given |= {str(request.steps): np.array(model.plan(request).sigmas) for request in (few, many)}
        np.savez(self.given, **given)


def read(file: Path) -> Job:
    """Return a job as `compare` wrote it. Raises ModelError."""
    try:
        return Job(**read_json(file))  # type: ignore[arg-type]
    except TypeError:
        raise bad(file, "is no job that bench_against.py wrote") from None


@dataclass(frozen=True, kw_only=True)
class Compared:
    ours: Timings
    peer: Timings
    difference: float  # of the final latents, relative (L2)
    limit: float

    @property
    def valid(self) -> bool:
        return self.difference <= self.limit

    @property
    def ratio(self) -> float | str:
        """Of the steady steps by the clock, ours to the peer's."""
        return self._ratio(self.ours.stages["steady step"], self.peer.stages["steady step"])

    @property
    def processor_ratio(self) -> float | str:
        """Of the seconds of all processors in them."""
        return self._ratio(self.ours.processor_step, self.peer.processor_step)

    def _ratio(self, ours: float, peer: float) -> float | str:
        if not self.valid:
            return "INVALID"
        return ours / peer if min(ours, peer) > 0 else "too short to measure"

    def as_json(self, work: Workload) -> dict[str, Any]:
        ratios = {"ratio": self.ratio, "processor_ratio": self.processor_ratio}
        arms = [asdict(self.ours), asdict(self.peer)]
        return {**asdict(work), "arms": arms, "difference": self.difference, "limit": self.limit, **ratios}


# What a peer can run


def check_files(peer: str, folder: Path, checkpoint: Checkpoint) -> None:
    """Raises UsageError for a model that `peer` does not run."""
    index = folder / "model_index.json"
    found = read_json(index).get("_class_name") if index.is_file() else "no folder in diffusers layout"
    if found not in PIPELINES[peer]:
        raise UsageError(
            f"{peer} takes folders of {', '.join(PIPELINES[peer])}; this is {clean(found, 60)}; "
            "`qwenimg bench` takes every model"
        )
    if peer == "mflux":
        _check_width(checkpoint["transformer"])


def _check_width(transformer: Component) -> None:
    """mflux reads no config.json: it has the published numbers, but for that of the layers."""
    found, fixed = asdict(transformer.config), asdict(QwenDiTConfig(num_layers=transformer.config.num_layers))
    other = ", ".join(f"{name} {value}" for name, value in found.items() if value != fixed[name])
    if other:
        raise UsageError(
            f"mflux: its transformer is 24 heads x 128 on text of 3584, of any number of layers; "
            f"this one has {clean(other, 120)}"
        )
    if any(entry.source.code for entry in transformer.plan.entries.values()):
        raise UsageError("mflux is for weights that are not quantized; those of this transformer are")


def check_python(peer: str, python: str, needs: Sequence[str], install: str) -> None:
    """Raises BackendMissing where `python` does not have the packages that the arm of `peer` needs, and UsageError
    where it is none."""
    try:
        done = subprocess.run([python, "-c", _LOOK, *needs], capture_output=True, text=True, check=False)
        *missing, last = done.stdout.split() or [""]
    except OSError:
        last = ""
    if last != "looked":
        raise UsageError(f"--peer-python {clean(python, 80)}: that is no Python")
    if missing:
        raise BackendMissing(
            f"{peer}: {clean(python, 80)} has no {', '.join(missing)}; {install} there, or name the Python "
            "that has it with --peer-python"
        )


# Both arms


def compare(job: Job, arms: Mapping[str, list[str]], shape: tuple[int, int, int, int]) -> tuple[Compared, Workload]:
    """Run the commands in `arms`, ours first, each on its own copy of `job`; compare their latents.

    shape: of the noise. Raises BackendMissing where a command fails.
    """
    with tempfile.TemporaryDirectory(prefix="qwenimg-bench-") as folder:
        start = Path(folder) / "noise.npy"
        np.save(start, noise.normal(shape, seed=Workload.seed))
        given = str(Path(folder) / job.given) if job.given else ""
        timings, latents = [], []
        for name, command in arms.items():
            made = Path(folder) / f"{name}.npy"
            its = replace(job, noise=str(start), given=given, latents=str(made))
            timings.append(_arm(name, command, its, Path(folder) / f"{name}.json"))
            latents.append(np.load(made).astype(np.float64))
        work = replace(its.workload(), noise="")
    difference = float(np.linalg.norm(latents[0] - latents[1]) / np.linalg.norm(latents[1]))
    return Compared(ours=timings[0], peer=timings[1], difference=difference, limit=LIMITS[job.dtype]), work


def _arm(name: str, command: list[str], job: Job, file: Path) -> Timings:
    file.write_text(json.dumps(asdict(job)), encoding="utf-8")
    child = subprocess.Popen([*command, str(file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with child, leftovers.running(child):
        out, err = child.communicate()
    if child.returncode:
        last = (err.strip().splitlines() or ["no message"])[-1]
        raise BackendMissing(f"the arm of {name} failed: {clean(last, 160)}")
    made: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return Timings(**made)


def shown(made: Compared, work: Workload) -> list[str]:
    """The table of both arms, with the parity cell."""
    by_clock, by_processors = (
        ratio if isinstance(ratio, str) else f"{ratio:.2f}" for ratio in (made.ratio, made.processor_ratio)
    )
    rows = [
        ("parity", f"{made.difference:.1e} relative L2 of the latents, limit {made.limit:g}"),
        ("step, of processors, ours to the peer's", by_processors),
        ("steady step, ours to the peer's", by_clock),
    ]
    return [*lines([made.ours, made.peer], work), *aligned(rows)]
