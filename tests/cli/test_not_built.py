"""What is not built says so, and what was hardly meant as a prompt is not drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_runner import Library, cli

from qwenimg.cli import near
from qwenimg.cli.generate import NOT_BUILT
from qwenimg.cli.help import COMMANDS
from qwenimg.common.base.errors import UsageError
from qwenimg.common.prompts.check import check_prompt

OPTIONS = [(name, what.split(",")[0]) for what, names in NOT_BUILT.items() for name in names]


@pytest.mark.parametrize(("name", "what"), OPTIONS)
def test_options_for_what_is_not_built(library: Library, name: str, what: str) -> None:
    for args in (["x", name, "y"], [name, "y", "x"], ["x", name], [f"{name}=y", "x"]):
        cli(*args).refused(2, what, "not built yet")
    assert not library.calls and name not in cli("--help").out.decode().split()


@pytest.mark.parametrize(
    "prompt",
    ["a cat <hypernet:b>", "< HyperNet : x >", "<controlnet:a:1>", "embedding:bad", "(embedding:x:1.2)"],
)
def test_tags_in_a_prompt(library: Library, prompt: str) -> None:
    cli(prompt).refused(2, "not built yet", "leave it out")
    cli("x", "-n", prompt).refused(2, "not built yet")
    Path("p").write_text(f"a cat\n{prompt}\n")
    cli("--prompt-file", "p").refused(5, "p:2", "not built yet")
    assert not library.calls
    with pytest.raises(UsageError, match="not built yet"):
        check_prompt(prompt)


@pytest.mark.parametrize(
    "prompt",
    ["lora", "<3", "a <b> c", "<lora", "a book on LoRA: fine tuning", "word embedding: a diagram", "a:b <x:y>"],
)
def test_no_tags(prompt: str) -> None:
    check_prompt(prompt)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("device", "devices"), ("Device", "devices"), ("devcies", "devices"), ("sampler", "samplers"),
        ("self-test", "selftest"), ("self_test", "selftest"), ("generat", "generate"), ("ifno", "info"),
        ("trian", "train"), ("plul", "pull"), ("list", "models"), ("ls", "models"), ("download", "pull"),
        ("txt2img", "generate"), ("version", "--version"), ("gpus", "devices"),
    ],
)  # fmt: skip
def test_near_misses_are_not_drawn(library: Library, word: str, meant: str) -> None:
    cli(word).refused(2, "did you mean", f"`qwenimg {meant}`", f"-p {word}")
    assert cli("--steps", "4", word, "--json", "--quiet").code == 2
    cli(word, "x.png").refused(2, f"`qwenimg {meant}`")
    assert not library.calls
    for args in (["-p", word], ["generate", word], ["--", word], [f"{word} "], [f"a {word}"]):
        assert cli("-o", "x.png", "--overwrite", *args).code == 0, args


WORDS = (
    "cat dog rain brain trail grain trains plane plant plank bull pool doll full general generator conference service "
    "test show draw run search complexion competition informal infant degenerate crevices samurai device-mapper "
    "scorpion castle 猫 chat Katze model-train listing paradise generosity sampan devil vices training pulley"
)


@pytest.mark.parametrize("word", WORDS.split())
def test_prompts_of_one_word_are_drawn(library: Library, word: str) -> None:
    assert cli(word).code == 0 and library.asked[0]["prompt"] == word


def test_help_by_every_name(library: Library) -> None:
    shown = cli("--help").out
    for args in (["-h"], ["help"], ["help", "generate"], ["generate", "-h"]):
        assert (cli(*args).code, cli(*args).out) == (0, shown), args
    assert cli("info", "-h").out == cli("help", "info").out == cli("info", "--help").out != shown
    assert not library.calls
    assert cli("-p", "help").code == 0 and cli("x", "-H", "7", "-o", "h").code == 0


@pytest.mark.parametrize("word", near.NOT_BUILT)
def test_words_for_what_is_not_built(library: Library, word: str) -> None:
    cli(word).refused(2, "not built yet", f"-p {word}")


def test_what_is_suggested_is_there() -> None:
    known = {*COMMANDS, "models", "--help", "--version"}
    assert {text.split()[0] for text in near.OTHERS.values()} <= known and set(near.LONG) <= known
