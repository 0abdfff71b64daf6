"""A job is drawn without a command line: what a server needs of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fake_pipeline import FakePipeline
from support.recipe_cases import recipe_from_png

from qwenimg import Result, Step
from qwenimg.common.base.errors import DoesNotFit, ModelError, NumericsError, UsageError
from qwenimg.common.hub import resolve
from qwenimg.common.jobs.image_options import parse
from qwenimg.common.jobs.job import Inputs, Job, jobs_of, with_paths
from qwenimg.common.jobs.run import Outcome, Output, completed, estimated, passing, prepare, run
from qwenimg.common.prompts.wildcards import Wildcards
from qwenimg.common.request.request import Request
from qwenimg.common.shapes import builtin


class Heard:
    """A listener that keeps what it is told."""

    def __init__(self, stops_at: int = 0) -> None:
        self.told: list[tuple[str, Any]] = []
        self.stops_at = stops_at

    def notify(self, kind: str, text: str) -> None:
        self.told.append((kind, text))

    def begin(self, job: Job) -> None:
        self.told.append(("begin", job.index))
        if job.index == self.stops_at:
            raise KeyboardInterrupt

    def step(self, job: Job, step: Step) -> None:
        self.told.append(("step", step.index))

    def image(self, job: Job, result: Result, seconds: float) -> None:
        self.told.append(("image", job.index))

    def failure(self, job: Job, error: Exception) -> None:
        self.told.append(("failure", type(error).__name__))


def drawn(
    pipe: Any, output: Output, lines: list[dict[str, Any]], pattern: str | None, heard: Heard | None = None
) -> tuple[Outcome, list[Job]]:
    """As a server would: JSON objects in, pictures out."""
    jobs = [completed(pipe, job, Inputs()) for job in made({}, [("", parse(line)) for line in lines], pattern)]
    for job in jobs:
        assert estimated(pipe, job, Inputs(), Output()).memory > 0
    prepare(pipe, jobs, Inputs())
    return run(pipe, jobs, Inputs(), output, heard or Heard()), jobs


def made(base: dict[str, Any], lines: list[Any], pattern: str | None) -> list[Job]:
    jobs, faults = jobs_of(base, lines, Wildcards(), lambda _: 7)
    assert not faults
    return with_paths(jobs, pattern, overwrite=False)


def test_a_job_is_drawn_and_told(tmp_path: Path) -> None:
    pipe, heard = FakePipeline(), Heard()
    lines = [{"prompt": "a ring", "seed": "3", "aspect": "1:1"}, {"prompt": "a cube", "num_images": 2, "guidance": 1.0}]
    outcome, jobs = drawn(pipe, Output(), lines, f"{tmp_path}/{{index}}.png", heard)
    assert (outcome.written, outcome.failed, outcome.fatal) == (3, [], False)
    assert heard.told[:5] == [("begin", 1), ("step", 1), ("step", 2), ("step", 3), ("image", 1)]
    assert recipe_from_png(tmp_path / "1.png")["seed"] == 3 and jobs[0].path == tmp_path / "1.png"
    assert pipe.asked[1]["seed"] + 1 == pipe.asked[2]["seed"] and pipe.asked[1]["guidance"] == 1.0
    assert pipe.prepared == ["a ring", " ", "a cube"]  # no negative text where there is no guidance


def test_pictures_without_a_path_go_to_the_caller() -> None:
    got: list[bytes] = []
    outcome, _ = drawn(FakePipeline(), Output(put=got.append, metadata=False), [{"prompt": "a ring"}], "-")
    assert outcome.written == 1 and got[0].startswith(b"\x89PNG") and b"qwenimg" not in got[0]


@pytest.mark.parametrize(
    ("error", "made", "fatal"),
    [
        (NumericsError("not finite"), 2, False),  # the next one is drawn
        (UsageError("no"), 2, False),
        (ModelError("gone"), 1, True),  # comes again
        (DoesNotFit("full"), 2, False),  # memory that sufficed once may suffice again
        (RuntimeError("out of memory"), 2, False),
        (RuntimeError("a bug"), 1, True),
    ],
)
def test_what_fails_is_told_and_the_rest_is_drawn(tmp_path: Path, error: Exception, made: int, fatal: bool) -> None:
    heard = Heard()
    lines = [{"prompt": "a ring", "seed": seed} for seed in ("1", "2", "3")]
    outcome, _ = drawn(FakePipeline(faults={2: error}), Output(), lines, f"{tmp_path}/{{index}}.png", heard)
    assert (outcome.written, outcome.failed, outcome.fatal) == (made, [error], fatal)
    assert ("failure", type(error).__name__) in heard.told
    assert len(list(tmp_path.iterdir())) == made


def test_a_listener_ends_the_run_between_pictures(tmp_path: Path) -> None:
    lines = [{"prompt": "a ring", "seed": "1,2,3"}]
    with pytest.raises(KeyboardInterrupt):
        drawn(FakePipeline(), Output(), lines, f"{tmp_path}/{{seed}}.png", Heard(stops_at=2))
    assert [file.name for file in tmp_path.iterdir()] == ["1.png"]


def test_lines_at_fault_are_apart_and_a_request_of_its_own_raises() -> None:
    def check(job: Job) -> None:
        if job.prompt != "good":
            raise UsageError("no")

    asked: list[Any] = [{"prompt": "bad", "num_images": 2}, {"prompt": "good"}, ModelError("x")]
    lines = [(f"f:{number}", line) for number, line in enumerate(asked, 1)]
    jobs, faults = jobs_of({}, lines, Wildcards(), lambda _: 7)
    assert [str(fault) for fault in faults] == ["x"]
    passed, faults = passing(jobs, check)
    assert [job.prompt for job in passed] == ["good"] and [str(fault) for fault in faults] == ["f:1: no"]
    with pytest.raises(UsageError):
        passing(made({"prompt": "bad"}, [("", {})], "-"), check)


def test_rows_of_noise_go_to_their_pictures() -> None:
    noise = np.zeros((2, 4, 2, 2), np.float32)
    noise[1] = 1
    jobs = made({"prompt": "x", "num_images": 2}, [("", {})], "-")
    assert [call["latents"].max() for call in map(Inputs(noise=noise).call, jobs)] == [0, 1]


def test_what_the_built_in_model_can_draw_is_asked_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    advice = resolve.advice("shapes")
    assert advice is not None
    advice.check("a lighthouse")  # it was asked for by name
    trained = {"width": 128, "height": 128}
    assert not builtin.advise(Request(prompt="a red circle", **trained))
    assert len(builtin.advise(Request(prompt="a red lighthouse", negative_prompt="blurry", width=16, height=16))) == 3
    assert resolve.advice("owner/name") is None
    monkeypatch.setattr(resolve, "is_built_in", lambda model: True)
    unnamed = resolve.advice(None)
    assert unnamed is not None
    with pytest.raises(ModelError, match="coloured shapes only"):
        unnamed.check("a lighthouse")


@pytest.mark.sample(0)
def test_jobs_know_no_command_line() -> None:
    code = (
        "import sys, json; from importlib import import_module; from pathlib import Path; import qwenimg\n"
        "for file in (Path(qwenimg.__file__).parent / 'common' / 'jobs').glob('[a-z]*.py'):\n"
        "    import_module(f'qwenimg.common.jobs.{file.stem}')\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout)
    assert "qwenimg.common.jobs.run" in loaded
    strange = ("click", "torch", "mlx", "tqdm", "qwenimg.cli", "qwenimg.common.hub", "qwenimg.common.shapes")
    assert not [name for name in loaded if name in strange or name.startswith(tuple(f"{one}." for one in strange))]
