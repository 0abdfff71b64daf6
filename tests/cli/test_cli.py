"""The command line, in process and with a stand-in for the models: grammar, files, events, exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.cli_runner import MAX_LINE, Library, cli
from support.fake_pipeline import FakePipeline
from support.recipe_cases import recipe_from_png

import qwenimg
from qwenimg import Result
from qwenimg.cli.commands.generate import generate
from qwenimg.cli.help import COMMANDS, SECTIONS
from qwenimg.cli.progress import is_told
from qwenimg.cli.words import command_place
from qwenimg.common.base import atomic_files
from qwenimg.common.base.errors import BackendMissing, DoesNotFit, ModelError, NumericsError, QwenimgError, UsageError
from qwenimg.common.jobs.image_options import parse_seeds
from qwenimg.common.memory.estimate import Estimate
from qwenimg.common.pictures import latents
from qwenimg.common.shapes import builtin

# Grammar


@pytest.mark.parametrize(
    "args",
    [
        ["a red circle", "--steps", "4"],
        ["--steps", "4", "a red circle"],
        ["--steps=4", "a red circle"],
        ["-p", "a red circle", "--steps", "4"],
        ["generate", "a red circle", "--steps", "4"],
        ["--steps", "4", "generate", "a red circle"],
        ["--steps", "4", "--", "a red circle"],
        ["--num-inference-steps", "4", "a red circle"],
        ["--num_inference_steps=4", "a red circle"],
    ],
)
def test_options_stand_before_or_after_the_prompt(library: Library, args: list[str]) -> None:
    assert cli(*args).code == 0
    assert [(a["prompt"], a["steps"]) for a in library.asked] == [("a red circle", 4)]


@pytest.mark.parametrize(
    ("args", "prompt"),
    [
        (["-p", "info"], "info"),
        (["generate", "info"], "info"),
        (["--", "info"], "info"),
        (["-p", "train"], "train"),
        (["-p", "-5 degrees"], "-5 degrees"),
        (["--", "-5 degrees"], "-5 degrees"),
        (["-"], "-"),
        (["info "], "info "),
        (["Info"], "Info"),
        (["@file"], "@file"),
        (["\x1b[31mred\x07\n夜 👩‍🚀 \u202eabc"], "\x1b[31mred\x07\n夜 👩‍🚀 \u202eabc"),
    ],
)
def test_what_is_a_prompt(library: Library, args: list[str], prompt: str) -> None:
    ran = cli(*args)
    assert ran.code == 0, ran.err
    assert library.asked[0]["prompt"] == prompt and len(ran.paths) == 1


@pytest.mark.parametrize(
    ("args", "place"),
    [
        (["info", "x.png"], 0),
        (["--json", "info", "x.png"], 1),
        (["--steps", "info", "devices"], 2),
        (["-sinfo", "devices"], 1),
        (["-o", "--", "devices"], None),
        (["--", "devices"], None),
        (["--nonsense", "devices"], None),
        (["x", "devices"], None),
        (["train"], 0),
        ([], None),
    ],
)
def test_only_the_first_word_decides(args: list[str], place: int | None) -> None:
    assert command_place(args) == place


def test_two_words_ask_for_quotes(library: Library) -> None:
    cli("a", "red", "circle").refused(2, "quote the prompt", "a red circle")
    cli("generate", "a", "b").refused(2, "quote the prompt")
    cli("-p", "a", "b").refused(2, "two prompts")
    cli("a\x1b[2J", "b").refused(2, r"\x1b")


def test_no_prompt_shows_the_help(library: Library) -> None:
    cli("--steps", "4").refused(2, "no prompt; give one")  # the error alone, since something was asked for
    for args in ([], ["generate"]):
        ran = cli(*args)
        assert ran.code == 2 and ran.out == b""
        assert "Usage: qwenimg" in ran.err and ran.err.splitlines()[-1].startswith("qwenimg: error: no prompt")
    for empty in ("", "   ", "\n"):
        cli(empty).refused(2, "empty")


def test_the_short_help_is_what_most_people_need() -> None:
    """Twenty options in the order of use, then how to see all; the rest is behind --help-all."""
    text = cli("--help").out.decode()
    options = re.findall(r"^  (-\S.*?)(?:  |$)", text.partition("Commands")[0], re.MULTILINE)
    print(*options, sep="\n")
    assert len(options) == 20 + 3 and options[0].startswith("-m, --model") and options[-2] == "--help-all"
    assert "--step-cache" not in text and "Exit codes" in text
    assert cli("generate", "--help").out.decode() == text


def test_all_help_names_every_option_once() -> None:
    ran = cli("--help-all")
    assert ran.code == 0 and ran.err == ""
    text = ran.out.decode()
    shown = [p for p in generate.params if not getattr(p, "hidden", False) and p.name != "words"]
    for option in shown:
        lines = [
            line for line in text.splitlines() if line.startswith("  -") and f"{option.opts[-1]}" in line.split("  ")[1]
        ]
        assert lines, option.opts
    named = [name for names in SECTIONS.values() for name in names]
    assert len(named) == len(set(named)) and set(named) <= {p.name for p in shown}
    assert all(f"\n  {name} " in text for name in COMMANDS)
    assert "Examples" in text and "Exit codes" in text and "--num-inference-steps" not in text
    assert cli("generate", "--help-all").out == ran.out
    assert b"info" in cli("--help", "info").out and b"PROMPT" not in cli("info", "--help").out


def test_version() -> None:
    assert cli("--version").out.decode() == f"qwenimg {qwenimg.__version__}\n"


def test_python_runs_the_package_as_the_command() -> None:
    ran = [run_module("--version"), run_module("no-such-command", "--nonsense")]
    assert (ran[0].returncode, ran[0].stdout) == (0, f"qwenimg {qwenimg.__version__}\n")
    assert ran[1].returncode == 2 and ran[1].stderr.startswith("qwenimg: error: ") and ran[1].stderr.count("\n") == 1


def run_module(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "qwenimg", *words], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["x", "--scheduler", "euler"], ["--sampler", "--schedule"]),
        (["x", "--scheduler=euler"], ["--sampler", "--schedule"]),
        (["x", "--sampler", "eulr"], ["eulr", "euler"]),
        (["x", "--schedule=karas"], ["karas", "karras"]),
        (["x", "--mask", "y"], ["--mask", "-i"]),
        (["x", "--strength", "0.5"], ["--strength", "-i"]),
        (["x", "-i", "y", "--strength", "1.5"], ["strength", "0 to 1"]),
        (["x", "--prediction", "w"], ["--prediction", "eps", "x0"]),
        (["-rf"], ["-r", "-p"]),
        (["x", "--steps"], ["--steps"]),
        (["x", "--steps", "four"], ["--steps", "four"]),
        (["x", "--backend", "tpu"], ["--backend", "tpu"]),
        (["x", "--precision", "int3"], ["--precision", "int3"]),
        (["x", "--debug", "all"], ["--debug", "timing"]),
        (["x", "--debug", ""], ["--debug"]),
    ],
)
def test_options_that_are_refused(library: Library, args: list[str], words: list[str]) -> None:
    cli(*args).refused(2, *words)
    assert not library.calls


def test_a_command_without_prompt_names_no_option_for_one() -> None:
    assert cli("info", "-s", "3").err == "qwenimg: error: No such option '-s'.\n"


@pytest.mark.parametrize(
    "args",
    [
        ["--steps", "0"],
        ["--steps", "1001"],
        ["--steps", "9" * 400],
        ["--guidance", "nan"],
        ["--guidance", "inf"],
        ["--guidance", "-0.1"],
        ["--guidance", "100.1"],
        ["-N", "0"],
        ["-N", "10001"],
        ["-W", "0"],
        ["-H", "16385"],
        ["-W", "-8"],
        ["--size", "7x"],
        ["--size", "0x8"],
        ["--size", "1000000000x8"],
        ["--size", "64x64", "-W", "8"],
        ["--size", "64x64", "--aspect", "1:1"],
        ["--aspect", "1:1", "-H", "8"],
        ["--aspect", "0:1"],
        ["-s", "x"],
        ["-s", "-2"],
        ["-s", ""],
        ["-s", "1,,2"],
        ["-s", "4-1"],
        ["-s", "18446744073709551616"],
        ["-s", "0-18446744073709551615"],
        ["-s", "1,2", "-N", "2"],
        ["-s", "1-2", "-N", "1"],
        ["-s", "18446744073709551615", "-N", "2"],
        ["-s", "-1,2"],
        ["-s", "１"],
        ["-n", "\udcff"],
    ],
)
def test_values_out_of_range(library: Library, args: list[str]) -> None:
    cli("x", *args).refused(2)
    assert not library.calls and not list(Path.cwd().iterdir())


def test_prompts_that_are_no_text_or_too_long(library: Library) -> None:
    cli("a \udcff").refused(2, r"\udcff")
    cli("a" * 1_000_000).refused(2, "1,000,000")


@settings(max_examples=150)
@given(st.text(st.characters(codec=None), max_size=60), st.sampled_from([["-p"], ["--"], []]))
@pytest.mark.sample(0)
def test_any_text_makes_a_picture_or_one_line(text: str, before: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        library = Library()
        patch.setattr(qwenimg, "open_pipeline", library.open_pipeline)
        patch.setattr(builtin, "folder", lambda: Path("/nowhere"))  # which refuses prompts that name no shape
        patch.setattr(atomic_files, "write_atomic", lambda path, data, *, overwrite: None)
        ran = cli(*before, text)
    if ran.code == 0 and library.calls:
        assert library.asked[0]["prompt"] == text and len(ran.paths) == 1
    elif ran.code == 2:
        assert ran.err.splitlines()[-1].startswith("qwenimg: error: ")
    else:
        assert ran.code in (0, 5) and not before  # a command, or a FILE of `info` that is not there


@settings(max_examples=150)
@given(
    st.lists(st.sampled_from(["-p", "x", "info", "--", "--json", "-s", "1", "-N", "-q", "--from", "-o", "--quiet", ""]))
)
@pytest.mark.sample(0)
def test_any_words_end_without_a_bug(args: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qwenimg, "open_pipeline", Library().open_pipeline)
        patch.setattr(atomic_files, "write_atomic", lambda path, data, *, overwrite: None)
        ran = cli(*args)
    assert ran.code in (0, 2, 5) and "Traceback" not in ran.err, ran


# Seeds and sizes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7", (7,)),
        ("0", (0,)),
        ("18446744073709551615", (2**64 - 1,)),
        ("1,2,3", (1, 2, 3)),
        ("1-4", (1, 2, 3, 4)),
        (" 9 , 5-6", (9, 5, 6)),
        ("-1", None),
    ],
)
def test_seeds(text: str, expected: tuple[int, ...] | None) -> None:
    assert parse_seeds(text) == expected


def test_number_of_images_counts_up(library: Library) -> None:
    assert cli("x", "-s", "40", "-N", "3").code == 0
    assert [a["seed"] for a in library.asked] == [40, 41, 42]
    assert cli("x", "-s", "50", "--batch-count", "2").code == 0
    assert [a["seed"] for a in library.asked] == [50, 51]


def test_a_random_seed_is_told_stored_and_not_the_same_twice(library: Library) -> None:
    seeds = set()
    for args in ([], ["-s", "-1"], ["--seed=-1"]):
        ran = cli("x", *args, "-o", f"{len(seeds)}.png")
        seed = library.asked[0]["seed"]
        assert 0 <= seed < 2**32 and f"seed {seed}" in ran.err
        assert recipe_from_png(ran.paths[0])["seed"] == seed
        seeds.add(seed)
    assert len(seeds) == 3


@pytest.mark.parametrize(
    ("args", "size"),
    [
        ([], (20, 12)),
        (["--size", "33x17"], (33, 17)),
        (["--aspect", "2:1"], (32, 16)),
        (["-W", "33"], (33, 12)),
        (["-H", "9", "-W", "7"], (7, 9)),
    ],
)
def test_size(library: Library, args: list[str], size: tuple[int, int]) -> None:
    ran = cli("x", *args)
    assert (library.asked[0]["width"], library.asked[0]["height"]) == size
    assert Image.open(ran.paths[0]).size == size


def test_an_aspect_and_a_side_replace_each_other(library: Library) -> None:
    lines = ['{"prompt": "a", "aspect": "1:3"}', '{"prompt": "b", "height": 7}', "c"]
    Path("p.txt").write_text("\n".join(lines))
    assert cli("--prompt-file", "p.txt", "--aspect", "2:1", "-o", "a/").code == 0
    assert [(a["width"], a["height"]) for a in library.asked] == [(16, 32), (20, 7), (32, 16)]
    assert cli("--prompt-file", "p.txt", "-W", "9", "-o", "b/").code == 0
    assert [(a["width"], a["height"]) for a in library.asked] == [(16, 32), (9, 7), (9, 12)]
    [picture] = cli("x", "--aspect", "2:1", "--json").events[0]["images"]
    assert (picture["width"], picture["height"]) == (32, 16) and "aspect" not in picture


def test_flags_reach_the_library(library: Library) -> None:
    ran = cli(
        "x", "-n", "y", "--guidance", "2.5", "--steps", "2", "-s", "3", "-m", "some/model", "--backend", "mlx",
        "--precision", "bf16,vae=bf16", "--offline",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert library.calls == [{"model": "some/model", "backend": "mlx", "precision": "bf16,vae=bf16", "offline": True}]
    assert library.asked[0] == {
        "prompt": "x", "negative_prompt": "y", "width": 20, "height": 12, "steps": 2, "guidance": 2.5, "seed": 3,
        "latents": None,
    }  # fmt: skip
    assert library.pipes[0].prepared == ["x", "y"]


def test_only_texts_that_are_used_are_encoded_and_once(library: Library) -> None:
    cli("x", "-s", "1-2")
    assert library.pipes[-1].prepared == ["x", " "]
    cli("x", "-s", "1-2", "--guidance", "1", "-n", "unused", "-o", "a")
    assert library.pipes[-1].prepared == ["x"]


def test_environment(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MODEL": "m", "STEPS": "2", "VERSION": "1", "HELP": "1", "Q": "1", "SCHEDULER": "1"}.items():
        monkeypatch.setenv(f"QWENIMG_{name}", value)
    ran = cli("x")
    assert ran.code == 0 and library.calls[0]["model"] == "m" and library.asked[0]["steps"] == 2, ran
    cli("x", "--steps", "5")
    assert library.asked[0]["steps"] == 5


def test_the_command_line_comes_before_the_environment(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QWENIMG_SIZE", "64x32")
    monkeypatch.setenv("QWENIMG_PROMPT", "theirs")
    monkeypatch.setenv("QWENIMG_SEED", "1-4")
    assert cli("ours", "-W", "16", "-N", "2").code == 0
    assert [(a["prompt"], a["width"], a["height"]) for a in library.asked] == [("ours", 16, 12)] * 2
    (tmp_path / "p.txt").write_text("line")
    monkeypatch.setenv("QWENIMG_NUM_IMAGES", "3")
    assert cli("--prompt-file", "p.txt", "-s", "5,6", "-o", "a").code == 0
    assert [(a["prompt"], a["seed"], a["width"]) for a in library.asked] == [("line", 5, 64), ("line", 6, 64)]
    assert cli("-s", "7", "-o", "b").code == 0
    assert [(a["prompt"], a["seed"]) for a in library.asked] == [("theirs", 7), ("theirs", 8), ("theirs", 9)]


def test_from_and_json_in_the_environment(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli("x", "-s", "9", "-o", "a").code == 0
    monkeypatch.setenv("QWENIMG_FROM", "a.png")
    assert cli("-o", "b").code == 0 and library.asked[0]["seed"] == 9
    monkeypatch.delenv("QWENIMG_FROM")
    ran = cli("-p", "--json", "--steps", "0")
    assert ran.code == 2 and ran.out == b""
    monkeypatch.setenv("QWENIMG_JSON", "1")
    assert cli("x", "--steps", "0").events[0]["exit"] == 2


# Prompt files


def test_prompt_file(library: Library, tmp_path: Path) -> None:
    lines = [
        "\ufeff a cat",
        "",
        "ein Hund 夜\r",
        '{"prompt": "a {b}", "seed": "8,9", "size": "5x6", "steps": 1}',
        "{"[1:],
    ]
    Path("p.txt").write_bytes("\n".join(lines).encode())
    ran = cli("--prompt-file", "p.txt", "-s", "1-2", "-W", "40", "--guidance", "2")
    assert ran.code == 0, ran.err
    rows = [(a["prompt"], a["seed"], a["width"], a["height"], a["steps"], a["guidance"]) for a in library.asked]
    assert rows == [
        ("a cat", 1, 40, 12, 3, 2.0),
        ("a cat", 2, 40, 12, 3, 2.0),
        ("ein Hund 夜", 1, 40, 12, 3, 2.0),
        ("ein Hund 夜", 2, 40, 12, 3, 2.0),
        ("a {b}", 8, 5, 6, 1, 2.0),
        ("a {b}", 9, 5, 6, 1, 2.0),
    ]
    assert len(library.calls) == 1 and len(set(ran.paths)) == 6 and all(p.is_file() for p in ran.paths)


def test_every_field_of_a_line(library: Library) -> None:
    line = {"prompt": "p", "negative_prompt": "n", "width": 8, "height": 9, "guidance": 3, "seed": 5, "num_images": 2}
    assert cli("--prompt-file", "-", stdin=json.dumps(line).encode()).code == 0
    assert [a["seed"] for a in library.asked] == [5, 6]
    first = library.asked[0]
    assert (first["negative_prompt"], first["width"], first["height"], first["guidance"]) == ("n", 8, 9, 3)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"prompt": "x"', []),
        (b'{"prompt": "x", "prompt": "y"}', []),
        (b'{"prompt": "x", "lora": 1}', ["lora"]),
        (b'{"prompt": 1}', ["prompt"]),
        (b'{"prompt": "x", "steps": true}', ["steps"]),
        (b'{"prompt": "x", "steps": 0}', ["steps"]),
        (b'{"prompt": "x", "steps": 1.5}', ["steps"]),
        (b'{"prompt": "x", "guidance": NaN}', []),
        (b'{"prompt": "x", "seed": "a"}', ["seed"]),
        (b'{"prompt": "x", "seed": -2}', ["seed"]),
        (b'{"prompt": "x", "seed": "1,2", "num_images": 2}', ["num-images"]),
        (b'{"prompt": "x", "size": "0x1"}', ["size"]),
        (b'{"prompt": "x", "size": "1x1", "width": 3}', ["twice"]),
        (b'{"prompt": "\\udcff"}', []),
        (b'{"prompt": " "}', ["empty"]),
        (b'{"steps": 3}', ["no prompt"]),
        (b"\xff", ["UTF-8"]),
        (b"{" * 100_000, []),
        (b'{"a\x1b[2J": 1}', []),
    ],
)
def test_bad_lines_name_file_and_line(library: Library, line: bytes, words: list[str]) -> None:
    Path("p.jsonl").write_bytes(b"fine\n\n" + line + b"\n")
    cli("--prompt-file", "p.jsonl").refused(5, "p.jsonl:3", *words)
    cli("--prompt-file", "-", stdin=b"fine\n\n" + line).refused(5, "standard input:3", *words)
    assert not library.calls


def test_bad_prompt_files(library: Library) -> None:
    cli("--prompt-file", "none.txt").refused(5, "none.txt")
    cli("--prompt-file", ".").refused(5)
    Path("empty").write_bytes(b"\n \n")
    cli("--prompt-file", "empty").refused(5, "no prompts")
    os.mkfifo("fifo")
    cli("--prompt-file", "fifo").refused(5, "fifo", "--prompt-file -")
    cli("--prompt-file", "a" * 300).refused(5)
    Path("many").write_text("x\n" * 10_002)
    cli("--prompt-file", "many").refused(5, "10000")
    Path("p").write_text("x\ny\n")
    cli("--prompt-file", "p", "-N", "6000").refused(2, "10000")
    cli("z", "--prompt-file", "p").refused(2, "one of them")
    cli("--prompt-file", "p", "--steps", "0").refused(2, "steps")


# Outputs


def test_default_names(library: Library, tmp_path: Path) -> None:
    one = cli("x", "-s", "3").paths
    assert len(one) == 1 and one[0].parent == tmp_path and one[0].is_absolute()
    assert one[0].name.startswith("qwenimg-") and one[0].name.endswith("-s3.png")
    assert [p.name.partition("-s")[2] for p in cli("x", "-s", "7", "-N", "2").paths] == ["7.png", "8.png"]
    assert [p.name.partition("-s")[2] for p in cli("x", "-s", "4,4").paths] == ["4-1.png", "4-2.png"]


@pytest.mark.parametrize(
    ("output", "args", "names"),
    [
        ("a.png", [], ["a.png"]),
        ("a", [], ["a.png"]),
        ("a.png", ["-N", "2"], ["a-1.png", "a-2.png"]),
        ("{seed}", ["-N", "2"], ["5.png", "6.png"]),
        ("{index}-{prompt}.png", ["-N", "2"], ["1-red-cat.png", "2-red-cat.png"]),
    ],
)
def test_output(library: Library, tmp_path: Path, output: str, args: list[str], names: list[str]) -> None:
    ran = cli("Red/cat", "-s", "5", "-o", output, *args)
    assert ran.paths == [tmp_path / name for name in names]
    assert all(Image.open(path).format == "PNG" for path in ran.paths)


def test_a_folder_as_output(library: Library, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert cli("x", "-o", "out").paths[0].parent == tmp_path / "out"
    assert cli("x", "-o", "out/").paths[0].parent == tmp_path / "out"


def test_a_new_folder_is_made_when_a_picture_is_written(library: Library, tmp_path: Path) -> None:
    library.fails = ModelError("gone")
    cli("x", "-s", "1-2", "-o", "out/")
    assert not list(tmp_path.iterdir())
    library.fails = None
    ran = cli("x", "-s", "1-2", "-o", "out/")
    assert ran.code == 0 and [p.parent for p in ran.paths] == [tmp_path / "out"] * 2
    ran = cli("x", "-s", "1-2", "-o", "numbered/{index}.png")
    assert ran.paths == [tmp_path / "numbered" / f"{i}.png" for i in (1, 2)]
    cli("x", "--size", "big", "-o", "new/{index}.png").refused(2, "big")
    assert not (tmp_path / "new").exists()
    cli("x", "-o", "no/such/").refused(2, "folder")
    cli("x", "-o", "no/such/{index}.png").refused(2, "folder")
    cli("x", "-o", "no/a").refused(2, "folder")


def test_what_failed_is_said_again_behind_the_pictures_after_it(library: Library) -> None:
    """An error in the middle would be buried by the lines of the next pictures: the last line is an error anyway."""
    for failing, again in ((1, True), (3, False)):
        library.faults = {failing: NumericsError("not finite")}
        ran = cli("x", "-s", "1-3", "-o", "{seed}.png", "--overwrite", "--debug", "timing")
        last = ran.err.splitlines()[-1]
        assert ran.code == 7 and last.startswith("qwenimg: error: ")
        assert ("1 of 3 were not made" in last) == again and ("not finite" in last) != again, ran.err


def test_one_side_is_a_square(library: Library) -> None:
    cli("x", "--size", "24")
    assert (library.asked[-1]["width"], library.asked[-1]["height"]) == (24, 24)


def test_options_inside_the_quotes_of_a_prompt_are_named(library: Library, tmp_path: Path) -> None:
    cli("a cat --steps 3").refused(2, "--steps is inside the quotes", "-p")
    cli("a cat --ar 16:9").refused(2, "--ar is inside the quotes", "--aspect, as 16:9")
    for prompt in ("a cat -- steps", "twenty--steps", "--unknown words"):
        assert cli("-p", prompt).code == 0 and library.asked[-1]["prompt"] == prompt
    assert cli("-p", "a cat --steps 3").code == 0  # whatever it looks like
    Path("p.txt").write_text('a cat --negative_prompt dogs\n{"prompt": "a cat --steps 3"}\na cat - steps\n')
    cli("--prompt-file", "p.txt").refused(5, "p.txt:1: --negative-prompt is no option in a line of text", '"prompt"')
    assert len(cli("--prompt-file", "p.txt", "--keep-going").paths) == 2


@pytest.mark.parametrize(
    ("group", "names"), [("lora", "merge, resize"), ("train", "lora"), ("parity", "check, record")]
)
def test_a_group_without_a_command_names_its_commands(group: str, names: str) -> None:
    """It had the help in one line, cut in its middle."""
    cli(group).refused(2, f"qwenimg {group} takes one of {names}", f"; qwenimg {group} --help says what they do")


@pytest.mark.parametrize(
    ("field", "advice"),
    [
        ("stepz", "did you mean steps?"),
        ("cfg_scale", "did you mean guidance?"),
        ("image", "give --image outside the file, for all lines"),
        ("zzz", "qwenimg generate --help --json lists the known ones"),
    ],
)
def test_an_unknown_field_of_a_line_names_what_is_meant(library: Library, field: str, advice: str) -> None:
    """It listed fifty fields, of which the length of a line cut away the half."""
    Path("p.txt").write_text(json.dumps({"prompt": "x", field: 1}))
    cli("--prompt-file", "p.txt").refused(5, f"p.txt:1: unknown field '{field}'; {advice}")


def test_outputs_are_checked_before_the_model_is_loaded(library: Library, tmp_path: Path) -> None:
    Path("taken.png").write_bytes(b"mine")
    Path("sub.png").mkdir()
    Path("sealed").mkdir()
    cli("x", "-o", "taken.png").refused(2, "taken.png", "--overwrite")
    cli("x", "-o", "no/such/a.png").refused(2, "folder")
    cli("x", "-o", "{sed}.png").refused(2)
    cli("x", "-o", "{seed.png").refused(2)
    cli("x", "-o", "a.bmp").refused(2, ".webp")
    cli("x", "-o", "a\0b.png").refused(2)
    cli("x", "-o", "a" * 300).refused(2)
    cli("x", "-o", "taken.png/a.png").refused(2)
    cli("x", "-o", "taken-{seed}.png", "-s", "1,1").refused(2, "more than one")
    cli("x", "--save-latents", "l.txt").refused(2, ".npy")
    cli("x", "-o", "-", "-N", "2").refused(2, "2")
    assert cli("x", "-o", "-", "--json").code == 2
    assert not library.calls and Path("taken.png").read_bytes() == b"mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["sealed", "sub.png", "taken.png"]
    assert cli("x", "-o", "taken.png", "--overwrite").code == 0
    assert Image.open("taken.png").size == (20, 12)


def test_a_file_that_appears_meanwhile_is_kept(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    def stream(self: FakePipeline, prompt: str, **_: object) -> Any:
        Path("a.png").write_bytes(b"theirs")
        return original(self, prompt, **_)  # type: ignore[arg-type]

    original = FakePipeline.stream
    monkeypatch.setattr(FakePipeline, "stream", stream)
    ran = cli("x", "-o", "a.png")
    assert ran.code == 2 and ran.out == b"" and Path("a.png").read_bytes() == b"theirs"


def test_png_to_standard_output(library: Library, tmp_path: Path) -> None:
    ran = cli("x", "-o", "-", "-s", "3")
    assert ran.code == 0 and Image.open(io.BytesIO(ran.out)).size == (20, 12)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", [".jpg", ".jpeg", ".webp"])
def test_other_formats_are_replayed_and_told(library: Library, suffix: str) -> None:
    ran = cli("夜 <b>", "-s", "3,4", "-o", "a-{seed}" + suffix)
    assert [path.name for path in ran.paths] == [f"a-3{suffix}", f"a-4{suffix}"]
    assert Image.open(ran.paths[0]).size == (20, 12)
    assert cli("--from", f"a-4{suffix}", "-o", "b" + suffix).code == 0
    assert (library.asked[0]["prompt"], library.asked[0]["seed"]) == ("夜 <b>", 4)
    shown = cli("info", "b" + suffix)
    assert shown.code == 0 and "prompt: 夜 <b>" in shown.out.decode().splitlines()
    cli("x", "-o", "b" + suffix).refused(2, "exists already")
    assert cli("x", "-o", "c" + suffix, "--no-metadata").code == 0
    cli("--from", "c" + suffix).refused(5, "has no recipe")


def test_what_a_format_cannot_hold_is_told_before_anything_is_made(library: Library) -> None:
    for args, words in ((("x" * 40_000, "-o", "a.jpg"), "too long"), (("x", "-W", "16384", "-o", "a.webp"), "16,383")):
        ran = cli(*args)
        assert ran.code == 2 and words in ran.err and not library.asked
    assert cli("x" * 40_000, "-o", "a.jpg", "--no-metadata").code == 0


def test_no_metadata(library: Library) -> None:
    assert "qwenimg" in Image.open(cli("x", "-o", "a").paths[0]).info
    for i, name in enumerate(("--no-metadata", "--disable-metadata", "--disable-image-metadata")):
        assert not Image.open(cli("x", "-o", f"b{i}", name).paths[0]).info


def test_latents(library: Library) -> None:
    assert cli("x", "-s", "4", "--save-latents", "l.safetensors").code == 0
    saved = latents.read_latents(Path("l.safetensors"))
    assert saved.shape == (1, 4, 2, 2) and saved.dtype == np.float32 and (saved == 4).all()
    assert cli("x", "--latents", "l.safetensors", "-o", "a").code == 0
    np.testing.assert_array_equal(library.asked[0]["latents"], saved)
    cli("x", "--latents", "l.safetensors", "-N", "2").refused(2, "--latents")
    cli("x", "--latents", "none.npy").refused(5, "none.npy")
    cli("x", "--save-latents", "l.safetensors").refused(2, "--overwrite")
    cli("--from", "a.png").refused(2, "--latents")
    assert cli("--from", "a.png", "--latents", "l.safetensors", "-o", "b").code == 0
    assert cli("--from", "a.png", "-s", "1", "-o", "c").code == 0


# Replay


def test_from_makes_the_same_pixels(library: Library) -> None:
    args = ["夜\nSteps: 1, Seed: 2", "-n", "n", "-s", "77", "--size", "9x7", "--steps", "2", "--guidance", "3"]
    first = cli(*args, "-m", "shapes", "--precision", "bf16,vae=bf16", "-o", "a").paths[0]
    before = library.asked
    second = cli("--from", "a.png", "-o", "b")
    assert second.code == 0 and library.asked == before
    assert library.calls[1] == {**library.calls[0], "offline": False}
    np.testing.assert_array_equal(np.asarray(Image.open(first)), np.asarray(Image.open(second.paths[0])))


def test_flags_override_a_recipe(library: Library) -> None:
    cli("old", "-s", "77", "--size", "9x7", "--guidance", "1", "-o", "a")
    assert cli("new", "--from", "a.png", "-W", "11", "-N", "2", "--guidance", "5", "-m", "m", "-o", "b").code == 0
    row = library.asked[1]
    assert (row["prompt"], row["seed"], row["width"], row["height"], row["guidance"]) == ("new", 78, 11, 7, 5.0)
    assert row["negative_prompt"] is None and library.calls[1]["model"] == "m"
    Path("p").write_text("one\ntwo\n")
    assert cli("--from", "a.png", "--prompt-file", "p").code == 0
    assert [(a["prompt"], a["seed"]) for a in library.asked] == [("one", 77), ("two", 77)]


def test_other_noise_than_the_recipes_is_told(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    cli("x", "-s", "1", "-o", "a")
    assert "noise" not in cli("--from", "a.png", "-o", "b").err
    original = FakePipeline._recipe
    monkeypatch.setattr(FakePipeline, "_recipe", lambda *args: {**original(*args), "noise_sha256": "f" * 64})
    assert "the noise is not that" in cli("--from", "a.png", "-o", "c").err
    for number, asked in enumerate([("-s", "2"), ("--variation", "7:0.2"), ("--size", "16")]):
        assert "the noise is not that" not in cli("--from", "a.png", *asked, "-o", f"d{number}").err, asked


def test_pictures_without_a_recipe(library: Library) -> None:
    Image.new("RGB", (3, 4)).save("plain.png")
    cli("--from", "plain.png").refused(5, "plain.png", "no recipe")
    cli("--from", "none.png").refused(5, "none.png")
    cli("x", "-o", "a", "-m", "gone")
    library.fails = ModelError("gone: not in the cache")
    ran = cli("--from", "a.png")
    assert ran.code == 5 and "-m" in ran.err.splitlines()[-1]


# What is told


def test_the_headline_comes_first_and_warnings_once(library: Library) -> None:
    ran = cli("x", "-s", "1-2", "-W", "9")
    lines = ran.err.splitlines()
    assert lines[0] == library.pipes[0].headline() + " · takes about 300.0 MB of memory and roughly 8 s"
    assert lines[1] == "qwenimg: warning: the built-in model draws shapes"
    assert ran.err.count("width 9 is odd") == 1
    assert "picture 2 of 2: seed 2, 9x12, 3 steps, guidance 4" in lines and "step 3/3, 0.25 s" in lines
    assert len(ran.paths) == 2


@pytest.mark.parametrize(
    ("total", "told"),
    [
        (1, [1]), (3, [1, 2, 3]), (10, [*range(1, 11)]), (20, [1, *range(2, 21, 2)]),
        (25, [1, 3, 5, 8, 10, 13, 15, 18, 20, 23, 25]), (1000, [1, *range(100, 1001, 100)]),
    ],
)  # fmt: skip
def test_without_a_terminal_some_ten_steps_are_told(total: int, told: list[int]) -> None:
    assert [index for index in range(1, total + 1) if is_told(index, total)] == told


def test_one_is_one(library: Library) -> None:
    assert "picture 1 of 1: seed 1, 20x12, 1 step, guidance 4" in cli("x", "-s", "1", "--steps", "1").err


def test_quiet(library: Library) -> None:
    ran = cli("x", "--quiet")
    assert ran.err == "qwenimg: warning: the built-in model draws shapes\n" and len(ran.paths) == 1


def test_debug(library: Library) -> None:
    ran = cli("x", "--debug", "timing,shapes", "--quiet")
    assert "timing: steps 0.750 s\n" in ran.err and "shapes: pixels [12, 20, 3]\n" in ran.err
    assert "attention: flash\n" in ran.err
    assert "shapes:" not in cli("x", "--debug", "timing", "-o", "a").err


def test_events(library: Library, tmp_path: Path) -> None:
    library.faults[6] = NumericsError("step 3: non-finite \x1b")
    ran = cli("x", "--json", "-s", "5-7", "--steps", "2", "-o", "{seed}")
    assert ran.code == 7
    events = ran.events
    assert {e["schema"] for e in events} == {1}
    kinds = [e["event"] for e in events]
    assert kinds == ["plan", "step", "step", "image", "step", "step", "error", "step", "step", "image", "done"]
    plan, image, error, done = events[0], events[3], events[6], events[-1]
    assert set(plan) == {"schema", "event", "backend", "device", "model", "precision", "images"}
    assert plan["images"][1] == {
        "index": 2, "prompt": "x", "negative_prompt": None, "width": 20, "height": 12, "steps": 2, "guidance": 4.0,
        "seed": 6, "path": str(tmp_path / "6.png"),
        **dict.fromkeys(("control", "layers", "sampler", "schedule", "strength", "clip_skip", "guidance_rescale")),
        "refine_at": None, "control_mode": None, "caption": None, "outpaint": None, "variation": None, "rewrite": None,
        **dict.fromkeys(("hires", "hires_strength", "hires_steps", "hires_with", "embedding")),
        **dict.fromkeys(("lora", "lora_mode", "few_steps", "cfg_end", "step_cache", "cached_calls", "true_cfg")),
        **dict.fromkeys(("cfg_normalization", "cfg_truncation", "skip_layers", "skip_layer_scale")),
        **dict.fromkeys(("only_masked", "mask_blur", "mask_fill", "mask_mode", "decoder_steps", "decoder_guidance")),
    }  # fmt: skip
    assert events[2] == {
        "schema": 1, "event": "step", "index": 1, "step": 2, "total": 2, "sigma": 0.5, "seconds": 0.25
    }  # fmt: skip
    assert image["path"] == str(tmp_path / "5.png") and image["seed"] == 5 and image["recipe"]["seed"] == 5
    assert error == {"schema": 1, "event": "error", "index": 2, "exit": 6, "message": "step 3: non-finite \x1b"}
    assert (done["made"], done["failed"], done["exit"]) == (2, 1, 7)
    assert "step 1/2" not in ran.err and ran.err.splitlines()[0].startswith(library.pipes[0].headline())


def test_errors_are_events_too(library: Library) -> None:
    for args, code in ((["x", "--json", "--steps", "0"], 2), (["--json", "x", "--nonsense"], 2), (["--json"], 2)):
        ran = cli(*args)
        assert ran.code == code and [(e["event"], e["index"], e["exit"]) for e in ran.events] == [("error", None, code)]


# Failures


class OutOfMemoryError(RuntimeError):
    """Named as torch's own."""


ERRORS = [
    (QwenimgError("x"), 1),
    (UsageError("x"), 2),
    (BackendMissing("x"), 3),
    (DoesNotFit("x"), 4),
    (MemoryError(), 4),
    (OutOfMemoryError("CUDA out of memory. Tried to allocate"), 4),
    (OSError(28, "No space left on device"), 4),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"), 4),
    (RuntimeError("[malloc] Unable to allocate 99 bytes."), 4),
    (RuntimeError("[metal::malloc] Attempting to allocate 9 bytes, greater than the maximum allowed buffer size"), 4),
    (RuntimeError("Command buffer execution failed: Insufficient Memory"), 4),
    (ModelError("x\n\x1b[2J" + "y" * 1000), 5),
    (NumericsError("x"), 6),
    (RuntimeError("x\ny"), 1),
    (KeyError("x"), 1),
    (RecursionError(), 1),
]


@pytest.mark.parametrize(("error", "code"), ERRORS, ids=lambda v: type(v).__name__)
def test_exit_codes(library: Library, tmp_path: Path, error: Exception, code: int) -> None:
    library.faults[1] = error
    ran = cli("x", "-s", "1", "--quiet")
    assert ran.code == code and ran.out == b"" and not list(tmp_path.iterdir())
    lines = ran.err.splitlines()
    assert len(lines) == 2 and len(lines[1]) <= MAX_LINE and lines[1].isprintable(), ran.err
    is_bug = code == 1 and type(error) is not QwenimgError
    assert ("this is a bug in qwenimg" in lines[1] and "QWENIMG_TRACEBACK" in lines[1]) == is_bug
    library.fails = error
    assert cli("x", "-s", "1").code == code


def test_traceback_where_asked_for(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    library.faults[1] = KeyError("x")
    monkeypatch.setenv("QWENIMG_TRACEBACK", "1")
    assert "Traceback (most recent call last)" in cli("x", "-s", "1").err
    monkeypatch.setenv("QWENIMG_TRACEBACK", "0")
    assert "Traceback (most recent call last)" not in cli("x", "-s", "1").err


@pytest.mark.parametrize("error", [NumericsError("x"), UsageError("x"), DoesNotFit("x"), OutOfMemoryError("x")])
def test_one_picture_that_fails_does_not_end_the_others(library: Library, error: Exception) -> None:
    library.faults[2] = error
    ran = cli("x", "-s", "1-3", "-o", "{seed}")
    assert ran.code == 7 and [path.name for path in ran.paths] == ["1.png", "3.png"]
    assert "qwenimg: error: picture 2 (seed 2): " in ran.err and not Path("2.png").exists()


@pytest.mark.parametrize(
    ("error", "code", "asked"), [(ModelError("x"), 5, 2), (BackendMissing("x"), 3, 2), (KeyError("x"), 1, 2)]
)
def test_what_ends_a_batch(library: Library, error: Exception, code: int, asked: int) -> None:
    library.faults[2] = error
    ran = cli("x", "-s", "1-3", "-o", "{seed}")
    assert ran.code == code and len(ran.paths) == 1 and len(library.asked) == asked


def test_a_batch_of_failures_has_their_code_and_memory_ends_it_at_once(library: Library) -> None:
    library.faults = {1: NumericsError("x"), 2: NumericsError("x")}
    assert cli("x", "-s", "1-2").code == 6 and len(library.asked) == 2
    library.faults = {1: DoesNotFit("x"), 2: DoesNotFit("x")}
    assert cli("x", "-s", "1-2").code == 4 and len(library.asked) == 1


def test_a_full_disk_ends_a_batch(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes, *, overwrite: bool) -> None:
        raise DoesNotFit(f"{path}: no space")

    monkeypatch.setattr(atomic_files, "write_atomic", full)
    ran = cli("x", "-s", "1-3")
    assert ran.code == 4 and len(library.asked) == 1
    monkeypatch.undo()


def writes(monkeypatch: pytest.MonkeyPatch, fails: str, error: Exception) -> None:
    """Lets the writing of the file `fails` end in `error`."""
    original = atomic_files.write_atomic

    def write(path: Path, data: bytes, *, overwrite: bool) -> None:
        if path.name == fails:
            raise error
        original(path, data, overwrite=overwrite)

    monkeypatch.setattr(atomic_files, "write_atomic", write)


@pytest.mark.parametrize(("error", "made"), [(UsageError("exists"), 2), (DoesNotFit("full"), 1)])
def test_a_picture_that_cannot_be_written(
    library: Library, monkeypatch: pytest.MonkeyPatch, error: Exception, made: int
) -> None:
    writes(monkeypatch, "2.png", error)
    ran = cli("x", "-s", "1-3", "-o", "{seed}", "--json")
    done = ran.events[-1]
    assert ran.code == 7 and (done["event"], done["made"], done["failed"], done["exit"]) == ("done", made, 1, 7)
    assert [e["index"] for e in ran.events if e["event"] == "error"] == [2]


def test_an_error_that_ends_a_run_is_done_too(library: Library) -> None:
    library.faults[2] = KeyError("x")
    ran = cli("x", "-s", "1-3", "-o", "{seed}", "--json")
    assert ran.code == 1 and [e["event"] for e in ran.events][-2:] == ["error", "done"] and ran.events[-1]["exit"] == 1


def test_latents_that_fail_do_not_hide_the_picture(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    writes(monkeypatch, "l.npy", UsageError("exists"))
    ran = cli("x", "-o", "a", "--save-latents", "l.npy")
    assert ran.code == 7 and [p.name for p in ran.paths] == ["a.png"] and "exists" in ran.err


# Faults in a prompt file

LINES = b"""# three that are right
red

{"prompt": "blue", "steps": 0}
  # and two that are not
{"promt": "x"}
green
{"prompt": "#1", "seed": 5}
"""


def test_a_prompt_file_has_comments_and_each_fault_its_line(library: Library, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(LINES)
    ran = cli("--prompt-file", "p.txt", "-o", "out/", "--json")
    lines = ran.err.splitlines()
    assert ran.code == 5 and len(lines) == 2 and not library.calls, ran
    assert [line.split(": ")[2] for line in lines] == ["p.txt:4", "p.txt:6"], lines
    assert [(e["event"], e["index"], e["exit"]) for e in ran.events] == [("error", None, 5)] * 2


def test_keep_going_leaves_out_what_is_at_fault(library: Library, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(LINES)
    ran = cli("--prompt-file", "p.txt", "-o", "{index}", "--keep-going", "--json")
    assert ran.code == 7 and [a["prompt"] for a in library.asked] == ["red", "green", "#1"]
    done = ran.events[-1]
    assert (done["event"], done["made"], done["failed"], done["exit"]) == ("done", 3, 2, 7)
    assert "p.txt:4: " in ran.err and "p.txt:6: " in ran.err
    assert cli("--prompt-file", "-", "--keep-going", stdin=b"red").code == 0
    cli("--prompt-file", "-", "--keep-going", stdin=b"\xff").refused(5, "standard input:1")
    cli("--prompt-file", "-", stdin=b"# nothing").refused(5, "no prompts")


def test_keep_going_at_what_only_the_model_refuses(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(self: FakePipeline, prompt: str, **asked: Any) -> None:
        if prompt == "b":
            raise UsageError("too small")

    monkeypatch.setattr(FakePipeline, "check", check)
    ran = cli("--prompt-file", "-", "--keep-going", "-s", "1-2", "-o", "{index}", stdin=b"a\nb\nc")
    assert ran.code == 7 and ran.err.count("standard input:2: too small") == 1
    assert [a["prompt"] for a in library.asked] == ["a", "a", "c", "c"]
    ran = cli("--prompt-file", "-", stdin=b"a\nb\nc")
    assert ran.code == 5 and ran.err.splitlines()[-1] == "qwenimg: error: standard input:2: too small"
    assert cli("b").code == 2


def test_many_faults_are_not_all_told(library: Library) -> None:
    ran = cli("--prompt-file", "-", stdin=b"\xff\n" * 50)
    lines = ran.err.splitlines()
    assert ran.code == 5 and len(lines) == 21 and "input:20: " in lines[19] and "30 more lines" in lines[20]


def test_a_picture_that_fails_is_told_with_its_line(library: Library) -> None:
    library.faults[6] = NumericsError("x")
    ran = cli("--prompt-file", "-", stdin=b'{"prompt": "a", "seed": 5}\n\n{"prompt": "b", "seed": 6}')
    assert ran.code == 7 and "qwenimg: error: standard input:3: picture 2 (seed 6): x" in ran.err


# The environment


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("STEPS", "x", ["'x' is not a valid integer"]),
        ("STEPS", "5000", ["1 to 1000"]),
        ("SIZE", "7x", ["7x"]),
        ("SEED", "x", ["seed"]),
        ("GUIDANCE", "nan", ["guidance"]),
        ("BACKEND", "tpu", ["tpu"]),
        ("PRECISION", "int3", ["int3"]),
        ("SAMPLER", "eulr", ["euler"]),
        ("QUIET", "perhaps", ["perhaps"]),
        ("DEBUG", "all", ["timing"]),
        ("PREDICTION", "w", ["'w'"]),
    ],
)
def test_a_fault_in_the_environment_has_the_variables_name(
    library: Library, monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: list[str]
) -> None:
    monkeypatch.setenv(f"QWENIMG_{name}", value)
    ran = cli("x")
    ran.refused(2, f"QWENIMG_{name}", *words)
    assert f"--{name.lower()}" not in ran.err
    if name not in ("QUIET", "DEBUG"):
        assert cli("x", f"--{name.lower()}", value).code == 2
    cli("x", "--steps", "y").refused(2, "'--steps'")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("QWENIMG_STEP", "QWENIMG_STEPS"), ("QWENIMG_CFG", "QWENIMG_GUIDANCE"), ("QWENIMG_BACKND", "QWENIMG_BACKEND"),
        ("QWENIMG_NUM_INFERENCE_STEPS", "QWENIMG_STEPS"), ("QWENIMG_ZZZ", ""),
    ],
)  # fmt: skip
def test_an_unknown_variable_is_warned_of(
    library: Library, monkeypatch: pytest.MonkeyPatch, name: str, near: str
) -> None:
    monkeypatch.setenv(name, "7")
    ran = cli("x")
    [line] = [line for line in ran.err.splitlines() if "in the environment" in line]
    assert ran.code == 0 and line.startswith(f"qwenimg: warning: {name} ")
    assert line.endswith(f"did you mean {near}?" if near else "is not used")


def test_known_variables_are_not_warned_of(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("STEPS", "2"), ("TRACEBACK", "1"), ("NO_METADATA", "1"), ("OUTPUT", "a.png"), ("JSON", "0")):
        monkeypatch.setenv(f"QWENIMG_{name}", value)
    ran = cli("x")
    assert ran.code == 0 and "environment" not in ran.err and library.asked[0]["steps"] == 2


# Other commands


def test_info_of_a_picture(library: Library) -> None:
    cli("夜\nseed: 666\x1b[2J", "-s", "3", "-o", "a")
    ran = cli("info", "a.png")
    lines = ran.out.decode().splitlines()
    assert ran.code == 0 and "seed: 3" in lines and "seed: 666" not in lines and "prompt: 夜" in lines
    assert "\x1b" not in ran.out.decode() and "    seed: 666\\x1b[2J" in lines
    assert "xpacket" not in ran.out.decode() and sum(line.startswith("XMP: made by a model (") for line in lines) == 1
    data = json.loads(cli("--json", "info", "a.png").out)
    assert data["recipe"]["seed"] == 3 and "parameters" in data["text"]


def test_info_of_a_foreign_picture(library: Library) -> None:
    from PIL.PngImagePlugin import PngInfo

    texts = PngInfo()
    texts.add_text("prompt", "\x1b]0;x\x07" + "y" * 5000)
    Image.new("RGB", (3, 4)).save("plain.png", pnginfo=texts)
    ran = cli("info", "plain.png")
    assert ran.code == 0 and b"no recipe" in ran.out and b"\x1b" not in ran.out and len(ran.out) < 3000
    assert json.loads(cli("info", "plain.png", "--json").out)["recipe"] is None


@pytest.mark.sample(0)
def test_info_of_a_model(tiny_folder: Path) -> None:
    ran = cli("info", str(tiny_folder))
    assert ran.code == 0 and b"transformer" in ran.out, ran.err
    data = json.loads(cli("info", str(tiny_folder), "--json").out)
    assert data["kind"] == "model" and data["faults"] == [] and data["lines"] == ran.out.decode().splitlines()


def test_info_of_a_broken_model(tiny_folder: Path, library: Library) -> None:
    shutil.copytree(tiny_folder, "broken")
    shutil.rmtree("broken/vae")
    ran = cli("info", "broken")
    assert ran.code == 5 and b"fault: " in ran.out and ran.err == ""
    assert json.loads(cli("info", "broken", "--json").out)["faults"]


def test_info_of_what_is_neither(library: Library) -> None:
    Path("x.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    Path("y").write_bytes(b"")
    os.mkfifo("fifo")
    for name in ("x.png", "y", "fifo", "none", "."):
        cli("info", name).refused(5)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qwenimg.backends, "available", lambda: {"mlx": "M9\x1b", "cuda": "not available: no card"})
    assert cli("devices").out.decode() == "mlx    M9\\x1b\ncuda   not available: no card\n"
    assert json.loads(cli("devices", "--json").out) == {
        "backends": [
            {"name": "mlx", "available": True, "device": "M9\x1b", "reason": None},
            {"name": "cuda", "available": False, "device": None, "reason": "no card"},
        ]
    }


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str) -> None:
    assert b"_QWENIMG_COMPLETE" in cli("completion", shell).out
    cli("completion", "cmd").refused(2)


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("qwenimg in", {"info"}),
        ("qwenimg --st", {"--stack", "--steps", "--strength", "--step-cache", "--step-cache-check"}),
        ("qwenimg cat --backend ", {"auto", "mlx", "cuda", "cpu"}),
        ("qwenimg cat in", set()),
        ("qwenimg generate in", set()),
        ("qwenimg info --j", {"--json"}),
        ("qwenimg completion z", {"zsh"}),
        ("qwenimg --steps 4 comp", {"completion"}),
    ],
)
def test_completion(monkeypatch: pytest.MonkeyPatch, words: str, offered: set[str]) -> None:
    monkeypatch.setenv("_QWENIMG_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    found = {line.partition(",")[2] for line in cli().out.decode().split()}
    assert found == offered


def test_the_stand_in_gives_what_the_library_gives() -> None:
    assert isinstance(list(FakePipeline().stream("x", width=3, height=4, steps=1, guidance=1.0, seed=1))[-1], Result)


# With the real library


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(1)
def test_a_real_picture_and_its_replay(
    backend: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["-m", str(tiny_folder), "--backend", backend]
    first = cli("a red circle", *options, "--size", "50x34", "--steps", "2", "-s", "5,4294967301", "-o", "a{seed}")
    assert first.code == 0, first.err
    assert first.err.splitlines()[0].startswith(f"{backend} on ") and first.paths[0].name == "a5.png"
    again = cli("--from", "a5.png", *options, "-o", "b", "--quiet")
    assert again.code == 0 and again.err == ""
    ours, theirs = (np.asarray(Image.open(path)) for path in (first.paths[0], again.paths[0]))
    assert ours.shape == (34, 50, 3) and ours.std() > 1
    np.testing.assert_array_equal(ours, theirs)


def test_real_refusals(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = ["-m", str(tiny_folder), "--backend", "cpu"]
    cli("x", "-m", str(tmp_path / "none")).refused(5, "none")
    cli("x", "-m", "no-such-name").refused(5, "no-such-name")
    np.save("l.npy", np.zeros((1, 16, 4, 4), np.float32))
    ran = cli("x", *model, "--latents", "l.npy", "--size", "64x64", "--quiet")
    assert ran.code == 2 and "[1, 16, 4, 4]" in ran.err and [p.name for p in tmp_path.iterdir()] == ["l.npy"]


@pytest.mark.sample(0)
def test_pull_is_there() -> None:
    assert cli("pull", "--help").code == 0
    lists = [[line.split()[:2] for line in cli(name).out.splitlines()[:-1]] for name in ("pull", "models")]
    assert sorted(lists[0]) == sorted(lists[1]) and len(lists[0]) > 30  # their order is that of the memory free now
    cli("pull", "--verify").refused(2, "NAME")
    cli("pull", "sdlx").refused(5, "did you mean sdxl?")


def test_latents_of_several_sizes_do_not_go_into_one_file(library: Library, tmp_path: Path) -> None:
    (tmp_path / "sizes.txt").write_text('{"prompt": "a", "width": 16}\n{"prompt": "b", "width": 32}\n')
    ran = cli("--prompt-file", "sizes.txt", "--save-latents", "l.npy")
    assert ran.code == 2 and "several sizes" in ran.err and library.asked == []


@pytest.mark.parametrize(("seconds", "told"), [(250.0, False), (400.0, True)])
def test_a_long_time_is_told_before_the_work(
    library: Library, monkeypatch: pytest.MonkeyPatch, seconds: float, told: bool
) -> None:
    """Of all pictures together, also with --quiet, and before anything is encoded."""
    expected = Estimate(memory=10**9, seconds=seconds, step=0.25)
    monkeypatch.setattr(FakePipeline, "estimate", lambda self, prompt, **asked: expected)
    lines = cli("x", "-s", "1-2").err.splitlines()
    assert lines[0].endswith(f"about 1.0 GB of memory and {'roughly 13 min' if told else 'roughly 8 min'}")
    if told:
        assert lines[1].startswith("qwenimg: warning: this takes roughly 13 min")
        assert "this takes roughly 13 min" in cli("y", "-s", "3-4", "--quiet").err
    assert ("this takes" in "\n".join(lines)) == told


@pytest.mark.parametrize(("said", "told"), [(4.0, ""), (0.5, ""), (40.0, "roughly 1.8 s"), (2000.0, "roughly 1.8 s")])
def test_the_first_step_corrects_what_was_said(
    library: Library, monkeypatch: pytest.MonkeyPatch, said: float, told: str
) -> None:
    """A step takes 0.25 s; only where that is much else than was said, once, and after the first step."""
    expected = Estimate(memory=10**9, seconds=said, step=said / 4)
    monkeypatch.setattr(FakePipeline, "estimate", lambda self, prompt, **asked: expected)
    lines = cli("x", "-s", "1-2").err.splitlines()
    found = [i for i, line in enumerate(lines) if "as this step went" in line]
    assert [lines[i].rsplit("takes ", 1)[1] for i in found] == ([told] if told else [])
    assert all(lines[i - 1].startswith("step 1/") for i in found)


def test_a_rest_beyond_ten_minutes_is_told_even_to_quiet_runs(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Estimate(memory=10**9, seconds=500.0, step=0.1)
    monkeypatch.setattr(FakePipeline, "estimate", lambda self, prompt, **asked: expected)
    assert "the rest takes roughly 20 min" in cli("x", "--quiet").err


def test_what_will_not_fit_is_refused_before_anything_is_encoded(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: FakePipeline, prompt: str, **asked: object) -> Estimate:
        raise DoesNotFit("the transformer takes 9.0 GB")

    monkeypatch.setattr(FakePipeline, "estimate", refuse)
    ran = cli("x", "-s", "1-2")
    assert ran.code == 4 and "takes 9.0 GB" in ran.err.splitlines()[-1]
    assert not library.pipes[0].prepared
