"""`qwenimg bench`: stages apart, and a slope that leaves out what happens once; and the same beside another program."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_against
import kernels_on_paper
import numpy as np
import pytest
from against import peers
from support.cli_runner import Ran, captured, cli

from qwenimg import Step
from qwenimg.common.measure import bench
from qwenimg.common.measure.bench import STAGES, Workload
from qwenimg.common.pipeline.models.inputs import PictureInputs

WORK = Workload(width=64, height=64, guidance=3.0, few=2, many=6, rounds=3)


class Clockwork:
    """A pipeline whose steps take 0.5 s each, and the first one 9 s more."""

    model = SimpleNamespace(inputs=PictureInputs())

    def stream(self, prompt: str, *, steps: int, **options: Any):
        for i in range(steps):
            yield Step(
                index=i + 1,
                total=steps,
                sigma=1.0,
                seconds=0.5 + (9 if i == 0 else 0),
                read=lambda: np.zeros((1, 4, 8, 8), "f4"),
                see=lambda: np.full((8, 8, 3), 99, np.uint8),
            )
        yield SimpleNamespace(timing={"decode": 1.0}, steps=steps)


def against(*arguments: str) -> Ran:
    return captured(bench_against.main, arguments)


def test_the_slope_leaves_out_what_comes_once() -> None:
    slope, _, last = bench.steady_step(Clockwork(), WORK)  # type: ignore[arg-type]
    assert slope == 0.5 and last.steps == 6  # type: ignore[attr-defined]


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(1)
def test_the_command(backend: str) -> None:
    ran = cli(
        "bench", "shapes", "--backend", backend, "-W", "64", "-H", "64", "--steps", "3", "--rounds", "1", "--json"
    )
    made = json.loads(ran.out)
    (arm,) = made["arms"]
    print(arm)
    assert ran.code == 0 and tuple(arm["stages"]) == STAGES and arm["device"].startswith("CPU")
    assert all(np.isfinite(seconds) for seconds in arm["stages"].values())
    assert arm["stages"]["total"] > arm["stages"]["load"] > 0


def test_the_table_and_refusals() -> None:
    ran = cli("bench", "shapes", "--backend", "cpu", "-W", "64", "-H", "64", "--steps", "3", "--rounds", "1")
    first, *lines = ran.out.decode().splitlines()
    assert "slope of 2 to 3 steps" in first and any(line.startswith("load average") for line in lines)
    assert lines[-1].startswith("check: kept keys")
    assert all(any(line.startswith(stage) for line in ran.out.decode().splitlines()) for stage in STAGES)
    cli("bench", "shapes", "--steps", "2").refused(2, "--steps 2", "give more")
    cli("bench", "no-such-model").refused(5, "no-such-model")
    captured(kernels_on_paper.main, ["h100", "--backend", "mlx"]).refused(2, "H100", "--backend cuda")
    captured(kernels_on_paper.main, ["m4-max", "--backend", "cpu"]).refused(2, "M4 Max", "--backend mlx")


def measured(step: float) -> bench.Timings:
    return bench.Timings(
        arm="x",
        device="CPU",
        precision="fp32",
        stages=dict.fromkeys(STAGES, step),
        processor_step=step,
        peak=None,
        versions={},
        load_average=0.0,
    )


@pytest.mark.parametrize(("difference", "ratio"), [(1e-6, 0.5), (0.2, "INVALID"), (float("nan"), "INVALID")])
def test_a_result_that_differs_has_no_ratio(difference: float, ratio: float | str) -> None:
    made = peers.Compared(ours=measured(1.0), peer=measured(2.0), difference=difference, limit=1e-3)
    assert made.ratio == made.processor_ratio == ratio and made.as_json(WORK)["ratio"] == ratio
    assert peers.shown(made, WORK)[-1].endswith(f"{ratio:.2f}" if isinstance(ratio, float) else ratio)


def test_a_slope_that_is_noise_has_no_ratio() -> None:
    made = peers.Compared(ours=measured(-0.1), peer=measured(2.0), difference=1e-6, limit=1e-3)
    assert made.ratio == "too short to measure"


@pytest.mark.slow
def test_against_diffusers() -> None:
    """The built-in model, which diffusers opens too: the same latents from the same noise."""
    small = ("-W", "64", "-H", "64", "--steps", "3", "--rounds", "1")
    ran = against("diffusers", "shapes", "--backend", "cpu", *small, "--json")
    made = json.loads(ran.out)
    print(made["difference"], made["ratio"])
    ours, theirs = made["arms"]
    assert ran.code == 0 and made["difference"] < 1e-5 and theirs["arm"] == "diffusers"
    assert min(ours["peak"], theirs["peak"]) > 10**8, "two frameworks with a model"


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize("guidance", ["0", "3"])
def test_against_diffusers_for_z_image(guidance: str, tiny_zimage: Path) -> None:
    small = ("-W", "48", "-H", "64", "--steps", "3", "--rounds", "1", "--precision", "fp32")
    ran = against("diffusers", str(tiny_zimage), "--backend", "cpu", *small, "--guidance", guidance, "--json")
    made = json.loads(ran.out)
    print(f"latents differ by {made['difference']:.1e}")
    assert ran.code == 0 and made["difference"] < 1e-4


@pytest.mark.parametrize("name", ["sdxl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sd15", "sd21"))])
@pytest.mark.sample(0)
def test_against_diffusers_for_stable_diffusion(name: str, folders: dict[str, Path]) -> None:
    """Each folder's own scheduler, both branches of guidance: the same latents from the same noise."""
    small = ("-W", "64", "-H", "80", "--steps", "4", "--rounds", "1", "--guidance", "5", "--precision", "fp32")
    ran = against("diffusers", str(folders[name]), "--backend", "cpu", *small, "--json")
    made = json.loads(ran.out)
    print(name, made["difference"], made["ratio"])
    assert ran.code == 0 and made["difference"] < 1e-5 and made["ratio"] != "INVALID"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flux-dev", "flux-schnell", "flux2-klein", "flux2-base", "sd3"])
def test_against_diffusers_for_later_families(kind: str, tiny: dict[str, Path]) -> None:
    """Guidance told, none, and by two branches; texts of two and three encoders; latents in patches."""
    small = ("-W", "48", "-H", "64", "--steps", "3", "--rounds", "1", "--precision", "fp32", "--guidance", "3")
    ran = against("diffusers", str(tiny[kind]), "--backend", "cpu", *small, "--json")
    made = json.loads(ran.out)
    print(f"{kind}: latents differ by {made['difference']:.1e}")
    assert ran.code == 0 and made["difference"] < 1e-4


@pytest.mark.slow
def test_against_diffusers_without_t5(tiny_sd3: dict[str, Path]) -> None:
    small = ("-W", "48", "-H", "64", "--steps", "3", "--rounds", "1", "--precision", "fp32")
    ran = against("diffusers", str(tiny_sd3["large"]), "--backend", "cpu", *small, "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["difference"] < 1e-4


def test_only_text_to_image_folders_have_a_peer(folders: dict[str, Path]) -> None:
    against("diffusers", str(folders["inpaint"])).refused(2, "diffusers takes folders of")
