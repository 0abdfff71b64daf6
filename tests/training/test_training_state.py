"""The state of a training run on disk: whatever it is, one line with a documented code, before the training starts.

Each case is a fault put into a whole run's folder. None hangs, none changes a file, and no weight that is not finite is
ever written.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save, save_file
from training import folder as train_folder
from training import run as train_run
from training import stages as train
from training import vae as train_vae
from training.config import RATES, STEM, TEXT_STEM, ModelSize, ShapesConfig, Stage

from qwenimg.common.base.errors import DoesNotFit, ModelError, NumericsError, QwenimgError, UsageError
from qwenimg.common.training import files
from qwenimg.common.training.files import COLUMNS, FORMAT

pytestmark = pytest.mark.sample(1)

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
SIZE = ModelSize(
    vae_base=6,
    heads=3,
    rope_axes=(4, 4, 4),
    layers=1,
    text_hidden=32,
    text_intermediate=48,
    text_heads=4,
    text_layers=1,
)
HANGS = 60  # seconds after which a test ends what would else wait for ever; nothing here takes two


def options(stage: Stage, out: Path, **changes: Any) -> ShapesConfig:
    toy = {
        "rate": RATES[stage],
        "steps": 2,
        "batch": 2,
        "sizes": ((32, 32),),
        "save_every": 1000,
        "size": SIZE,
        "threads": 1,
    }
    return ShapesConfig(stage=stage, out=out, **{"precision": "fp32", **toy, **changes})


def run(config: ShapesConfig) -> list[str]:
    lines: list[str] = []
    train.train(config, lines.append, device="cpu")
    return lines


@pytest.fixture(scope="module", autouse=True)
def few_measured() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_vae, "MEASURED", 8)
        patch.setattr(train_vae, "MEASURED_SIZE", (32, 32))
        patch.setattr(train_run, "LOG_EVERY", 1)
        yield


@pytest.fixture(scope="module")
def whole(few_measured: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of every stage."""
    folder = tmp_path_factory.mktemp("whole") / "model"
    for stage in ("vae", "text", "dit"):
        run(options(stage, folder))
    return folder


@pytest.fixture
def out(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "out")
    return tmp_path / "out"


def listing(folder: Path) -> dict[str, object]:
    """Every name below `folder` with its kind and, of a regular file, its bytes."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        found[str(path.relative_to(folder))] = path.read_bytes() if stat.S_ISREG(mode) else stat.S_IFMT(mode)
    return found


@contextmanager
def no_hang() -> Iterator[None]:
    def stop(number: int, frame: object) -> None:
        raise AssertionError(f"no answer in {HANGS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(HANGS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def refused(call: Callable[[], object], *codes: int) -> str:
    """The one line of the error that `call` raises, its exit code being one of `codes`."""
    with no_hang(), pytest.raises(QwenimgError) as caught:
        call()
    text = str(caught.value)
    print(f"{caught.value.exit_code}: {text}")
    assert caught.value.exit_code in codes, text
    assert text.isprintable() and len(text) <= 300
    return text


def starts(config: ShapesConfig) -> Callable[[], object]:
    return lambda: train.open_run(config, lambda text: None, CPU)


# Values of a checkpoint


def changed(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path)
    header = {FORMAT: json.dumps(header_of(path))}
    change(tensors)
    path.write_bytes(save(tensors, metadata=header))


def header_of(path: Path) -> Any:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(json.loads(raw[8 : 8 + length])["__metadata__"][FORMAT])


def poisoned(name: str, value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[-1] = value

    return change


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("kind", ["model", "average", "exp_avg", "exp_avg_sq"])
def test_value_that_is_not_finite(out: Path, kind: str, value: float):
    path = out / "training" / "vae.safetensors"
    name = next(name for name in load_file(path) if name.startswith(f"{kind}."))
    changed(path, poisoned(name, value))
    before = listing(out)
    text = refused(starts(options("vae", out, steps=4, resume=True)), 5)
    assert "vae.safetensors" in text and name in text
    assert listing(out) == before


def test_momentum_that_is_not_finite(out: Path):
    path = out / "training" / "dit.safetensors"
    name = next(name for name in load_file(path) if name.startswith("momentum."))
    changed(path, poisoned(name, float("nan")))
    assert name in refused(starts(options("dit", out, steps=4, resume=True)), 5)


def swap(name: str, value: torch.Tensor | None) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        old = tensors.pop(name)
        if value is not None:
            tensors[name] = value.to(old.dtype) if value.dtype == torch.float32 else old.to(value.dtype)

    return change


NAME = "average.quant_conv.bias"


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (swap(NAME, None), "lacks tensor"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "holds unknown tensor 'extra'"),
        (swap(NAME, torch.zeros(31)), "is F32 [31], expected F32 [32]"),
        (swap(NAME, torch.zeros(32, 1)), "is F32 [32, 1], expected F32 [32]"),
        (swap(NAME, torch.zeros(0)), "is F32 [0], expected F32 [32]"),
        (swap(NAME, torch.zeros(1, dtype=torch.float64)), "is F64 [32], expected F32"),
        (swap(NAME, torch.zeros(1, dtype=torch.bfloat16)), "is BF16 [32], expected F32"),
        (swap(NAME, torch.zeros(1, dtype=torch.int32)), "is I32 [32], expected F32"),
        (swap(NAME, torch.zeros(1, dtype=torch.bool)), "is BOOL [32], expected F32"),
        (poisoned("exp_avg_sq.quant_conv.bias", -1.0), "is a mean of squares and reaches -1"),
    ],
)
def test_tensors_that_no_run_wrote(out: Path, change: Callable[[dict[str, torch.Tensor]], None], part: str):
    changed(out / "training" / "vae.safetensors", change)
    assert part in refused(starts(options("vae", out, steps=4, resume=True)), 5)


# The header of a checkpoint


def with_header(path: Path, text: str) -> None:
    path.write_bytes(save(load_file(path), metadata={FORMAT: text}))


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "value", ['"2"', "null", "-1", "-0", "1" + "0" * 30, "9" * 5000, "true", "2.0", "1e400", "NaN", "{}", "[2]", "3"]
)
def test_step_that_is_no_step(out: Path, value: str):
    path = out / "training" / "vae.safetensors"
    header = json.dumps(header_of(path) | {"step": "STEP"}).replace('"STEP"', value)
    with_header(path, header)
    text = refused(starts(options("vae", out, resume=True)), 5)
    assert "vae.safetensors" in text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "null",
        "[]",
        "2",
        "hello",
        '{"step": 2, "step": 2, "run": {}, "scaler": {}}',
        '{"step": 2, "run": {}, "scaler": {}, "more": 1}',
        '{"step": 2, "run": null, "scaler": {}}',
        '{"step": 2, "run": [], "scaler": {}}',
        '{"step": 2, "run": "vae", "scaler": {}}',
        '{"step": 2, "run": {}, "scaler": {}}',
        DEEP,
        '{"step":' + DEEP + "}",
    ],
    ids=lambda text: text[:20],
)
def test_header_that_is_no_runs(out: Path, text: str):
    with_header(out / "training" / "vae.safetensors", text)
    assert "vae.safetensors" in refused(starts(options("vae", out, steps=4, resume=True)), 5)


@pytest.mark.parametrize("field", ["run.batch", "run.seed", "run.size", "run.sizes", "scaler.scale", "scaler.good"])
@pytest.mark.parametrize("value", ['"x"', "null", "-1", "1" + "0" * 30, "true", "2.0", "[]", "1e38", '"a\\u001b[2J"'])
def test_fields_of_the_wrong_kind(out: Path, field: str, value: str):
    path = out / "training" / "vae.safetensors"
    header = header_of(path)
    table, name = field.split(".")
    header[table][name] = "VALUE"
    with_header(path, json.dumps(header).replace('"VALUE"', value))
    config = options("vae", out, steps=4, resume=True)
    if (field, value) == ("scaler.scale", "2.0"):
        starts(config)()  # a scale like any other
    else:
        refused(starts(config), 5)


@pytest.mark.parametrize("scale", [0, -1.0, 0.5, 2.0**25])
def test_loss_scale_out_of_bounds(out: Path, scale: float):
    path = out / "training" / "vae.safetensors"
    header = header_of(path)
    header["scaler"]["scale"] = scale
    with_header(path, json.dumps(header))
    assert "the loss scale" in refused(starts(options("vae", out, steps=4, resume=True)), 5)


def test_scaler_that_lacks_a_field(out: Path):
    path = out / "training" / "vae.safetensors"
    header = header_of(path)
    del header["scaler"]["good"]
    with_header(path, json.dumps(header))
    assert "its loss scaler has fields" in refused(starts(options("vae", out, steps=4, resume=True)), 5)


def raw(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello",
        b"\x80\x04pickle",
        raw(b"[" * 100_000 + b"]" * 100_000),
        raw(
            b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
        ),
        raw({"__metadata__": {FORMAT: 3}}),
        raw({"__metadata__": {}}),
        raw({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}),
        struct.pack("<Q", 2**63) + b"{}",
    ],
    ids=lambda content: repr(content[:12]),
)
def test_file_that_is_no_checkpoint(out: Path, content: bytes):
    (out / "training" / "vae.safetensors").write_bytes(content)
    refused(starts(options("vae", out, steps=4, resume=True)), 5)


def test_checkpoint_beyond_the_steps_that_are_asked_for(out: Path):
    text = refused(starts(options("vae", out, steps=1, resume=True)), 5)
    assert "is of step 2, beyond --steps 1; give --steps 2 or more" in text


def test_finished_run_is_resumed_without_a_change(out: Path):
    before = {name: value for name, value in listing(out).items() if not name.endswith(".log")}
    assert any("steps 2 to 2" in line for line in run(options("vae", out, resume=True)))
    assert {name: value for name, value in listing(out).items() if not name.endswith(".log")} == before


# The table of the loss

ROW = "1,0.5,0.1,1,float32,1,0,0,9.5"
HEAD = ",".join(COLUMNS)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"\xff\xfe\x00",
        HEAD.encode() + b"\n\xff",
        b"step,loss\n1,2\n",
        f"{HEAD}\n1,2\n".encode(),
        f"{HEAD}\n{ROW},7\n".encode(),
        f"{HEAD}\n{ROW}\n{ROW}\n".encode(),
        f"{HEAD}\n{ROW.replace('1', '2', 1)}\n{ROW}\n".encode(),
        *(f"{HEAD}\n{ROW.replace('1', step, 1)}\n".encode() for step in ("x", "-1", "1.0", "true", "", "0", "9" * 30)),
        *(f"{HEAD}\n{ROW.replace('0.5', loss)}\n".encode() for loss in ("nan", "inf", "x", "", "null", "1e999")),
        f"{HEAD}\n1,{'9' * 5000},0.1,1,float32,1,0,0,9.5\n".encode(),
        f"{HEAD}\n\n".encode(),
        b"x" * (files.MAX_TABLE + 1),
    ],
    ids=lambda content: repr(content[-30:]),
)
def test_table_that_no_run_wrote(out: Path, content: bytes):
    (out / "training" / "vae.csv").write_bytes(content)
    before = listing(out)
    assert "vae.csv" in refused(starts(options("vae", out, steps=4, resume=True)), 5)
    assert listing(out) == before


def test_table_of_a_run_goes_on(out: Path):
    """Rows after the checkpoint's step are of steps that are done again."""
    table = out / "training" / "vae.csv"
    rows = table.read_text().splitlines()
    assert len(rows) == 3
    table.write_text("\n".join([*rows, ROW.replace("1", "3", 1)]) + "\n")
    run(options("vae", out, steps=3, resume=True))
    found = table.read_text().splitlines()
    assert found[:3] == rows and len(found) == 4 and found[3] != ROW.replace("1", "3", 1)


def test_table_may_be_missing(out: Path):
    (out / "training" / "vae.csv").unlink()
    run(options("vae", out, steps=3, resume=True))
    assert len((out / "training" / "vae.csv").read_text().splitlines()) == 2


# Files of other kinds


def fifo(path: Path) -> None:
    os.mkfifo(path)


def link_to_nothing(path: Path) -> None:
    path.symlink_to("nowhere")


def link_out(path: Path) -> None:
    target = path.parent.parent.parent / "elsewhere"
    target.write_text("precious\n")
    path.symlink_to(target)


def circle(path: Path) -> None:
    path.symlink_to(path.name)


def socket_at(path: Path) -> None:
    here = os.open(".", os.O_RDONLY)
    os.chdir(path.parent)  # the address of a socket has at most 107 bytes
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.fchdir(here)
    os.close(here)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


OTHERS = [fifo, Path.mkdir, link_to_nothing, link_out, circle, socket_at, device]


def replaced(path: Path, make: Callable[[Path], None]) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()
    make(path)


@pytest.mark.parametrize("make", OTHERS)
@pytest.mark.parametrize("suffix", [".safetensors", ".csv"])
def test_other_kinds_of_what_is_read(out: Path, suffix: str, make: Callable[[Path], None]):
    replaced(out / "training" / f"vae{suffix}", make)
    before = listing(out.parent)
    assert f"vae{suffix}" in refused(starts(options("vae", out, steps=4, resume=True)), 5)
    assert listing(out.parent) == before


@pytest.mark.parametrize("make", OTHERS)
@pytest.mark.parametrize("name", ["training/vae.log", "vae/config.json", f"vae/{STEM}"])
def test_other_kinds_of_what_is_written(out: Path, name: str, make: Callable[[Path], None]):
    """A link is replaced by the file, but for the log, of which the end is written to."""
    replaced(out / name, make)
    before = listing(out.parent)
    config = options("vae", out, steps=3, resume=True)
    if (out / name).is_symlink() and not name.endswith(".log"):
        run(config)
        assert (out / name).is_file() and not (out / name).is_symlink()
        assert listing(out.parent).get("elsewhere", b"precious\n") == b"precious\n"
        return
    assert Path(name).name in refused(starts(config), 2)
    assert listing(out.parent) == before


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("make", [fifo, Path.touch, link_to_nothing, circle, socket_at])
@pytest.mark.parametrize("name", ["vae", "text_encoder", "tokenizer", "transformer", "scheduler", "training"])
def test_folder_that_is_a_file(out: Path, name: str, make: Callable[[Path], None], resume: bool):
    stage: Stage = "text" if name in ("text_encoder", "tokenizer") else "vae" if name in ("vae", "training") else "dit"
    if not resume:
        (out / "training" / f"{stage}.safetensors").unlink()
    replaced(out / name, make)
    before = listing(out)
    refused(starts(options(stage, out, steps=4, resume=resume)), 2 if name != "training" else 5 if resume else 2)
    assert listing(out) == before


@pytest.mark.parametrize("make", [fifo, Path.touch, link_to_nothing, circle, socket_at])
def test_out_that_is_a_file(tmp_path: Path, make: Callable[[Path], None]):
    make(tmp_path / "out")
    before = listing(tmp_path)
    for below in ("", "a/b"):
        refused(starts(options("vae", tmp_path / "out" / below)), 2)
    assert listing(tmp_path) == before


@pytest.mark.parametrize("make", OTHERS)
@pytest.mark.parametrize(
    "name",
    [
        "vae/config.json",
        f"vae/{STEM}",
        "text_encoder/config.json",
        f"text_encoder/{TEXT_STEM}",
        "tokenizer/tokenizer.json",
    ],
)
@pytest.mark.parametrize("where", ["out", "init"])
def test_other_kinds_of_parts(out: Path, tmp_path: Path, where: str, name: str, make: Callable[[Path], None]):
    """What the last stage reads, in its own folder or in that of the model to go on from. A link is followed."""
    (out / "training" / "dit.safetensors").unlink()
    replaced(out / name, make)
    config = options("dit", out) if where == "out" else options("dit", tmp_path / "new", init=out)
    refused(starts(config), 2, 5)


def test_names_that_no_folder_has(tmp_path: Path):
    for name in ("x" * 300, "a\0b", "/proc/none/here"):
        refused(starts(options("vae", tmp_path / name)), 2)


def test_log_that_becomes_another_file_later(tmp_path: Path):
    for make in OTHERS:
        path = tmp_path / make.__name__ / "out" / "training" / "vae.log"
        path.parent.mkdir(parents=True)
        make(path)
        with no_hang():
            files.add_line(path, "a line")
        assert (tmp_path / make.__name__ / "elsewhere").is_file() == (make is link_out)
        if make is link_out:
            assert path.read_text() == "precious\n"


# Folders that cannot be written


def test_read_only_folder(out: Path, monkeypatch: pytest.MonkeyPatch):
    """As on a disk that is mounted for reading; root may write where others may not, so the answer is made up."""
    real = os.access

    def access(path: Any, mode: int) -> bool:
        return real(path, mode) and not (mode & os.W_OK and Path(path).name == locked)

    monkeypatch.setattr(os, "access", access)
    for locked in ("training", "vae", "out"):
        before = listing(out)
        text = refused(starts(options("vae", out, steps=4, resume=True)), 2) if locked != "out" else ""
        assert not text or "no permission" in text
        assert listing(out) == before
    locked = "out"
    assert "no permission" in refused(starts(options("vae", out / "new")), 2)
    assert "no permission" in refused(starts(options("dit", out, steps=4, resume=True)), 2)  # model_index.json


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
@pytest.mark.parametrize("suffix", [".safetensors", ".csv"])
def test_no_permission_to_read(out: Path, suffix: str):
    (out / "training" / f"vae{suffix}").chmod(0)
    refused(starts(options("vae", out, steps=4, resume=True)), 5)


def test_no_room_is_told_before_the_first_step(tmp_path: Path):
    """By a limit on the size of files, which the disk's free space does not show."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        text = refused(starts(options("vae", tmp_path / "out")), 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "bytes needed" in text and "`ulimit -f`" in text and " free" not in text
    assert not [p.name for p in tmp_path.rglob("*") if p.is_file()]


def test_full_disk_while_it_runs(out: Path):
    made = train.open_run(options("vae", out, steps=3, resume=True), lambda text: None, CPU)
    before = listing(out)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, limit[1]))
    try:
        text = refused(made.all_steps, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "the last checkpoint" in text
    for name in ("training/vae.safetensors", f"vae/{STEM}", "vae/config.json"):
        assert listing(out)[name] == before[name], name


# What is written


@pytest.mark.parametrize("stage", ["vae", "text", "dit"])
@pytest.mark.parametrize("kind", ["model", "average", "exp_avg"])
def test_nothing_that_is_not_finite_is_written(out: Path, stage: Stage, kind: str):
    """A value that goes bad in memory: neither folder nor checkpoint is written, and the old ones stay."""
    made = train.open_run(options(stage, out, steps=3, resume=True), lambda text: None, CPU)
    before = listing(out)
    name = next(name for name in made.loop._tensors() if name.startswith(f"{kind}."))
    with torch.no_grad():
        made.loop._tensors()[name].view(-1)[0] = float("nan")
    text = refused(made.loop.save, 6)
    assert name in text and "step 2" in text
    assert listing(out) == before


def test_weights_that_overflow_in_bfloat16(out: Path):
    """3.4e38 is a float32, and infinite in bfloat16, in which the folder is written."""
    made = train.open_run(options("dit", out, steps=3, resume=True), lambda text: None, CPU)
    before = listing(out)
    with torch.no_grad():
        next(iter(made.optimizer.average.values())).view(-1)[0] = 3.4e38
    assert "not finite in bfloat16" in refused(made.loop.save, 6)
    assert listing(out) == before


def test_latents_that_are_not_finite(out: Path):
    """Finite weights whose VAE makes none that is."""
    made = train.open_run(options("vae", out, steps=3, resume=True), lambda text: None, CPU)
    before = listing(out)
    with torch.no_grad():
        for value in made.optimizer.average.values():
            value.mul_(1e30)
    refused(made.loop.save, 6)
    assert listing(out) == before


@pytest.mark.parametrize("part", ["vae", "text_encoder"])
def test_parts_of_another_model_are_finite_too(out: Path, tmp_path: Path, part: str):
    """Also in tensors that the last stage never uses: the decoder, and the vision tower."""
    path = out / part / (STEM if part == "vae" else TEXT_STEM)
    tensors = load_file(path)
    name = next(name for name in tensors if name.startswith(("decoder.", "visual.")))
    tensors[name].view(-1)[0] = float("nan")
    save_file(tensors, path)
    text = refused(starts(options("dit", tmp_path / "new", init=out)), 5)
    assert name in text
    assert not list((tmp_path / "new").rglob(path.name))


def test_parts_in_shards_are_copied_whole(out: Path, tmp_path: Path):
    path = out / "text_encoder" / TEXT_STEM
    tensors = load_file(path)
    names = sorted(tensors)
    weight_map = {}
    for number, some in ((1, names[::2]), (2, names[1::2])):
        shard = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in some}, path.with_name(shard))
        weight_map |= dict.fromkeys(some, shard)
    path.unlink()
    path.with_name(f"{TEXT_STEM}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    run(options("dit", tmp_path / "new", init=out))
    found = {p.name for p in (tmp_path / "new" / "text_encoder").iterdir()}
    assert found == {p.name for p in path.parent.iterdir()}
    train_folder.read_text(
        tmp_path / "new" / "text_encoder", train_folder.text_config(SIZE, train_folder.vocabulary().size)
    )


# The command


def command(*words: str) -> tuple[int, str]:
    """Exit code and text of an error."""
    from train import train as command

    from qwenimg.cli.failures import explain

    with no_hang():
        error = CliRunner().invoke(command, list(words)).exception
    assert error is not None
    code, text = explain(error)
    print(code, text)
    return code, text


def test_all_stages_are_checked_before_the_first(tmp_path: Path):
    """What the last stage writes, before the first one trains for hours."""
    for name in ("transformer", "scheduler", "text_encoder", "vae", "model_index.json"):
        folder = tmp_path / name
        folder.mkdir()
        fifo(folder / name)
        before = listing(folder)
        code, text = command("all", "--out", str(folder), "--backend", "cpu")
        assert code == 2 and name in text
        assert listing(folder) == before


def test_all_with_resume_and_no_checkpoint(tmp_path: Path):
    code, text = command("all", "--out", str(tmp_path), "--resume")
    assert code == 5 and "no checkpoint of vae or text or dit here" in text
    assert not list(tmp_path.iterdir())


def test_a_broken_checkpoint_is_refused_without_a_framework(out: Path, tmp_path: Path):
    (out / "training" / "vae.safetensors").write_bytes(b"")
    code = "import sys, train; print(train.main(), 'torch' in sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", code, "vae", "--out", str(out), "--resume"],
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tools'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    print(ended.stderr)
    assert ended.stdout == "5 False\n"
    assert ended.stderr.count("\n") == 1


def test_kinds_of_error():
    assert [kind.exit_code for kind in (UsageError, DoesNotFit, ModelError, NumericsError)] == [2, 4, 5, 6]
    assert replace(options("vae", Path("x")), resume=True).resume
