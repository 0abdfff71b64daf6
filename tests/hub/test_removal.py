"""`qwenimg rm`: what is deleted, what is shown before, and that nothing outside a model's folder in the cache is."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.cli_runner import cli
from support.fake_hub import COMMIT, REPO, running
from support.hub_cases import pulled

from qwenimg.common.base import hf_cache
from qwenimg.common.families import catalog
from qwenimg.common.hub import listing, pull
from qwenimg.common.transfer import removal

MINE = b"mine, and nobody else's"
SD15 = catalog.KNOWN["sd15"].repo or ""


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A folder with a file that must stay as it is."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "file").write_bytes(MINE)
    yield folder
    assert (folder / "file").read_bytes() == MINE


def put(repo: str = SD15) -> Path:
    """A model's folder in the cache, with a blob, a link to it, and a file of its own."""
    storage = hf_cache.storage_folder(repo)
    snapshot = storage / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (storage / "blobs").mkdir()
    (storage / "blobs" / "abc").write_bytes(bytes(1000))
    (storage / "refs").mkdir()
    (storage / "refs" / "main").write_text(COMMIT)
    (snapshot / "a.safetensors").symlink_to("../../blobs/abc")
    (snapshot / "b.safetensors").write_bytes(bytes(500))
    return storage


def removed(*args: str) -> str:
    ran = cli("rm", *args, "--yes")
    print(ran.err)
    assert ran.code == 0 and ran.out == b"", ran
    return ran.err


def test_a_model_that_was_pulled(fake, cache: Path) -> None:
    pulled()
    (cache / "models--someone--other").mkdir()
    size = sum(path.stat().st_size for path in (cache / "models--someone--tiny-qwen" / "blobs").iterdir())
    assert f"freed {size / 1e3:.1f} kB" in removed(REPO)
    assert {path.name for path in cache.iterdir()} == {"models--someone--other", ".locks"}
    cli("rm", REPO, "--yes").refused(5, "nothing of it is in the cache")


def test_the_list_has_the_bytes_on_the_disk(cache: Path) -> None:
    put()
    entry = next(one for one in listing.entries() if one.name == "sd15")
    assert entry.on_disk == 1500 + len(COMMIT) and entry.here == "in part"
    row = next(line for line in cli("models").out.decode().splitlines() if line.startswith("sd15 "))
    assert "in part  1.5 kB" in row
    removed("sd15")
    assert next(one for one in listing.entries() if one.name == "sd15").here == "no"


def test_what_else_uses_it_is_shown(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Known names of the same repository, a process that has a file open, and config.toml."""
    storage = put("Qwen/Qwen-Image")
    (tmp_path / "config" / "qwenimg").mkdir(parents=True)
    (tmp_path / "config" / "qwenimg" / "config.toml").write_text('model = "qwen-image"\n')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    command = [sys.executable, "-c", "import sys; f = open(sys.argv[1]); print(flush=True); input()"]
    with subprocess.Popen(
        [*command, str(storage / "blobs" / "abc")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        told = removed("qwen-image")
        process.stdin.close()
    assert "qwen-image-files goes with it: " in told and "config.toml names it" in told
    assert f"process {process.pid} (" in told or sys.platform != "linux"


def test_without_a_terminal_it_asks_for_yes(cache: Path) -> None:
    storage = put()
    ran = cli("rm", "sd15")
    assert ran.code == 2 and ran.err.splitlines()[-1].endswith("give --yes") and storage.exists()


@pytest.mark.parametrize(("answer", "gone"), [(b"y\n", True), (b"\n", False), (b"no\n", False), (b"\x04", False)])
@pytest.mark.sample(0)
def test_a_terminal_is_asked(cache: Path, answer: bytes, gone: bool) -> None:
    storage = put()
    code, shown = on_terminal(["rm", "sd15"], answer, b"[y/N]", {"HF_HUB_CACHE": str(cache)})
    assert code == 0 and storage.exists() is not gone
    assert (b"freed 1.5 kB" if gone else b"nothing is deleted") in shown


def on_terminal(args: list[str], answer: bytes, until: bytes, env: dict[str, str]) -> tuple[int, bytes]:
    """Run the command line on a terminal and answer its question; return its exit code and what it showed."""
    ours, theirs = pty.openpty()
    script = "import sys; from qwenimg.cli.main import run; sys.exit(run(sys.argv[1:]))"
    everything = {**os.environ, "XDG_CACHE_HOME": os.devnull, **env}
    process = subprocess.Popen(
        [sys.executable, "-c", script, *args], stdin=theirs, stdout=theirs, stderr=theirs, env=everything
    )
    os.close(theirs)
    shown, answered = b"", False
    try:
        while piece := os.read(ours, 4096):
            shown += piece
            if until in shown and not answered:
                answered = True
                os.write(ours, answer)
    except OSError:  # Linux: the other side is closed
        pass
    finally:
        os.close(ours)
    print(shown.decode(errors="replace"))
    return process.wait(60), shown


# Attacks


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("..", 2), ("../..", 2), ("../outside", 2), ("a/../b", 5), ("/etc", 2), ("/nowhere/at/all", 5), ("~", 2),
        ("~/nothing-of-that-name", 5), (".", 2), ("models--a--b", 5), ("a--b/c", 5), ("a/b/../../../x.safetensors", 5),
        ("someone/x/../../outside/file", 5), ("shapes", 5), ("shapes-v1", 5), ("x" * 5000, 5), ("a/" + "b" * 5000, 5),
        ("\ud800", 5), ("a\nb", 5), ("*", 5), ("-", 5), ("nobody/nothing", 5), ("someone/x/file.safetensors", 5),
    ],
)  # fmt: skip
def test_names_that_are_none(
    cache: Path, outside: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int, tmp_path: Path
) -> None:
    storage, work = put(), tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    cli("rm", name, "--yes").refused(code)
    assert storage.exists() and len([*storage.rglob("*")]) == 8


def test_a_folder_of_the_user_is_never_deleted(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    storage = put()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sd15").mkdir()
    cli("rm", "sd15", "--yes").refused(2, "yourself")
    (tmp_path / "sd15").rmdir()
    (tmp_path / "sd15").symlink_to("nowhere")
    cli("rm", "sd15", "--yes").refused(2, "yourself")
    assert storage.exists()


@pytest.mark.parametrize("place", ["", "snapshots", f"snapshots/{COMMIT}", "blobs", "refs", f"snapshots/{COMMIT}/unet"])
@pytest.mark.parametrize("dangling", [False, True])
def test_links_out_of_the_cache_are_not_followed(cache: Path, outside: Path, place: str, dangling: bool) -> None:
    storage = put()
    target = storage / place if place else storage
    if target.exists():
        shutil.rmtree(target)
    target.symlink_to(outside / ("nowhere" if dangling else ""))
    if not place:
        cli("rm", "sd15", "--yes").refused(2, "is a link")
        return
    removed("sd15")
    assert not os.path.lexists(storage)


def test_a_cache_that_is_a_link(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "disk").mkdir()
    cache.symlink_to(tmp_path / "disk")
    put()
    assert "freed 1.5 kB" in removed("sd15")
    assert [path.name for path in (tmp_path / "disk").iterdir()] == [".locks"]


def test_bytes_with_another_name_are_not_freed(cache: Path, outside: Path) -> None:
    storage = put()
    (cache / "blobs").mkdir()
    (cache / "blobs" / "shared").write_bytes(bytes(3000))
    (storage / "snapshots" / COMMIT / "c.safetensors").symlink_to(cache / "blobs" / "shared")
    (storage / "snapshots" / COMMIT / "d.safetensors").hardlink_to(outside / "file")
    told = removed("sd15")
    assert "freed 1.5 kB" in told and f"{(3000 + len(MINE)) / 1e3:.1f} kB of it have another name" in told
    assert (cache / "blobs" / "shared").stat().st_size == 3000


def test_pipes_and_sockets_are_deleted_and_never_opened(cache: Path) -> None:
    storage = put()
    os.mkfifo(storage / "refs" / "pipe")
    os.mkfifo(storage / "snapshots" / "pipe")
    removed("sd15")
    assert not storage.exists()


def test_a_storage_that_is_a_file(cache: Path) -> None:
    cache.mkdir()
    hf_cache.storage_folder(SD15).write_bytes(b"")
    cli("rm", "sd15", "--yes").refused(5, "is not there")


def test_while_another_process_pulls_it(cache: Path) -> None:
    storage = put()
    with pull.locked(storage, lambda: None), open(cache / ".locks" / storage.name / "qwenimg.lock") as file:  # noqa: PTH123
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ran = cli("rm", "sd15", "--yes")
        assert ran.code == 2 and "another process is pulling it" in ran.err
    assert len([*storage.rglob("*")]) == 8
    removed("sd15")


def test_what_a_kill_leaves_goes_by_the_same_command(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names go first, so that half a model is never taken for one."""
    storage = put()

    def killed(place: Path) -> None:
        raise OSError(5, "Input/output error", str(place))

    monkeypatch.setattr(removal.shutil, "rmtree", killed)
    ran = cli("rm", "sd15", "--yes")
    assert ran.code == 2 and "what is left goes by the same command" in ran.err
    monkeypatch.undo()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    (storage / "refs" / "main").unlink(missing_ok=True)
    removed("sd15")


def test_all_names_are_checked_before_one_is_deleted(cache: Path) -> None:
    storage = put()
    ran = cli("rm", "sd15", "sdxl", "--yes")
    assert ran.code == 5 and storage.exists()


# One file of a repository


def test_one_file_and_its_blob(cache: Path) -> None:
    storage = put("owner/name")
    assert "freed 1.0 kB" in removed("owner/name/a.safetensors")
    assert not (storage / "blobs" / "abc").exists() and (storage / "snapshots" / COMMIT / "b.safetensors").exists()
    cli("rm", "owner/name/a.safetensors", "--yes").refused(5)
    removed("owner/name/b.safetensors")
    assert not storage.exists(), "nothing of it is left"


def test_a_blob_that_another_file_leads_to_stays(cache: Path) -> None:
    storage = put("owner/name")
    (storage / "snapshots" / COMMIT / "same.safetensors").symlink_to("../../blobs/abc")
    assert "freed 0 bytes" in removed("owner/name/a.safetensors").replace("0.0 kB", "0 bytes").replace("0 B", "0 bytes")
    assert (storage / "blobs" / "abc").exists()


def test_a_file_behind_a_link_stays(cache: Path, outside: Path) -> None:
    storage = put("owner/name")
    (storage / "snapshots" / COMMIT / "sub").symlink_to(outside)
    (outside / "x.safetensors").write_bytes(MINE)
    cli("rm", "owner/name/sub/x.safetensors", "--yes").refused(5)
    (storage / "snapshots" / COMMIT / "c.safetensors").symlink_to(outside / "x.safetensors")
    removed("owner/name/c.safetensors")
    assert (outside / "x.safetensors").read_bytes() == MINE


def test_small_files_of_a_model_that_is_here_go_with_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    piece = catalog.find_download("qwen-image-files")
    assert piece is not None
    storage = put(piece.repo)
    for name in piece.files:
        path = storage / "snapshots" / COMMIT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    monkeypatch.setattr(pull.repository, "lacks", lambda folder: None)
    cli("rm", piece.name, "--yes").refused(2, "belong to qwen-image, which is here")
    monkeypatch.undo()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    removed(piece.name)
    assert (storage / "snapshots" / COMMIT / "b.safetensors").exists()


def test_the_words_of_other_programs_lead_to_it() -> None:
    for word in ("remove", "delete", "uninstall", "prune"):
        cli(word).refused(2, "rm NAME")
    cli("rm").refused(2, "As in: qwenimg rm sd15")


# A run whose model is missing


@pytest.mark.parametrize("answer", [b"\n", b"n\n"])
@pytest.mark.sample(0)
def test_a_terminal_is_asked_for_a_missing_model(tmp_path: Path, fake, cache: Path, answer: bytes) -> None:
    """And gets it by a yes: the fake hub has no such model, which ends the run by the error of pull."""
    from huggingface_hub import constants

    kept = tmp_path / "kept" / "qwenimg"
    kept.mkdir(parents=True)
    (kept / "download.json").write_text(json.dumps({"bytes a second of the last download": 12e6}))
    env = {"HF_ENDPOINT": constants.ENDPOINT, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0", "no_proxy": "*"}
    env |= {"XDG_CACHE_HOME": str(tmp_path / "kept")}
    code, shown = on_terminal(["-m", "sd15", "x", "-o", str(tmp_path / "x.png")], answer, b"[Y/n]", env)
    host = constants.ENDPOINT.partition("//")[2]
    assert f"sd15: 4.3 GB from {host}, about 6 min at the speed of the last download: get it?".encode() in shown
    assert code == 5 and (b"is not on the hub" in shown or b"404" in shown) is (answer == b"\n")


@pytest.mark.sample(0)
def test_a_yes_on_a_terminal_gets_the_model_and_draws(tmp_path: Path, cache: Path, tiny_folder: Path) -> None:
    files = {str(path.relative_to(tiny_folder)): path.read_bytes() for path in tiny_folder.rglob("*") if path.is_file()}
    draw = ["-m", REPO, "a red circle", "--size", "32x32", "--steps", "1", "-s", "7"]
    with running(files) as (hub, address):
        env = {"HF_ENDPOINT": address, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0", "no_proxy": "*"}
        code, shown = on_terminal([*draw, "-o", str(tmp_path / "pulled.png")], b"y\n", b"[y/N]", env)
        assert code == 0 and b"an unknown number of bytes" in shown, "of a model that is not known: No is usual"
        requests = len(hub.requests)
        code, shown = on_terminal([*draw, "-o", str(tmp_path / "again.png")], b"", b"\0", env)
        assert code == 0 and b"get it?" not in shown and len(hub.requests) == requests
    pulled, again = (np.asarray(Image.open(tmp_path / name)) for name in ("pulled.png", "again.png"))
    assert pulled.shape == (32, 32, 3) and pulled.std() > 1 and (pulled == again).all()


@pytest.mark.parametrize("options", [["--offline"], ["--json"], ["-m", "no/such-model", "--offline"]])
@pytest.mark.sample(0)
def test_a_terminal_is_not_asked_where_it_must_not(cache: Path, tmp_path: Path, options: list[str]) -> None:
    env = {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0"}
    code, shown = on_terminal(["-m", "sd15", "x", *options], b"", b"\0", env)
    assert code == 5 and b"get it?" not in shown


def test_a_pipe_is_never_asked(cache: Path) -> None:
    cli("-m", "sd15", "x", stdin=b"y\n").refused(5, "qwenimg pull sd15")
