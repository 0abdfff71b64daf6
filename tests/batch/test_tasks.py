"""Keys of pictures: the same for the same pixels, another for anything that decides them; and shards by them."""

from __future__ import annotations

from typing import Any

import pytest

from qwenimg.cli.batch.tasks import BatchTask, model_identity, parse_shard, shard_of, tasks_of
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.jobs.image_options import parse
from qwenimg.common.prompts.wildcards import Wildcards
from qwenimg.common.request.request import Defaults

USUAL = Defaults(width=64, height=32, steps=9, guidance=3.0)


def tasks(*lines: dict[str, Any], identity: dict[str, Any] | None = None) -> list[BatchTask]:
    rows = [(f"r:{i}", parse(line)) for i, line in enumerate(lines, 1)]
    made, faults = tasks_of(rows, identity or {"model": "m"}, USUAL, Wildcards())
    assert not faults
    return made


def test_what_is_left_out_is_the_default() -> None:
    [plain] = tasks({"prompt": "x", "seed": "7"})
    for same in ({"steps": 9}, {"guidance": 3}, {"width": 64}, {"size": "64x32"}, {"negative_prompt": " "}):
        assert tasks({"prompt": "x", "seed": "7", **same})[0].key == plain.key
    for other in (
        {"steps": 8},
        {"guidance": 3.5},
        {"width": 48},
        {"aspect": "1:1"},
        {"sampler": "heun"},
        {"seed": "8"},
    ):
        assert tasks({"prompt": "x", "seed": "7", **other})[0].key != plain.key
    assert tasks({"prompt": "x", "seed": "7"}, identity={"model": "n"})[0].key != plain.key


def test_a_request_is_drawn_once_and_seeds_without_one_stay_the_same() -> None:
    assert len(tasks({"prompt": "x", "seed": "1-3"}, {"prompt": "x", "seed": "2"})) == 3
    first, second = tasks({"prompt": "x"}, {"prompt": "x"}), tasks({"prompt": "y"}, {"prompt": "x"}, {"prompt": "x"})
    assert [task.key for task in first] == [task.key for task in second[1:]], "whatever stands before it"
    assert first[0].job.seed != first[1].job.seed
    [a, b] = tasks({"prompt": "x", "num_images": 2})
    assert b.job.seed == a.job.seed + 1


def test_a_template_has_the_keys_of_the_texts_that_seeds_choose() -> None:
    """They decide the pixels; a worker does not choose again."""
    made = tasks({"prompt": "{a|b|c}", "seed": "1-3", "negative_prompt": "{d|e}"})
    assert {task.job.options["prompt"] for task in made} == {"a", "b", "c"} and len({task.name for task in made}) == 3
    for task in made:
        plain = {name: task.job.options[name] for name in ("prompt", "negative_prompt")}
        assert task.key == tasks({**plain, "seed": str(task.job.seed)})[0].key
        assert task.job.options["template"] == "{a|b|c}" and task.job.options["negative_template"] == "{d|e}"
        assert Wildcards().chosen(task.job.options, 99) == task.job.options
    [escaped] = tasks({"prompt": r"\{a|b\}", "seed": "1"})
    assert escaped.job.prompt == "{a|b}" and Wildcards().chosen(escaped.job.options, 5) == escaped.job.options
    first, again = tasks({"prompt": "{a|b}", "num_images": 3}), tasks({"prompt": "{a|b}", "num_images": 3})
    assert [task.key for task in first] == [task.key for task in again], "without a seed too"
    rows = [
        ("r:1", parse({"prompt": "__nope__"})),
        ("r:2", parse({"prompt": "{|}"})),
        ("r:3", parse({"prompt": "x"})),
    ]
    found, faults = tasks_of(rows, {}, USUAL, Wildcards())
    assert [str(fault)[:4] for fault in faults] == ["r:1:", "r:2:"] and len(found) == 1


def test_names_are_distinct_and_plain() -> None:
    made = tasks({"prompt": "a/../../b", "seed": "1-50"}, {"prompt": "语" * 100})
    assert len({task.name for task in made}) == 51
    assert all("/" not in task.name and len(task.name.encode()) < 80 for task in made)


def test_faults_of_lines() -> None:
    rows = [
        ("r:1", {}),
        ("r:2", {"prompt": "x", "steps": 0}),
        ("r:3", ModelError("r:3: broken")),
        ("r:4", {"prompt": "x"}),
    ]
    made, faults = tasks_of(rows, {}, USUAL, Wildcards())
    assert [str(fault)[:4] for fault in faults] == ["r:1:", "r:2:", "r:3:"] and len(made) == 1


def test_every_picture_is_in_one_shard() -> None:
    made = tasks({"prompt": "x", "seed": "1-200"})
    parts = [shard_of(made, (i, 3)) for i in range(3)]
    assert sorted(task.key for part in parts for task in part) == sorted(task.key for task in made)
    assert all(40 < len(part) < 95 for part in parts), [len(part) for part in parts]


@pytest.mark.parametrize(
    ("environment", "shard"),
    [
        ({}, (0, 1)), ({"RANK": "2", "WORLD_SIZE": "4"}, (2, 4)),
        ({"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "8"}, (5, 8)),
        ({"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "8", "SLURM_ARRAY_TASK_MIN": "1"}, (4, 8)),
    ],
)  # fmt: skip
def test_shards_of_launchers(environment: dict[str, str], shard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert parse_shard(None) == shard and parse_shard("1/2") == (1, 2)


@pytest.mark.parametrize("text", ["", "1", "2/2", "-1/2", "1/0", "a/b", "1/2/3", "0/" + "9" * 30, "²/3"])
def test_wrong_shards(text: str) -> None:
    with pytest.raises(UsageError, match="--shard"):
        parse_shard(text)


def test_a_launcher_that_sets_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    monkeypatch.setenv("RANK", "first")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="RANK is 'first'"):
        parse_shard(None)


def test_what_decides_the_pixels_of_a_model() -> None:
    identity, defaults = model_identity(LoadOptions(model="shapes"))
    assert identity["model"] == "shapes-v1" and len(identity["files"]) == 3 and defaults.steps > 1
    for other in (LoadOptions(model="shapes", precision="bf16"), LoadOptions(model="shapes", quantize="8")):
        assert model_identity(other)[0] != identity
    assert "/" not in "".join(map(str, identity.values()))
