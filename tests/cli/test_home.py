"""`~` is the user's home wherever a path is given: shells leave it in quotes, in `--option=~/file` and in files."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file
from support.cli_runner import cli

from qwenimg.cli import config, words
from qwenimg.cli.options import FILE
from qwenimg.cli.serve import offered
from qwenimg.common.base.arguments import home
from qwenimg.common.base.atomic_files import picture_path
from qwenimg.common.families.load_options import from_call
from qwenimg.common.hub.model_folders import read_folders
from qwenimg.common.jobs.naming import output_path
from qwenimg.common.jobs.prompt_file import read_prompts
from qwenimg.common.request import coerce, control_text
from qwenimg.common.request.loras import find_file


@pytest.fixture(autouse=True)
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a file of weights, a picture and prompts."""
    monkeypatch.setenv("HOME", str(tmp_path))
    save_file({"some.weight": np.ones((2, 3), np.float32)}, tmp_path / "a.safetensors")
    lora = {f"transformer_blocks.0.attn.to_q.lora_{half}.weight": np.ones((2, 2), np.float32) for half in "AB"}
    save_file(lora, tmp_path / "lora.safetensors")
    Image.new("RGB", (8, 8), "red").save(tmp_path / "a:0.5.png")
    (tmp_path / "prompts.txt").write_text("a red circle\n")
    return tmp_path


def named(pattern: str) -> Path:
    now = datetime(2026, 1, 1)
    return output_path(pattern, seed=1, index=1, prompt="~", now=now, several=False, same_seeds=False)


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (lambda: FILE.convert("~/a.safetensors", None, None), "a.safetensors"),
        (lambda: from_call({"vae": "~/a.safetensors"}).parts["vae"], "a.safetensors"),
        (lambda: from_call({"tokenizer": Path("~/words")}).tokenizer, "words"),
        (lambda: find_file("~/a.safetensors"), "a.safetensors"),
        (lambda: named("~/b.png"), "b.png"),
        (lambda: named("~/{prompt}{seed}.png").parent / "b", "b"),
        (lambda: picture_path("~/b"), "b.png"),
        (lambda: Path(offered._loras(["~/lora.safetensors"], read_folders([]))["lora"]), "lora.safetensors"),
    ],
)
def test_a_path(at_home: Path, made: Callable[[], Any], name: str) -> None:
    assert made() == at_home / name


def test_files_that_are_read(at_home: Path) -> None:
    assert [place for place, _ in read_prompts("~/prompts.txt")] == ["~/prompts.txt:1"]
    [control] = control_text.parse("net=canny@~/a:0.5.png")
    assert (control.file, control.scale) == ("~/a:0.5.png", 1)
    [control] = coerce.controls("net=~/a:0.5.png:0.7")[0]
    assert (control.file, control.scale) == ("~/a:0.5.png", 0.7) and control.picture is not None
    shown = cli("info", "~/a.safetensors")
    assert shown.code == 0 and b"some.weight" in shown.out


def test_the_configuration_and_the_environment(at_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert config._as_option("vae", "~/a.safetensors") == at_home / "a.safetensors"
    monkeypatch.setenv("QWENIMG_VAE", "~/gone.safetensors")
    assert str(at_home / "gone.safetensors") in cli("a ring", "-m", "shapes").err


def test_every_path_of_every_command_is_read_so() -> None:
    """Each option and argument with a path is of the one type that knows `~`."""
    ctx = click.Context(words.cli)
    found: list[click.Parameter] = []
    todo: list[click.Command | None] = [words.cli]
    while todo:
        if isinstance(one := todo.pop(), click.Group):
            todo += [one.get_command(ctx, name) for name in one.list_commands(ctx)]
        found += [param for param in (one.params if one else []) if isinstance(param.type, click.Path)]
    print(len(found))
    assert len(found) > 20 and all(param.type is FILE for param in found)


@pytest.mark.parametrize("path", ["~nobody-here/a.png", "~\0/a", "~x\0y", "a~/b", "./~", "", "~" * 5000])
def test_what_is_nobodys_home_stays(path: str) -> None:
    assert home(path) == path


def test_no_user_is_no_traceback() -> None:
    for args in (("info", "~nobody-here/a"), ("a ring", "-m", "~nobody-here/a")):
        ran = cli(*args)
        assert ran.code in (2, 5) and len(ran.err.splitlines()) == 1 and "Traceback" not in ran.err, ran.err
    assert picture_path("~nobody-here/a").name == "a.png"
