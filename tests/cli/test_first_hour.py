"""What a newcomer reads: the hints of missing backends, the README's order, and what `make` says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.cli_runner import Library, cli
from support.rules import ROOT

from qwenimg import backends
from qwenimg.common.base.errors import BackendMissing
from qwenimg.common.precision.machines import machine

README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "extra"), [("mlx", "mlx"), ("cuda", "torch"), ("cpu", "torch")])
def test_a_missing_backend_is_installed_from_the_clone(monkeypatch: pytest.MonkeyPatch, name: str, extra: str) -> None:
    monkeypatch.setattr(backends, "installed", lambda name: False)
    with pytest.raises(BackendMissing) as caught:
        backends.load(name)
    text = str(caught.value)
    assert f"pip install '.[{extra}]'" in text and "clone" in text and len(text) < 200, text


def test_nothing_names_a_distribution_that_is_on_no_index() -> None:
    tracked = subprocess.run(["git", "ls-files", "*.py", "*.md", "Makefile"], cwd=ROOT, capture_output=True, text=True)
    wrong = re.compile(r"pip install (-\S+ )*'?qwenimg\b")
    files = [ROOT / name for name in tracked.stdout.split()] or [*ROOT.glob("*.md"), *ROOT.glob("backends/*.py")]
    assert [str(path) for path in files if wrong.search(path.read_text(encoding="utf-8"))] == []


def test_the_readme_installs_before_it_runs() -> None:
    """But for the first command, which installs and draws by itself: it stands within the first fifteen lines."""
    first = README.splitlines()[:15]
    assert first[first.index("```") + 1] == "make demo" and README[: README.index("## Install")].count("```") == 2
    assert README.index("pip install '.[torch]'") < min(map(README.index, ("qwenimg selftest", "qwenimg pull sd15")))
    assert README.index("57.7 GB") < README.index("qwenimg pull qwen-image")
    assert "https://pytorch.org/get-started/locally/" in README, "pip takes the build for CUDA by itself"


@pytest.mark.parametrize("command", ["info", "convert", "convert sd15", "parity record", "parity check"])
def test_a_command_that_lacks_an_argument_is_answered_with_an_example(command: str) -> None:
    ran = cli(*command.split())
    ran.refused(2, "Missing", f"As in: qwenimg {command.removesuffix(' sd15')} ")


@pytest.mark.parametrize("command", ["bench", "doctor", "precision", "selftest", "parity record", "plan"])
def test_a_backend_of_another_name_is_answered_with_ours(command: str) -> None:
    cli(*command.split(), "--backend", "metal").refused(2, "Did you mean mlx?")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["models", "ComfyUI"], "As in: qwenimg models --models-dir"),
        (["plan", "--on", "my toaster"], "qwenimg plan --on list"),
        (["plan", "--on", "rtx 4090 laptop"], "is not known"),
        (["plan", "--on", "MacBook Pro M3 Max 36GB"], "Apple M3 Max comes with 36, 48"),
        (["bench", "--on", "3060"], "qwenimg plan --on 3060"),
        (["edit", "make it blue"], "edit PICTURE"),
        (["benchmark"], "qwenimg bench"),
        (["x", "--precision", "fp8"], "-q 8"),
        (["x", "--denoise", "0.5"], "--strength"),
        (["x", "--image-strength", "0.5"], "runs backwards"),
        (["a cat <lora:style:0.8>"], "give --lora style:0.8"),
    ],
)
def test_what_newcomers_type_is_answered_with_what_works(args: list[str], words: str) -> None:
    cli(*args).refused(2, words)


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "NVIDIA RTX 4070 Ti SUPER"),
        ("4070ti", "NVIDIA RTX 4070 Ti"),
        ("rtx 3060 12gb", "NVIDIA RTX 3060"),
        ("MacBook Pro M3 Max", "Apple M3 Max"),
        ("m2", "Apple M2"),
    ],
)
def test_a_machine_is_known_by_the_name_that_people_give_it(name: str, title: str) -> None:
    assert machine(name).title == title


def test_a_number_after_n_is_told(library: Library) -> None:
    assert "for 4 pictures give -N 4" in cli("x", "-n", "4").err
    assert "-N" not in cli("x", "-n", "4 legs").err


def said(*targets: str) -> str:
    """The commands that make would run for `targets` where nothing is set up."""
    if shutil.which("make") is None:
        pytest.skip("no make here")
    command = ["make", "-n", "VENV=/nowhere/venv", *targets]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout


def test_make_demo_ends_with_what_to_run_next() -> None:
    lines = said("demo").splitlines()
    end = "\n".join(lines[lines.index("echo") :])
    assert '/nowhere/venv/bin/qwenimg "a large blue star"' in end and "source /nowhere/venv/bin/activate" in end


def test_make_test_says_that_it_installs_and_how_long() -> None:
    shown = said("test")
    assert shown.index("Installing torch, MLX") < shown.index("pip install") and "minutes" in shown


@pytest.mark.parametrize(("args", "does"), [
    (("x", "-m", "https://huggingface.co/Qwen/Qwen-Image"), "`qwenimg pull Qwen/Qwen-Image` gets it"),
    (("pull", "https://hf.co/a/b/resolve/main/c/d.safetensors?download=true"), "`qwenimg pull a/b/c/d.safetensors`"),
    (("x", "--lora", "https://civitai.com/models/123:0.8"), "download the file and give its path"),
    (("x", "-i", "https://example.org/a.png"), "download the file"),
    (("edit", "https://example.org/a.png", "night"), "download the file"),
    (("x", "--control=depth=https://example.org/a.png"), "download the file"),
    (("x", "--vae", "http://example.org/vae.safetensors"), "download the file"),
    (("upscale", "https://example.org/a.png"), "download the file"),
    (("https://example.org/a.png",), "download the file"),
    (("x", "-m", "https://huggingface.co/" + "a" * 200_000), "download the file"),
    (("x", "-m", "https://huggingface.co/\u202e/\x1b[2J"), "download the file"),
])  # fmt: skip
def test_an_address_is_answered_with_what_gets_the_file(library: Library, args: tuple[str, ...], does: str) -> None:
    cli(*args).refused(2, "no address is opened", does)
    assert not library.calls


def test_an_address_in_a_prompt_is_drawn(library: Library) -> None:
    assert cli("https://example.org in neon letters").code == 0 == cli("-p", "https://example.org").code


@pytest.mark.parametrize(("args", "does"), [
    (("open",), "qwenimg serve"), (("disk-space",), "qwenimg rm NAME"),
    (("upscale", "a.png", "--width", "4000"), "give --by"),
])  # fmt: skip
def test_more_words_that_people_type(library: Library, args: tuple[str, ...], does: str) -> None:
    cli(*args).refused(2, does)


def test_a_picture_of_a_telephone_is_refused_before_a_model_is_named(library: Library) -> None:
    Path("IMG_0042.heic").write_bytes(b"\0\0\0\x18ftypheic" + bytes(24))
    cli("edit", "IMG_0042.heic", "make it night").refused(5, "export it as JPEG")
