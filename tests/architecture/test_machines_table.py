"""The tables of machines in docs/memory.md and the README: what `python tools/write_machines_table.py` writes, and what
`qwenimg plan` says."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import write_machines_table as tool
from click.testing import CliRunner
from support.rules import ROOT

from qwenimg.backends import paper
from qwenimg.cli.words import cli
from qwenimg.common.base.amounts import size_text
from qwenimg.common.families.catalog import KNOWN
from qwenimg.common.hub import forecast

MEMORY, README = ((ROOT / name).read_text(encoding="utf-8") for name in ("docs/memory.md", "README.md"))
ROW = re.compile(r"^\| (.*?) \| (.*?) \| `qwenimg PROMPT (.*?)` \| ([\d.]+) GB \| (.*?) \|$", re.MULTILINE)
TITLE = re.compile(r"(?:NVIDIA|Mac), (\d+) GB: (.+)")
KEEPS = 2 / 3  # of 8 to 32 GiB the least that a machine's GPU may have: a Mac's; above it is 3/4


def block(page: str = MEMORY, name: str = tool.BLOCK) -> str:
    [text] = re.findall(f"<!-- begin {name} -->\n(.*?)\n<!-- end {name} -->", page, re.DOTALL)
    return str(text)


def machines() -> list[tuple[int, str, str, float]]:
    """(GB on the box, name, options, GB at the peak) of each row about a GPU."""
    found, title = [], ""
    for first, _, options, peak, _ in ROW.findall(block()):
        title = first or title
        if match := TITLE.fullmatch(title):
            found.append((int(match[1]), match[2].removeprefix("RTX ").replace(" ", "-").lower(), options, float(peak)))
    return found


@pytest.mark.sample(0)
def test_the_pages_have_what_the_command_writes(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every machine alike: nothing of the one that writes it is asked."""

    def asked() -> int:
        raise AssertionError("the machine that writes the table was asked")

    for name in ("rates", "_multiplies_bf16", "_card", "free_ram", "machine_ram"):
        monkeypatch.setattr(paper, name, asked)
    assert block() == tool.text(), "run `python tools/write_machines_table.py`"
    assert block(README, tool.FEW) == tool.few(), "run `python tools/write_machines_table.py`"
    assert block(README, tool.FEW).count("qwenimg PROMPT") == 5


def test_every_machine_has_two_or_three_commands_that_fit() -> None:
    found = machines()
    sizes = {(gigabytes, name) for gigabytes, name, _, _ in found}
    assert sorted(gigabytes for gigabytes, _ in sizes) == [8, 12, 16, 16, 24, 24, 32, 48, 64]
    assert all(2 <= sum(one[:2] == size for one in found) <= 3 for size in sizes)
    for gigabytes, name, options, peak in found:
        share = KEEPS if name.startswith("m") else 1
        print(gigabytes, name, options, peak)
        assert peak * 1e9 < (share if gigabytes <= 32 else 0.75) * gigabytes * 2**30, options


@pytest.mark.parametrize("name", ["3070", "4060-ti", "m1", "m4-max"])
@pytest.mark.sample(1)
def test_plan_says_the_same_of_a_row(cache: Path, name: str) -> None:
    """Also of rows whose LoRA stays beside fewer bits: the plan of all models has them."""
    rows = [one for one in machines() if one[1] == name]
    assert rows
    for gigabytes, _, options, peak in rows:
        command = ["plan", *shlex.split(options), "--on", name, "--memory", f"{gigabytes}GB", "--json"]
        printed = CliRunner().invoke(cli, command)
        assert printed.exit_code == 0, printed.output
        planned = json.loads(printed.stdout)
        bytes_ = planned["peak_bytes"] + (forecast.LORA_BYTES if "-q" in options and "--few-steps" in options else 0)
        assert planned["fits"] and size_text(bytes_) == f"{peak:.1f} GB"


@pytest.mark.parametrize("name", ["sd15", "qwen-image"])
def test_the_size_of_a_download_stands_before_its_command(name: str) -> None:
    command = re.search(rf"^qwenimg pull {name}\s", README, re.MULTILINE)
    assert command is not None
    sizes = re.findall(r"([\d.]+ GB) to download", README[: command.start()])
    assert sizes[-1] == size_text(KNOWN[name].bytes)


def test_the_readme_is_read_in_two_minutes() -> None:
    assert len(README.splitlines()) <= 150


def test_the_lora_that_stays_apart_has_this_size() -> None:
    """By the model card: 60 blocks with 8 layers of 3072x3072 and 4 of 3072x12288, rank 64, 2 bytes a number."""
    width, rank = 3072, 64
    assert pytest.approx(60 * 2 * rank * (8 * 2 * width + 4 * 5 * width), rel=0.01) == forecast.LORA_BYTES
