"""Options of a picture that `qwenimg batch` takes as defaults of its lines."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.cli_runner import cli
from support.processes import pixels, qwenimg

from qwenimg.cli import config
from qwenimg.cli.batch.driver import BatchOutcome
from qwenimg.cli.batch.tasks import BatchTask, tasks_of
from qwenimg.cli.commands import batch as command
from qwenimg.common.base.errors import UsageError
from qwenimg.common.jobs.image_options import merged, parse, seeds
from qwenimg.common.jobs.job import InputFiles, Inputs
from qwenimg.common.prompts.wildcards import Wildcards
from qwenimg.common.request.request import Defaults

MODEL = Defaults(width=64, height=32, steps=9, guidance=3.0)
OPENED = ("-m", "shapes", "--backend", "cpu")


def tasks(line: dict[str, Any], options: dict[str, Any] | None = None, **inputs: Any) -> list[BatchTask]:
    rows: list[Any] = [("r:1", parse(line))]
    made, faults = tasks_of(rows, {"model": "m"}, MODEL, Wildcards(), parse(options or {}), **inputs)
    assert not faults, faults
    return made


@pytest.mark.parametrize(
    ("line", "options", "same"),
    [
        ({}, {"steps": 4}, {"steps": 4}), ({"steps": 5}, {"steps": 4}, {"steps": 5}), ({}, {"steps": 9}, {}),
        ({}, {"size": "48x16"}, {"width": 48, "height": 16}), ({"aspect": "1:1"}, {"size": "48x16"}, {"aspect": "1:1"}),
        ({"width": 48, "height": 16}, {"aspect": "1:1"}, {"size": "48x16"}),
        ({}, {"lora": ["a:0.5"]}, {"lora": "a:0.5"}),
        ({"lora": []}, {"lora": ["a:0.5"]}, {"lora": []}),
        ({"few_steps": "lcm:4"}, {"steps": 30}, {"few_steps": "lcm:4"}),
        ({}, {"negative_prompt": "{d|e}"}, {"negative_prompt": "{d|e}"}), ({}, {"seed": "1-3"}, {"seed": "1-3"}),
        ({"seed": "4,9"}, {"seed": "1-3"}, {"seed": "4,9"}), ({"seed": "4,9"}, {"num_images": 3}, {"seed": "4,9"}),
        ({"seed": "4"}, {"num_images": 3}, {"seed": "4-6"}), ({"num_images": 2}, {"seed": "1-9"}, {"num_images": 2}),
    ],
)  # fmt: skip
def test_a_line_with_defaults_is_the_line_with_all_of_it(
    line: dict[str, Any], options: dict[str, Any], same: dict[str, Any]
) -> None:
    seed = {} if {"seed", "num_images"} & (line.keys() | options.keys()) else {"seed": "7"}
    made, expected = tasks({"prompt": "x", **line, **seed}, options), tasks({"prompt": "x", **same, **seed})
    assert [task.key for task in made] == [task.key for task in expected]
    assert [task.job.seed for task in made] == [task.job.seed for task in expected]


def test_other_defaults_make_other_pictures() -> None:
    keys = {
        tasks({"prompt": "x", "seed": "7"}, options)[0].key
        for options in ({}, {"steps": 4}, {"guidance": 2}, {"width": 48}, {"sampler": "heun"}, {"negative_prompt": "y"})
    }
    assert len(keys) == 6


def test_several_seeds_and_a_number_of_two_sources_are_no_contradiction() -> None:
    assert seeds(merged({"num_images": 3}, {"seed": "4,9"}), 0) == (4, 9)
    assert seeds(merged({"seed": "1-9"}, {"num_images": 2}), 5) == (5, 6)
    with pytest.raises(UsageError, match="several seeds"):
        seeds({"seed": "1-9", "num_images": 2}, 5)


def test_a_key_knows_the_pictures_by_their_content_and_the_size_that_they_give() -> None:
    wide, tall = np.zeros((20, 60, 3), np.uint8), np.zeros((60, 20, 3), np.uint8)
    plain, line = tasks({"prompt": "x", "seed": "7"})[0].key, {"prompt": "x", "seed": "7"}
    [one] = tasks(line, files=InputFiles(images=(b"a",)), inputs=Inputs(images=(wide,)))
    keys = {
        plain,
        one.key,
        tasks(line, files=InputFiles(images=(b"b",)), inputs=Inputs(images=(wide,)))[0].key,
        tasks(line, files=InputFiles(images=(b"a", b"b")), inputs=Inputs(images=(wide, wide)))[0].key,
        tasks(line, files=InputFiles(images=(b"a",), mask=b"b"), inputs=Inputs(images=(wide,)))[0].key,
        tasks(line | {"size": "64x32"}, files=InputFiles(images=(b"a",)), inputs=Inputs(images=(wide,)))[0].key,
        tasks(line, files=InputFiles(images=(b"a",)), inputs=Inputs(images=(tall,)))[0].key,
    }
    assert len(keys) == 7, "the model's usual size is not that of the picture"
    [sized] = tasks(line | {"size": "60x20"}, files=InputFiles(images=(b"a",)), inputs=Inputs(images=(wide,)))
    assert sized.key == one.key
    assert one.job.files.images == (b"a",)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--steps", "0"), 2, "steps is 0"), (("--steps", "4.5"), 2, "4.5"), (("--guidance", "nan"), 2, "guidance"),
        (("--steps", "9" * 30), 2, "steps"), (("--size", "0x0"), 2, "size"), (("--size", "9x9", "-W", "3"), 2, "twice"),
        (("--aspect", "1:0"), 2, "aspect"), (("-s", "x"), 2, "seed"), (("-s", "1-9", "-N", "2"), 2, "several seeds"),
        (("-N", "0"), 2, "num-images"), (("--sampler", "nope"), 2, "nope"), (("--lora", ""), 2, "--lora"),
        (("--lora", "a:x"), 2, "a:x"), (("--control", "x"), 2, "--control"), (("--strength", "0.5"), 2, "-i"),
        (("--mask", "in.png"), 2, "-i"), (("--only-masked",), 2, "--mask"), (("-n", "x" * 10**6), 2, "characters"),
        (("-n", "\udcff"), 2, "not text"), (("-p", "x"), 2, "-p"),
        (("--latents", "x.npy"), 2, "--latents is no option here"), (("-i", "none.png"), 5, "none.png"),
        (("-i", "p.txt"), 5, "p.txt"), (("-i", "pipe"), 5, "pipe"), (("-i", "."), 5, "folder"),
        (("-i", "in.png", "--mask", "p.txt"), 5, "p.txt"), (("--stepz", "4"), 2, "--steps"),
        (("--zzzzzz",), 2, "qwenimg batch --help lists all"), (("--preview-path", "x"), 2, "no option here"),
    ],
)  # fmt: skip
def test_wrong_defaults_are_refused_before_anything_is_made(
    options: tuple[str, ...], code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.txt").write_text("a red circle\n")
    Image.new("RGB", (16, 16)).save("in.png")
    os.mkfifo("pipe")
    cli("batch", "p.txt", "-o", "out", *OPENED, *options).refused(code, words)
    assert not Path("out").exists()


def test_the_help_has_them_and_the_message_of_an_unknown_option_names_it() -> None:
    ran = cli("batch", "--help")
    assert ran.code == 0 and b"--steps N" in ran.out and b"Defaults of the lines" in ran.out
    assert b"--prompt TEXT" not in ran.out and b"--latents" not in ran.out
    cli("serve", "--zzzzzz").refused(2, "qwenimg serve --help lists all")
    cli("parity", "record", "--zzzzzz").refused(2, "qwenimg parity record --help lists all")
    cli("x", "--zzzzzz").refused(2, "qwenimg --help-all lists all")


@pytest.mark.sample(0)
def test_defaults_are_drawn_and_other_defaults_are_drawn_anew(tmp_path: Path) -> None:
    """The pixels are those of `generate` with the same options; a line's own value wins."""
    (tmp_path / "p.txt").write_text('a red circle\n{"prompt": "a blue ring", "steps": 2}\n')
    Image.fromarray(np.random.default_rng(1).integers(0, 256, (48, 64, 3), np.uint8)).save(tmp_path / "in.png")
    usual = ("-s", "5", "-i", "in.png", "--strength", "0.9")
    for steps, counts in ((3, "2 to draw, 0 there"), (4, "1 to draw, 1 there"), (3, "0 to draw, 2 there")):
        code, out, err = qwenimg("batch", "p.txt", "-o", "out", *OPENED, *usual, "--steps", steps, cwd=tmp_path)
        assert code == 0 and counts in err, err
    rows = [json.loads(line) for line in (tmp_path / "out" / "journal.jsonl").read_text().splitlines()]
    assert [row["state"] for row in rows] == ["done"] * 3
    for row, prompt, steps in zip(rows, ("a red circle", "a blue ring", "a red circle"), (3, 2, 4), strict=True):
        code, out, err = qwenimg(prompt, "-o", f"{steps}.png", *OPENED, *usual, "--steps", steps, cwd=tmp_path)
        assert code == 0, err
        assert (pixels(tmp_path / f"{steps}.png") == pixels(tmp_path / "out" / row["file"])).all()
    code, out, err = qwenimg("batch", "p.txt", "-o", "out", *OPENED, *usual, "--steps", 9, "--quiet", cwd=tmp_path)
    assert code == 0 and len(out.splitlines()) == 1 and "to draw" not in err and " of 1" not in err, err


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of each run that would begin: the pictures, and the settings of the workers."""
    calls: list[Any] = []

    async def runs(left: list[BatchTask], replaced: Any, journal: Any, starts: Any, *rest: object) -> BatchOutcome:
        calls.append((left, starts))
        return BatchOutcome(done=len(left))

    monkeypatch.setattr(command, "_run", runs)
    monkeypatch.setattr(config, "path", lambda: tmp_path / "config.toml")
    monkeypatch.chdir(tmp_path)
    Path("p.txt").write_text("a red circle\n")
    return calls


def test_the_configuration_file_and_the_environment_reach_it(begun: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As they reach a single picture: the command line first, then variables, then the file."""
    Path("config.toml").write_text(
        'model = "shapes"\nbackend = "cpu"\nprecision = "fp32"\nsteps = 7\nguidance = 2.5\nsize = "64x32"\n'
        'output = "elsewhere/"\nno_metadata = true\ncache_prompts = true\nquiet = true\n'
    )
    monkeypatch.setenv("QWENIMG_STEPS", "5")
    monkeypatch.setenv("QWENIMG_WIDTH", "48")
    monkeypatch.setenv("QWENIMG_OUTPUT", "nowhere")
    monkeypatch.setenv("QWENIMG_JSON", "1")
    monkeypatch.setenv("QWENIMG_STEPZ", "1")
    ran = cli("batch", "p.txt", "-o", "out", "--guidance", "1.5")
    assert ran.code == 0, ran.err
    [warning] = ran.err.splitlines()
    assert "QWENIMG_STEPZ" in warning and "QWENIMG_STEPS" in warning
    [([task], [start])] = begun
    options, opening = task.job.options, start.models["model"]
    assert (options["steps"], options["guidance"], options["width"], "height" in options) == (5, 1.5, 48, False)
    assert (opening.model, opening.precision, start.backend) == ("shapes", "fp32", "cpu")
    assert not Path("elsewhere").exists() and not Path("nowhere").exists()
    monkeypatch.setenv("QWENIMG_BACKEND", "cpu cpu")
    assert cli("batch", "p.txt", "-o", "out", "--size", "64x32", "--steps", "3").code == 0
    assert [start.backend for start in begun[1][1]] == ["cpu", "cpu"] and begun[1][0][0].job.options["steps"] == 3
    assert begun[1][0][0].job.options["width"] == 64, "--size comes before QWENIMG_WIDTH"


def test_a_wrong_variable_or_file_is_one_line(begun: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = ("batch", "p.txt", "-o", "out", *OPENED)
    monkeypatch.setenv("QWENIMG_STEPS", "0")
    cli(*drawn).refused(2, "QWENIMG_STEPS in the environment")
    monkeypatch.delenv("QWENIMG_STEPS")
    Path("config.toml").write_text("steps = 0\n")
    cli(*drawn).refused(2, "config.toml", "steps is 0")
    assert not begun and not Path("out").exists()
