"""Every option and argument of every command with values that are none: a new one is tried by itself.

Each run ends in a documented exit code with one line, and leaves no file behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from support.cli_runner import Library, Ran, cli

from qwenimg.cli import config
from qwenimg.cli.help import COMMANDS
from qwenimg.cli.words import FREE
from qwenimg.cli.words import cli as words

MISSING = "nowhere.safetensors"  # the model of every run, so that a value that is taken ends there
VALUES = {"empty": "", "a word": "x", "a null byte": "a\0b", "long": "y" * 100_000, "escapes": "\x1b[2J\n\u202e"}
NEEDED = {  # what a command cannot do without
    "generate": ["-p", "a ring", "-m", MISSING],
    "plan": [MISSING],
    "info": [MISSING],
    "precision": [MISSING],
    "bench": [MISSING],
    "doctor": [MISSING],
    "convert": [MISSING, "out"],
    "selftest": ["-m", MISSING],
    "serve": ["-m", MISSING],
    "mcp": ["--folder", MISSING, "-m", MISSING],
    "grid": ["a ring", "--x", "steps=1,2", "-m", MISSING],
    "batch": ["-", "-o", "out", "-m", MISSING],
    "models": [],
    "describe": [MISSING, "--with", MISSING],
    "rewrite": ["a ring", "--with", MISSING],
    "train lora": ["--data", MISSING, "-m", MISSING, "-o", "out.safetensors"],
    "lora merge": [MISSING, "-o", "out.safetensors"],
    "lora resize": [MISSING, "--rank", "4", "-o", "out.safetensors"],
    "upscale": [MISSING, "--with", MISSING],
    "pull": ["./none"],
    "rm": ["./none"],
    "completion": ["zzz"],
    "parity record": [MISSING, "-o", "out.safetensors"],
    "parity check": [MISSING],
    "parity run": [MISSING, "--backends", "cpu,mlx"],
    "parity report": [MISSING],
}


def commands() -> Iterator[tuple[str, click.Command]]:
    context = click.Context(words)
    for name in COMMANDS:
        command = words.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from ((f"{name} {inner}", each) for inner, each in command.commands.items())
        else:
            yield name, command


def cases() -> list[tuple[str, str, list[str]]]:
    """Each command with each parameter that takes a value: the words before that value."""
    found = []
    for name, command in commands():
        for param in command.params:
            if isinstance(param, click.Option) and not param.is_flag:
                found.append((name, param.opts[0], [*name.split(), *NEEDED[name], param.opts[0]]))
            if isinstance(param, click.Argument):
                options = [word for word in NEEDED[name] if word.startswith("-") or word == "out.safetensors"]
                found.append((name, str(param.name), [*name.split(), *(options if "record" in name else [])]))
    return found


def refused(ran: Ran, label: tuple[str, ...]) -> None:
    lines = [line for line in ran.err.splitlines() if not line.startswith("comparing ")]  # of `parity run`
    assert ran.code in (2, 3, 4, 5), (label, ran)
    assert len(lines) == 1 and len(lines[0]) <= 300 and lines[0].isprintable(), (label, ran.err)


@pytest.mark.parametrize(("name", "param", "said"), cases(), ids=lambda part: part if isinstance(part, str) else "")
@pytest.mark.sample(15)
def test_every_value_that_is_none(
    name: str, param: str, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config, "path", lambda: tmp_path / "config.toml")
    for label, value in VALUES.items():
        ran = cli(*said, value)
        refused(ran, (name, param, label))
        if param.lstrip("-").replace("-", "_") not in (*FREE, "p", "n") and label in ("empty", "a null byte"):
            assert ran.code == 2 and ("is empty" in ran.err or "null byte" in ran.err), ran
        assert not list(tmp_path.iterdir()), (name, param, label)


# Values by name


@pytest.mark.parametrize("instruction", ["x", "bash_x", "zsh", "_", "bash_complete", "\x1b[2J"])
def test_completion_of_no_shell(instruction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_QWENIMG_COMPLETE", instruction)
    monkeypatch.delenv("COMP_WORDS", raising=False)
    cli().refused(2, "_QWENIMG_COMPLETE", "unset it")


def test_completion_of_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_QWENIMG_COMPLETE", "zsh_source")
    assert cli().code == 0
    monkeypatch.setenv("_QWENIMG_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "qwenimg pla")
    monkeypatch.setenv("COMP_CWORD", "1")
    ran = cli()
    assert ran.code == 0 and b"plan" in ran.out


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_standard_output_by_its_file(library: Library, name: str) -> None:
    """As `-o -`; beside it no picture of that name is written, also where it leads to a file."""
    ran = cli("-p", "a ring", "-o", name)
    assert ran.code == 0 and ran.out.startswith(b"\x89PNG")
    assert cli("-p", "a ring", "-o", "-").out[:8] == ran.out[:8]
    cli("-p", "a ring", "-o", name, "-N", "2").refused(2, "one picture")


@pytest.mark.parametrize("name", ["/dev/stderr.png", "/dev/null.png", "/proc/self/fd/2.png", "/dev/fd/9.png"])
def test_nothing_is_written_among_devices(library: Library, name: str) -> None:
    cli("-p", "a ring", "-o", name).refused(2, "devices")
    assert not os.path.lexists(name)


def test_an_empty_line_of_the_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(config, "path", lambda: tmp_path / "config.toml")
    for name, kinds in config.KEYS.items():
        if str in kinds and name != "negative_prompt":
            (tmp_path / "config.toml").write_text(f'{name} = ""\n')
            cli("-p", "a ring", "-m", MISSING).refused(2, f"{name} is empty")
