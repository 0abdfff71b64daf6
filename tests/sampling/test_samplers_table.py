"""The table of samplers: names in every spelling, the command that prints it, the page that names the schedules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from qwenimg.cli.commands.tables import samplers
from qwenimg.common.base.errors import UsageError
from qwenimg.common.sampling.schedules import SCHEDULES
from qwenimg.common.sampling.table import ALIASES, SAMPLERS, find

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"
COMPARED = ("reference/test_samplers_reference.py", "sampling/test_samplers_formulas.py")

# Those that users of other programs look for.
WANTED = """ddim ddpm pndm euler euler_ancestral heun heunpp2 lms dpm2 dpm2_ancestral dpmpp_2s_ancestral dpmpp_sde
dpmpp_2m dpmpp_2m_sde dpmpp_2m_sde_heun dpmpp_3m_sde dpm_fast dpm_adaptive unipc deis sa_solver ipndm ipndm_v
res_multistep lcm tcd euler_cfgpp euler_ancestral_cfgpp dpmpp_2s_ancestral_cfgpp dpmpp_2m_cfgpp"""


def test_all_samplers_are_there():
    assert set(WANTED.split()) <= SAMPLERS.keys()
    assert len({sampler.function for sampler in SAMPLERS.values()}) == len(SAMPLERS)
    assert all(name == sampler.name for name, sampler in SAMPLERS.items())


def test_the_command_prints_the_table():
    printed = CliRunner().invoke(samplers, [])
    assert printed.exit_code == 0, printed.output
    lines = printed.output.splitlines()
    assert [line.split()[0] for line in lines[1 : len(SAMPLERS) + 1]] == list(SAMPLERS)
    assert lines[-1] == f"schedules: {', '.join(SCHEDULES)}"
    assert max(map(len, lines)) <= 120
    found = json.loads(CliRunner().invoke(samplers, ["--json"]).output)
    assert found["schedules"] == list(SCHEDULES)
    assert found["samplers"] == [sampler.described() for sampler in SAMPLERS.values()]


def test_the_page_has_every_schedule():
    page = (DOCS / "draw.md").read_text(encoding="utf-8")
    assert all(f"| `{schedule}` |" in page for schedule in SCHEDULES)


@pytest.mark.parametrize("name", SAMPLERS)
def test_each_is_compared_with_another_program_or_its_formula(name):
    """As docs/draw.md says."""
    text = "".join((TESTS / path).read_text(encoding="utf-8") for path in COMPARED)
    assert f'"{name}"' in text, f"compare {name} with diffusers or its published formula, in {' or '.join(COMPARED)}"


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("euler", "euler"), ("Euler a", "euler_ancestral"), ("k_euler", "euler"),
        ("K_EULER_ANCESTRAL", "euler_ancestral"),
        ("dpmpp2m", "dpmpp_2m"), ("dpm++ 2m", "dpmpp_2m"), ("DPM++ 2M SDE Heun", "dpmpp_2m_sde_heun"),
        ("k_dpmpp_2m_sde", "dpmpp_2m_sde"), ("DPM2 a", "dpm2_ancestral"), ("k_dpm_2", "dpm2"), ("plms", "pndm"),
        ("DPM++ 2S a", "dpmpp_2s_ancestral"), ("uni_pc", "unipc"), ("uni_pc_bh2", "unipc"), ("lms", "lms"),
        ("Heun++ 2", "heunpp2"), ("euler_cfg_pp", "euler_cfgpp"), ("DPM++ 2M CFG++", "dpmpp_2m_cfgpp"),
        ("dpmpp_sde_gpu", "dpmpp_sde"), ("sa-solver", "sa_solver"), ("sample_dpmpp_3m_sde", "dpmpp_3m_sde"),
    ],
)  # fmt: skip
def test_names_of_other_programs(asked, name):
    assert find(asked).name == name


def test_names_are_unambiguous():
    assert all(find(name).name == name and find(sampler.title).name == name for name, sampler in SAMPLERS.items())
    assert set(ALIASES.values()) <= SAMPLERS.keys()


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("eulr", "did you mean euler"),
        ("dpm++ 4m sde", "did you mean dpmpp_3m_sde or dpmpp_2m_sde"),
        ("DPM++ 2M Karras", "use --sampler dpmpp_2m --schedule karras"),
        ("karras", "`qwenimg samplers` lists them"),
        ("", "`qwenimg samplers` lists them"),
        ("\x1b[31mred", "no sampler"),
    ],
)
def test_unknown_names(asked, says):
    with pytest.raises(UsageError) as caught:
        find(asked)
    print(caught.value)
    assert says in str(caught.value) and "\x1b" not in str(caught.value)
