"""Choices in prompts on the command line: seeds, prompt files, names of files, defaults, replays; and one list of
warnings."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cli_runner import Library, cli
from support.recipe_cases import recipe_from_png

from qwenimg.cli import config
from qwenimg.common.prompts.wildcards import Wildcards


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "w"
    place.mkdir()
    (place / "colour.txt").write_text("".join(f"colour{i}\n" for i in range(20)), encoding="utf-8")
    return place


def asked(library: Library) -> list[str]:
    return [str(one["prompt"]) for one in library.asked]


def test_twenty_pictures_have_twenty_texts_that_follow_from_their_seeds(library: Library, folder: Path) -> None:
    template, given = "a __colour__ {cat|dog}", ("--wildcards", "w", "--overwrite")
    ran = cli(template, "-N", "20", "-s", "100", *given, "-o", "{seed}-{prompt}.png", "--json")
    assert ran.code == 0, ran.err
    texts = asked(library)
    assert len(set(texts)) == 20
    wildcards = Wildcards([folder])
    assert texts == [wildcards.chosen({"prompt": template}, seed)["prompt"] for seed in range(100, 120)]
    [plan] = [event for event in ran.events if event["event"] == "plan"]
    assert [one["prompt"] for one in plan["images"]] == texts
    names = [Path(event["path"]).name for event in ran.events if event["event"] == "image"]
    assert names == [f"{100 + i}-{text.replace(' ', '-')}.png" for i, text in enumerate(texts)]
    told = cli(template, "-s", "107", *given).err
    assert asked(library) == [texts[7]] and f"its prompt: {texts[7]}" in told, "a seed alone chooses the same"


def test_a_prompt_file_has_choices_and_json(library: Library, folder: Path) -> None:
    lines = '{red|blue} circle\n{"prompt": "{\\"a\\": \\"{x|y}\\"}", "seed": 5}\n{2$$a|b}\n# {a|b}\nplain {}\n'
    assert cli("--prompt-file", "-", "-s", "1", stdin=lines.encode()).code == 0
    first, second, third, last = asked(library)
    assert first in ("red circle", "blue circle") and second in ('{"a": "x"}', '{"a": "y"}')
    assert third in ("a, b", "b, a") and last == "plain {}"
    ran = cli("--prompt-file", "-", "--wildcards", "w", stdin=b"x\n__nope__\n{3-1$$a|b}\n{prompt: 1}\n")
    assert ran.code == 5 and not ran.out and len(ran.err.splitlines()) == 3
    faults = ":2: the wildcard __nope__", ":3: the prompt has a choice of 3", ":4:"
    for line, words in zip(ran.err.splitlines(), faults, strict=True):
        assert words in line and len(line) <= 300
    ran = cli("--prompt-file", "-", "--wildcards", "w", "--keep-going", stdin=b"x\n__nope__\n")
    assert ran.code == 7 and asked(library) == ["x"]


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["__nope__"], 2, "there is no folder of wildcards"), (["__nope__", "--wildcards", "w"], 2, "no nope.txt"),
        (["x", "--wildcards", "nowhere"], 2, "no such folder"), (["{3-1$$a|b}"], 2, "smaller"), (["{|}"], 2, "empty"),
        (["x", "-n", "__nope__"], 2, "--wildcards DIR"), (["__empty__", "--wildcards", "w"], 5, "has no values"),
        (["x", "--wildcards", "off", "--wildcards", "w"], 2, "off draws prompts as text"),
        (["{a|" * 10_000 + "}" * 10_000], 2, "deeper than 50"), (["__../x__/__a/../b__"], 2, "no .."),
    ],
)  # fmt: skip
def test_what_cannot_be_chosen_is_one_line(
    library: Library, folder: Path, args: list[str], code: int, words: str
) -> None:
    (folder / "empty.txt").write_text("", encoding="utf-8")
    cli(*args).refused(code, words)
    assert not library.calls


def test_off_and_plain_prompts_are_drawn_byte_for_byte(library: Library) -> None:
    for prompt in ('{"scene": {"a": 1, "b": "x|y"}}', "a {b} c", "[a|b] (c:1.2) \\(d\\)"):
        assert cli(prompt).code == 0 and asked(library) == [prompt]
    for prompt in ("{a|b}", "__a__", r"\{"):
        assert cli(prompt, "--wildcards", "off").code == 0 and asked(library) == [prompt]


def test_folders_come_from_the_environment_and_from_config(
    library: Library, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "path", lambda: tmp_path / "config.toml")
    (tmp_path / "config.toml").write_text(f'wildcards = "{folder}"\n', encoding="utf-8")
    assert cli("__colour__", "-s", "1").code == 0
    text = asked(library)
    assert text[0].startswith("colour") and library.openings[-1].wildcards == (folder,)
    (tmp_path / "config.toml").write_text('wildcards = "off"\n', encoding="utf-8")
    assert cli("__colour__").code == 0 and asked(library) == ["__colour__"]
    monkeypatch.setenv("QWENIMG_WILDCARDS", str(folder))
    assert cli("__colour__", "-s", "1", "--overwrite").code == 0 and asked(library) == text


def test_folders_of_models_dir_are_found(library: Library, folder: Path, tmp_path: Path) -> None:
    pack = tmp_path / "ComfyUI" / "custom_nodes" / "pack" / "wildcards"
    pack.mkdir(parents=True)
    folder.joinpath("colour.txt").rename(pack / "colour.txt")
    assert cli("__colour__", "--models-dir", "ComfyUI").code == 0
    assert asked(library)[0].startswith("colour") and library.openings[-1].wildcards == (pack,)
    assert cli("__colour__", "--models-dir", "ComfyUI", "--wildcards", "off").code == 0
    assert asked(library) == ["__colour__"] and library.openings[-1].wildcards == (Path("off"),)


@pytest.mark.sample(0)
def test_a_replay_draws_the_chosen_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that looks like a template itself; the recipe is the same but for the template and the time."""
    monkeypatch.chdir(tmp_path)
    few = ("-m", "shapes", "--backend", "cpu", "--steps", "1", "--size", "64x64", "--quiet")
    for i, prompt in enumerate(("a {red|blue} {circle|star}", r"a red circle \{a|b\} \__x__ {c|d}")):
        assert cli(prompt, "-n", "{ugly|dull} dot", "-s", "3", *few, "-o", f"{i}.png").code == 0
        first = recipe_from_png(tmp_path / f"{i}.png")
        assert first["template"] == prompt and first["negative_template"] == "{ugly|dull} dot"
        assert cli("--from", f"{i}.png", "-o", f"{i}-again.png", "--quiet").code == 0
        again = recipe_from_png(tmp_path / f"{i}-again.png")
        for name in ("prompt", "negative_prompt", "seed", "noise_sha256"):
            assert first[name] == again[name]
        assert "negative_template" not in again and again.get("template") != prompt
    text = recipe_from_png(tmp_path / "1-again.png")["prompt"]
    assert text in ("a red circle {a|b} __x__ c", "a red circle {a|b} __x__ d")


@pytest.mark.sample(0)
def test_one_list_of_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed is in the recipe and in the event: of words, of a size, of a file, of a replay."""
    monkeypatch.chdir(tmp_path)
    few = ("-m", "shapes", "--backend", "cpu", "--steps", "1")
    ran = cli("a fluffy circle", "-s", "1", "--size", "64x64", "-o", "a.png", "--json", *few)
    [event] = [event for event in ran.events if event["event"] == "image"]
    printed = [line.removeprefix("qwenimg: warning: ") for line in ran.err.splitlines() if "warning: " in line]
    recipe = recipe_from_png(tmp_path / "a.png")
    assert recipe["warnings"] == event["warnings"] == event["recipe"]["warnings"] == printed
    assert printed[0] == "words it does not know: fluffy" and "trained at" in printed[1]
    ran = cli("--from", "a.png", "-i", "a.png", "-o", "b.png", "--strength", "1")
    printed = [line.removeprefix("qwenimg: warning: ") for line in ran.err.splitlines() if "warning: " in line]
    assert sorted(recipe_from_png(tmp_path / "b.png")["warnings"]) == sorted(printed) and len(printed) >= 2
