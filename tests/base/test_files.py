"""Atomic writing under kill -9, full disks and races; names; latents against numpy and safetensors."""

from __future__ import annotations

import errno
import io
import os
import pickle
import random
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwenimg.common.base import atomic_files
from qwenimg.common.base.arguments import home
from qwenimg.common.base.atomic_files import (
    PICTURES,
    check_output,
    make_folder,
    sweep,
    write_atomic,
)
from qwenimg.common.base.errors import DoesNotFit, ModelError, NumericsError, QwenimgError, UsageError
from qwenimg.common.jobs.naming import FIELDS, check_distinct, output_path
from qwenimg.common.pictures.latents import read_latents, write_latents

SRC = Path(__file__).parents[2] / "src"
OLD, NEW = b"old" * 1000, b"new" * 5000
KILLS = 20
NOW = datetime(2026, 2, 28, 13, 14, 15)


def python(code: str, *args: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(SRC)})


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


def refused(path: Path, kind: type[QwenimgError], *, overwrite: bool, data: bytes = NEW) -> str:
    """Writing fails as `kind`, in one line, and changes nothing."""
    before = {p: p.read_bytes() for p in path.parent.iterdir() if p.is_file()} if path.parent.is_dir() else {}
    with pytest.raises(kind) as caught:
        write_atomic(path, data, overwrite=overwrite)
    if path.parent.is_dir():
        assert before == {p: p.read_bytes() for p in path.parent.iterdir() if p.is_file()}
    message = str(caught.value)
    print(message)
    assert message.isprintable() and len(message) <= 300
    return message


# Writing


@pytest.mark.parametrize("data", [b"", b"x", NEW, bytes(3_000_001)])
def test_write_and_replace(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "图 x.png"
    write_atomic(path, data, overwrite=False)
    assert path.read_bytes() == data
    write_atomic(path, NEW, overwrite=True)
    assert path.read_bytes() == NEW and names(tmp_path) == {path.name}
    assert path.stat().st_nlink == 1


def test_existing_output_is_named_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(OLD)
    message = refused(path, UsageError, overwrite=False)
    assert "x.png" in message and "--overwrite" in message
    (tmp_path / "dangling.png").symlink_to(tmp_path / "nowhere")
    refused(tmp_path / "dangling.png", UsageError, overwrite=False)
    assert not (tmp_path / "nowhere").exists()


def test_a_symbolic_link_is_replaced_and_its_target_kept(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(OLD)
    (tmp_path / "x.png").symlink_to(tmp_path / "target")
    write_atomic(tmp_path / "x.png", NEW, overwrite=True)
    assert (tmp_path / "target").read_bytes() == OLD and (tmp_path / "x.png").read_bytes() == NEW


@pytest.mark.parametrize("name", ["n" * 300 + ".png", "nul\0.png", "\ud800.png", "none/x.png", "file/x.png", "folder"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_bad_outputs(tmp_path: Path, name: str, overwrite: bool) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(OLD)
    refused(tmp_path / name, UsageError, overwrite=overwrite)
    with pytest.raises(UsageError):
        check_output(tmp_path / name, overwrite=overwrite)


def test_devices_and_pipes_are_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.png")
    refused(tmp_path / "x.png", UsageError, overwrite=True)
    with pytest.raises(UsageError, match="not a regular file"):
        check_output(Path("/dev/null"), overwrite=True)


def test_the_longest_name_still_works(tmp_path: Path) -> None:
    for name in ("n" * 251 + ".png", "猫" * 83 + ".png"):
        write_atomic(tmp_path / name, NEW, overwrite=False)
        assert (tmp_path / name).read_bytes() == NEW
    assert len(names(tmp_path)) == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "permission" in refused(tmp_path / "x.png", UsageError, overwrite=False)


CODES = [errno.EACCES, errno.EROFS, errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG]


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["open", "fsync", "publish"])
@pytest.mark.parametrize("old", [False, True])
def test_every_failing_call_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str, old: bool
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    path = tmp_path / "x.png"
    if old:
        path.write_bytes(OLD)
    target = {"open": (atomic_files, "_open_temp"), "fsync": (os, "fsync"), "publish": (Path, "replace")}[call]
    monkeypatch.setattr(*target, fail)
    monkeypatch.setattr(os, "link", fail)  # else publishing a new file would not come to the rename
    full = code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    message = refused(path, DoesNotFit if full else UsageError, overwrite=old)
    room = "more than `ulimit -f` or this disk allows" if code == errno.EFBIG else r"[\d,]+ free"
    assert re.search(f"15,000 bytes needed, {room}", message) if full else "cannot be written" in message


def test_too_little_space_is_seen_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = atomic_files.shutil.disk_usage(tmp_path)._replace(free=14_999)
    monkeypatch.setattr(atomic_files.shutil, "disk_usage", lambda folder: usage)
    monkeypatch.setattr(atomic_files, "_open_temp", None)  # not reached
    assert "15,000 bytes needed, 14,999 free" in refused(tmp_path / "x.png", DoesNotFit, overwrite=False)


@pytest.mark.parametrize("limit", [0, 1, 100_000])
def test_file_size_limit(tmp_path: Path, limit: int) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(OLD)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(DoesNotFit, match="300,000 bytes needed"):
            write_atomic(path, bytes(300_000), overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == OLD and names(tmp_path) == {"x.png"}


@pytest.mark.parametrize("call", ["fsync", "link"])
def test_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, call, interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(tmp_path / "x.png", NEW, overwrite=False)
    assert names(tmp_path) == set()


# Kill, sweep, races

REWRITE = """
import sys
from pathlib import Path
from qwenimg.common.base.atomic_files import write_atomic
path, size = Path(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
while True:
    for letter in b"ab":
        write_atomic(path, bytes([letter]) * size, overwrite=True)
"""


@pytest.mark.sample(0)
def test_kill_while_writing(tmp_path: Path) -> None:
    path, size, strays, cut = tmp_path / "x.png", 4_000_000, 0, 0
    versions = {b"a" * size, b"b" * size}
    path.write_bytes(b"a" * size)
    delay = random.Random(7)
    for _ in range(KILLS):
        child = python(REWRITE, path, size)
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        time.sleep(delay.uniform(0, 0.05))
        child.kill()
        child.wait()
        child.stdout.close()
        assert path.read_bytes() in versions
        left = [p for p in tmp_path.iterdir() if p != path]
        strays, cut = strays + len(left), cut + sum(p.stat().st_size < size for p in left)
        sweep(tmp_path)  # too young: another process might be at work on another machine
        assert len(list(tmp_path.iterdir())) == len(left) + 1
        for stray in left:
            os.utime(stray, (time.time() - 90_000,) * 2)
        sweep(tmp_path)
        assert names(tmp_path) == {"x.png"}
    print(f"{KILLS} kills: {KILLS} files complete, {strays} strays ({cut} of them cut short), all swept")
    assert strays > 0


def test_sweep_takes_only_our_own(tmp_path: Path) -> None:
    child = python("")
    child.communicate()
    dead, alive = child.pid, os.getpid()
    ours = [f".x.png.{dead}.qwenimg.part", f".猫.png.{dead}-2.qwenimg.part"]
    others = [
        f".x.png.{alive}.qwenimg.part", f".young.png.{dead}.qwenimg.part", f"x.png.{dead}.qwenimg.part",
        f".x.png.{dead}.part", ".film.2019.part", f".x.png.{10**30}.qwenimg.part", ".x.png.0.qwenimg.part",
        f".x.png.{dead}.qwenimg.part.png", "x.png",
    ]  # fmt: skip
    for name in ours + others:
        (tmp_path / name).write_bytes(OLD)
        if "young" not in name:
            os.utime(tmp_path / name, (time.time() - 90_000,) * 2)
    (tmp_path / f".folder.{dead}.qwenimg.part").mkdir()
    (tmp_path / f".link.{dead}.qwenimg.part").symlink_to(tmp_path / "x.png")
    others += [f".folder.{dead}.qwenimg.part", f".link.{dead}.qwenimg.part"]
    for name in (f".folder.{dead}.qwenimg.part", f".link.{dead}.qwenimg.part"):
        os.utime(tmp_path / name, (time.time() - 90_000,) * 2, follow_symlinks=False)
    sweep(tmp_path)
    assert names(tmp_path) == set(others)
    sweep(tmp_path / "none")
    sweep(tmp_path / "x.png")


def test_a_stray_of_the_same_pid_is_not_in_the_way(tmp_path: Path) -> None:
    stray = f".x.png.{os.getpid()}.qwenimg.part"
    (tmp_path / stray).write_bytes(OLD)
    write_atomic(tmp_path / "x.png", NEW, overwrite=False)
    assert names(tmp_path) == {"x.png", stray} and (tmp_path / stray).read_bytes() == OLD


RACE = """
import errno, os, sys, time
from pathlib import Path
from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.atomic_files import write_atomic
folder, me, rounds, links = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4] == "True"
def no_links(*args, **kwargs):
    raise OSError(errno.EPERM, "Operation not permitted")
if not links:
    os.link = no_links
(folder / f"ready{me}").touch()
while len(list(folder.glob("ready*"))) < 2:
    pass
won = 0
for i in range(rounds):
    time.sleep(max(0, (folder / "ready1").stat().st_mtime + 0.1 + i * 0.01 - time.time()))
    try:
        write_atomic(folder / f"{i}.png", me.encode() * 100_000, overwrite=False)
        won += 1
    except UsageError:
        pass
print(won)
"""


@pytest.mark.parametrize("links", [True, False])
def test_of_two_writers_one_wins(tmp_path: Path, links: bool) -> None:
    rounds = 60
    children = [python(RACE, tmp_path, me, rounds, links) for me in "12"]
    won = [int(child.communicate(timeout=300)[0]) for child in children]
    content = [(tmp_path / f"{i}.png").read_bytes() for i in range(rounds)]
    print(f"hard links {links}: {won} of {rounds} won")
    assert [content.count(me * 100_000) for me in (b"1", b"2")] == won and sum(won) == rounds
    assert len(names(tmp_path)) == rounds + 2


def test_of_many_threads_one_wins(tmp_path: Path) -> None:
    def write(i: int) -> bool:
        try:
            write_atomic(tmp_path / "x.png", bytes([i]) * 100_000, overwrite=False)
        except UsageError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(write, range(8)))
    assert won.count(True) == 1 and names(tmp_path) == {"x.png"}
    assert (tmp_path / "x.png").read_bytes() == bytes([won.index(True)]) * 100_000


# Names

ANY_TEXT = st.text(alphabet=st.characters(exclude_categories=[]))


def out(pattern: str | None, *, several: bool = False, seed: int = 42, index: int = 3) -> str:
    return str(
        output_path(pattern, seed=seed, index=index, prompt="Red cat", now=NOW, several=several, same_seeds=several)
    )


@pytest.mark.parametrize(
    ("pattern", "one", "several"),
    [
        (None, "qwenimg-20260228-131415-s42.png", "qwenimg-20260228-131415-s42-3.png"),
        ("out/", "out/qwenimg-20260228-131415-s42.png", "out/qwenimg-20260228-131415-s42-3.png"),
        ("{prompt}/", "red-cat/qwenimg-20260228-131415-s42.png", "red-cat/qwenimg-20260228-131415-s42-3.png"),
        ("x.png", "x.png", "x-3.png"),
        ("x.PNG", "x.PNG", "x-3.PNG"),
        ("x.jpg", "x.jpg", "x-3.jpg"),
        ("{seed}.JPEG", "42.JPEG", "42.JPEG"),
        ("{prompt}.webp", "red-cat.webp", "red-cat-3.webp"),
        ("a/x", "a/x.png", "a/x-3.png"),
        ("{prompt}.png", "red-cat.png", "red-cat-3.png"),
        ("{date}", "20260228-131415.png", "20260228-131415-3.png"),
        ("{seed}.png", "42.png", "42.png"),
        ("{prompt}_{index}_{seed}", "red-cat_3_42.png", "red-cat_3_42.png"),
    ],
)
def test_output_path(pattern: str | None, one: str, several: str) -> None:
    assert (out(pattern), out(pattern, several=True)) == (one, several)


def test_an_existing_folder_gets_the_default_name(tmp_path: Path) -> None:
    (tmp_path / "v1.5").mkdir()
    expected = str(tmp_path / "v1.5" / "qwenimg-20260228-131415-s42.png")
    assert out(str(tmp_path / "v1.5")) == out(str(tmp_path / "v1.5") + "/") == expected


def test_a_default_name_has_an_index_only_where_seeds_repeat() -> None:
    path = output_path(None, seed=42, index=3, prompt="x", now=NOW, several=True, same_seeds=False)
    assert path.name == "qwenimg-20260228-131415-s42.png"


@pytest.mark.parametrize("pattern", ["a\nb", "a\x1b/b.png", "\x7f", "/dev/null"])
def test_names_that_are_none(pattern: str) -> None:
    with pytest.raises(UsageError) as caught:
        out(pattern)
    assert str(caught.value).isprintable() and not Path("/dev/null.png").exists()


@pytest.mark.parametrize(
    ("pattern", "ours"),
    [
        ("%03d.png", "{index}.png"),
        ("a-%d.png", "a-{index}.png"),
        ("{seed:05d}.png", "{seed}.png"),
        ("{index!r}.png", "{index}.png"),
        ("%date:yyyy-MM-dd%/%seed%.png", "{date}/{seed}.png"),
        ("%Y-%m-%d.png", "{date}.png"),
        ("[seed]-[prompt].png", "{seed}-{prompt}.png"),
    ],
)
def test_what_other_programs_fill_in_is_answered_with_ours(pattern: str, ours: str) -> None:
    with pytest.raises(UsageError) as caught:
        out(pattern)
    assert str(caught.value).endswith(f"as -o '{ours}'")
    out(ours)


@pytest.mark.parametrize("name", ["100%.png", "50%_%x.png", "[a].png", "5%dark.png"])
def test_percent_and_brackets_are_letters_too(name: str) -> None:
    assert out(name) == name


def test_one_folder_may_be_new(tmp_path: Path) -> None:
    check_output(tmp_path / "new" / "a.png", overwrite=False, new_folder=True)
    for path, new in ((tmp_path / "new" / "a.png", False), (tmp_path / "new" / "er" / "a.png", True)):
        with pytest.raises(UsageError, match="folder does not exist"):
            check_output(path, overwrite=False, new_folder=new)
    assert not names(tmp_path)
    make_folder(tmp_path / "new")
    make_folder(tmp_path / "new")
    with pytest.raises(UsageError):
        make_folder(tmp_path / "more" / "than one")


@pytest.mark.parametrize("pattern", ["{", "}", "{}", "{{seed}}", "{sed}.png", "{seed:04d}", "{0}", "{seed.real}"])
def test_bad_fields_list_the_good_ones(pattern: str) -> None:
    with pytest.raises(UsageError, match=r"\{seed\} \{index\} \{prompt\} \{date\}"):
        out(pattern)


@pytest.mark.parametrize("pattern", ["x.bmp", "x.gif", "x.tiff", "{seed}.avif", "x.png.gz", "v1.5"])
def test_other_formats_name_those_that_there_are(pattern: str) -> None:
    with pytest.raises(UsageError, match=re.escape(".png .jpg .jpeg .webp")):
        out(pattern)


def test_empty_name() -> None:
    with pytest.raises(UsageError, match="empty"):
        out("")


PIECES = st.sampled_from(
    [*(f"{{{field}}}" for field in FIELDS), "{", "}", "/", "..", ".", "-", "猫", "a", ".png", ".jpg"]
)


@settings(max_examples=200)
@given(
    pattern=st.lists(PIECES, max_size=6).map("".join) | st.text(max_size=20) | st.none(),
    prompt=ANY_TEXT,
    several=st.booleans(),
)
def test_any_pattern_is_a_picture_where_it_says_or_refused(pattern: str | None, prompt: str, several: bool) -> None:
    shared: dict[str, Any] = {"prompt": prompt, "now": NOW, "several": several, "same_seeds": False}
    try:
        first, second = (output_path(pattern, seed=6 + i, index=i, **shared) for i in (1, 2))
    except UsageError as error:
        assert str(error).isprintable() and len(str(error)) <= 300
        return
    assert first.suffix.lower() in PICTURES and first.name.lower() not in PICTURES
    assert first != second or not several
    folders = first.as_posix().count("/")
    assert folders <= home(pattern or "").count("/") + 1  # a prompt adds no folder


def test_check_distinct() -> None:
    check_distinct([Path("a-1.png"), Path("a-2.png")])
    with pytest.raises(UsageError, match=r"b\.png.*\{index\}"):
        check_distinct([Path("a.png"), Path("b.png"), Path("b.png")])


# Latents

LATENTS = np.random.default_rng(0).normal(size=(2, 16, 5, 7)).astype(np.float32)


@pytest.mark.parametrize("name", ["x.npy", "x.safetensors", "x.NPY"])
def test_latents_round_trip_and_others_can_read_them(tmp_path: Path, name: str) -> None:
    from safetensors.numpy import load

    path = tmp_path / name
    write_latents(path, LATENTS[:, ::-1], overwrite=False)
    got = read_latents(path)
    assert (got == LATENTS[:, ::-1]).all() and got.dtype == np.float32 and got.flags.c_contiguous
    other = load(path.read_bytes())["latents"] if name == "x.safetensors" else np.load(path, allow_pickle=False)
    assert (other == LATENTS[:, ::-1]).all() and other.dtype == np.float32
    with pytest.raises(UsageError, match="--overwrite"):
        write_latents(path, LATENTS, overwrite=False)
    write_latents(path, LATENTS.astype(np.float64), overwrite=True)
    assert (read_latents(path) == LATENTS).all()


@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8", ">f4", ">f8"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_npy_of_others(tmp_path: Path, dtype: str, order: str, version: tuple[int, int]) -> None:
    array = np.array(LATENTS, dtype=dtype, order=order)  # type: ignore[call-overload]
    with (tmp_path / "x.npy").open("wb") as file:
        np.lib.format.write_array(file, array, version=version)
    got = read_latents(tmp_path / "x.npy")
    assert (got == array.astype(np.float32)).all() and got.dtype == np.float32 and got.flags.c_contiguous


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.sample(1)
def test_safetensors_of_torch(tmp_path: Path, dtype: str) -> None:
    import torch
    from safetensors.torch import save_file

    tensor = torch.from_numpy(LATENTS.copy()).to(getattr(torch, dtype))
    save_file({"latents": tensor, "another": torch.ones(3)}, tmp_path / "x.safetensors")
    assert (read_latents(tmp_path / "x.safetensors") == tensor.float().numpy()).all()


def test_latents_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    broken = LATENTS.copy()
    broken[1, 2, 3, 4] = np.nan
    with pytest.raises(NumericsError):
        write_latents(tmp_path / "x.npy", broken, overwrite=False)
    assert names(tmp_path) == set()


@pytest.mark.parametrize("name", ["x.pt", "x.png", "x", ".npy"])
def test_other_kinds_of_latents(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"\.npy or \.safetensors"):
        write_latents(tmp_path / name, LATENTS, overwrite=False)
    with pytest.raises(UsageError, match=r"\.npy or \.safetensors"):
        read_latents(tmp_path / name)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("import os; os.environ['QWENIMG_TEST_RAN'] = '1'",)


def npy(array: Any, **changes: object) -> bytes:
    """`array` as .npy with some header fields replaced by the text of `changes`."""
    out = io.BytesIO()
    np.save(out, array, allow_pickle=True)
    raw = out.getvalue()
    for key, text in changes.items():
        old = re.search(rf"'{key}': (\(.*?\)|[^,]*),".encode(), raw)
        assert old
        raw = raw.replace(old[0], f"'{key}': {text},".encode())
        length = raw.index(b"\n") - 9
        raw = raw[:8] + length.to_bytes(2, "little") + raw[10:]
    return raw


def hostile_latents() -> Iterator[tuple[str, bytes]]:
    from safetensors.numpy import save

    good = npy(LATENTS)
    yield "empty.npy", b""
    yield "text.npy", b"hello" * 100
    yield "pickle.npy", pickle.dumps(Evil())
    yield "object.npy", npy(np.array([[[[Evil()]]]], dtype=object))
    yield "truncated.npy", good[:-1]
    yield "header.npy", good[:70]
    yield "trailing.npy", good + b"x"
    yield "rank.npy", npy(LATENTS[0])
    yield "none.npy", npy(LATENTS[:0])
    yield "negative.npy", npy(LATENTS, shape="(-2, -16, 5, 7)")
    yield "huge.npy", npy(LATENTS, shape="(65536, 65536, 65536, 65536)")
    yield "digits.npy", npy(LATENTS, shape=f"({'9' * 4000}, 1, 1, 1)")
    yield "bool.npy", npy(LATENTS, shape="(True, True, True, True)")
    yield "bool_for_one.npy", npy(LATENTS[:1], shape="(True, 16, 5, 7)")
    yield "deep.npy", npy(LATENTS, shape="(" * 3000 + ")" * 3000)
    yield "code.npy", npy(LATENTS, shape="__import__('os').putenv('QWENIMG_TEST_RAN', '1')")
    yield "python2.npy", npy(LATENTS, shape="(2L, 16L, 5L, 8L)")
    yield "version.npy", good[:6] + b"\x09\x00" + good[8:]
    yield "npz.npy", b"PK\x03\x04" + bytes(100)
    for dtype in ("i4", "c8", "f16", "U3", "?", "M8[s]"):
        yield f"{dtype}.npy", npy(np.ones((1, 2, 3, 4)).astype(dtype))
    yield "fields.npy", npy(np.zeros((1, 2, 3, 4), dtype=[("a", "<f4")]))
    yield "nan.npy", npy(np.full((1, 2, 3, 4), np.nan, np.float32))
    yield "overflow.npy", npy(np.full((1, 2, 3, 4), 1e300))
    whole = save({"latents": LATENTS})
    yield "empty.safetensors", b""
    yield "npy.safetensors", good
    yield "truncated.safetensors", whole[:-1]
    yield "trailing.safetensors", whole + b"x"
    yield "name.safetensors", save({"late\x1bnts": LATENTS})
    yield "other.safetensors", save({"samples": LATENTS})
    yield "int.safetensors", save({"latents": LATENTS.astype(np.int32)})
    yield "double.safetensors", save({"latents": LATENTS.astype(np.float64)})
    yield "rank.safetensors", save({"latents": LATENTS[0]})
    yield "none.safetensors", save({"latents": LATENTS[:0]})
    yield "inf.safetensors", save({"latents": np.full((1, 2, 3, 4), np.inf, np.float16)})


@pytest.mark.parametrize(("name", "data"), [pytest.param(n, d, id=n) for n, d in hostile_latents()])
def test_hostile_latents(tmp_path: Path, name: str, data: bytes, recwarn: pytest.WarningsRecorder) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ModelError) as caught:
        read_latents(tmp_path / name)
    print(caught.value)
    assert name in str(caught.value) and str(caught.value).isprintable() and len(str(caught.value)) <= 300
    assert not recwarn.list and "QWENIMG_TEST_RAN" not in os.environ


@pytest.mark.parametrize("name", ["x.npy", "x.safetensors"])
def test_latents_are_read_from_regular_files_only(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError):
        read_latents(tmp_path / name)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelError):
        read_latents(tmp_path / name)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(ModelError):
        read_latents(tmp_path / name)


def test_more_than_a_gibibyte_is_refused_before_it_is_read(tmp_path: Path) -> None:
    raw = npy(LATENTS, shape="(1, 16, 4097, 4096)")
    header = raw[: raw.index(b"\n") + 1]
    with (tmp_path / "x.npy").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + 4 * 16 * 4097 * 4096)  # sparse
    begin = time.process_time()
    with pytest.raises(ModelError, match="at most 1,073,741,824"):
        read_latents(tmp_path / "x.npy")
    assert time.process_time() - begin < 1


@settings(max_examples=200)
@given(st.data())
def test_mutants_of_npy(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    raw = bytearray(npy(LATENTS[:1, :2]))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, 127))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "mutant.npy"
    path.write_bytes(raw)
    try:
        assert read_latents(path).ndim == 4
    except ModelError as error:
        assert str(error).isprintable()
