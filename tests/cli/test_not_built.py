"""What is not built says so, and what was hardly meant as a prompt is not drawn."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
from support.cli_runner import Library, cli

from qwenimg.cli import editing, foreign_words
from qwenimg.cli.commands.bench import bench
from qwenimg.cli.commands.generate import generate
from qwenimg.cli.commands.grid import grid
from qwenimg.cli.commands.plan import plan
from qwenimg.cli.commands.serve import serve
from qwenimg.cli.commands.upscale import upscale
from qwenimg.cli.foreign_words import BACKENDS, OPTIONS, SIMILAR_OPTION, unknown_option
from qwenimg.cli.help import COMMANDS, EDITING
from qwenimg.cli.options import ALIASES
from qwenimg.cli.words import cli as words_cli
from qwenimg.common.base.errors import NOT_BUILT, UsageError
from qwenimg.common.families.load_options import LOAD_OPTIONS
from qwenimg.common.prompts.check import check_prompt
from qwenimg.common.request import call_options, load_options
from qwenimg.common.request.request import OPTIONS as CALL_OPTIONS

MISSING = [(f"--{word}", title) for title, words in NOT_BUILT.items() for word in words]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("name", "what"), [next(one for one in MISSING if one[1] == title) for title in NOT_BUILT])
def test_options_for_what_is_not_built(library: Library, name: str, what: str) -> None:
    for args in (["x", name, "y"], [name, "y", "x"], ["x", name], [f"{name}=y", "x"]):
        cli(*args).refused(2, what, "not built yet")
    assert not library.calls and name not in cli("--help-all").out.decode().split()


# No sentence "not built" outlives its truth


def built() -> set[str]:
    """All names of commands, of their options and of keywords of a call from Python, and aliases, without dashes."""
    names = {*COMMANDS, *ALIASES, *LOAD_OPTIONS, *CALL_OPTIONS, *foreign_words.FEATURES, *editing.USAGE}
    for command in COMMANDS:
        found = words_cli.get_command(click.Context(words_cli), command)
        inner = found.commands if isinstance(found, click.Group) else {}
        names |= inner.keys()
        for one in (found, *inner.values()):
            assert one is not None
            names |= {opt for param in one.params for opt in param.opts}
    return {name.lstrip("-").replace("_", "-") for name in names}


def test_nothing_that_is_built_is_said_not_to_be() -> None:
    """Neither by its name nor by a longer one, such as --hires-strength for hires."""
    there = built()
    for title, words in NOT_BUILT.items():
        same = {name for name in there for word in words if name == word or name.startswith(f"{word}-")}
        assert not same, f"{title} is said not to be built, and there is {same}"
    assert {"quantize", "control", "caption", "serve", "seed", "edit"} <= there


@pytest.mark.parametrize("planted", ["video", "dreambooth-steps", "hypernetwork"])
def test_a_feature_that_arrives_is_noticed(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALIASES, planted, "seed")
    with pytest.raises(AssertionError, match="is said not to be built"):
        test_nothing_that_is_built_is_said_not_to_be()


def test_all_sentences_are_made_from_the_one_table() -> None:
    """No other text of the source has such a sentence, and the page of promises has each feature."""
    texts = {
        str(path.relative_to(ROOT)): path.read_text()
        for folder in ("cli", "common", "backends")
        for path in (ROOT / folder).rglob("*.py")
    }
    has = {name for name, text in texts.items() if "not built yet" in " ".join(text.split())}
    assert has == {"common/base/errors.py"}, has
    for table in (
        OPTIONS,
        foreign_words.FEATURES,
        foreign_words.FILE_ENDINGS,
        call_options.FOREIGN,
        load_options.FOREIGN,
    ):
        assert not any("not built" in text for text in table.values())
    promises = (
        (ROOT / "docs" / "promises.md").read_text().partition("## What it does not do yet")[2].partition("\n## ")[0]
    )
    missing = [title for title in NOT_BUILT if title.lower() not in promises.lower()]
    assert not missing, missing


def test_python_says_the_same_of_what_is_not_built() -> None:
    for name in ("restore_faces", "hypernetwork", "video"):
        with pytest.raises(UsageError, match="is not built yet"):
            call_options.check_names([name])
        with pytest.raises(UsageError, match="is not built yet"):
            load_options.check_names([name], ("model",))


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
    others = {
        opt for command in (plan, bench, serve, upscale, grid) for param in command.params for opt in param.opts
    }  # named with it
    assert not OPTIONS.keys() & known and advised <= known | others, advised - known - others
    assert {*BACKENDS.values()} <= {"auto", "mlx", "cuda"}
    assert unknown_option("--" + "x" * 30, known).endswith("qwenimg --help-all lists all") and 0.5 < SIMILAR_OPTION < 1


@pytest.mark.parametrize(
    "prompt",
    ["a cat <hypernet:b>", "< HyperNet : x >"],
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
    "test draw complexion competition informal infant degenerate crevices samurai device-mapper "
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


FINDING = (
    "ui app demo run start notebook assistant config cache remove delete prune login examples compare xyz xy-plot "
    "gallery queue cancel history search show loras merge wildcards outpaint update upgrade gui web webui "
    "enlarge quantize controlnet caption finetune dreambooth "
    "variations variation seeds subseed workflow workflows comfyui ksampler replay repeat redo reproduce regenerate "
    "few-steps lcm civitai safetensors gguf checkpoint checkpoints ckpt hf huggingface huggingface-cli hub verify "
    "diffusers sdk controlnets canny openpose depth2img rembg removebg remove-background layered logs verbose styles "
    "docker negative negative-prompt editing kontext inpainting instruct-pix2pix vram estimate requirements bulk "
    "export pnginfo png-info upscaling extras super-resolution diagnose sysinfo env status dequantize "
    "mflux mflux-generate mflux-generate-qwen mflux-save mflux-upscale mflux-info sd-cli sd-server"
)


@pytest.mark.parametrize("word", FINDING.split())
@pytest.mark.sample(20)
def test_a_word_that_people_type_is_answered(library: Library, word: str) -> None:
    ran = cli(word)
    ran.refused(2, f"-p {word}")
    print(ran.err)
    cli(word, "x", "--steps", "4").refused(2, f"-p {word}")
    assert cli("--json", word).code == 2
    assert not library.calls
    assert cli("-p", word).code == 0 and library.asked[0]["prompt"] == word


@pytest.mark.parametrize(
    ("word", "what"),
    [
        ("gui", "serve"), ("webui", "serve"), ("quantize", "-q 8"), ("controlnet", "--control"),
        ("caption", "describe PICTURE"), ("history", "--from"), ("merge", "convert"), ("loras", "--lora"),
        ("remove", "rm NAME"), ("compare", "grid"), ("xyz", "grid"),
        ("workflow.json", "--from"), ("a.safetensors", "-m FILE"), ("cat.PNG", "edit FILE"),
        ("prompts.txt", "--prompt-file"), ("variations", "--variation SEED:0.2"), ("comfyui", "--from"),
        ("editing", "edit PICTURE"), ("inpainting", "inpaint PICTURE MASK"), ("redo", "--from PICTURE"),
        ("mflux-generate-qwen", "-m MODEL"), ("mflux-save", "convert"), ("vram", "plan"), ("civitai", "--lora FILE"),
    ],
)  # fmt: skip
def test_the_answer_names_what_does_it(library: Library, word: str, what: str) -> None:
    cli(word).refused(2, what, f"-p {word}")
    assert not library.calls


def test_advice_names_commands_and_options_that_there_are() -> None:
    known = built()
    texts = [
        *foreign_words.FEATURES.values(), *foreign_words.FILE_ENDINGS.values(), *foreign_words.PROGRAMS.values()
    ]  # fmt: skip
    for text in texts:
        commands = {*re.findall(r"qwenimg ([a-z]+)\b", text)}
        options = {*re.findall(r"(?<![\w-])--([a-z][a-z-]+)", text)}
        assert commands | options <= known, text


@pytest.mark.parametrize("word", ["Grid", "the grid", "a cat.", "photo of a cat.png", "app store"])
def test_what_only_looks_like_one_is_drawn(library: Library, word: str) -> None:
    assert cli(word).code == 0 and library.asked[0]["prompt"] == word


@pytest.mark.parametrize(
    ("bits", "meant"),
    [("4bit", 4), ("nf4", 4), ("int4", 4), ("q4_0", 4), ("Q4_K_M", 4), ("4-bit", 4), ("int8", 8),
     ("fp8", 8), ("q8_0", 8), ("fp8_e4m3fn", 8), ("8bits", 8), ("q6_k", 6)],
)  # fmt: skip
def test_other_words_for_bits(library: Library, bits: str, meant: int) -> None:
    cli("x", "-q", bits).refused(2, f"did you mean -q {meant}?", "8, 6 or 4")
    cli("x", "--quantize", f"text={bits}").refused(2, f"-q {meant}")


@pytest.mark.parametrize("bits", ["fp16", "5", "16", "q2_k", "x4x", "44", "4.5", "bf16", "48"])
def test_no_bits_are_guessed(library: Library, bits: str) -> None:
    ran = cli("x", "-q", bits)
    ran.refused(2, "give 8, 6 or 4")
    assert "did you mean" not in ran.err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--variations", "4"], "-N"), (["--no-cfg"], "--guidance 1"), (["--4bit"], "-q 4"),
        (["--grid"], "qwenimg grid"), (["--xyz", "x"], "qwenimg grid"),
        (["--res", "5"], "--size"),
        (["--timeout", "5"], "Ctrl-C"),
        (["--threads", "4"], "OMP_NUM_THREADS"), (["--tile"], "tiles"), (["--face-restore"], "not built"),
        (["--safety-checker"], "there is none"), (["--yes"], "--overwrite"),
        (["--float32"], "--precision"), (["--webui"], "qwenimg serve"), (["--seed-resize", "1"], "not built"),
        (["--callback"], "--json"), (["--subseed", "1"], "--variation"), (["--n", "4"], "-N"),
        (["--verbose"], "--debug"),
    ],
)  # fmt: skip
def test_options_that_had_no_answer(library: Library, args: list[str], said: str) -> None:
    ran = cli("x", *args)
    ran.refused(2, said)
    assert "did you mean" not in ran.err and not library.calls


@pytest.mark.parametrize(
    ("args", "meant"),
    [
        (["draw", "a cat"], 'qwenimg "a cat"'), (["Create", "cat"], 'qwenimg "cat"'),
        (["x", "--seed", "1", "2", "3"], "-s 1,2,3"), (["x", "--seed", "1,", "2,", "3"], "without spaces: 1,2,3"),
        (["mflux-generate", "--prompt", "a cat", "--steps", "4", "--model", "qwen"], "command of another program"),
        (["x", "--model-path", "y"], "-m MODEL"), (["x", "--dry-run"], "qwenimg plan"),
        (["x", "--karras"], "--schedule"),
        (["x", "--hf-token", "y"], "HF_TOKEN"), (["x", "--remove-background"], "qwen-image-layered"),
    ],
)  # fmt: skip
def test_what_is_pasted_or_typed_from_habit(library: Library, args: list[str], meant: str) -> None:
    ran = cli(*args)
    ran.refused(2, meant)
    print(ran.err)
    assert not library.calls


def test_edit_and_inpaint_are_in_the_list_of_commands() -> None:
    listed = cli("--help").out.decode().partition("Commands (")[2]
    assert all(f"\n  {word} " in listed for word in (*editing.USAGE, *COMMANDS))
    assert {*EDITING} == {*editing.USAGE}


def test_seeds_is_another_name_of_seed(library: Library) -> None:
    assert cli("x", "--seeds", "1-3", "-o", "out/").code == 0
    assert [one["seed"] for one in library.asked] == [1, 2, 3]


def test_what_is_suggested_is_there() -> None:
    known = {*COMMANDS, *editing.USAGE, "models", "--help", "--version", "--from"}
    assert {text.split()[0] for text in foreign_words.COMMANDS.values()} <= known and set(
        foreign_words.LONG_COMMANDS
    ) <= known
