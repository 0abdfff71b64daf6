"""What is not built says so, and what was hardly meant as a prompt is not drawn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.cli_runner import Library, cli

from qwenimg.cli import elsewhere
from qwenimg.cli.commands.bench import bench
from qwenimg.cli.commands.generate import generate
from qwenimg.cli.commands.plan import plan
from qwenimg.cli.elsewhere import BACKENDS, LIKE, OPTIONS, unknown
from qwenimg.cli.help import COMMANDS
from qwenimg.common.base.errors import UsageError
from qwenimg.common.prompts.check import check_prompt

MISSING = [(name, text.split(" is")[0].split(" are")[0]) for name, text in OPTIONS.items() if "not built" in text]


@pytest.mark.parametrize(("name", "what"), MISSING)
def test_options_for_what_is_not_built(library: Library, name: str, what: str) -> None:
    for args in (["x", name, "y"], [name, "y", "x"], ["x", name], [f"{name}=y", "x"]):
        cli(*args).refused(2, what, "not built yet")
    assert not library.calls and name not in cli("--help-all").out.decode().split()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--neg", "y"], "--negative-prompt"), (["--device", "cuda"], "--backend"),
        (["--dtype", "fp16"], "--precision"),
        (["--tiling"], "where memory asks for them"), (["--low-vram"], "--max-memory"),
        (["--lora", "f.safetensors", "0.7"], "f.safetensors:0.7"),
        (["--backend", "metal"], "mlx"), (["--lora-scales", "1"], "FILE:SCALE"), (["--format", "webp"], "-o"),
        (["--scheduler", "y"], "--sampler"), (["--turbo"], "--few-steps"), (["--stepz", "4"], "--steps"),
        (["--negative_promt", "y"], "--negative-prompt"), (["--quux"], "--help-all"), (["--cpu-offload"], "-q 8"),
    ],
)  # fmt: skip
def test_options_of_other_programs_are_answered_by_meaning(library: Library, args: list[str], said: str) -> None:
    cli("x", *args).refused(2, said)
    assert not library.calls


def test_the_table_of_other_programs_names_what_there_is() -> None:
    """No option of ours is in it, and every option that it advises is one."""
    known = {opt for param in generate.params for opt in param.opts if not getattr(param, "hidden", False)}
    advised = {word for text in OPTIONS.values() for word in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", text)}
    others = {opt for command in (plan, bench) for param in command.params for opt in param.opts}  # named with it
    assert not OPTIONS.keys() & known and advised <= known | others, advised - known - others
    assert {*BACKENDS.values()} <= {"auto", "mlx", "cuda"}
    assert unknown("--" + "x" * 30, known).endswith("qwenimg --help-all lists all") and 0.5 < LIKE < 1


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
        ("plul", "pull"), ("list", "models"), ("ls", "models"), ("download", "pull"),
        ("txt2img", "generate"), ("version", "--version"), ("gpus", "devices"),
    ],
)  # fmt: skip
@pytest.mark.sample(5)
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


@pytest.mark.parametrize("word", elsewhere.NOT_BUILT)
def test_words_for_what_is_not_built(library: Library, word: str) -> None:
    cli(word).refused(2, "not built yet", f"-p {word}")


def test_what_is_suggested_is_there() -> None:
    known = {*COMMANDS, "models", "--help", "--version"}
    assert {text.split()[0] for text in elsewhere.COMMANDS.values()} <= known and set(elsewhere.LONG) <= known


def test_an_embedding_is_reported_by_its_whole_name(library: Library) -> None:
    cli("a cat, embedding:easynegative, (embedding:bad-hands.v2:1.2)").refused(2, "(embedding:easynegative)")
    cli("(embedding:bad-hands.v2:1.2)").refused(2, "(embedding:bad-hands.v2)")
