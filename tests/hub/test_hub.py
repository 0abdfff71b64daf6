"""Names, the cache, and downloads from a hub that runs here and does faults. Nothing leaves this machine."""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from huggingface_hub import constants
from support.fake_hub import COMMIT, REPO, digest_of, is_lfs, noise, tiny_files
from support.hub_cases import FIRST, SMALL, TOKEN, UNUSED, Usage, check_complete, parts, pulled
from support.refusals import refused

from qwenimg.common.base.errors import DoesNotFit, ModelError, UsageError
from qwenimg.common.families import repository
from qwenimg.common.hub import resolve
from qwenimg.common.hub.pull import pull
from qwenimg.common.request import loras
from qwenimg.common.shapes import builtin
from qwenimg.common.transfer import download, http

SECONDS = 1.0  # in which a missing model must be refused


def part_sizes(cache):
    """Bytes of each file that is being fetched; one finished since it was listed has another name and is left out."""
    sizes = []
    for path in (path for path in parts(cache) if path.suffix == ".part"):
        with contextlib.suppress(FileNotFoundError):
            sizes.append(path.stat().st_size)
    return sizes


# Names


def test_only_files_that_are_used_are_needed():
    """Of the files that the published repository and its relatives have."""
    shards = [f"transformer/diffusion_pytorch_model-0000{i}-of-00009.safetensors" for i in range(1, 10)]
    shards += [f"text_encoder/model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    used = [
        "model_index.json",
        "scheduler/scheduler_config.json",
        *(f"tokenizer/{n}" for n in ("vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json")),
        *(f"tokenizer/{n}" for n in ("added_tokens.json", "special_tokens_map.json")),
        *(f"{c}/config.json" for c in ("transformer", "text_encoder", "vae")),
        "transformer/diffusion_pytorch_model.safetensors.index.json",
        "text_encoder/model.safetensors.index.json",
        "vae/diffusion_pytorch_model.safetensors",
        *shards,
    ]
    unused = [
        *UNUSED,
        ".gitattributes",
        "tokenizer/chat_template.jinja",
        "text_encoder/generation_config.json",
        "text_encoder/pytorch_model.bin",
        "transformer/diffusion_pytorch_model.fp16-00001-of-00002.safetensors",
        "transformer/diffusion_pytorch_model-00001-of-00002.fp16.safetensors",
        "transformer/diffusion_pytorch_model.safetensors.index.fp16.json",
        "transformer/sub/model.safetensors",
        "transformer/../vae/model.safetensors",
        "../transformer/model.safetensors",
        "/transformer/config.json",
        "transformer/config.json\n",
        "image_encoder/model.safetensors",
    ]
    assert [name for name in used if not repository.needed(name)] == []
    assert [name for name in unused if repository.needed(name)] == []


def test_a_folder_comes_before_a_name(tmp_path, monkeypatch, cache, no_sockets):
    monkeypatch.chdir(tmp_path)
    Path("qwen-image").mkdir()
    Path("Qwen/Qwen-Image").mkdir(parents=True)
    for given in ("qwen-image", "Qwen/Qwen-Image", "./qwen-image/", str(tmp_path / "qwen-image")):
        found = resolve.resolve(given)
        assert found.folder.samefile(given) and found.name == Path(given).name
        assert found.known is None and found.revision is None
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve.resolve("~/qwen-image").folder == tmp_path / "qwen-image"
    assert resolve.resolve(".").name == tmp_path.name


@pytest.mark.parametrize("given", ["./nothing", "~/nothing", "/nothing/here", "a/b/c", "nothing/", "./x/", "~nobody/x"])
def test_what_looks_like_a_path_is_no_name(given, tmp_path, monkeypatch, cache, no_sockets):
    monkeypatch.chdir(tmp_path)
    assert "no such folder" in refused(resolve.resolve, given)


@pytest.mark.parametrize("given", ["sd15.safetensors", "models/SD15.SafeTensors", "/models/a.ckpt", "~/a/b/c.gguf"])
def test_what_looks_like_a_file_is_no_name(given, tmp_path, monkeypatch, cache, no_sockets):
    monkeypatch.chdir(tmp_path)
    assert refused(resolve.resolve, given).endswith(": no such file")


@pytest.mark.parametrize(
    "given", ["", "hunyuan", "a b", "x" * 5000, "a\0b", "\x1b[31m", "a--b/c", "../x", "a/..", "ä/b", "-/x", "\udcff"]
)
def test_unknown_names(given, cache, no_sockets):
    assert "no such folder" in refused(resolve.resolve, given)


def test_a_file_is_taken_as_it_is(tmp_path, cache, no_sockets):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"x")
    assert (resolve.resolve(str(file)).folder, resolve.resolve(str(file)).name) == (file, "model.safetensors")
    file.unlink()
    file.symlink_to("nothing")
    assert "leads nowhere" in refused(resolve.resolve, str(file))


@pytest.mark.parametrize("given", ["sd21"])
def test_known_models_that_are_not_supported(given, cache, no_sockets):
    text = refused(resolve.resolve, given)
    assert text.startswith(given) and "pull" not in text


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize("given", [None, "qwen-image-2512", "Qwen/Qwen-Image", "someone/else"])
def test_a_missing_model_says_how_to_get_it(given, offline, cache, no_sockets, monkeypatch, tmp_path):
    monkeypatch.setattr(builtin, "folder", lambda: tmp_path / "nowhere")  # which None would mean
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    text = refused(resolve.resolve, given, offline=offline)
    name = {None: "qwen-image", "Qwen/Qwen-Image": "qwen-image"}.get(given, given)
    assert text.endswith(f"qwenimg pull {name}") and str(cache)[:80] in text
    assert ("57.7 GB" in text and "Qwen/Qwen-Image" in text) == (given != "someone/else")
    assert ("network on" in text) == offline
    assert not cache.exists()


def test_a_missing_model_in_a_fresh_process(tmp_path):
    """HF_HUB_CACHE and HF_HOME are respected, and the interpreter's start included it is quick."""
    code = "from qwenimg.common.hub.resolve import resolve\nresolve('qwen-image')"
    for name, value, place in (("HF_HUB_CACHE", "c", "c"), ("HF_HOME", "h", "h/hub")):
        env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")} | {name: str(tmp_path / value)}
        start = os.times()
        ended = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        end = os.times()
        seconds = end.children_user - start.children_user + end.children_system - start.children_system
        last = ended.stderr.splitlines()[-1]
        assert "NotHere" in last and str(tmp_path / place) in last and last.endswith("qwenimg pull qwen-image")
        print(f"{seconds:.2f} s of processor time")
        assert seconds < SECONDS


# Pulling


def test_pull_then_resolve_without_the_network(fake, cache, monkeypatch):
    folder, lines, progress = pulled()
    check_complete(folder, fake.files)
    assert parts(cache) == []
    used = {digest_of(p, d): len(d) for p, d in fake.files.items() if p not in UNUSED}
    total = sum(used.values())
    assert progress[-1][1:] == (total, total) and all(0 <= had <= total == of for _, had, of in progress)
    assert [had for _, had, _ in progress] == sorted(had for _, had, _ in progress)
    assert "free" in lines[0] and COMMIT[:12] in lines[0] and f"{total / 1e3:.1f} kB" in lines[0]
    monkeypatch.setattr(socket, "socket", None)
    found = resolve.resolve(REPO, offline=True)
    assert (found.folder, found.name, found.known, found.revision) == (folder, REPO, None, COMMIT)
    by_path = resolve.resolve(str(folder))
    assert (by_path.folder, by_path.name, by_path.revision) == (folder, REPO, COMMIT)


def test_the_token_is_for_the_hub_only(fake):
    pulled()
    assert fake.data_requests and {r[3] for r in fake.data_requests} == {None}
    assert {r[3] for r in fake.requests} == {f"Bearer {TOKEN}"}


def test_other_programs_find_the_files(fake, cache):
    """huggingface_hub's own functions on our cache, with the network off."""
    from huggingface_hub import hf_hub_download, scan_cache_dir, try_to_load_from_cache

    folder, _, _ = pulled()
    assert Path(try_to_load_from_cache(REPO, SMALL)) == folder / SMALL
    assert Path(hf_hub_download(REPO, FIRST, local_files_only=True, cache_dir=cache)) == folder / FIRST
    report = scan_cache_dir(cache)
    assert not report.warnings
    [repo] = report.repos
    [revision] = repo.revisions
    assert (repo.repo_id, revision.commit_hash, set(revision.refs)) == (REPO, COMMIT, {"main"})
    assert revision.size_on_disk == sum(
        {digest_of(p, d): len(d) for p, d in fake.files.items() if p not in UNUSED}.values()
    )


def test_same_cache_as_huggingface_hub_makes(fake, cache, tmp_path):
    """Its download of the same files leaves the same names, links and bytes; and then we fetch nothing."""
    other = tmp_path / "theirs"
    code = (
        "import sys; from huggingface_hub import hf_hub_download\n"
        f"for path in sys.argv[1:]: hf_hub_download({REPO!r}, path)"
    )
    used = [path for path in fake.files if path not in UNUSED]
    env = os.environ | {"HF_HUB_CACHE": str(other), "HF_ENDPOINT": constants.ENDPOINT, "HF_HUB_OFFLINE": "0"}
    subprocess.run([sys.executable, "-c", code, *used], env=env, check=True, capture_output=True, timeout=300)
    pulled()

    def tree(root):
        storage = root / f"models--{REPO.replace('/', '--')}"
        paths = [p for part in ("blobs", "snapshots", "refs") for p in (storage / part).rglob("*") if not p.is_dir()]
        return {
            p.relative_to(storage).as_posix(): str(p.readlink()) if p.is_symlink() else p.read_bytes() for p in paths
        }

    assert tree(cache) == tree(other)
    constants.HF_HUB_CACHE = str(other)  # put back by the fixture
    before = len(fake.data_requests)
    _, lines, _ = pulled()
    assert "complete in the cache already" in lines[0] and len(fake.data_requests) == before


def test_pull_again_fetches_nothing_and_does_not_read(fake, monkeypatch):
    folder, _, _ = pulled()
    stamp = {p: p.stat().st_atime_ns for p in (folder.parent.parent / "blobs").iterdir()}
    monkeypatch.setattr(download, "fetch", None)
    count = len(fake.requests)
    again, lines, progress = pulled()
    assert again == folder and progress == [] and "complete in the cache already" in lines[0]
    assert len(fake.requests) == count + 1  # the list of files
    assert stamp == {p: p.stat().st_atime_ns for p in stamp}


def test_a_blob_of_the_wrong_size_is_fetched_again(fake):
    folder, _, _ = pulled()
    blob = (folder / FIRST).resolve()
    blob.write_bytes(b"short")
    pulled()
    check_complete(folder, fake.files)


def test_a_new_commit_shares_what_is_the_same(fake, cache):
    first, _, _ = pulled()
    fake.commit, fake.files[SMALL] = "f" * 40, b'{"a": 2}'
    count = len(fake.data_requests)
    second, _, _ = pulled()
    assert len(fake.data_requests) == count and second.name == "f" * 40
    assert resolve.resolve(REPO).revision == "f" * 40
    assert (first / SMALL).read_bytes() == b'{"a": 1}' and (second / SMALL).read_bytes() == b'{"a": 2}'


def test_an_update_that_stops_leaves_the_revision_of_before(fake, cache):
    pulled()
    fake.commit, fake.files[FIRST] = "f" * 40, noise(300_007, 99)
    fake.faults[FIRST] = [404]
    refused(pull, REPO, echo=print, progress=lambda *_: None)
    assert resolve.resolve(REPO).revision == COMMIT


@pytest.mark.parametrize("path", [FIRST, "vae/config.json", "tokenizer/merges.txt"])
def test_an_incomplete_snapshot_says_what_is_missing(path, fake, no_sockets_after):
    folder, _, _ = pulled()
    (folder / path).unlink()
    (folder / path).symlink_to("nowhere")
    no_sockets_after()
    text = refused(resolve.resolve, REPO)
    missing = path
    assert missing in text and text.endswith(f"`qwenimg pull {REPO}` resumes")


@pytest.fixture
def no_sockets_after(monkeypatch):
    return lambda: monkeypatch.setattr(socket, "socket", None)


# Faults of the network


@pytest.mark.parametrize("path", [SMALL, FIRST])
@pytest.mark.parametrize("fraction", [0, 0.01, 0.5, 0.99])
def test_cut(path, fraction, fake):
    fake.faults[path] = [("cut", fraction)]
    folder, lines, _ = pulled()
    check_complete(folder, fake.files)
    kept = int(len(fake.files[path]) * fraction)
    assert fake.ranges(path)[:2] == ["bytes=0-", f"bytes={kept}-"]
    assert any(f"{path}: cut at {kept:,} of {len(fake.files[path]):,} bytes" in line for line in lines)


@pytest.mark.parametrize("fault", ["whole", "416"])
def test_a_server_without_ranges(fault, fake):
    """After a cut it sends all again: what we have is skipped, not lost and not doubled."""
    fake.faults[FIRST] = [("cut", 0.5), fault, "whole"]
    folder, _, _ = pulled()
    check_complete(folder, fake.files)


def test_416_from_the_start(fake):
    fake.faults[FIRST] = ["416"]
    check_complete(pulled()[0], fake.files)
    assert fake.ranges(FIRST) == ["bytes=0-", None]


def test_another_range_than_asked(fake):
    fake.faults[FIRST] = [("cut", 0.5), "other-range"]
    check_complete(pulled()[0], fake.files)
    fake.files[FIRST], fake.commit = noise(300_007, 98), "e" * 40
    fake.faults[FIRST] = ["other-range"] * 9
    assert "another range" in refused(pull, REPO, echo=print, progress=lambda *_: None)


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503])
@pytest.mark.parametrize("path", [SMALL, FIRST])
def test_a_status_that_passes(status, path, fake):
    fake.faults[path] = [status, status]
    folder, lines, _ = pulled()
    check_complete(folder, fake.files)
    assert sum(f"HTTP {status}" in line and "trying again" in line for line in lines) == 2


@pytest.mark.parametrize("status", [403, 503])
def test_a_status_that_stays(status, fake, cache):
    """403 from the host of the data is a link that has expired; what came before is kept."""
    fake.faults[FIRST] = [("cut", 0.5)] + [status] * 9
    text = refused(pull, REPO, echo=print, progress=lambda *_: None)
    assert FIRST in text and f"HTTP {status}" in text and "4 times in a row" in text
    assert part_sizes(cache) == [150_003]
    fake.faults.clear()
    folder, lines, _ = pulled()
    check_complete(folder, fake.files)
    assert fake.ranges(FIRST)[-1] == "bytes=150003-" and "kept from before" in lines[0]


def test_a_long_download_may_be_cut_often(fake, monkeypatch):
    """A connection that brought much is no failure in a row."""
    monkeypatch.setattr(download, "PROGRESS", 1000)
    fake.faults[FIRST] = [("cut", 0.1)] * 20
    check_complete(pulled()[0], fake.files)


@pytest.mark.parametrize("fault", [("stall", 0.5), "drip"])
def test_silent_and_slow_connections_are_given_up(fault, fake, monkeypatch):
    monkeypatch.setattr(http, "TIMEOUT", 1.0)
    monkeypatch.setattr(http, "RETRIES", 99)  # a busy machine may be late, too
    fake.faults[FIRST] = [fault]
    folder, lines, _ = pulled()
    check_complete(folder, fake.files)
    assert any("nothing for 1 s" in line or "too slow" in line for line in lines)


@pytest.mark.parametrize(
    ("fault", "path", "part"),
    [
        ("etag", FIRST, "another file"),
        ("size", FIRST, "the hub lists 300,007"),
        ("size", SMALL, "the hub lists 8"),
        (404, FIRST, "404"),
        (404, SMALL, "404"),
        (401, SMALL, "private"),
        (403, SMALL, f"accept its terms at https://huggingface.co/{REPO}, and set HF_TOKEN"),
    ],
)
def test_faults_that_another_try_would_not_change(fault, path, part, fake):
    fake.faults[path] = [fault] * 9
    text = refused(pull, REPO, echo=print, progress=lambda *_: None)
    assert path in text and part in text
    assert len(fake.faults[path]) == 8


@pytest.mark.parametrize("path", [SMALL, FIRST])
def test_a_wrong_hash(path, fake, cache):
    """Nothing that does not verify gets a name, and it is not kept; the next call begins anew."""
    fake.faults[path] = ["hash"]
    text = refused(pull, REPO, echo=print, progress=lambda *_: None)
    assert path in text and "another hash" in text
    assert not [p for p in parts(cache) if p.suffix == ".part"]
    assert digest_of(path, fake.files[path]) not in {p.name for p in cache.rglob("blobs/*")}
    check_complete(pulled()[0], fake.files)


def test_a_part_that_is_damaged_is_fetched_anew(fake, cache):
    fake.faults[FIRST] = [("cut", 0.5)] + [503] * 9
    refused(pull, REPO, echo=print, progress=lambda *_: None)
    fake.faults.clear()
    [part] = [p for p in parts(cache) if p.suffix == ".part"]
    part.write_bytes(b"\0" * part.stat().st_size)
    folder, lines, _ = pulled()
    check_complete(folder, fake.files)
    assert any("damaged; starting over" in line for line in lines)
    assert fake.ranges(FIRST)[-2:] == ["bytes=150003-", "bytes=0-"]


@pytest.mark.parametrize("note", [b"", b"[]", b"{", b'{"etag": "x", "size": 300007}', None])
def test_a_part_of_unknown_origin_is_not_used(note, fake, cache):
    blobs = cache / f"models--{REPO.replace('/', '--')}" / "blobs"
    blobs.mkdir(parents=True)
    name = digest_of(FIRST, fake.files[FIRST])
    (blobs / f"{name}.qwenimg.part").write_bytes(b"?" * 1000)
    if note is not None:
        (blobs / f"{name}.qwenimg.part.json").write_bytes(note)
    (blobs / "old.qwenimg.part").write_bytes(b"of a file that is no longer in the repository")
    check_complete(pulled()[0], fake.files)
    assert fake.ranges(FIRST) == ["bytes=0-"] and parts(cache) == []


@pytest.mark.parametrize("address", ["file:///etc/passwd", "ftp://127.0.0.1/x", "", "http:///"])
def test_redirects_elsewhere(address, fake):
    fake.faults[FIRST] = [("redirect", address)] * 9
    assert FIRST in refused(pull, REPO, echo=print, progress=lambda *_: None)


def test_a_circle_of_redirects(fake):
    fake.faults[FIRST] = [("redirect", f"/{REPO}/resolve/{COMMIT}/{FIRST}")] * 99
    assert "redirects more than" in refused(pull, REPO, echo=print, progress=lambda *_: None)


def test_https_is_not_left():
    assert http._next("https://a/x", "/y", "f") == "https://a/y"
    assert http._next("http://a/x", "https://b/y", "f") == "https://b/y"
    assert "not followed" in refused(http._next, "https://a/x", "http://a/y", "f")


def test_the_token_stays_with_scheme_host_and_port():
    server = http.Server(endpoint="https://hub.example", token=TOKEN)
    assert server.owns("https://HUB.example/x?y") and TOKEN not in repr(server)
    for url in (
        "http://hub.example/",
        "https://hub.example:444/",
        "https://hub.example.evil/",
        "https://a@hub.example/",
    ):
        assert not server.owns(url)


# Faults of the hub's list


@pytest.mark.parametrize("status", [429, 503])
def test_the_list_is_asked_for_again(status, fake):
    fake.faults["api"] = [status]
    check_complete(pulled()[0], fake.files)


@pytest.mark.parametrize(
    ("status", "part"),
    [
        (404, "is not on the hub"),
        (401, "private"),
        (403, f"accept its terms at https://huggingface.co/{REPO}, and set HF_TOKEN"),
        (503, "3 times"),
        (418, "418"),
    ],
)
def test_the_list_is_refused(status, part, fake, cache):
    fake.faults["api"] = [status] * 9
    text = refused(pull, REPO, echo=print, progress=lambda *_: None)
    assert REPO in text and part in text and not cache.exists()


@pytest.mark.parametrize(
    "listing",
    [
        [],
        {},
        {"sha": "main", "siblings": []},
        {"sha": COMMIT, "siblings": {}},
        {"sha": COMMIT, "siblings": [1, {}]},
        {"sha": "../../x", "siblings": []},
    ],
)
def test_a_list_that_is_none(listing, fake, cache):
    fake.listing = listing
    refused(pull, REPO, echo=print, progress=lambda *_: None)
    assert not cache.exists()


@pytest.mark.parametrize(
    "change",
    [{"size": None}, {"size": -1}, {"size": True}, {"size": 2**60}, {"blobId": "../../../evil"}, {"blobId": None}],
)
def test_a_list_with_values_that_cannot_be(change, fake, cache):
    fake.listing = fake.info()
    next(e for e in fake.listing["siblings"] if e["rfilename"] == SMALL).update(change)
    assert "no size and hash" in refused(pull, REPO, echo=print, progress=lambda *_: None)
    assert not cache.exists()


def test_another_kind_of_repository_is_refused_before_the_weights(fake, cache):
    fake.files["model_index.json"] = b'{"_class_name": "Flux2KleinInpaintPipeline"}'
    assert "FLUX.2 pipeline for another task" in refused(pull, REPO, echo=print, progress=lambda *_: None)
    assert fake.data_requests == []
    del fake.files["vae/config.json"]
    assert "has no vae/config.json" in refused(pull, REPO, echo=print, progress=lambda *_: None)


def test_no_hub_at_all(cache, fake, monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        assert "no answer from 127.0.0.1" in refused(pull, REPO, echo=print, progress=lambda *_: None)


def test_offline_is_refused_at_once(cache, monkeypatch, no_sockets):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "offline" in refused(pull, "qwen-image", echo=print, progress=lambda *_: None)
    assert not cache.exists()


def test_too_little_space_is_refused_before_the_download(fake, cache, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**6, 0, 1_234))
    with pytest.raises(DoesNotFit, match=r"kB to fetch, 1\.2 kB free") as caught:
        pull(REPO, echo=print, progress=lambda *_: None)
    assert caught.value.exit_code == 4 and len(str(caught.value)) <= 300
    assert fake.data_requests == [] and len(fake.requests) == 1


def test_only_what_remains_must_fit(fake, monkeypatch):
    fake.faults[FIRST] = [("cut", 0.9)] + [503] * 9
    refused(pull, REPO, echo=print, progress=lambda *_: None)
    fake.faults.clear()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**6, 0, 31_000))  # 300,007 bytes would not fit
    check_complete(pulled()[0], fake.files)


@pytest.mark.sample(0)
def test_disk_full_keeps_the_part(fake, cache):
    """A limit on the size of files, as a disk that fills up."""
    code = (
        "import resource, signal, sys\nfrom qwenimg.common.hub.pull import pull\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        f"try: pull({REPO!r}, echo=print, progress=lambda *_: None)\n"
        "except Exception as e: print(type(e).__name__, e); sys.exit(e.exit_code)"
    )
    ended = subprocess.run([sys.executable, "-c", code], env=environment(cache), capture_output=True, text=True)
    assert ended.returncode == 4 and "what came is kept" in ended.stdout.splitlines()[-1], ended
    assert part_sizes(cache) == [100_000]
    check_complete(pulled()[0], fake.files)
    assert fake.ranges(FIRST)[-1] == "bytes=100000-"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_without_permission(fake, cache):
    cache.mkdir()
    cache.chmod(0o500)
    with pytest.raises(UsageError, match="cannot be written"):
        pull(REPO, echo=print, progress=lambda *_: None)


def test_a_cache_that_is_a_file(fake, cache):
    cache.write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        pull(REPO, echo=print, progress=lambda *_: None)


def test_a_disk_without_links(fake, monkeypatch):
    """Then the file itself is in the snapshot, and nothing is fetched twice."""

    def refuse(*args, **kwargs):
        raise OSError("no links here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    folder, _, _ = pulled()
    for path, data in fake.files.items():
        if path not in UNUSED:
            assert (folder / path).read_bytes() == data and not (folder / path).is_symlink()
    _, lines, _ = pulled()
    assert "complete in the cache already" in lines[0]
    assert resolve.resolve(REPO).folder == folder


# Several processes, and the command


def environment(cache):
    return os.environ | {
        "HF_HUB_CACHE": str(cache),
        "HF_ENDPOINT": constants.ENDPOINT,
        "HF_HUB_OFFLINE": "0",
        "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
    }


COMMAND = [sys.executable, "-c", "from qwenimg.cli.commands.pull import pull; pull()"]


def wait_for(condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.sample(0)
def test_a_signal_half_way_then_resume(fake, cache, number, code):
    """A process is ended with 150,003 bytes of the first shard on disk; the next one asks for the rest only."""
    fake.faults[FIRST] = [("stall", 0.5)]
    half = len(fake.files[FIRST]) // 2
    command = [sys.executable, "-c", "import sys; from qwenimg.cli.main import run; sys.exit(run())", "pull", REPO]
    process = subprocess.Popen(command, env=environment(cache), stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    wait_for(lambda: part_sizes(cache) == [half])
    process.send_signal(number)
    _, told = process.communicate(timeout=300)
    assert process.returncode == code and b"Traceback" not in told
    assert told.splitlines()[-1].startswith(b"qwenimg: error: stopped by a signal") == (number != signal.SIGKILL)
    ended = subprocess.run([*COMMAND, REPO], env=environment(cache), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    folder = Path(ended.stdout.rstrip("\n"))
    check_complete(folder, fake.files)
    assert fake.ranges(FIRST) == ["bytes=0-", f"bytes={half}-"]
    assert fake.sent[FIRST] == len(fake.files[FIRST])
    assert "kept from before" in ended.stderr and parts(cache) == []


@pytest.mark.sample(0)
def test_two_processes_at_once_fetch_each_byte_once(fake, cache, tmp_path):
    fake.faults[FIRST] = [("stall", 0.5)]
    with (tmp_path / "err1").open("wb") as err1, (tmp_path / "err2").open("wb") as err2:
        first = subprocess.Popen([*COMMAND, REPO], env=environment(cache), stderr=err1, stdout=subprocess.PIPE)
        wait_for(lambda: fake.sent.get(FIRST))
        second = subprocess.Popen([*COMMAND, REPO], env=environment(cache), stderr=err2, stdout=subprocess.PIPE)
        wait_for(lambda: "another process is pulling" in (tmp_path / "err2").read_text())
        fake.released.set()  # the stalled answer ends, cut
        out1, out2 = first.communicate(timeout=300)[0], second.communicate(timeout=300)[0]
    told = (tmp_path / "err1").read_text(), (tmp_path / "err2").read_text()
    assert (first.returncode, second.returncode) == (0, 0), told
    assert out1 == out2 and "cut at" in told[0] and "complete in the cache already" in told[1]
    check_complete(Path(out1.decode().rstrip("\n")), fake.files)
    assert fake.sent == {p: len(d) for p, d in fake.files.items() if p in fake.sent}


@pytest.mark.sample(0)
def test_the_command(fake, cache):
    from qwenimg.cli.commands.pull import pull as command

    told = CliRunner().invoke(command, [REPO], catch_exceptions=False)
    assert told.exit_code == 0 and told.stdout == f"{resolve.resolve(REPO).folder}\n"
    assert "free" in told.stderr and COMMIT[:12] in told.stderr and "Traceback" not in told.stderr
    quiet = CliRunner().invoke(command, [REPO, "--quiet"], catch_exceptions=False)
    assert quiet.stdout == told.stdout and quiet.stderr == ""
    with pytest.raises(ModelError, match="no such folder or model"):
        CliRunner().invoke(command, ["hunyuan"], catch_exceptions=False)
    nothing = CliRunner().invoke(command, [], catch_exceptions=False)
    assert nothing.exit_code == 0 and "qwen-image " in nothing.stdout and "get one: qwenimg pull NAME" in nothing.stdout


def test_the_bar_on_a_terminal(fake, monkeypatch):
    import io

    from qwenimg.cli.commands.pull import ByteBar

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    bar = ByteBar(quiet=False)
    pull(REPO, echo=bar.line, progress=bar.update)
    total = bar._bar.total
    assert bar._bar.n == total > 0
    bar.close()
    shown = terminal.getvalue()
    assert shown.isascii() or "█" in shown
    assert "free\n" in shown


def test_lines_where_there_is_no_terminal(fake, monkeypatch, capsys):
    from qwenimg.cli.commands import pull as module

    monkeypatch.setattr(module, "EVERY", 0.0)
    bar = module.ByteBar(quiet=False)
    bar.update(FIRST, 3 * 10**9, 4 * 10**9)
    assert capsys.readouterr().err == f"3.00 of 4.00 GB (75%), {FIRST}\n"


def test_the_oracle_hashes_as_git_does():
    """The hub's names of small files, from git's documentation of an empty blob, and of its example."""
    assert digest_of("a.json", b"") == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
    assert digest_of("a.txt", b"test content\n") == "d670460b4b4aece5915caf5c68d12f560a9fe3e4"
    assert hashlib.sha256(b"").hexdigest() == digest_of("a.safetensors", b"")
    assert is_lfs(FIRST) and json.loads(tiny_files()["model_index.json"])


def test_one_file_of_a_repository(fake, cache):
    """A LoRA: that file alone, where `--lora` finds it."""
    name = "vae/diffusion_pytorch_model.safetensors"
    folder, _, _ = pulled(f"{REPO}/{name}")
    found = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir()]
    assert found == [name] and (folder / name).read_bytes() == fake.files[name]
    assert loras.find_file(f"{REPO}/{name}") == folder / name
    assert "has no nothing.safetensors" in refused(pulled, f"{REPO}/nothing.safetensors")
    fake.files = {"README.md": b"x", "style.safetensors": b"y"}
    assert f"qwenimg pull {REPO}/style.safetensors" in refused(pulled, REPO)
