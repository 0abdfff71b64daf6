"""What limits on the process leave, and what a picture is said to take before a weight is read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import qwenimg
from qwenimg import backends
from qwenimg.common.base.amounts import duration
from qwenimg.common.base.errors import DoesNotFit, QwenimgError
from qwenimg.common.base.safe_files import OpenFile
from qwenimg.common.memory import estimate, limits, memory, operations
from qwenimg.common.networks.denoisers import unet
from qwenimg.common.networks.vaes import kl_vae
from qwenimg.common.pictures import pixels as image
from qwenimg.common.pipeline.steps.plan import SamplingPlan, Segment
from qwenimg.common.runtime import rates
from qwenimg.common.sampling import table
from qwenimg.common.sampling.types import Schedule

linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux holds a process to these limits")

# Limits

RUN = """
import resource, sys
from qwenimg import backends
from qwenimg.cli.main import run

backend, picture = sys.argv[1:]
backends.load(backend)
for kind, field in (("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData")):
    used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))
    before = resource.getrlimit(getattr(resource, kind))
    resource.setrlimit(getattr(resource, kind), (used * 1024 + 300 * 2**20, before[1]))
    print(kind, run(["a red circle", "--size", "2048x2048", "--backend", backend, "-o", picture]), flush=True)
    resource.setrlimit(getattr(resource, kind), before)
"""


@linux
@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(0)
def test_a_limit_is_told_with_numbers_before_any_work(tmp_path: Path, backend: str) -> None:
    """MLX ended by SIGSEGV, torch without numbers and after minutes of steps. One process for both limits: importing
    torch takes longer than what is tested."""
    arguments = [sys.executable, "-c", RUN, backend, str(tmp_path / "a.png")]
    done = subprocess.run(
        arguments, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    lines = [line for line in done.stderr.splitlines() if "error" in line]
    print(*lines, sep="\n")
    assert done.returncode == 0 and done.stdout.splitlines() == ["RLIMIT_AS 4", "RLIMIT_DATA 4"], done.stderr
    assert len(lines) == 2 and "step 1" not in done.stderr
    assert all(" takes " in line and " are free on " in line for line in lines)
    assert not list(tmp_path.iterdir())


ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # each takes memory of its own
LIMITED = """
import resource, sys

kind, size = sys.argv[1:]
resource.setrlimit(getattr(resource, kind), (int(size) << 10, resource.RLIM_INFINITY))
from qwenimg.cli.main import run

raise SystemExit(run(["a red circle", "-m", "shapes", "-o", "a.png"]))
"""


@linux
@pytest.mark.parametrize(
    ("kind", "size", "said"),
    [
        ("RLIMIT_AS", 61_440, "loading numpy takes 157.3 MB of memory, `ulimit -v` leaves "),
        ("RLIMIT_AS", 500_000, "loading torch takes 734.0 MB of memory, `ulimit -v` leaves "),
        ("RLIMIT_DATA", 51_200, "loading numpy takes 104.9 MB of memory, `ulimit -d` leaves "),
        ("RLIMIT_DATA", 200_000, "loading torch takes 314.6 MB of memory, `ulimit -d` leaves "),
        ("RLIMIT_AS", 20_480, "raise the limits on this process"),
    ],
)
@pytest.mark.sample(1)
def test_a_limit_below_what_the_libraries_take(tmp_path: Path, kind: str, size: int, said: str) -> None:
    """OpenBLAS, torch and Python's threads ended the process before our own check, each in its way."""
    arguments = [sys.executable, "-c", LIMITED, kind, str(size)]
    done = subprocess.run(
        arguments, capture_output=True, text=True, timeout=300, cwd=tmp_path, env={**os.environ, **ONE_THREAD}
    )
    print(done.stderr)
    assert done.returncode == 4 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not list(tmp_path.iterdir())


class _Unloadable:
    """The system's loader, of an engine whose libraries it cannot load."""

    def __init__(self, text: str):
        self.text = text

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "qwenimg.backends.torch.engine":
            raise ImportError(self.text)


@pytest.mark.parametrize("name", ["auto", "cpu"])
@pytest.mark.parametrize(
    ("fault", "limit", "code", "text"),
    [
        ("libtorch_cuda.so: failed to map segment from shared object", "`ulimit -v`", 4, "free; raise `ulimit -v`"),
        ("libtorch_cuda.so: failed to map segment from shared object", "", 4, "free; close other programs"),
        ("libcudart.so.13: cannot open shared object file", "", 3, "torch is installed but does not load (libcudart"),
    ],
)
def test_a_package_that_does_not_load(
    name: str, fault: str, limit: str, code: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's build for CUDA maps 3.2 GB: under `ulimit -v 2000000` its loader fails, which was told to install torch
    again, or of `auto` as a bug."""
    monkeypatch.delitem(sys.modules, "qwenimg.backends.torch.engine", raising=False)
    monkeypatch.setattr(sys, "meta_path", [_Unloadable(fault), *sys.meta_path])
    monkeypatch.setattr(memory, "machine_ram", lambda: (2**34, limit))
    with pytest.raises(QwenimgError, match=re.escape(text)) as refused:
        backends.load(name)
    print(refused.value)
    assert refused.value.exit_code == code


GIB = 2**30


def group(folder: Path, names: tuple[str, str], limit: object, used: int, stat: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip((*names, "memory.stat"), (limit, used, stat), strict=True):
        (folder / name).write_text(f"{value}\n")


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_control_group_counts(tmp_path: Path, version: int) -> None:
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    cached = "inactive_file" if version == 2 else "total_inactive_file"
    base = tmp_path if version == 2 else tmp_path / "memory"
    own = "0::/a/b\n" if version == 2 else "12:cpu,cpuacct:/z\n4:memory:/a/b\n"
    assert limits.left_in_groups(tmp_path, own) == limits.NONE
    group(base / "a/b", names, 8 * GIB, GIB, f"anon 5\n{cached} {GIB // 2}")
    assert limits.left_in_groups(tmp_path, own) == 7.5 * GIB
    group(base / "a", names, 4 * GIB, 2 * GIB, "")
    assert limits.left_in_groups(tmp_path, own) == 2 * GIB
    group(base, names, GIB, GIB // 4, "")  # as a container sees its own
    assert limits.left_in_groups(tmp_path, own) == 0.75 * GIB
    group(base, names, "max" if version == 2 else 2**63 - 4096, 5, "")
    group(base / "a", names, GIB, 2 * GIB, "")
    assert limits.left_in_groups(tmp_path, own) == 0


# Estimates


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.parametrize("kind", ["qwen", "sd15"])
@pytest.mark.sample(0)
def test_an_estimate_reads_no_weight(
    tiny_folder: Path, backend: str, kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folder if kind == "qwen" else request.getfixturevalue("folders")[kind]
    pipe = qwenimg.load(folder, backend=backend, precision="fp32")
    touched: list[str] = []
    monkeypatch.setattr(OpenFile, "fill", lambda self, view, begin: touched.append(self.path.name))
    monkeypatch.setattr(pipe.engine, "free_memory", lambda: 2**50)
    monkeypatch.setattr(rates, "measure", lambda engine, layer, dtype, small: 1e10)
    asked: dict[str, Any] = {"steps": 4, "guidance": 3.0}
    small, large, vast = (pipe.estimate("a ring", width=s, height=s, **asked) for s in (512, 2048, 8192))
    print(*(estimate.summary(one.memory, one.seconds) for one in (small, large, vast)), sep="; ")
    # Attention over all pixels: time grows by more than the 16-fold number of pixels. MLX on a CPU holds a chunk of
    # scores, which does not grow.
    assert vast.seconds > 16 * large.seconds > 16**2 * small.seconds
    assert vast.memory > 3 * large.memory > 3 * small.memory and vast.memory > 8192**2 * 54
    monkeypatch.setattr(pipe.engine, "free_memory", lambda: 8192**2 * 54 - 1)  # which no tiles make less
    for refused in (pipe.estimate, pipe):
        with pytest.raises(DoesNotFit, match=r" takes .* GB in fp32, .* GB are free"):
            refused("a ring", width=8192, height=8192, **asked)
    assert not touched


class Shapes:
    """Of a plan what operations are counted of."""

    def __init__(self, shapes: Any):
        self.entries = {name: SimpleNamespace(shape=shape) for name, shape in shapes.items()}


def test_operations_of_the_published_stable_diffusion() -> None:
    """Of 512x512: known to take some 0.8 10^12 for a prediction of the UNet, and 2.5 10^12 for decoding."""
    config = unet.UNetConfig(cross_attention_dim=768)
    one = operations.unet(Shapes(unet.manifest(config)), 4, 64, 64)
    widths = kl_vae.KLVAEConfig(block_out_channels=(128, 256, 512, 512), layers_per_block=2)
    decoding = operations.decoder(Shapes(kl_vae.manifest(widths)), 64, 64)
    print(f"unet {one:.2e}, decoder {decoding:.2e}")
    assert 0.6e12 < one < 1.0e12 and 2.2e12 < decoding < 3.0e12


def test_the_picture_in_8_bit_takes_what_is_predicted() -> None:
    import tracemalloc

    pixels = np.zeros((3, 512, 512), np.float32)
    tracemalloc.start()
    image.to_uint8(pixels)
    peak = tracemalloc.get_traced_memory()[1] + pixels.nbytes
    tracemalloc.stop()
    predicted = pixels.size * 18
    print(f"measured {peak / pixels.size:.1f} bytes a value, predicted 18")
    assert peak <= predicted <= 1.5 * peak


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0, "0.1 ms"), (0.0025, "2.5 ms"), (0.0149, "15 ms"), (0.2326, "230 ms"), (1, "1 s"), (1.26, "1.3 s"),
        (2.4, "2 s"), (15.6, "16 s"), (119, "100 s"), (130, "2 min"), (7000, "100 min"), (7300, "2 h"),
        (1e6, "12 days"),
    ],
)  # fmt: skip
def test_durations(seconds: float, told: str) -> None:
    assert duration(seconds) == f"roughly {told}"


@pytest.mark.parametrize(
    ("said", "step", "took", "rest", "telling"),
    [
        (20, 5, 6, 18, False),
        (20, 5, 20, 60, True),
        (60, 5, 1, 11, True),
        (4, 1, 2.4, 7.2, False),  # over before it is read
        (800, 5, 5, 795, True),  # long, even as was said
        (20, 5, 200, 600, True),
    ],
)
def test_what_is_left_after_the_first_step(said: float, step: float, took: float, rest: float, telling: bool) -> None:
    """Of two pictures, which are alike but for their length."""
    pictures = [estimate.Estimate(memory=1, seconds=said * share, step=step) for share in (0.25, 0.75)]
    assert estimate.left(pictures, took) == (pytest.approx(rest), telling)


def test_every_evaluation_counts(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heun asks twice a step, but once in the last; an estimate took both at one level for one."""
    pipe = qwenimg.load(tiny_folder, backend="cpu", precision="fp32")
    monkeypatch.setattr(rates, "measure", lambda engine, layer, dtype, small: 1e10)
    found = {name: pipe.estimate("a ring", width=512, height=512, steps=8, sampler=name) for name in ("euler", "heun")}
    ratio = found["heun"].step / found["euler"].step
    print(f"heun takes {ratio:.3f} times euler's")
    assert ratio == pytest.approx(15 / 8)


def test_the_rate_is_that_of_the_middle_layer_after_a_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first was up to 20 times slower than the next, and the best much better than what a run gets."""
    taken = iter([9.0, 0.01, 0.03, 0.02, 0.01, 0.05])

    class Engine:
        on_gpu = False

        def layer_seconds(self, layer: str, dtype: str, shapes: rates.Shapes, small: bool) -> float:
            return next(taken)

    monkeypatch.setattr(rates, "SECONDS", 0.2)
    assert rates.measure(Engine(), "matmul", "float32") == pytest.approx(2 * 512 * 1024 * 1024 / 0.02)
    assert not list(taken)
    assert rates.operations("conv2d", rates.CPU["conv2d"]) == 2 * 9 * 256 * 256 * 32 * 32


def test_sizes() -> None:
    assert memory.scores(8, 2, 1024, 10**6) == 10**6 and memory.scores(8, 2, 1024, 0) == 0


@pytest.mark.parametrize(("sampler", "evaluations"), [("euler", 4), ("heun", 7), ("pndm", 5), ("dpm_adaptive", 12)])
def test_a_plan_counts_its_evaluations(sampler: str, evaluations: int) -> None:
    """An adaptive sampler looks at arrays, so its plan is not run on floats."""
    schedule = Schedule(sigmas=(14.0, 5.0, 1.0, 0.1, 0.0))
    segment = Segment(schedule=schedule, solver=table.find(sampler).function)
    assert SamplingPlan(sampler=sampler, schedule="model", segments=(segment,)).evaluations == evaluations
