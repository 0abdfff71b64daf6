"""Our arm and a peer's, each in a process of its own, in turn; and whether both made the same latents."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.errors import BackendMissing
from qwenimg.common.base.text import aligned, clean
from qwenimg.common.measure.bench import Ask, Measured, lines
from qwenimg.common.numbers import noise

# Relative (L2) difference of the final latents up to which two arms made the same: of float32 roundings alone, and of
# 16-bit ones, which guidance multiplies at every step.
PIPELINES = ("QwenImagePipeline", "StableDiffusionPipeline", "StableDiffusionXLPipeline")  # of folders it is built for
LIMITS = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What both arms run."""

    folder: str
    backend: str  # ours
    device: str  # the peer's
    policy: str  # ours: what --precision says
    compile: str
    graphs: str
    dtype: str  # of the denoiser
    vae_dtype: str
    prompt: str
    negative_prompt: str
    guidance: float
    few: int
    many: int
    rounds: int
    noise: str = ""  # a file
    latents: str = ""  # the file to write

    def ask(self) -> Ask:
        rows, columns = np.load(self.noise).shape[2:]
        return Ask(
            width=8 * columns,
            height=8 * rows,
            guidance=self.guidance,
            few=self.few,
            many=self.many,
            rounds=self.rounds,
            prompt=self.prompt,
            noise=self.noise,
        )

    def keep(self, latents: NDArray[np.float32]) -> None:
        np.save(self.latents, latents)


def read(file: Path) -> Job:
    """A job as `compare` wrote it."""
    return Job(**json.loads(file.read_text(encoding="utf-8")))


@dataclass(frozen=True, kw_only=True)
class Compared:
    ours: Measured
    peer: Measured
    difference: float  # of the final latents, relative (L2)
    limit: float

    @property
    def valid(self) -> bool:
        return self.difference <= self.limit

    @property
    def ratio(self) -> float | str:
        """Of the steady steps, ours to the peer's."""
        ours, peer = (arm.stages["steady step"] for arm in (self.ours, self.peer))
        if not self.valid:
            return "INVALID"
        return ours / peer if min(ours, peer) > 0 else "too short to measure"

    def as_json(self) -> dict[str, Any]:
        arms = [asdict(self.ours), asdict(self.peer)]
        return {"arms": arms, "difference": self.difference, "limit": self.limit, "ratio": self.ratio}


def compare(job: Job, ours: list[str], peer: list[str], shape: tuple[int, int, int, int], seed: int) -> Compared:
    """Runs the command `ours`, then `peer`, each with the file of its job. Raises BackendMissing where one fails."""
    with tempfile.TemporaryDirectory(prefix="qwenimg-bench-") as folder:
        start = Path(folder) / "noise.npy"
        np.save(start, noise.normal(shape, seed=seed))
        arms, latents = [], []
        for name, command in (("ours", ours), ("peer", peer)):
            made = Path(folder) / f"{name}.npy"
            arms.append(_arm(command, replace(job, noise=str(start), latents=str(made)), Path(folder) / f"{name}.json"))
            latents.append(np.load(made).astype(np.float64))
    difference = float(np.linalg.norm(latents[0] - latents[1]) / np.linalg.norm(latents[1]))
    return Compared(ours=arms[0], peer=arms[1], difference=difference, limit=LIMITS[job.dtype])


def _arm(command: list[str], job: Job, file: Path) -> Measured:
    file.write_text(json.dumps(asdict(job)), encoding="utf-8")
    done = subprocess.run([sys.executable, *command, str(file)], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise BackendMissing(f"bench: the arm {clean(' '.join(command), 80)} failed: {clean(last, 120)}")
    made: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return Measured(**made)


def shown(made: Compared, ask: Ask) -> list[str]:
    """The table of both arms, with the parity cell."""
    ratio = made.ratio if isinstance(made.ratio, str) else f"{made.ratio:.2f}"
    rows = [
        ("parity", f"{made.difference:.1e} relative L2 of the latents, limit {made.limit:g}"),
        ("steady step, ours to the peer's", ratio),
    ]
    return [*lines([made.ours, made.peer], ask), *aligned(rows)]
