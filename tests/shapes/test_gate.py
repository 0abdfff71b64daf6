"""The gate's figures against pictures whose faults are known, and the card that is made of them."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import gate
import gate_draw
import model_card
import numpy as np
import pytest
from gate_draw import Artist, Drawn, Job
from support.rules import ROOT
from support.truthful import pixels, scene
from training.describe import dataset_hash

from qwenimg.common.base.errors import NumericsError
from qwenimg.common.families import catalog
from qwenimg.common.shapes import builtin, scenes
from qwenimg.common.shapes.check import check, look

pytestmark = pytest.mark.sample(0)  # it takes pictures of the built-in model

SIDE = 96  # pixels
NOBODY = Artist(model="nobody", backend="cpu", precision="fp32")


@pytest.fixture(scope="module")
def all_jobs() -> list[Job]:
    return gate_draw.jobs(None, None)


def drawn(job: Job, color: str | None = None) -> Drawn:
    """What a perfect model draws for it, or one that paints all first things in `color`."""
    picture = pixels(scene(job.asked.wanted, job.asked.seed, color=color), SIDE, SIDE)
    colors = tuple(one.color for one in look(picture)[1])
    return Drawn(job=job, pixels=picture, verdict=check(picture, job.asked.wanted), colors=colors)


def test_jobs(all_jobs: list[Job]):
    """The counts of the gate's description; every pair once at guidance 1; 8 shapes in 8 seeds without a colour."""
    count = Counter(job.group for job in all_jobs)
    print(count)
    assert sum(count[group] for group in ("trained", "held-out")) == 352 and count["chinese"] == 176
    assert sum(count.values()) == 816 + 88 + 64 + 64
    low = [job for job in all_jobs if job.group == gate_draw.LOW_GUIDANCE]
    assert len({job.asked.prompt for job in low}) == 88 and {job.guidance for job in low} == {1.0}
    red = {job.negative for job in all_jobs if job.group == gate_draw.WITHOUT_RED}
    assert red == {"red"} and {job.negative for job in all_jobs if job.group != gate_draw.WITHOUT_RED} == {" "}
    few = gate_draw.jobs(["relation", "size"], 5)
    assert Counter(job.group for job in few) == {"relation": 5, "size": 5}
    with pytest.raises(SystemExit, match="nothing is none of trained"):
        gate_draw.jobs(["nothing"], None)


def test_a_perfect_model_passes_and_each_fault_is_found(all_jobs: list[Job]):
    """One in twelve of all jobs, in which every group is: perfect, then with one group painted white or black."""
    names = list(dict.fromkeys(job.group for job in all_jobs))
    some = [job for name in names for job in [job for job in all_jobs if job.group == name][::12]]
    some += [job for job in all_jobs if job.group in ("trained", "held-out") and job not in some][:16]
    perfect = {id(job): drawn(job) for job in some}

    def with_color(group: str) -> dict[str, bool]:
        shown = [drawn(job, _other(job)) if job.group == group else perfect[id(job)] for job in some]
        return gate._checks(gate.judge(shown))

    right = gate.judge([perfect[id(job)] for job in some])
    checks = gate._checks(right)
    assert right["non_finite"] == 0 and all(found["share"] == 1 for found in right["groups"].values())
    # a perfect renderer paints what has no colour red, whatever the negative prompt
    assert [name for name, passed in checks.items() if not passed] == ["negative prompt"]
    for group in ("trained", "held-out", "chinese", "position", "size", "background", "count", "relation"):
        missed = [name for name, passed in with_color(group).items() if not passed]
        assert group in missed and set(missed) <= {group, "negative prompt", "guidance"}, (group, missed)
    assert not with_color(gate_draw.LOW_GUIDANCE)["guidance"]
    assert with_color(gate_draw.WITHOUT_RED)["negative prompt"]


def test_overlap_is_of_one_object_only(all_jobs: list[Job]):
    """Perfect pictures fit, and a picture without an object counts as 0."""
    some = [job for job in all_jobs if job.group in ("trained", "size", "count", "relation")][::40]
    shown = [gate_draw.judged(job, pixels(scene(job.asked.wanted, job.asked.seed), SIDE, SIDE)) for job in some]
    alone = [one for one in shown if [thing.count for thing in one.job.asked.wanted.things] == [1]]
    found = gate.judge(shown)["overlap"]
    print(found)
    assert 0 < len(alone) < len(shown) and found["n"] == len(alone)
    assert found["mean"] > 0.97 and found["least"] > 0.93
    empty = gate_draw.judged(alone[0].job, np.full((SIDE, SIDE, 3), 250, np.uint8))
    assert gate.judge([*shown, empty])["overlap"]["least"] == 0
    assert any("overlap with the ideal shape" in line for line in gate._lines(gate.judge(shown)))


def _other(job: Job) -> str:
    return "blue" if job.asked.wanted.things[0].color in (None, "red", "white") else "white"


def test_a_picture_that_is_not_finite_counts_as_wrong(all_jobs: list[Job], monkeypatch: pytest.MonkeyPatch):
    def painter(artist: Artist) -> object:
        def draw(job: Job) -> np.ndarray:
            if job.asked.seed == all_jobs[1].asked.seed:
                raise NumericsError("a value is not finite")
            return pixels(scene(job.asked.wanted, job.asked.seed), SIDE, SIDE)

        return draw

    monkeypatch.setattr(gate_draw, "painter", painter)
    found = gate.judge(list(gate_draw.draw_all(NOBODY, all_jobs[:4])))
    assert found["non_finite"] == 1 and found["overall"] == {"n": 4, "right": 3, "share": 0.75}
    assert not gate._checks(found)["all finite"]


def test_psnr_by_hand():
    a = np.zeros((4, 5, 3), np.uint8)
    b = a.copy()
    b[0, 0, 0] = 60  # the mean square is 3600 / 60
    assert gate.psnr(a, b) == pytest.approx(10 * math.log10(255**2 / 60))
    assert gate.psnr(b, a) == gate.psnr(a, b) and gate.psnr(a, a) == gate.IDENTICAL


@pytest.mark.parametrize(("noise", "equal", "passed"), [(0, 4, True), (1, 4, True), (40, 4, False)])
def test_pairs(all_jobs: list[Job], noise: int, equal: int, passed: bool):
    first = [drawn(job) for job in all_jobs[:4]]
    random = np.random.default_rng(0)
    theirs = []
    for one in first:
        added = random.integers(-noise, noise + 1, one.pixels.shape) * (random.random(one.pixels.shape) < 0.5)
        moved = np.clip(one.pixels.astype(int) + added, 0, 255)
        theirs.append(replace(one, pixels=moved.astype(np.uint8)))
    row = gate.pair(NOBODY, first, replace(NOBODY, backend="mlx"), theirs)
    print(row)
    assert row["passed"] == passed and row["largest_difference"] <= noise and row["equal_verdicts"] == equal
    assert row["psnr_floor"] <= row["psnr_mean"] <= gate.IDENTICAL


def test_two_other_verdicts_fail_a_pair(all_jobs: list[Job]):
    first = [drawn(job) for job in all_jobs[:4]]
    for wrong in (1, 2):
        theirs = [replace(one, verdict=replace(one.verdict, color=False)) for one in first[:wrong]] + first[wrong:]
        assert gate.pair(NOBODY, first, NOBODY, theirs)["passed"] == (wrong == 1)
    broken = [replace(first[0], pixels=None, verdict=None), *first[1:]]
    assert not gate.pair(NOBODY, first, NOBODY, broken)["passed"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that was trained for four steps a stage, in a process of its own as its threads are its own."""
    out = tmp_path_factory.mktemp("card") / "shapes-v1"
    code = f"""
import sys
from pathlib import Path
sys.path[:0] = [{str(ROOT / "src")!r}, {str(ROOT / "tests")!r}, {str(ROOT / "tools")!r}]
from support.training_runs import options
from training import run as train_run
from training import stages as train
from training import vae as train_vae
train_vae.MEASURED, train_run.LOG_EVERY = 4, 2
for stage in ("vae", "text", "dit"):
    train.train(options(stage, Path({str(out)!r}), steps=4), print, device="cpu")
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    return out


def test_three_artists_draw_alike(trained: Path, monkeypatch: pytest.MonkeyPatch):
    """Both backends and diffusers from the same noise: a model of four steps, one prompt."""
    monkeypatch.setattr(catalog, "BUILT_IN", replace(catalog.BUILT_IN, steps=2))
    [job] = gate_draw.jobs(["trained"], 1)
    pictures = {}
    for backend in ("cpu", "mlx", "diffusers"):
        artist = Artist(model=str(trained), backend=backend, precision="fp32", size=gate._size("32x48"))
        [one] = gate_draw.draw_all(artist, [replace(job, negative="red")])
        pictures[backend] = one.pixels
    assert pictures["cpu"].shape == (48, 32, 3)
    for backend in ("mlx", "diffusers"):
        ratio = gate.psnr(pictures["cpu"], pictures[backend])
        print(f"{backend}: {ratio:.1f} dB")
        assert pictures["cpu"].std() > 5 and ratio > gate.FLOORS["fp32"]


# The figures in the documents


@pytest.mark.parametrize(
    ("name", "whole"),
    [("gate-cpu-fp32", True), ("gate-cpu-fp32-128", True), ("gate-mlx-fp32", False), ("shapes-pairs", True)],
)
def test_figures_are_of_the_weights_that_ship(name: str, whole: bool):
    """Whoever changes the model's weights draws its gate and its pairs again. Of the whole gate on MLX, which takes an
    hour on a CPU, a part is enough: the pairs show that its pictures are torch's."""
    result = model_card.read_gate(gate.RESULTS / f"{name}.json", builtin.folder())
    assert len(result["weights"]) == 3 and result["passed"] and (result.get("complete", True) or not whole)
    assert result["dataset"] == dataset_hash()


# The card


def test_card(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    training, folder = trained / "training", tmp_path / "shapes-v1"
    shutil.copytree(trained, folder, ignore=shutil.ignore_patterns("training"))
    weights = folder / "vae" / "diffusion_pytorch_model.safetensors"
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    result = gate._about(replace(NOBODY, model=str(folder))) | gate.judge([]) | {"passed": True, "complete": True}
    assert result["weights"]["vae/diffusion_pytorch_model.safetensors"] == digest
    (tmp_path / "gate.json").write_text(json.dumps(result))
    arguments = [str(folder), "--training", str(training), "--hardware", "an abacus"]
    arguments += ["--gate", str(tmp_path / "gate.json")]
    monkeypatch.setattr(sys, "argv", ["model_card.py", *arguments])
    model_card.main()
    card = (folder / "MODEL_CARD.md").read_text(encoding="utf-8")
    print(card)
    assert "| an abacus |" in card and digest in card and "Apache-2.0" in card
    assert "python tools/train.py vae --out OUT --steps 4 --batch 4 --size 32x48,48x32 --seed 0" in card
    for color, shape in scenes.HELD_OUT_PAIRS:
        assert f"{color} {shape}" in card
    [hours] = re.findall(r"([0-9.]+) hours in all", card)
    assert 0 <= float(hours) < 0.1
    for stage in ("vae", "text", "dit"):
        assert (folder / f"loss-{stage}.png").stat().st_size < 20_000
    lines = (folder / "SHA256SUMS").read_text(encoding="ascii").splitlines()
    pinned = {name: digest_ for digest_, name in (line.split("  ") for line in lines)}
    files = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert pinned.keys() == files - {"SHA256SUMS"} and {"MODEL_CARD.md", "loss-dit.png"} <= files
    assert pinned["vae/diffusion_pytorch_model.safetensors"] == digest
    with weights.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    with pytest.raises(SystemExit, match="gate of other weights"):
        model_card.main()


def test_runs_are_kept_where_their_folders_are_gone(trained: Path, tmp_path: Path):
    [*runs] = model_card.read_runs(trained / "training", "an abacus", tmp_path)
    assert [run.stage for run in runs] == ["vae", "text", "dit"]
    (tmp_path / model_card.RECORD).write_text(json.dumps([asdict(run) for run in runs]))
    assert model_card.kept_runs(tmp_path, [], append=False) == runs
    more = replace(runs[-1], steps=9, hardware="two abaci")
    assert model_card.kept_runs(tmp_path, [more], append=False) == [*runs[:-1], more]
    assert model_card.kept_runs(tmp_path, [more], append=True) == [*runs, more]


def test_hours_by_hand():
    rows = [{"step": "100", "images_per_second": "10"}, {"step": "300", "images_per_second": "40"}]
    assert model_card._hours(rows, 4) * 3600 == pytest.approx(400 / 10 + 800 / 40)
