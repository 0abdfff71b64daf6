"""What tests of several rooms share of `test_hub`."""

from __future__ import annotations

import socket
from collections import namedtuple

import pytest
from huggingface_hub import constants

from qwenimg.common.hub.pull import pull
from qwenimg.common.transfer import http
from support.fake_hub import COMMIT, REPO, SHARDS, digest_of, running

FIRST = f"transformer/{next(iter(SHARDS))}"
SMALL = "transformer/config.json"
UNUSED = ("README.md", "pytorch_model.bin", "transformer/modeling.py", "vae/diffusion_pytorch_model.fp16.safetensors")
TOKEN = "hf_secret"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty Hugging Face cache."""
    folder = tmp_path / "hf"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder


@pytest.fixture
def fake(cache, monkeypatch):
    """A hub without faults, and waits that do not cost time."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(http, "BACKOFF", 0.001)
    monkeypatch.setattr(http, "RETRIES", 3)
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with running() as (server, address):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        yield server


@pytest.fixture
def no_sockets(monkeypatch):
    def blocked(*args, **kwargs):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket, "socket", blocked)
    monkeypatch.setattr(socket, "create_connection", blocked)


def pulled(name=REPO):
    """The folder, the lines told, and the progress."""
    lines, progress = [], []
    folder = pull(name, echo=lines.append, progress=lambda *told: progress.append(told))
    assert all(line.isprintable() and len(line) <= 300 for line in lines)
    print(*lines, sep="\n")
    return folder, lines, progress


def check_complete(folder, files, commit=COMMIT):
    """`folder` holds exactly the files that are used, as links to blobs named by their hash, and main points to it."""
    storage = folder.parent.parent
    assert folder == storage / "snapshots" / commit and (storage / "refs" / "main").read_text() == commit
    used = {path: data for path, data in files.items() if path not in UNUSED}
    found = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir()}
    assert found == set(used)
    for path, data in used.items():
        link = folder / path
        assert link.read_bytes() == data
        assert not link.readlink().is_absolute()
        assert link.resolve() == storage.resolve() / "blobs" / digest_of(path, data)
    assert {p.name for p in (storage / "blobs").iterdir()} == {digest_of(p, d) for p, d in used.items()}


def parts(cache):
    return sorted(cache.rglob("*.qwenimg.part*"))


# Faults of the disk


Usage = namedtuple("Usage", "total used free")
