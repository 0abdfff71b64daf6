"""The user's own defaults, and what comes before them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.fake_pipeline import FakePipeline

import qwenimg
from qwenimg.cli import config
from qwenimg.cli.main import run
from qwenimg.common.base.errors import UsageError


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "config.toml"
    monkeypatch.setattr(config, "path", lambda: made)
    return made


def test_no_file_no_defaults(file: Path) -> None:
    assert config.defaults() == {}


def test_reads_options_by_either_spelling(file: Path) -> None:
    file.write_text('model = "a"\nnegative-prompt = "b"\nsteps = 3\nguidance = 2\noffline = true\n')
    expected = {"model": "a", "negative_prompt": "b", "steps": 3, "guidance": 2, "offline": True}
    assert config.defaults() == expected


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("seed = 3", "seed"),
        ("steps = '3'", "steps"),
        ("steps = true", "steps"),
        ('backend = "rocm"', "rocm"),
        ("steps = 1001", "1001"),
        ("guidance = nan", "nan"),
        ('size = "1x1"\naspect = "1:1"', "twice"),
        ('precision = "int3"', "int3"),
        ('output = "a.bmp"', ".webp"),
        ("steps = ", "TOML"),
        ("[model]\nname = 'x'", "line 1, '[model]'"),
        ("\x1b[31m = 1", "TOML"),
        ("x = [" * 5000, "TOML"),
    ],
)
def test_bad_files_are_one_line(file: Path, text: str, named: str) -> None:
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        config.defaults()
    assert named in str(caught.value) and "config.toml" in str(caught.value)
    assert str(caught.value).isprintable()


def test_it_is_where_the_platform_keeps_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert config.path().parts[-2:] == ("qwenimg", "config.toml")


def test_the_page_names_every_option_of_the_file() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    section = page.partition("## Your own defaults")[2].partition("```toml")[0]
    named = re.findall(r"`([a-z_0-9]+)`", section)
    differ = sorted({*named} ^ {*config.KEYS}) or "another order"
    assert named == list(config.KEYS), f"docs/cli.md, Your own defaults: {differ}"


def test_flags_and_environment_come_first(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text('model = "from-file"\nsteps = 7\nguidance = 3.5\nsize = "64x32"\n')
    monkeypatch.chdir(tmp_path)
    made: list[FakePipeline] = []

    def opened(opening, notify):
        made.append(
            FakePipeline(model=opening.model, backend=opening.backend, precision=opening.precision, notify=notify)
        )
        return made[-1]

    monkeypatch.setattr(qwenimg, "open_pipeline", opened)
    assert run(["a ring", "-o", "a.png"]) == 0
    assert run(["a ring", "--steps", "2", "-m", "shapes", "-W", "16", "-H", "48", "-o", "b.png"]) == 0
    assert run(["--from", "b.png", "-o", "d.png"]) == 0
    monkeypatch.setenv("QWENIMG_STEPS", "5")
    assert run(["a ring", "-o", "c.png"]) == 0
    assert [pipe.model_name for pipe in made] == ["from-file", "shapes", "shapes", "from-file"]
    asked = [pipe.asked[0] for pipe in made]
    assert [request["steps"] for request in asked] == [7, 2, 2, 5]
    assert [(request["width"], request["height"]) for request in asked] == [(64, 32), (16, 48), (16, 48), (64, 32)]


def test_a_broken_file_is_exit_2_for_pictures_and_nothing_to_info(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("steps = 'x'")
    assert run(["a ring"]) == 2
    assert "config.toml" in capsys.readouterr().err
    for fine in (["devices", "--help"], ["--help"], ["--version"]):
        assert run(fine) == 0
