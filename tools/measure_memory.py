"""Peak memory of whole runs against their plans: on this CPU what is resident, on both backends, and on the pretend
accelerator what its allocator counts. Models of several families with random weights.

    python tools/measure_memory.py                 # all runs
    python tools/measure_memory.py qwen-cpu-512    # only runs whose name begins so
    python tools/measure_memory.py pretend         # only what the allocator counts: a minute

What is resident is measured in a process for each run, which has drawn a small picture with the built-in model before,
so that the framework is there and idle: the highest above that, of the run and of each stage. The process is a user's:
no variable of the environment, setting of the allocator or other library is added to it. Runs with a limit are also
drawn by `qwenimg generate`, whose highest memory is above that of the same command with the built-in model. Pictures of
MLX are small, since its build for Linux multiplies without a fast library: minutes for a step of SDXL at 256x256.

The figures go to docs/results/memory.json and allocator.json, in place of those of the same run, and from there into
docs/measured/memory.md. Ends with exit code 1 where a stage is further from its plan than 10 %, unless it is a small
one (15 % of what the allocator counts), or where a run takes more than its limit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from doc_tables import DOCS, table, write
from PIL import Image
from random_folders import controlled, write_folder

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from support import tiny_autoencoder

from qwenimg.common.base.amounts import parse_max
from qwenimg.common.base.config import model_index
from qwenimg.common.networks.vaes.tiny_vae import TinyVAEConfig

PROMPT = "a red circle and a small blue square on a white background"
PICTURES = {"seen.png": (96, 128), "large.png": (384, 384)}  # of models that edit one: height and width
TINY = "taesd_decoder.safetensors"  # of published sizes, beside its encoder
RESULTS, ALLOCATOR = (DOCS / "results" / name for name in ("memory.json", "allocator.json"))
NEAR, NEAR_COUNTED = 0.10, 0.15  # of what is measured, and of what the allocator counts
KEPT = 16 * 10**6  # bytes that a stage may be off in any case: what Python and allocators keep
LEAST = 64 * 10**6  # bytes of a stage whose ratio is in the table
PRETEND = "pretend"  # the backend of runs whose bytes the allocator of tests/support/pretend_device.py counts


@dataclass(frozen=True)
class Run:
    model: str
    backend: str
    options: str

    @property
    def limit(self) -> int | None:
        """Bytes of --max-memory."""
        words = self.options.split()
        return parse_max(words[words.index("--max-memory") + 1]) if "--max-memory" in words else None

    @property
    def name(self) -> str:
        first = [self.backend, self.model] if self.backend == PRETEND else [self.model, self.backend]
        return "-".join([*first, *(word.lstrip("-") for word in self.options.split()[1:])])

    def words(self, path: Path) -> list[str]:
        """The options, with the picture and the tiny VAE in the folder `path`."""
        return [str(path / word) if word in (*PICTURES, TINY) else word for word in self.options.split()]

    @property
    def title(self) -> str:
        """The model, and its tiny VAE."""
        return f"{self.model} with taesd" if TINY in self.options else self.model

    def asked(self, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """Keywords to load the model and to draw with."""
        words = self.words(path)
        given = dict(zip(words[::2], words[1::2], strict=True))
        seen = [given.pop("-i")] if "-i" in given else None
        width, height = map(int, given.pop("--size").split("x"))
        draw: dict[str, Any] = {"prompt": PROMPT, "width": width, "height": height, "steps": 2}
        draw |= {"image": seen} if seen else {}
        draw |= {"control": text} if (text := controlled(path, self.model)) else {}
        if "--guidance" in given:
            draw["guidance"] = float(given.pop("--guidance"))
        if "--layers" in given:
            draw["layers"] = int(given.pop("--layers"))
        named = {"-q": "quantize"}
        load = {named.get(name, name.removeprefix("--").replace("-", "_")): value for name, value in given.items()}
        return {"model": str(path)} | load, draw


RUNS = (
    Run("qwen", "cpu", "--size 512x512 --precision fp32"),
    Run("qwen", "cpu", "--size 512x512 --precision fp32 -q 8"),
    Run("qwen", "cpu", "--size 512x512 --precision fp32 --preset memory"),
    Run("qwen", "cpu", "--size 512x384 --precision bf16 --guidance 1"),
    Run("control", "cpu", "--size 256x256 --precision fp32"),
    Run("qwen", "mlx", "--size 256x256 --precision fp32"),
    Run("edit", "cpu", "--size 256x256 --precision fp32 -i seen.png"),
    Run("qwen", "mlx", "--size 128x128 --precision fp32 -q 4"),
    Run("layered", "cpu", "--size 640x512 --precision fp32 --layers 2 -i seen.png"),
    Run("layered", "cpu", "--size 512x384 --precision bf16 --layers 2 -i seen.png"),
    Run("layered", "mlx", "--size 128x128 --precision fp32 --layers 2 -i seen.png"),
    Run("layered", "mlx", "--size 128x128 --precision bf16 --layers 2 -i seen.png"),
    Run("flux", "cpu", "--size 512x512 --precision fp32"),
    Run("flux", "cpu", "--size 512x512 --precision fp32 -q 8"),
    Run("flux", "cpu", "--size 512x384 --precision bf16"),
    Run("flux", "mlx", "--size 128x128 --precision fp32"),
    Run("flux2", "cpu", "--size 256x256 --precision fp32"),
    Run("flux2-dev", "cpu", "--size 256x256 --precision fp32"),
    Run("flux2-dev", "mlx", "--size 128x128 --precision fp32"),
    Run("flux2-kv", "cpu", "--size 256x256 --precision fp32 -i large.png"),
    Run("flux2-kv", "mlx", "--size 128x128 --precision fp32 -i large.png"),
    Run("flux3", "cpu", "--size 256x256 --precision fp32"),
    Run("flux3", "mlx", "--size 128x128 --precision fp32"),
    Run("longcat", "cpu", "--size 256x256 --precision fp32"),
    Run("longcat", "mlx", "--size 128x128 --precision fp32"),
    Run("chroma", "cpu", "--size 256x256 --precision fp32"),
    Run("chroma", "mlx", "--size 128x128 --precision fp32"),
    Run("ernie", "cpu", "--size 256x256 --precision fp32"),
    Run("ernie", "mlx", "--size 128x128 --precision fp32"),
    Run("krea2", "cpu", "--size 256x256 --precision fp32"),
    Run("krea2", "mlx", "--size 128x128 --precision fp32"),
    Run("lumina", "cpu", "--size 256x256 --precision fp32"),
    Run("lumina", "mlx", "--size 128x128 --precision fp32"),
    Run("ovis", "cpu", "--size 256x256 --precision fp32"),
    Run("ovis", "mlx", "--size 128x128 --precision fp32"),
    Run("qwen21", "cpu", "--size 512x512 --precision fp32 --guidance 4"),
    Run("qwen21", "cpu", "--size 512x512 --precision fp32 -i seen.png"),
    Run("qwen21", "cpu", "--size 512x384 --precision bf16 -i seen.png"),
    Run("qwen21", "mlx", "--size 256x256 --precision fp32"),
    Run("qwen21", "mlx", "--size 128x128 --precision bf16 -i seen.png"),
    Run("sd15", "cpu", "--size 512x512 --precision fp32"),
    Run("sd15", "cpu", "--size 512x512 --precision fp32 --guidance 1"),
    Run("sd15", "cpu", "--size 768x768 --precision fp32 --preset memory"),
    Run("sd15", "mlx", "--size 256x256 --precision fp32"),
    Run("sd15", "cpu", f"--size 512x512 --precision fp32 --vae {TINY}"),
    Run("sd15", "cpu", f"--size 512x512 --precision bf16,vae=bf16 --vae {TINY}"),
    Run("sdxl", "cpu", "--size 512x512 --precision fp32"),
    Run("sdxl", "cpu", "--size 512x512 --precision bf16"),
    Run("sdxl", "cpu", "--size 512x512 --precision fp32 -q 8"),
    Run("sdxl", "mlx", "--size 128x128 --precision fp32"),
    Run("z-image", "cpu", "--size 512x512 --precision fp32"),
    Run("z-image", "cpu", "--size 512x512 --precision fp32 -q 8 --guidance 3"),
    Run("z-image", "cpu", "--size 512x384 --precision bf16"),
    Run("z-image", "mlx", "--size 128x128 --precision fp32"),
    Run("sd3", "cpu", "--size 512x512 --precision fp32"),
    Run("anima", "cpu", "--size 512x512 --precision fp32"),
    Run("anima", "cpu", "--size 512x384 --precision bf16"),
    Run("anima", "mlx", "--size 128x128 --precision fp32"),
    Run("pixart", "cpu", "--size 512x512 --precision fp32"),
    Run("pixart", "mlx", "--size 128x128 --precision fp32"),
    Run("auraflow", "cpu", "--size 256x256 --precision fp32"),
    Run("auraflow", "mlx", "--size 128x128 --precision fp32"),
    Run("hunyuan", "cpu", "--size 512x512 --precision fp32"),
    Run("hunyuan", "mlx", "--size 128x128 --precision fp32"),
    Run("sana", "cpu", "--size 1024x1024 --precision fp32"),
    Run("sana", "mlx", "--size 256x256 --precision fp32"),
    # under a control network
    Run("sd15-controlnet", "cpu", "--size 512x512 --precision fp32"),
    Run("sd15-controlnet", "mlx", "--size 256x256 --precision fp32"),
    Run("sd15-adapter", "cpu", "--size 512x512 --precision fp32"),
    Run("sd15-adapter", "mlx", "--size 256x256 --precision fp32"),
    Run("sdxl-union", "cpu", "--size 512x512 --precision fp32"),
    Run("sdxl-union", "mlx", "--size 128x128 --precision fp32"),
    Run("z-image-control", "cpu", "--size 512x512 --precision fp32"),
    Run("z-image-control", "mlx", "--size 128x128 --precision fp32"),
    Run("flux-control", "cpu", "--size 512x512 --precision fp32"),
    Run("flux-control", "mlx", "--size 128x128 --precision fp32"),
    Run("flux-redux", "cpu", "--size 512x512 --precision fp32"),
    Run("flux-redux", "mlx", "--size 128x128 --precision fp32"),
    # 30 % of the denoiser
    Run("deep", "cpu", "--size 256x256 --precision fp32 --max-memory 725MB"),
    Run("deep", "mlx", "--size 128x128 --precision fp32 --max-memory 725MB"),
    Run("sd15", "cpu", "--size 256x256 --precision fp32 --max-memory 270MB"),
    Run("sd15", "mlx", "--size 128x128 --precision fp32 --max-memory 270MB"),
    Run("sdxl", "cpu", "--size 256x256 --precision fp32 --max-memory 770MB"),
    Run("sdxl", "mlx", "--size 128x128 --precision fp32 --max-memory 770MB"),
    # so little that the branches of guidance are in turn
    Run("sd15", "cpu", "--size 512x512 --precision fp32 --max-memory 340MB"),
    Run("sd15", "mlx", "--size 192x192 --precision fp32 --max-memory 240MB"),
)

# The allocator counts nothing that Python or the framework keeps. Pictures are small, since attention there is one
# without a kernel, whose scores the plan does not have.
COUNTED = (
    Run("qwen", PRETEND, "--size 128x128 --precision fp32"),
    Run("qwen", PRETEND, "--size 128x128 --precision fp32 -q 8"),
    Run("qwen", PRETEND, "--size 128x128 --precision fp32 --max-memory 400MB"),
    Run("flux", PRETEND, "--size 128x128 --precision fp32"),
    Run("flux", PRETEND, "--size 128x128 --precision fp32 -q 8"),
    Run("flux2", PRETEND, "--size 128x128 --precision fp32"),
    Run("sd15", PRETEND, "--size 128x128 --precision fp32"),
    Run("sd15", PRETEND, "--size 128x128 --precision fp32 --max-memory 270MB"),
    Run("sdxl", PRETEND, "--size 128x128 --precision fp32 --max-memory 770MB"),
    Run("z-image", PRETEND, "--size 128x128 --precision fp32"),
    Run("z-image", PRETEND, "--size 128x128 --precision fp32 --max-memory 330MB"),
    Run("sd3", PRETEND, "--size 128x128 --precision fp32"),
)

STARTS = {
    "loading image encoder": "pictures", "loading ip-adapter": "adapter",
    "loading text encoder": "text", "loading text conditioner": "text", "loading controlnet": "control",
    "loading transformer": "modulation",
    "loading unet": "denoise",
    "loading refiner": "refine", "loading vae encoder": "encode", "loading vae decoder": "decode",
}  # fmt: skip


# Models whose control network is loaded before the denoiser and called in the steps alone: its own stage measures its
# weights, and that of the denoiser its calls
CALLED_IN_STEPS = ("sd15-controlnet", "sdxl-union", "z-image-control")


# Models without a stage of their modulation
MODULATED_IN_STEPS = (
    "z-image", "z-image-control", "flux2", "flux2-dev", "flux2-kv", "flux3", "ernie", "krea2", "qwen21", "anima",
    "lumina", "pixart", "sana", "hunyuan",
)  # fmt: skip


def starts(model: str) -> dict[str, str]:
    """Return the stage that each message begins."""
    return STARTS | ({"loading transformer": "denoise"} if model in MODULATED_IN_STEPS else {})


ONE = """
import ctypes, gc, json, sys
from pathlib import Path

asked = json.loads(sys.argv[1])
import qwenimg

def field(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)[name].split()[0]) * 1024

def trim():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)

peaks, last = {}, [""]
def mark(stage):
    peaks[last[0]] = max(peaks.get(last[0], 0), field("VmHWM"))
    last[0] = stage
    Path("/proc/self/clear_refs").write_text("5")

def told(kind, text):
    mark(next((stage for start, stage in asked["starts"].items() if text.startswith(start)), last[0]))

with_shapes = qwenimg.load("shapes", asked["backend"], "fp32")
with_shapes("a red circle", width=64, height=64, steps=1)
with_shapes.close()
del with_shapes
pipe = qwenimg.load(**asked["load"], backend=asked["backend"], notify=told)
clock, add = pipe.runtime.clock, pipe.runtime.clock.add

def timed(what, seconds):
    add(what, seconds)
    if what == "modulate":
        mark("denoise")

clock.add = timed
trim()
idle = field("VmRSS")
mark("")
for event in pipe.stream(**asked["draw"]):
    pass
mark("end")
print(json.dumps({"idle": idle, "stages": {name: peak - idle for name, peak in peaks.items() if name}}))
"""


def made(folder: Path, model: str) -> Path:
    path = folder / model
    if not model_index(path).exists():
        write_folder(path, model)
        tiny_autoencoder.write_authors(path, "taesd", tiny_autoencoder.weights(TinyVAEConfig()))
        for picture, size in PICTURES.items():
            pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
            Image.fromarray(pixels).save(path / picture)
    return path


COMMAND = "import sys; from qwenimg.cli.main import run; sys.exit(run(sys.argv[1:]))"


def planned(path: Path, run: Run) -> dict[str, Any]:
    options = [*run.words(path), "--backend", run.backend, "--steps", "2", "-p", PROMPT, "--json"]
    options += ["--control", text] if (text := controlled(path, run.model)) else []
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "plan", str(path), *options], capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measured(path: Path, run: Run) -> dict[str, Any]:
    load, draw = run.asked(path)
    asked = json.dumps({"backend": run.backend, "load": load, "draw": draw, "starts": starts(run.model)})
    done = subprocess.run([sys.executable, "-c", ONE, asked], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{run.name}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def by_command(path: Path, run: Run) -> int:
    """Return the most bytes of `qwenimg generate` for `run`, over those of the same command with the built-in model."""
    tiny = ["-m", "shapes", "--size", "64x64", "--steps", "1", "--precision", "fp32"]
    return _highest(run, ["-m", str(path), *run.words(path), "--steps", "2"]) - _highest(run, tiny)


def _highest(run: Run, options: Sequence[str]) -> int:
    """Return the highest resident memory of `qwenimg generate` with `options`, in bytes. Linux counts it in kB."""
    with tempfile.TemporaryDirectory() as folder:
        picture = ["--backend", run.backend, "-p", PROMPT, "-o", f"{folder}/a.png"]
        process = subprocess.Popen([sys.executable, "-c", COMMAND, "generate", *options, *picture])
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{run.name}: qwenimg generate ended with exit code {process.returncode}")
    return usage.ru_maxrss * 1024


def counted(path: Path, run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """The plan, and what the allocator counts."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from support.allocated import counted  # which imports torch: only the processes that measure need it otherwise

    return counted(*run.asked(path), starts(run.model))


def compared(path: Path, run: Run) -> dict[str, Any]:
    """Predicted and measured bytes, at the peak and of each stage."""
    plan, found = counted(path, run) if run.backend == PRETEND else (planned(path, run), measured(path, run))
    peak = max(found["stages"].values())
    print(f"{run.name}: predicted {plan['peak_bytes']:,}, measured {peak:,}, ratio {plan['peak_bytes'] / peak:.2f}")
    stages = {s["name"]: [s["weights_bytes"], s["activation_bytes"]] for s in plan["stages"]}
    if run.model in CALLED_IN_STEPS:
        stages["control"][1] = 0
    for name, (weights, activations) in stages.items():
        sizes = " + ".join(f"{count / 1e6:.0f}" for count in (weights, activations))
        print(f"  {name}: planned {sizes} MB, measured {found['stages'][name] / 1e6:.0f}", flush=True)
    figures = {"predicted": plan["peak_bytes"], "measured": peak, "planned": stages, "stages": found["stages"]}
    if run.limit is None or run.backend == PRETEND:
        return figures
    command = by_command(path, run)
    print(f"  qwenimg generate: {command / 1e6:.0f} MB of {run.limit / 1e6:.0f}", flush=True)
    return figures | {"command": command}


def is_over(run: Run, found: dict[str, Any]) -> bool:
    """Whether `run` took more than its limit, in either process."""
    return run.limit is not None and max(found["measured"], found.get("command", 0)) > run.limit


def far(found: dict[str, Any], counted: bool = False) -> dict[str, float]:
    """Return planned over measured of the large stages that are further from their plan than they may be. counted:
    measured by the allocator."""
    near = NEAR_COUNTED if counted else NEAR
    planned = {name: sum(counts) for name, counts in found["planned"].items()}
    return {
        name: planned[name] / count
        for name, count in found["stages"].items()
        if abs(planned[name] - count) > max(near * count, KEPT)
    }


def page(runs: Sequence[Run], results: dict[str, Any]) -> str:
    """Return a row for each model on each backend: the smallest and the largest of its runs' figures."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs:
        if (found := results.get(run.name)) is not None:
            groups.setdefault((run.title, run.backend), []).append(found)
    rows = []
    for (model, backend), some in groups.items():
        peaks = [found["measured"] / 1e6 for found in some]
        ratios = [found["predicted"] / found["measured"] for found in some]
        stages = [ratio for found in some for ratio in _stages(found)]
        figures = (_between(peaks, "{:.0f}"), _between(ratios, "{:.2f}"), _between(stages, "{:.2f}"))
        rows.append((model, backend, str(len(some)), *figures))
    return table(("model", "backend", "runs", "measured, MB", "planned in it", "of each stage"), rows)


def _stages(found: dict[str, Any]) -> list[float]:
    """Return the ratios of the stages of more than 64 MB."""
    planned = {name: sum(counts) for name, counts in found["planned"].items()}
    return [planned[name] / count for name, count in found["stages"].items() if count > LEAST]


def _between(numbers: Sequence[float], form: str) -> str:
    """`0.98 to 1.02`, or one number"""
    ends = dict.fromkeys(form.format(number) for number in (min(numbers), max(numbers)))
    return " to ".join(ends)


def main(chosen: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        failed = [
            drawn(Path(folder), chosen, RUNS, RESULTS, "measured"),
            drawn(Path(folder), chosen, COUNTED, ALLOCATOR, "counted"),
        ]
    return int(any(failed))


def drawn(folder: Path, chosen: Sequence[str], runs: Sequence[Run], file: Path, place: str) -> bool:
    """Measure the chosen `runs` into `file`, and write the table at `place` of docs/measured/memory.md from it. Return
    whether a stage is far from its plan or a run over its limit."""
    failed = False
    results = json.loads(file.read_text()) if file.exists() else {}
    for run in runs:
        if not chosen or run.name.startswith(tuple(chosen)):
            results[run.name] = compared(made(folder, run.model), run)
            if ratios := far(results[run.name], counted=run.backend == PRETEND):
                failed = True
                print(f"  too far from the plan: {ratios}", flush=True)
            if is_over(run, results[run.name]):
                failed = True
                print("  more than --max-memory", flush=True)
            known = {run.name: results[run.name] for run in runs if run.name in results}
            file.write_text(json.dumps(known, indent=1) + "\n")
            write("measured/memory.md", place, page(runs, known))
    return failed


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
