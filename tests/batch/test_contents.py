"""Keys of pictures know the content of LoRAs, control networks and their pictures, and not the names of the files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file
from support.cli_runner import cli

from qwenimg.cli.batch.contents import contents
from qwenimg.cli.batch.tasks import BatchTask, tasks_of
from qwenimg.common.hub.model_folders import read_folders
from qwenimg.common.jobs.image_options import parse
from qwenimg.common.prompts.wildcards import Wildcards
from qwenimg.common.request.embedding_text import Embedding
from qwenimg.common.request.request import Defaults

USUAL = Defaults(width=64, height=32, steps=9, guidance=3.0)


def weights(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"x": np.random.default_rng(seed).normal(size=(64, 64)).astype(np.float32)}, path)


def picture(path: Path, seed: int) -> None:
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (16, 16, 3), np.uint8)).save(path)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    weights(Path("style.safetensors"), 1)
    weights(Path("net/diffusion_pytorch_model.safetensors"), 2)
    Path("net/config.json").write_text("{}")
    picture(Path("edges.png"), 3)
    return tmp_path


def made(line: dict[str, Any], *places: Path) -> tuple[list[BatchTask], list[str]]:
    rows: list[Any] = [("r:1", parse({"prompt": "x", **line}))]
    tasks, faults = tasks_of(rows, {"model": "m"}, USUAL, Wildcards(), contents=contents(read_folders(places)))
    return tasks, [str(fault) for fault in faults]


def key(line: dict[str, Any], *places: Path) -> str:
    tasks, faults = made({"seed": "7"} | line, *places)
    assert not faults, faults
    return tasks[0].key


LORA, CONTROL = {"lora": "style.safetensors:0.5"}, {"control": "net=canny@edges.png:0.8:0-0.5"}


@pytest.mark.parametrize(
    ("line", "change"),
    [
        (LORA, lambda: weights(Path("style.safetensors"), 9)),
        (CONTROL, lambda: weights(Path("net/diffusion_pytorch_model.safetensors"), 9)),
        (CONTROL, lambda: Path("net/config.json").write_text("{ }")),
        (CONTROL, lambda: picture(Path("edges.png"), 9)),
        (LORA, lambda: Path("adapter_config.json").write_text('{"lora_alpha": 3}')),
    ],
    ids=["a LoRA", "a network", "its configuration", "a picture", "alpha of a LoRA"],
)
def test_a_changed_file_under_its_old_name_makes_another_picture(line: dict[str, Any], change: Any) -> None:
    before, seed = key(line), made(line)[0][0].job.seed
    assert key(line) == before and made(line)[0][0].job.seed == seed
    change()
    assert key(line) != before and made(line)[0][0].job.seed != seed, "a line without a seed has another one too"


def test_a_moved_file_makes_the_same_picture() -> None:
    before = key(LORA | CONTROL)
    for old, new in (("style.safetensors", "moved.safetensors"), ("net", "moved"), ("edges.png", "moved.png")):
        shutil.move(old, new)
    assert key({"lora": "moved.safetensors:0.5", "control": "moved=canny@moved.png:0.8:0-0.5"}) == before


def test_strengths_and_steps_and_order_count() -> None:
    weights(Path("other.safetensors"), 5)
    lines = [
        {},
        LORA,
        {"lora": "style.safetensors"},
        {"lora": "style.safetensors; other.safetensors"},
        {"lora": "other.safetensors; style.safetensors"},
        CONTROL,
        {"control": "net=edges.png:0.8:0-0.5"},
        {"control": "net=canny@edges.png:0.7:0-0.5"},
        {"control": "net=canny@edges.png:0.8:0-0.6"},
    ]
    assert len({key(line) for line in lines}) == len(lines)


def test_names_of_the_model_folders(folder: Path) -> None:
    shutil.copytree("net", "models/controlnet/pose")
    weights(Path("models/loras/mine.safetensors"), 1)
    by_name = {"lora": "mine:0.5", "control": "pose=canny@edges.png:0.8:0-0.5"}
    assert key(by_name, folder / "models") == key(LORA | CONTROL)


@pytest.mark.parametrize("name", ["missing.safetensors", "pipe", "loop", "zero", "deep/empty"])
@pytest.mark.parametrize("form", ["lora", "network", "picture"])
def test_what_is_no_file_is_a_fault_of_its_line(form: str, name: str) -> None:
    os.mkfifo("pipe")
    Path("loop").symlink_to("loop")
    Path("zero").symlink_to("/dev/zero")
    Path("deep/empty").mkdir(parents=True)
    value = {"lora": {"lora": name}, "network": {"control": f"{name}=edges.png"}, "picture": {"control": f"net={name}"}}
    tasks, [fault] = made(value[form])
    print(fault)
    assert not tasks and fault.startswith("r:1: ") and len(fault) <= 300 and fault.isprintable()
    assert name.split("/")[-1].partition(".")[0] in fault


def test_a_picture_larger_than_any_is_not_read() -> None:
    with Path("edges.png").open("wb") as file:
        file.truncate(1 << 40)
    _, [fault] = made(CONTROL)
    assert "pictures of at most 537 MB are read" in fault


def test_each_file_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many lines name it."""
    from qwenimg.cli.batch import contents as module

    read: list[Path] = []
    opens = module.open_regular
    monkeypatch.setattr(module, "open_regular", lambda path: read.append(path) or opens(path))
    rows: list[Any] = [(f"r:{i}", parse({"prompt": "x", "seed": "1-3", **LORA, **CONTROL})) for i in range(5)]
    tasks, _ = tasks_of(rows, {}, USUAL, Wildcards(), contents=contents(read_folders(())))
    assert len(tasks) == 3 and len(read) == 4


def test_a_line_whose_lora_is_missing_is_told_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from qwenimg.cli.batch.driver import BatchOutcome
    from qwenimg.cli.commands import batch

    begun: list[BatchTask] = []

    async def runs(left: list[BatchTask], *rest: object) -> BatchOutcome:
        begun.extend(left)
        return BatchOutcome(done=len(left))

    monkeypatch.setattr(batch, "_run", runs)
    Path("r.jsonl").write_text('{"prompt": "a", "lora": "none.safetensors"}\n{"prompt": "b"}\n')
    ran = cli("batch", "r.jsonl", "-o", "out", "-m", "shapes", "--backend", "cpu")
    assert ran.code == 7 and "r.jsonl:1: none.safetensors: no such LoRA file" in ran.err
    assert [task.job.prompt for task in begun] == ["b"]


def test_an_embedding_counts_by_its_content_where_a_prompt_names_it(tmp_path: Path) -> None:
    """Given by a line, or found by its name in the folders of models."""
    folder = tmp_path / "embeddings"
    folder.mkdir()
    rows = [("p:1", {"prompt": "a bad-hands"}), ("p:2", {"prompt": "a cat"}),
            ("p:3", {"prompt": "a x", "embedding": (Embedding(str(folder / "bad-hands.pt"), "x"),)})]  # fmt: skip
    keys = []
    for data in (b"one", b"two", b"one"):
        (folder / "bad-hands.pt").write_bytes(data)
        hashes = contents(read_folders([tmp_path]))
        tasks, faults = tasks_of(rows, {"model": "m"}, USUAL, Wildcards(), contents=hashes)
        assert not faults
        keys.append([task.key for task in tasks])
    assert keys[0] == keys[2] and [one == two for one, two in zip(*keys[:2], strict=True)] == [False, True, False]
