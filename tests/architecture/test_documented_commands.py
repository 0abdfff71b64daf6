"""The commands in README and docs: their options exist, and so does every script and target that they name."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from support.rules import ROOT

from qwenimg.cli.main import run
from qwenimg.cli.words import cli

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL = ("", "bash", "sh")
INLINE = re.compile(r"`((?:python|pytest|make|qwenimg) [^`]+)`")
FLAGS = {"--help", "--json", "--verify"}
PLACES = re.compile(r"\.\.\.|\b[A-Z]{2,}\b|\[")  # `qwenimg pull NAME`: the form of a command, and none to paste


def commands() -> list[tuple[str, str]]:
    """(page, command), comments cut off, of code blocks and of the text."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        lines = [line for language, block in BLOCK.findall(text) if language in SHELL for line in block.splitlines()]
        lines += [" ".join(line.split()) for line in INLINE.findall(BLOCK.sub("", text))]
        found += [(page.name, line.strip()) for line in lines if line.strip()]
    return found


def words(program: str) -> list[tuple[str, list[str]]]:
    """(page, arguments) of every documented call of `program`, in whatever folder it lies."""
    found = []
    for page, line in commands():
        parts = shlex.split(line, comments=True)
        if parts and Path(parts[0]).name == program:
            found.append((page, parts[1:]))
    return found


def test_every_option_of_a_documented_command_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    """click reads a whole line before it shows the help that is asked for at its end."""
    wrong, checked = [], 0
    for page, arguments in words("qwenimg"):
        if arguments[-1].startswith("--") and arguments[-1] not in FLAGS:  # an option is named, not a command
            continue
        if any(PLACES.search(word) for word in arguments if not word.startswith("-")):
            continue
        checked += 1
        if run([*arguments, "--help"]):
            wrong.append((page, arguments, capsys.readouterr().err.strip()))
    print(checked, "commands of qwenimg")
    assert wrong == [] and checked > 25


@pytest.mark.parametrize(
    ("command", "begin", "end"),
    [("generate", "# The command line", "## Without a model"), ("bench", "## How long it takes", "## Downloads")],
)
def test_every_option_is_on_the_page_of_the_command_line(command: str, begin: str, end: str) -> None:
    """By one of its names, in the part of the page that is about the command."""
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", page[page.index(begin) : page.index(end)]))
    found = cli.get_command(click.Context(cli), command)
    assert found is not None
    options = [param.opts for param in found.params if isinstance(param, click.Option) and not param.hidden]
    assert len(options) >= 10 and [names for names in options if not named & {*names}] == []


def test_the_check_sees_an_unknown_option() -> None:
    assert run(["a red circle", "--no-such-option", "3", "--help"]) == 2


def test_every_documented_script_and_test_is_there() -> None:
    scripts = [arguments[0] for _, arguments in words("python")]
    tests = [word for _, arguments in words("pytest") for word in arguments if word.startswith("tests/")]
    print(len(scripts), "scripts,", len(tests), "tests")
    assert len(scripts) > 10 and tests
    assert [name for name in scripts + tests if name not in ("-m", "-c") and not (ROOT / name).exists()] == []


def test_every_documented_target_of_make_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = {word for _, arguments in words("make") for word in arguments if "=" not in word}
    assert {"demo", "test", "twins"} <= named <= targets


SCRIPTS = sorted(path.name for path in (ROOT / "tools").glob("*.py"))


@pytest.mark.sample(0)
def test_every_tool_can_be_imported() -> None:
    """In one process: what they import of the package is there under that name."""
    code = f"import importlib\nfor name in {[name[:-3] for name in SCRIPTS]}: importlib.import_module(name)"
    path = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tools'}:{ROOT / 'tests'}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], env=path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr.strip().rpartition("\n")[2]
