"""A cache that someone else has laid out: links, pipes, damaged bytes. Nothing outside it is written or read."""

import contextlib
import errno
import http.client
import json
import os
import shutil
import ssl
import subprocess
import sys
import urllib.error
from pathlib import Path

import pytest
from huggingface_hub import constants
from support.fake_hub import COMMIT, REPO, digest_of
from support.hub_cases import FIRST, SMALL, check_complete, parts, pulled
from support.refusals import refused

from qwenimg.common.base import hf_cache
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.hub import resolve
from qwenimg.common.hub.pull import pull
from qwenimg.common.transfer import http as hub_http

STORAGE = f"models--{REPO.replace('/', '--')}"
MINE = b"mine, and nobody else's"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "hf"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder


@pytest.fixture
def outside(tmp_path):
    """A folder with a file that must stay as it is, and alone."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "file").write_bytes(MINE)
    yield folder
    assert [p.name for p in folder.rglob("*")] == ["file"] and (folder / "file").read_bytes() == MINE


def quiet(name=REPO, **options):
    return pull(name, echo=print, progress=lambda *_: None, **options)


def blob_of(cache, server, path):
    return cache / STORAGE / "blobs" / digest_of(path, server.files[path])


FOLDERS = (STORAGE, f"{STORAGE}/blobs", f"{STORAGE}/snapshots", f"{STORAGE}/snapshots/{COMMIT}", f"{STORAGE}/refs")
FOLDERS += (f"{STORAGE}/snapshots/{COMMIT}/transformer", ".locks", f".locks/{STORAGE}")


@pytest.mark.parametrize("dangling", [False, True])
@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_is_a_link(name, dangling, fake, cache, outside):
    link = cache / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(outside / "nothing" if dangling else outside)
    with pytest.raises(UsageError, match="is a link") as caught:
        quiet()
    assert link.name in str(caught.value) and len(str(caught.value)) <= 300


@pytest.mark.parametrize("kind", ["link", "hard link", "fifo", "dangling", "loop"])
@pytest.mark.parametrize("suffix", ["", ".qwenimg.part", ".qwenimg.part.json"])
@pytest.mark.sample(5)
def test_a_file_that_is_something_else(suffix, kind, fake, cache, outside):
    """The blob, its part and the part's note: what is none of ours is replaced, and what it leads to stays."""
    place = blob_of(cache, fake, FIRST).with_name(digest_of(FIRST, fake.files[FIRST]) + suffix)
    place.parent.mkdir(parents=True)
    if suffix == ".qwenimg.part":  # a note that fits, so that the part would be continued
        note = {"etag": digest_of(FIRST, fake.files[FIRST]), "commit": COMMIT, "size": len(fake.files[FIRST])}
        place.with_name(place.name + ".json").write_text(json.dumps(note))
    match kind:
        case "link":
            place.symlink_to(outside / "file")
        case "hard link":
            place.hardlink_to(outside / "file")
        case "fifo":
            os.mkfifo(place)
        case "dangling":
            place.symlink_to(outside / "new")
        case "loop":
            place.symlink_to(place)
    check_complete(pulled()[0], fake.files)
    assert fake.ranges(FIRST) == ["bytes=0-"] and parts(cache) == []


def test_a_blob_outside_is_no_blob(fake, cache, tmp_path):
    """Of the right size and even of the right bytes: what lies outside can change at any time."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(fake.files[FIRST])
    for link in (blob_of(cache, fake, FIRST), cache / STORAGE / "snapshots" / COMMIT / SMALL):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(elsewhere)
    check_complete(pulled()[0], fake.files)
    assert elsewhere.read_bytes() == fake.files[FIRST]


@pytest.mark.parametrize("kind", ["link", "fifo", "folder", "dangling"])
def test_a_lock_that_is_no_file(kind, fake, cache, outside):
    lock = cache / ".locks" / STORAGE / "qwenimg.lock"
    lock.parent.mkdir(parents=True)
    {
        "link": lambda: lock.symlink_to(outside / "file"),
        "dangling": lambda: lock.symlink_to(outside / "new"),
        "fifo": lambda: os.mkfifo(lock),
        "folder": lock.mkdir,
    }[kind]()
    with pytest.raises(UsageError, match="lock's file is expected: remove it"):
        quiet()


@pytest.mark.parametrize("kind", ["link", "fifo", "large", "bytes"])
def test_a_ref_that_is_no_commit(kind, fake, cache, outside):
    """Neither `resolve` nor `pull` waits for it or follows it; the pull writes it anew."""
    pulled()
    ref = cache / STORAGE / "refs" / "main"
    ref.unlink()
    {
        "link": lambda: ref.symlink_to(outside / "file"),
        "fifo": lambda: os.mkfifo(ref),
        "large": lambda: ref.write_bytes(b"0" * 10_000_000),
        "bytes": lambda: ref.write_bytes(b"\xff\xfe\0"),
    }[kind]()
    assert resolve.resolve(REPO).revision == COMMIT
    check_complete(pulled()[0], fake.files)


def test_the_temporary_ref_is_no_way_out(fake, cache, outside):
    refs = cache / STORAGE / "refs"
    refs.mkdir(parents=True)
    (refs / f".main.{os.getpid()}").symlink_to(outside / "file")
    check_complete(pulled()[0], fake.files)


def test_a_leftover_that_is_a_folder_stays(fake, cache):
    folder = cache / STORAGE / "blobs" / "other.qwenimg.part"
    folder.mkdir(parents=True)
    quiet()
    assert folder.is_dir()


def test_the_cache_itself_may_be_a_link(fake, cache, tmp_path):
    """As users do whose disk is full."""
    (tmp_path / "large disk").mkdir()
    cache.symlink_to(tmp_path / "large disk")
    check_complete(pulled()[0], fake.files)
    assert "complete in the cache already" in pulled()[1][0]


def test_the_store_that_all_models_share(fake, cache):
    """Where huggingface_hub keeps what it fetched by hf_xet: blobs are links to <cache>/blobs/<2 digits>/<hash>."""
    from qwenimg.common.formats.files import find_files

    folder, _, _ = pulled()
    blob = blob_of(cache, fake, FIRST)
    stored = cache / "blobs" / "ab" / ("ab" * 32)
    stored.parent.mkdir(parents=True)
    shutil.move(blob, stored)
    blob.symlink_to(os.path.relpath(stored, blob.parent))
    assert "complete in the cache already" in pulled()[1][0]
    assert len(find_files(folder / "transformer").files) == 2
    assert "every hash is right" in verified()[0]


# Damaged bytes


def verified():
    lines = []
    pull(REPO, echo=lines.append, progress=lambda *_: None, verify=True)
    print(*lines, sep="\n")
    return lines


@pytest.mark.parametrize("path", [FIRST, SMALL])
def test_verify_finds_wrong_bytes_of_the_right_size(path, fake, cache):
    folder, _, _ = pulled()
    blob = blob_of(cache, fake, path)
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    assert "complete in the cache already" in pulled()[1][0]  # sizes alone say nothing
    lines = verified()
    assert sum("its bytes are not those" in line for line in lines) == (
        2 if path == SMALL else 1
    )  # two names, one blob
    check_complete(folder, fake.files)
    assert "every hash is right" in verified()[0]


def test_verify_offline_names_the_file(fake, cache, monkeypatch):
    folder, _, _ = pulled()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    count = len(fake.requests)
    assert "every hash is right" in verified()[0]
    blob_of(cache, fake, FIRST).write_bytes(bytes(len(fake.files[FIRST])))
    text = refused(quiet, verify=True)
    assert FIRST in text and "damaged" in text and f"pull --verify {REPO}" in text
    (folder / FIRST).unlink()
    (folder / FIRST).write_bytes(fake.files[FIRST])  # as on a disk without links
    assert "verify with the network on" in refused(quiet, verify=True)
    optional = blob_of(cache, fake, "tokenizer/added_tokens.json")
    optional.unlink()
    assert "tokenizer/added_tokens.json is missing" in refused(quiet, verify=True)
    os.mkfifo(optional)
    assert "tokenizer/added_tokens.json is missing, or no file" in refused(quiet, verify=True)
    shutil.rmtree(cache)
    assert "not whole in the cache" in refused(quiet, verify=True)
    assert len(fake.requests) == count


def test_verify_takes_no_name_from_a_file_outside(fake, cache, outside):
    """The damaged file is in the snapshot itself, and `blobs` a link to a folder with a file of the hash's name."""
    folder, _, _ = pulled()
    blobs = cache / STORAGE / "blobs"
    for path in folder.rglob("*"):
        if path.is_symlink():
            data = path.read_bytes()
            path.unlink()
            path.write_bytes(data[:-1] + b"?" if data else b"")
    shutil.rmtree(blobs)
    (outside / "file").rename(outside / digest_of(FIRST, fake.files[FIRST]))
    blobs.symlink_to(outside)
    with pytest.raises(UsageError, match="is a link"):
        quiet(verify=True)
    (outside / digest_of(FIRST, fake.files[FIRST])).rename(outside / "file")


def test_verify_where_nothing_is_here_pulls(fake, cache):
    check_complete(quiet(verify=True), fake.files)


# Addresses and tokens


ADDRESSES = ("http://[", "http://[::1", "http://h:x/", "http://h:99999/", "http://h:0/", "http://", "http:///x", "//[")
ADDRESSES += ("http://u:secret@h/", "http://" + "a" * 64 + ".b/", "http://a..b/", "http://é/", "file:///etc/passwd")
ADDRESSES += ("ftp://h/x", "javascript:1", "data:,x", "gopher://h", "http:// h/", "http://h:-1/")


@pytest.mark.parametrize("address", [a for a in ADDRESSES if a not in ("http://", "http:///x")])  # those stay here
@pytest.mark.sample(5)
def test_redirects_to_what_is_no_address(address, fake, cache):
    """One line, at once: no try would change it, and no part of it is asked."""
    fake.faults[FIRST] = [("redirect", address)] * 9
    text = refused(quiet)
    assert FIRST in text and "redirects to" in text and len(fake.faults[FIRST]) == 8


@pytest.mark.parametrize("address", [*ADDRESSES, "", "nonsense", "h:80", "http://h/?x=1", "http://h/#x", "http://h\n/"])
def test_an_endpoint_that_is_no_address(address, fake, cache, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", address)
    with pytest.raises(UsageError, match=r"HF_ENDPOINT|HF_\.\.\. variable") as caught:
        quiet()
    assert str(caught.value).isprintable() and "secret" not in str(caught.value)
    assert not cache.exists()


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("HF_ENDPOINT", "http://[", "an HF_... variable"),
        ("HF_ENDPOINT", "http://127.0.0.1:x", "HF_ENDPOINT is no address"),
        ("HF_HUB_DOWNLOAD_TIMEOUT", "soon", "an HF_... variable"),
    ],
)
@pytest.mark.sample(0)
def test_a_variable_that_cannot_be_read(name, value, found, tmp_path):
    """In a process of its own, since huggingface_hub reads them while it is imported."""
    code = "from qwenimg.cli.main import run; raise SystemExit(run(['pull', 'sd15']))"
    env = os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "0", "HF_TOKEN": "", name: value}
    env["PYTHONPATH"] = str(Path(__file__).parents[2] / "src")
    ended = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2 and f"qwenimg: error: {found}" in ended.stderr and ended.stderr.count("\n") == 1


@pytest.mark.parametrize("token", ["a\tb", "hf_ä", "a b", "\x1b[31m"])
def test_a_token_that_is_none(token, fake, cache, monkeypatch):
    monkeypatch.setattr(hf_cache, "token", lambda: token)
    with pytest.raises(UsageError, match="HF_TOKEN") as caught:
        quiet()
    assert token not in str(caught.value) and fake.requests == []


def test_a_token_file_that_is_a_pipe(fake, cache, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN")
    os.mkfifo(tmp_path / "token")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    with pytest.raises(UsageError, match="no file that could hold a token"):
        quiet()


def test_a_token_file_of_an_impossible_name(fake, cache, monkeypatch):
    """As HF_HOME of 5,000 letters makes it; a folder without permission ends the same way."""
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/" + "x" * 5000 + "/token")
    with pytest.raises(UsageError, match="the token cannot be read: File name too long"):
        quiet()


def test_a_redirect_to_another_host_gets_no_token(fake, cache):
    """Not even one on the same machine at another port."""
    quiet()
    assert {r[3] for r in fake.data_requests} == {None} != {r[3] for r in fake.requests}


@pytest.mark.parametrize(
    "value",
    ["bytes 5-9/300007", "bytes -5-9/300007", "bytes 0-9/-1", "bytes 9-5/*", "items 0-9/9", "bytes 0-1/1", "0" * 99],
)
def test_a_content_range_that_lies(value, fake, cache):
    fake.faults[FIRST] = [("range", value)] * 9
    text = refused(quiet)
    assert FIRST in text
    fake.faults.clear()
    check_complete(pulled()[0], fake.files)


@pytest.mark.parametrize("length", ["-1", "9" * 30, "x", "1e9"])
def test_a_content_length_that_lies(length, fake, cache):
    """What cannot be a length counts as none; the hash decides."""
    fake.faults[FIRST] = [("length", length)]
    with contextlib.suppress(ModelError):
        quiet()
    fake.faults.clear()
    check_complete(pulled()[0], fake.files)


@pytest.mark.parametrize("fault", ["slow-head", "continue"])
@pytest.mark.parametrize("path", [FIRST, SMALL])
def test_a_head_that_never_ends_is_given_up(path, fault, fake, cache, monkeypatch):
    """Each byte comes in time, and so do many answers that are none."""
    monkeypatch.setattr(hub_http, "TIMEOUT", 1.0)
    monkeypatch.setattr(hub_http, "RETRIES", 99)  # a busy machine may be late, too
    fake.faults[path] = [fault]
    folder, lines, _ = pulled()
    check_complete(folder, fake.files)
    assert any(path in line and "trying again" in line for line in lines)


@pytest.mark.parametrize(
    ("error", "text", "tries"),
    [
        (ssl.SSLCertVerificationError(1, "self-signed"), "set SSL_CERT_FILE", 1),
        (urllib.error.URLError(ssl.SSLCertVerificationError(1, "self-signed")), "set SSL_CERT_FILE", 1),
        (urllib.error.URLError("unknown url type: socks5"), "check the proxy settings", 1),
        (http.client.InvalidURL("nonnumeric port: 'x'"), "check the proxy settings", 1),
        (UnicodeError("label empty or too long"), "check the proxy settings", 1),
        (urllib.error.URLError(ConnectionRefusedError(111, "Connection refused")), "3 times in a row", 3),
        (http.client.RemoteDisconnected("closed"), "3 times in a row", 3),
        (ssl.SSLError("handshake"), "3 times in a row", 3),
    ],
)
def test_what_another_try_may_change(error, text, tries, fake, cache, monkeypatch):
    asked = []

    class Opener:
        def open(self, request, timeout):
            asked.append(request)
            raise error

    monkeypatch.setattr(hub_http, "_opener", Opener)
    assert text in refused(quiet) and len(asked) == tries


def test_a_full_disk_while_the_note_is_written(fake, cache, monkeypatch):
    from qwenimg.common.base.errors import DoesNotFit
    from qwenimg.common.transfer import download

    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(download, "create", full)
    with pytest.raises(DoesNotFit, match="free space and pull again"):
        quiet()
